"""The cache's append and commit against NumPy, under jit; and a committed path against a fresh prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.cache import KVCache

BATCH, HEADS, CAPACITY, DIM, ROWS, PICKED = 3, 2, 10, 4, 7, 4


def filled(seed: int, lengths, dtype=np.float32) -> KVCache:
    """Two layers of random rows up to each length; NaN behind, which nothing may read."""
    rng = np.random.default_rng(seed)
    cache = KVCache.create(num_layers=2, batch=BATCH, num_kv_heads=HEADS, capacity=CAPACITY, head_dim=DIM, dtype=dtype)

    def rows():
        values = rng.normal(size=(BATCH, HEADS, CAPACITY, DIM)).astype(np.float32)
        for row, length in enumerate(lengths):
            values[row, :, length:] = np.nan
        return jnp.asarray(values, dtype)

    return KVCache((rows(), rows()), (rows(), rows()), cache.k_tree, cache.v_tree, jnp.asarray(lengths, jnp.int32))


def fed(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(BATCH, HEADS, count, DIM)).astype(np.float32) for _ in range(4)]


@jax.jit
def append_and_commit(cache, first, second, rows, counts):
    for layer in range(2):
        cache = cache.append(layer, first[2 * layer], first[2 * layer + 1])
    for layer in range(2):
        cache = cache.append(layer, second[2 * layer], second[2 * layer + 1])
    return cache.commit(rows, counts)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.data())
def test_commit_equals_numpy_under_jit(seed, data):
    """B24: any rows in any order, another number of them per sequence, from two appends; nothing else moves."""
    lengths = data.draw(st.lists(st.integers(0, CAPACITY - PICKED), min_size=BATCH, max_size=BATCH))
    counts = np.array(data.draw(st.lists(st.integers(0, PICKED), min_size=BATCH, max_size=BATCH)))
    rows = np.random.default_rng(seed).integers(0, ROWS, (BATCH, PICKED))
    first, second = fed(seed, 3), fed(seed + 1, ROWS - 3)
    cache = filled(seed, lengths)
    want = [np.array(buffer) for pair in zip(cache.k, cache.v) for buffer in pair]
    for buffer, a, b in zip(want, first, second):
        tree = np.concatenate([a, b], axis=2)
        for row, (length, count) in enumerate(zip(lengths, counts)):
            for place in range(count):
                buffer[row, :, length + place] = tree[row, :, rows[row, place]]
    out = append_and_commit(cache, first, second, jnp.asarray(rows), jnp.asarray(counts))
    got = [buffer for pair in zip(out.k, out.v) for buffer in pair]
    for ours, theirs in zip(got, want):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(out.lengths, np.array(lengths) + counts)
    assert {tree.shape[2] for tree in (*out.k_tree, *out.v_tree)} == {0}


def test_rows_beyond_the_count_may_be_nonsense():
    cache = filled(0, [2, 3, 4])
    first, second = fed(0, 3), fed(1, 4)
    good = append_and_commit(cache, first, second, jnp.array([[0, 5, 0, 0]] * 3), jnp.array([2, 1, 0]))
    bad = append_and_commit(cache, first, second, jnp.array([[0, 5, 99, -7]] * 3), jnp.array([2, 1, 0]))
    for a, b in zip(jax.tree.leaves(good), jax.tree.leaves(bad)):
        np.testing.assert_array_equal(a, b)


def test_committing_into_the_last_rows_does_not_wrap_around():
    cache = filled(0, [CAPACITY - 1, CAPACITY - 4, 0])
    out = append_and_commit(cache, fed(0, 3), fed(1, 4), jnp.array([[6, 5, 4, 3]] * 3), jnp.array([1, 4, 4]))
    for layer in range(2):
        np.testing.assert_array_equal(out.k[layer][0, :, : CAPACITY - 1], cache.k[layer][0, :, : CAPACITY - 1])
        assert np.all(np.isfinite(out.k[layer][:2]))
    assert out.lengths.tolist() == [CAPACITY, CAPACITY, 4]


def test_more_rows_than_the_cache_has_may_be_offered():
    """A tree deeper than a small cache: no more are kept than there is room for."""
    rows = jnp.array([[6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0]] * 3)
    out = append_and_commit(filled(0, [CAPACITY - 2, 0, 1]), fed(0, 3), fed(1, 4), rows, jnp.array([2, 3, 0]))
    same = append_and_commit(filled(0, [CAPACITY - 2, 0, 1]), fed(0, 3), fed(1, 4), rows[:, :4], jnp.array([2, 3, 0]))
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(same)):
        np.testing.assert_array_equal(a, b)


def test_discard_forgets_the_tree_only():
    cache = filled(0, [1, 2, 3])
    appended = cache.append(0, *fed(0, 3)[:2]).append(1, *fed(0, 3)[2:])
    assert [tree.shape[2] for tree in (*appended.k_tree, *appended.v_tree)] == [3] * 4
    for a, b in zip(jax.tree.leaves(appended.discard()), jax.tree.leaves(cache)):
        np.testing.assert_array_equal(a, b)


def test_appending_to_one_layer_leaves_the_other():
    k, v = fed(0, 3)[:2]
    cache = filled(0, [1, 2, 3]).append(1, k, v)
    assert cache.k_tree[0].shape[2] == 0
    np.testing.assert_array_equal(cache.k_tree[1], k)
    np.testing.assert_array_equal(cache.v_tree[1], v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_are_kept_in_the_caches_dtype(dtype):
    cache = filled(0, [1, 2, 3], dtype)
    k, v = fed(0, 2)[:2]
    appended = cache.append(0, k, v).append(1, v, k)
    assert appended.k_tree[0].dtype == dtype
    out = appended.commit(jnp.array([[0, 1]] * 3), jnp.array([2, 0, 1]))
    assert out.k[0].dtype == dtype
    np.testing.assert_array_equal(out.k[0][0, :, 1:3], jnp.asarray(k[0], dtype))
