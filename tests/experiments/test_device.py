"""The device's script as far as a CPU goes: its shapes, its inputs, and that it can tell right from wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import device
from pallas_kernels.tree_attention import Device, pick

TINY = device.Shape(2, 3, 16, q_heads=4, kv_heads=2, head_dim=16, earlier=2, window=4)
KINDS = {"gpu": ("mosaic_gpu", "NVIDIA H200"), "tpu": ("mosaic_tpu", "TPU v5 lite")}


@pytest.mark.parametrize("platform", KINDS)
def test_the_kernel_takes_every_shape_that_is_checked_or_timed(platform):
    """So that one it cannot run is a failure; and each has a row of its own."""
    kernel, kind = KINDS[platform]
    shapes = [*device.SMALL, *device.unusual(platform)]
    for shape in [*shapes, *device.SHAPES]:
        described = jax.eval_shape(lambda key, shape=shape: device.inputs_of(shape, key), jax.random.key(0))
        picked = pick(described["q"], described["k_cache"], described["k_tree"], device=Device(platform, kind))
        assert picked.implementation == kernel, (shape, picked.reason)
        arrays = [described[name] for name in ("q", "q", "k_cache", "v_cache", "k_tree", "v_tree")]  # q: and the result
        assert shape.least_bytes == sum(array.size * array.dtype.itemsize for array in arrays)
    assert len({str(shape) for shape in shapes}) == len(shapes)


def test_a_tree_sees_earlier_rows_and_its_path():
    mask = np.asarray(device.inputs_of(TINY, jax.random.key(0))["tree_mask"])
    np.testing.assert_array_equal(mask[1], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]])


def test_the_error_is_that_of_the_call_with_its_window():
    right = device.contenders("gpu")["xla"]
    assert device.is_below(device.largest_error(right, TINY), device.TOLERANCE)
    without = device.largest_error(lambda *, window, **inputs: right(**inputs), TINY)
    assert not device.is_below(without, device.TOLERANCE)
    wide = device.Shape(2, 3, 16, q_heads=4, kv_heads=2, head_dim=16, earlier=2, dtype="float32")
    assert device.largest_error(device.contenders("tpu")["dot_product_attention xla"], wide) < 1e-5


def test_what_cannot_be_measured_is_a_finding():
    later, earlier = math.inf, -math.inf

    def fails() -> float:
        raise ValueError("no such kernel\nand more")

    assert device.attempt(fails, later) == "ValueError: no such kernel"
    assert device.attempt(lambda: 1.0, later) == 1.0 and device.attempt(lambda: 1.0, earlier) == "no time left"
    assert device.is_below(0.5, 1) and not any(device.is_below(x, 1) for x in ("no time left", math.nan, 2.0))
    assert device.median_seconds(lambda: jnp.zeros(1)) > 0
