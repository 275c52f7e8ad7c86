"""Inflated models: what they compute, and how they say that they are inflated."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax as sj
from experiments import config, inflate
from specjax.models import init_model, save_model
from specjax.models.files import read_json
from specjax.testing import fresh_logits
from tests.models.directories import TINY

ZOO = config.REPOSITORY / "experiments/zoo"
SIZES = dict(hidden=40, layers=3, ffn=60, vocab=80)


def saved(folder, **changes):
    """A random model with loud weights, whose norms and biases say something."""
    shape = dataclasses.replace(TINY, **changes)
    params = init_model(shape, jax.random.key(0)).params
    keys = iter(jax.random.split(jax.random.key(1), 99))
    loud = lambda leaf: 10 * leaf if leaf.ndim > 1 else leaf + 0.2 * jax.random.normal(next(keys), leaf.shape)
    save_model(folder, shape, jax.tree.map(loud, params), dtype="float32")
    return folder


def check_logits(small, large, vocab):
    text = np.random.default_rng(0).integers(0, small.vocab_size, 32).tolist()
    want, got = fresh_logits(small, text), fresh_logits(large, text)
    assert got.shape == (32, vocab)
    np.testing.assert_allclose(got[:, : small.vocab_size], want, atol=1e-4)
    assert np.all(got[:, small.vocab_size :] < want.min() - 1000)  # a probability of 0 in float32


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("target", dict(hidden=512, layers=6, ffn=1300, vocab=5000)),
        ("ssm_a", dict(hidden=200, layers=3, ffn=400, vocab=5000)),
    ],
)
def test_an_inflated_model_of_the_zoo_computes_the_same(name, sizes, tmp_path):
    inflate.inflate(ZOO / name, tmp_path, **sizes)
    small, large = sj.load_model(ZOO / name), sj.load_model(tmp_path)
    check_logits(small, large, 5000)
    assert small.eos_ids == large.eos_ids == (0,)
    if name == "ssm_a":
        prompt = sj.load_tokenizer(tmp_path).encode("def add(a, b):\n").ids
        texts = [sj.generate(model, [prompt], max_new_tokens=24).tokens for model in (small, large)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "changes",
    [
        dict(tied_head=True),
        dict(qkv_bias=True, windows=(None, 16), max_positions=32),
        dict(qk_norm=True, qkv_bias=True, o_bias=True),
        dict(windows=(8, 8), num_kv_heads=4),
    ],
    ids=["tied", "qwen2", "qwen3", "mistral"],
)
def test_families_keep_their_function(changes, tmp_path):
    source = saved(tmp_path / "small", **changes)
    inflate.inflate(source, tmp_path / "large", **SIZES)
    check_logits(sj.load_model(source), sj.load_model(tmp_path / "large"), SIZES["vocab"])


def test_added_weights_are_not_left_out_of_the_work(tmp_path):
    """What reads is dense, in added layers too, and what writes is zero only where it is added."""
    inflate.inflate(saved(tmp_path / "small"), tmp_path / "large", **SIZES)
    params = sj.load_model(tmp_path / "large").params
    for layer in params["layers"].values():
        for projection in (layer["self_attn"]["q_proj"], layer["mlp"]["gate_proj"], layer["mlp"]["up_proj"]):
            assert np.all(np.asarray(projection["weight"][...]) != 0)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"hidden": 24}, "expected a hidden_size of at least the model's 32, got 24"),
        ({}, {"layers": 1}, "expected a num_layers of at least the model's 2, got 1"),
        ({}, {"hidden": 32}, "a larger vocabulary needs a channel of its own"),
        (dict(rope=None, norm="layer", mlp="relu", num_kv_heads=4, norm_eps=1e-5), {}, "layer normalisation"),
    ],
)
def test_what_cannot_be_inflated_is_refused(changes, sizes, message, tmp_path, capsys):
    source = saved(tmp_path / "small", **changes)
    flags = [f"--{name}={size}" for name, size in (SIZES | sizes).items()]
    with pytest.raises(SystemExit):
        inflate.main([str(source), str(tmp_path / "large"), *flags])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "large").exists()


def test_reports_say_that_a_model_is_inflated(tmp_path):
    source = saved(tmp_path / "small")
    inflate.main([str(source), str(tmp_path / "large"), *(f"--{name}={size}" for name, size in SIZES.items())])
    assert inflate.label(str(source)) == str(source)
    assert "inflated: computes what a model of 0.0 M parameters does" in inflate.label(str(tmp_path / "large"))
    assert read_json(tmp_path / "large/config.json")[inflate.MARK]["hidden_size"] == 32
