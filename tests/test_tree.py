"""Topologies and token trees against plain descriptions of what they should be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specjax as sj
from specjax.tree import check_tree, root_tree

# Trees as sets of rank paths, closed under "parent of".
random_paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8).map(
    lambda paths: {path[:end] for path in paths for end in range(1, len(path) + 1)}
)


def walk(paths: set[tuple[int, ...]], at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Depth-first order, written as the recursion it is."""
    order = [at]
    for rank in range(10):
        if (*at, rank) in paths:
            order += walk(paths, (*at, rank))
    return order


def check_against_paths(topology: sj.Topology, paths: set[tuple[int, ...]]):
    order = walk(paths)
    count = len(order)
    fields = {
        name: np.asarray(getattr(topology, name)) for name in ("parents", "ranks", "depths", "valid", "num_draws")
    }
    assert fields["valid"].tolist() == [slot < count for slot in range(topology.shape.num_nodes)]
    assert [np.asarray(value).dtype for value in fields.values()] == [np.int32, np.int32, np.int32, bool, np.int32]
    for slot, path in enumerate(order):
        assert fields["parents"][slot] == (order.index(path[:-1]) if path else -1)
        assert fields["depths"][slot] == len(path)
        if path:
            assert fields["ranks"][slot] == path[-1]
        ranks = [other[-1] for other in order if other and other[:-1] == path]
        assert fields["num_draws"][slot] == max(ranks, default=-1) + 1
    assert np.all(fields["parents"][count:] == -1)
    assert not np.any(fields["num_draws"][count:])
    # Levels hold the expanded nodes, each once, at its depth; feed_rows is their row in level order.
    feed = np.concatenate([*map(np.asarray, topology.levels), np.zeros(0, int)])
    expanded = [slot for slot in range(count) if fields["num_draws"][slot]]
    assert sorted(feed[feed < topology.shape.num_nodes].tolist()) == expanded
    for level, slots in enumerate(topology.levels):
        assert len(slots) == topology.shape.widths[level]
        assert all(fields["depths"][slot] == level for slot in slots if slot < topology.shape.num_nodes)
    feed_rows = np.asarray(topology.feed_rows)
    assert [slot for slot in range(topology.shape.num_nodes) if feed_rows[slot] >= 0] == expanded
    assert all(feed[feed_rows[slot]] == slot for slot in expanded)


@given(random_paths, st.randoms())
def test_paths_in_any_order_become_depth_first_slots(paths, random):
    shuffled = list(paths)
    random.shuffle(shuffled)
    topology = sj.Topology.from_paths(shuffled)
    check_against_paths(topology, paths)
    assert topology.shape.num_nodes == len(paths) + 1
    assert topology.shape.depth == max(map(len, paths))
    for level, arity in enumerate(topology.shape.arities):
        assert arity == max(path[-1] + 1 for path in paths if len(path) == level + 1)


@given(random_paths, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
def test_padding_keeps_the_tree(paths, nodes, width, deeper):
    tight = sj.Topology.from_paths(list(paths))
    shape = sj.TreeShape(
        tight.shape.num_nodes + nodes,
        (*(own + width for own in tight.shape.widths), *[1 + width] * deeper),
        (*tight.shape.arities, *[2] * deeper),
    )
    padded = tight.pad(shape)
    check_against_paths(padded, paths)
    assert padded.shape == shape
    # Padding what is padded is padding once.
    again = padded.pad(shape)
    for field in dataclasses.fields(padded):
        np.testing.assert_equal(getattr(again, field.name), getattr(padded, field.name))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_schedules_have_their_widths(schedule):
    topology = sj.Topology.from_schedule(schedule)
    widths = np.cumprod(schedule)
    depths = np.asarray(topology.depths)
    assert [int((depths == depth).sum()) for depth in range(len(schedule) + 1)] == [1, *widths]
    assert topology.shape == sj.TreeShape(int(widths.sum()) + 1, (1, *widths[:-1]), tuple(schedule))
    for slot in range(topology.shape.num_nodes):
        children = np.flatnonzero(np.asarray(topology.parents) == slot)
        assert np.asarray(topology.ranks)[children].tolist() == list(range(len(children)))


def test_schedule_of_the_paper():
    topology = sj.Topology.from_schedule((3, 2, 1))
    assert topology.parents.tolist() == [-1, 0, 1, 2, 1, 4, 0, 6, 7, 6, 9, 0, 11, 12, 11, 14]
    assert topology.shape == sj.TreeShape(16, (1, 3, 6), (3, 2, 1))
    assert (topology.shape.depth, topology.shape.num_draws, topology.shape.num_expanded) == (3, 3, 10)


@pytest.mark.parametrize("length", range(6))
def test_chains(length):
    topology = sj.Topology.chain(length)
    assert topology.parents.tolist() == [-1, *range(length)]
    assert topology.depths.tolist() == list(range(length + 1))
    assert topology.shape == sj.TreeShape(length + 1, (1,) * length, (1,) * length)


def test_common_shape_is_the_smallest():
    topologies = [sj.Topology.chain(0), sj.Topology.chain(4), sj.Topology.from_schedule((3, 2))]
    topologies.append(sj.Topology.from_paths([[0], [5], [5, 0]]))
    shape = sj.common_shape(topologies)
    assert shape == sj.TreeShape(10, (1, 3, 1, 1), (6, 2, 1, 1))
    for topology in topologies:
        assert topology.pad(shape).shape == shape
    with pytest.raises(ValueError, match="at least one"):
        sj.common_shape([])


@pytest.mark.parametrize("smaller", [(9, (1, 3), (3, 2)), (10, (1, 2), (3, 2)), (10, (1, 3), (3, 1)), (10, (1,), (3,))])
def test_a_tree_that_does_not_fit_is_refused(smaller):
    with pytest.raises(ValueError, match="does not fit"):
        sj.Topology.from_schedule((3, 2)).pad(sj.TreeShape(*smaller))


@pytest.mark.parametrize(
    ("paths", "parents"),
    [
        ([[0]], [-1, 0]),
        ([[0], [1], [2]], [-1, 0, 0, 0]),
        ([[0] * n for n in range(1, 6)], [-1, 0, 1, 2, 3, 4]),
        ([[0, 0], [0], [1]], [-1, 0, 1, 0]),
        (np.array([[0], [1]]), [-1, 0, 0]),
    ],
)
def test_path_lists_at_the_edges(paths, parents):
    """B27: one node, one level, a chain, and unsorted paths, which are normalised."""
    assert sj.Topology.from_paths(paths).parents.tolist() == parents


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0, 0]], r"path 0, \[0, 0\], lacks its parent \[0\]"),
        ([[0], [0]], r"path 1, \[0\], is there twice"),
        ([], "at least one path"),
        ([[0], []], "path 1 is"),
        ([[0], [-1]], "path 1 is"),
        ([[0], [0.0]], "path 1 is"),
        ([[0], [True]], "path 1 is"),
        ([0], "path 0 is 0"),
        (["0"], "path 0 is"),
        ([[0], None], "path 1 is None"),
    ],
)
def test_bad_paths_are_named(paths, message):
    """B27: a missing parent, duplicates and an empty tree raise an error that names the entry."""
    with pytest.raises(ValueError, match=message):
        sj.Topology.from_paths(paths)


@pytest.mark.parametrize("paths", [None, 5])
def test_what_is_no_list_of_paths_is_refused(paths):
    with pytest.raises(ValueError, match="path"):
        sj.Topology.from_paths(paths)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((), "at least one entry"),
        ((3, 0), "entry 1 is 0"),
        ((3, -1), "entry 1 is -1"),
        ((2.0, 1), "entry 0 is 2.0"),
        ((True,), "entry 0 is True"),
        (3, "a sequence such as"),
        ("32", "a sequence such as"),
        (None, "a sequence such as"),
        ([[0], [1]], r"entry 0 is \[0\].*Topology.from_paths"),
        ((2, np.array([0])), "entry 1 is .*Topology.from_paths"),
    ],
)
def test_bad_schedules_are_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        sj.Topology.from_schedule(schedule)


@pytest.mark.parametrize("length", [-1, 2.0, None, True, "3"])
def test_bad_chains_are_refused(length):
    with pytest.raises(ValueError, match="integer >= 0"):
        sj.Topology.chain(length)


def test_picture_shows_every_node_below_its_parent():
    topology = sj.Topology.from_paths([[0], [0, 1], [2]])
    assert sj.draw_picture(topology) == "root\n├─ 0\n│  └─ 1\n└─ 2"
    padded = topology.pad(sj.TreeShape(7, (1, 2), (3, 2)))
    assert sj.draw_picture(padded) == sj.draw_picture(topology)
    assert sj.draw_picture(topology, ["a", "b", "c", "d"]) == "a\n├─ b\n│  └─ c\n└─ d"


def tree_of(parents, depths, valid=None, max_depth=4) -> sj.TokenTree:
    lone = root_tree(np.zeros(1, np.int32))
    count = len(parents)
    return dataclasses.replace(
        lone,
        tokens=np.arange(count),
        parents=np.array(parents),
        depths=np.array(depths),
        valid=np.ones(count, bool) if valid is None else np.array(valid),
        max_depth=max_depth,
    )


def test_check_tree_takes_good_trees():
    check_tree(tree_of([-1, 0, 0, 1], [0, 1, 1, 2]))
    check_tree(tree_of([-1, 7, 0, 2], [0, 9, 1, 2], [True, False, True, True]))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_of([0, 0], [0, 1]), "slot 0"),
        (tree_of([-1, 0], [1, 1]), "slot 0"),
        (tree_of([-1, 0], [0, 1], [False, True]), "slot 0"),
        (tree_of([-1, 2, 0], [0, 2, 1]), "slot 1"),
        (tree_of([-1, 0, 2], [0, 1, 2]), "slot 2"),
        (tree_of([-1, -1], [0, 1]), "slot 1"),
        (tree_of([-1, 0, 1], [0, 1, 2], [True, False, True]), "slot 2"),
        (tree_of([-1, 0, 1], [0, 1, 1]), "slot 2: depth 1"),
        (tree_of([-1, 0, 1], [0, 1, 2], max_depth=1), "deeper than max_depth=1"),
    ],
)
def test_check_tree_names_the_slot(tree, message):
    with pytest.raises(ValueError, match=message):
        check_tree(tree)
