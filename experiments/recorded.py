"""Drafted and scored trees, kept, so that any number of verifiers meet the same ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, exact
from specjax.request import Plan
from specjax.sampling import Warp, sample_at
from specjax.tree import TokenTree
from specjax.types import Acceptance, RoundKeys
from specjax.verify import RULES, VERIFIERS


class Recording(NamedTuple):
    """What a verifier would be given in one round of a batch."""

    keys: RoundKeys
    trees: TokenTree
    logits: jax.Array  # [B, N, V]
    warp: Warp
    running: jax.Array  # [B] bool, rows that had not finished


def record(plan: Plan, steps: int) -> list[Recording]:
    """Draft and score a tree at each of ``steps`` consecutive positions of the target's own text.

    The text is that of incremental decoding with the plan's seeds, whatever is drafted, so it does not favour the
    verifiers that the recordings are for.
    """
    state, recordings = plan.start(), []
    for _ in range(steps):
        state, seen = _look(plan.spec, plan.params, state)
        recordings.append(seen)
    return recordings


@functools.partial(jax.jit, static_argnums=0)
def _look(spec: decode.Spec, params: decode.Params, state: decode.DecodeState):
    seen: list[Recording] = []

    def note(keys: RoundKeys, trees: TokenTree, logits: jax.Array, warp: Warp) -> Acceptance:
        """Keep what a verifier sees, and accept nothing: the next token is the target's own."""
        seen.append(Recording(keys, trees, logits, warp, state.running))
        token = sample_at(jax.random.clone(keys.emit), keys.positions, warp(logits[:, 0]))
        nothing = jnp.zeros((token.shape[0], spec.max_depth + 1), jnp.int32)
        return Acceptance(nothing, jnp.zeros_like(token), nothing.at[:, 0].set(token))

    state, _ = decode.round(spec._replace(verify=note), params, state)
    return state, seen[0]


def prompts_of(recordings: Sequence[Recording]) -> np.ndarray:
    """[R] the prompt that each running row of the recordings, one after the other, belongs to."""
    return np.concatenate([np.flatnonzero(item.running) for item in recordings])


def expected(verifier: str, recording: Recording) -> np.ndarray:
    """[R, D] how often a drafted token is accepted at each depth, given each running row's tree."""
    accepted = accepted_by_depth(verifier, recording.trees, recording.logits, recording.warp)
    return np.asarray(accepted)[np.asarray(recording.running)]


def sampled(verifier: str, recording: Recording) -> np.ndarray:
    """[R] drafted tokens that the real verifier accepted, with the noise the recording's rounds had."""
    accepted = _sampled(verifier)(recording.keys, _shared(verifier, recording.trees), recording.logits, recording.warp)
    return np.asarray(accepted)[np.asarray(recording.running)]


def accepted_by_depth(verifier: str, trees: TokenTree, logits: jax.Array, warp: Warp) -> jax.Array:
    """How often [B, D] a token is accepted at depth 1, 2, .., given each tree; ``exact.reach``, compiled."""
    return _accepted_by_depth(verifier)(_shared(verifier, trees), logits, warp)


def _shared(verifier: str, trees: TokenTree) -> TokenTree:
    """Trees of all laws as one type where the verifier does not ask for the law, so that they share compiled code."""
    asks = verifier == "traversal" or (verifier in RULES and RULES[verifier].takes_laws)
    return trees if asks else dataclasses.replace(trees, laws=("iid",) * len(trees.laws))


@functools.cache
def _accepted_by_depth(verifier: str):
    def by_depth(trees: TokenTree, logits: jax.Array, warp: Warp) -> jax.Array:
        levels = jnp.arange(1, trees.max_depth + 1)
        reach = exact.reach(verifier, trees, logits, warp)
        return jnp.where(trees.depths[:, None] == levels[:, None], reach[:, None], 0).sum(2)

    return jax.jit(by_depth)


@functools.cache
def _sampled(verifier: str):
    verify = VERIFIERS[verifier].verify
    return jax.jit(lambda keys, *seen: verify(jax.tree.map(_again, keys), *seen).num_accepted)


def _again(keys: jax.Array) -> jax.Array:
    """The same noise for every verifier, which is meant."""
    return jax.random.clone(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys


@jax.jit
def iid_paths(tree: TokenTree, count: jax.Array, length: jax.Array, per_copy: jax.Array) -> TokenTree:
    """The first ``length`` tokens of the first ``count`` paths of trees [B, ..] drafted i.i.d. as <K, 1, 1, .., 1>.

    Prefixes that paths share become one node. Where ``per_copy``, it expands once per copy: it has the draws of all
    paths through it; otherwise it expands once, and has the first path's. Slots stay what they were, so the logits of
    the tree serve all its paths.
    """
    batch, depth, most = tree.tokens.shape[0], tree.max_depth, tree.draw_tokens.shape[-1]
    places, levels = jnp.arange(most), jnp.arange(depth)
    paths = tree.tokens[:, 1:].reshape(batch, most, depth)
    # [B, path, other, d]: the two are one node at depth d + 1. The earliest path through a node stands for it.
    same = jnp.cumprod(paths[:, :, None] == paths[:, None], -1) > 0
    first = jnp.argmax(same, 2)
    slots = 1 + first * depth + levels  # [B, path, d]
    parents = jnp.concatenate([jnp.zeros((batch, most, 1), jnp.int32), slots[..., :-1].astype(jnp.int32)], -1)
    taken = places < count
    valid = (first == places[:, None]) & taken[:, None] & (levels < length)
    draws = jnp.roll(paths, -1, -1).swapaxes(1, 2)  # [B, d, other] what each path draws below depth d + 1
    passing = same.swapaxes(2, 3) & taken & (per_copy | (places[:, None, None] == places))  # [B, path, d, other]
    passing &= valid[..., None] & (levels + 1 < length)[:, None]
    at_root = lambda root, rest: jnp.concatenate([root[:, None], rest.reshape(batch, most * depth, most)], 1)
    root_draws = jnp.broadcast_to(taken & (length > 0), (batch, most))
    return dataclasses.replace(
        tree,
        parents=jnp.concatenate([tree.parents[:, :1], parents.reshape(batch, -1)], 1),
        valid=jnp.concatenate([tree.valid[:, :1], valid.reshape(batch, -1)], 1),
        draw_tokens=at_root(paths[..., 0], jnp.broadcast_to(draws[:, None], passing.shape)),
        draw_valid=at_root(root_draws, passing),
    )
