"""Prompt lookup: draft what followed the last tokens where they stood before in the row's own text."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.sampling import Warp
from specjax.tree import MAX_NODES, TokenTree
from specjax.types import Drafter, Emission, RoundKeys

MIN_MATCH, MAX_MATCH = 2, 8  # tokens that are compared, unless told otherwise


class LookupState(NamedTuple):
    """The text of each row so far."""

    tokens: jax.Array  # [B, T] int32
    lengths: jax.Array  # [B] int32


def prompt_lookup(
    vocab_size: int, *, branches: int = 3, length: int = 8, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH
) -> Drafter:
    """A drafter that copies from prompt and text: no model, no training, no round trip to the host.

    Where the last tokens of a row stood before, it proposes what followed. Matches are ranked by their length, of equal
    ones the latest comes first, and those that add a new branch to the tree are taken. A match that reaches the end of
    the text goes on with what it copied itself, as LZ77 does, so a text that repeats itself is continued for the whole
    length. A row without a match proposes a lone root. After Saxena 2023, "Prompt lookup decoding", and Yang et al.
    2023, "Inference with reference" (LLMA), which follow one match; here several are branches of one tree.

    Its draws are deterministic: a node's children, in the order of their matches, with a draft distribution that falls
    by halves along them. So naive sampling is exact, and emits what incremental decoding does.

    Cost per row and round: O(T (max_match + branches * length)) comparisons for a buffer of T tokens.

    Args:
      vocab_size: the target's.
      branches: the most matches followed.
      length: tokens copied from each; the tree has 1 + branches * length slots.
      min_match: tokens that must agree, at least 1.
      max_match: tokens compared; longer matches count as this long.

    Raises:
      ValueError: for a number that is out of range.
    """
    for name, value in (
        ("vocab_size", vocab_size),
        ("branches", branches),
        ("length", length),
        ("min_match", min_match),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"prompt_lookup: {name} is {value!r}; expected an integer >= 1")
    if not isinstance(max_match, int) or isinstance(max_match, bool) or max_match < min_match:
        raise ValueError(f"prompt_lookup: max_match is {max_match!r}; expected an integer >= {min_match=}")
    if branches * length >= MAX_NODES:
        raise ValueError(
            f"prompt_lookup: {branches} branches of {length} and the root; trees have at most {MAX_NODES} nodes"
        )
    return Drafter(
        *_functions(vocab_size, branches, length, min_match, max_match),
        params=None,
        max_depth=length,
        laws=("deterministic",),
        vocab_size=vocab_size,
        max_draws=branches,
    )


@functools.cache
def _functions(vocab_size: int, branches: int, length: int, min_match: int, max_match: int):
    def init(params: None, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> LookupState:
        del params
        return LookupState(tokens, lengths)

    def propose(
        params: None, keys: RoundKeys, state: LookupState, roots: jax.Array, warp: Warp
    ) -> tuple[TokenTree, LookupState]:
        del params, keys, warp
        find = functools.partial(
            continuations, branches=branches, length=length, min_match=min_match, max_match=max_match
        )
        paths, found = jax.vmap(find)(*state)
        tree = jax.vmap(functools.partial(_tree, vocab_size=vocab_size))(roots, paths, found)
        return tree, state

    def commit(params: None, state: LookupState, emission: Emission, hidden: jax.Array | None) -> LookupState:
        del params, hidden
        places = jnp.arange(emission.tokens.shape[1])
        where = jnp.where(places < emission.counts[:, None], state.lengths[:, None] + places, state.tokens.shape[1])
        rows = jnp.arange(state.tokens.shape[0])[:, None]
        tokens = state.tokens.at[rows, where].set(emission.tokens, mode="drop")
        return LookupState(tokens, state.lengths + emission.counts)

    return init, propose, commit


def continuations(
    tokens: jax.Array, end: jax.Array, *, branches: int, length: int, min_match: int, max_match: int
) -> tuple[jax.Array, jax.Array]:
    """The best continuations [branches, length] of the first ``end`` of tokens [T], and which of them exist."""
    places = jnp.arange(len(tokens))  # of the last token of a match
    agree = places < end - 1
    matched = jnp.zeros_like(places)
    for back in range(max_match):
        agree &= (places >= back) & (jnp.roll(tokens, back) == tokens[end - 1 - back])
        matched += agree
    period = jnp.maximum(end - 1 - places, 1)  # behind the end of the text comes the copy itself

    def copied(place: jax.Array) -> jax.Array:
        """What follows places [..], as [.., length]."""
        return tokens[place[..., None] + 1 + jnp.arange(length) % period[place][..., None]]

    score = jnp.where(matched >= min_match, matched * len(tokens) + places, -1)
    paths, found = [], []
    for _ in range(branches):
        best = jnp.argmax(score)
        paths.append(copied(best))
        found.append(score[best] >= 0)
        score = jnp.where(jnp.all(copied(places) == paths[-1], axis=1), -1, score)
    return jnp.stack(paths), jnp.stack(found)


def _tree(root: jax.Array, paths: jax.Array, found: jax.Array, *, vocab_size: int) -> TokenTree:
    """The tree of paths [branches, length]: what two of them begin with in common is there once.

    Slots are the root, then path after path, of which only those nodes are valid that no earlier path has.
    """
    branches, length = paths.shape
    order = jnp.arange(branches)
    together = found[:, None, None] & found[None, :, None] & (paths[:, None] == paths[None])
    first = jnp.argmax(jnp.cumprod(together, axis=2), axis=1)  # [branches, length] the first path through a node
    new = found[:, None] & (first == order[:, None])
    slots = 1 + order[:, None] * length + jnp.arange(length)
    parents = jnp.pad(1 + first[:, :-1] * length + jnp.arange(length - 1), ((0, 0), (1, 0)))

    # The draws at a node are the next tokens of the paths through it, in their order: draw k is path k's.
    through = first[:, None, :-1] == order[None, :, None]  # [path, first path through the node, level]
    drawn = jnp.moveaxis(new[:, None, 1:] & through, 0, -1)  # [first path, level, draw]
    next_tokens = jnp.broadcast_to(paths[:, 1:].T, drawn.shape)
    # The last node of a path has none.
    expanded = jnp.concatenate([jnp.zeros(1, jnp.int32), slots[:, :-1].reshape(-1)])
    valid_draws = jnp.concatenate([new[None, :, 0], drawn.reshape(-1, branches)])
    draws = jnp.concatenate([paths[None, :, 0], next_tokens.reshape(-1, branches)])
    rows = jnp.arange(len(expanded))
    mass = jnp.where(valid_draws, 0.5**order, 0)
    mass /= jnp.maximum(jnp.sum(mass, axis=1, keepdims=True), 1e-9)

    count = 1 + branches * length
    spread = lambda fill, values: jnp.full((count, *values.shape[1:]), fill, values.dtype).at[expanded].set(values)
    below = lambda first, rest: jnp.concatenate([first[None], rest.reshape(-1)])
    return TokenTree(
        tokens=below(root, jnp.where(new, paths, 0)),
        parents=below(jnp.int32(-1), jnp.where(new, parents, -1).astype(jnp.int32)),
        depths=below(jnp.int32(0), jnp.where(new, jnp.arange(1, length + 1), 0)),
        valid=below(jnp.array(True), new),
        draw_tokens=spread(0, jnp.where(valid_draws, draws, 0)),
        draw_valid=spread(False, valid_draws),
        draw_source=jnp.zeros(branches, jnp.int32),
        q=jnp.zeros((len(expanded), vocab_size)).at[rows[:, None], draws].add(mass),
        q_rows=spread(-1, jnp.where(jnp.any(valid_draws, axis=1), rows, -1)[:, None]),
        laws=("deterministic",),
        max_depth=length,
    )
