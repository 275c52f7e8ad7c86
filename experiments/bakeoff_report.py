"""The bake-off for people: report.md, and its tables as CSV."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.estimate import Estimate
from experiments.metrics import rows_of
from experiments.sweep import tree_label

# Block efficiency on i.i.d. trees as published, the best over K <= 4 and L <= 8.
PUBLISHED = {"naive_sampling": 4.05, "naive_tree": 4.50, "multi_step": 4.58, "spectr": 4.61, "traversal": 5.31}

EXPLANATION = """\
- **acceptance**: how often the token emitted at the root is a drafted one. **tokens**: emitted per verify step, the
  correction or bonus included.
- **expected** is the rule's closed form: on tabular models summed over every tree and outcome in float64, on the models
  averaged over the trees as drafted. **sampled** is what the real verifier emitted on the same trees; +- is one
  standard error. There is no closed form for `shared_gumbel` draws beyond one node, since they depend on the emission's
  noise.
- **bound**: the most that any exact verifier could have; on the models it is known for i.i.d. draws at one node only.
- **Merged nodes.** In the trees of both tables repeated draws stay draws of their node, as every rule needs them, and
  each copy is a node with draws of its own; a verifier goes on at the first copy only, so a token expands once. In the
  comparison of paths a merged node expands once per copy: it has the draws of every path through it. The last column
  says what the same paths give if it expands once.
"""


def write(directory: pathlib.Path, settings: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], screen: Console):
    """Write report.md and one CSV per table; print the report."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.drop(columns=["rows", "prompts"], errors="ignore").to_csv(directory / f"{name}.csv", index=False)
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    zoo, tabular = settings["zoo"], settings["tabular"]
    lines = [f"# {settings['name']}", "", *EXPLANATION.splitlines()]
    lines += ["", f"## {tabular['models']} random tabular models of {tabular['vocab_size']} tokens", ""]
    lines += [agreement(tables["tabular"]), "", *_cells(tables["tabular"])]
    lines += ["", f"## `{zoo['draft']}` for `{zoo['target']}` at temperature {zoo['temperature']:g}", ""]
    lines += [f"{zoo['steps']} consecutive positions of the target's own text behind {zoo['num_prompts']} prompts."]
    lines += [agreement(tables["zoo"]), "", *_cells(tables["zoo"])]
    lines += ["", "## The best of K i.i.d. paths of L tokens", "", *_paths(tables["paths"])]
    text = "\n".join(lines) + "\n"
    (directory / "report.md").write_text(text, encoding="utf-8")
    screen.print(text, markup=False, highlight=False, soft_wrap=True)
    screen.print(f"report: {directory / 'report.md'}", markup=False, highlight=False, soft_wrap=True)


def agreement(table: pd.DataFrame) -> str:
    """How far sampled tokens lie from their expectation on the same trees, in words."""
    known = table.dropna(subset="tokens_expected")
    away = known["tokens_apart"]
    far = [
        f"{row['verifier']} on {row['draft_mode']} {tree_label(row['tree'])}"
        for row, distance in zip(rows_of(known), away, strict=True)
        if distance > 4
    ]
    verdict = f"FURTHER THAN 4: {', '.join(far)}" if far else "none further than 4"
    return f"Sampled tokens lie at most {away.max():.1f} standard errors from the expected ones, {verdict}."


def _cells(table: pd.DataFrame) -> list[str]:
    columns = ("tree", "drafts", "verifier", "acceptance", "sampled", "bound", "tokens", "sampled", "bound")
    lines = [_line(columns), "|:---|:---|:---" + "|---:" * 6 + "|"]
    for row in rows_of(table):
        numbers = [
            text
            for name in ("acceptance", "tokens")
            for text in (
                _plus_minus(row[f"{name}_expected"], row[f"{name}_expected_se"]),
                _plus_minus(row[f"{name}_sampled"], row[f"{name}_sampled_se"]),
                _plus_minus(row[f"{name}_bound"], 0),
            )
        ]
        lines.append(_line([f"`{tree_label(row['tree'])}`", row["draft_mode"], f"`{row['verifier']}`", *numbers]))
    return lines


def _paths(table: pd.DataFrame) -> list[str]:
    """Each verifier's best K and L beside the published value, and its distance from the published one before it."""
    rows = rows_of(table)
    once = {row["verifier"]: row for row in rows if not row["per_copy"]}
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["per_copy"] and row["tokens_expected"] >= best.get(row["verifier"], row)["tokens_expected"]:
            best[row["verifier"]] = row
    columns = ("verifier", "published", "ours", "K", "L", "above the published one before", "merged nodes expand once")
    lines = [_line(columns), "|:---" + "|---:" * 6 + "|"]
    before, gaps = None, []
    for verifier, row in best.items():
        gap = ""
        if verifier in PUBLISHED:
            if before is not None:
                # On the same trees, so most of the noise is gone.
                apart = Estimate.of_groups(row["rows"] - best[before]["rows"], row["prompts"])
                gaps.append((before, verifier, *apart))
                gap = _plus_minus(*apart, sign=True)
            before = verifier
        published = f"{PUBLISHED[verifier]:.2f}" if verifier in PUBLISHED else "-"
        ours = _plus_minus(row["tokens_expected"], row["tokens_expected_se"])
        single = f"{once[verifier]['tokens_expected']:.3f} (K={once[verifier]['paths']}, L={once[verifier]['length']})"
        lines.append(_line([f"`{verifier}`", published, ours, row["paths"], row["length"], gap, single]))
    return [*lines, "", order(gaps)]


def order(gaps: Sequence[tuple[str, str, float, float]]) -> str:
    """Whether the published order holds, from (lower, higher, distance, its standard error) of neighbours."""
    reversed_ = [f"{high} below {low}" for low, high, apart, _ in gaps if apart < 0]
    unsure = [f"{low} and {high}" for low, high, apart, error in gaps if 0 <= apart < 2 * error]
    text = f"The published order does NOT hold: {', '.join(reversed_)}." if reversed_ else "The published order holds."
    return text + (f" Within two standard errors: {', '.join(unsure)}." if unsure else "")


def _line(entries: Sequence[Any]) -> str:
    return "| " + " | ".join(str(entry) for entry in entries) + " |"


def _plus_minus(mean: float | None, error: float | None, *, sign: bool = False) -> str:
    if mean is None or math.isnan(mean):
        return "-"
    text = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return f"{text} +- {error:.3f}" if error else text
