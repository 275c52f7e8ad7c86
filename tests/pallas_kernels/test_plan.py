"""What runs where: refusals that say why, the pick for a device, block sizes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.tree_attention import Config, Device, pick, tree_attention
from pallas_kernels.tree_attention.plan import complete, gpu_config, tpu_config
from pallas_kernels.tree_attention.problem import Problem
from tests.pallas_kernels.test_lowering import GPU, TPU, specs, traced_for

CPU = Device("cpu", "cpu")


def zeros(**shape) -> dict[str, Any]:
    return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in specs(**shape).items()}


def assert_refused(device, implementation, shape, why, config=None):
    def attend(inputs):
        return tree_attention(**inputs, implementation=implementation, config=config)

    with traced_for(device), pytest.raises(ValueError, match=f"{implementation}.*{why}"):
        jax.eval_shape(attend, specs(**shape))


GOOD: dict[str, Any] = dict(nodes=8, tree_rows=8, head_dim=128, dtype="bfloat16")


@pytest.mark.parametrize(
    ("device", "implementation", "change", "why"),
    [
        (CPU, "mosaic_gpu", {}, "needs a Hopper GPU.* this is cpu"),
        (CPU, "mosaic_tpu", {}, "needs a TPU, this is cpu"),
        (Device("gpu", "NVIDIA A100-SXM4-40GB"), "mosaic_gpu", {}, "needs a Hopper GPU.*A100"),
        (GPU, "mosaic_tpu", {}, "needs a TPU.*H200"),
        (GPU, "mosaic_gpu", dict(dtype="float32"), "bfloat16 or float16.*TF32.* got float32"),
        (TPU, "mosaic_tpu", dict(dtype="float16"), "bfloat16 or float32, got float16"),
        (GPU, "mosaic_gpu", dict(capacity=1001), "rows must be a multiple of 8.* got 1001"),
        (GPU, "mosaic_gpu", dict(head_dim=72), "head_dim must be one of .* got 72"),
        (TPU, "mosaic_tpu", dict(head_dim=16), "head_dim must be one of .* got 16"),
        (GPU, "mosaic_gpu", dict(nodes=129, tree_rows=129), "at most 128 nodes .* 129 nodes"),
        (TPU, "mosaic_tpu", dict(tree_rows=130), "at most 128 .* and 130 rows"),
    ],
)
def test_a_named_implementation_that_cannot_run_says_why(device, implementation, change, why):
    assert_refused(device, implementation, GOOD | change, why)


def test_a_mixed_cache_is_refused():
    wide = jax.ShapeDtypeStruct((2, 4, 1000, 128), jnp.float32)
    inputs = specs(**GOOD) | {"k_cache": wide, "v_cache": wide}
    with traced_for(TPU), pytest.raises(ValueError, match="one dtype, got bfloat16 and bfloat16 and float32"):
        jax.eval_shape(lambda inputs: tree_attention(**inputs, implementation="mosaic_tpu"), inputs)


@pytest.mark.parametrize(
    ("device", "change", "name", "reason"),
    [
        (CPU, {}, "xla", "no kernel for cpu"),
        (GPU, {}, "mosaic_gpu", "kernel for gpu: NVIDIA H200"),
        (TPU, {}, "mosaic_tpu", "kernel for tpu"),
        (GPU, dict(dtype="float32"), "xla", "mosaic_gpu cannot run: .*TF32"),
        (TPU, dict(head_dim=40), "xla", "mosaic_tpu cannot run: head_dim"),
        (Device("gpu", "NVIDIA B200"), {}, "xla", "needs a Hopper GPU"),
    ],
)
def test_pick_says_what_and_why(device, change, name, reason):
    inputs = specs(**(GOOD | change))
    choice = pick(inputs["q"], inputs["k_cache"], inputs["k_tree"], device=device)
    assert choice.implementation == name
    assert re.search(reason, choice.reason), choice


def test_pick_follows_the_device_that_is_traced_for():
    inputs = specs(**GOOD)
    arrays = inputs["q"], inputs["k_cache"], inputs["k_tree"]
    assert pick(*arrays).implementation == "xla"
    with traced_for(TPU):
        assert pick(*arrays).implementation == "mosaic_tpu"


def problem(**change):
    inputs = specs(**(GOOD | change))
    return Problem.of(inputs["q"], inputs["k_cache"], inputs["k_tree"])


def test_gpu_splits_long_prefixes_of_few_rows():
    """A program per multiprocessor: split where batch, heads and tiles do not make enough, and not without a prefix."""
    assert gpu_config(problem(batch=1, capacity=32768), GPU.kind).splits >= 32
    assert gpu_config(problem(batch=32, capacity=32768), GPU.kind).splits == 1
    assert gpu_config(problem(batch=1, capacity=200), GPU.kind).splits == 1
    assert gpu_config(problem(batch=1, capacity=32768), "NVIDIA H20").splits < 20


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("nodes", [1, 33, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tpu_blocks_fit_and_divide(head_dim, nodes, dtype):
    shape = problem(nodes=nodes, tree_rows=nodes, head_dim=head_dim, dtype=dtype, capacity=5000)
    config = tpu_config(shape)
    complete("mosaic_tpu", shape, TPU, config)
    itemsize = jnp.dtype(dtype).itemsize
    assert 4 * config.keys * max(head_dim, 128) * itemsize + 16 * config.rows * config.keys <= 8 << 20


@pytest.mark.parametrize(
    ("device", "implementation", "config", "why"),
    [
        (GPU, "mosaic_gpu", Config(rows=96), "rows must be 64 or 128"),
        (GPU, "mosaic_gpu", Config(keys=100), "keys must be 64 or 128"),
        (GPU, "mosaic_gpu", Config(stages=1), "stages at least 2"),
        (TPU, "mosaic_tpu", Config(rows=24), "rows must be a multiple of 16"),
        (TPU, "mosaic_tpu", Config(keys=100), "keys must be a multiple of 16 for head_dim 128"),
        (TPU, "mosaic_tpu", Config(splits=2), "for GPUs"),
        (CPU, "xla", Config(keys=64), "has no block sizes"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(device, implementation, config, why):
    assert_refused(device, implementation, GOOD, why, config)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window of at least 1"):
        tree_attention(**zeros(**GOOD), window=0)


def test_a_tree_buffer_shorter_than_the_fed_rows_is_refused():
    with pytest.raises(ValueError, match="at least the 8 fed rows"):
        tree_attention(**zeros(**(GOOD | {"tree_rows": 7})))
