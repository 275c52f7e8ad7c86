"""What chooses a tree for this machine: models and prompts, their trace, latency curves, and real rounds in turns."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax as sj
from experiments import config, prompts
from experiments.config import ConfigError, setting
from experiments.search import Bounds, Candidate, Choice, batch_rounds, check_drafted, rank
from experiments.sweep import Models
from experiments.timing import decode_seconds, interleaved
from specjax import decode
from specjax.replay import (
    DEVICES,
    LookupTree,
    RoundCost,
    lookup_steps,
    measure_latency,
    rank_trace,
    verify_steps,
)
from specjax.replay.cost import ROWS
from specjax.replay.walk import transitions
from specjax.request import Plan, prepare
from specjax.tree import Topology
from specjax.types import Model

KINDS = ("incremental", "chain", "schedule", "tree", "lookup")


@dataclasses.dataclass(frozen=True)
class Tune:
    """What is searched, on what text, for which batches and devices."""

    name: str = setting()
    prompts: str = "humaneval"
    num_prompts: int = setting(8, low=1)
    max_prompt_tokens: int = setting(64, low=1)
    max_new_tokens: int = setting(64, low=2)
    batch_sizes: tuple[int, ...] = setting((1,), low=1)  # each gets its own choice
    devices: tuple[str, ...] = ()  # modelled beside this machine: names in specjax.replay.DEVICES
    contexts: tuple[int, ...] = setting((512, 8192), low=1)  # for the modelled devices
    max_nodes: int = setting(24, low=2)  # of a tree, the root included
    max_depth: int = setting(8, low=1)
    most_draws: int = setting(6, low=1)  # of a node of an optimal tree
    screen: int = setting(4096, low=1)  # schedules replayed, for each set of drafts
    confirm: int = setting(4, low=1)  # decoded, for each batch size
    repeats: int = setting(5, low=1)  # timed passes of everything that is measured
    seed: int = setting(0, low=0)

    def __post_init__(self):
        unknown = sorted(set(self.devices) - set(DEVICES))
        if unknown:
            raise ValueError(f"devices: expected names among {', '.join(DEVICES)}; got {', '.join(unknown)}")
        if not self.batch_sizes or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError(f"batch_sizes: expected at least one, and each once; got {list(self.batch_sizes)}")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A whole config."""

    tune: Tune
    models: Models


class Confirmed(NamedTuple):
    """A choice that was decoded."""

    candidate: Candidate
    batch: int
    predicted: float  # milliseconds a token, the probes being timed in turn with what was measured
    measured: float
    steps_agree: bool  # whether real decoding took the replayed number of verify steps
    fresh: bool  # whether the prediction was not fitted to it: it is no probe


class Bench:
    """Models, prompts, the trace of what the target says to them, and what is timed of them.

    For other code: ``best = Bench(target, [draft], texts, Tune(name="mine")).choices(batch=1)[0].candidate``, and
    ``generate(target, prompts, drafts=best.drafters(target, [draft]))``.

    Args:
      target, drafts: models.
      texts: prompts.
      tune: bounds of the search, budget of tokens, and how often things are timed.
      names: of the drafts, for people.

    Raises:
      ValueError: as ``specjax.replay.rank_trace``, and if no text goes on beyond its first token.
    """

    def __init__(
        self,
        target: Model,
        drafts: Sequence[Model],
        texts: Sequence[Sequence[int]],
        tune: Tune,
        names: Sequence[str] = (),
    ):
        self.target, self.drafts, self.texts, self.tune = target, list(drafts), list(texts), tune
        self.names = list(names) or [f"draft {place}" for place in range(len(self.drafts))]
        self.bounds = Bounds(tune.max_nodes, tune.max_depth, tune.most_draws, tune.screen, tune.seed)
        self.trace = rank_trace(target, drafts, texts, max_new_tokens=tune.max_new_tokens)
        check_drafted(self.trace)
        self.capacity = int(prepare(target, texts, max_new_tokens=tune.max_new_tokens).inputs[0].shape[1])

    @classmethod
    def load(cls, tuning: Tuning) -> "Bench":
        """Read the models and prompts that a config names.

        Raises:
          ConfigError: for what cannot be read or traced.
        """
        models, tune = tuning.models, tuning.tune
        load = lambda path: sj.load_model(config.resolve(path), attention=models.attention, dtype=models.dtype)
        names = [path.rstrip("/").rpartition("/")[2] for path in models.drafts]
        try:
            target, drafts = load(models.target), [load(path) for path in models.drafts]
            for draft in drafts:
                sj.check_pair(target, draft)
            found = prompts.load(
                tune.prompts,
                num_prompts=tune.num_prompts,
                max_tokens=tune.max_prompt_tokens,
                tokenizer=sj.load_tokenizer(config.resolve(models.target)),
            )
            return cls(target, drafts, [list(prompt.tokens) for prompt in found], tune, names)
        except (ValueError, OSError) as error:
            raise ConfigError([f"models: {error}"]) from None

    def plans(self, candidate: Candidate, batch: int) -> list[Plan]:
        """Greedy decoding of all prompts, batch by batch."""
        drafters, budget = candidate.drafters(self.target, self.drafts), self.tune.max_new_tokens
        return [
            prepare(self.target, list(part), drafts=drafters, max_new_tokens=budget)
            for part in itertools.batched(self.texts, batch)
        ]

    def seconds(self, candidates: Sequence[Candidate], batch: int) -> list[float]:
        """Seconds of decoding all prompts, prefill left out; the candidates take turns."""
        calls = [functools.partial(decode_seconds, self.plans(candidate, batch)) for candidate in candidates]
        return list(interleaved(dict(enumerate(calls)), self.tune.repeats).values())

    def steps(self, candidate: Candidate, batch: int) -> np.ndarray:
        """Verify steps [P] of decoding each prompt."""
        ends = [decode.run_decode(plan.spec, plan.params, plan.start()) for plan in self.plans(candidate, batch)]
        return np.concatenate([np.sum(np.asarray(end.rounds.emitted) > 0, axis=1) for end in ends])

    def probes(self) -> list[Candidate]:
        """A few unlike methods, whose real rounds tell what comes on top of the bare forwards."""
        wide, depth, found = max(2, min(4, self.tune.max_nodes // 3)), self.tune.max_depth, []
        everyone = tuple(range(len(self.drafts)))
        for schedule, drafts in (
            ((), ()),
            ((1, 1), (0,)),
            ((1,) * 6, (0,)),
            ((wide, 2, 1), (0,)),
            *([((2, 1), everyone)] if len(everyone) > 1 else []),
        ):
            schedule = schedule[:depth]
            tree = Topology.from_schedule(schedule) if schedule else Topology.chain(0)
            steps = verify_steps(self.trace.select(drafts) if drafts else self.trace, [tree])[0]
            name = f"<{','.join(map(str, schedule))}>" if schedule else "incremental"
            found.append(Candidate("probe", name, tree, drafts, float("nan"), steps))
        # Several rows of the target without a draft tell the price of the one from that of the other.
        lone, copied = Topology.chain(0), min(4, self.tune.max_nodes - 1)
        steps = lookup_steps(self.trace, [LookupTree(0, copied)])[0]
        found.append(Candidate("probe", f"copy(1x{copied})", lone, (), float("nan"), steps, copied))
        return found

    @functools.cached_property
    def curves(self) -> RoundCost:
        """Latency curves of all models, measured; models of one architecture share theirs."""
        sizes = [rows for rows in ROWS if rows < 2 * self.tune.max_nodes]
        most = 2 * self.tune.max_nodes * len(self.drafts)
        merged = [rows for rows in (*ROWS, 128, 256, 512) if max(sizes) < rows < most]
        batches = sorted(self.tune.batch_sizes)  # in a config they may come in any order
        grid: dict[str, Any] = dict(batches=batches, contexts=(self.capacity,), repeats=self.tune.repeats)
        measure = functools.cache(lambda place: measure_latency(self.drafts[place], rows=sizes, **grid))
        first = [next(i for i, other in enumerate(self.drafts) if _alike(draft, other)) for draft in self.drafts]
        target = measure_latency(self.target, rows=sizes + merged, **grid)
        return RoundCost(target, tuple(measure(place) for place in first))

    def fitted(self, probes: Sequence[Candidate], seconds: Sequence[float], batch: int) -> RoundCost:
        """The curves with what decoding the probes took beyond them."""
        bare = [
            self.curves.forwards(
                probe.tree.shape, probe.drafts, batch=batch, context=self.capacity, copied=probe.copied
            )
            for probe in probes
        ]
        rounds = [float(batch_rounds(probe.steps, batch, finished_rows_wait=True)) for probe in probes]
        return self.curves.fitted(bare, [took / count for took, count in zip(seconds, rounds)])

    def choices(self, batch: int) -> list[Choice]:
        """Every method, fastest first on this machine, as predicted from curves and probes that are timed now."""
        probes = self.probes()
        cost = self.fitted(probes, self.seconds(probes, batch), batch)
        return rank(self.trace, self.bounds, cost, batch, self.capacity, finished_rows_wait=True)


def _alike(one: Model, other: Model) -> bool:
    shapes = lambda model: jax.tree.map(jax.typeof, model.params)
    return one.forward is other.forward and shapes(one) == shapes(other)


def confirm(bench: Bench, batch: int, choices: Sequence[Choice]) -> tuple[RoundCost, list[Confirmed]]:
    """Decode the best choices and the best of each kind; the probes take turns with them, for a machine's speed drifts.

    Returns:
      The cost as the probes have it now, and what it predicts beside what was measured.
    """
    chosen = list(choices[: bench.tune.confirm])
    for kind in KINDS:
        chosen += [choice for choice in choices if choice.candidate.kind == kind][:1]
    candidates = list({id(choice.candidate): choice.candidate for choice in chosen}.values())
    probes = bench.probes()
    seconds = bench.seconds([*probes, *candidates], batch)
    cost = bench.fitted(probes, seconds[: len(probes)], batch)
    confirmed = []
    for candidate, took in zip(candidates, seconds[len(probes) :]):
        predicted = milliseconds(candidate, cost, bench, batch)
        agree = np.array_equal(bench.steps(candidate, batch), candidate.steps)
        measured = 1e3 * took / int(np.sum(bench.trace.drafted))
        fresh = not any(_same_method(probe, candidate) for probe in probes)
        confirmed.append(Confirmed(candidate, batch, predicted, measured, bool(agree), fresh))
    return cost, confirmed


def _same_method(one: Candidate, other: Candidate) -> bool:
    same = one.drafts == other.drafts and one.copied == other.copied
    return same and np.array_equal(transitions(one.tree), transitions(other.tree))


def milliseconds(candidate: Candidate, cost: RoundCost, bench: Bench, batch: int) -> float:
    """Predicted for a token, on this machine."""
    shape, copied = candidate.tree.shape, candidate.copied
    seconds = cost(shape, candidate.drafts, batch=batch, context=bench.capacity, copied=copied)
    rounds = batch_rounds(candidate.steps, batch, finished_rows_wait=True)
    return float(1e3 * seconds * rounds / np.sum(bench.trace.drafted))
