"""A target and its drafts on this machine: curves, methods end to end, a round taken apart, memory and compilation."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax as sj
from experiments import search
from experiments.bench_round import bare_forwards, in_loop, stages
from experiments.recorded import record
from experiments.timing import decode_seconds, timed
from specjax import decode
from specjax.replay import (
    RankTrace,
    RateTrace,
    RoundCost,
    best_size,
    calibrate,
    measure_latency,
    optimal_trees,
    rank_trace,
    rate_trace,
)
from specjax.request import Plan, prepare
from specjax.types import Model

NEW_TOKENS = 48
ROWS = (*range(1, 10), 12, 16, 24, 32, 64)  # a product takes them in eights and fours, so costs rise in steps
BOUNDS = search.Bounds(max_nodes=24, max_depth=8, most_draws=4, screen=1000)
HOT: dict[str, Any] = dict(warp=sj.Warp(1.0))
SAMPLED = (
    ("naive_sampling", "shared_gumbel"),
    ("multi_step", "iid"),
    ("traversal", "iid"),
    ("without_replacement", "without_replacement"),
)  # at temperature 1: verifiers, and how their trees are drafted
SHAPED_BY = {
    "iid": "multi_step",
    "without_replacement": "without_replacement",
}  # the node rule a mode's tree suits best
ROUNDS = 50  # between which nothing may grow


def live_bytes() -> int:
    """Bytes of all arrays there are."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to decode some prompts, and a plan for each of them."""

    name: str
    about: str
    plans: list[Plan]
    tuned: search.Choice | None = None  # where the tuner chose it, with what it expects
    baseline: str = "incremental"  # the method it is compared with
    own_sample: bool = False  # whether its text may be another than its baseline's

    @property
    def choice(self) -> search.Choice:
        """The tuner's, which chose it."""
        assert self.tuned is not None, self.name
        return self.tuned

    def seconds(self) -> float:
        """Of decoding all prompts, prefill left out."""
        return decode_seconds(self.plans)

    @functools.cached_property
    def outcome(self) -> tuple[list[list[int]], int, int]:
        """The texts, and how many tokens how many rounds emitted."""
        texts, emitted, rounds = [], 0, 0
        for plan in self.plans:
            end = decode.run_decode(plan.spec, plan.params, plan.start())
            counts = np.asarray(end.rounds.emitted)
            length, prompt = int(end.lengths[0]), int(plan.inputs[1][0])
            texts.append(np.asarray(end.tokens)[0, prompt:length].tolist())
            emitted, rounds = emitted + int(counts.sum()), rounds + int(np.sum(counts > 0))
        return texts, emitted, rounds


class SampledTraces(NamedTuple):
    """What trees at temperature 1 are chosen by."""

    ranks: RankTrace  # of the text, which naive sampling and shared noise fix
    rates: dict[str, RateTrace]  # how the draws of each mode of ``SHAPED_BY`` are accepted

    @classmethod
    def of(cls, target: Model, draft: Model, prompts: Sequence[list[int]]) -> "SampledTraces":
        """Record them."""
        options: dict[str, Any] = dict(HOT, max_new_tokens=NEW_TOKENS, seeds=0)
        rates = {
            mode: rate_trace(
                target, draft, prompts, verifier=rule, draft_mode=mode, most_draws=BOUNDS.most_draws, **options
            )
            for mode, rule in SHAPED_BY.items()
        }
        return cls(rank_trace(target, [draft], prompts, draft_mode="shared_gumbel", **options), rates)


class Pair:
    """A target, its drafts, and the methods that are timed of them.

    Args:
      name: for tables.
      directories: of the target and its drafts.
      trace: of greedy texts, by which greedy methods are chosen.
      sampled: by which sampled methods are chosen; without them there are none.
      prompts: that are decoded.
    """

    def __init__(
        self,
        name: str,
        directories: Sequence[str | Path],
        trace: RankTrace,
        sampled: SampledTraces | None,
        prompts: Sequence[list[int]],
    ):
        self.name, self.trace, self.sampled, self.prompts = name, trace, sampled, prompts
        self.target, *self.drafts = map(sj.load_model, directories)
        self.weights = [sum(leaf.nbytes for leaf in jax.tree.leaves(m.params)) for m in (self.target, self.drafts[0])]
        self.curves = [
            measure_latency(model, rows=ROWS, contexts=(256,), repeats=7) for model in (self.target, self.drafts[0])
        ]
        self.methods = {method.name: method for method in self._choose()}

    def plans(self, **options: Any) -> list[Plan]:
        """One for each prompt."""
        return [
            prepare(self.target, [prompt], max_new_tokens=NEW_TOKENS, eos_ids=(), seeds=seed, **options)
            for seed, prompt in enumerate(self.prompts)
        ]

    def _choose(self) -> list[Method]:
        """Incremental decoding, and the tuner's best chain, tree and ensemble, replayed and costed by the curves."""
        target, draft = self.curves
        cost = RoundCost(target, (draft,) * len(self.drafts))

        def ranked(trace: RankTrace) -> list[search.Choice]:
            return search.rank(trace, BOUNDS, cost, 1, 256, finished_rows_wait=True)

        def best(
            name: str,
            choices: list[search.Choice],
            kinds: tuple[str, ...],
            drafts: tuple[int, ...],
            mode: str = "top_k",
            baseline: str = "incremental",
            **options: Any,
        ) -> Method:
            """The first of these kinds that takes these drafts."""
            fits = lambda candidate: candidate.kind in kinds and candidate.drafts == drafts
            choice = next(choice for choice in choices if fits(choice.candidate))
            drafters = choice.candidate.drafters(self.target, self.drafts, mode)  # once: an ensemble stacks
            return Method(name, choice.candidate.name, self.plans(drafts=drafters, **options), choice, baseline)

        choices, everyone = ranked(self.trace), tuple(range(len(self.drafts)))
        greedy = [
            best("incremental", choices, ("incremental",), ()),
            best("chain", choices, ("chain",), (0,)),
            best("tree", choices, ("schedule", "tree"), (0,)),
            best("tree with lookup", choices, ("lookup",), (0,)),
            best("ensemble", choices, ("chain", "schedule"), everyone),
            best("lookup", choices, ("lookup",), ()),
        ]
        traces = self.sampled
        if traces is None:
            return greedy
        seconds = lambda tree: cost(tree.shape, (0,), batch=1, context=256)
        trees = {}
        for mode, trace in traces.rates.items():
            rates = calibrate(trace, depth=BOUNDS.max_depth, most_draws=BOUNDS.most_draws).rates
            trees[mode], _ = best_size(optimal_trees(rates, BOUNDS.max_nodes), seconds)
        base = Method("incremental at 1", "incremental", self.plans(**HOT), baseline="incremental at 1")

        def sampled(verifier: str, mode: str) -> Method:
            name, options = f"{verifier} at 1", dict(HOT, verifier=verifier)
            if mode not in trees:  # replayed, since its text is the baseline's
                kinds = ("chain", "schedule", "tree", "lookup")
                return best(name, ranked(traces.ranks), kinds, (0,), mode, base.name, **options)
            plans = self.plans(drafts=self.drafts[:1], tree=trees[mode], draft_mode=mode, **options)
            about = f"optimal({trees[mode].shape.num_nodes})"
            return Method(name, about, plans, baseline=base.name, own_sample=True)

        return [*greedy, base, *(sampled(verifier, mode) for verifier, mode in SAMPLED)]

    @property
    def best_tree(self) -> Method:
        """Of the trees of one SSM, alone or with prompt lookup, the one that the tuner likes best."""
        return min((self.methods[name] for name in ("tree", "tree with lookup")), key=lambda it: it.choice.milliseconds)

    def predicted(self, name: str) -> float | None:
        """How many times as fast as incremental decoding the tuner takes a method to be, if it chose it."""
        base, own = self.methods["incremental"].choice, self.methods[name].tuned
        return None if own is None else base.milliseconds / own.milliseconds

    def memory(self) -> dict[str, float]:
        """Of decoding with the best tree: arrays and the executable's temporaries, over weights and caches; growth."""
        plan = self.best_tree.plans[0]
        before = live_bytes()
        state = plan.start()
        caches = sum(leaf.nbytes for part in (state.cache, state.drafter) for leaf in jax.tree.leaves(part))
        arrays = sum(self.weights) + live_bytes() - before
        found = decode.run_decode.lower(plan.spec, plan.params, state).compile().memory_analysis()
        temporary = float("nan") if found is None else found.temp_size_in_bytes  # which meets no bar
        sizes = []
        for _ in range(ROUNDS + 2):  # the first ones settle; rounds behind the text's end do the same work
            state, _ = decode.run_round(plan.spec, plan.params, state)
            sizes.append(live_bytes() if len(sizes) in (1, ROUNDS + 1) else 0)
        return {
            "weights_and_caches_mb": (sum(self.weights) + caches) / 1e6,
            "arrays_mb": arrays / 1e6,
            "temporaries_mb": temporary / 1e6,
            "ratio": (arrays + temporary) / (sum(self.weights) + caches),
            "growth_mb": (sizes[-1] - sizes[1]) / 1e6,
        }

    def calls(self) -> dict[tuple[str, str], Callable[[], float]]:
        """What is timed, by what it is a part of and its name."""
        plan, tree = self.best_tree.plans[0], self.best_tree.choice.candidate
        capacity = plan.inputs[0].shape[1]
        prefix = len(self.prompts[0]) + NEW_TOKENS // 2
        bare = functools.partial(bare_forwards, self.target, self.drafts[0], prefix=prefix, capacity=capacity)
        passes, incremental = bare(tree), bare(self.methods["incremental"].choice.candidate)
        (recording,), (drafter,) = record(plan, 1), tree.drafters(self.target, self.drafts)
        return {
            **{("method", name): method.seconds for name, method in self.methods.items()},
            **{("bare", name): in_loop([each]) for name, each in passes.items()},
            ("round", "bare"): in_loop(passes.values()),
            ("round", "bare incremental"): in_loop(incremental.values()),
            **{("stage", name): call for name, call in stages(plan, drafter, tree.nodes + 1, recording).items()},
            ("prefill", "prefill"): lambda: timed(self.methods["incremental"].plans[0].start),
        }
