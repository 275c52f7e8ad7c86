"""Whole verifiers summed over every tree and every outcome, for tabular models of a few tokens and levels.

A tabular model is a sequence of arrays: entry d, of shape [V] * (d + 1), holds the law of the next token after each
path of d tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.laws import LAWS
from specjax.sampling import Warp
from specjax.tree import TokenTree
from specjax.types import NodeRule
from specjax.verify.measure import join_sources, subsets
from specjax.verify.paths import PathDecision
from specjax.verify.traverse import node_law

Table = Sequence[Any]  # entry d: [V] * (d + 1)
Schedule = Sequence[Sequence[int]]  # entry d: the draws each source makes at every node of depth d


class Forest(NamedTuple):
    """Every tree that sources can draft, with its probability. T depends on sizes and laws only: forests stack."""

    trees: TokenTree  # NumPy fields [T, ..]
    probs: np.ndarray  # [T]


def enumerate_trees(drafts: Sequence[Table], laws: Sequence[str], schedule: Schedule, *, merge: bool = False) -> Forest:
    """Draft every tree: at each node, source s takes schedule[depth][s] draws from drafts[s] by law s.

    Args:
      drafts: one tabular model per source, NumPy float64.
      laws: the law of each source.
      schedule: draws per depth and source.
      merge: one node for siblings of one token, expanded once; without it, a node for every draw.
    """
    vocab_size, most = drafts[0][0].shape[-1], np.max(schedule, axis=0)
    first_column = np.cumsum([0, *most[:-1]])
    draw_source = np.repeat(np.arange(len(laws)), most)
    # Slots in depth-first order; each knows its place among its parent's draws.
    parents, columns, depths = [-1], [-1], [0]

    def grow(node: int, depth: int) -> None:
        if depth == len(schedule):
            return
        for start, count in zip(first_column, schedule[depth], strict=True):
            for column in range(start, start + count):
                parents.append(node)
                columns.append(column)
                depths.append(depth + 1)
                grow(len(parents) - 1, depth + 1)

    grow(0, 0)
    count, width = len(parents), int(sum(most))
    tokens, valid = np.zeros((1, count), np.int32), np.ones((1, count), bool)
    draw_tokens, draw_valid = np.zeros((1, count, width), np.int32), np.zeros((1, count, width), bool)
    probs = np.ones(1)
    expanded = [node for node in range(count) if depths[node] < len(schedule)]
    laws_of_draws = np.zeros((1, len(expanded) * len(laws), vocab_size))

    for place, node in enumerate(expanded):
        depth, alive = depths[node], valid[:, node]
        code = _path_codes(tokens, parents, node, vocab_size)
        # All outcomes after every path, then those after each tree's own.
        tables = [draft[depth].reshape(-1, vocab_size) for draft in drafts]
        after = [
            join_sources(
                [
                    LAWS[law].enumerate(table[row], draws)
                    for table, law, draws in zip(tables, laws, schedule[depth], strict=True)
                    if draws
                ]
            )[0]
            for row in range(vocab_size**depth)
        ]
        options = jax.tree.map(lambda *parts, code=code: np.stack(parts)[code], *after)  # [T, M, ..]
        size = options.probs.shape[1]
        # A node that does not exist draws nothing: one option carries the probability.
        weights = np.where(alive[:, None], options.probs, np.arange(size) == 0)
        exists = options.valid & alive[:, None, None]
        repeat = functools.partial(np.repeat, repeats=size, axis=0)
        tokens, valid, draw_tokens, draw_valid, laws_of_draws, probs = map(
            repeat, (tokens, valid, draw_tokens, draw_valid, laws_of_draws, probs)
        )
        probs = probs * weights.reshape(-1)
        drawn, exists = (field.reshape(len(probs), -1) for field in (options.tokens, exists))
        where = np.concatenate([np.arange(n) + first for first, n in zip(first_column, schedule[depth], strict=True)])
        draw_tokens[:, node, where], draw_valid[:, node, where] = drawn, exists
        for s, table in enumerate(tables):
            laws_of_draws[:, place * len(laws) + s] = repeat(table[code])
        for child in [child for child in range(count) if parents[child] == node]:
            tokens[:, child] = draw_tokens[:, node, columns[child]]
            valid[:, child] = draw_valid[:, node, columns[child]]
            if merge:
                older = [other for other in range(node + 1, child) if parents[other] == node]
                valid[:, child] &= ~(valid[:, older] & (tokens[:, older] == tokens[:, [child]])).any(1)

    q_rows = np.full((count, len(laws)), -1)
    for place, node in enumerate(expanded):
        q_rows[node] = place * len(laws) + np.arange(len(laws))
    spread = lambda field: np.broadcast_to(np.asarray(field, np.int32), (len(probs), *np.shape(field)))
    fields: dict[str, Any] = dict(
        tokens=tokens,
        parents=spread(parents),
        depths=spread(depths),
        valid=valid,
        draw_tokens=draw_tokens,
        draw_valid=draw_valid,
        draw_source=spread(draw_source),
        q=laws_of_draws,
        q_rows=spread(q_rows),
    )
    trees = TokenTree(**fields, laws=tuple(laws), max_depth=len(schedule))
    return Forest(trees, probs)


def _path_codes(tokens: Any, parents: Any, node: int, vocab_size: int) -> np.ndarray:
    """[T] the path from below the root to a node, as a number to the base V: an index into a flattened table."""
    code, scale = np.zeros(len(tokens), np.int64), 1
    while node > 0:
        code += scale * tokens[:, node]
        node, scale = parents[node], scale * vocab_size
    return code


def node_logits(trees: TokenTree, target: Table) -> np.ndarray:
    """[T, N, V] log-probabilities of a tabular target at every node."""
    vocab_size, parents = target[0].shape[-1], trees.parents[0]
    logits = []
    for node, depth in enumerate(np.asarray(trees.depths[0]).tolist()):
        code = _path_codes(trees.tokens, parents, node, vocab_size)
        with np.errstate(divide="ignore"):
            logits.append(np.log(target[depth].reshape(-1, vocab_size))[code])
    return np.stack(logits, 1)


def walk_law(rule: NodeRule, trees: TokenTree, logits: jax.Array) -> jax.Array:
    """[T, N, V] the law of (node where the walk of a node rule ends, token after it) for each tree.

    The same ``node_law`` that the traversal samples from; a token goes on at the first child that carries it.
    """
    count, num_nodes = trees.tokens.shape
    laws = jax.lax.map(
        lambda node: node_law(rule, trees, logits, jnp.full(count, node), Warp()), jnp.arange(num_nodes)
    )  # [N, T, V]
    reach = [jnp.ones(count, laws.dtype)]
    ends = []
    for node in range(num_nodes):
        children = trees.valid & (trees.parents == node)
        carried = children[:, :, None] & (trees.tokens[:, :, None] == jnp.arange(laws.shape[-1]))  # [T, N, V]
        ends.append(reach[node][:, None] * jnp.where(carried.any(1), 0, laws[node]))
        if node + 1 < num_nodes:
            parent = jnp.maximum(trees.parents[:, node + 1], 0)
            rows = jnp.arange(count)
            token = trees.tokens[:, node + 1]
            older = jnp.arange(num_nodes) < node + 1
            twins = trees.valid & (trees.parents == parent[:, None]) & (trees.tokens == token[:, None]) & older
            goes_on = trees.valid[:, node + 1] & ~twins.any(1)
            reach.append(jnp.where(goes_on, jnp.stack(reach, 1)[rows, parent] * laws[parent, rows, token], 0))
    return jnp.stack(ends, 1)


def path_law(rule: Callable[[TokenTree, Any], PathDecision], trees: TokenTree, logits: jax.Array) -> jax.Array:
    """[T, N, V] the law of (node where the path ends, token after it) for each tree, by a path rule."""
    count, num_nodes = trees.tokens.shape
    rows = jnp.arange(count)
    decision = rule(trees, lambda nodes: Warp()(logits[rows, nodes]))
    after = jax.lax.map(lambda node: decision.residual(jnp.full(count, node)), jnp.arange(num_nodes))
    return decision.stop[:, :, None] * after.swapaxes(0, 1)


def in_chunks(law: Callable[[TokenTree, Any], jax.Array], trees: TokenTree, logits: np.ndarray) -> np.ndarray:
    """``walk_law`` or ``path_law``, jitted, over many trees, some thousands at a time: one shape, bounded memory."""
    count = len(logits)
    size = min(count, 4096)
    rows = np.arange(-(-count // size) * size) % count  # the last chunk is filled up with trees from the start
    pieces = [
        np.asarray(law(jax.tree.map(lambda field, chunk=chunk: field[chunk], trees), logits[chunk]))
        for chunk in np.split(rows, len(rows) // size)
    ]
    return np.concatenate(pieces)[:count]


class Joint(NamedTuple):
    """A whole verifier, averaged over everything."""

    law: np.ndarray  # [V] * (D + 1) law of the first D + 1 tokens of the text
    block_efficiency: float  # tokens emitted per verify step, 1..D + 1


def joint(ends: np.ndarray, forest: Forest, target: Table) -> Joint:
    """Sum where walks end [T, N, V] over the trees, and finish each text by the target."""
    trees, vocab_size = forest.trees, target[0].shape[-1]
    parents, total = trees.parents[0], np.zeros(target[-1].shape)
    mass = forest.probs[:, None, None] * ends
    for node, depth in enumerate(np.asarray(trees.depths[0]).tolist()):
        code = _path_codes(trees.tokens, parents, node, vocab_size)
        text = np.zeros((vocab_size**depth, vocab_size))
        np.add.at(text, code, mass[:, node])
        text = text.reshape((vocab_size,) * (depth + 1))
        for table in target[depth + 1 :]:
            text = text[..., None] * table
        total += text
    return Joint(total, float((mass.sum((0, 2)) * (trees.depths[0] + 1)).sum()))


def target_law(target: Table) -> np.ndarray:
    """[V] * (D + 1) law of the target's own text."""
    return functools.reduce(lambda text, table: text[..., None] * table, target)


def block_efficiency_bound(forest: Forest, target: Table) -> float:
    """The most tokens per verify step that any exact verifier of these trees can emit, from above.

    1 + the sum over depths of the bound of ``measure.bound`` with drawn prefixes of that length for tokens: a prefix
    can be accepted only where it was drawn and as often as the target has it. It need not be reached.
    """
    trees, vocab_size = forest.trees, target[0].shape[-1]
    parents, total = trees.parents[0], 1.0
    for depth in range(1, trees.max_depth + 1):
        drawn = np.zeros((len(forest.probs), vocab_size**depth), bool)
        for node in np.flatnonzero(np.asarray(trees.depths[0]) == depth).tolist():
            code = _path_codes(trees.tokens, parents, node, vocab_size)
            drawn[np.flatnonzero(trees.valid[:, node]), code[trees.valid[:, node]]] = True
        sets = subsets(vocab_size**depth)
        inside = (drawn.astype(np.float64) @ ~sets.T == 0).T  # [2^(V^depth), T]
        prefix_law = target_law(target[:depth]).reshape(-1)
        total += 1 + float((sets @ prefix_law - inside @ forest.probs).min())
    return total
