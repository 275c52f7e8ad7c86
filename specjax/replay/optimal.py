"""Sequoia's dynamic program: the tree of a given size that is expected to accept most."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specjax.replay.walk import Tree, transitions
from specjax.tree import Topology


class Optimum(NamedTuple):
    """The best tree of each size up to some number of nodes, for one acceptance table."""

    expected: np.ndarray  # [N] tokens per verify step of the best tree of at most 1, 2, .., N nodes, the root included
    acceptance: np.ndarray  # [D, K] what they are best for
    values: np.ndarray  # [D + 1, K + 1, N] the dynamic program's table

    def topology(self, num_nodes: int) -> Topology:
        """The best tree of at most ``num_nodes`` nodes; it has fewer only where more would add nothing.

        Raises:
          ValueError: for more nodes than the table was made for.
        """
        if not 1 <= num_nodes <= len(self.expected):
            raise ValueError(f"expected 1 to {len(self.expected)} nodes; got {num_nodes!r}")
        paths: list[tuple[int, ...]] = []
        # A node's path, the next rank below it, and the nodes that are left for that rank and later ones.
        todo: list[tuple[tuple[int, ...], int, int]] = [((), 0, num_nodes - 1)]
        while todo:
            path, rank, left = todo.pop()
            while left and rank < self.acceptance.shape[1] and len(path) < len(self.acceptance):
                own = _with_child(self.values, self.acceptance, len(path), rank, left)
                size = int(np.argmax(own))  # of the child's subtree; 0 leaves the rank out
                if size:
                    paths.append((*path, rank))
                    todo.append(((*path, rank), 0, size - 1))
                rank, left = rank + 1, left - size
        return Topology.from_paths(paths) if paths else Topology.chain(0)


def optimal_trees(acceptance: np.ndarray | Sequence, max_nodes: int) -> Optimum:
    """Solve for every size up to ``max_nodes`` at once (Sequoia, Chen et al. 2024, section 4.1, bounded depth).

    A node at depth d + 1 that is the draw of rank r below its parent is accepted with probability acceptance[d, r],
    given that its parent is: the positional acceptance assumption. Ranks may be left out and rows may be in any order,
    as measured tables are. Takes O(D K N^2).

    Args:
      acceptance: [D, K] probabilities, each row summing to at most 1; D bounds the depth and K the draws at a node.
      max_nodes: N, the root included.

    Raises:
      ValueError: for another shape, no probabilities, or no node.
    """
    table = _probabilities(acceptance)
    if max_nodes < 1:
        raise ValueError(f"a tree has at least its root; got {max_nodes=}")
    depth, ranks = table.shape
    # values[d, r, n]: most accepted below a node of depth d by n nodes that are its children of rank >= r, or below.
    values = np.zeros((depth + 1, ranks + 1, max_nodes))
    for level in reversed(range(depth)):
        for rank in reversed(range(ranks)):
            for nodes in range(1, max_nodes):
                values[level, rank, nodes] = np.max(_with_child(values, table, level, rank, nodes))
    return Optimum(1 + values[0, 0], table, values)


def _probabilities(acceptance: np.ndarray | Sequence) -> np.ndarray:
    table = np.asarray(acceptance, float)
    if table.ndim != 2 or not table.size or not (np.all(table >= 0) and np.all(table.sum(1) <= 1 + 1e-6)):
        raise ValueError(f"acceptance is a table [depth, rank] of probabilities whose rows sum to <= 1; got {table!r}")
    return table


def _with_child(values: np.ndarray, table: np.ndarray, level: int, rank: int, nodes: int) -> np.ndarray:
    """[nodes + 1] what n nodes bring when 0, 1, .., n of them are the subtree of the child of this rank."""
    later = values[level, rank + 1, nodes::-1]
    child = table[level, rank] * (1 + values[level + 1, 0, :nodes])
    return later + np.concatenate([[0.0], child])


def expected_tokens(tree: Tree, acceptance: np.ndarray | Sequence) -> float:
    """Expected tokens per verify step of a tree under the positional acceptance assumption.

    Args:
      tree: a schedule, paths, or a Topology.
      acceptance: [D, K] as in ``optimal_trees``; nodes deeper or of a greater rank are never accepted.

    Raises:
      ValueError: for what is no tree, or no table of probabilities.
    """
    table, rates = transitions(tree), _probabilities(acceptance)
    reach = np.zeros(len(table))
    reach[0] = total = 1.0
    for row in rates:
        below = np.zeros_like(reach)
        known = min(table.shape[1], len(row))
        for state in np.flatnonzero(reach):
            children = table[state, :known]
            np.add.at(below, children[children >= 0], reach[state] * row[:known][children >= 0])
        reach = below
        total += reach.sum()
    return float(total)


def best_size(optimum: Optimum, seconds: Callable[[Topology], float]) -> tuple[Topology, float]:
    """Sequoia's hardware-aware size: of the best trees of each size, the one that takes least time per token.

    Args:
      optimum: from ``optimal_trees``.
      seconds: how long a round with a tree takes, such as ``cost.RoundCost`` says.

    Returns:
      The tree, and its expected seconds per token.

    Raises:
      ValueError: for seconds that are not finite or not above 0, naming the tree's size.
    """
    trees = [optimum.topology(nodes) for nodes in range(1, len(optimum.expected) + 1)]
    taken = [float(seconds(tree)) for tree in trees]
    for tree, took in zip(trees, taken):
        if not 0 < took < np.inf:
            raise ValueError(f"a round takes finite seconds above 0; with {tree.shape.num_nodes} nodes it takes {took}")
    times = [took / float(expected) for took, expected in zip(taken, optimum.expected)]
    best = int(np.argmin(times))
    return trees[best], times[best]
