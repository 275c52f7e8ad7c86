"""How much faster folded tree attention is on this machine than the way it is usually written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.timing import interleaved, timed
from pallas_kernels.tree_attention import tree_attention


def by_einsum(q, k_cache, v_cache, k_tree, v_tree, *, prefix_lengths, tree_mask):
    """The usual way: keys joined, queries in five dimensions [B, N, Hkv, group, D]."""
    batch, nodes, q_heads, head_dim = q.shape
    grouped = q.reshape(batch, nodes, k_tree.shape[1], -1, head_dim)
    keys, values = jnp.concatenate([k_cache, k_tree], axis=2), jnp.concatenate([v_cache, v_tree], axis=2)
    in_prefix = jnp.arange(k_cache.shape[2]) < prefix_lengths[:, None]
    in_prefix = jnp.broadcast_to(in_prefix[:, None], (*tree_mask.shape[:2], k_cache.shape[2]))
    visible = jnp.concatenate([in_prefix, tree_mask], axis=-1)[:, None, None]
    scores = jnp.einsum("bnhgd,bhsd->bhgns", grouped, keys) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhgns,bhsd->bnhgd", weights, values).reshape(q.shape)


def attention_ratios(
    *,
    batch: int = 4,
    nodes: int = 64,
    q_heads: int = 16,
    kv_heads: int = 4,
    head_dim: int = 64,
    prefix: int = 2048,
    repeats: int = 7,
) -> dict[str, float]:
    """Time of the usual way over the time of ``xla``, in float32, measured in turns: {"einsum / xla": ratio, ..}."""
    rng = np.random.default_rng(0)
    cache, tree = (batch, kv_heads, prefix, head_dim), (batch, kv_heads, nodes, head_dim)
    sizes = (batch, nodes, q_heads, head_dim), cache, cache, tree, tree
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    mask = jnp.broadcast_to(jnp.tri(nodes, dtype=bool), (batch, nodes, nodes))
    named = dict(prefix_lengths=jnp.full((batch,), prefix, jnp.int32), tree_mask=mask)
    ways = {"einsum": by_einsum, "xla": functools.partial(tree_attention, implementation="xla")}
    runs = {name: jax.jit(functools.partial(way, **named)) for name, way in ways.items()}
    calls = {name: functools.partial(timed, functools.partial(run, *arrays)) for name, run in runs.items()}
    seconds = interleaved(calls, repeats)
    return {"einsum / xla": seconds["einsum"] / seconds["xla"]}
