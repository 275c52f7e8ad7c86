"""Hugging Face's config.json and tensor names, family by family, from and to a ``DecoderConfig``."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.config import DecoderConfig
from specjax.models.rope import Dynamic, Linear, Llama3, Rope, Scaling, Yarn

# Ours to theirs; other families are named as our modules are.
_OPT_NAMES = {
    "self_attn.o_proj.": "self_attn.out_proj.",
    "input_layernorm.": "self_attn_layer_norm.",
    "post_attention_layernorm.": "final_layer_norm.",
    "mlp.up_proj.": "fc1.",
    "mlp.down_proj.": "fc2.",
}
HEAD, PREFIX = "lm_head.weight", "model."


def tensor_name(config: DecoderConfig, path: tuple[Any, ...]) -> str:
    """The Hugging Face name of the parameter at a path of ``Decoder``, with the prefix that a causal model's has."""
    parts = [str(part) for part in path]
    if parts[-1] == "scale":
        parts[-1] = "weight"
    elif parts[-1].startswith("embed_"):
        parts.append("weight")
    name = ".".join(parts)
    if name == HEAD:
        return name
    if config.rope is None:
        for ours, theirs in _OPT_NAMES.items():
            name = name.replace(ours, theirs)
        name = f"decoder.final_layer_norm.{parts[-1]}" if parts[0] == "norm" else f"decoder.{name}"
    return f"{PREFIX}{name}"


class _Values:
    """A config.json being read; what is wrong with it is collected."""

    def __init__(self, raw: Mapping[str, Any], problems: list[str], inside: str = ""):
        self.raw, self.problems, self.inside = raw, problems, inside

    def wrong(self, problem: str) -> None:
        self.problems.append(f"config.json has {self.inside}{problem}")

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool], expected: str, placeholder: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            self.wrong(f"no {key!r}; expected {expected}")
        elif fits(value):
            return value
        else:
            self.wrong(f"{key} {value!r}; expected {expected}")
        return placeholder

    def size(self, key: str, default: int | None = None) -> int:
        fits = lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return self._get(key, default, fits, "an integer >= 1", 1)

    def number(self, key: str, default: float | None = None) -> float:
        fits = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        return float(self._get(key, default, fits, "a number > 0", 1.0))

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, lambda value: isinstance(value, bool), "true or false", default)

    def only(self, key: str, *computed: Any) -> None:
        """Refuse what this decoder does not compute; the first value is the family's default."""
        value = self.raw.get(key, computed[0])
        if value not in computed:
            self.wrong(f"{key} {value!r}; supported is {' or '.join(repr(each) for each in computed)}")


def _scaling(kind: str, settings: _Values, original: int) -> Scaling | None:
    """The scaling of a rotary settings object."""
    if kind == "default":
        return None
    if kind in ("llama3", "yarn"):
        original = settings.size("original_max_position_embeddings", original)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        settings.wrong(f"type {kind!r}; supported are default, linear, dynamic, llama3, yarn")
        return None
    factor = settings.number("factor")
    if kind == "linear":
        return Linear(factor, original)
    if kind == "dynamic":
        return Dynamic(factor, original)
    if kind == "llama3":
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if low >= high:
            settings.wrong(f"low_freq_factor {low} and high_freq_factor {high}; expected the first to be lower")
        return Llama3(factor, original, low, high)
    warmer = lambda weight: 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1
    both = [settings.raw.get(key) for key in ("mscale", "mscale_all_dim")]
    default = warmer(settings.number("mscale")) / warmer(settings.number("mscale_all_dim")) if all(both) else warmer(1)
    return Yarn(
        factor,
        original,
        settings.number("attention_factor", default),
        settings.number("beta_fast", 32),
        settings.number("beta_slow", 1),
        settings.flag("truncate", True),
    )


def _rope(config: _Values, max_positions: int) -> Rope:
    # Newer files keep the base inside rope_parameters, older ones beside rope_scaling.
    key = "rope_parameters" if config.raw.get("rope_parameters") else "rope_scaling"
    raw = config.raw.get(key) or {}
    if key == "rope_parameters" and config.raw.get("rope_scaling") not in (None, {}, raw):
        config.wrong("both rope_parameters and rope_scaling, and they differ; expected one of them")
    if not isinstance(raw, Mapping) or any(isinstance(value, Mapping) for value in raw.values()):
        config.wrong(f"{key} {raw!r}; expected one flat object for all layers, or null")
        raw = {}
    given = lambda name: config.raw.get(name) is not None
    outside = {name: config.raw[name] for name in ("rope_theta", "partial_rotary_factor") if given(name)}
    if given("original_max_position_embeddings"):
        raw = {**raw, "original_max_position_embeddings": config.raw["original_max_position_embeddings"]}
    settings = _Values({**outside, **raw}, config.problems, f"in {key} " if raw else "")
    settings.only("partial_rotary_factor", 1.0, None)
    theta = settings.number("rope_theta", 10_000.0)
    if theta <= 1:
        settings.wrong(f"rope_theta {theta}; expected a number > 1")
        theta = 2.0
    kind = raw.get("rope_type") or raw.get("type") or "default"
    return Rope(theta, _scaling(kind, settings, max_positions))


def _reach(rope: Rope, max_positions: int) -> int:
    """The context: some files give it before stretching and some, for YaRN, after it."""
    if isinstance(rope.scaling, Linear | Dynamic | Yarn):
        return max(max_positions, int(rope.scaling.original * rope.scaling.factor))
    return max_positions


def _windows(config: _Values, layers: int, max_positions: int) -> tuple[int | None, ...]:
    """Mistral's window is every layer's; Qwen's needs a switch, and holds for the layers listed or the upper ones."""
    qwen = config.raw["model_type"] != "mistral"
    window: int | None = None
    if config.raw.get("sliding_window", 4096) is not None and (not qwen or config.flag("use_sliding_window", False)):
        window = config.size("sliding_window", 4096)
    kinds = config.raw.get("layer_types") if qwen else None
    if kinds is None:
        first = config.raw.get("max_window_layers", 28) if qwen else 0
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            config.wrong(f"max_window_layers {first!r}; expected an integer >= 0")
            first = 0
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        config.wrong(
            f"layer_types {kinds!r}; expected 'full_attention' or 'sliding_attention' for each of {layers} layers"
        )
    elif window is None and "sliding_attention" in kinds:
        config.wrong("'sliding_attention' among its layer_types, but no sliding_window with use_sliding_window true")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(each is not None and each < max_positions for each in windows) else ()


def _rotary(config: _Values) -> dict[str, Any]:
    """The fields of Llama and its descendants."""
    family = config.raw["model_type"]
    config.only("hidden_act", "silu", "swish")
    max_positions = config.size("max_position_embeddings")
    rope = _rope(config, max_positions)
    max_positions = _reach(rope, max_positions)
    heads, hidden, layers = (config.size(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    own_bias = family in ("llama", "qwen3") and config.flag("attention_bias", False)
    return dict(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=config.size("head_dim", 128 if family == "qwen3" else max(hidden // heads, 1)),
        max_positions=max_positions,
        rope=rope,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", False),
        qkv_bias=own_bias or family == "qwen2",
        o_bias=own_bias,
        mlp_bias=family == "llama" and config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=() if family == "llama" else _windows(config, layers, max_positions),
    )


def _opt(config: _Values) -> dict[str, Any]:
    config.only("activation_function", "relu")
    config.only("layer_norm_elementwise_affine", True)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        config.wrong(f"hidden_size {hidden}; expected a multiple of num_attention_heads {heads}")
    embed, first = config.size("word_embed_proj_dim", hidden), config.flag("do_layer_norm_before", True)
    bias = config.flag("enable_bias", True)
    return dict(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.size("ffn_dim"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        max_positions=config.size("max_position_embeddings"),
        rope=None,
        norm="layer",
        norm_first=first,
        final_norm=first and not config.flag("_remove_final_layer_norm", False),
        norm_eps=1e-5,
        mlp="relu",
        tied_head=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        embed_size=None if embed == hidden else embed,
    )


_READERS = {"llama": _rotary, "mistral": _rotary, "opt": _opt, "qwen2": _rotary, "qwen3": _rotary}


def from_hugging_face(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read the content of a config.json.

    Raises:
      ValueError: everything that is wrong with it: another model family, missing or malformed values, or something
        this decoder does not compute (partly rotated heads, another activation, quantised weights).
    """
    family = raw.get("model_type")
    if family not in _READERS:
        raise ValueError(f"config.json has model_type {family!r}; supported are {', '.join(_READERS)}")
    values = _Values(raw, [])
    if raw.get("quantization_config") is not None:
        values.wrong("a quantization_config; only weights in float32, float16 or bfloat16 are read")
    fields = _READERS[family](values)
    if values.problems:
        raise ValueError("\n  ".join(values.problems))
    return DecoderConfig(**fields)


def _rope_settings(rope: Rope) -> dict[str, Any]:
    """Written as older transformers read it, too: the base beside the scaling."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    settings = dataclasses.asdict(scaling)
    original = settings.pop("original")
    if isinstance(scaling, Llama3 | Yarn):
        settings["original_max_position_embeddings"] = original
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": type(scaling).__name__.lower(), **settings}}


def _window_settings(config: DecoderConfig, family: str) -> dict[str, Any]:
    sizes = {window for window in config.windows if window is not None}
    size = max(sizes, default=None)
    if family == "mistral":
        return {"sliding_window": size}
    if family not in ("qwen2", "qwen3") or not sizes:
        return {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {"use_sliding_window": True, "sliding_window": size, "layer_types": kinds}


def _rotary_settings(config: DecoderConfig, rope: Rope) -> dict[str, Any]:
    qwen3, qwen2 = config.qk_norm, config.qkv_bias and not config.o_bias
    family = "qwen3" if qwen3 else "qwen2" if qwen2 else "mistral" if config.windows else "llama"
    before = rope.scaling.original if isinstance(rope.scaling, Linear | Dynamic) else config.max_positions
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": before,
        **_rope_settings(rope),
        **_window_settings(config, family),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
    }


def _opt_settings(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": config.embed_size or config.hidden_size,
        "ffn_dim": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.final_norm,
        "enable_bias": config.qkv_bias,
        "activation_function": "relu",
        "tie_word_embeddings": config.tied_head,
    }


def to_hugging_face(config: DecoderConfig, eos_ids: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """The content of a config.json that reads back as ``config``.

    Raises:
      ValueError: no family has this combination of options.
    """
    settings = _opt_settings(config) if config.rope is None else _rotary_settings(config, config.rope)
    again = from_hugging_face(settings)
    if again != config:
        differ = [
            field.name
            for field in dataclasses.fields(config)
            if getattr(again, field.name) != getattr(config, field.name)
        ]
        raise ValueError(
            f"this decoder cannot be written as a Hugging Face model: {settings['model_type']}, the nearest family, "
            f"would read back with another {', '.join(differ)}"
        )
    return settings | {
        "bos_token_id": None,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "torch_dtype": dtype,
    }
