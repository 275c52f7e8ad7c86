"""Shared inputs of the core's tests: small models, shapes that share executables, references in plain Python."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.models import DecoderConfig, init_model
from specjax.sampling import Streams, fold_in
from specjax.testing import context_model, fresh_logits
from specjax.types import Model, RoundKeys

TINY = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)

# Room for every topology the tests draft: topologies padded to it share one executable per drafter and batch size.
BOUNDS = sj.TreeShape(num_nodes=24, widths=(1, 4, 6, 6), arities=(4, 3, 3, 2))
VOCAB = 16
PERFECT, HOSTILE, MIXED = 0, 1, 2


@functools.cache
def tiny(seed: int) -> Model:
    """A random decoder whose logits really depend on positions: freshly initialised weights are too small for that."""
    model = init_model(TINY, jax.random.key(seed))
    return model._replace(params=jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim > 1 else leaf, model.params))


@functools.cache
def context(seed: int, eos_ids: tuple[int, ...] = ()) -> Model:
    """A context model of VOCAB tokens; all share their forward, so only their data differ."""
    return context_model(seed, VOCAB, eos_ids=eos_ids)


def row_kinds(model: Model, kinds: Sequence[int]) -> Model:
    """A draft that is perfect, hostile or mixed in each row of the batch. The kinds are data."""
    return model._replace(
        forward=_row_kinds_forward(model.forward), params=(model.params, jnp.asarray(kinds, jnp.int32))
    )


@functools.cache
def _row_kinds_forward(forward):
    def altered(params, tokens, positions, mask, cache, *, rows=None):
        own, kinds = params
        out = forward(own, tokens, positions, mask, cache, rows=rows)
        if rows is not None:
            tokens, positions = (jnp.take_along_axis(field, rows, axis=1) for field in (tokens, positions))
        kind = kinds[:, None, None]
        agrees = ((tokens * 7 + positions * 13) % 5 < 3)[..., None]
        some = jnp.where(agrees, out.logits, jnp.roll(out.logits, 1, axis=-1))
        return out._replace(logits=jnp.where(kind == HOSTILE, -out.logits, jnp.where(kind == MIXED, some, out.logits)))

    return altered


def topology(spec) -> sj.Topology:
    """A topology from a schedule (tuple), a chain's length (int) or paths (list), padded to BOUNDS."""
    return tight_topology(spec).pad(BOUNDS)


def tight_topology(spec) -> sj.Topology:
    """A topology from a schedule (tuple), a chain's length (int) or paths (list)."""
    if isinstance(spec, int):
        return sj.Topology.chain(spec)
    return sj.Topology.from_schedule(spec) if isinstance(spec, tuple) else sj.Topology.from_paths(spec)


def prompts_of(lengths: Sequence[int], vocab_size: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def slot_paths(parents: np.ndarray, valid: np.ndarray) -> dict[int, list[int]]:
    """Per valid slot, the slots from the root (left out) down to it."""
    paths: dict[int, list[int]] = {0: []}
    for slot in np.flatnonzero(valid):
        chain, at = [], int(slot)
        while at != 0:
            chain.append(at)
            at = int(parents[at])
        paths[int(slot)] = chain[::-1]
    return paths


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax of the last axis, in float64."""
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def chi_square_z(counts: np.ndarray, law: np.ndarray) -> float:
    """How far chi-square lies above its mean, in standard deviations; cells expected fewer than 5 times are joined.

    ``counts`` and ``law`` [..] are of the same outcomes; ``law`` need not sum to 1.
    """
    counts, law = np.ravel(counts), np.ravel(law)
    expected = law / law.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "an outcome of probability zero was seen"
    rare = expected < 5
    counts, expected = (np.append(field[~rare], field[rare].sum()) for field in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if not freedom:  # it is certain
        return 0.0
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def logits_after(model: Model, tokens: Sequence[int], padded: int = 64) -> np.ndarray:
    """Logits [V] after a text: one whole pass without a cache, padded behind so that lengths share an executable."""
    return fresh_logits(model, [*tokens, *[0] * (padded - len(tokens))])[len(tokens) - 1]


def round_keys(seeds: Sequence[int], lengths: Sequence[int]) -> RoundKeys:
    """The randomness of a round of requests with these seeds and lengths."""
    streams, lengths = Streams.from_seeds(jnp.asarray(seeds, jnp.uint32)), jnp.asarray(lengths, jnp.int32)
    return RoundKeys(fold_in(streams.draft, lengths), fold_in(streams.path, lengths), streams.emit, lengths)
