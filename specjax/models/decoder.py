"""The Llama-family decoder: parameters in NNX modules, one pure forward over rows of a tree."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.tree_attention import IMPLEMENTATIONS, TreeAttention, tree_attention
from specjax.cache import KVCache
from specjax.models.config import DecoderConfig
from specjax.models.product import product
from specjax.types import Forward, ForwardOut, Model, PyTree, TreeMask

_INIT_SCALE = 0.02


def _normal(rngs: nnx.Rngs, *shape: int, scale: float = _INIT_SCALE) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


class Projection(nnx.Module):
    """x @ kernel (+ bias)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs, scale: float = _INIT_SCALE):
        self.kernel = _normal(rngs, inputs, outputs, scale=scale)
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = product(x, self.kernel[...])
        return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, in float32 whatever the dtype of x."""

    def __init__(self, features: int):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x: jax.Array, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return normed.astype(x.dtype) * self.scale[...]


class SelfAttention(nnx.Module):
    """The four projections of grouped-query attention."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Projection(config.hidden_size, q_width, bias=config.qkv_bias, rngs=rngs)
        self.k_proj = Projection(config.hidden_size, kv_width, bias=config.qkv_bias, rngs=rngs)
        self.v_proj = Projection(config.hidden_size, kv_width, bias=config.qkv_bias, rngs=rngs)
        self.o_proj = Projection(
            q_width, config.hidden_size, bias=config.o_bias, rngs=rngs, scale=_residual_scale(config)
        )


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Projection(hidden, inner, bias=bias, rngs=rngs)
        self.up_proj = Projection(hidden, inner, bias=bias, rngs=rngs)
        self.down_proj = Projection(inner, hidden, bias=bias, rngs=rngs, scale=_residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = SwiGLU(config, rngs=rngs)


class Decoder(nnx.Module):
    """The parameters, named as Hugging Face names them; matrices are stored so that they multiply as x @ W."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = _normal(rngs, config.vocab_size, config.hidden_size)
        self.layers = nnx.List(Layer(config, rngs=rngs) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = (
            None if config.tied_head else Projection(config.hidden_size, config.vocab_size, bias=False, rngs=rngs)
        )


class HasLayers(Protocol):
    """What of a module ``layers_function`` runs."""

    layers: nnx.List
    norm: RMSNorm


def _residual_scale(config: DecoderConfig) -> float:
    # Each layer adds twice to the residual stream; this keeps its variance from growing with depth (GPT-2).
    return _INIT_SCALE * (2 * config.num_layers) ** -0.5


@functools.lru_cache
def abstract_decoder(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure, and its parameters as shapes."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))


def _rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, section 3.2.2), pairing dimension i with i + D / 2 as Llama does.

    Args:
      x: [B, N, H, D].
      positions: [B, N] int32.
      theta: the base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [B, N, 1, D / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layers_function(config: DecoderConfig, attention: str | TreeAttention | None) -> Callable:
    """``run(module, x [B, N, D], positions, mask, cache) -> (hidden [B, N, D], cache)`` of a module's layers and norm.

    Raises:
      ValueError: no attention implementation has this name.
    """
    if isinstance(attention, str) and attention not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {attention!r}; known are {', '.join(IMPLEMENTATIONS)}")
    over_tree = attention if callable(attention) else functools.partial(tree_attention, implementation=attention)

    def attend(layer: int, weights: SelfAttention, x: jax.Array, positions: jax.Array, mask: TreeMask, cache: KVCache):
        batch, rows, _ = x.shape
        q = weights.q_proj(x).reshape(batch, rows, config.num_heads, config.head_dim)
        k = weights.k_proj(x).reshape(batch, rows, config.num_kv_heads, config.head_dim)
        v = weights.v_proj(x).reshape(batch, rows, config.num_kv_heads, config.head_dim)
        q, k = _rotate(q, positions, config.rope_theta), _rotate(k, positions, config.rope_theta)
        cache = cache.append(layer, k.swapaxes(1, 2), v.swapaxes(1, 2))
        out = over_tree(
            q,
            cache.k[layer],
            cache.v[layer],
            cache.k_tree[layer],
            cache.v_tree[layer],
            prefix_lengths=mask.prefix_lengths,
            tree_mask=mask.tree_mask,
        )
        return weights.o_proj(out.reshape(batch, rows, -1)), cache

    def run(module: HasLayers, x: jax.Array, positions: jax.Array, mask: TreeMask, cache: KVCache):
        for index, layer in enumerate(module.layers):
            normed = layer.input_layernorm(x, config.norm_eps)
            attended, cache = attend(index, layer.self_attn, normed, positions, mask, cache)
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x, config.norm_eps))
        return module.norm(x, config.norm_eps), cache

    return run


class DecoderFunctions(NamedTuple):
    """The functions of ``Model``, for one architecture."""

    forward: Forward
    init_cache: Callable[[int, int], KVCache]
    embed: Callable[[PyTree, jax.Array], jax.Array]
    head: Callable[[PyTree, jax.Array], jax.Array]


@functools.lru_cache
def decoder_functions(config: DecoderConfig, attention: str | TreeAttention | None, dtype: str) -> DecoderFunctions:
    """The functions of an architecture.

    Made once per argument, since compiled code is reused by the identity of these functions.

    Raises:
      ValueError: no attention implementation has this name.
    """
    graph, _ = abstract_decoder(config)
    run_layers = layers_function(config, attention)

    def embed(params: nnx.State, tokens: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, params)
        return decoder.embed_tokens[...][tokens].astype(decoder.norm.scale[...].dtype)

    def head(params: nnx.State, hidden: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, params)
        return product(hidden, decoder.embed_tokens[...].T) if decoder.lm_head is None else decoder.lm_head(hidden)

    def forward(
        params: nnx.State,
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: KVCache,
        *,
        rows: jax.Array | None = None,
    ) -> ForwardOut:
        """See ``specjax.types.Forward``; ``hidden`` is what the head reads, after the last norm."""
        hidden, cache = run_layers(nnx.merge(graph, params), embed(params, tokens), positions, mask, cache)
        wanted = hidden if rows is None else jnp.take_along_axis(hidden, rows[..., None], axis=1)
        return ForwardOut(head(params, wanted), hidden, cache)

    return DecoderFunctions(forward, functools.partial(empty_cache, config, dtype), embed, head)


def empty_cache(config: DecoderConfig, dtype: str, batch: int, capacity: int) -> KVCache:
    """A cache for the layers of ``config``."""
    return KVCache.create(
        num_layers=config.num_layers,
        batch=batch,
        num_kv_heads=config.num_kv_heads,
        capacity=capacity,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def make_model(
    config: DecoderConfig,
    params: PyTree,
    *,
    attention: str | TreeAttention | None = None,
    dtype: str = "float32",
    eos_ids: tuple[int, ...] = (),
    directory: str | None = None,
) -> Model:
    """Parameters and functions together; the parameters and the cache hold ``dtype``."""
    functions = decoder_functions(config, attention, dtype)
    return Model(
        functions.forward,
        jax.tree.map(lambda leaf: leaf.astype(dtype), params),
        functions.init_cache,
        config.vocab_size,
        config.max_positions,
        eos_ids,
        directory,
        hidden_size=config.hidden_size,
        embed=functions.embed,
        head=functions.head,
    )


def init_model(
    config: DecoderConfig,
    key: jax.Array,
    *,
    attention: str | TreeAttention | None = None,
    dtype: str = "float32",
    eos_ids: tuple[int, ...] = (),
) -> Model:
    """A model with random parameters."""
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)))
    return make_model(config, params, attention=attention, dtype=dtype, eos_ids=eos_ids)
