"""Which tree on this hardware: `python -m experiments.tune configs/tune.toml [--set a.b=value] [--out DIR]`."""

import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import specjax as sj
from experiments import command, config, metrics, plots, prompts
from experiments.config import ConfigError, setting
from experiments.search import Bounds, Candidate, Choice, rank
from experiments.sweep import Models
from experiments.timing import interleaved
from specjax import decode
from specjax.models.families import from_hugging_face
from specjax.replay import (
    DEVICES,
    Latency,
    RankTrace,
    RoundCost,
    measure_latency,
    rank_trace,
    roofline,
    verify_steps,
)
from specjax.request import Plan, prepare
from specjax.tree import Topology

HERE = "this machine"
KINDS = ("incremental", "chain", "schedule", "tree")


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


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A whole config."""

    tune: Tune
    models: Models


class Confirmed(NamedTuple):
    """A choice that was decoded."""

    choice: Choice
    batch: int
    measured: float  # milliseconds a token
    steps_agree: bool  # whether real decoding took the replayed number of verify steps


class Bench:
    """The models, their texts, and what is timed of them."""

    def __init__(self, tuning: Tuning):
        models, self.tune = tuning.models, tuning.tune
        load = lambda path: sj.load_model(config.resolve(path), attention=models.attention, dtype=models.dtype)
        self.names = [path.rstrip("/").rpartition("/")[2] for path in models.drafts]
        try:
            self.target, self.drafts = load(models.target), [load(path) for path in models.drafts]
        except (ValueError, OSError) as error:
            raise ConfigError([f"models: {error}"]) from None
        tokenizer = sj.load_tokenizer(config.resolve(models.target))
        found = prompts.load(
            self.tune.prompts,
            num_prompts=self.tune.num_prompts,
            max_tokens=self.tune.max_prompt_tokens,
            tokenizer=tokenizer,
        )
        self.texts = [list(prompt.tokens) for prompt in found]

    def plans(self, candidate: Candidate, batch: int) -> list[Plan]:
        """Greedy decoding of all prompts, batch by batch."""
        drafts = [self.drafts[draft] for draft in candidate.drafts]
        return [
            prepare(
                self.target,
                list(part),
                drafts=drafts,
                tree=candidate.tree if drafts else None,
                max_new_tokens=self.tune.max_new_tokens,
            )
            for part in itertools.batched(self.texts, batch)
        ]

    def timed(self, candidate: Candidate, batch: int) -> tuple[Callable[[], float], Callable[[], np.ndarray]]:
        """Two calls: seconds of decoding all prompts, prefill left out; and the verify steps of each prompt."""
        plans = self.plans(candidate, batch)

        def seconds() -> float:
            total = 0.0
            for plan in plans:
                state = jax.block_until_ready(plan.start())
                began = time.perf_counter()
                jax.block_until_ready(decode.run_decode(plan.spec, plan.params, state))
                total += time.perf_counter() - began
            return total

        def steps() -> np.ndarray:
            ends = [decode.run_decode(plan.spec, plan.params, plan.start()) for plan in plans]
            return np.concatenate([np.sum(np.asarray(end.rounds.emitted) > 0, axis=1) for end in ends])

        return seconds, steps


def probes(trace: RankTrace, tune: Tune) -> list[Candidate]:
    """A few unlike methods, whose real rounds tell what comes on top of the bare forwards."""
    found = []
    wide = max(2, min(4, tune.max_nodes // 3))
    for schedule, drafts in (((), ()), ((1, 1)[: tune.max_depth], (0,)), ((wide, 2, 1)[: tune.max_depth], (0,))):
        tree = Topology.from_schedule(schedule) if schedule else Topology.chain(0)
        own = trace.select(drafts) if drafts else trace
        name = f"<{','.join(map(str, schedule))}>" if schedule else "incremental"
        found.append(Candidate("probe", name, tree, drafts, 0.0, verify_steps(own, [tree])[0]))
    return found


def rounds_of(steps: np.ndarray, batch: int) -> int:
    """Rounds that ``generate`` runs for prompts of these verify steps, batch by batch."""
    return sum(int(max(part)) for part in itertools.batched(steps.tolist(), batch))


def confirm(bench: Bench, trace: RankTrace, batch: int, choices: Sequence[Choice], screen: Console) -> list[Confirmed]:
    """Decode the best choices, and the best of each kind, side by side."""
    chosen = list(choices[: bench.tune.confirm])
    for kind in KINDS:
        first = next((choice for choice in choices if choice.candidate.kind == kind), None)
        if first is not None and first not in chosen:
            chosen.append(first)
    calls = {index: bench.timed(choice.candidate, batch) for index, choice in enumerate(chosen)}
    real = {index: steps() for index, (_, steps) in calls.items()}
    seconds = interleaved({index: call for index, (call, _) in calls.items()}, bench.tune.repeats)
    emitted = int(np.sum(trace.drafted))
    found = []
    for index, choice in enumerate(chosen):
        agree = bool(np.array_equal(real[index], choice.candidate.steps))
        found.append(Confirmed(choice, batch, 1e3 * seconds[index] / emitted, agree))
        screen.print(f"decoded {choice.candidate.name} at batch {batch}", highlight=False)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 2 for a bad config."""
    args = command.parser("tune", "Choose a tree for a device.", runs=True).parse_args(arguments)
    screen = command.screen()
    try:
        tuning = config.load(Tuning, args.config, args.set)
        if not tuning.models.drafts:
            raise ConfigError(["models.drafts: name at least one draft model"])
        directory = args.out or config.REPOSITORY / "runs" / f"{tuning.tune.name}-{config.digest(tuning)}"
        _tune(tuning, directory, screen)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _tune(tuning: Tuning, directory: pathlib.Path, screen: Console) -> None:
    tune, bench = tuning.tune, Bench(tuning)
    bounds = Bounds(tune.max_nodes, tune.max_depth, tune.most_draws, tune.screen, tune.seed)
    directory.mkdir(parents=True, exist_ok=True)
    trace = rank_trace(bench.target, bench.drafts, bench.texts, max_new_tokens=tune.max_new_tokens)
    screen.print(f"traced {len(bench.texts)} prompts; {trace.near_ties} near ties", highlight=False)
    capacity = int(prepare(bench.target, bench.texts, max_new_tokens=tune.max_new_tokens).inputs[0].shape[1])
    cost = _measured_cost(bench, trace, capacity, directory)
    confirmed: list[Confirmed] = []
    lines = [f"# {tune.name}", ""]
    for batch in tune.batch_sizes:
        fitted = _fit(bench, trace, cost, batch, capacity)
        choices = rank(trace, bounds, fitted, batch, capacity, finished_rows_wait=True)
        own = confirm(bench, trace, batch, choices, screen)
        confirmed += own
        title = f"{HERE}, batch {batch}, cache of {capacity} rows (measured; rounds: {fitted.scale:.2f} x forwards "
        title += f"+ {1e3 * fitted.fixed:.2f} ms)"
        lines += _report(title, choices, bench, {id(item.choice): item for item in own}, screen)
    for name in tune.devices:
        modelled = _modelled_cost(tuning, name)
        for batch, context in itertools.product(tune.batch_sizes, tune.contexts):
            choices = rank(trace, bounds, modelled, batch, context, finished_rows_wait=False)
            title = f"{DEVICES[name].name}, batch {batch}, context {context} (modelled)"
            lines += _report(title, choices, bench, {}, screen)
    errors = [abs(item.choice.milliseconds / item.measured - 1) for item in confirmed]
    agree = sum(item.steps_agree for item in confirmed)
    verdict = [
        f"Median error of predicted ms/token over {len(confirmed)} decoded methods: {statistics.median(errors):.1%} "
        f"(largest {max(errors):.1%}).",
        f"Verify steps of every prompt as replayed: {agree} of {len(confirmed)} methods"
        + (f"; {trace.near_ties} near ties in the texts." if agree < len(confirmed) else "."),
    ]
    for line in verdict:
        screen.print(line, highlight=False)
    plot(confirmed, bench.names).savefig(directory / "predicted.png", dpi=150)
    lines += ["", "## Predicted against measured", "", *verdict, "", "![Predicted against measured](predicted.png)"]
    (directory / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = [_record(item, bench) for item in confirmed]
    (directory / "confirmed.json").write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    screen.print(f"report: {directory / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def _measured_cost(bench: Bench, trace: RankTrace, capacity: int, directory: pathlib.Path) -> RoundCost:
    """Latency curves of all models, saved; models of one architecture share theirs."""
    tune = bench.tune
    sizes = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128) if rows < 2 * tune.max_nodes]
    merged = [rows for rows in (64, 128, 256) if len(bench.drafts) > 1 and max(sizes) < rows]
    merged = [rows for rows in merged if rows < 2 * tune.max_nodes * len(bench.drafts)]
    curves: dict[Any, Latency] = {}
    for place, (model, rows) in enumerate(
        [(bench.target, sizes + merged), *((draft, sizes) for draft in bench.drafts)]
    ):
        if (model.forward, len(rows)) not in curves:
            curve = measure_latency(
                model, batches=tune.batch_sizes, rows=rows, contexts=(capacity,), repeats=tune.repeats
            )
            curve.save(directory / f"latency_{'target' if not place else bench.names[place - 1]}.json")
            curves[model.forward, len(rows)] = curve
    of = lambda model, rows: curves[model.forward, len(rows)]
    return RoundCost(of(bench.target, sizes + merged), tuple(of(draft, sizes) for draft in bench.drafts))


def _fit(bench: Bench, trace: RankTrace, cost: RoundCost, batch: int, capacity: int) -> RoundCost:
    """The cost with what real rounds of the probes take beyond their forwards."""
    trials = probes(trace, bench.tune)
    calls = {index: bench.timed(trial, batch)[0] for index, trial in enumerate(trials)}
    seconds = interleaved(calls, bench.tune.repeats)
    bare = [cost.forwards(trial.tree.shape, trial.drafts, batch=batch, context=capacity) for trial in trials]
    return cost.fitted(bare, [seconds[index] / rounds_of(trial.steps, batch) for index, trial in enumerate(trials)])


def _modelled_cost(tuning: Tuning, device: str) -> RoundCost:
    curves = []
    for path in (tuning.models.target, *tuning.models.drafts):
        raw = json.loads((config.resolve(path) / "config.json").read_text(encoding="utf-8"))
        curves.append(roofline(from_hugging_face(raw), DEVICES[device]))
    return RoundCost(curves[0], tuple(curves[1:]))


def _report(title: str, choices: Sequence[Choice], bench: Bench, confirmed: dict[int, Confirmed], screen) -> list[str]:
    """Print the best and the best of each kind; the same as Markdown."""
    shown = [choice for place, choice in enumerate(choices) if place < 8 or id(choice) in confirmed]
    for kind in KINDS:
        first = next((choice for choice in choices if choice.candidate.kind == kind), None)
        if first is not None and first not in shown:
            shown.append(first)
    base = next(choice for choice in choices if choice.candidate.kind == "incremental").milliseconds
    header = ["method", "kind", "SSMs", "nodes", "tokens/step", "predicted ms/token", "speed-up", "measured ms/token"]
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < 3 else "right")
    lines = ["", f"## {title}", "", f"| {' | '.join(header)} |", "|:---|:---|:---|" + "---:|" * 5]
    for choice in sorted(shown, key=lambda choice: choice.milliseconds):
        item, candidate = confirmed.get(id(choice)), choice.candidate
        row = [
            candidate.name,
            candidate.kind,
            metrics.short_names([bench.names[draft] for draft in candidate.drafts]),
            str(len(candidate.drafts) * (candidate.tree.shape.num_nodes - 1)),
            f"{candidate.tokens_per_step:.2f}",
            f"{choice.milliseconds:.3g}",
            f"{base / choice.milliseconds:.2f}x",
            f"{item.measured:.3g}" if item else "",
        ]
        table.add_row(*row)
        lines.append(f"| `{row[0]}` | {' | '.join(row[1:])} |")
    screen.print(table)
    return lines


def _record(item: Confirmed, bench: Bench) -> dict[str, Any]:
    candidate = item.choice.candidate
    return {
        "method": candidate.name,
        "kind": candidate.kind,
        "drafts": [bench.names[draft] for draft in candidate.drafts],
        "batch": item.batch,
        "tokens_per_step": candidate.tokens_per_step,
        "predicted_ms": item.choice.milliseconds,
        "measured_ms": item.measured,
        "steps_agree": item.steps_agree,
    }


def plot(confirmed: Sequence[Confirmed], names: Sequence[str]) -> Figure:
    """Predicted against measured milliseconds a token, the diagonal, and 15 percent on either side of it."""
    figure = Figure(figsize=(5.4, 5), layout="constrained")
    axes = figure.subplots()
    values = [value for item in confirmed for value in (item.measured, item.choice.milliseconds)]
    ends = np.array([0.8 * min(values), 1.25 * max(values)])
    axes.plot(ends, ends, color=plots.GREY, linewidth=0.8)
    axes.fill_between(ends, 0.85 * ends, 1.15 * ends, color="#dddddd", linewidth=0, label="within 15%")
    for place, batch in enumerate(dict.fromkeys(item.batch for item in confirmed)):
        own = [item for item in confirmed if item.batch == batch]
        axes.scatter(
            [item.measured for item in own],
            [item.choice.milliseconds for item in own],
            color=plots.PALETTE[place % len(plots.PALETTE)],
            marker=plots.MARKERS[place % len(plots.MARKERS)],
            label=f"batch {batch}",
            zorder=3,
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured ms/token")
    axes.set_ylabel("predicted ms/token")
    axes.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(main())
