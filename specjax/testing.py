"""For tests, ours and third parties': tabular and altered models, and references that share no code with the loop."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache
from specjax.conformance import check_drafter, check_verifier
from specjax.sampling import Streams, Warp, sample_at
from specjax.types import ForwardOut, Model, TreeMask

__all__ = [
    "GREEDY",
    "check_drafter",
    "check_verifier",
    "context_model",
    "fresh_logits",
    "hostile",
    "mixed",
    "random_parents",
    "reference_text",
    "table_model",
    "total_variation",
]

GREEDY = Warp(0.0)


def table_model(logits: np.ndarray | Sequence, *, max_positions: int = 1024, eos_ids: tuple[int, ...] = ()) -> Model:
    """A model whose next-token logits depend on the last token only.

    Args:
      logits: [V, V], row = last token; or [V], the same after every token.
      max_positions: its context.
      eos_ids: its stop tokens.
    """
    table = jnp.asarray(logits, jnp.float32)
    table = jnp.broadcast_to(table, (table.shape[-1], table.shape[-1]))
    return Model(_table_forward, table, _table_cache, table.shape[-1], max_positions, eos_ids)


def _table_forward(params, tokens, positions, mask, cache, *, rows=None):
    del positions, mask
    fed = tokens if rows is None else jnp.take_along_axis(tokens, rows, axis=1)
    return ForwardOut(params[fed], None, cache)


def _table_cache(batch: int, capacity: int) -> KVCache:
    return KVCache.create(num_layers=0, batch=batch, num_kv_heads=0, capacity=capacity, head_dim=0)


def context_model(
    seed: int, vocab_size: int, *, scale: float = 2.0, max_positions: int = 1024, eos_ids: tuple[int, ...] = ()
) -> Model:
    """A model whose next-token logits depend on every token it sees and on where it stands, in exact arithmetic.

    The cache holds one whole number per row, drawn for its token and position; their sum over the visible rows chooses
    one of 1024 rows of random logits. So one wrong mask bit, position or committed row gives unrelated logits, equality
    of texts is exact on any device, and compiling it costs little more than a table model. The sum is its hidden state.
    """
    rng = np.random.default_rng(seed)
    marks = jnp.asarray(rng.integers(0, 4096, (max_positions, vocab_size)), jnp.float32)  # sums stay below 2^24
    logits = jnp.asarray(scale * rng.normal(size=(1024, vocab_size)), jnp.float32)
    return Model(_context_forward, (marks, logits), _context_cache, vocab_size, max_positions, eos_ids, hidden_size=1)


def _context_forward(params, tokens, positions, mask, cache, *, rows=None):
    marks, logits = params
    fed = marks[positions, tokens][:, None, :, None]
    cache = cache.append(0, fed, fed)
    kept, beside = cache.k[0][:, 0, :, 0], cache.v_tree[0][:, 0, :, 0]
    committed = jnp.arange(kept.shape[1]) < mask.prefix_lengths[:, None]
    total = jnp.sum(jnp.where(committed, kept, 0), axis=1)[:, None]
    total += jnp.sum(jnp.where(mask.tree_mask, beside[:, None], 0), axis=2)
    wanted = total if rows is None else jnp.take_along_axis(total, rows, axis=1)
    return ForwardOut(logits[wanted.astype(jnp.int32) % 1024], total[..., None], cache)


def _context_cache(batch: int, capacity: int) -> KVCache:
    return KVCache.create(num_layers=1, batch=batch, num_kv_heads=1, capacity=capacity, head_dim=1)


def hostile(model: Model) -> Model:
    """A draft that always likes best what the model likes least."""
    return _altered(model, _negate)


def mixed(model: Model) -> Model:
    """A draft that agrees with the model at about every other node, and is shifted by one token elsewhere."""
    return _altered(model, _shift_some)


def _negate(logits: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    del tokens, positions
    return -logits


def _shift_some(logits: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    agrees = (tokens * 7 + positions * 13) % 5 < 3
    return jnp.where(agrees[..., None], logits, jnp.roll(logits, 1, axis=-1))


def _altered(model: Model, alter: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Model:
    return model._replace(forward=_altered_forward(model.forward, alter))


@functools.cache
def _altered_forward(forward, alter):
    def altered(params, tokens, positions, mask, cache, *, rows=None, **known):
        out = forward(params, tokens, positions, mask, cache, rows=rows, **known)
        if rows is not None:
            tokens, positions = (jnp.take_along_axis(field, rows, axis=1) for field in (tokens, positions))
        return out._replace(logits=alter(out.logits, tokens, positions))

    return altered


def fresh_logits(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Logits [N, V] after each of N tokens, in one causal pass without any cache."""
    count = len(tokens)
    mask = TreeMask(jnp.zeros(1, jnp.int32), jnp.tril(jnp.ones((1, count, count), bool)))
    ids, positions = jnp.asarray([list(tokens)], jnp.int32), jnp.arange(count, dtype=jnp.int32)[None]
    return np.asarray(_fresh(model.forward, model.init_cache, model.params, ids, positions, mask)[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fresh(forward, init_cache, params, ids, positions, mask):
    return forward(params, ids, positions, mask, init_cache(1, 0)).logits


def reference_text(
    model: Model, prompt: Sequence[int], num_tokens: int, *, warp: Warp = GREEDY, seed: int = 0
) -> list[int]:
    """The text of plain decoding, one whole pass per token: no cache, no tree, no loop of the library's."""
    tokens = list(prompt)
    emit = Streams.from_seeds(jnp.asarray([seed], jnp.uint32)).emit
    padded_length = -(-(len(prompt) + num_tokens) // 32) * 32  # causal, so padding behind changes nothing
    for _ in range(num_tokens):
        at = len(tokens)
        logits = fresh_logits(model, tokens + [0] * (padded_length - at))[at - 1]
        if warp.temperature == 0:
            token = int(np.argmax(logits))
        else:
            token = int(_sample(emit, jnp.asarray([at]), warp, logits)[0])
        tokens.append(token)
    return tokens[len(prompt) :]


@jax.jit
def _sample(emit, positions, warp, logits):
    return sample_at(emit, positions, warp(logits)[None])


def random_parents(rng: np.random.Generator, num_nodes: int) -> np.ndarray:
    """Parents [N] of a random tree, parents before children."""
    return np.array([-1, *(rng.integers(0, slot) for slot in range(1, num_nodes))], np.int32)


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of absolute differences of distributions [...]: the most that an event's probability differs by."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).sum() / 2)
