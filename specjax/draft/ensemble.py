"""Drafting with several sources: their trees merged (SpecInfer, section 3.2), or the first that proposes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.mask import ancestor_mask, depth_first_positions
from specjax.sampling import Warp, fold_in
from specjax.tree import TokenTree
from specjax.types import Drafter, Emission, PyTree, RoundKeys

MAX_SOURCES = 32  # who proposed a token is kept as the bits of one word


def ensemble(drafters: Sequence[Drafter], *, capacity: int | None = None) -> Drafter:
    """One drafter from several: each drafts its whole tree, and the merged tree is verified once.

    Drafters that have their functions in common and parameters of the same shapes, such as SSMs of one architecture,
    one law and one shape of tree, run as one: what differs of their parameters is stacked, a copy, and mapped over.
    Make the ensemble once where they are large. What any of them drafts does not depend on it.

    Args:
      drafters: at least one.
      capacity: nodes of the merged tree at most, the root's included; None leaves room for all. What is left out of a
        larger union, and why no law suffers, is told at ``merge``.

    Raises:
      ValueError: for no drafter, too many sources, vocabularies of different sizes, or a capacity below 1.
    """
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        raise ValueError(f"an ensemble's capacity is a number of nodes >= 1, the root included; got {capacity!r}")
    return _together("an ensemble", drafters, _union(capacity))


def first_of(drafters: Sequence[Drafter]) -> Drafter:
    """In each row, the tree of the first drafter that proposes anything there: that has a draw at the root.

    For prompt lookup with an SSM to fall back on, say. Laws hold as in an ensemble: whether a law's draw exists never
    depends on the token drawn, so neither does the choice. All of them draft in every round, since what one row does
    not need another may.

    Raises:
      ValueError: as ``ensemble``.
    """
    return _together("first_of", drafters, _first)


def merge(trees: Sequence[TokenTree], capacity: int | None = None) -> TokenTree:
    """The union of trees with one root (unbatched): two nodes are one iff their paths' tokens are equal.

    SpecInfer, Definition 3.2. The merged tree has room for every node, in depth-first order. Each source keeps its
    draws, their order and multiplicity: at a merged node they stand one source after the other, which does not depend
    on the tokens drawn. Where one source reached a node twice, the draws below its first copy count.

    With a ``capacity`` (root included), nodes are taken slot by slot, the sources in turn, while there is room. A node
    left out leaves its draw behind, which is verified as ever, only that a path which takes it ends there. So what
    depends on tokens is where a path may go on, never what may be emitted; and as slots stand in the order in which
    they were drawn, a node is kept or not whatever is drawn at it or below. Hence every verifier stays exact for the
    laws it is exact for. (To leave out the draws themselves, by what they are, would be biased.)
    """
    trees = [tree for tree in trees if tree.laws] or list(trees)[:1]  # without sources it is a lone root
    join = lambda field: jnp.concatenate([getattr(tree, field) for tree in trees])
    offsets = [sum(tree.num_nodes for tree in trees[:index]) for index in range(len(trees))]
    tokens, depths, valid = join("tokens"), join("depths"), join("valid")
    parents = jnp.concatenate(
        [jnp.where(tree.parents >= 0, tree.parents + offset, -1) for tree, offset in zip(trees, offsets)]
    )
    owner = np.concatenate([np.full(tree.num_nodes, index) for index, tree in enumerate(trees)])
    turns = np.concatenate([np.arange(tree.num_nodes) * len(trees) + index for index, tree in enumerate(trees)])
    count, max_depth = len(tokens), max(tree.max_depth for tree in trees)

    # A node's path as a row of tokens: equal rows (and depths) are equal nodes.
    ancestors = ancestor_mask(parents)
    at_depth = depths[:, None] == jnp.arange(max_depth + 1)
    paths = jnp.sum(jnp.where(ancestors[:, :, None] & at_depth[None], tokens[None, :, None], 0), axis=1)
    same = (depths[:, None] == depths[None]) & valid[:, None] & valid[None]
    same &= jnp.all(paths[:, None] == paths[None], axis=-1)
    first = jnp.where(valid, jnp.argmax(same, axis=1), jnp.arange(count))  # the first of each node's equals
    kept = valid & (first == jnp.arange(count))

    most = count - (len(trees) - 1)  # the roots are one node for certain
    if capacity is None or capacity >= most:
        capacity = most
    else:
        turn = jnp.min(jnp.where(same, turns, count * len(trees)), axis=1)
        kept &= jnp.sum(kept & (turn < turn[:, None]), axis=1) < capacity
    merged_parents = jnp.where(parents >= 0, first[parents], -1)
    places = depth_first_positions(merged_parents, depths, kept)
    places = jnp.where(valid & kept[first], places[first], capacity)

    def place(values: jax.Array, fillers: jax.Array, fill: int) -> jax.Array:
        """Values [n, ..] of nodes by the slots that fillers [capacity, n] says they fill, at most one a slot."""
        filled = jnp.any(fillers, axis=1).reshape(-1, *[1] * (values.ndim - 1))
        return jnp.where(filled, values[jnp.argmax(fillers, axis=1)], jnp.asarray(fill, values.dtype))

    in_slot = places == jnp.arange(capacity)[:, None]
    # Per source, the first of its own copies of a node brings its draws.
    brings = in_slot & (jnp.argmax(same & (owner[:, None] == owner), axis=1) == jnp.arange(count))
    draw_tokens, draw_valid, draw_source, q_rows = [], [], [], []
    num_rows = num_sources = 0
    for tree, offset in zip(trees, offsets):
        own = brings[:, offset : offset + tree.num_nodes]
        draw_tokens.append(place(tree.draw_tokens, own, 0))
        draw_valid.append(place(tree.draw_valid, own, False))
        draw_source.append(tree.draw_source + num_sources)
        q_rows.append(place(jnp.where(tree.q_rows >= 0, tree.q_rows + num_rows, -1), own, -1))
        num_rows += tree.q.shape[0]
        num_sources += len(tree.laws)

    nodes = in_slot & kept
    return TokenTree(
        tokens=place(tokens, nodes, 0),
        parents=place(jnp.where(parents >= 0, places[parents], -1), nodes, -1),
        depths=place(depths, nodes, 0),
        valid=jnp.any(nodes, axis=1),
        draw_tokens=jnp.concatenate(draw_tokens, axis=1),
        draw_valid=jnp.concatenate(draw_valid, axis=1),
        draw_source=jnp.concatenate(draw_source),
        q=join("q"),
        q_rows=jnp.concatenate(q_rows, axis=1),
        laws=tuple(law for tree in trees for law in tree.laws),
        max_depth=max_depth,
    )


Combine = Callable[[Sequence[TokenTree]], TokenTree]  # trees [B, ..] of all sources to one


@functools.cache
def _union(capacity: int | None) -> Combine:
    return jax.vmap(functools.partial(merge, capacity=capacity))


def _first(trees: Sequence[TokenTree]) -> TokenTree:
    served = jnp.zeros(trees[0].tokens.shape[0], bool)
    chosen = []
    for tree in trees:
        proposes = jnp.any(tree.draw_valid[:, 0], axis=1)
        taken = (proposes & ~served)[:, None]
        is_root = jnp.arange(tree.num_nodes) == 0
        valid, draw_valid = tree.valid & (taken | is_root), tree.draw_valid & taken[..., None]
        chosen.append(dataclasses.replace(tree, valid=valid, draw_valid=draw_valid))
        served |= proposes
    return _union(max(tree.num_nodes for tree in trees))(chosen)


class _Members(NamedTuple):
    """Drafters with the same functions and parameters of the same shapes; static, a key of compiled code."""

    functions: tuple[Callable, Callable, Callable]
    places: tuple[int, ...]  # in the list of all drafters
    structure: Any  # of the parameters
    shared: tuple[bool, ...]  # per leaf of the parameters: the same object in all members, so it is not stacked


def _together(name: str, drafters: Sequence[Drafter], combine: Combine) -> Drafter:
    drafters = list(drafters)
    if not drafters:
        raise ValueError(f"{name} needs at least one drafter")
    for index, drafter in enumerate(drafters):
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter {index} of {name} is a {type(drafter).__name__}; expected a Drafter")
    sizes = [drafter.vocab_size for drafter in drafters if drafter.vocab_size is not None]
    positions = [drafter.max_positions for drafter in drafters if drafter.max_positions is not None]
    laws = tuple(law for drafter in drafters for law in drafter.laws)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"drafters of {name} need one vocabulary; got sizes {sizes}. specjax.draft.with_vocabulary gives a draft "
            "model the target's"
        )
    hidden = {drafter.reads_hidden for drafter in drafters if drafter.reads_hidden is not None}
    if len(hidden) > 1:
        raise ValueError(f"drafters of {name} read hidden states of sizes {sorted(hidden)}; one target has one size")
    if any(drafter.choose is not None for drafter in drafters):
        raise ValueError(f"an adaptive drafter stands alone; make one of {name} of each size instead")
    if len(laws) > MAX_SOURCES:
        raise ValueError(f"{name} takes at most {MAX_SOURCES} sources; got {len(laws)}")
    members, params = _group(drafters)
    draws = [drafter.max_draws for drafter in drafters if drafter.max_draws is not None]
    return Drafter(
        *_functions(members, combine),
        params=params,
        max_depth=max(drafter.max_depth for drafter in drafters),
        laws=laws,
        vocab_size=min(sizes, default=None),
        max_positions=min(positions, default=None),
        reads_hidden=max(hidden, default=None),
        max_draws=sum(draws) if len(draws) == len(drafters) else None,
    )


def _group(drafters: Sequence[Drafter]) -> tuple[tuple[_Members, ...], tuple[PyTree, ...]]:
    """Which drafters run as one, and each group's parameters: a lone one's own, or (stacked leaves, shared leaves)."""
    groups: dict[Any, list[int]] = {}
    for index, drafter in enumerate(drafters):
        leaves, structure = jax.tree.flatten(drafter.params)
        kinds = tuple(jax.typeof(leaf) for leaf in leaves)
        groups.setdefault((drafter[:3], structure, kinds), []).append(index)
    members, params = [], []
    for (functions, structure, _), places in groups.items():
        columns = list(zip(*(jax.tree.leaves(drafters[place].params) for place in places)))
        shared = tuple(all(leaf is column[0] for leaf in column) for column in columns)
        members.append(_Members(functions, tuple(places), structure, shared))
        if len(places) == 1:
            params.append(drafters[places[0]].params)
        else:
            stacked = tuple(jnp.stack(column) for column, one in zip(columns, shared) if not one)
            params.append((stacked, tuple(column[0] for column, one in zip(columns, shared) if one)))
    return tuple(members), tuple(params)


# The state of several members is stacked behind the batch axis, which every array of a state leads with.
@functools.cache
def _functions(members: tuple[_Members, ...], combine: Combine):
    def init(params: tuple, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> tuple[PyTree, ...]:
        return tuple(
            _mapped(group, group.functions[0], (None, None, None), 1)(own, tokens, lengths, hidden)
            for group, own in zip(members, params)
        )

    def propose(params: tuple, keys: RoundKeys, state: tuple, roots: jax.Array, warp: Warp) -> tuple[TokenTree, tuple]:
        trees, states = {}, []
        for group, own, part in zip(members, params, state):
            own_keys = [fold_in(keys.draft, jnp.full(roots.shape, place)) for place in group.places]
            if len(group.places) == 1:
                tree, part = group.functions[1](own, keys._replace(draft=own_keys[0]), part, roots, warp)
                trees[group.places[0]] = tree
            else:
                axes = (RoundKeys(0, None, None, None), 1, None, None)  # pyright: ignore[reportArgumentType]
                run = _mapped(group, group.functions[1], axes, (0, 1))
                stacked, part = run(own, keys._replace(draft=jnp.stack(own_keys)), part, roots, warp)
                for index, place in enumerate(group.places):
                    trees[place] = jax.tree.map(lambda field, index=index: field[index], stacked)
            states.append(part)
        return combine([trees[place] for place in sorted(trees)]), tuple(states)

    def commit(params: tuple, state: tuple, emission: Emission, hidden: jax.Array | None) -> tuple[PyTree, ...]:
        return tuple(
            _mapped(group, group.functions[2], (1, None, None), 1)(own, part, emission, hidden)
            for group, own, part in zip(members, params, state)
        )

    return jax.jit(init), propose, commit


def _mapped(group: _Members, function: Callable, axes: tuple, out_axes: Any) -> Callable:
    """A drafter's function for a whole group: itself for one member, else mapped over the stacked parameters."""
    if len(group.places) == 1:
        return function

    def of_member(params: tuple[tuple, tuple], *rest: Any) -> Any:
        stacked, shared = map(iter, params)
        leaves = [next(shared if one else stacked) for one in group.shared]
        return function(jax.tree.unflatten(group.structure, leaves), *rest)

    return jax.vmap(of_member, in_axes=((0, None), *axes), out_axes=out_axes, axis_size=len(group.places))
