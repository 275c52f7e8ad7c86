"""Hugging Face directories written from random NumPy tensors, as other programs write them."""

import json

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import safetensors.numpy

from specjax.models import DecoderConfig

TINY = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
)
SIZES = dict(vocab=64, hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_dim=8)


def config(sizes=SIZES, **changes):
    """A config.json as a dict; a change to None removes the key."""
    raw = {
        "model_type": "llama",
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 3,
    } | changes
    return {key: value for key, value in raw.items() if value is not None}


def tensors(sizes=SIZES, *, seed=0, head=True, qkv_bias=False, o_bias=False, dtype="float32"):
    """Random tensors by their Hugging Face names, large enough that every part moves the logits."""
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=0.3):
        return (scale * rng.normal(size=shape)).astype(np.float32).astype(np.dtype(dtype))

    q_width, kv_width = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    hidden, inner = sizes["hidden"], sizes["inner"]
    made = {
        "model.embed_tokens.weight": draw(sizes["vocab"], hidden),
        "model.norm.weight": 1 + draw(hidden),
    }
    if head:
        made["lm_head.weight"] = draw(sizes["vocab"], hidden)
    for layer in range(sizes["layers"]):
        at = f"model.layers.{layer}"
        made |= {
            f"{at}.input_layernorm.weight": 1 + draw(hidden),
            f"{at}.post_attention_layernorm.weight": 1 + draw(hidden),
            f"{at}.self_attn.q_proj.weight": draw(q_width, hidden),
            f"{at}.self_attn.k_proj.weight": draw(kv_width, hidden),
            f"{at}.self_attn.v_proj.weight": draw(kv_width, hidden),
            f"{at}.self_attn.o_proj.weight": draw(hidden, q_width),
            f"{at}.mlp.gate_proj.weight": draw(inner, hidden),
            f"{at}.mlp.up_proj.weight": draw(inner, hidden),
            f"{at}.mlp.down_proj.weight": draw(hidden, inner),
        }
        if qkv_bias:
            for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                made[f"{at}.self_attn.{name}_proj.bias"] = draw(width, scale=3)
        if o_bias:
            made[f"{at}.self_attn.o_proj.bias"] = draw(hidden, scale=3)
    return made


def write(folder, raw_config, weights, *, shards=1):
    """A model directory with that many weight files, and an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config))
    names = sorted(weights)
    if shards == 1:
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        return folder
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        safetensors.numpy.save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
