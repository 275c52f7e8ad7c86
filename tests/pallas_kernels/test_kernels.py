"""The bodies of the TPU and GPU kernels, interpreted with race detection, against NumPy."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import Config, tree_attention
from tests.pallas_kernels.inputs import assert_attends, make_inputs

# What lies past the end of an array reads as NaN, as does what was never written.
STRICT: dict[str, Any] = dict(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
TPU = pltpu.InterpretParams(**STRICT)
GPU = plgpu.InterpretGPUParams(**STRICT)

# Covering arrays: B28's row counts, with what else a kernel branches on spread over them. Lengths are rows of one
# batch: empty, one, around the end of a block, full.
#   nodes, earlier tree rows, query heads, KV heads, head_dim, dtype, keys per block, capacity, window
TPU_CASES = [
    (1, 0, 4, 2, 64, "float32", 16, 64, None),
    (2, 5, 2, 2, 128, "bfloat16", 32, 96, 3),
    (7, 2, 6, 2, 80, "float32", 16, 40, None),
    (31, 0, 8, 2, 96, "bfloat16", 48, 100, 20),
    (32, 9, 4, 2, 256, "float32", 32, 70, 1),
    (33, 40, 4, 2, 64, "float32", 16, 33, None),
    (63, 3, 6, 2, 80, "bfloat16", 16, 48, 5),
    (64, 0, 4, 2, 128, "bfloat16", 64, 129, 70),
    (65, 0, 4, 2, 96, "float32", 32, 80, None),
    (127, 1, 2, 2, 64, "float32", 64, 200, None),
    (128, 0, 2, 2, 64, "float32", 128, 130, 40),
]
#   the same, then rows of a program, splits, stages
GPU_CASES = [
    (1, 0, 4, 2, 64, "bfloat16", 64, 64, None, 64, 1, 2),
    (2, 5, 2, 2, 128, "float16", 128, 200, 3, 64, 1, 2),
    (7, 2, 6, 2, 80, "bfloat16", 64, 144, None, 64, 2, 3),
    (31, 0, 8, 2, 96, "float16", 64, 136, 20, 128, 2, 2),
    (32, 9, 2, 2, 256, "bfloat16", 64, 72, None, 64, 1, 2),
    (33, 40, 4, 2, 64, "float16", 64, 104, 1, 128, 1, 4),
    (63, 3, 6, 2, 80, "float16", 64, 80, 5, 64, 2, 2),
    (64, 0, 4, 2, 128, "bfloat16", 64, 200, 70, 128, 3, 2),
    (65, 0, 4, 2, 96, "bfloat16", 64, 72, None, 128, 1, 3),
    (127, 1, 2, 2, 64, "bfloat16", 64, 72, None, 128, 1, 2),
    (128, 0, 2, 2, 64, "float16", 128, 136, 40, 128, 1, 3),
    (64, 0, 4, 2, 128, "bfloat16", 64, 520, None, 128, 4, 4),
    (16, 0, 4, 2, 96, "bfloat16", 128, 264, None, 64, 2, 4),
]


def run(case, config, implementation):
    nodes, earlier, q_heads, kv_heads, head_dim, dtype, keys, capacity, window = case
    lengths = sorted({0, 1, *(min(keys + step, capacity) for step in (-1, 0, 1)), capacity})
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
    out = tree_attention(**inputs, window=window, implementation=implementation, config=config)
    assert_attends(out, inputs, window)


@pytest.mark.parametrize("case", TPU_CASES, ids=str)
def test_tpu_kernel_equals_numpy(case):
    """B28: at most 2e-5 off in float32 and 2e-2 in bfloat16, with NaN in every slot nobody may read."""
    run(case, Config(keys=case[6], interpret=TPU), "mosaic_tpu")


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_kernel_equals_numpy(case):
    """B28, as above; split over the cache too, where a split may have nothing to do."""
    *case, rows, splits, stages = case
    run(case, Config(rows=rows, keys=case[6], splits=splits, stages=stages, interpret=GPU), "mosaic_gpu")


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
        nodes=16, tree_rows=16, q_heads=6, kv_heads=2, capacity=40, head_dim=64, dtype="float32", lengths=[40, 17]
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
