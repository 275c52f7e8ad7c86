"""A run for people: the table on the screen, summary.csv, report.md and plots.

`python -m experiments.report DIR...` makes the report of a run again, or compares several runs.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments import command, compare, inflate, metrics, plots, store
from experiments.config import ConfigError

CAPTIONS = {
    "methods": "Tokens per verify step (left; whiskers: quartiles over prompts) and decode speed as a multiple of "
    "incremental decoding's (right; whiskers: extremes over timed passes)",
    "acceptance": "How often a drafted token was accepted, given that its parent was, by depth in the tree "
    "(hollow markers: fewer than 20 rounds)",
}


def _timed(row: metrics.Row, name: str, form: str) -> str:
    return metrics.untimed(row) if np.isnan(row[name]) else form.format(row[name])


def _between(row: metrics.Row, kind: str) -> str:
    if not row["ssms"]:  # each of its steps emits one token
        return ""
    low, high = row[f"tokens_per_step{kind}_low"], row[f"tokens_per_step{kind}_high"]
    return f"{low:.2f} to {high:.2f}" if low <= high else "-"


class Column(NamedTuple):
    """A column of the result table."""

    name: str
    text: Callable[[metrics.Row], str]
    left: bool = False
    code: bool = False  # text that Markdown would read as markup
    roomy: bool = False  # left out where the screen is narrow; report.md has it

    def markdown(self, row: metrics.Row) -> str:
        """The cell of a Markdown table."""
        return f"`{self.text(row)}`" if self.code else self.text(row)


COLUMNS = (
    Column("method", lambda row: row["method"], left=True, code=True),
    Column("drafts", lambda row: row["ssms"], left=True),
    Column("drafted", lambda row: f"{row['drafted']}", roomy=True),
    Column("accepted", lambda row: f"{row['accepted']}", roomy=True),
    Column("steps", lambda row: f"{row['steps']}"),
    Column("tokens/step", lambda row: metrics.shown(row["tokens_per_step"], ".2f")),
    Column("of prompts", lambda row: _between(row, ""), roomy=True),
    Column("resampled", lambda row: _between(row, "_resampled"), roomy=True),
    Column("decode s", lambda row: _timed(row, "decode_seconds", "{:.2f}")),
    Column("tokens/s", lambda row: _timed(row, "tokens_per_second", "{:.0f}")),
    Column("speed-up", lambda row: _timed(row, "speedup", "{:.2f}x")),
    Column("text", lambda row: _same_text(row), left=True),
)

ROOMY = 132  # characters a line that the whole table needs

DEFINITIONS = """\
- **tokens/step**: tokens emitted in rounds (bonus or correction included; nothing past a stop token or the budget) over
  verify steps. The token that prefill emits is not counted. Incremental decoding has 1 by definition.
- **of prompts**: half of the prompts have tokens/step between these. **resampled**: if as many prompts were drawn anew
  from these, 95 % of the time tokens/step would lie between these.
- **drafted, accepted, steps**: totals over all prompts. Every drafted node is counted, and every accepted one that was
  emitted.
- **decode s, tokens/s**: wall-clock time of drafting, verifying and committing, with results waited for; compilation,
  loading and prefill are outside. Prefill is in summary.csv.
- **speed-up**: tokens/s over those of incremental decoding, which ran through the same loop in the same process, on the
  same prompts, with the same seeds, budgets and stop tokens. Below 1.00x is slower.
- **text**: whether the tokens are those of incremental decoding with the same seeds. Greedy decoding and naive sampling
  promise that; other verifiers promise the same distribution, so their texts differ ("own sample"). A lossy one, which
  its panel's title says, promises neither ("not the target's").
- **replayed** cells were not decoded, so they have no times; **untimed** ones were decoded beside others (`--jobs`),
  where a time would say little about the method.
- Ratios are totals over totals, never means of ratios.
"""


def write(records: store.Store, screen: Console) -> None:
    """Write summary.csv, report.md and the plots of what is finished, and print the table."""
    if not records.rows:
        return
    table = metrics.frame(records.rows, list(records.header["cells"]))
    summary = metrics.summarize(table)
    summary.to_csv(records.directory / "summary.csv", index=False)
    figures = {
        "methods": plots.methods(summary),
        "acceptance": plots.acceptance(summary, metrics.acceptance_by_depth(table)),
    }
    for name, figure in figures.items():
        figure.savefig(records.directory / f"{name}.png", dpi=150)
    lines = _markdown(records.header, table, summary)
    (records.directory / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = [column for column in _columns(summary) if screen.width >= ROOMY or not column.roomy]
    for title, rows in metrics.panels(summary):
        screen.print(_screen_table(title, rows, columns))
    for line in verdict(summary):
        screen.print(line, markup=False, highlight=False)
    screen.print(f"report: {records.directory / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def verdict(summary: pd.DataFrame) -> list[str]:
    """Whether every text that was promised to be incremental decoding's is."""
    promised = [row for row in metrics.rows_of(summary) if row["same_text_promised"] and row["ssms"]]
    lines = []
    for name, rows in (
        ("greedy", [row for row in promised if row["decode.temperature"] == 0]),
        ("sampled with naive_sampling", [row for row in promised if row["decode.temperature"] > 0]),
    ):
        bad = [row for row in rows if row["differing_prompts"]]
        if rows and not bad:
            lines.append(f"{name}: all tokens identical to incremental decoding in all {len(rows)} cells.")
        for row in bad:
            where = f"{row['method']} {row['ssms']}"
            lines.append(f"{name}: {where}: {row['differing_prompts']} of {row['prompts']} prompts DIFFER.")
    return lines


def _same_text(row: Mapping[str, Any]) -> str:
    if not row["ssms"]:
        return "baseline"
    if not row["same_text_promised"]:
        return "not the target's" if row["verifying"].endswith("(lossy)") else "own sample"
    return f"{row['differing_prompts']} of {row['prompts']} DIFFER" if row["differing_prompts"] else "identical"


def _columns(summary: pd.DataFrame) -> list[Column]:
    names = metrics.varying(summary)
    extra = [Column(name, lambda row, name=name: metrics.shown(row[name]), left=True) for name in names]
    return [*COLUMNS[:2], *extra, *COLUMNS[2:]]


def _screen_table(title: str, rows: Sequence[metrics.Row], columns: Sequence[Column]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        header = column.name.replace("/", "/\n").replace("-", "-\n").replace(" ", "\n")
        table.add_column(header, justify="left" if column.left else "right", overflow="fold")
    best = max(row["speedup"] for row in rows)
    for row in rows:
        style = "bold" if row["speedup"] == best > 1 else "dim" if row["speedup"] < 1 else None
        table.add_row(*(escape(column.text(row)) for column in columns), style=style)
    return table


def _markdown(header: Mapping[str, Any], table: pd.DataFrame, summary: pd.DataFrame) -> list[str]:
    run, models = header["config"]["run"], header["config"]["models"]
    cells = list(header["cells"].values())
    done = sum(entry["status"] == "done" for entry in cells)
    by_prompt = list({(row["run.prompts"], row["prompt"]): row for row in metrics.rows_of(table)}.values())
    lengths, cut = [row["prompt_tokens"] for row in by_prompt], sum(row["prompt_cut"] for row in by_prompt)
    shapes = (
        "all trees are padded to common bounds and share one executable, so times are those of the largest"
        if run["padded"]
        else "each tree has an executable of its own size"
    )
    lines = [
        f"# {run['name']}",
        "",
        f"{done} of {len(cells)} cells are finished. Target `{inflate.label(models['target'])}`"
        + (f", drafts {', '.join(f'`{inflate.label(path)}`' for path in models['drafts'])}" if models["drafts"] else "")
        + f"; {models['dtype']}, {header['inputs']['device']}.",
        "",
        f"{len(by_prompt)} prompts of {run['prompts']}, {min(lengths)} to {max(lengths)} tokens"
        + (f" ({cut} of them cut to their last {run['max_prompt_tokens']})" if cut else "")
        + f"; at most {run['max_new_tokens']} new tokens; batches of {run['batch_size']}; "
        f"{run['repeats']} timed pass{'es' if run['repeats'] > 1 else ''}. Shapes: {shapes}.",
        "",
        *(f"- {line}" for line in verdict(summary)),
    ]
    columns = _columns(summary)
    for title, rows in metrics.panels(summary):
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines.append("| " + " | ".join(column.name for column in columns) + " |")
        lines.append("|" + "|".join(":---" if column.left else "---:" for column in columns) + "|")
        lines += ["| " + " | ".join(column.markdown(row) for column in columns) + " |" for row in rows]
    lines += _credit(table, summary)
    for name, caption in CAPTIONS.items():
        lines += ["", f"![{caption}]({name}.png)", "", f"*{caption}.*"]
    lines += ["", "## How to read the numbers", "", *DEFINITIONS.splitlines()]
    failed = [(cell, entry) for cell, entry in header["cells"].items() if entry["status"] == "failed"]
    if failed:
        lines += ["", "## Failed cells", ""]
        lines += [f"- {entry['method']} (`{cell}`): `{store.reason(entry)}`" for cell, entry in failed]
    lines += ["", "## Where the numbers come from", ""]
    used = sorted(table["session"].unique())
    for session in (header["sessions"][number] for number in used):
        versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
        revision = f"revision {session['revision']}" if session["revision"] else "no git revision"
        modified = " with local changes" if session["modified"] else ""
        lines.append(
            f"- `{session['command']}`, {session['started']}, {revision}{modified}; "
            f"Python {session['python']}, {versions}; {session['platform']}"
        )
    if len(used) > 1:
        lines += ["", "The run was interrupted; each cell was timed beside a baseline of its own session."]
    return lines


def _credit(table: pd.DataFrame, summary: pd.DataFrame) -> list[str]:
    """Who proposed the accepted tokens, for cells with several drafts."""
    rows = metrics.rows_of(metrics.credit_by_source(table))
    if not rows:
        return []
    cells = {row["cell"]: row for row in metrics.rows_of(summary)}
    lines = [
        "",
        "## Who proposed the accepted tokens",
        "",
        "A token proposed by several counts for each of them; *alone* are those that nobody else proposed.",
        "",
        "| method | SSMs | warp | source | accepted | of all | alone | of all |",
        "|:---|:---|:---|:---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cell = cells[row["cell"]]
        warp = metrics.warp_name(cell["decode.temperature"], cell["decode.top_k"], cell["decode.top_p"])
        texts = (
            f"`{cell['method']}`",
            cell["ssms"],
            warp,
            f"`{row['source']}`",
            row["accepted"],
            f"{row['share']:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, texts))} | {row['alone']} | {row['alone_share']:.0%} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 2 for a directory that holds no run or none that has results."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description="Report a run, or compare several."
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="DIR", help="a directory under runs/")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", help="write the comparison of several there as well"
    )
    args = parser.parse_args(arguments)
    if args.out and len(args.runs) == 1:
        parser.error("argument --out: expected several runs to compare; the report of one is in its directory")
    screen = command.screen()
    try:
        runs = [store.load(directory) for directory in args.runs]
        empty = [f"{run.directory}: no cell is finished" for run in runs if not run.rows]
        if empty:
            raise ConfigError(empty)
        if len(runs) == 1:
            write(runs[0], screen)
            return 0
        text = compare.markdown(runs)
        if args.out:
            _save(args.out, text + "\n")
    except ConfigError as error:
        print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return 2
    screen.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _save(path: pathlib.Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--out {path}: {error.strerror}"]) from None


if __name__ == "__main__":
    sys.exit(main())
