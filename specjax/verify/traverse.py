"""Verification by a walk down the tree: at each node a rule gives the law of the emitted token, and one is drawn."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import Warp, argmax, sample_at
from specjax.tree import TokenTree
from specjax.types import Acceptance, Draws, NodeRule, RoundKeys


def node_law(rule: NodeRule, tree: TokenTree, logits: jax.Array, nodes: jax.Array, warp: Warp) -> jax.Array:
    """The laws [B, V] of the tokens emitted at nodes [B] of a batch of trees, given everything drafted there."""
    rows = jnp.arange(nodes.shape[0])
    q_rows = tree.q_rows[rows, nodes]
    q = tree.q[rows[:, None], q_rows]
    draws = Draws(tree.draw_tokens[rows, nodes], tree.draw_source, tree.draw_valid[rows, nodes])
    return jax.vmap(rule)(warp(logits[rows, nodes]), q, draws)


class _Walk(NamedTuple):
    step: jax.Array  # [] int32, tokens emitted by every row that is still walking
    node: jax.Array  # [B] int32
    walking: jax.Array  # [B] bool
    path: jax.Array  # [B, D + 1] int32
    tokens: jax.Array  # [B, D + 1] int32
    num_accepted: jax.Array  # [B] int32


@functools.cache
def traverse(rule: Callable[..., jax.Array], *, takes_laws: bool = False) -> Callable[..., Acceptance]:
    """A verifier's function from a node rule (SpecInfer, Algorithm 2, for any rule).

    From the root down: draw the emitted token from the rule's law, and go on at the child that carries it, until there
    is none. It is a child that counts, however the rule came to the token: what was drafted below a child is
    independent of that. Only rows of the target's logits that are walked over are warped. ``takes_laws`` is for a rule
    with a keyword ``laws``, the proposal law of each source.
    """

    def verify(keys: RoundKeys, tree: TokenTree, logits: jax.Array, warp: Warp) -> Acceptance:
        batch, width = logits.shape[0], tree.max_depth + 1
        rows = jnp.arange(batch)
        sampled = jnp.any(warp.temperature > 0)
        law_of_token = functools.partial(rule, laws=tree.laws) if takes_laws else rule

        def emit(walk: _Walk) -> jax.Array:
            law = node_law(law_of_token, tree, logits, walk.node, warp)
            return sample_at(keys.emit, keys.positions + walk.step, law)

        def greedy(walk: _Walk) -> jax.Array:
            # An exact rule's law averages to the target's, so at temperature 0 it is the argmax, whatever was drawn.
            return argmax(logits[rows, walk.node])

        def step(walk: _Walk) -> _Walk:
            token = lax.cond(sampled, emit, greedy, walk)
            child = tree.valid & (tree.parents == walk.node[:, None]) & (tree.tokens == token[:, None])
            descend = walk.walking & jnp.any(child, axis=1)
            node = jnp.where(descend, jnp.argmax(child, axis=1).astype(jnp.int32), walk.node)
            here = jnp.arange(width) == walk.step
            return _Walk(
                walk.step + 1,
                node,
                descend,
                jnp.where(here & walk.walking[:, None], walk.node[:, None], walk.path),
                jnp.where(here & walk.walking[:, None], token[:, None], walk.tokens),
                walk.num_accepted + descend,
            )

        zeros = jnp.zeros((batch, width), jnp.int32)
        start = _Walk(
            jnp.int32(0), jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), zeros, zeros, jnp.zeros(batch, jnp.int32)
        )
        walk = lax.while_loop(lambda walk: jnp.any(walk.walking) & (walk.step < width), step, start)
        return Acceptance(path=walk.path, num_accepted=walk.num_accepted, tokens=walk.tokens)

    return verify
