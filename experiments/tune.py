"""Which tree on this hardware: `python -m experiments.tune configs/tune.toml [--set a.b=value] [--out DIR]`."""

import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments import command, config, inflate, metrics, plots
from experiments.config import ConfigError
from experiments.search import Choice, rank
from experiments.tuner import KINDS, Bench, Confirmed, Tuning, confirm, milliseconds
from specjax.models.families import from_hugging_face
from specjax.replay import DEVICES, RoundCost, roofline

HERE = "this machine"


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
    tune, bench = tuning.tune, Bench.load(tuning)
    directory.mkdir(parents=True, exist_ok=True)
    screen.print(f"traced {len(bench.texts)} prompts; {bench.trace.near_ties} near ties", highlight=False)
    for name, curve in zip(("target", *bench.names), (bench.curves.target, *bench.curves.drafts)):
        curve.save(directory / f"latency_{name}.json")
    confirmed: list[Confirmed] = []
    labels = [f"`{inflate.label(path)}`" for path in (tuning.models.target, *tuning.models.drafts)]
    lines = [
        f"# {tune.name}",
        "",
        f"Target {labels[0]}, SSMs {', '.join(labels[1:])}; {tuning.models.dtype}. {len(bench.texts)} prompts of "
        f"{tune.prompts}, {tune.max_new_tokens} tokens each, greedily.",
    ]
    for batch in tune.batch_sizes:
        choices = bench.choices(batch)
        cost, own = confirm(bench, batch, choices)
        confirmed += own
        # What is shown is predicted for the spell in which the best were decoded.
        choices = [
            choice._replace(milliseconds=milliseconds(choice.candidate, cost, bench, batch)) for choice in choices
        ]
        title = f"{HERE}, batch {batch}, cache of {bench.capacity} rows (measured; rounds: {cost.target_factor:.2f} x "
        title += f"target + {cost.draft_factor:.2f} x drafts + {1e3 * cost.fixed:.2f} ms)"
        lines += _report(title, choices, bench, {id(item.candidate): item for item in own}, screen)
        screen.print(f"Batch {batch}: {verdict(own, bench.trace.near_ties)[0]}", highlight=False)
    for name in tune.devices:
        modelled = _modelled_cost(tuning, name)
        for batch, context in itertools.product(tune.batch_sizes, tune.contexts):
            choices = rank(bench.trace, bench.bounds, modelled, batch, context, finished_rows_wait=False)
            title = f"{DEVICES[name].name}, batch {batch}, context {context} (modelled)"
            lines += _report(title, choices, bench, {}, screen)
    said = verdict(confirmed, bench.trace.near_ties)
    for line in said:
        screen.print(line, highlight=False)
    plot(confirmed).savefig(directory / "predicted.png", dpi=150)
    lines += ["", "## Predicted against measured", "", *said, "", "![Predicted against measured](predicted.png)"]
    (directory / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = [_record(item, bench) for item in confirmed]
    (directory / "confirmed.json").write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    screen.print(f"report: {directory / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def verdict(confirmed: Sequence[Confirmed], near_ties: int) -> list[str]:
    """How far predictions were from what was measured, and whether rounds were as replayed; a sentence each."""
    errors = [abs(item.predicted / item.measured - 1) for item in confirmed if item.fresh]
    agree = sum(item.steps_agree for item in confirmed)
    return [
        f"Median error of predicted ms/token over {len(errors)} decoded methods, probes left out: "
        f"{statistics.median(errors):.1%} (largest {max(errors):.1%})."
        if errors
        else "Every decoded method was a probe, so no prediction was put to the test.",
        f"Verify steps of every prompt as replayed: {agree} of {len(confirmed)} methods"
        + (f"; {near_ties} near ties in the texts." if agree < len(confirmed) else "."),
    ]


def _modelled_cost(tuning: Tuning, device: str) -> RoundCost:
    curves = []
    for path in (tuning.models.target, *tuning.models.drafts):
        raw = json.loads((config.resolve(path) / "config.json").read_text(encoding="utf-8"))
        curves.append(roofline(from_hugging_face(raw), DEVICES[device]))
    return RoundCost(curves[0], tuple(curves[1:]))


def _report(title: str, choices: Sequence[Choice], bench: Bench, confirmed: dict[int, Confirmed], screen) -> list[str]:
    """Print the best and the best of each kind; the same as Markdown."""
    shown = [choice for place, choice in enumerate(choices) if place < 8 or id(choice.candidate) in confirmed]
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
        item, candidate = confirmed.get(id(choice.candidate)), choice.candidate
        row = [
            candidate.name,
            candidate.kind,
            metrics.short_names([bench.names[draft] for draft in candidate.drafts]),
            str(candidate.nodes),
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
    candidate = item.candidate
    return {
        "method": candidate.name,
        "kind": candidate.kind,
        "drafts": [bench.names[draft] for draft in candidate.drafts],
        "batch": item.batch,
        "tokens_per_step": candidate.tokens_per_step,
        "predicted_ms": item.predicted,
        "measured_ms": item.measured,
        "steps_agree": item.steps_agree,
        "is_probe": not item.fresh,
    }


def plot(confirmed: Sequence[Confirmed]) -> Figure:
    """Predicted against measured milliseconds a token, the diagonal, and 15 percent beside it; probes are hollow."""
    figure = Figure(figsize=(5.4, 5), layout="constrained")
    axes = figure.subplots()
    values = [value for item in confirmed for value in (item.measured, item.predicted)]
    ends = np.array([0.8 * min(values), 1.25 * max(values)])
    axes.plot(ends, ends, color=plots.GREY, linewidth=0.8)
    axes.fill_between(ends, 0.85 * ends, 1.15 * ends, color="#dddddd", linewidth=0, label="within 15%")
    for place, batch in enumerate(dict.fromkeys(item.batch for item in confirmed)):
        own = [item for item in confirmed if item.batch == batch]
        color = plots.PALETTE[place % len(plots.PALETTE)]
        axes.scatter(
            [item.measured for item in own],
            [item.predicted for item in own],
            facecolors=[color if item.fresh else "none" for item in own],
            edgecolors=color,
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
