"""The dynamic program against every tree there is."""

import itertools

import numpy as np
import pytest

import specjax as sj
from experiments.search import schedules
from specjax.replay import best_size, expected_tokens, optimal_trees


def every_tree(num_nodes: int, depth: int, ranks: int):
    """All sets of paths of this many nodes below the root, closed under parents, by growing one node at a time."""
    level = {frozenset()}
    for _ in range(num_nodes):
        level = {
            paths | {(*parent, rank)}
            for paths in level
            for parent in ((), *paths)
            if len(parent) < depth
            for rank in range(ranks)
            if (*parent, rank) not in paths
        }
    return level


def by_hand(paths, table) -> float:
    return 1 + sum(np.prod([table[depth][rank] for depth, rank in enumerate(path)]) for path in paths)


@pytest.mark.parametrize(("depth", "ranks"), [(7, 2), (3, 3), (2, 4)])
def test_it_equals_brute_force_for_every_size(depth, ranks):
    """n <= 8, root included; random tables, whose ranks are in no order, so that leaving one out may pay."""
    rng = np.random.default_rng(depth)
    tables = [rng.dirichlet([0.6] * (ranks + 1), depth)[:, :ranks] for _ in range(3)]
    solved = [optimal_trees(table, 8) for table in tables]
    best = [0.0] * len(tables)
    for nodes in range(1, 9):
        trees = every_tree(nodes - 1, depth, ranks)
        for place, (table, optimum) in enumerate(zip(tables, solved)):
            best[place] = max([best[place], *(by_hand(paths, table) for paths in trees)])
            assert optimum.expected[nodes - 1] == pytest.approx(best[place], abs=1e-12)
            tree = optimum.topology(nodes)
            assert tree.shape.num_nodes <= nodes
            assert expected_tokens(tree, table) == pytest.approx(best[place], abs=1e-12)


def test_it_equals_brute_force_over_all_shapes_of_eight_nodes():
    """Rates that fall with the rank, so that no rank is left out: every ordered tree of up to 8 nodes, 626 in all."""

    def shapes(nodes: int) -> list[list[tuple[int, ...]]]:  # forests of so many nodes, as paths
        if not nodes:
            return [[]]
        found = []
        for first in range(1, nodes + 1):
            for below, rest in itertools.product(shapes(first - 1), shapes(nodes - first)):
                found.append([(0,), *((0, *path) for path in below), *((path[0] + 1, *path[1:]) for path in rest)])
        return found

    rng = np.random.default_rng(0)
    table = -np.sort(-rng.dirichlet([0.4] * 8, 7)[:, :7], axis=1)
    optimum, counted, best = optimal_trees(table, 8), 0, 0.0
    for nodes in range(1, 9):
        trees = shapes(nodes - 1)
        counted += len(trees)
        best = max([best, *(by_hand(paths, table) for paths in trees)])
        assert optimum.expected[nodes - 1] == pytest.approx(best, abs=1e-12)
    assert counted == 626  # Catalan numbers 1, 1, 2, 5, 14, 42, 132 and 429


def test_no_schedule_of_its_size_is_better():
    rng = np.random.default_rng(0)
    table = np.sort(rng.dirichlet([1.0, 0.5, 0.4, 0.3, 0.3, 0.3, 1.0], 6)[:, :6])[:, ::-1]
    optimum = optimal_trees(table, 40)
    tried = 0
    for schedule in schedules(40, 6):
        if max(schedule) <= 6:
            nodes = 1 + int(np.cumprod(schedule).sum())
            assert expected_tokens(schedule, table) <= optimum.expected[nodes - 1] + 1e-12, schedule
            tried += 1
    assert tried > 300


def test_schedules_paths_and_topologies_are_one():
    table = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.1]]
    want = 1 + 0.7 + 0.7 * 0.4
    assert expected_tokens((2, 1), table) == pytest.approx(want)
    assert expected_tokens([[0], [1], [0, 0], [1, 0]], table) == pytest.approx(want)
    assert expected_tokens(sj.Topology.from_schedule((2, 1)), table) == pytest.approx(want)
    assert expected_tokens((2, 1, 1), table) == pytest.approx(want)  # deeper than what is known


def test_the_hardware_decides_the_size():
    optimum = optimal_trees([[0.6, 0.2]] * 5, 24)
    sizes = [
        best_size(optimum, lambda tree, slope=slope: 1 + slope * tree.shape.num_nodes)[0].shape.num_nodes
        for slope in (0.0, 0.02, 0.2, 2.0)
    ]
    assert sizes[0] == 24
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


NO_TABLES = (([0.5, 0.2], "table"), ([[0.9, 0.3]], "sum to <= 1"), ([[-0.1]], "probabilities"), ([[np.nan]], "table"))


@pytest.mark.parametrize(("acceptance", "message"), NO_TABLES)
def test_what_is_no_table_of_probabilities_is_refused(acceptance, message):
    with pytest.raises(ValueError, match=message):
        optimal_trees(acceptance, 4)
    with pytest.raises(ValueError, match=message):
        expected_tokens((2, 2), acceptance)


def test_a_tree_without_its_root_is_refused():
    with pytest.raises(ValueError, match="root"):
        optimal_trees([[0.5]], 0)


@pytest.mark.parametrize("wrong", [np.nan, 0.0, -1.0, np.inf])
def test_what_is_no_time_chooses_no_tree(wrong):
    with pytest.raises(ValueError, match=f"with 2 nodes it takes {wrong}"):
        best_size(optimal_trees([[0.5]], 3), lambda tree: wrong if tree.shape.num_nodes == 2 else 1.0)
