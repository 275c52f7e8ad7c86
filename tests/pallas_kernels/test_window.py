"""Sliding windows, by position, in the implementations that run anywhere."""

import pytest

from pallas_kernels.tree_attention import tree_attention, xla
from tests.pallas_kernels.inputs import assert_attends, make_inputs


@pytest.mark.parametrize("window", [1, 2, 5, 40, None])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_each_node_sees_the_last_positions_of_its_own_path(monkeypatch, implementation, window):
    """B34 on a tree: siblings share a position, so slots say nothing about how far back a key is."""
    monkeypatch.setattr(xla, "_SCORES", 0)
    monkeypatch.setattr(xla, "_FEWEST_KEYS", 8)  # of 30: several blocks, the last one shorter
    inputs = make_inputs(
        nodes=9, tree_rows=14, q_heads=4, kv_heads=2, capacity=30, head_dim=64, dtype="float32", lengths=[0, 1, 4, 30]
    )
    assert_attends(tree_attention(**inputs, window=window, implementation=implementation), inputs, window)
