"""The papers' tables for people: one report.md, and all values as CSV."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from rich.console import Console

if TYPE_CHECKING:
    from experiments.tables import Result

EXPLANATION = """\
- **replayed**: exact, from the ranks of the target's own text under the SSM; **summed**: the rule's own law summed over
  all draws at every token of a text that the target sampled; **decoded**: counted while decoding. +- is one standard
  error over prompts.
- **published** rows and columns are of other and much larger models, named beside them. What a source does not give, or
  was not found, stands as "-". Absolute values are not comparable, shapes are.
- **tokens**: emitted per verify step, the correction or bonus included. **success**: how often, over all tokens of the
  text, the emitted token is one that was drafted behind the text before it.
"""


def write(directory: pathlib.Path, results: Sequence["Result"], screen: Console) -> None:
    """Write report.md and tables.csv; print the report."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["# The papers' tables", "", *EXPLANATION.splitlines()]
    for result in results:
        lines += _section(result)
    text = "\n".join(lines) + "\n"
    (directory / "report.md").write_text(text, encoding="utf-8")
    pd.DataFrame(_rows(results)).to_csv(directory / "tables.csv", index=False)
    screen.print(text, markup=False, highlight=False, soft_wrap=True)
    screen.print(f"report: {directory / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def verdicts(result: "Result") -> list[str]:
    """Every claim of the table, and whether the values bear it out."""
    table, lines = result.table, []
    means = {name: [value.mean for value in row] for name, row in result.values.items()}
    if table.rises:
        unknown = [name for name, row in means.items() if np.isnan(row).any()]
        falls = [name for name, row in means.items() if name not in unknown and np.any(np.diff(row) < 0)]
        lines += [f"Not rising along the row: {', '.join(falls)}."] if falls else []
        lines += [f"Not measured, so rising or not: {', '.join(unknown)}."] if unknown else []
        lines += [] if falls or unknown else ["Every row rises, as published."]
    for claim in table.above:
        if claim.row in means and claim.than in means:
            pairs = list(zip(means[claim.row], means[claim.than], strict=True))[claim.first - 1 :]
            at = f" from {table.columns[claim.first - 1]} on" if claim.first > 1 else ""
            wanted = f"at least {claim.factor:g} times {claim.than}" if claim.factor != 1 else f"above {claim.than}"
            if not all(low > 0 and high >= 0 for high, low in pairs):  # or not a number
                lines.append(f"Not measured: whether {claim.row} is {wanted}{at}; a value is missing or 0.")
                continue
            ratios = [high / low for high, low in pairs]
            shown = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
            lines.append(
                f"{claim.row} is {wanted}{at}, as published: {shown} times."
                if min(ratios) >= claim.factor
                else f"NOT as published: {claim.row} should be {wanted}{at}, and is {shown} times."
            )
    return lines


def _section(result: "Result") -> list[str]:
    table, models, run = result.table, result.models, result.table.run
    drafts = ", ".join(f"`{path}`" for path in models.drafts)
    lines = ["", f"## {table.title}", "", f"`{models.target}`, drafted for by {drafts}; "]
    lines[-1] += f"{run.num_prompts} prompts of {run.prompts}, at most {run.max_new_tokens} new tokens each."
    lines += ["", table.about.strip()] if table.about else []
    lines += ["", *(_across(result) if len(table.columns) > 1 else _down(result))]
    for line in (*verdicts(result), *result.notes):
        lines += ["", line]
    sources = dict.fromkeys(f"{row.models}: {row.source}" for row in table.row if row.source)
    return [*lines, *([""] if sources else []), *(f"- {source}" for source in sources)]


def _across(result: "Result") -> list[str]:
    """A row per method and one of what was published for it, columns as the table's."""
    table = result.table
    lines = ["| | " + " | ".join(table.columns) + " | |", "|:---" + "|---:" * len(table.columns) + "|:---|"]
    for row in table.row:
        if row.name in result.values:
            values = result.values[row.name]
            lines.append(f"| {row.name} | {' | '.join(map(_show, values))} | {values[0].way} |")
            if row.published:
                published = " | ".join(value or "-" for value in row.published)
                lines.append(f"| *published* | {published} | {row.models} |")
    return lines


def _down(result: "Result") -> list[str]:
    """A row per method, published values in a column beside ours."""
    lines = [f"| | {result.table.columns[0]} | | published | for |", "|:---|---:|:---|---:|:---|"]
    for row in result.table.row:
        if row.name in result.values:
            (value,) = result.values[row.name]
            published = row.published[0] if row.published and row.published[0] else "-"
            lines.append(f"| {row.name} | {_show(value)} | {value.way} | {published} | {row.models} |")
    return lines


def _show(value) -> str:
    return "not measured" if np.isnan(value.mean) else f"{value.mean:.3f} +- {value.error:.3f}"


def _rows(results: Sequence["Result"]) -> list[dict]:
    return [
        {
            "table": result.table.title,
            "target": result.models.target,
            "drafts": " ".join(result.models.drafts),
            "row": row.name,
            "column": column,
            **value._asdict(),
            "published": published,
            "published_models": row.models,
        }
        for result in results
        for row in result.table.row
        if row.name in result.values
        for column, value, published in zip(
            result.table.columns,
            result.values[row.name],
            row.published or [""] * len(result.table.columns),
            strict=True,
        )
    ]
