"""Committing known tokens: a prompt, or what the last round emitted, fed to a model as a chain."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax.types import Forward, ForwardOut, PyTree, TreeMask

CHUNK = 128  # rows of a prompt that one pass takes; the attention kernels' largest tree


def extend(
    forward: Forward,
    params: PyTree,
    cache: PyTree,
    tokens: jax.Array,
    counts: jax.Array,
    *,
    before: jax.Array | None = None,
) -> tuple[jax.Array, PyTree]:
    """Feed the first counts [B] of tokens [B, C] behind each row's prefix and commit them.

    Args:
      forward, params, cache: the model's.
      tokens, counts: what is fed.
      before: [B, C, H] for a draft model that reads the target's hidden states, see ``Model``.

    Returns:
      The logits [B, V] after each row's last fed token (meaningless where counts is 0), and the cache.
    """
    out = _extend(forward, params, cache, tokens, counts, before)
    return out.logits[:, 0], out.cache


def _extend(
    forward: Forward, params: PyTree, cache: PyTree, tokens: jax.Array, counts: jax.Array, before: jax.Array | None
) -> ForwardOut:
    batch, width = tokens.shape
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    mask = TreeMask(cache.lengths, jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width)))
    last = jnp.maximum(counts - 1, 0)[:, None]
    known = {} if before is None else {"before": before}
    out = forward(params, tokens, cache.lengths[:, None] + rows, mask, cache, rows=last, **known)
    return out._replace(cache=out.cache.commit(rows, counts))


def prefill(
    forward: Forward,
    params: PyTree,
    cache: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    before: jax.Array | None = None,
    keep_hidden: bool = False,
) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """Commit prompts of lengths [B] (>= 1), right-padded in tokens [B, T], to an empty cache.

    T is a multiple of ``CHUNK``. As many chunks are fed as the longest prompt needs, so one executable serves all
    lengths.

    Args:
      forward, params, cache: the model's.
      tokens, lengths: the prompts.
      before: [B, T, H] for a draft model that reads the target's hidden states, see ``Model``.
      keep_hidden: whether the hidden states of all rows are wanted; they are the only [B, T, ..] array there is.

    Returns:
      The logits [B, V] after each prompt's last token, the hidden states [B, T, D] (anything behind a prompt's end) or
      None, and the cache.
    """

    def part(start: jax.Array | int, cache: PyTree) -> ForwardOut:
        piece = lambda rows: lax.dynamic_slice_in_dim(rows, start, CHUNK, axis=1)
        counts = jnp.clip(lengths - start, 0, CHUNK)
        return _extend(forward, params, cache, piece(tokens), counts, None if before is None else piece(before))

    def chunk(index: jax.Array, carry: tuple) -> tuple:
        logits, hidden, cache = carry
        start = index * CHUNK
        out = part(start, cache)
        logits = jnp.where((lengths > start)[:, None], out.logits[:, 0], logits)
        if hidden is not None and out.hidden is not None:
            hidden = lax.dynamic_update_slice_in_dim(hidden, out.hidden, start, axis=1)
        return logits, hidden, out.cache

    shapes = jax.eval_shape(lambda: part(0, cache)[:2])
    logits = jnp.zeros((len(lengths), shapes[0].shape[-1]), shapes[0].dtype)
    hidden = jnp.zeros((*tokens.shape, shapes[1].shape[-1]), shapes[1].dtype) if keep_hidden else None
    return lax.fori_loop(0, -(-jnp.max(lengths) // CHUNK), chunk, (logits, hidden, cache))


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="keep_hidden")
def run_prefill(
    forward: Forward,
    init_cache: Callable[[int, int], PyTree],
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    before: jax.Array | None = None,
    keep_hidden: bool = False,
) -> tuple[jax.Array, jax.Array | None, PyTree]:
    """``prefill`` of a new cache, compiled: once for a model, whatever is drafted and verified behind it."""
    cache = init_cache(*tokens.shape)
    return prefill(forward, params, cache, tokens, lengths, before=before, keep_hidden=keep_hidden)
