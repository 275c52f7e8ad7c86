"""Both kernels lowered on a CPU for every supported class of shapes: block shapes, layouts, shared memory."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.tree_attention import Device, pick, tree_attention

TPU = Device("tpu", "TPU v5 lite")
GPU = Device("gpu", "NVIDIA H200")
LOWERING = {"tpu": "tpu", "gpu": "cuda"}
HEAD_DIMS = (64, 80, 96, 128, 256)


def specs(*, nodes, tree_rows, head_dim, dtype, batch=2, q_heads=16, kv_heads=4, capacity=1000):
    cache, tree = (batch, kv_heads, capacity, head_dim), (batch, kv_heads, tree_rows, head_dim)
    shapes = dict(q=(batch, nodes, q_heads, head_dim), k_cache=cache, v_cache=cache, k_tree=tree, v_tree=tree)
    arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return arrays | {
        "prefix_lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "tree_mask": jax.ShapeDtypeStruct((batch, nodes, tree_rows), jnp.bool_),
    }


def traced_for(device):
    described = AbstractDevice(device_kind=device.kind, num_cores=None, platform=device.platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=described))


def lowered(device, inputs, window=None):
    """The program that implementation None gives on the device; it has to hold the kernel."""
    with traced_for(device):
        picked = pick(inputs["q"], inputs["k_cache"], inputs["k_tree"])
        assert picked.implementation == {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}[device.platform], picked.reason
        attend = functools.partial(tree_attention, window=window)
        traced = jax.jit(lambda inputs: attend(**inputs)).trace(inputs)
        return traced.lower(lowering_platforms=(LOWERING[device.platform],)).as_text()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("device", "dtype"), [(TPU, "bfloat16"), (TPU, "float32"), (GPU, "bfloat16"), (GPU, "float16")]
)
def test_every_head_dim_and_dtype_lowers(device, dtype, head_dim):
    text = lowered(device, specs(nodes=64, tree_rows=64, head_dim=head_dim, dtype=dtype))
    assert {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[device.platform] in text


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (dict(nodes=1, tree_rows=1, batch=1, capacity=32768, kv_heads=1), None),
        (dict(nodes=3, tree_rows=20, capacity=0), 2),
        (dict(nodes=33, tree_rows=65, capacity=24, kv_heads=16), 7),
        (dict(nodes=127, tree_rows=128, q_heads=15, kv_heads=5), 500),
        (dict(nodes=128, tree_rows=128, q_heads=64, kv_heads=2, head_dim=256), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", [TPU, GPU], ids=lambda device: device.platform)
def test_every_number_of_rows_lowers(device, shape, window):
    """One row on a long prefix, no cache, padding of nodes and of tree rows, groups of any size, many tiles."""
    lowered(device, specs(**({"head_dim": 128, "dtype": "bfloat16"} | shape)), window)


def test_the_cost_of_the_tpu_kernel_is_stated():
    """Without an estimate XLA counts the call as nothing."""
    text = lowered(TPU, specs(nodes=8, tree_rows=8, head_dim=128, dtype="bfloat16", capacity=1024))
    flops = 4 * 2 * 16 * 8 * (1024 + 8) * 128
    assert str(flops) in text


def kernel_operands(jaxpr: Any) -> Iterator[list[Any]]:
    """What the kernels of a program read, also those in programs within it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):  # the TPU's, the GPU's
            yield [variable.aval for variable in equation.invars]
            continue
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernel_operands(inner)


@pytest.mark.parametrize("device", [TPU, GPU], ids=lambda device: device.platform)
def test_mask_memory_does_not_grow_with_heads_or_the_cache(device):
    """B39: it reaches the kernel as integers, 16 bytes of mask and 4 of window a node, whatever attends."""
    masks = []
    for q_heads, head_dim, capacity in ((4, 64, 1024), (64, 256, 8192)):
        inputs = specs(
            nodes=100, tree_rows=128, q_heads=q_heads, head_dim=head_dim, dtype="bfloat16", capacity=capacity
        )
        with traced_for(device):
            operands = next(kernel_operands(jax.make_jaxpr(lambda inputs: tree_attention(**inputs))(inputs).jaxpr))
        masks.append([(aval.shape, aval.dtype.name) for aval in operands if aval.dtype != jnp.bfloat16])
    assert masks[0] == masks[1], masks
    assert max(math.prod(shape) for shape, _ in masks[0]) == 2 * 128 * 5, masks
