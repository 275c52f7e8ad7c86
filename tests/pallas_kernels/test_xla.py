"""Tree attention in plain XLA against the reference, and the reference against NumPy loops."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention, xla

TOLERANCE = 2e-5


def problem(seed, *, batch=2, rows=4, tree_rows=None, heads=4, kv_heads=2, capacity=8, head_dim=16, lengths=None):
    """Random inputs, in float64 so that NumPy can be exact; every row sees itself."""
    rng = np.random.default_rng(seed)
    tree_rows = rows if tree_rows is None else tree_rows
    mask = rng.random((batch, rows, tree_rows)) < 0.5
    mask[:, np.arange(rows), tree_rows - rows + np.arange(rows)] = True
    return {
        "q": rng.normal(size=(batch, rows, heads, head_dim)),
        "k_cache": rng.normal(size=(batch, kv_heads, capacity, head_dim)),
        "v_cache": rng.normal(size=(batch, kv_heads, capacity, head_dim)),
        "k_tree": rng.normal(size=(batch, kv_heads, tree_rows, head_dim)),
        "v_tree": rng.normal(size=(batch, kv_heads, tree_rows, head_dim)),
        "prefix_lengths": rng.integers(0, capacity + 1, batch) if lengths is None else np.asarray(lengths),
        "tree_mask": mask,
    }


def attend(inputs, implementation, dtype=jnp.float32):
    arrays: dict[str, Any] = {name: jnp.asarray(value) for name, value in inputs.items()}
    arrays = {name: a.astype(dtype) if a.ndim == 4 else a for name, a in arrays.items()}
    arrays["prefix_lengths"] = arrays["prefix_lengths"].astype(jnp.int32)
    # A new function each time, so that it is traced again: tests change the size of blocks.
    compiled = jax.jit(lambda arrays: tree_attention(**arrays, implementation=implementation))
    return np.asarray(compiled(arrays).astype(jnp.float32))


def by_loops(inputs):
    """The definition, one query at a time, over lists of what it may see."""
    q = inputs["q"]
    out = np.zeros(q.shape)
    group = q.shape[2] // inputs["k_tree"].shape[1]
    for b, n, h in np.ndindex(q.shape[:3]):
        keys, values = [], []
        for s in range(inputs["prefix_lengths"][b]):
            keys.append(inputs["k_cache"][b, h // group, s])
            values.append(inputs["v_cache"][b, h // group, s])
        for m in np.flatnonzero(inputs["tree_mask"][b, n]):
            keys.append(inputs["k_tree"][b, h // group, m])
            values.append(inputs["v_tree"][b, h // group, m])
        if keys:
            weights = np.exp([q[b, n, h] @ key / math.sqrt(q.shape[3]) for key in keys])
            out[b, n, h] = weights @ np.array(values) / weights.sum()
    return out


SHAPES = [
    dict(),
    dict(rows=1, capacity=1),
    dict(capacity=0),
    dict(rows=1, capacity=0, heads=1, kv_heads=1),
    dict(rows=3, tree_rows=7),
    dict(batch=3, lengths=[0, 5, 9], capacity=9, heads=6, kv_heads=1, head_dim=10),
    dict(heads=4, kv_heads=4, rows=33, capacity=65),
]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(implementation, shape):
    """B28: no cache, one row, grouped heads, ragged lengths, a tree buffer longer than the fed rows."""
    inputs = problem(0, **shape)
    np.testing.assert_allclose(attend(inputs, implementation), by_loops(inputs), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "extra", "capacity", "heads", "kv_heads"),
    [(1, 0, 17, 4, 2), (2, 5, 40, 3, 1), (7, 0, 0, 3, 1), (31, 5, 17, 4, 2)],
)
def test_equals_the_reference(rows, extra, capacity, heads, kv_heads):
    """B28: over the shapes a kernel sees."""
    inputs = problem(rows, rows=rows, tree_rows=rows + extra, capacity=capacity, heads=heads, kv_heads=kv_heads)
    np.testing.assert_allclose(attend(inputs, "xla"), attend(inputs, "reference"), atol=TOLERANCE)


def small_blocks(monkeypatch, keys):
    """Read the prefix ``keys`` rows at a time, as a long one is."""
    monkeypatch.setattr(xla, "_SCORES", 0)
    monkeypatch.setattr(xla, "_FEWEST_KEYS", keys)


@pytest.mark.parametrize("keys", [8, 16])
def test_a_prefix_read_in_blocks_is_the_same_prefix(monkeypatch, keys):
    """Blocks that divide the cache and that do not; lengths around the end of one; the last ones are nobody's."""
    small_blocks(monkeypatch, keys)
    inputs = problem(9, batch=6, rows=5, capacity=40, lengths=[0, 1, keys - 1, keys, keys + 1, 30])
    right = by_loops(inputs)
    for name in ("k_cache", "v_cache"):
        for row, length in enumerate(inputs["prefix_lengths"]):
            inputs[name][row, :, length:] = np.nan
    np.testing.assert_allclose(attend(inputs, "xla"), right, atol=TOLERANCE)


def test_blocks_past_the_longest_prefix_are_not_looked_at(monkeypatch):
    small_blocks(monkeypatch, 8)
    looked, einsum = [], jnp.einsum

    def counted(*arguments, **options):
        jax.debug.callback(lambda: looked.append(arguments[0]))
        return einsum(*arguments, **options)

    monkeypatch.setattr(jnp, "einsum", counted)
    attend(problem(10, capacity=40, lengths=[9, 3]), "xla")
    jax.effects_barrier()
    assert looked.count("bhrd,bhkd->bhrk") == 1 + 2  # the tree, and two of five blocks


def test_bfloat16_stays_close():
    inputs = problem(1, rows=7, capacity=40, head_dim=64)
    np.testing.assert_allclose(attend(inputs, "xla", jnp.bfloat16), by_loops(inputs), atol=2e-2)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_one_hot_values_show_exactly_what_was_seen(implementation):
    """With equal scores and one-hot values the output is the visible set, so one wrong bit moves it by 1 / its size."""
    capacity, rows = 6, 5
    inputs = problem(2, batch=3, rows=rows, capacity=capacity, head_dim=capacity + rows, lengths=[0, 2, 6])
    inputs["q"] = np.zeros_like(inputs["q"])
    one_hot = np.broadcast_to(np.eye(capacity + rows), (3, 2, capacity + rows, capacity + rows))
    inputs["v_cache"], inputs["v_tree"] = one_hot[:, :, :capacity], one_hot[:, :, capacity:]
    prefix = np.arange(capacity) < inputs["prefix_lengths"][:, None, None]
    seen = np.concatenate([np.broadcast_to(prefix, (3, rows, capacity)), inputs["tree_mask"]], axis=-1)
    found = attend(inputs, implementation) * seen.sum(-1)[:, :, None, None]
    np.testing.assert_allclose(found, np.broadcast_to(seen[:, :, None], found.shape), atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_slots_nobody_sees_may_hold_anything(implementation, poison):
    """A weight of 0 times NaN is NaN, so it takes more than a masked score."""
    inputs = problem(3, rows=3, tree_rows=5, lengths=[0, 4])
    inputs["tree_mask"][:, :, 0] = False
    clean = by_loops(inputs)
    for name in ("k_cache", "v_cache"):
        for row, length in enumerate(inputs["prefix_lengths"]):
            inputs[name][row, :, length:] = poison
    for name in ("k_tree", "v_tree"):
        inputs[name][:, :, 0] = poison
    np.testing.assert_allclose(attend(inputs, implementation), clean, atol=TOLERANCE)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_that_see_nothing_are_zero(implementation):
    """Padding rows: neither NaN nor the mean of what is masked."""
    inputs = problem(4, lengths=[0, 3])
    inputs["tree_mask"][:, 1] = False
    found = attend(inputs, implementation)
    np.testing.assert_array_equal(found[0, 1], 0)
    np.testing.assert_allclose(found, by_loops(inputs), atol=TOLERANCE)


@pytest.mark.parametrize("keys", [8, 3])
def test_large_scores_do_not_overflow(monkeypatch, keys):
    """Tree and blocks share the maximum, wherever it is."""
    small_blocks(monkeypatch, keys)
    for name in ("k_cache", "k_tree"):
        inputs = problem(5, lengths=[8, 8])
        inputs[name][:, :, 0] *= 1e4
        np.testing.assert_allclose(attend(inputs, "xla"), attend(inputs, "reference"), atol=TOLERANCE)


@pytest.mark.parametrize("capacity", [0, 10])
def test_gradients_equal_the_references(monkeypatch, capacity):
    """Training runs through it, a chain on an empty cache; and through the blocks of a prefix."""
    small_blocks(monkeypatch, 4)
    inputs = problem(6, capacity=capacity, lengths=[0, min(capacity, 5)])
    inputs["tree_mask"] = np.broadcast_to(np.tri(4, dtype=bool), (2, 4, 4))
    arrays: dict[str, Any] = {name: jnp.asarray(value) for name, value in inputs.items()}
    floats = {name: array.astype(jnp.float32) for name, array in arrays.items() if array.ndim == 4}
    fixed: dict[str, Any] = {name: arrays[name] for name in ("prefix_lengths", "tree_mask")}
    fixed["prefix_lengths"] = fixed["prefix_lengths"].astype(jnp.int32)

    def loss(floats, implementation):
        return (tree_attention(**floats, **fixed, implementation=implementation) ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    ours, theirs = gradient(floats, "xla"), gradient(floats, "reference")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, theirs)
    assert float(jnp.abs(ours["k_tree"]).max()) > 0.1


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_do_not_read_what_nobody_sees(monkeypatch, implementation):
    """Slots past the prefix and rows that the mask hides hold NaN; the gradient is that with zeros there."""
    small_blocks(monkeypatch, 4)
    inputs = problem(6, tree_rows=5, capacity=10, lengths=[0, 5])
    inputs["tree_mask"][:, :, 0] = False

    def gradient(hidden):
        arrays: dict[str, Any] = {name: np.array(value, value.dtype) for name, value in inputs.items()}
        for name in ("k_cache", "v_cache"):
            arrays[name][0], arrays[name][1, :, 5:] = hidden, hidden
        arrays["k_tree"][:, :, 0] = arrays["v_tree"][:, :, 0] = hidden
        floats = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items() if array.ndim == 4}
        fixed: dict[str, Any] = {name: jnp.asarray(arrays[name]) for name in ("prefix_lengths", "tree_mask")}
        return compiled(floats, fixed)

    def loss(floats, fixed):
        return (tree_attention(**floats, **fixed, implementation=implementation) ** 2).sum()

    compiled = jax.jit(jax.grad(loss))
    dirty, clean = gradient(np.nan), gradient(0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), dirty, clean)
    assert float(jnp.abs(clean["q"]).max()) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 2.5}, "window of a whole number"),
        ({"window": True}, "window of a whole number"),
        ({"window": 0}, "window of at least 1"),
        ({"window": 2**31}, "within int32"),
        ({"prefix_lengths": jnp.zeros(2)}, "whole numbers of committed rows, got .*float32"),
        ({"q": jnp.zeros((2, 4, 4, 16), int)}, "expected q of a floating dtype, got int32"),
        ({"k_tree": jnp.zeros((2, 0, 4, 16))}, "multiple of KV heads, at least one, got 4 query and 0 KV"),
        ({"implementation": []}, "unknown attention implementation"),
        ({"config": {}}, "expected config of type Config"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_kind_are_refused(change, message):
    arguments: dict[str, Any] = {name: jnp.asarray(value) for name, value in problem(8).items()}
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments | change)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 4, 3, 16), "multiple of KV heads"),
        ("q", (2, 4, 64), r"expected q \[B, N, Hq, D\]"),
        ("v_tree", (2, 2, 5, 16), "k_tree and v_tree of one shape"),
        ("k_cache", (2, 1, 8, 16), "k_cache and v_cache of one shape"),
        ("prefix_lengths", (3,), "expected prefix_lengths"),
        ("tree_mask", (2, 4, 5), "expected prefix_lengths"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, message):
    inputs = problem(7)
    inputs[name] = np.zeros(shape, inputs[name].dtype)
    with pytest.raises(ValueError, match=message):
        attend(inputs, "xla")


def test_mask_must_be_boolean_and_the_name_known():
    inputs = problem(8)
    with pytest.raises(ValueError, match="flash"):
        attend(inputs, "flash")
    arrays: dict[str, Any] = {name: jnp.asarray(value) for name, value in inputs.items()}
    with pytest.raises(ValueError, match="got float32 keys and bfloat16 values in the cache"):
        tree_attention(**arrays | {"v_cache": arrays["v_cache"].astype(jnp.bfloat16)})
    inputs["tree_mask"] = inputs["tree_mask"].astype(np.int32)
    with pytest.raises(ValueError, match="boolean tree_mask"):
        attend(inputs, "xla")
