"""Shapes the kernels work on: query heads folded into rows, masks packed into bits, windows turned into first rows."""

import jax
import jax.numpy as jnp

GPU_ROWS = 64  # rows of one warpgroup's matrix product
_TPU_SUBLANES = 8  # rows of one register


def power_of_two(count: int, *, at_least: int = 1) -> int:
    """The lowest power of two that is no less than ``count`` and ``at_least``."""
    return 1 << (max(count, at_least) - 1).bit_length()


def tpu_nodes(nodes: int) -> int:
    """N as the TPU kernel sees it: a power of two of at least a register's rows."""
    return power_of_two(nodes, at_least=_TPU_SUBLANES)


def round_up(count: int, step: int) -> int:
    """The lowest multiple of ``step`` that is no less than ``count``."""
    return -(-count // step) * step


def fold(q: jax.Array, kv_heads: int, *, nodes: int, rows: int) -> jax.Array:
    """Make a group's heads further rows: [B, N, Hq, D] -> [B, Hkv, rows, D], row = head in group * nodes + node."""
    batch, fed, q_heads, head_dim = q.shape
    group = q_heads // kv_heads
    q = jnp.pad(q, ((0, 0), (0, nodes - fed), (0, 0), (0, 0)))
    q = q.reshape(batch, nodes, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * nodes, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, rows - group * nodes), (0, 0)))


def unfold(out: jax.Array, *, fed: int, q_heads: int, nodes: int) -> jax.Array:
    """Undo ``fold``: [B, Hkv, rows, D] -> [B, fed, Hq, D]."""
    batch, kv_heads, _, head_dim = out.shape
    group = q_heads // kv_heads
    out = out[:, :, : group * nodes].reshape(batch, kv_heads, group, nodes, head_dim)[:, :, :, :fed]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, fed, q_heads, head_dim)


def within_window(tree_mask: jax.Array, prefix_lengths: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Restrict each row to the last ``window`` positions that end with its own.

    A row's position is the prefix's length plus the tree rows it sees, minus one for itself; as ancestors come before
    their descendants, a tree row it sees is as many positions back as there are seen rows behind it.

    Returns:
      (tree_mask [B, N, M] without the rows too far back, first cache row each row sees [B, N] int32).
    """
    if window is None:
        return tree_mask, jnp.zeros(tree_mask.shape[:2], jnp.int32)
    from_end = jnp.cumsum(tree_mask[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
    first = prefix_lengths[:, None] + from_end[..., 0] - window
    return tree_mask & (from_end <= window), jnp.maximum(first, 0)


def pack(tree_mask: jax.Array, first: jax.Array, *, nodes: int, words: int) -> jax.Array:
    """What each row may see, as integers: [B, nodes, words + 1] int32.

    Bit i of word w says whether the row sees tree row 32 w + i; the last column is the first cache row it sees. Padding
    sees nothing of the tree.
    """
    batch, fed, tree_rows = tree_mask.shape
    bits = jnp.pad(tree_mask, ((0, 0), (0, nodes - fed), (0, 32 * words - tree_rows)))
    bits = bits.reshape(batch, nodes, words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    packed = jax.lax.bitcast_convert_type(bits.sum(axis=-1, dtype=jnp.uint32), jnp.int32)
    first = jnp.pad(first, ((0, 0), (0, nodes - fed)))
    return jnp.concatenate([packed, first[..., None]], axis=-1)


def clean_tree(rows: jax.Array, tree_mask: jax.Array, padded: int) -> jax.Array:
    """Tree keys or values [B, Hkv, M, D] -> [B, Hkv, padded, D], 0 where no node sees them: they may hold NaN."""
    seen = tree_mask.any(axis=1)[:, None, :, None]
    return jnp.pad(jnp.where(seen, rows, 0), ((0, 0), (0, 0), (0, padded - rows.shape[2]), (0, 0)))


def never_empty(cache: jax.Array) -> jax.Array:
    """A cache without rows gets some, since a kernel cannot take an array without elements. Nobody reads them."""
    return cache if cache.shape[2] else jnp.zeros((*cache.shape[:2], 64, cache.shape[3]), cache.dtype)
