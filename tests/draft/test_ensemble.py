"""Merged trees against sets of paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.draft import NO_DRAFT, ensemble, merge, ssm
from specjax.testing import random_parents, table_model
from specjax.tree import check_tree, root_tree
from tests.helpers import context, slot_paths, topology

VOCAB = 4
SIZES = [(7, 2, 3), (6, 3, 4), (8, 1, 2)]  # nodes, draws and rows of q of the three sources


def random_tree(rng: np.random.Generator, nodes: int, draws: int, rows: int) -> sj.TokenTree:
    """Any tree: repeated siblings, invalid slots in the middle, draws that are no nodes, nodes without draws."""
    parents = random_parents(rng, nodes)
    depths = np.zeros(nodes, int)
    valid = rng.random(nodes) < 0.85
    valid[0] = True
    for slot in range(1, nodes):
        depths[slot] = depths[parents[slot]] + 1
        valid[slot] &= valid[parents[slot]]
    tokens = rng.integers(0, 3, nodes)  # few, so that paths meet
    tokens[0] = 1
    tree = sj.TokenTree(
        tokens=tokens,
        parents=np.where(valid, parents, rng.choice([-1, 0], nodes)),
        depths=np.where(valid, depths, 0),
        valid=valid,
        draw_tokens=rng.integers(0, VOCAB, (nodes, draws)),
        draw_valid=(rng.random((nodes, draws)) < 0.6) & valid[:, None],
        draw_source=np.zeros(draws, int),
        q=rng.dirichlet(np.ones(VOCAB), rows),
        q_rows=np.where(valid, rng.integers(-1, rows, nodes), -1)[:, None],
        laws=("iid",),
        max_depth=nodes - 1,
    )
    return jax.tree.map(lambda field: field.astype({"i": np.int32, "f": np.float32, "b": bool}[field.dtype.kind]), tree)


def token_paths(tree: sj.TokenTree) -> dict[int, tuple[int, ...]]:
    tokens = np.asarray(tree.tokens)
    paths = slot_paths(np.asarray(tree.parents), np.asarray(tree.valid))
    return {slot: tuple(int(tokens[at]) for at in path) for slot, path in paths.items()}


def check_merge(trees: list[sj.TokenTree], merged: sj.TokenTree):
    trees, merged = jax.tree.map(np.asarray, (trees, merged))
    check_tree(merged)
    first_owner: dict[tuple[int, ...], list[int | None]] = {}
    order: list[tuple[int, ...]] = []
    for source, tree in enumerate(trees):
        for slot, path in token_paths(tree).items():
            if path not in first_owner:
                first_owner[path] = [None] * len(trees)
                order.append(path)
            if first_owner[path][source] is None:
                first_owner[path][source] = slot

    def depth_first(at):
        found = [at]
        for path in order:
            if path[:-1] == at and path:
                found += depth_first(path)
        return found

    want = depth_first(())
    got = token_paths(merged)
    assert got == dict(enumerate(want))  # each path once, in depth-first slots, padding last
    assert merged.num_nodes == sum(tree.num_nodes for tree in trees) - len(trees) + 1
    assert merged.max_depth == max(tree.max_depth for tree in trees)
    sources = [0, *np.cumsum([len(tree.laws) for tree in trees])]
    wanted_source = [value + start for tree, start in zip(trees, sources) for value in np.asarray(tree.draw_source)]
    assert np.asarray(merged.draw_source).tolist() == wanted_source
    starts = [0, *np.cumsum([tree.draw_tokens.shape[1] for tree in trees])]
    for slot in range(merged.num_nodes):
        for source, tree in enumerate(trees):
            columns = slice(starts[source], starts[source + 1])
            of_source = slice(sources[source], sources[source + 1])
            own = first_owner[want[slot]][source] if slot < len(want) else None
            if own is None:
                assert not np.any(merged.draw_valid[slot, columns])
                assert np.all(np.asarray(merged.q_rows[slot, of_source]) == -1)
                continue
            np.testing.assert_array_equal(merged.draw_valid[slot, columns], tree.draw_valid[own])
            np.testing.assert_array_equal(merged.draw_tokens[slot, columns], tree.draw_tokens[own])
            for ours, theirs in zip(merged.q_rows[slot, of_source].tolist(), tree.q_rows[own].tolist()):
                assert (ours < 0) == (theirs < 0)
                if theirs >= 0:
                    np.testing.assert_array_equal(merged.q[ours], tree.q[theirs])


@functools.cache
def jitted_merge():
    return jax.jit(merge)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_merge_equals_the_union_of_paths(seed):
    """Definition 3.2: equal paths are one node; draws, their sources, order and multiplicity are kept."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, *size) for size in SIZES]
    check_merge(trees, jitted_merge()(trees))


def test_a_batch_merges_row_by_row():
    rng = np.random.default_rng(0)
    rows = [[random_tree(rng, *size) for size in SIZES] for _ in range(3)]
    stacked = [jax.tree.map(lambda *fields: jnp.stack(fields), *(row[index] for row in rows)) for index in range(3)]
    merged = jax.jit(jax.vmap(merge))(stacked)
    for row in range(3):
        check_merge(rows[row], jax.tree.map(lambda field, row=row: field[row], merged))


def test_merging_one_tree_removes_its_own_repeats():
    tree = random_tree(np.random.default_rng(3), *SIZES[0])
    check_merge([tree], jitted_merge()([tree]))


def test_nested_merges_keep_every_source_apart():
    rng = np.random.default_rng(4)
    a, b, c = (random_tree(rng, *size) for size in SIZES)
    inner = jitted_merge()([a, b])
    merged = jitted_merge()([inner, c])
    check_merge([inner, c], merged)
    assert merged.laws == ("iid",) * 3
    assert np.asarray(merged.draw_source).tolist() == [0, 0, 1, 1, 1, 2]
    assert merged.q_rows.shape[1] == 3


def test_a_drafter_without_sources_adds_nothing():
    tree = random_tree(np.random.default_rng(5), *SIZES[0])
    nothing = jax.tree.map(lambda field: field[0], root_tree(jnp.ones(1, jnp.int32)))
    alone, beside = (jitted_merge()(trees) for trees in ([tree], [nothing, tree, nothing]))
    jax.tree.map(np.testing.assert_array_equal, alone, beside)
    assert jitted_merge()([nothing, nothing]).laws == ()


def small_tree(paths: list[list[int]]) -> sj.TokenTree:
    """Token paths, parents before children, under a root of token 4."""
    slots = {(): 0} | {tuple(path): slot for slot, path in enumerate(paths, 1)}
    count = len(slots)
    return sj.TokenTree(
        tokens=jnp.array([4, *(path[-1] for path in paths)]),
        parents=jnp.array([-1, *(slots[tuple(path[:-1])] for path in paths)]),
        depths=jnp.array([0, *map(len, paths)]),
        valid=jnp.ones(count, bool),
        draw_tokens=jnp.zeros((count, 2), jnp.int32),
        draw_valid=jnp.ones((count, 2), bool),
        draw_source=jnp.zeros(2, jnp.int32),
        q=jnp.ones((1, 9)) / 9,
        q_rows=jnp.zeros((count, 1), jnp.int32),
        laws=("iid",),
        max_depth=2,
    )


def test_the_example_of_two_drafts():
    """5,7 / 5,8 and 5,7 / 6,7 share 5 and 5,7: five nodes besides the root."""
    merged = jitted_merge()([small_tree([[5], [5, 7], [5, 8]]), small_tree([[5], [5, 7], [6], [6, 7]])])
    assert token_paths(merged) == dict(enumerate([(), (5,), (5, 7), (5, 8), (6,), (6, 7)]))
    assert int(merged.valid.sum()) == 6
    assert merged.parents[:6].tolist() == [-1, 0, 1, 1, 0, 4]
    # Both drafts drew below 5, only one below 6.
    assert merged.draw_valid[1].tolist() == [True] * 4
    assert merged.draw_valid[4].tolist() == [False, False, True, True]


def test_the_same_token_under_other_parents_is_another_node():
    merged = jitted_merge()([small_tree([[5], [5, 7]]), small_tree([[7], [7, 5]])])
    assert token_paths(merged) == dict(enumerate([(), (5,), (5, 7), (7,), (7, 5)]))


def test_what_an_ensemble_says_of_itself():
    drafter = ensemble(
        [ssm(context(0), topology(2), "iid"), ssm(context(1), topology((3,)), "deterministic"), NO_DRAFT]
    )
    assert drafter.laws == ("iid", "deterministic")
    assert drafter.max_depth == 4
    assert drafter.vocab_size == 16
    assert drafter.max_positions == 1024


def test_bad_ensembles_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        ensemble([])
    shape = topology(2)
    with pytest.raises(ValueError, match="one vocabulary"):
        ensemble([ssm(context(0), shape, "iid"), ssm(table_model(np.zeros(8)), shape, "iid")])
