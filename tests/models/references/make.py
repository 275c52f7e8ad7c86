"""Small random checkpoints of every family with logits by Hugging Face transformers: what this folder was made with.

    python -m tests.models.references.make [CASE ..]  # in an environment with torch, transformers and this package

Each folder here holds a checkpoint as transformers saves it, and reference.safetensors: a text of a random prompt and
64 greedily decoded tokens, and the logits after each of its tokens but the last, decoded token by token with
transformers' cache. The file's metadata says which versions made it.
"""

import inspect
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

HERE = Path(__file__).parent
PROMPT, NEW = 24, 64
ORIGINAL = 32  # positions before rope scaling: the text goes far beyond
LEAST_MARGIN = 2e-3  # between the two likeliest tokens: rounding may not decide a text

SIZES = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)
OPT = {key: SIZES[key] for key in SIZES if key not in ("intermediate_size", "num_key_value_heads")} | dict(
    ffn_dim=24, max_position_embeddings=PROMPT + NEW
)
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
YARN = dict(factor=4.0, original_max_position_embeddings=ORIGINAL)

# name -> (model_type, settings)
CASES = {
    "llama": ("llama", SIZES | dict(num_key_value_heads=4)),
    "llama_linear": (
        "llama",
        SIZES
        | dict(
            max_position_embeddings=ORIGINAL,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=100.0),
            tie_word_embeddings=True,
        ),
    ),
    "llama_dynamic": (
        "llama",
        SIZES
        | dict(
            max_position_embeddings=ORIGINAL,
            rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=100.0),
            head_dim=8,
        ),
    ),
    "llama3": (
        "llama",
        SIZES
        | dict(
            rope_parameters=dict(rope_type="llama3", rope_theta=100.0, **LLAMA3),
            head_dim=8,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "llama_yarn": (
        "llama",
        SIZES | dict(rope_parameters=dict(rope_type="yarn", rope_theta=50.0, beta_fast=3.0, **YARN), head_dim=12),
    ),
    "qwen2": (
        "qwen2",
        SIZES
        | dict(
            sliding_window=8,
            use_sliding_window=False,
            rope_parameters=dict(rope_type="yarn", rope_theta=50.0, attention_factor=1.3, truncate=False, **YARN),
        ),
    ),
    "qwen2_window": (
        "qwen2",
        SIZES | dict(sliding_window=8, use_sliding_window=True, max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": ("qwen3", SIZES | dict(head_dim=8, attention_bias=True)),
    "qwen3_layers": (
        "qwen3",
        SIZES
        | dict(
            head_dim=8,
            sliding_window=8,
            use_sliding_window=True,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "mistral": ("mistral", SIZES | dict(sliding_window=None, head_dim=8)),
    "mistral_window": ("mistral", SIZES | dict(sliding_window=8)),
    "opt": ("opt", OPT),
    "opt_350m": ("opt", OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=8)),
}


def build(name: str, seed: int):
    """The case's model in float32, with weights so large that every part moves the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = CASES[name]
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("bias"):
                weight.copy_((0.1 if kind == "opt" else 0.5) * noise)
            elif "norm" in key:
                weight.copy_(1 + 0.3 * noise)
            elif "embed" in key:
                weight.copy_(noise if "positions" in key or kind != "opt" else 0.5 * noise)
            else:
                weight.copy_(2 * noise * weight.shape[1] ** -0.5)
    return model


def decode(model, prompt: list[int], new: int) -> tuple[np.ndarray, np.ndarray]:
    """The greedy text [P + new] and the logits [P + new - 1, V] after each of its tokens but the last.

    Everything is fed token by token into the cache, so each token is turned for the text that ends with it.
    """
    import torch
    from transformers import DynamicCache

    # Transformers 5 renamed the argument.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    text, rows, cache = list(prompt), [], {argument: DynamicCache(config=model.config)}
    with torch.no_grad():
        for at in range(len(prompt) + new - 1):
            out = model(input_ids=torch.tensor([[text[at]]]), use_cache=True, **cache)
            rows.append(out.logits[0, -1].numpy())
            if at + 1 == len(text):
                text.append(int(rows[-1].argmax()))
    return np.array(text, np.int32), np.stack(rows).astype(np.float32)


def reference(name: str, seed: int):
    """A case's model with its text and logits; None if rounding could decide the text or it only repeats itself."""
    model = build(name, seed)
    prompt = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], PROMPT).tolist()
    text, logits = decode(model, prompt, NEW)
    best = np.sort(logits[PROMPT - 1 :], axis=-1)
    clear = (best[:, -1] - best[:, -2]).min() > LEAST_MARGIN
    return (model, text, logits) if clear and len(set(text[PROMPT:].tolist())) > NEW // 8 else None


def main() -> int:
    """Write every case into its folder."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in sys.argv[1:] or CASES:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        seed, found = next((seed, made) for seed in range(100) if (made := reference(name, seed)))
        model, text, logits = found
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name == "opt_350m":  # as the hub's file has them
            weights = safetensors.numpy.load_file(folder / "model.safetensors")
            weights = {key.removeprefix("model."): value for key, value in weights.items()}
            safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        made = {"text": text, "logits": logits}
        safetensors.numpy.save_file(made, folder / "reference.safetensors", {"versions": json.dumps(versions)})
        print(f"{name}: seed {seed}, {len(set(text[PROMPT:].tolist()))} different tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
