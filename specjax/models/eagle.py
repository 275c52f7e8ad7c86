"""EAGLE: a layer that continues the target's last hidden states, a token at a time (Li et al. 2024)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.tree_attention import TreeAttention
from specjax.cache import KVCache
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Layer, Norm, Projection, empty_cache, layers_function
from specjax.models.rope import Rope
from specjax.types import ForwardOut, Model, PyTree, TreeMask


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of EAGLE's layers, which are Llama's."""

    hidden_size: int  # the target's
    vocab_size: int  # the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_layers: int = 1
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        self.decoder  # noqa: B018  checks the values

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder that has these layers, were it a whole one."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            rope=Rope(self.rope_theta),
            norm_eps=self.norm_eps,
        )


class EagleLayers(nnx.Module):
    """The parameters beside the target's embedding and head, which are read and not learned."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.fc = Projection(2 * size, size, bias=True, rngs=rngs, scale=(2 * size) ** -0.5)
        self.layers = nnx.List(Layer(config.decoder, rngs=rngs) for _ in range(config.num_layers))
        self.norm = Norm(size, bias=False)


@functools.lru_cache
def abstract_eagle(config: EagleConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The layers' structure, and their parameters as shapes."""
    return nnx.split(nnx.eval_shape(lambda: EagleLayers(config, rngs=nnx.Rngs(params=0))))


def init_eagle(
    config: EagleConfig, key: jax.Array, *, embedded: jax.Array | None = None, hidden: jax.Array | None = None
) -> PyTree:
    """Random parameters.

    Embeddings are often a twentieth of the hidden states in size, and some dimensions ten times the others: given
    samples of both, every input starts out equally loud, and the outputs as large as those they are to predict.

    Args:
      config: the layer's shape.
      key: of the random numbers.
      embedded: [.., D] rows of the target's embedding.
      hidden: [.., D] hidden states of the target.
    """
    module = EagleLayers(config, rngs=nnx.Rngs(params=key))
    sizes = [
        jnp.ones(config.hidden_size)
        if rows is None
        else jnp.sqrt(jnp.mean(jnp.square(rows).reshape(-1, config.hidden_size), axis=0))
        for rows in (embedded, hidden)
    ]
    module.fc.weight.set_value(module.fc.weight[...] / jnp.concatenate(sizes))
    module.norm.scale.set_value(sizes[1])
    return nnx.state(module)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleCache:
    """Keys and values, and the predicted hidden states that drafted tokens go on from."""

    kv: KVCache
    predicted: jax.Array  # [B, 1 + M, D] of the last committed row, then of the M uncommitted ones

    @property
    def lengths(self) -> jax.Array:
        """[B] int32 committed rows."""
        return self.kv.lengths

    def before(self, mask: TreeMask) -> jax.Array:
        """[B, N, D] what was predicted for the parents of N drafted nodes that are about to be fed."""
        # A parent is the last uncommitted row before the node's own that it sees, or the last committed one.
        earlier = jnp.arange(1, self.predicted.shape[1])
        parents = jnp.max(jnp.where(mask.tree_mask[:, :, : len(earlier)], earlier, 0), axis=-1, initial=0)
        return jnp.take_along_axis(self.predicted, parents[..., None], axis=1)

    def commit(self, rows: jax.Array, counts: jax.Array) -> "EagleCache":
        """As ``KVCache.commit``."""
        last = jnp.take_along_axis(rows, jnp.maximum(counts - 1, 0)[:, None], axis=1)
        kept = jnp.where((counts > 0)[:, None], 1 + last, 0)
        predicted = jnp.take_along_axis(self.predicted, kept[..., None], axis=1)
        return EagleCache(self.kv.commit(rows, counts), predicted)

    def discard(self) -> "EagleCache":
        """Empty the tree buffers without committing anything."""
        return EagleCache(self.kv.discard(), self.predicted[:, :1])


def eagle_model(
    config: EagleConfig,
    params: PyTree,
    target: Model,
    *,
    attention: str | TreeAttention | None = None,
    dtype: str = "float32",
    directory: str | None = None,
) -> Model:
    """The layers as a draft model, between the target's embedding and its head.

    A row is a token beside the hidden state that chose it; what comes out is the hidden state behind that token, which
    chooses the next one. Committed tokens are fed with the target's true states, drafted ones with those predicted.
    """
    forward, init_cache = _model_functions(config, attention, dtype, target.embed, target.head)
    return Model(
        forward,
        (jax.tree.map(lambda leaf: leaf.astype(dtype), params), target.params),
        init_cache,
        target.vocab_size,
        min(config.max_positions, target.max_positions),
        directory=directory,
        hidden_size=config.hidden_size,
        reads_hidden=config.hidden_size,
    )


@functools.lru_cache
def _model_functions(
    config: EagleConfig, attention: str | TreeAttention | None, dtype: str, embed: Callable, head: Callable
):
    graph, _ = abstract_eagle(config)
    run_layers = layers_function(config.decoder, attention)

    def forward(
        params: tuple[PyTree, PyTree],
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: EagleCache,
        *,
        rows: jax.Array | None = None,
        before: jax.Array | None = None,
    ) -> ForwardOut:
        """See ``specjax.types.Model``; ``hidden`` is predicted."""
        own, target = params
        module = nnx.merge(graph, own)
        before = cache.before(mask) if before is None else before
        known = module.norm.scale[...].dtype
        x = jnp.concatenate([embed(target, tokens).astype(known), before.astype(known)], axis=-1)
        hidden, kv = run_layers(module, module.fc(x), positions, mask, cache.kv)
        cache = EagleCache(kv, jnp.concatenate([cache.predicted, hidden.astype(cache.predicted.dtype)], axis=1))
        wanted = hidden if rows is None else jnp.take_along_axis(hidden, rows[..., None], axis=1)
        return ForwardOut(head(target, wanted), hidden, cache)

    def init_cache(batch: int, capacity: int) -> EagleCache:
        return EagleCache(
            empty_cache(config.decoder, dtype, batch, capacity), jnp.zeros((batch, 1, config.hidden_size), dtype)
        )

    return forward, init_cache
