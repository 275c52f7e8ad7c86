"""The shape of a decoder: sizes, and the few options in which the families differ."""

import dataclasses
from typing import Literal

from specjax.models.rope import Dynamic, Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder. The defaults are Llama's: RMSNorm first, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope | None = Rope()  # None: learned positions (OPT)
    norm: Literal["rms", "layer"] = "rms"
    norm_first: bool = True  # else each part's sum is normalised (OPT 350m)
    final_norm: bool = True
    norm_eps: float = 1e-6
    mlp: Literal["swiglu", "relu"] = "swiglu"
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head (Qwen3)
    windows: tuple[int | None, ...] = ()  # positions each layer sees, its own included; None is all, () no windows
    embed_size: int | None = None  # of the embedding where it is projected to and from hidden_size (OPT 350m)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and not value > 0:
                raise ValueError(f"expected a positive {field.name}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_heads to be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"expected an even head_dim, since rotary positions turn pairs, got {self.head_dim}")
        if self.rope is not None and isinstance(self.rope.scaling, Dynamic) and self.head_dim < 4:
            raise ValueError(f"expected a head_dim of at least 4 for dynamic rope scaling, got {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"expected a window for each of {self.num_layers} layers or none, got {self.windows}")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"expected windows of at least 1 position, got {self.windows}")
