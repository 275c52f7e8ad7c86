"""Medusa heads: one small network per future token, over the target's last hidden state (Cai et al. 2024)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.decoder import Projection
from specjax.types import ForwardOut, Model, PyTree, TreeMask


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """The shape of Medusa heads."""

    hidden_size: int  # the target's
    vocab_size: int  # the target's
    num_heads: int  # tokens drafted ahead
    num_blocks: int = 1  # residual blocks of each head
    tied_projection: bool = False  # whether the target's own head projects to the vocabulary

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and not value > 0:
                raise ValueError(f"expected a positive {field.name}, got {value!r}")


class MedusaHead(nnx.Module):
    """One head: x + silu(block(x)), some times over, then a projection to the vocabulary."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.blocks = nnx.List(
            Projection(size, size, bias=True, rngs=rngs, scale=0.0) for _ in range(config.num_blocks)
        )
        self.projection = None if config.tied_projection else Projection(size, config.vocab_size, bias=False, rngs=rngs)


class MedusaHeads(nnx.Module):
    """The parameters; head i predicts the token i + 1 places behind the one that the target's own head predicts."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        self.heads = nnx.List(MedusaHead(config, rngs=rngs) for _ in range(config.num_heads))


@functools.lru_cache
def abstract_medusa(config: MedusaConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The heads' structure, and their parameters as shapes."""
    return nnx.split(nnx.eval_shape(lambda: MedusaHeads(config, rngs=nnx.Rngs(params=0))))


def init_medusa(config: MedusaConfig, target: Model) -> PyTree:
    """Parameters that predict what the target's own head does, where training starts (Cai et al. 2024, section 2.1.1).

    The last projection is the target's own head, or a copy of it, and the blocks before it add nothing yet.
    """
    module = MedusaHeads(config, rngs=nnx.Rngs(params=0))  # blocks of zeros, so the key does not matter
    for head in module.heads:
        if head.projection is not None:
            assert target.head is not None
            head.projection.weight.set_value(target.head(target.params, jnp.eye(config.hidden_size)).T)
    return nnx.state(module)


def medusa_logits(config: MedusaConfig, target: Model, params: PyTree, hidden: jax.Array) -> jax.Array:
    """Logits [.., K, V] of all heads over the target's hidden states [.., D]."""
    logits = _logits_function(config, target.head)
    return logits((params, target.params if config.tied_projection else None), hidden)


@functools.lru_cache
def _logits_function(config: MedusaConfig, target_head: Any):
    graph, _ = abstract_medusa(config)

    def logits(params: tuple[PyTree, PyTree], hidden: jax.Array) -> jax.Array:
        own, target_params = params
        states, module = [], nnx.merge(graph, own)
        for head in module.heads:
            x = hidden.astype(head.blocks[0].bias[...].dtype)
            for block in head.blocks:
                x = x + jax.nn.silu(block(x))
            states.append(x)
        if config.tied_projection:
            return target_head(target_params, jnp.stack(states, axis=-2))
        return jnp.stack([head.projection(x) for head, x in zip(module.heads, states)], axis=-2)

    return logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MedusaCache:
    """What the heads said after the last committed token; they see no drafted one, so that is all there is to keep."""

    lengths: jax.Array  # [B] int32 committed tokens
    ahead: jax.Array  # [B, K, V] logits after the last of them
    rows: jax.Array  # [B, R] int32 uncommitted rows whose logits were asked for
    ahead_of_rows: jax.Array  # [B, R, K, V]

    def commit(self, rows: jax.Array, counts: jax.Array) -> "MedusaCache":
        """Take in the first counts [B] of rows [B, C]; the logits of the last one must have been asked for."""
        last = jnp.take_along_axis(rows, jnp.maximum(counts - 1, 0)[:, None], axis=1)
        found = jnp.argmax(self.rows == last, axis=1)[:, None, None, None]
        new = jnp.take_along_axis(self.ahead_of_rows, found, axis=1)[:, 0]
        ahead = jnp.where((counts > 0)[:, None, None], new, self.ahead)
        return dataclasses.replace(self.discard(), lengths=self.lengths + counts, ahead=ahead)

    def discard(self) -> "MedusaCache":
        """Forget the uncommitted rows."""
        return dataclasses.replace(self, rows=self.rows[:, :0], ahead_of_rows=self.ahead_of_rows[:, :0])


def medusa_model(
    config: MedusaConfig, params: PyTree, target: Model, *, dtype: str = "float32", directory: str | None = None
) -> Model:
    """The heads as a draft model: after a node of depth d its logits are head d's, whatever was drafted up to there.

    It is trained to be expanded by fixed paths of top-k ranks, as the paper does (``Topology.from_paths``), but takes
    any tree no deeper than it has heads, any proposal law and any verifier.
    """
    forward, init_cache = _model_functions(config, target.head)
    own = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return Model(
        forward,
        (own, target.params if config.tied_projection else None),
        init_cache,
        config.vocab_size,
        target.max_positions,
        directory=directory,
        reads_hidden=config.hidden_size,
        max_depth=config.num_heads,
    )


@functools.lru_cache
def _model_functions(config: MedusaConfig, target_head: Any):
    all_logits = _logits_function(config, target_head)

    def forward(
        params: tuple[PyTree, PyTree],
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: MedusaCache,
        *,
        rows: jax.Array | None = None,
        before: jax.Array | None = None,
    ) -> ForwardOut:
        """See ``specjax.types.Model``."""
        del positions
        if rows is None:
            rows = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if before is None:
            depths = jnp.sum(mask.tree_mask, axis=-1)  # of the fed nodes: a node sees itself and its ancestors
            wanted = jnp.take_along_axis(depths, rows, axis=1)
            return ForwardOut(jnp.take_along_axis(cache.ahead, wanted[..., None], axis=1, mode="clip"), None, cache)
        ahead = all_logits(params, jnp.take_along_axis(before, rows[..., None], axis=1))
        cache = dataclasses.replace(cache, rows=rows, ahead_of_rows=ahead.astype(cache.ahead.dtype))
        return ForwardOut(cache.ahead_of_rows[:, :, 0], None, cache)

    def init_cache(batch: int, capacity: int) -> MedusaCache:
        del capacity
        lengths = jnp.zeros((batch,), jnp.int32)
        ahead = jnp.zeros((batch, config.num_heads, config.vocab_size), jnp.float32)
        return MedusaCache(lengths, ahead, lengths[:, None][:, :0], ahead[:, None][:, :0])

    return forward, init_cache
