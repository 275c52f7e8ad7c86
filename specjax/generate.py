"""Generation from lists of prompts: the whole text at once, or a round at a time."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax import decode
from specjax.request import Builder, prepare
from specjax.sampling import Warp
from specjax.tree import Topology
from specjax.types import Drafter, Model, Verifier

_REASONS = {decode.EOS: "eos", decode.LENGTH: "length"}


class Round(NamedTuple):
    """One row's share of one round."""

    drafted: int  # nodes below the root
    accepted: int  # emitted tokens that were drafted
    emitted: int  # tokens: the accepted ones and the next, cut at a stop token or the budget
    drafted_by_depth: tuple[int, ...]  # nodes at depth 1, 2, ..
    proposers: tuple[tuple[int, ...], ...]  # of each accepted token, the sources that proposed it (0 is the first)

    @property
    def accepted_by_depth(self) -> tuple[int, ...]:
        """1 at each depth that was accepted, 0 below."""
        return tuple(int(depth < self.accepted) for depth in range(len(self.drafted_by_depth)))


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of one call. The token that prefill emits is in no round."""

    verify_steps: int  # rounds of every row, summed
    tokens_per_step: float  # tokens emitted in rounds / verify steps; nan where there were none
    prefill_seconds: float  # wall-clock, compilation included if this call compiled
    decode_seconds: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """What ``generate`` returns, one entry per prompt in each list."""

    tokens: list[list[int]]  # new tokens only; a stop token is included
    finish_reasons: list[str]  # "eos" or "length"
    seeds: list[int]
    rounds: list[list[Round]]
    stats: Stats


class StreamStep(NamedTuple):
    """What ``stream`` yields: first the prefill's tokens, then a round at a time; one entry per prompt in each list."""

    tokens: list[list[int]]  # newly emitted; empty for a finished row
    rounds: list[Round | None]  # None for a finished row, and for prefill
    finish_reasons: list[str | None]


def generate(
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    drafts: Sequence[Model | Drafter] = (),
    tree: Sequence[int] | Topology | Builder | None = None,
    draft_mode: str = "top_k",
    draft_warp: Warp | Sequence[Warp] | None = None,
    verifier: str | Verifier = "naive_sampling",
    warp: Warp | Sequence[Warp] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    eos_ids: Sequence[int] | None = None,
    seeds: int | None | Sequence[int | None] = None,
    allow_lossy: bool = False,
) -> Generation:
    """Continue prompts, speculating on token trees.

    Args:
      target: the model whose distribution is sampled.
      prompts: lists of token ids, of any lengths >= 1; they are one batch.
      drafts: models (SSMs), each of which drafts ``tree``, or drafters; the trees of several are merged. None, and
        no tree, is incremental decoding.
      tree: an expansion schedule such as (3, 2, 1, 1), a ``Topology``, or a builder: a function of a model and the name
        of a proposal law that returns a ``Drafter``.
      draft_mode: how an SSM proposes: "top_k", "iid", "without_replacement", "top_k_plus_one", "hub" or
        "shared_gumbel" (see ``specjax.laws``).
      draft_warp: the distribution SSMs draw from; None is the row's temperature (1 where that is 0), unfiltered.
      verifier: a name in ``specjax.verify.VERIFIERS``, or a ``Verifier``.
      warp: temperature, top-k and top-p of the text, one or one per prompt; None is greedy.
      max_new_tokens: budget >= 0, one or one per prompt.
      eos_ids: stop tokens; None takes the target's (from generation_config.json), () ignores them. Stop strings are
        not offered.
      seeds: integers in [0, 2^32), one for all prompts or one per prompt; None draws entropy. The seeds used are
        returned. A row's text depends on its own seed only, and with naive sampling not on what was drafted.
      allow_lossy: needed for verifiers that change the target's distribution.

    Compiled code is reused for any prompts, budgets, seeds, warps, stop tokens and topologies of one static shape; it
    is compiled anew for another batch size, and for each bucket of the longest prompt + budget (up to 128, 256, 512,
    ..) and of the number of stop tokens (up to 8, 16, 24, ..).

    Raises:
      ValueError: for any bad input, saying what was expected.
    """
    plan = prepare(
        target,
        prompts,
        drafts=drafts,
        tree=tree,
        draft_mode=draft_mode,
        draft_warp=draft_warp,
        verifier=verifier,
        warp=warp,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        seeds=seeds,
        allow_lossy=allow_lossy,
    )
    began = time.perf_counter()
    state = jax.block_until_ready(plan.start())
    started = time.perf_counter()
    state = jax.block_until_ready(decode.run_decode(plan.spec, plan.params, state))
    ended = time.perf_counter()

    tokens, lengths, reasons, rounds = jax.device_get((state.tokens, state.lengths, state.reasons, state.rounds))
    all_rounds = [
        [
            _round(rounds.accepted[row, at], marks[at], rounds.drafted[row, at], rounds.proposers[row, at + 1 :])
            for at in np.flatnonzero(marks)
        ]
        for row, marks in enumerate(rounds.emitted)
    ]
    steps = sum(map(len, all_rounds))
    emitted = sum(item.emitted for row in all_rounds for item in row)
    return Generation(
        tokens=[row[len(prompt) : length].tolist() for row, prompt, length in zip(tokens, prompts, lengths)],
        finish_reasons=[_REASONS[int(reason)] for reason in reasons],
        seeds=plan.seeds,
        rounds=all_rounds,
        stats=Stats(steps, emitted / steps if steps else float("nan"), started - began, ended - started),
    )


def stream(
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    drafts: Sequence[Model | Drafter] = (),
    tree: Sequence[int] | Topology | Builder | None = None,
    draft_mode: str = "top_k",
    draft_warp: Warp | Sequence[Warp] | None = None,
    verifier: str | Verifier = "naive_sampling",
    warp: Warp | Sequence[Warp] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    eos_ids: Sequence[int] | None = None,
    seeds: int | None | Sequence[int | None] = None,
    allow_lossy: bool = False,
) -> Iterator[StreamStep]:
    """As ``generate``, yielding what each round emitted; the tokens are the same.

    Input is checked when this is called, not at the first step. The iterator may be dropped at any time.
    """
    plan = prepare(
        target,
        prompts,
        drafts=drafts,
        tree=tree,
        draft_mode=draft_mode,
        draft_warp=draft_warp,
        verifier=verifier,
        warp=warp,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        seeds=seeds,
        allow_lossy=allow_lossy,
    )

    def steps() -> Iterator[StreamStep]:
        state = plan.start()
        info = None
        at = np.array([len(prompt) for prompt in prompts])
        while True:
            tokens, lengths, reasons, facts = jax.device_get((state.tokens, state.lengths, state.reasons, info))
            yield StreamStep(
                tokens=[row[begin:end].tolist() for row, begin, end in zip(tokens, at, lengths)],
                rounds=[
                    _round(facts.accepted[row], facts.emission.counts[row], facts.drafted[row], facts.proposers[row])
                    if facts is not None and facts.emission.counts[row]
                    else None
                    for row in range(len(prompts))
                ],
                finish_reasons=[_REASONS.get(int(reason)) for reason in reasons],
            )
            at = lengths
            if np.all(reasons != decode.RUNNING):
                return
            state, info = decode.run_round(plan.spec, plan.params, state)

    return steps()


def _round(accepted: np.ndarray, emitted: np.ndarray, drafted: np.ndarray, proposers: np.ndarray) -> Round:
    sources = [tuple(place for place in range(32) if bits >> place & 1) for bits in proposers[:accepted].tolist()]
    return Round(int(drafted.sum()), int(accepted), int(emitted), tuple(map(int, drafted)), tuple(sources))
