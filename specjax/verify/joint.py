"""Whole verifiers summed over every tree and every outcome, for tabular models of a few tokens and levels.

Many problems are summed at once. A tabular model of P problems is a sequence of arrays: entry d, of shape
[P] + [V] * (d + 1), holds each problem's law of the next token after each path of d tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.laws import Outcomes
from specjax.mask import ancestor_mask
from specjax.sampling import Warp
from specjax.tree import TokenTree
from specjax.types import NodeRule
from specjax.verify.measure import node_outcomes, subsets
from specjax.verify.paths import PathDecision
from specjax.verify.traverse import node_law

Table = Sequence[Any]  # entry d: [P] + [V] * (d + 1)
Schedule = Sequence[Sequence[int]]  # entry d: the draws each source makes at every node of depth d


class Forest(NamedTuple):
    """Every tree that sources can draft, with its probability; trees that cannot be are left out."""

    trees: TokenTree  # NumPy fields [T, ..]
    probs: np.ndarray  # [T], summing to 1 for each problem
    problems: np.ndarray  # [T] int, the problem each tree belongs to


def enumerate_trees(drafts: Sequence[Table], laws: Sequence[str], schedule: Schedule, *, merge: bool = False) -> Forest:
    """Draft every tree: at each node, source s takes schedule[depth][s] draws from drafts[s] by law s.

    Args:
      drafts: one tabular model per source, NumPy float64.
      laws: the law of each source.
      schedule: draws per depth and source.
      merge: one node for siblings of one token, expanded once; without it, a node for every draw.
    """
    (num_problems, vocab_size), most = drafts[0][0].shape, np.max(schedule, axis=0)
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
    expanded = [node for node in range(count) if depths[node] < len(schedule)]
    problems, probs = np.arange(num_problems), np.ones(num_problems)
    tokens, valid = np.zeros((num_problems, count), np.int32), np.ones((num_problems, count), bool)
    draw_tokens = np.zeros((num_problems, count, width), np.int32)
    draw_valid = np.zeros(draw_tokens.shape, bool)
    laws_of_draws = np.zeros((num_problems, len(expanded) * len(laws), vocab_size))

    @functools.cache
    def options_after(depth: int) -> Outcomes:
        """What the sources can draw after every path of every problem: fields [P * V^depth, M, ..]."""
        tables = [draft[depth].reshape(-1, vocab_size) for draft in drafts]
        after = [node_outcomes(rows, laws, schedule[depth])[0] for rows in zip(*tables, strict=True)]
        return jax.tree.map(lambda *parts: np.stack(parts), *after)

    for place, node in enumerate(expanded):
        depth, alive = depths[node], valid[:, node]
        row = problems * vocab_size**depth + _path_codes(tokens, parents, node, vocab_size)
        options = jax.tree.map(lambda field, row=row: field[row], options_after(depth))  # [T, M, ..]
        size = options.probs.shape[1]
        # A node that does not exist draws nothing: one option carries the probability.
        weights = np.where(alive[:, None], options.probs, np.arange(size) == 0)
        exists = options.valid & alive[:, None, None]
        after = (probs[:, None] * weights).reshape(-1)
        kept = np.flatnonzero(after)
        before = kept // size
        tokens, valid, draw_tokens, draw_valid, laws_of_draws, problems, row = (
            field[before] for field in (tokens, valid, draw_tokens, draw_valid, laws_of_draws, problems, row)
        )
        probs = after[kept]
        drawn, exists = (field.reshape(after.size, field.shape[-1])[kept] for field in (options.tokens, exists))
        where = np.concatenate([np.arange(n) + first for first, n in zip(first_column, schedule[depth], strict=True)])
        draw_tokens[:, node, where], draw_valid[:, node, where] = drawn, exists
        for s, draft in enumerate(drafts):
            laws_of_draws[:, place * len(laws) + s] = draft[depth].reshape(-1, vocab_size)[row]
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
    return Forest(trees, probs, problems)


def _path_codes(tokens: Any, parents: Any, node: int, vocab_size: int) -> np.ndarray:
    """[T] the path from below the root to a node, as a number to the base V: an index into a flattened table."""
    code, scale = np.zeros(len(tokens), np.int64), 1
    while node > 0:
        code += scale * tokens[:, node]
        node, scale = parents[node], scale * vocab_size
    return code


def _rows(forest: Forest, node: int, vocab_size: int) -> np.ndarray:
    """[T] the row of each tree's problem and path to a node in a flattened table [P * V^depth, V]."""
    parents, depth = forest.trees.parents[0], int(forest.trees.depths[0, node])
    return forest.problems * vocab_size**depth + _path_codes(forest.trees.tokens, parents, node, vocab_size)


def node_logits(forest: Forest, target: Table, size: int = 0) -> np.ndarray:
    """[T, N, V] log-probabilities of a tabular target at every node, and zeros at further nodes up to ``size``."""
    vocab_size = target[0].shape[-1]
    depths = np.asarray(forest.trees.depths[0]).tolist()
    logits = np.zeros((len(forest.probs), max(size, len(depths)), vocab_size))
    for node, depth in enumerate(depths):
        with np.errstate(divide="ignore"):
            logits[:, node] = np.log(target[depth].reshape(-1, vocab_size))[_rows(forest, node, vocab_size)]
    return logits


def join_trees(trees: Sequence[TokenTree], law: str) -> TokenTree:
    """Batches of trees [T, ..] of one depth as one, filled up with nodes, draws and sources that do not exist.

    Args:
      trees: NumPy fields.
      law: of every source, which is what the verifier is told, whatever it was.
    """
    shapes = [(*tree.draw_tokens.shape[1:], *tree.q_rows.shape[2:], *tree.q.shape[1:]) for tree in trees]
    nodes, draws, sources, *laws = np.max(shapes, axis=0).tolist()
    sizes = dict.fromkeys(("tokens", "parents", "depths", "valid"), [nodes])
    sizes |= dict.fromkeys(("draw_tokens", "draw_valid"), [nodes, draws])
    sizes |= {"draw_source": [draws], "q": laws, "q_rows": [nodes, sources]}

    def join(name: str) -> np.ndarray:
        fields = [np.asarray(getattr(tree, name)) for tree in trees]
        size = np.array([0, *sizes[name]])
        return np.concatenate([np.pad(x, [(0, max(0, more)) for more in (size - x.shape).tolist()]) for x in fields])

    return dataclasses.replace(trees[0], **{name: join(name) for name in sizes}, laws=(law,) * sources)


def _goes_on(trees: TokenTree) -> jax.Array:
    """[T, N] the nodes that a walk can enter: of siblings with one token, the first."""
    slots = jnp.arange(trees.tokens.shape[1])
    twins = (trees.parents[:, :, None] == trees.parents[:, None]) & (trees.tokens[:, :, None] == trees.tokens[:, None])
    twins &= trees.valid[:, None] & (slots < slots[:, None])
    return trees.valid & ~twins.any(2) & (slots > 0)


def _reach(trees: TokenTree, onward: jax.Array) -> jax.Array:
    """[T, N] how often a walk comes to each node, where onward [T, N] is how often it goes on there from the parent."""
    rows = jnp.arange(trees.tokens.shape[0])

    def visit(node: jax.Array, reach: jax.Array) -> jax.Array:
        above = reach[rows, jnp.maximum(trees.parents[:, node], 0)]
        return reach.at[:, node].set(above * onward[:, node])  # parents come before children

    start = jnp.zeros(onward.shape, onward.dtype).at[:, 0].set(1)
    return jax.lax.fori_loop(1, onward.shape[1], visit, start)


def walk_reach(rule: NodeRule, trees: TokenTree, logits: jax.Array, warp: Warp) -> jax.Array:
    """[T, N] how often the walk of a node rule comes to each node, given each tree."""
    rows, slots = jnp.arange(logits.shape[0]), jnp.arange(logits.shape[1])

    def emits(node: jax.Array) -> jax.Array:
        """[T, N] how often each slot's token is emitted at a node."""
        law = node_law(rule, trees, logits, jnp.broadcast_to(node, rows.shape), warp)
        return jnp.take_along_axis(law, trees.tokens, 1)

    at_parent = jax.lax.map(emits, slots)[jnp.maximum(trees.parents, 0), rows[:, None], slots]
    return _reach(trees, jnp.where(_goes_on(trees), at_parent, 0))


def path_reach(
    rule: Callable[[TokenTree, Any], PathDecision], trees: TokenTree, logits: jax.Array, warp: Warp
) -> jax.Array:
    """[T, N] how often a path rule's path contains each node, given each tree."""
    rows = jnp.arange(logits.shape[0])
    stop = rule(trees, lambda nodes: warp(logits[rows, nodes])).stop
    return jnp.einsum("tn,tna->ta", stop, jax.vmap(ancestor_mask)(trees.parents).astype(stop.dtype))


def walk_law(rule: NodeRule, trees: TokenTree, logits: jax.Array) -> jax.Array:
    """[T, N, V] the law of (node where the walk of a node rule ends, token after it) for each tree.

    The same ``node_law`` that the traversal samples from; a token goes on at the first child that carries it.
    """
    count, num_nodes = trees.tokens.shape
    rows, slots = jnp.arange(count), jnp.arange(num_nodes)
    laws = jax.lax.map(lambda node: node_law(rule, trees, logits, jnp.full(count, node), Warp()), slots)  # [N, T, V]
    parents, goes_on = jnp.maximum(trees.parents, 0), _goes_on(trees)
    at_parent = laws[parents, rows[:, None], trees.tokens]
    reach = _reach(trees, jnp.where(goes_on, at_parent, 0))
    children = goes_on[:, None] & (parents[:, None] == slots[:, None])  # [T, N, child]
    carried = (children[..., None] & (trees.tokens[:, None, :, None] == jnp.arange(laws.shape[-1]))).any(2)
    return reach[:, :, None] * jnp.where(carried, 0, laws.swapaxes(0, 1))


def path_law(rule: Callable[[TokenTree, Any], PathDecision], trees: TokenTree, logits: jax.Array) -> jax.Array:
    """[T, N, V] the law of (node where the path ends, token after it) for each tree, by a path rule."""
    count, num_nodes = trees.tokens.shape
    rows = jnp.arange(count)
    decision = rule(trees, lambda nodes: Warp()(logits[rows, nodes]))
    after = jax.lax.map(lambda node: decision.residual(jnp.full(count, node)), jnp.arange(num_nodes))
    return decision.stop[:, :, None] * after.swapaxes(0, 1)


def in_chunks(law: Callable[[TokenTree, Any], jax.Array], trees: TokenTree, logits: np.ndarray) -> np.ndarray:
    """``walk_law`` or ``path_law``, jitted, over many trees, some thousands at a time: one shape, bounded memory."""
    count, size = len(logits), 4096
    rows = np.arange(-(-count // size) * size) % count  # the last chunk is filled up with trees from the start
    pieces = [
        np.asarray(law(jax.tree.map(lambda field, chunk=chunk: field[chunk], trees), logits[chunk]))
        for chunk in np.split(rows, len(rows) // size)
    ]
    return np.concatenate(pieces)[:count]


class Joint(NamedTuple):
    """A whole verifier, averaged over everything."""

    law: np.ndarray  # [P] + [V] * (D + 1) law of the first D + 1 tokens of the text
    block_efficiency: np.ndarray  # [P] tokens emitted per verify step, 1..D + 1


def joint(ends: np.ndarray, forest: Forest, target: Table) -> Joint:
    """Sum where walks end [T, N, V] over the trees, and finish each text by the target.

    Of the nodes only the forest's count, should ``ends`` have more.
    """
    num_problems, vocab_size = target[0].shape
    depths, total = np.asarray(forest.trees.depths[0]), np.zeros(target[-1].shape)
    mass = forest.probs[:, None, None] * ends[:, : len(depths)]
    for node, depth in enumerate(depths.tolist()):
        text = np.zeros((num_problems * vocab_size**depth, vocab_size))
        np.add.at(text, _rows(forest, node, vocab_size), mass[:, node])
        text = text.reshape(num_problems, *(vocab_size,) * (depth + 1))
        for table in target[depth + 1 :]:
            text = text[..., None] * table
        total += text
    emitted = mass.sum(2) @ (depths + 1)
    return Joint(total, np.bincount(forest.problems, emitted, num_problems))


def target_law(target: Table) -> np.ndarray:
    """[P] + [V] * (D + 1) law of the target's own text."""
    return functools.reduce(lambda text, table: text[..., None] * table, target)


def block_efficiency_bound(forest: Forest, target: Table) -> np.ndarray:
    """[P] the most tokens per verify step that any exact verifier of these trees can emit, from above.

    1 + the sum over depths of the bound of ``measure.bound`` with drawn prefixes of that length for tokens: a prefix
    can be accepted only where it was drawn and as often as the target has it. It need not be reached.
    """
    trees, (num_problems, vocab_size) = forest.trees, target[0].shape
    parents, total = trees.parents[0], np.ones(num_problems)
    probs = forest.probs[:, None] * (forest.problems[:, None] == np.arange(num_problems))  # [T, P]
    for depth in range(1, trees.max_depth + 1):
        drawn = np.zeros((len(probs), vocab_size**depth), bool)
        for node in np.flatnonzero(np.asarray(trees.depths[0]) == depth).tolist():
            code = _path_codes(trees.tokens, parents, node, vocab_size)
            drawn[np.flatnonzero(trees.valid[:, node]), code[trees.valid[:, node]]] = True
        sets = subsets(vocab_size**depth)
        inside = (drawn.astype(np.float64) @ ~sets.T == 0).T  # [2^(V^depth), T]
        prefix_law = target_law(target[:depth]).reshape(num_problems, -1)
        total += 1 + (sets @ prefix_law.T - inside @ probs).min(0)
    return total
