"""Draft heads in directories: what is written is what is read, and what is wrong is named."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax as sj
from specjax.models import EagleConfig, MedusaConfig, init_eagle, init_medusa, medusa_logits, save_heads
from specjax.models.eagle import abstract_eagle
from specjax.models.medusa import abstract_medusa
from tests.helpers import TINY, context, tiny

MEDUSA = MedusaConfig(TINY.hidden_size, TINY.vocab_size, num_heads=2)
EAGLE = EagleConfig(TINY.hidden_size, TINY.vocab_size, 48, 4, 2, 8, TINY.max_positions)


def random_params(shapes):
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return structure.unflatten([jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)])


@pytest.fixture
def directory(tmp_path):
    """Medusa heads on the tiny target."""
    save_heads(tmp_path / "medusa", MEDUSA, random_params(abstract_medusa(MEDUSA)[1]))
    return tmp_path / "medusa"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "abstract"),
    [
        (MEDUSA, abstract_medusa),
        (dataclasses.replace(MEDUSA, num_blocks=2, tied_projection=True), abstract_medusa),
        (EAGLE, abstract_eagle),
    ],
)
def test_heads_come_back_as_they_were_saved(tmp_path, config, abstract, dtype):
    params = random_params(abstract(config)[1])
    save_heads(tmp_path, config, params, dtype=dtype)
    model = sj.load_heads(tmp_path, tiny(0))
    wanted = jax.tree.map(lambda leaf: leaf.astype(dtype).astype("float32"), params)
    jax.tree.map(np.testing.assert_array_equal, model.params[0], wanted)
    assert (model.reads_hidden, model.vocab_size, model.directory) == (32, 64, str(tmp_path))
    assert model.max_depth == (None if config is EAGLE else 2)
    assert sj.is_heads(tmp_path)
    # The target's weights are used where they are.
    assert all(a is b for a, b in zip(jax.tree.leaves(model.params[1]), jax.tree.leaves(tiny(0).params)))
    again = sj.load_heads(tmp_path, tiny(0))
    assert (again.forward, again.init_cache) == (model.forward, model.init_cache)


def test_heads_are_told_from_models_by_their_config(tmp_path):
    assert not sj.is_heads(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not sj.is_heads(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert not sj.is_heads(tmp_path)


def test_medusa_starts_as_the_targets_own_head():
    target = tiny(0)
    params = init_medusa(MEDUSA, target)
    hidden = jax.random.normal(jax.random.key(1), (3, TINY.hidden_size))
    logits = medusa_logits(MEDUSA, target, params, hidden)
    assert logits.shape == (3, 2, 64)
    for head in range(2):
        np.testing.assert_allclose(logits[:, head], target.head(target.params, hidden), atol=1e-5)


def test_eagle_starts_with_inputs_and_outputs_of_the_targets_sizes():
    """Embeddings a twentieth of the states, one dimension ten times the others: both halves weigh alike."""
    rng = np.random.default_rng(0)
    embedded, hidden = 0.05 * rng.normal(size=(500, 32)), rng.normal(size=(500, 32))
    hidden[:, 3] *= 10
    params = init_eagle(EAGLE, jax.random.key(0), embedded=jnp.asarray(embedded), hidden=jnp.asarray(hidden))
    weight = np.asarray(params["fc"]["weight"][...]).T
    halves = [np.std(embedded @ weight[:32]), np.std(hidden @ weight[32:])]
    np.testing.assert_allclose(halves, 0.5**0.5, rtol=0.1)
    np.testing.assert_allclose(np.asarray(params["norm"]["scale"][...])[3], 10, rtol=0.1)


def edit(directory, **changes):
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=16), "trained for a target of hidden size 16; the target has 32"),
        (dict(vocab_size=65), "trained for a target of vocabulary 65; the target has 64"),
        (dict(model_type="llama"), "model_type 'llama' is no draft head.*load_model"),
        (dict(num_heads="two"), "expected num_heads to be int, got 'two'"),
        (dict(num_heads=0), "config.json: expected a positive num_heads"),
        (dict(num_blocks=None), "expected the keys model_type, hidden_size"),
        (dict(num_heads=3), "heads.2.blocks.0.bias: missing"),
        (dict(tied_projection=True), "heads.0.projection.weight: config.json describes no such tensor"),
    ],
)
def test_what_is_wrong_with_a_directory_is_named(directory, changes, message):
    edit(directory, **changes)
    with pytest.raises(ValueError, match=message):
        sj.load_heads(directory, tiny(0))


def test_all_misshaped_tensors_are_named_at_once(directory):
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors["heads.0.blocks.0.bias"] = np.zeros(5, np.float32)
    tensors["heads.1.blocks.0.bias"] = np.zeros(32, np.int32)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"(?s)expected shape \[32\], got \[5\].*expected dtype F32, F16, BF16, got I32"
    ):
        sj.load_heads(directory, tiny(0))
    (directory / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        sj.load_heads(directory, tiny(0))
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights; expected model.safetensors"):
        sj.load_heads(directory, tiny(0))
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        sj.load_heads(directory / "nowhere", tiny(0))


def test_targets_that_heads_cannot_read_are_refused(directory):
    edit(directory, hidden_size=1, vocab_size=16)
    with pytest.raises(ValueError, match="embedding and head, and this target's Model names neither"):
        sj.load_heads(directory, context(0))
    with pytest.raises(ValueError, match="hidden size 1; the target has none"):
        sj.load_heads(directory, context(0)._replace(hidden_size=None))


def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected dtype float32, float16, bfloat16, got 'int8'"):
        save_heads(tmp_path, MEDUSA, None, dtype="int8")
