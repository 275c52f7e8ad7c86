"""Tree attention in plain XLA: group and node folded into one row axis, tree and prefix merged block by block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention.fold import fold, unfold, within_window

# Scores in memory at once: a processor's cache holds them, and a prefix that fills a part of its cache is not read much
# past its end. More scores, or blocks of 128 or 512 keys, did no better.
_SCORES = 1 << 19
_FEWEST_KEYS = 256  # of a block: a product of fewer is slow


class _Sums(NamedTuple):
    """A softmax over the keys seen so far."""

    maximum: jax.Array  # [B, Hkv, R, 1]
    total: jax.Array  # [B, Hkv, R, 1] sum of exp(score - maximum)
    mixed: jax.Array  # [B, Hkv, R, D] the same, times values


@jax.custom_jvp
def _products(rows: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
    """[B, Hkv, R, K] of rows [B, Hkv, R, D] and keys [B, Hkv, K, D]; which keys are seen [B, 1, K, 1] is for gradients.

    An unseen key may be NaN. Its products are masked, and so are their gradients, but 0 times NaN would reach the rows.
    Only gradients pay for clean keys: on one row they would cost a third of the time.
    """
    return jnp.einsum("bhrd,bhkd->bhrk", rows, keys, preferred_element_type=jnp.float32)


@_products.defjvp
def _products_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (rows, keys, seen), (d_rows, d_keys, _) = primals, tangents
    change = _products(d_rows, jnp.where(seen, keys, 0), seen) + _products(rows, d_keys, seen)
    return _products(rows, keys, seen), change


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

    Keys and values are read once per KV head: the group's query heads are further rows of the same product. Tree and
    prefix are not joined, which would copy the cache. Blocks past the longest prefix are not read.
    """
    batch, nodes, q_heads, head_dim = q.shape
    kv_heads, capacity, tree_rows = k_tree.shape[1], k_cache.shape[2], k_tree.shape[2]
    group = q_heads // kv_heads
    rows = group * nodes
    folded = fold(q, kv_heads, nodes=nodes, rows=rows)
    shown, first = within_window(tree_mask, prefix_lengths, window)

    # No score is as low as where a row's maximum starts, and a masked one lies so far below it that its weight is 0.
    lowest = jnp.finfo(jnp.float32).min

    def look(sums: _Sums, keys: jax.Array, values: jax.Array, visible: jax.Array, seen: jax.Array) -> _Sums:
        """Keys and values [B, Hkv, K, D], which rows see them [B, 1, R or 1, K], and whether any does [B, 1, K, 1]."""
        scores = jnp.where(visible, _products(folded, keys, seen) * head_dim**-0.5, lowest)
        maximum = jax.lax.stop_gradient(jnp.maximum(sums.maximum, scores.max(axis=-1, keepdims=True)))
        weights, fade = jnp.exp(scores - maximum), jnp.exp(sums.maximum - maximum)
        values = jnp.where(seen, values, 0)  # a weight of 0 times NaN is NaN
        mixed = jnp.einsum("bhrk,bhkd->bhrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return _Sums(maximum, sums.total * fade + weights.sum(axis=-1, keepdims=True), sums.mixed * fade + mixed)

    nothing = jnp.zeros((batch, kv_heads, rows, 1), jnp.float32)
    sums = _Sums(nothing + lowest / 2, nothing, jnp.zeros(folded.shape, jnp.float32))
    in_tree = jnp.broadcast_to(shown[:, None, None], (batch, 1, group, nodes, tree_rows))
    in_tree = in_tree.reshape(batch, 1, rows, tree_rows)
    sums = look(sums, k_tree, v_tree, in_tree, tree_mask.any(axis=1)[:, None, :, None])

    block = min(max(_SCORES // max(batch * kv_heads * rows, 1), _FEWEST_KEYS), capacity)

    def look_at_block(start: jax.Array | int, sums: _Sums) -> _Sums:
        # The last block begins earlier where it would go past the end, and leaves out what the one before it had.
        begin = jnp.minimum(start, capacity - block)
        keys, values = (jax.lax.dynamic_slice_in_dim(cache, begin, block, axis=2) for cache in (k_cache, v_cache))
        places = begin + jnp.arange(block)
        committed = ((places >= start) & (places < prefix_lengths[:, None]))[:, None, None]  # [B, 1, 1, K]
        visible = committed
        if window is not None:
            visible = committed & (places >= jnp.tile(first, (1, group))[:, None, :, None])
        return look(sums, keys, values, visible, committed.swapaxes(-1, -2))

    if capacity <= block:
        sums = look_at_block(0, sums) if capacity else sums
    else:
        longest = prefix_lengths.max()
        step = lambda i, sums: jax.lax.cond(i * block < longest, look_at_block, lambda _, sums: sums, i * block, sums)
        sums = jax.lax.fori_loop(0, -(-capacity // block), step, sums)
    out = sums.mixed / jnp.where(sums.total == 0, 1, sums.total)
    return unfold(out, fed=nodes, q_heads=q_heads, nodes=nodes).astype(q.dtype)
