"""The Llama forward over one text, in NumPy and float64, from Hugging Face tensors, independent of the library."""

import math

import numpy as np


def _norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _linear(tensors, name, x):
    out = x @ tensors[f"{name}.weight"].T
    return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out


def _turn(x, positions, theta):
    """Each pair (i, i + d/2) is a complex number, turned by position * theta ** (-2i / d)."""
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for i in range(half):
        number = x[..., i] + 1j * x[..., half + i]
        number = number * np.exp(1j * np.asarray(positions) * theta ** (-2 * i / x.shape[-1]))[:, None]
        turned[..., i], turned[..., half + i] = number.real, number.imag
    return turned


def logits(tensors, text, *, layers, heads, kv_heads, head_dim, theta=10_000.0, eps=1e-6, tied=False, windows=None):
    """[N, V] for a text of N tokens.

    Args:
      tensors: arrays by their Hugging Face names.
      text: the token ids.
      windows: per layer how many positions a row sees, its own included; None for all.
    """
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    count = len(text)
    x = tensors["model.embed_tokens.weight"][list(text)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        h = _norm(x, tensors[f"{at}.input_layernorm.weight"], eps)
        q = _linear(tensors, f"{at}.self_attn.q_proj", h).reshape(count, heads, head_dim)
        k = _linear(tensors, f"{at}.self_attn.k_proj", h).reshape(count, kv_heads, head_dim)
        v = _linear(tensors, f"{at}.self_attn.v_proj", h).reshape(count, kv_heads, head_dim)
        q, k = _turn(q, range(count), theta), _turn(k, range(count), theta)
        mixed = np.zeros((count, heads, head_dim))
        window = windows[layer] if windows and windows[layer] else count
        for head in range(heads):
            source = head // (heads // kv_heads)
            for i in range(count):
                first = max(i + 1 - window, 0)
                scores = [q[i, head] @ k[j, source] / math.sqrt(head_dim) for j in range(first, i + 1)]
                weights = np.exp(np.array(scores) - max(scores))
                mixed[i, head] = (weights / weights.sum()) @ v[first : i + 1, source]
        x = x + _linear(tensors, f"{at}.self_attn.o_proj", mixed.reshape(count, -1))
        h = _norm(x, tensors[f"{at}.post_attention_layernorm.weight"], eps)
        gate = _linear(tensors, f"{at}.mlp.gate_proj", h)
        x = x + _linear(
            tensors, f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(tensors, f"{at}.mlp.up_proj", h)
        )
    x = _norm(x, tensors["model.norm.weight"], eps)
    return x @ tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T
