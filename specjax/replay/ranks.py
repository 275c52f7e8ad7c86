"""Rank traces: where each token of a text stood among the draws of every draft model, and what the text repeats."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.draft.lookup import MAX_MATCH, MIN_MATCH, continuations
from specjax.laws import gumbel_noise
from specjax.replay.record import Window, record
from specjax.sampling import Warp
from specjax.types import Model

MODES = ("top_k", "shared_gumbel")  # ways of drafting whose draws depend on nothing but the text before them
NEAR = 1e-5  # logits closer than this may change places between two passes of different shapes
FAR = int(np.iinfo(np.int32).max)  # rank of a token that the draft cannot draw


class RankTrace(NamedTuple):
    """A text, and the rank of each of its tokens under each of S drafts.

    Token 0 of a row is the one that prefill emits: it is the first root, and its rank means nothing.
    """

    tokens: np.ndarray  # [P, T] int32 emitted tokens, right-padded
    lengths: np.ndarray  # [P] int32
    ranks: np.ndarray  # [S, P, T] int32: 0 where it is the first draw behind the text before it; FAR: never drawn
    near: np.ndarray  # [S, P, T] bool: another token's logit is within NEAR of this one's, for the draft
    target_near: np.ndarray  # [P, T] bool: the same for the target
    copied: np.ndarray  # [P, T] int32 tokens behind it that prompt lookup copies right; -1 where it finds nothing

    def select(self, drafts: Sequence[int]) -> "RankTrace":
        """The trace of some of the drafts, by index: of one alone, or of the ensemble of several.

        Raises:
          ValueError: for none, or one that is not there.
        """
        chosen = list(drafts)
        if not chosen or any(not 0 <= draft < len(self.ranks) for draft in chosen):
            raise ValueError(f"expected indices of drafts in [0, {len(self.ranks)}); got {drafts!r}")
        return self._replace(ranks=self.ranks[chosen], near=self.near[chosen])

    @property
    def near_ties(self) -> int:
        """Tokens at which a pass of another shape might choose or draw differently."""
        return int(np.sum((self.near.any(0) | self.target_near) & self.drafted))

    @property
    def drafted(self) -> np.ndarray:
        """[P, T] bool, the tokens that rounds emitted: all but each text's first."""
        at = np.arange(self.tokens.shape[1])
        return (at > 0) & (at < self.lengths[:, None])


def rank_trace(
    target: Model,
    drafts: Sequence[Model],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 64,
    draft_mode: str = "top_k",
    draft_warp: Warp | Sequence[Warp] | None = None,
    warp: Warp | Sequence[Warp] | None = None,
    eos_ids: Sequence[int] | None = None,
    seeds: int | None | Sequence[int | None] = None,
    batch_size: int = 16,
) -> RankTrace:
    """Record the text of incremental decoding, and the rank of each of its tokens under each draft.

    Greedy decoding, and naive sampling with fixed seeds at any temperature, emit one text whatever is drafted. So
    drafts that depend on the text before them alone are known along all of it from one teacher-forced pass, and with
    them every round of every static tree.

    Args:
      target, prompts, max_new_tokens, draft_warp, warp, eos_ids, seeds: as in ``generate``.
      drafts: at least one model.
      draft_mode: "top_k" or "shared_gumbel"; other draws also depend on where a round begins.
      batch_size: prompts decoded together.

    Raises:
      ValueError: as ``generate``, and for drafts that cannot be replayed: other modes, heads on the target's hidden
        states, and Drafters, which bring trees of their own, perhaps sampled, or merged with nodes dropped.
    """
    if draft_mode not in MODES:
        raise ValueError(f"draft_mode {draft_mode!r} cannot be replayed exactly; expected one of {', '.join(MODES)}")
    found = record(
        target,
        drafts,
        prompts,
        _rank_shared if draft_mode == "shared_gumbel" else _rank_top_k,
        draft_mode=draft_mode,
        seeds=seeds,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        draft_warp=draft_warp,
        warp=warp,
        eos_ids=eos_ids,
    )
    by_draft = {name: np.moveaxis(found.facts[name], -1, 0) for name in ("ranks", "near")}
    copied = _copied(prompts, found.tokens, found.lengths)
    return RankTrace(found.tokens, found.lengths, **by_draft, target_near=found.facts["target_near"], copied=copied)


def _copied(prompts: Sequence[Sequence[int]], tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[P, T] tokens behind each that the best match of prompt lookup continues right; -1 where nothing matches."""
    most, width = tokens.shape[1], max(map(len, prompts))
    found = []
    for prompt, text, length in zip(prompts, tokens, lengths):
        whole = np.zeros(width + 2 * most, np.int32)  # with room to compare a whole continuation behind the last token
        whole[: len(prompt)], whole[len(prompt) :][:most] = prompt, text
        found.append(np.asarray(_copied_right(whole, len(prompt), len(prompt) + length, most)))
    return np.stack(found)


@functools.partial(jax.jit, static_argnums=3)
def _copied_right(text: jax.Array, start: int, end: int, most: int) -> jax.Array:
    """[most] of the tokens of text [T] that begin at ``start`` and end at ``end``."""

    def at(place: jax.Array) -> jax.Array:
        path, found = continuations(text, place + 1, branches=1, length=most, min_match=MIN_MATCH, max_match=MAX_MATCH)
        behind = place + 1 + jnp.arange(most)
        right = (path[0] == text[behind]) & (behind < end)
        return jnp.where(found[0], jnp.sum(jnp.cumprod(right), dtype=jnp.int32), -1)

    return lax.map(at, start + jnp.arange(most))


def _rank(window: Window, *, shared: bool) -> dict[str, jax.Array]:
    logits, *drafts = window.logits
    tokens, sampled = window.tokens, jnp.any(window.warp.temperature > 0)

    def noise() -> jax.Array:
        """[B, W, V] what the emission adds to the target's logarithms."""
        at = jax.vmap(lambda key, places: jax.vmap(lambda place: jax.random.fold_in(key, place))(places))
        draw = lambda key: gumbel_noise(key, logits.shape[-1])
        return jax.vmap(jax.vmap(draw))(at(window.emit, window.positions))

    # Without temperature or shared noise nobody looks at it.
    gumbel = noise() if shared else lax.cond(sampled, noise, lambda: jnp.zeros(logits.shape, jnp.float32))
    greedy = jnp.asarray(window.warp.temperature)[..., None] == 0
    target = jnp.where(greedy, logits, jnp.log(window.warp(logits)) + gumbel)
    ranks, near = [], []
    for draft in drafts:
        q = window.draft_warp(draft)
        # What is drawn from: probabilities (drafting sorts them, and they may tie where logits do not), or a race.
        ranks.append(_place(jnp.where(q > 0, jnp.log(q) + gumbel, -jnp.inf) if shared else q, q, tokens))
        scale = jnp.maximum(jnp.asarray(window.draft_warp.temperature), 1)[..., None]
        near.append(_is_near(jnp.log(q) + gumbel if shared else draft / scale, tokens))
    return {"ranks": jnp.stack(ranks, -1), "near": jnp.stack(near, -1), "target_near": _is_near(target, tokens)}


# One function object each, since they are compiled.
_rank_top_k = functools.partial(_rank, shared=False)
_rank_shared = functools.partial(_rank, shared=True)


def _place(scores: jax.Array, q: jax.Array, tokens: jax.Array) -> jax.Array:
    """[..] how many tokens come before ``tokens`` [..] when scores [.., V] are sorted, ties to the lowest id."""
    own = jnp.take_along_axis(scores, tokens[..., None], axis=-1)
    before = (scores > own) | ((scores == own) & (jnp.arange(scores.shape[-1]) < tokens[..., None]))
    possible = jnp.take_along_axis(q, tokens[..., None], axis=-1)[..., 0] > 0
    return jnp.where(possible, jnp.sum(before, axis=-1, dtype=jnp.int32), FAR)


def _is_near(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """[..] whether another token's score is within ``NEAR``."""
    own = jnp.take_along_axis(scores, tokens[..., None], axis=-1)
    return jnp.sum(jnp.abs(scores - own) <= NEAR, axis=-1) > 1
