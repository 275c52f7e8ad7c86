"""The bodies of the TPU and GPU kernels, interpreted with race detection, against NumPy."""

import functools
import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import Config, tree_attention
from pallas_kernels.tree_attention.fold import tpu_nodes
from pallas_kernels.tree_attention.plan import HEAD_DIMS
from tests.pallas_kernels.inputs import assert_attends, make_inputs

# What lies past the end of an array reads as NaN, as does what was never written.
STRICT: dict[str, Any] = dict(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
TPU = pltpu.InterpretParams(**STRICT)
GPU = plgpu.InterpretGPUParams(**STRICT)

# B28's row counts, with what else a kernel branches on spread over them: covering arrays, in which every two values of
# different columns meet (see ``kinds``). Lengths are rows of one batch: empty, one, around the end of a block, full.
#   nodes, earlier tree rows, query heads, KV heads, head_dim, dtype, keys per block, capacity, window
TPU_CASES = [
    (1, 9, 2, 2, 128, "float32", 64, 59, 40),
    (2, 9, 6, 2, 256, "bfloat16", 16, 25, None),
    (7, 0, 4, 2, 80, "float32", 128, 256, 1),
    (16, 0, 6, 2, 64, "float32", 128, 120, 40),
    (31, 0, 4, 2, 256, "float32", 32, 49, None),
    (31, 1, 6, 2, 128, "float32", 64, 128, 3),
    (32, 9, 2, 2, 256, "bfloat16", 32, 64, 5),
    (33, 1, 4, 2, 64, "bfloat16", 128, 123, 3),
    (33, 1, 2, 2, 256, "float32", 48, 73, 70),
    (63, 0, 6, 2, 96, "float32", 128, 256, None),
    (64, 0, 4, 2, 128, "float32", 64, 97, 70),
    (65, 0, 6, 2, 128, "bfloat16", 16, 32, 70),
    (65, 3, 4, 2, 128, "bfloat16", 128, 193, None),
    (127, 0, 2, 2, 80, "float32", 128, 193, 1),
    (128, 0, 2, 2, 256, "bfloat16", 128, 123, None),
]
#   the same, then rows of a program, splits, stages, and which third of the lengths (each takes programs of its own)
GPU_CASES = [
    (1, 0, 6, 2, 256, "bfloat16", 64, 192, 70, 64, 2, 3, 2),
    (2, 0, 4, 2, 96, "bfloat16", 128, 256, 3, 64, 3, 2, 0),
    (2, 1, 2, 2, 80, "float16", 128, 168, None, 128, 1, 3, 0),
    (7, 3, 4, 2, 128, "float16", 128, 168, 70, 128, 1, 3, 1),
    (16, 0, 6, 2, 256, "bfloat16", 64, 192, 70, 64, 1, 2, 1),
    (16, 0, 4, 2, 80, "bfloat16", 128, 256, 70, 128, 1, 2, 0),
    (31, 9, 6, 2, 64, "float16", 64, 192, 3, 128, 3, 4, 0),
    (32, 9, 6, 2, 80, "float16", 128, 184, None, 64, 2, 2, 2),
    (32, 0, 2, 2, 96, "bfloat16", 128, 136, None, 64, 2, 3, 1),
    (33, 9, 4, 2, 80, "bfloat16", 64, 168, 20, 128, 3, 3, 1),
    (63, 0, 4, 2, 64, "bfloat16", 64, 192, None, 128, 2, 3, 2),
    (63, 0, 6, 2, 96, "float16", 64, 192, 5, 128, 1, 2, 2),
    (64, 5, 2, 2, 256, "float16", 128, 184, 5, 64, 3, 3, 0),
    (65, 0, 2, 2, 128, "float16", 128, 136, None, 64, 3, 2, 2),
    (127, 1, 2, 2, 96, "float16", 64, 168, 20, 128, 1, 4, 1),
    (127, 1, 4, 2, 256, "float16", 64, 192, None, 64, 4, 3, 2),
    (128, 0, 2, 2, 80, "bfloat16", 64, 192, 5, 128, 2, 2, 0),
    (128, 0, 6, 2, 256, "float16", 64, 136, 3, 64, 2, 3, 1),
]


def kinds(case) -> dict[str, Any]:
    """What of a case a kernel can tell apart: values of one kind go the same way."""
    nodes, earlier, q_heads, kv_heads, head_dim, dtype, keys, capacity, window, *config = case
    found = {
        "nodes": 8 if nodes <= 8 else max(tpu_nodes(nodes), 32),
        "earlier rows": earlier > 0,
        "group": q_heads // kv_heads,
        "dtype": dtype,
        "cache": "shorter than a block" if capacity < keys else "whole blocks" if capacity % keys == 0 else "a rest",
        "window": "none" if window is None else "of the tree" if window <= 5 else "of the prefix",
    }
    if not config:
        return found | {"head_dim": head_dim if head_dim >= 128 else "narrower than a register"}
    # 64 and 128 are one swizzle and one product with values; 256 is two products, of one warpgroup.
    rows, splits, stages, lengths = config
    found |= {"head_dim": max(head_dim, 128) if head_dim % 64 == 0 else head_dim, "keys": keys, "rows": rows}
    return found | {"splits": min(splits, 3), "stages": min(stages, 3), "lengths": lengths}


@pytest.mark.parametrize("cases", [TPU_CASES, GPU_CASES], ids=["tpu", "gpu"])
def test_every_two_kinds_meet_in_a_case(cases):
    rows = [kinds(case) for case in cases]
    levels = {name: {row[name] for row in rows} for name in rows[0]}
    assert [len(levels[name]) for name in ("nodes", "group", "window")] == [4, 3, 3]
    met = {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}
    for (name, values), (other, others) in itertools.combinations(levels.items(), 2):
        for pair in itertools.product([(name, value) for value in values], [(other, value) for value in others]):
            assert frozenset(pair) in met or set(pair) == {("head_dim", 256), ("rows", 128)}, pair  # that is refused
    assert {1, 2, 7, 31, 32, 33, 63, 64, 65, 127} <= {case[0] for case in cases}
    assert {case[4] for case in cases} == set(HEAD_DIMS)


def run(case, config, implementation, which=slice(None)):
    nodes, earlier, q_heads, kv_heads, head_dim, dtype, keys, capacity, window = case
    lengths = sorted({0, 1, *(min(keys + step, capacity) for step in (-1, 0, 1)), capacity})[which]
    inputs = make_inputs(
        nodes=nodes,
        tree_rows=nodes + earlier,
        q_heads=q_heads,
        kv_heads=kv_heads,
        capacity=capacity,
        head_dim=head_dim,
        dtype=dtype,
        lengths=lengths,
    )
    attend = functools.partial(tree_attention, window=window, implementation=implementation, config=config)
    assert_attends(jax.jit(lambda inputs: attend(**inputs))(inputs), inputs, window)


@pytest.mark.parametrize("case", TPU_CASES, ids=str)
def test_tpu_kernel_equals_numpy(case):
    """B28: at most 2e-5 off in float32 and 2e-2 in bfloat16, with NaN in every slot nobody may read."""
    run(case, Config(keys=case[6], interpret=TPU), "mosaic_tpu")


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_kernel_equals_numpy(case):
    """B28, as above; split over the cache too, where a split may have nothing to do."""
    *case, rows, splits, stages, third = case
    config = Config(rows=rows, keys=case[6], splits=splits, stages=stages, interpret=GPU)
    run(case, config, "mosaic_gpu", slice(third, None, 3))


@pytest.mark.parametrize(("implementation", "interpret"), [("mosaic_tpu", TPU), ("mosaic_gpu", GPU)])
def test_cache_without_rows(implementation, interpret):
    inputs = make_inputs(
        nodes=5, tree_rows=7, q_heads=4, kv_heads=2, capacity=0, head_dim=64, dtype="bfloat16", lengths=[0, 0]
    )
    config = Config(interpret=interpret)
    assert_attends(tree_attention(**inputs, implementation=implementation, config=config), inputs, None)


def test_tpu_rows_beyond_one_tile():
    """B28, block_q 16: a KV head's rows are more than one program holds."""
    inputs = make_inputs(
        nodes=16, tree_rows=16, q_heads=6, kv_heads=2, capacity=40, head_dim=128, dtype="float32", lengths=[40, 17]
    )
    config = Config(rows=16, keys=16, interpret=TPU)
    assert_attends(tree_attention(**inputs, implementation="mosaic_tpu", config=config), inputs, None)


def test_gradients_of_a_kernel_are_xlas():
    inputs = make_inputs(
        nodes=3, tree_rows=4, q_heads=4, kv_heads=2, capacity=20, head_dim=64, dtype="float32", lengths=[20, 3]
    )
    floats = {name: jnp.nan_to_num(array) for name, array in inputs.items() if array.ndim == 4}
    fixed = {name: inputs[name] for name in ("prefix_lengths", "tree_mask")}

    def loss(floats, attend):
        return (attend(**floats, **fixed) ** 2).sum()

    kernel = functools.partial(tree_attention, implementation="mosaic_tpu", config=Config(interpret=True))
    ours = jax.grad(loss)(floats, kernel)
    theirs = jax.grad(loss)(floats, functools.partial(tree_attention, implementation="reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, theirs)
    assert float(jnp.abs(ours["k_cache"]).max()) > 0.1


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "mosaic_gpu"])
def test_models_mapped_over_share_a_launch(implementation):
    """vmap, as an ensemble of SSMs does it: the mapped axis, behind the batch or missing, becomes part of the batch."""
    inputs = make_inputs(
        nodes=3, tree_rows=4, q_heads=4, kv_heads=2, capacity=24, head_dim=64, dtype="bfloat16", lengths=[24, 3]
    )
    config = Config(interpret=TPU if implementation == "mosaic_tpu" else GPU)
    attend = functools.partial(tree_attention, implementation=implementation, config=config)
    names = ("q", "k_cache", "v_cache", "k_tree", "v_tree")
    shared = {name: inputs[name] for name in inputs if name not in names}
    # The second model has the sequences the other way round, under the same lengths and masks.
    mapped = {name: jnp.stack([jnp.nan_to_num(inputs[name]), jnp.nan_to_num(inputs[name][::-1])], 1) for name in names}
    out = jax.vmap(lambda arrays: attend(**arrays, **shared), in_axes=1, out_axes=1)(mapped)
    for member in range(2):
        own = {name: array[:, member] for name, array in mapped.items()} | shared
        alone = tree_attention(**own, implementation="reference")
        np.testing.assert_allclose(out[:, member].astype(jnp.float32), alone.astype(jnp.float32), atol=2e-2)
