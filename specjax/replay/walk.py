"""Replaying trees over a rank trace: every tree is an automaton that reads the ranks of the text's tokens."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.replay.ranks import RankTrace
from specjax.tree import Topology, check_schedule

TOGETHER = 256  # trees that are replayed side by side: their tables stay in a processor's cache

type Tree = Sequence[int] | Sequence[Sequence[int]] | Topology


class ReplayedRound(NamedTuple):
    """One round of one prompt, counted as in ``specjax.Round``."""

    accepted: int  # emitted tokens that were drafted
    emitted: int  # the accepted ones and the next, cut at a stop token or the budget


def tokens_per_step(trace: RankTrace, trees: Iterable[Tree]) -> np.ndarray:
    """Emitted tokens per verify step with each tree: what ``generate(..).stats.tokens_per_step`` would say.

    Args:
      trace: of one draft, or of several whose trees are merged.
      trees: expansion schedules, lists of paths, or Topologies, in any mixture.

    Returns:
      [I] float64, one for each tree; nan where every text ended at its first token.

    Raises:
      ValueError: for what is no tree.
    """
    steps = verify_steps(trace, trees).sum(1)
    return np.where(steps > 0, np.sum(trace.drafted) / np.maximum(steps, 1), np.nan)


def verify_steps(trace: RankTrace, trees: Iterable[Tree]) -> np.ndarray:
    """Verify steps [I, P] of each tree on each prompt; arguments are those of ``tokens_per_step``.

    Raises:
      ValueError: for what is no tree.
    """
    tables = pack([transitions(tree) for tree in trees])
    together = max(1, min(TOGETHER, len(tables)))
    spare = np.broadcast_to(tables[:1], (-len(tables) % together, *tables.shape[1:]))
    blocks = np.concatenate([tables, spare]).reshape(-1, together, *tables.shape[1:])
    steps = _count(blocks, *_columns(trace, tables))
    return np.asarray(steps).reshape(-1, len(trace.lengths))[: len(tables)]


def rounds(trace: RankTrace, tree: Tree) -> list[list[ReplayedRound]]:
    """Every round of every prompt with one tree: what ``generate(..).rounds`` would say.

    Raises:
      ValueError: for what is no tree.
    """
    table = pack([transitions(tree)])
    ends = np.asarray(_round_ends(table, *_columns(trace, table)))[:, 0]  # [T - 1, P]
    found = []
    for row, length in enumerate(trace.lengths.tolist()):
        last = [0, *(np.flatnonzero(ends[: max(length - 1, 0), row]) + 1).tolist()]  # tokens that end a round
        whole = [ReplayedRound(end - begin - 1, end - begin) for begin, end in zip(last, last[1:])]
        # A stop token or the budget cuts a round that was going on: all it emitted was drafted.
        left = length - 1 - last[-1]
        found.append(whole + [ReplayedRound(left, left)] * (left > 0))
    return found


def transitions(tree: Tree) -> np.ndarray:
    """A tree's automaton [states, ranks]: the state behind a token of each rank, -1 where there is no child.

    State 0 is the root. In general a state is a node; the nodes of a schedule at one depth all go on alike, so there it
    is a depth.

    Raises:
      ValueError: for what is no tree.
    """
    given: Any = tree
    if isinstance(given, list | tuple) and any(isinstance(entry, Sequence) for entry in given):
        given = Topology.from_paths(given)
    if isinstance(given, Topology):
        children = np.flatnonzero(np.asarray(given.valid))[1:]
        parents, ranks = np.asarray(given.parents)[children], np.asarray(given.ranks)[children]
        table = np.full((given.shape.num_nodes, ranks.max(initial=0) + 1), -1, np.int16)
        table[parents, ranks] = children
        return table
    check_schedule(given)
    table = np.full((len(given) + 1, max(given)), -1, np.int16)
    for depth, arity in enumerate(given):
        table[depth, :arity] = depth + 1
    return table


def pack(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Automata of one size [I, N, R] int16: the last state is the end of a round, the last column any greater rank."""
    sizes = [max((table.shape[axis] for table in tables), default=0) + 1 for axis in (0, 1)]
    states, ranks = (-(-size // 16) * 16 for size in sizes)  # a handful of sizes, so that little is compiled
    packed = np.full((len(tables), states, ranks), states - 1, np.int16)
    for into, table in zip(packed, tables):
        into[: table.shape[0], : table.shape[1]] = np.where(table < 0, states - 1, table)
    return packed


def _columns(trace: RankTrace, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns [T - 1, S, P] that the tokens behind the first are read in, and how many [P] there are."""
    ranks = np.minimum(trace.ranks, tables.shape[2] - 1).astype(np.int16)
    return ranks.transpose(2, 0, 1)[1:], np.maximum(trace.lengths - 1, 0)


@jax.jit
def _round_ends(tables: jax.Array, columns: jax.Array, counts: jax.Array) -> jax.Array:
    """[T - 1, I, P] whether a round ends with each token of the text, for want of a child that carries it."""
    num_trees, num_states, num_ranks = tables.shape
    _, num_drafts, num_prompts = columns.shape
    flat = tables.reshape(-1).astype(jnp.int32) * num_ranks  # a state is where its row begins
    row = jnp.arange(num_trees, dtype=jnp.int32)[:, None] * (num_states * num_ranks)
    end = (num_states - 1) * num_ranks

    def read(states: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at, column = token
        states = flat.at[row + states + column[:, None].astype(jnp.int32)].get(mode="promise_in_bounds")
        # A merged tree has a node as long as one draft has drafted all of the path to it.
        ended = jnp.all(states == end, axis=0)
        return jnp.where(ended, 0, states), ended & (at < counts)

    start = jnp.zeros((num_drafts, num_trees, num_prompts), jnp.int32)
    return lax.scan(read, start, (jnp.arange(len(columns)), columns))[1]


@jax.jit
def _count(blocks: jax.Array, columns: jax.Array, counts: jax.Array) -> jax.Array:
    """[blocks, I, P] verify steps."""

    def block(tables: jax.Array) -> jax.Array:
        ends = _round_ends(tables, columns, counts)
        # The text's last token ends a round whether or not it has a child.
        before_last = jnp.arange(len(columns))[:, None, None] < counts - 1
        return jnp.sum(ends & before_last, axis=0, dtype=jnp.int32) + (counts > 0)

    return lax.map(block, blocks)
