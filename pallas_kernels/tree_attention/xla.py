"""Tree attention in plain XLA: group and node folded into one row axis, prefix and tree as two blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.fold import within_window


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
    """See ``api.tree_attention``.

    Keys and values are read once per KV head: the group's query heads are further rows of the same product. The two
    blocks share one maximum, so they are one softmax without the copy that joining them would cost.
    """
    batch, rows, q_heads, head_dim = q.shape
    kv_heads, capacity, tree_rows = k_tree.shape[1], k_cache.shape[2], k_tree.shape[2]
    group = q_heads // kv_heads

    def fold(x: jax.Array) -> jax.Array:
        return (
            x.reshape(batch, rows, kv_heads, group, head_dim)
            .transpose(0, 2, 3, 1, 4)
            .reshape(batch, kv_heads, group * rows, head_dim)
        )

    committed = (jnp.arange(capacity) < prefix_lengths[:, None])[:, None, None]  # [B, 1, 1, S]
    shown, first = within_window(tree_mask, prefix_lengths, window)
    in_prefix = committed
    if window is not None:
        in_prefix = committed & (jnp.arange(capacity) >= jnp.tile(first, (1, group))[:, None, :, None])
    in_tree = jnp.broadcast_to(shown[:, None, None], (batch, 1, group, rows, tree_rows))
    in_tree = in_tree.reshape(batch, 1, group * rows, tree_rows)

    lowest = jnp.finfo(jnp.float32).min
    folded = fold(q)

    def score(keys: jax.Array, visible: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhrd,bhsd->bhrs", folded, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible, scores * head_dim**-0.5, lowest)

    prefix_scores, tree_scores = score(k_cache, in_prefix), score(k_tree, in_tree)
    maximum = jnp.maximum(
        prefix_scores.max(axis=-1, keepdims=True, initial=lowest), tree_scores.max(axis=-1, keepdims=True)
    )
    maximum = jax.lax.stop_gradient(maximum)
    # The mask once more: in a row that sees nothing the maximum is the masked score itself, and exp(0) is not 0.
    prefix_weights = jnp.where(in_prefix, jnp.exp(prefix_scores - maximum), 0)
    tree_weights = jnp.where(in_tree, jnp.exp(tree_scores - maximum), 0)
    total = prefix_weights.sum(axis=-1, keepdims=True) + tree_weights.sum(axis=-1, keepdims=True)

    def weigh(weights: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
        # A weight of 0 times NaN is NaN, so values that nobody may read become 0.
        values = jnp.where(seen, values, 0)
        return jnp.einsum("bhrs,bhsd->bhrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    mixed = weigh(prefix_weights, v_cache, committed.swapaxes(-1, -2)) + weigh(
        tree_weights, v_tree, tree_mask.any(axis=1)[:, None, :, None]
    )
    out = mixed / jnp.where(total == 0, 1, total)
    out = out.reshape(batch, kv_heads, group, rows, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, q_heads, head_dim).astype(q.dtype)
