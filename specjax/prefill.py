"""Committing known tokens: a prompt, or what the last round emitted, fed to a model as a chain."""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import Forward, PyTree, TreeMask

CHUNK = 128  # rows of a prompt that one pass takes; the attention kernels' largest tree


def extend(
    forward: Forward, params: PyTree, cache: PyTree, tokens: jax.Array, counts: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Feed the first counts [B] of tokens [B, C] behind each row's prefix and commit them.

    Returns:
      The logits [B, V] after each row's last fed token (meaningless where counts is 0), and the cache.
    """
    batch, width = tokens.shape
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    mask = TreeMask(cache.lengths, jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width)))
    last = jnp.maximum(counts - 1, 0)[:, None]
    out = forward(params, tokens, cache.lengths[:, None] + rows, mask, cache, rows=last)
    return out.logits[:, 0], out.cache.commit(rows, counts)


def prefill(
    forward: Forward, params: PyTree, cache: PyTree, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Commit prompts of lengths [B] (>= 1), right-padded in tokens [B, T], to an empty cache.

    T is a multiple of ``CHUNK``. As many chunks are fed as the longest prompt needs, so one executable serves all
    lengths.

    Returns:
      The logits [B, V] after each prompt's last token, and the cache.
    """

    def chunk(index: jax.Array, carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        logits, cache = carry
        start = index * CHUNK
        counts = jnp.clip(lengths - start, 0, CHUNK)
        new, cache = extend(forward, params, cache, lax.dynamic_slice_in_dim(tokens, start, CHUNK, axis=1), counts)
        return jnp.where((counts > 0)[:, None], new, logits), cache

    shapes = jax.eval_shape(lambda: extend(forward, params, cache, tokens[:, :CHUNK], lengths)[0])
    empty = jnp.zeros(shapes.shape, shapes.dtype)
    return lax.fori_loop(0, -(-jnp.max(lengths) // CHUNK), chunk, (empty, cache))
