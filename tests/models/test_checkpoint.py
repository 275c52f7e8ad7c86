"""Hugging Face directories: what is read, what is refused, what is written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.models import init_model, load_model, load_tokenizer, save_model
from specjax.models.families import from_hugging_face
from specjax.models.rope import Dynamic, Linear, Llama3, Rope, Yarn
from specjax.testing import fresh_logits
from tests.models import directories, numpy_llama
from tests.models.references import make

TEXT = [5, 9, 1, 60, 5, 33, 2]
TWELVE = [*TEXT, 8, 63, 9, 40, 17]
BFLOAT16 = np.dtype(jnp.bfloat16)


def expected(weights, sizes=directories.SIZES, *, tied=False, eps=1e-5, theta=10_000.0, text=TEXT, windows=None):
    return numpy_llama.logits(
        weights,
        text,
        layers=sizes["layers"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        theta=theta,
        eps=eps,
        tied=tied,
        windows=windows,
    )


def check_logits(folder, weights, text=TEXT, **settings):
    ours = fresh_logits(load_model(folder), text)
    np.testing.assert_allclose(ours, expected(weights, text=text, **settings), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("tied", "head"), [(True, False), (True, True), (False, True)], ids=["tied", "tied-and-stored", "untied"]
)
def test_head_follows_the_config(tmp_path, tied, head):
    """B31: a tied head is the embedding whether or not the file repeats it; an untied one is the file's own."""
    weights = directories.tensors(head=head)
    if tied and head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    check_logits(directories.write(tmp_path, directories.config(tie_word_embeddings=tied), weights), weights, tied=tied)


def test_tied_head_that_differs_is_ignored_with_a_warning(tmp_path):
    """B31: the config decides, but nothing is skipped silently."""
    weights = directories.tensors()
    folder = directories.write(tmp_path, directories.config(tie_word_embeddings=True), weights)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding"):
        model = load_model(folder)
    np.testing.assert_allclose(fresh_logits(model, TEXT), expected(weights, tied=True), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_untied_is_the_default_and_its_missing_head_is_named(tmp_path, family):
    """B31: these families tie only when told to."""
    raw = directories.config(model_type=family, tie_word_embeddings=None)
    weights = directories.tensors(head=False, qkv_bias=family == "qwen2")
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing \(config\.json does not tie"):
        load_model(directories.write(tmp_path, raw, weights))


def test_opt_ties_unless_told_not_to():
    """B31: its default is the other way round."""
    raw = json.loads((make.HERE / "opt" / "config.json").read_text())
    del raw["tie_word_embeddings"]
    assert from_hugging_face(raw).tied_head
    assert not from_hugging_face(raw | {"tie_word_embeddings": False}).tied_head


ODD = dict(vocab=64, hidden=20, inner=24, layers=2, heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("changes", "sizes", "qkv_bias", "o_bias"),
    [
        ({}, ODD, False, False),
        ({"head_dim": None}, directories.SIZES, False, False),
        ({"num_key_value_heads": None}, directories.SIZES | {"kv_heads": 4}, False, False),
        ({"model_type": "qwen2"}, directories.SIZES, True, False),
        ({"attention_bias": True}, directories.SIZES, True, True),
        ({"model_type": "mistral", "sliding_window": 128}, directories.SIZES, False, False),
    ],
    ids=["head_dim", "head_dim-null", "kv_heads-missing", "qwen2-biases", "llama-biases", "mistral"],
)
def test_shapes_and_biases_follow_the_family(tmp_path, changes, sizes, qkv_bias, o_bias):
    """B32: head_dim is not hidden / heads, and which projections have biases depends on the family."""
    weights = directories.tensors(sizes, qkv_bias=qkv_bias, o_bias=o_bias)
    check_logits(directories.write(tmp_path, directories.config(sizes, **changes), weights), weights, sizes=sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 50.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_theta": 50.0, "rope_scaling": {"type": "default"}},
    ],
    ids=["flat", "nested", "plain-scaling"],
)
def test_rope_base_is_read_where_it_is(tmp_path, changes):
    """Older and newer files keep it in different places."""
    weights = directories.tensors()
    check_logits(directories.write(tmp_path, directories.config(**changes), weights), weights, theta=50.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; supported are llama, mistral, opt, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is 'silu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, "type 'longrope'; supported are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "in rope_scaling no 'factor'"),
        ({"rope_theta": 0}, "rope_theta 0; expected a number > 0"),
        (
            {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "both rope_parameters and rope_scaling, and they differ",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "expected one flat object for all layers"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0; expected an integer >= 1"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "for each of 2 layers"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "no sliding_window with use_sliding_window",
        ),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear'; expected one flat object"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4'"),
        ({"max_position_embeddings": 1e3}, "max_position_embeddings 1000.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [1, True]}, "eos_token_id is"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_what_is_not_computed_or_malformed_is_refused(tmp_path, changes, message):
    folder = directories.write(tmp_path, directories.config(**changes), directories.tensors())
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_dtype_that_would_round_weights_to_nothing_is_refused(tmp_path):
    folder = directories.write(tmp_path, directories.config(), directories.tensors())
    with pytest.raises(ValueError, match="unknown dtype 'int32'; expected float32"):
        load_model(folder, dtype="int32")


def test_every_problem_of_a_config_is_named_at_once(tmp_path):
    raw = directories.config(hidden_act="gelu", vocab_size="64", rope_scaling={"type": "yarn"})
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_model(directories.write(tmp_path, raw, directories.tensors()))
    for part in ("hidden_act 'gelu'", "vocab_size '64'", "in rope_scaling no 'factor'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4}, (None, None)),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4)),
        ({"model_type": "mistral", "sliding_window": 4}, (4, 4)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4096, 4096)),
        ({"model_type": "llama", "sliding_window": 4}, (None, None)),
    ],
    ids=["qwen2-off", "qwen2-upper-layers", "mistral", "mistral-null", "mistral-default", "llama-has-none"],
)
def test_windows_follow_the_flags(tmp_path, changes, windows):
    """B34: a size alone is no window for Qwen; null is none for Mistral, and no key is its default."""
    weights = directories.tensors(qkv_bias=changes["model_type"] == "qwen2")
    folder = directories.write(tmp_path, directories.config(), weights)
    raw = directories.config(**changes)
    if "sliding_window" in changes:
        raw["sliding_window"] = changes["sliding_window"]  # null stays in the file
    (folder / "config.json").write_text(json.dumps(raw))
    read = from_hugging_face(raw).windows
    assert (read or (None, None)) == windows
    if windows[1] != 4096:  # beyond any text worth computing here
        check_logits(folder, weights, text=TWELVE, windows=windows)


def test_names_may_lack_the_prefix(tmp_path):
    """Files of a bare decoder, without a head, have names without "model."; a name given both ways is one too many."""
    weights = directories.tensors(head=False)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    folder = directories.write(tmp_path, directories.config(tie_word_embeddings=True), bare)
    check_logits(folder, weights, tied=True)
    directories.write(tmp_path, directories.config(tie_word_embeddings=True), bare | weights)
    with pytest.raises(ValueError, match="norm.weight in model.safetensors; expected it once"):
        load_model(folder)


def test_every_problem_is_named_at_once(tmp_path):
    """B32: missing, misshaped and unused tensors are reported together, not one per try."""
    weights = directories.tensors()
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = np.ones(31, np.float32)
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    weights["model.layers.0.self_attn.v_proj.weight"] = np.ones((16, 32), np.int8)
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_model(directories.write(tmp_path, directories.config(), weights))
    for part in (
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.norm.weight: expected shape [32], got [31]",
        "model.layers.0.self_attn.q_proj.bias: in model.safetensors, but this architecture has no such tensor",
        "model.layers.0.self_attn.v_proj.weight: expected dtype F32, F16 or BF16, got I8",
    ):
        assert part in str(caught.value)


def test_position_buffers_of_old_files_are_no_weights(tmp_path):
    weights = directories.tensors()
    stored = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    check_logits(directories.write(tmp_path, directories.config(), stored), weights)


@pytest.mark.parametrize("shards", [1, 2], ids=["single", "two-shards"])
def test_stray_files_are_ignored(tmp_path, shards):
    """B33: the index wins over files it does not name; other names than model.safetensors are never read."""
    weights = directories.tensors()
    folder = directories.write(tmp_path, directories.config(), weights, shards=shards)
    safetensors.numpy.save_file({"layers.0.wq": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    if shards == 2:
        safetensors.numpy.save_file(directories.tensors(seed=1), folder / "model.safetensors")
    check_logits(folder, weights)


def test_missing_and_truncated_shards_are_named(tmp_path):
    """B33: both are errors before anything else happens, in one message."""
    folder = directories.write(tmp_path, directories.config(), directories.tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    cut = folder / "model-00003-of-00003.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_model(folder)
    assert "model-00002-of-00003.safetensors: this weight file is missing" in str(caught.value)
    assert "model-00003-of-00003.safetensors: truncated" in str(caught.value)


def test_index_that_names_the_wrong_shard_is_reported(tmp_path):
    """B33: a tensor that is not where the index says."""
    folder = directories.write(tmp_path, directories.config(), directories.tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    home = content["weight_map"]["model.norm.weight"]
    other = next(file for file in content["weight_map"].values() if file != home)
    content["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"model\.norm\.weight: the index says it is in {other}, and it is not"):
        load_model(folder)


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["pytorch_model-1.bin", "pytorch_model.bin.index.json"]])
def test_pickles_only_says_how_to_convert(tmp_path, names):
    """B33: a .bin-only model never loads nothing."""
    (tmp_path / "config.json").write_text(json.dumps(directories.config()))
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="Convert them"):
        load_model(tmp_path)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(directories.config()))
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(tmp_path)


@pytest.mark.parametrize("mixed", [False, True], ids=["bfloat16", "mixed"])
def test_bfloat16_is_read_bit_exactly(tmp_path, mixed):
    """B33: no detour that rounds or reinterprets, also beside float32 and float16 tensors in the same file."""
    weights = directories.tensors(dtype="bfloat16")
    if mixed:
        weights["model.norm.weight"] = directories.tensors()["model.norm.weight"]
        weights["lm_head.weight"] = directories.tensors()["lm_head.weight"].astype(np.float16)
    folder = directories.write(tmp_path, directories.config(), weights)
    check_logits(folder, weights)
    kept = load_model(folder, dtype="bfloat16").params
    np.testing.assert_array_equal(
        np.asarray(kept["embed_tokens"][...]).view(np.uint16), weights["model.embed_tokens.weight"].view(np.uint16)
    )
    np.testing.assert_array_equal(
        np.asarray(kept["layers"][1]["mlp"]["down_proj"]["weight"][...]).view(np.uint16),
        weights["model.layers.1.mlp.down_proj.weight"].view(np.uint16),
    )


@pytest.mark.parametrize(
    ("generation", "in_config", "ids"),
    [
        ({"eos_token_id": [60, 61]}, 60, (60, 61)),
        ({"eos_token_id": 61}, 60, (61,)),
        ({}, 60, (60,)),
        (None, [7, 8], (7, 8)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(tmp_path, generation, in_config, ids):
    folder = directories.write(tmp_path, directories.config(eos_token_id=in_config), directories.tensors())
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(folder).eos_ids == ids


CONFIG = dataclasses.replace(directories.TINY, rope=Rope(500.0))


OPT = {"num_kv_heads": 4, "rope": None, "norm": "layer", "norm_eps": 1e-5, "mlp": "relu", "tied_head": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_head": True},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 6, "norm_eps": 1e-5},
        {"qkv_bias": True, "windows": (None, 4)},
        {"qk_norm": True, "windows": (4, None), "head_dim": 24},
        {"windows": (4, 4), "rope": Rope(50.0, Linear(4.0, 32))},
        {"rope": Rope(50.0, Dynamic(4.0, 32))},
        {"rope": Rope(50.0, Llama3(4.0, 32, 1.0, 4.0))},
        {"rope": Rope(50.0, Yarn(4.0, 32, 1.2, beta_fast=16.0, truncate=False))},
        OPT,
        {**OPT, "norm_first": False, "final_norm": False, "embed_size": 16, "tied_head": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 9000], ids=["single", "shards"])
def test_saved_models_read_back(tmp_path, changes, max_shard_bytes):
    """Same architecture, same bits, same tree structure; shards keep to their limit."""
    config = dataclasses.replace(CONFIG, **changes)
    model = init_model(config, jax.random.key(0), dtype="bfloat16")
    save_model(tmp_path, config, model.params, eos_ids=(3, 4), max_shard_bytes=max_shard_bytes)
    again = load_model(tmp_path, dtype="bfloat16")
    assert again.forward is model.forward  # so the architecture is the same, and compiled code is shared
    assert again.eos_ids == (3, 4)
    assert again.directory == str(tmp_path)
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    if max_shard_bytes < 10**9:
        sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
        assert len(sizes) > 1
        assert max(sizes) < max_shard_bytes + 2000  # the header comes on top


def test_options_that_no_family_has_are_not_written(tmp_path):
    config = dataclasses.replace(CONFIG, windows=(4, 8))
    params = init_model(config, jax.random.key(0)).params
    with pytest.raises(ValueError, match="cannot be written .* mistral, the nearest family, .* another windows"):
        save_model(tmp_path, config, params)
    assert list(tmp_path.iterdir()) == []


def test_saving_again_leaves_no_files_of_the_last_time(tmp_path):
    """A stale index would win over the new single file."""
    first, second = (init_model(CONFIG, jax.random.key(seed)).params for seed in (0, 1))
    save_model(tmp_path, CONFIG, first, dtype="float32", max_shard_bytes=9000)
    save_model(tmp_path, CONFIG, second, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, second)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown dtype 'int8'; expected float32"):
        save_model(tmp_path, CONFIG, init_model(CONFIG, jax.random.key(0)).params, dtype="int8")
    folder = directories.write(tmp_path, directories.config(), directories.tensors())
    with pytest.raises(ValueError, match="unknown attention implementation 'flash'; known are reference, xla"):
        load_model(folder, attention="flash")
    with pytest.raises(ValueError, match="positive num_layers"):
        dataclasses.replace(CONFIG, num_layers=0)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        load_tokenizer(folder)


def test_a_null_beside_the_scaling_does_not_hide_its_original_context():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**llama3, "original_max_position_embeddings": 32}
    raw = directories.config(rope_scaling=scaling, original_max_position_embeddings=None)
    assert from_hugging_face(raw).rope.scaling.original == 32


def test_values_beyond_float16_are_not_made_infinite(tmp_path):
    weights = directories.tensors()
    weights["model.norm.weight"][3] = 1e5
    directories.write(tmp_path, directories.config(), weights)
    with pytest.raises(ValueError, match=r"norm\.weight has values beyond float16"):
        load_model(tmp_path, dtype="float16")
    load_model(tmp_path, dtype="bfloat16")
