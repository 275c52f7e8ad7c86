"""The decode loop: one round of draft, score, verify and commit, and the loops around it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import prefill
from specjax.mask import ancestor_mask
from specjax.sampling import Streams, Warp, argmax, fold_in, sample_at
from specjax.tree import TokenTree
from specjax.types import Acceptance, Emission, Forward, PyTree, RoundKeys, TreeMask

RUNNING, EOS, LENGTH = 0, 1, 2  # why a row stopped


class Spec(NamedTuple):
    """Everything static of a decode: functions and bounds. Equal specs share compiled code."""

    forward: Forward
    init_cache: Callable[[int, int], PyTree]
    max_positions: int
    draft_init: Callable
    draft_propose: Callable
    draft_commit: Callable
    verify: Callable
    max_depth: int
    reads_hidden: bool = False  # whether the drafter reads the target's hidden states
    draft_sizes: tuple[Callable, ...] = ()  # several functions instead of draft_propose,
    draft_choose: Callable | None = None  # and which of them makes a round


class Params(NamedTuple):
    """The data that stays the same from round to round."""

    target: PyTree
    drafter: PyTree


class Rounds(NamedTuple):
    """What happened in each round, filed under the position of the round's root (every round has another).

    Who proposed a token is filed under the token's own position.
    """

    accepted: jax.Array  # [B, T] int32 accepted drafted tokens, of those emitted
    emitted: jax.Array  # [B, T] int32; 0 where no round began
    drafted: jax.Array  # [B, T, D] int32 drafted nodes at depth 1..D
    proposers: jax.Array  # [B, T] uint32, bit s: source s proposed the token; 0 for the target's own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch between two rounds. Every array has a leading batch axis: a row is a request, whole and independent."""

    tokens: jax.Array  # [B, T] int32 prompt, then what was emitted
    lengths: jax.Array  # [B] int32 tokens so far; the last one is the next root, not yet in the target's cache
    limits: jax.Array  # [B] int32 length at which the row's budget is spent
    reasons: jax.Array  # [B] int32 RUNNING, EOS or LENGTH
    eos_ids: jax.Array  # [B, E] int32, padded with -1
    streams: Streams  # [B] keys
    warp: Warp  # [B] fields
    draft_warp: Warp  # [B] fields
    cache: PyTree  # the target's
    drafter: PyTree  # the drafter's state
    rounds: Rounds

    @property
    def running(self) -> jax.Array:
        """[B] bool, rows that are not finished."""
        return self.reasons == RUNNING


class RoundInfo(NamedTuple):
    """What one round did, for a person to look at."""

    emission: Emission
    accepted: jax.Array  # [B] int32, of the emitted tokens those that were drafted
    drafted: jax.Array  # [B, D] int32 drafted nodes by depth
    proposers: jax.Array  # [B, D] uint32, as in ``Rounds``, of the accepted tokens; 0 behind them


_streams = jax.jit(Streams.from_seeds)


@jax.jit
def _at(rows: jax.Array, places: jax.Array) -> jax.Array:
    """The rows [B, 1, D] of rows [B, T, D] at places [B]."""
    return jnp.take_along_axis(rows, places[:, None, None], axis=1)


@jax.jit
def _first_tokens(logits: jax.Array, lengths: jax.Array, streams: Streams, warp: Warp) -> jax.Array:
    sampled = lambda: sample_at(streams.emit, lengths, warp(logits))
    return lax.cond(jnp.any(warp.temperature > 0), sampled, lambda: argmax(logits))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    draft_commit,
    max_depth: int,
    drafter_params: PyTree,
    drafter: PyTree,
    first: jax.Array,
    last_hidden: jax.Array | None,
    tokens: jax.Array,
    lengths: jax.Array,
    budgets: jax.Array,
    eos_ids: jax.Array,
    streams: Streams,
    warp: Warp,
    draft_warp: Warp,
) -> DecodeState:
    """The state behind prefill, the first tokens [B] emitted; but for the target's cache, which is not copied."""
    (batch, capacity), width = tokens.shape, max_depth + 1
    state = DecodeState(
        tokens=tokens,
        lengths=lengths,
        limits=lengths + budgets,
        reasons=jnp.where(budgets > 0, RUNNING, LENGTH),
        eos_ids=eos_ids,
        streams=streams,
        warp=warp,
        draft_warp=draft_warp,
        cache=None,
        drafter=None,
        rounds=Rounds(
            jnp.zeros((batch, capacity), jnp.int32),
            jnp.zeros((batch, capacity), jnp.int32),
            jnp.zeros((batch, capacity, max_depth), jnp.int32),
            jnp.zeros((batch, capacity), jnp.uint32),
        ),
    )
    emitted = jnp.zeros((batch, width), jnp.int32).at[:, 0].set(first)
    state, emission = _emit(state, emitted, jnp.ones_like(lengths), jnp.zeros((batch, width), jnp.int32))
    # As after a round whose tree was the prompt's last token.
    return dataclasses.replace(state, drafter=draft_commit(drafter_params, drafter, emission, last_hidden))


def run_start(
    spec: Spec,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    budgets: jax.Array,
    eos_ids: jax.Array,
    seeds: jax.Array,
    warp: Warp,
    draft_warp: Warp,
) -> DecodeState:
    """Prefill prompts and emit each row's first token.

    In several executables, so that those which take long to compile serve all drafters, trees and verifiers.

    Args:
      spec, params: what to run.
      tokens: [B, T] int32 right-padded prompts; T holds prompt and budget, and is a multiple of ``prefill.CHUNK``.
      lengths: [B] int32 prompt lengths, at least 1.
      budgets: [B] int32 tokens to emit at most.
      eos_ids: [B, E] int32, padded with -1.
      seeds: [B] uint32.
      warp, draft_warp: [B] fields.
    """
    logits, hidden, cache = prefill.run_prefill(
        spec.forward, spec.init_cache, params.target, tokens, lengths, keep_hidden=spec.reads_hidden
    )
    streams = _streams(seeds)
    state = _begin(
        spec.draft_commit,
        spec.max_depth,
        params.drafter,
        spec.draft_init(params.drafter, tokens, lengths, hidden),
        _first_tokens(logits, lengths, streams, warp),
        None if hidden is None else _at(hidden, lengths - 1),
        tokens,
        lengths,
        budgets,
        eos_ids,
        streams,
        warp,
        draft_warp,
    )
    return dataclasses.replace(state, cache=cache)


def round(spec: Spec, params: Params, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """Draft a tree, score it in one pass of the target, verify it, commit the accepted path (SpecInfer, Figure 2)."""
    if spec.draft_choose is None:
        return _round(spec, params, spec.draft_propose, state)
    # A loop for each size, of which one runs, once: out of a branch of lax.switch XLA copies whatever another branch
    # leaves alone, and that is the caches.
    size = spec.draft_choose(params.drafter, state.drafter, state.running)
    info = jax.eval_shape(functools.partial(_round, spec, params, spec.draft_propose), state)[1]
    carry = state, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), info), size
    for own, propose in enumerate(spec.draft_sizes):
        chosen = lambda carry, own=own: carry[2] == own
        once = lambda carry, propose=propose: (*_round(spec, params, propose, carry[0]), jnp.full_like(carry[2], -1))
        carry = lax.while_loop(chosen, once, carry)
    return carry[:2]


def _round(spec: Spec, params: Params, propose: Callable, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """A round with trees of one size."""
    rows = jnp.arange(state.tokens.shape[0])
    keys = RoundKeys(
        draft=fold_in(state.streams.draft, state.lengths),
        path=fold_in(state.streams.path, state.lengths),
        emit=state.streams.emit,
        positions=state.lengths,
    )
    tree, drafter = propose(
        params.drafter, keys, state.drafter, state.tokens[rows, state.lengths - 1], state.draft_warp
    )

    prefix = state.cache.lengths
    # Nodes past the model's last position cannot be emitted, since budgets end there; they only must not index past it.
    positions = jnp.minimum(prefix[:, None] + tree.depths, spec.max_positions - 1)
    mask = TreeMask(prefix, jax.vmap(ancestor_mask)(tree.parents))
    out = spec.forward(params.target, tree.tokens, positions, mask, state.cache)

    acceptance = spec.verify(keys, tree, out.logits, state.warp)
    spare = ((0, 0), (0, spec.max_depth - tree.max_depth))  # beside deeper trees of other sizes
    acceptance = acceptance._replace(path=jnp.pad(acceptance.path, spare), tokens=jnp.pad(acceptance.tokens, spare))

    before = state.lengths
    state, emission = _emit(state, acceptance.tokens, acceptance.num_accepted + 1, acceptance.path)
    accepted = jnp.minimum(acceptance.num_accepted, emission.counts)
    by_depth = tree.depths[:, None, :] == jnp.arange(1, spec.max_depth + 1)[:, None]
    drafted = jnp.sum(by_depth & tree.valid[:, None, :], axis=-1)
    drafted = jnp.where(emission.counts[:, None] > 0, drafted, 0)
    steps = jnp.arange(spec.max_depth)
    proposers = jnp.where(steps < accepted[:, None], _proposers(tree, acceptance), 0)
    filed = jnp.where(emission.counts > 0, before - 1, state.tokens.shape[1])
    into = lambda record, values: record.at[rows, filed].set(values, mode="drop")
    records = state.rounds
    state = dataclasses.replace(
        state,
        # One row less than emitted: the last token emitted is the next root. One more: this round's root.
        cache=out.cache.commit(emission.path, emission.counts),
        drafter=spec.draft_commit(params.drafter, drafter, emission, out.hidden if spec.reads_hidden else None),
        rounds=Rounds(
            into(records.accepted, accepted),
            into(records.emitted, emission.counts),
            into(records.drafted, drafted),
            # What lies behind the accepted tokens is overwritten when it is emitted.
            records.proposers.at[rows[:, None], before[:, None] + steps].set(proposers, mode="drop"),
        ),
    )
    return state, RoundInfo(emission, accepted, drafted, proposers)


def decode(
    spec: Spec, params: Params, state: DecodeState, *, loop_fn: Callable[..., Any] = lax.while_loop
) -> DecodeState:
    """Run rounds until every row is finished. ``loop_fn`` may be a Python loop, for debugging."""
    return loop_fn(lambda state: jnp.any(state.running), lambda state: round(spec, params, state)[0], state)


def replace_row(state: DecodeState, row: int | jax.Array, other: DecodeState) -> DecodeState:
    """Put the single request of ``other`` (a batch of one with the same buffers) into a row of ``state``.

    Nothing of the row's former request stays, so slots can be reused while the other rows go on.
    """
    return jax.tree.map(lambda mine, new: mine.at[row].set(new[0]), state, other)


def _proposers(tree: TokenTree, acceptance: Acceptance) -> jax.Array:
    """[B, D] uint32, bit s: source s drew the path's next token at this node, among whatever else it drew there."""
    rows, nodes = jnp.arange(tree.tokens.shape[0])[:, None], acceptance.path[:, :-1]
    drawn = tree.draw_valid[rows, nodes] & (tree.draw_tokens[rows, nodes] == acceptance.tokens[:, :-1, None])
    bits = [
        jnp.any(drawn & (tree.draw_source == source)[:, None], axis=-1).astype(jnp.uint32) << source
        for source in range(len(tree.laws))
    ]
    return sum(bits, jnp.zeros(nodes.shape, jnp.uint32))


def _emit(state: DecodeState, tokens: jax.Array, counts: jax.Array, path: jax.Array) -> tuple[DecodeState, Emission]:
    """Append up to counts [B] of tokens [B, D + 1], cut behind the first stop token and at the row's budget."""
    width = tokens.shape[1]
    places = jnp.arange(width)
    is_eos = jnp.any(tokens[:, :, None] == state.eos_ids[:, None, :], axis=-1)
    counts = jnp.minimum(counts, state.limits - state.lengths)
    stop = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, width + 1)
    stopped = stop <= counts
    counts = jnp.where(state.running, jnp.minimum(counts, stop), 0)
    lengths = state.lengths + counts
    rows = jnp.arange(tokens.shape[0])[:, None]
    where = jnp.where(places < counts[:, None], state.lengths[:, None] + places, state.tokens.shape[1])
    reasons = jnp.where(stopped, EOS, jnp.where(lengths >= state.limits, LENGTH, RUNNING))
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(tokens, mode="drop"),
        lengths=lengths,
        reasons=jnp.where(state.running, reasons, state.reasons),
    )
    return state, Emission(tokens, counts, path)


run_round = jax.jit(round, static_argnums=0, donate_argnums=2)
run_decode = jax.jit(decode, static_argnums=0, donate_argnums=2)
