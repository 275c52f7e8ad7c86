"""Drafting with several sources at once: their trees merged into one (SpecInfer, section 3.2)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.mask import ancestor_mask, depth_first_positions
from specjax.sampling import Warp, fold_in
from specjax.tree import TokenTree
from specjax.types import Drafter, Emission, PyTree, RoundKeys


def ensemble(drafters: Sequence[Drafter]) -> Drafter:
    """One drafter from several: each drafts its whole tree, and the merged tree is verified once."""
    if not drafters:
        raise ValueError("an ensemble needs at least one drafter")
    sizes = [drafter.vocab_size for drafter in drafters if drafter.vocab_size is not None]
    positions = [drafter.max_positions for drafter in drafters if drafter.max_positions is not None]
    if len(set(sizes)) > 1:
        raise ValueError(f"drafters of an ensemble need one vocabulary; got sizes {sizes}")
    hidden = {drafter.reads_hidden for drafter in drafters if drafter.reads_hidden is not None}
    if len(hidden) > 1:
        raise ValueError(
            f"drafters of an ensemble read hidden states of sizes {sorted(hidden)}; one target has one size"
        )
    return Drafter(
        *_functions(tuple((drafter.init, drafter.propose, drafter.commit) for drafter in drafters)),
        params=tuple(drafter.params for drafter in drafters),
        max_depth=max(drafter.max_depth for drafter in drafters),
        laws=tuple(law for drafter in drafters for law in drafter.laws),
        vocab_size=min(sizes, default=None),
        max_positions=min(positions, default=None),
        reads_hidden=max(hidden, default=None),
    )


@functools.cache
def _functions(members):
    def init(params: tuple, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> tuple:
        return tuple(init(own, tokens, lengths, hidden) for (init, _, _), own in zip(members, params))

    def propose(params: tuple, keys: RoundKeys, state: tuple, roots: jax.Array, warp: Warp) -> tuple[TokenTree, tuple]:
        trees, states = [], []
        for source, ((_, propose, _), own, part) in enumerate(zip(members, params, state)):
            own_keys = keys._replace(draft=fold_in(keys.draft, jnp.full(roots.shape, source)))
            tree, part = propose(own, own_keys, part, roots, warp)
            trees.append(tree)
            states.append(part)
        return jax.vmap(merge)(trees), tuple(states)

    def commit(params: tuple, state: tuple, emission: Emission, hidden: jax.Array | None) -> tuple[PyTree, ...]:
        return tuple(commit(own, part, emission, hidden) for (_, _, commit), own, part in zip(members, params, state))

    return init, propose, commit


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The union of trees with one root (unbatched): two nodes are one iff their paths' tokens are equal.

    SpecInfer, Definition 3.2. The merged tree has room for every node, in depth-first order. Each source keeps its
    draws, their order and multiplicity: at a merged node they stand one source after the other, which does not depend
    on the tokens drawn. Where one source reached a node twice, the draws below its first copy count.
    """
    trees = list(trees)
    join = lambda field: jnp.concatenate([getattr(tree, field) for tree in trees])
    offsets = [sum(tree.num_nodes for tree in trees[:index]) for index in range(len(trees))]
    tokens, depths, valid = join("tokens"), join("depths"), join("valid")
    parents = jnp.concatenate(
        [jnp.where(tree.parents >= 0, tree.parents + offset, -1) for tree, offset in zip(trees, offsets)]
    )
    owner = jnp.concatenate([jnp.full(tree.num_nodes, index) for index, tree in enumerate(trees)])
    count, max_depth = len(tokens), max(tree.max_depth for tree in trees)

    # A node's path as a row of tokens: equal rows (and depths) are equal nodes.
    ancestors = ancestor_mask(parents)
    at_depth = depths[:, None] == jnp.arange(max_depth + 1)
    paths = jnp.sum(jnp.where(ancestors[:, :, None] & at_depth[None], tokens[None, :, None], 0), axis=1)
    same = (depths[:, None] == depths[None]) & valid[:, None] & valid[None]
    same &= jnp.all(paths[:, None] == paths[None], axis=-1)
    first = jnp.where(valid, jnp.argmax(same, axis=1), jnp.arange(count))  # the first of each node's equals
    kept = valid & (first == jnp.arange(count))

    capacity = count - (len(trees) - 1)  # the roots are one node for certain
    merged_parents = jnp.where(parents >= 0, first[parents], -1)
    places = depth_first_positions(merged_parents, depths, kept)[first]

    def place(values: jax.Array, where: jax.Array, own: slice, fill: int) -> jax.Array:
        """Put rows [n, ..] of the nodes ``own`` into the merged tree's slots."""
        target = jnp.where(where[own], places[own], capacity)
        return jnp.full((capacity, *values.shape[1:]), fill, values.dtype).at[target].set(values, mode="drop")

    # Per source, the first of its own copies of a node brings its draws.
    own_first = jnp.argmax(same & (owner[:, None] == owner[None]), axis=1)
    brings = valid & (own_first == jnp.arange(count))
    draw_tokens, draw_valid, draw_source, q_rows = [], [], [], []
    num_rows = num_sources = 0
    for tree, offset in zip(trees, offsets):
        own = slice(offset, offset + tree.num_nodes)
        draw_tokens.append(place(tree.draw_tokens, brings, own, 0))
        draw_valid.append(place(tree.draw_valid, brings, own, False))
        draw_source.append(tree.draw_source + num_sources)
        q_rows.append(place(jnp.where(tree.q_rows >= 0, tree.q_rows + num_rows, -1), brings, own, -1))
        num_rows += tree.q.shape[0]
        num_sources += len(tree.laws)

    everyone = slice(0, count)
    return TokenTree(
        tokens=place(tokens, kept, everyone, 0),
        parents=place(jnp.where(parents >= 0, places[parents], -1), kept, everyone, -1),
        depths=place(depths, kept, everyone, 0),
        valid=place(kept, kept, everyone, False),
        draw_tokens=jnp.concatenate(draw_tokens, axis=1),
        draw_valid=jnp.concatenate(draw_valid, axis=1),
        draw_source=jnp.concatenate(draw_source),
        q=join("q"),
        q_rows=jnp.concatenate(q_rows, axis=1),
        laws=tuple(law for tree in trees for law in tree.laws),
        max_depth=max_depth,
    )
