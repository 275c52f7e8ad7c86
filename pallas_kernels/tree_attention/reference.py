"""Tree attention written to be believed: one softmax over prefix and tree, heads repeated, float32."""

import jax
import jax.numpy as jnp


def tree_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_tree: jax.Array,
    v_tree: jax.Array,
    *,
    prefix_lengths: jax.Array,
    tree_mask: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """See ``api.tree_attention``."""
    batch, rows, q_heads, head_dim = q.shape
    capacity = k_cache.shape[2]
    group = q_heads // k_tree.shape[1]

    in_prefix = jnp.arange(capacity) < prefix_lengths[:, None]  # [B, S]
    in_prefix = jnp.broadcast_to(in_prefix[:, None], (batch, rows, capacity))
    visible = jnp.concatenate([in_prefix, tree_mask], axis=-1)  # [B, N, S + M]
    if window is not None:
        # A row's visible keys stand in the order of their positions and end with its own.
        from_end = jnp.cumsum(visible[..., ::-1], axis=-1)[..., ::-1]
        visible &= from_end <= window

    keys = jnp.concatenate([k_cache, k_tree], axis=2).astype(jnp.float32)
    values = jnp.concatenate([v_cache, v_tree], axis=2).astype(jnp.float32)
    seen_by_any = visible.any(axis=1)[:, None, :, None]  # [B, 1, S + M, 1]
    keys = jnp.repeat(jnp.where(seen_by_any, keys, 0), group, axis=1)  # [B, Hq, S + M, D]
    values = jnp.repeat(jnp.where(seen_by_any, values, 0), group, axis=1)

    scores = jnp.einsum("bnhd,bhsd->bhns", q.astype(jnp.float32), keys) * head_dim**-0.5
    weights = jax.nn.softmax(scores, axis=-1, where=visible[:, None])
    weights = jnp.where(visible[:, None], weights, 0)
    return jnp.einsum("bhns,bhsd->bnhd", weights, values).astype(q.dtype)
