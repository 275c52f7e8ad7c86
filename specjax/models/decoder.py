"""The decoder: parameters in NNX modules, one pure forward over rows of a tree."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.tree_attention import IMPLEMENTATIONS, TreeAttention, tree_attention
from specjax.cache import KVCache
from specjax.models.config import DecoderConfig
from specjax.models.product import barrier, product
from specjax.models.rope import rotate, turns
from specjax.types import Forward, ForwardOut, Model, PyTree, TreeMask

_INIT_SCALE = 0.02
_POSITION_OFFSET = 2  # OPT's table of positions has two rows before that of the first


def _normal(rngs: nnx.Rngs, *shape: int, scale: float = _INIT_SCALE) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


class Projection(nnx.Module):
    """x @ weight.T (+ bias), the weight [outputs, inputs] as in files."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs, scale: float = _INIT_SCALE):
        self.weight = _normal(rngs, outputs, inputs, scale=scale)
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = product(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...]


class Norm(nnx.Module):
    """Root-mean-square or layer normalisation, in float32 whatever the dtype of x; only the latter has a bias."""

    def __init__(self, features: int, *, bias: bool):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        out = normed.astype(x.dtype) * self.scale[...]
        return out if self.bias is None else out + self.bias[...]


class SelfAttention(nnx.Module):
    """The four projections of grouped-query attention, and the norms of its heads where there are some."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Projection(config.hidden_size, q_width, bias=config.qkv_bias, rngs=rngs)
        self.k_proj = Projection(config.hidden_size, kv_width, bias=config.qkv_bias, rngs=rngs)
        self.v_proj = Projection(config.hidden_size, kv_width, bias=config.qkv_bias, rngs=rngs)
        self.o_proj = Projection(
            q_width, config.hidden_size, bias=config.o_bias, rngs=rngs, scale=_residual_scale(config)
        )
        self.q_norm = Norm(config.head_dim, bias=False) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, bias=False) if config.qk_norm else None


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), or down(relu(up(x))) where there is no gate."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Projection(hidden, inner, bias=bias, rngs=rngs) if config.mlp == "swiglu" else None
        self.up_proj = Projection(hidden, inner, bias=bias, rngs=rngs)
        self.down_proj = Projection(inner, hidden, bias=bias, rngs=rngs, scale=_residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate_proj is None:
            return self.down_proj(jax.nn.relu(self.up_proj(x)))
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One transformer layer; its norms stand before or after its parts (``DecoderConfig.norm_first``)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config.hidden_size, bias=config.norm == "layer")
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = Norm(config.hidden_size, bias=config.norm == "layer")
        self.mlp = MLP(config, rngs=rngs)


class Decoder(nnx.Module):
    """The parameters, named and laid out as Llama's in Hugging Face."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        hidden, embed = config.hidden_size, config.embed_size or config.hidden_size
        self.embed_tokens = _normal(rngs, config.vocab_size, embed)
        self.embed_positions = (
            _normal(rngs, _POSITION_OFFSET + config.max_positions, hidden) if config.rope is None else None
        )
        self.project_in = Projection(embed, hidden, bias=False, rngs=rngs) if config.embed_size else None
        self.layers = nnx.List(Layer(config, rngs=rngs) for _ in range(config.num_layers))
        self.norm = Norm(hidden, bias=config.norm == "layer") if config.final_norm else None
        self.project_out = Projection(hidden, embed, bias=False, rngs=rngs) if config.embed_size else None
        self.lm_head = None if config.tied_head else Projection(embed, config.vocab_size, bias=False, rngs=rngs)


def _residual_scale(config: DecoderConfig) -> float:
    # Each layer adds twice to the residual stream; this keeps its variance from growing with depth (GPT-2).
    return _INIT_SCALE * (2 * config.num_layers) ** -0.5


@functools.lru_cache
def abstract_decoder(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure, and its parameters as shapes."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0))))


type Turns = tuple[jax.Array, jax.Array]  # cos and sin


class HasLayers(Protocol):
    """What of a module ``layers_function`` runs."""

    layers: nnx.List
    norm: Norm | None


def layers_function(config: DecoderConfig, attention: str | TreeAttention | None) -> Callable:
    """``run(module, x [B, N, D], positions, mask, cache) -> (x, cache)``: the layers of a module, and its norm if any.

    Raises:
      ValueError: no attention implementation has this name.
    """
    if isinstance(attention, str) and attention not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {attention!r}; known are {', '.join(IMPLEMENTATIONS)}")
    over_tree = attention if callable(attention) else functools.partial(tree_attention, implementation=attention)

    windows = config.windows or (None,) * config.num_layers

    def attend(layer: int, weights: SelfAttention, x: jax.Array, turned: Turns | None, mask: TreeMask, cache: KVCache):
        batch, rows, _ = x.shape
        q = weights.q_proj(x).reshape(batch, rows, config.num_heads, config.head_dim)
        k = weights.k_proj(x).reshape(batch, rows, config.num_kv_heads, config.head_dim)
        v = weights.v_proj(x).reshape(batch, rows, config.num_kv_heads, config.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = weights.q_norm(q, config.norm_eps), weights.k_norm(k, config.norm_eps)
        if turned is not None:
            q, k = rotate(q, *turned), rotate(k, *turned)
        cache = cache.append(layer, k.swapaxes(1, 2), v.swapaxes(1, 2))
        out = over_tree(
            q,
            cache.k[layer],
            cache.v[layer],
            cache.k_tree[layer],
            cache.v_tree[layer],
            prefix_lengths=mask.prefix_lengths,
            tree_mask=mask.tree_mask,
            window=windows[layer],
        )
        return weights.o_proj(out.reshape(batch, rows, -1)), cache

    def before(norm: Norm, x: jax.Array) -> jax.Array:
        return norm(x, config.norm_eps) if config.norm_first else x

    def after(norm: Norm, x: jax.Array) -> jax.Array:
        return x if config.norm_first else norm(x, config.norm_eps)

    def run(module: HasLayers, x: jax.Array, positions: jax.Array, mask: TreeMask, cache: KVCache):
        # Left alone, XLA computes sines and cosines anew for the queries and the keys of every layer.
        turned = None if config.rope is None else barrier(turns(config.rope, config.head_dim, positions))
        for index, layer in enumerate(module.layers):
            attended, cache = attend(index, layer.self_attn, before(layer.input_layernorm, x), turned, mask, cache)
            x = after(layer.input_layernorm, x + attended)
            x = x + layer.mlp(before(layer.post_attention_layernorm, x))
            x = after(layer.post_attention_layernorm, x)
        return x if module.norm is None else module.norm(x, config.norm_eps), cache

    return run


class DecoderFunctions(NamedTuple):
    """The functions of a ``Model``, for one architecture."""

    forward: Forward
    init_cache: Callable[[int, int], KVCache]
    embed: Callable[[PyTree, jax.Array], jax.Array]
    head: Callable[[PyTree, jax.Array], jax.Array]

    def model(
        self, config: DecoderConfig, params: PyTree, eos_ids: tuple[int, ...], directory: str | None = None
    ) -> Model:
        """The model of these parameters."""
        return Model(
            self.forward,
            params,
            self.init_cache,
            config.vocab_size,
            config.max_positions,
            eos_ids,
            directory,
            hidden_size=config.embed_size or config.hidden_size,
            embed=self.embed,
            head=self.head,
        )


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
        return decoder.embed_tokens[...][tokens].astype(decoder.layers[0].input_layernorm.scale[...].dtype)

    def head(params: nnx.State, hidden: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, params)
        return product(hidden, decoder.embed_tokens[...]) if decoder.lm_head is None else decoder.lm_head(hidden)

    def forward(
        params: nnx.State,
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: KVCache,
        *,
        rows: jax.Array | None = None,
    ) -> ForwardOut:
        """See ``specjax.types.Forward``; ``hidden`` is what the head reads, after the last norm and projection."""
        decoder, x = nnx.merge(graph, params), embed(params, tokens)
        if decoder.project_in is not None:
            x = decoder.project_in(x)
        if decoder.embed_positions is not None:
            x = x + decoder.embed_positions[...][positions + _POSITION_OFFSET].astype(x.dtype)
        hidden, cache = run_layers(decoder, x, positions, mask, cache)
        if decoder.project_out is not None:
            hidden = decoder.project_out(hidden)
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
) -> Model:
    """Parameters and functions together; the parameters and the cache hold ``dtype``."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return decoder_functions(config, attention, dtype).model(config, params, eos_ids)


def init_model(
    config: DecoderConfig,
    key: jax.Array,
    *,
    attention: str | TreeAttention | None = None,
    dtype: str = "float32",
    eos_ids: tuple[int, ...] = (),
) -> Model:
    """A model with random parameters, a start for training or for tests.

    Args:
      config: the architecture and its sizes.
      key: [] what the parameters are drawn with.
      attention, dtype: as in ``load_model``.
      eos_ids: its stop tokens.
    """
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)))
    return make_model(config, params, attention=attention, dtype=dtype, eos_ids=eos_ids)
