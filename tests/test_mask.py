"""Ancestor masks and depth-first places against brute force, for slots in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.mask import depth_first_positions
from specjax.testing import random_parents

SIZE = 12  # random trees are padded to it, so that jitted code is compiled once


def ancestors_by_hand(parents) -> np.ndarray:
    mask = np.zeros((len(parents), len(parents)), bool)
    for slot in range(len(parents)):
        at = slot
        while at >= 0:
            mask[slot, at] = True
            at = parents[at]
    return mask


def test_the_mask_of_the_documented_tree():
    rows = ["".join(str(int(bit)) for bit in row) for row in sj.ancestor_mask(jnp.array([-1, 0, 0, 1, 1, 2]))]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "101001"]


@st.composite
def shuffled_trees(draw):
    """Parents of a random tree of 1..SIZE nodes in any slot order, padded with lone nodes."""
    count = draw(st.integers(1, SIZE))
    parents = random_parents(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), count)
    if draw(st.booleans()):
        parents = np.array([-1, *range(count - 1)])  # the deepest tree there is
    order = np.array(draw(st.permutations(range(SIZE))))
    padded = np.append(parents, np.full(SIZE - count, -1))
    moved = np.full(SIZE, -1)
    moved[order] = np.where(padded >= 0, order[padded], -1)
    return moved


@given(shuffled_trees())
def test_mask_equals_walking_up(parents):
    np.testing.assert_array_equal(jax.jit(sj.ancestor_mask)(jnp.asarray(parents)), ancestors_by_hand(parents))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65])
def test_mask_of_chains_is_lower_triangular(count):
    for parents in (np.arange(-1, count - 1), np.append(np.arange(1, count), -1)):
        np.testing.assert_array_equal(sj.ancestor_mask(parents), ancestors_by_hand(parents))


def test_mask_takes_lists_and_padding_sees_itself_only():
    np.testing.assert_array_equal(sj.ancestor_mask([-1, 0, -1]), [[1, 0, 0], [1, 1, 0], [0, 0, 1]])


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.data())
def test_depth_first_places_equal_the_recursion(seed, data):
    """Siblings stand in slot order; nodes that are not counted take no place."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, SIZE)
    depths = np.zeros(SIZE, int)
    for slot in range(1, SIZE):
        depths[slot] = depths[parents[slot]] + 1
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)))
    wanted[0] = True
    counted = np.array([np.all(wanted[ancestors_by_hand(parents)[slot]]) for slot in range(SIZE)])

    order = []

    def visit(slot):
        order.append(slot)
        for child in range(SIZE):
            if parents[child] == slot and counted[child]:
                visit(child)

    visit(0)
    places = np.asarray(jax.jit(depth_first_positions)(jnp.asarray(parents), jnp.asarray(depths), jnp.asarray(counted)))
    assert [int(places[slot]) for slot in order] == list(range(len(order)))
