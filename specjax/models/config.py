"""The shape of a decoder, and its translation from and to a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_ATTENTION_BIASES = {"qwen2": True, "mistral": False}
_FAMILIES = ("llama", "mistral", "qwen2")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and not value > 0:
                raise ValueError(f"expected a positive {field.name}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim, since rotary positions turn pairs, got {self.head_dim}")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json has no {key!r}, which a {raw['model_type']} model needs")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json has {key} {value!r}; expected an integer >= 1")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"config.json has {key} {value!r}; expected a number > 0")
    return float(value)


def _rope_theta(raw: Mapping[str, Any]) -> float:
    # Newer files keep the base inside rope_parameters; a plain "default" there is no scaling at all.
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"config.json has rope_scaling {settings!r}; expected an object or null")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"config.json asks for rope scaling of type {kind!r}; only plain rotary positions are supported"
        )
    return _number(settings, "rope_theta", _number(raw, "rope_theta", 10_000.0))


def _check_window(raw: Mapping[str, Any], max_positions: int) -> None:
    family = raw["model_type"]
    if family == "mistral":
        window = raw.get("sliding_window", 4096)
    elif family == "qwen2":
        window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    else:
        window = None
    if window is not None and window < max_positions:
        raise ValueError(
            f"config.json asks for a sliding window of {window} positions in a context of {max_positions}; sliding "
            "windows are not supported. A max_position_embeddings of at most the window makes the model loadable."
        )


def from_hugging_face(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read the content of a config.json.

    Raises:
      ValueError: another model family, a missing or malformed value, or something this decoder does not compute (rope
        scaling, partly rotated heads, another activation, a sliding window, quantised weights).
    """
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"config.json has model_type {family!r}; supported are {', '.join(_FAMILIES)}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json asks for activation {activation!r}; only 'silu' is supported")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"config.json has partial_rotary_factor {raw['partial_rotary_factor']!r}; only whole heads are rotated"
        )
    if raw.get("quantization_config") is not None:
        raise ValueError("config.json has a quantization_config; only weights in float32, float16 or bfloat16 are read")
    max_positions = _size(raw, "max_position_embeddings")
    _check_window(raw, max_positions)
    heads = _size(raw, "num_attention_heads")
    hidden = _size(raw, "hidden_size")
    bias = _ATTENTION_BIASES.get(family, bool(raw.get("attention_bias", False)))
    return DecoderConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_size(raw, "num_key_value_heads", heads),
        head_dim=_size(raw, "head_dim", hidden // heads),
        max_positions=max_positions,
        rope_theta=_rope_theta(raw),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        o_bias=bias and family == "llama",
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def to_hugging_face(config: DecoderConfig, eos_ids: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """The content of a config.json that reads back as ``config``."""
    qwen2 = config.qkv_bias and not config.o_bias
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen2 else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "torch_dtype": dtype,
    }
