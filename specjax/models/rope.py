"""Rotary positions, and the published ways to stretch them beyond the context a model was trained on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float
    original: int  # positions before stretching


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A base that grows with the text's length, once that exceeds ``original`` ("dynamic NTK").

    A row is turned for the text that ends with it, whatever is fed beside it: what one gets by feeding a text token by
    token into a cache. So a row depends on its position alone, and a tree decodes what incremental decoding does. A
    text fed as a whole has other logits in transformers, which then turns all of its rows for its full length.
    """

    factor: float
    original: int


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Slow frequencies divided by ``factor``, fast ones kept, those between blended (Llama 3.1)."""

    factor: float
    original: int
    low_freq_factor: float
    high_freq_factor: float


@dataclasses.dataclass(frozen=True)
class Yarn:
    """As ``Llama3``, blended over dimensions, with warmer attention (Peng et al. 2023, YaRN, sections 3.2 to 3.4)."""

    factor: float
    original: int
    attention_factor: float  # of cos and sin, so its square is that of the scores
    beta_fast: float = 32.0  # turns within the original context above which a frequency is kept
    beta_slow: float = 1.0  # turns below which it is divided
    truncate: bool = True  # whether the dimensions between which it is blended are whole numbers


type Scaling = Linear | Dynamic | Llama3 | Yarn


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, section 3.2.2), pairing dimension i with i + D / 2 as Llama does."""

    theta: float = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self):
        if not self.theta > 1:
            raise ValueError(f"expected a rotary base theta above 1, got {self.theta!r}")


def _frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position [D / 2] in float64, and the factor of cos and sin. ``Dynamic`` is not in them yet."""
    half = head_dim // 2
    plain = rope.theta ** (-np.arange(half) / half)
    match rope.scaling:
        case Linear(factor):
            return plain / factor, 1.0
        case Llama3(factor, original, low, high):
            turns = original * plain / (2 * math.pi)  # within the original context
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return plain * (kept + (1 - kept) / factor), 1.0
        case Yarn(factor, original, attention_factor, beta_fast, beta_slow, truncate):

            def dimension(turns: float) -> float:
                """The pair that turns so often within the original context."""
                return half * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

            first, last = dimension(beta_fast), dimension(beta_slow)
            if truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            divided = np.clip((np.arange(half) - first) / (last - first or 0.001), 0, 1)
            return plain * (1 - divided + divided / factor), attention_factor
        case _:
            return plain, 1.0


def turns(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, N, 1, D / 2] in float32 of each pair's angle at positions [B, N]."""
    half = head_dim // 2
    frequencies, factor = _frequencies(rope, head_dim)
    frequencies = jnp.asarray(frequencies, jnp.float32)
    positions = positions[..., None, None].astype(jnp.float32)
    if isinstance(rope.scaling, Dynamic):
        longer = jnp.maximum((positions + 1) / rope.scaling.original, 1)  # [B, N, 1, 1]
        growth = rope.scaling.factor * longer - (rope.scaling.factor - 1)
        frequencies = frequencies * growth ** (-jnp.arange(half, dtype=jnp.float32) / (half - 1))
    angles = positions * frequencies
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each head's pairs: x [B, N, H, D] by angles [B, N, 1, D / 2], in float32, returned in the dtype of x."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
