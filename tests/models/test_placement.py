"""Where parameters go: memory while loading, shardings, and Orbax checkpoints on another number of devices."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import memory
from specjax.models import init_model, restore_params, save_model, save_params
from specjax.testing import fresh_logits
from tests.models import directories

CONFIG = directories.TINY

# Run on four devices: both roads to sharded parameters, and a forward over them.
ON_FOUR = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from specjax.models import load_model, restore_params, save_params
from specjax.testing import fresh_logits
from tests.models.test_placement import CONFIG

folder = sys.argv[1]
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

def outputs(name, shape):
    whole = len(shape) < 2 or "embed" in name or "o_proj" in name or "down_proj" in name
    return NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec("tensor"))

loaded = load_model(f"{folder}/model", sharding=outputs)
restored = restore_params(f"{folder}/one", CONFIG, sharding=outputs)
jax.tree.map(np.testing.assert_array_equal, loaded.params, restored)
for params in (loaded.params, restored):
    weight = params["layers"][0]["mlp"]["up_proj"]["weight"][...]
    assert weight.sharding.spec == PartitionSpec("tensor"), weight.sharding
    assert {shard.data.shape for shard in weight.addressable_shards} == {(12, 32)}
np.save(f"{folder}/logits.npy", fresh_logits(loaded, [1, 2, 3, 4]))
save_params(f"{folder}/four", loaded.params)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status, which only Linux has")
def test_loading_needs_little_more_memory_than_the_parameters():
    """`python -m experiments.memory` does the same with 1 GB."""
    found = memory.measure(200, "bfloat16", "float32")
    assert found["parameters"] > 1.5e8
    assert found["peak"] < memory.MOST * found["parameters"]


def test_parameters_travel_between_one_device_and_four(tmp_path):
    """Orbax restores what another number of devices saved; load_model places each tensor as it is asked to."""
    model = init_model(CONFIG, jax.random.key(0))
    save_model(tmp_path / "model", CONFIG, model.params, dtype="float32")
    save_params(tmp_path / "one", model.params)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    subprocess.run([sys.executable, "-c", ON_FOUR, str(tmp_path)], env={**os.environ, "XLA_FLAGS": flags}, check=True)
    again = restore_params(tmp_path / "four", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, again, model.params)
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(again)} == {1}
    assert jax.tree.structure(again) == jax.tree.structure(model.params)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), fresh_logits(model, [1, 2, 3, 4]), atol=1e-5)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    save_params(tmp_path / "params", init_model(CONFIG, jax.random.key(0)).params)
    for change, problem in (
        ({"hidden_size": 16}, r"embed_tokens: expected \(64, 16\), got \(64, 32\)"),
        ({"num_layers": 1}, r"layers\.1\.input_layernorm\.scale: expected no such parameter, got \(32,\)"),
        ({"qkv_bias": True}, r"layers\.0\.self_attn\.k_proj\.bias: expected \(16,\), got none"),
    ):
        with pytest.raises(ValueError, match=problem):
            restore_params(tmp_path / "params", dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match="unknown dtype 'int32'; expected float32"):
        restore_params(tmp_path / "params", CONFIG, dtype="int32")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        restore_params(tmp_path / "nowhere", CONFIG)
