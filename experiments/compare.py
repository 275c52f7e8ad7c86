"""Several runs side by side: what differs between their settings, and what came of the cells that they share."""

import collections
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments import metrics, store

ABOUT = """\
Tokens per step, and in brackets how many times the first run's; then speed-ups, each over incremental decoding beside
it in the same run, so that they can be compared where seconds of different days or machines cannot. **text**: prompts
whose tokens differ from the first run's, of those that both have.
"""


def markdown(runs: Sequence[store.Store]) -> str:
    """A comparison of at least two runs, each with a finished cell.

    Cells of different runs are one row where their method, drafts and sampling are the same, and whatever else varies
    inside one of the runs.
    """
    tables = [metrics.frame(run.rows, list(run.header["cells"])) for run in runs]
    summaries = [metrics.summarize(table) for table in tables]
    keys = _keys(summaries)
    rows: dict[tuple, list[dict[str, Any] | None]] = {}
    for number, summary in enumerate(summaries):
        for row in metrics.rows_of(summary):
            key = tuple(metrics.shown(row.get(name)) for name in keys)
            rows.setdefault(key, [None] * len(runs))[number] = row
    letters = [chr(ord("A") + number) if number < 26 else f"run {number + 1}" for number in range(len(runs))]
    lines = ["# Runs compared", ""]
    lines += [f"- **{letter}**: `{run.directory}`, {_done(run)}" for letter, run in zip(letters, runs)]
    differences = _differences(letters, runs)
    lines += (
        ["", "What differs between them:", "", *differences] if differences else ["", "Their settings are the same."]
    )
    lines += ["", *ABOUT.splitlines(), ""]
    extra = [name for name in keys if name in _varying(summaries)]
    heads = ["method", "drafts", "sampling", "verifier", *extra, *(f"{each} tokens/step" for each in letters)]
    heads += [*(f"{each} speed-up" for each in letters), *(f"{each} text" for each in letters[1:])]
    texts = [_texts(table) for table in tables]
    lines.append("| " + " | ".join(heads) + " |")
    lines.append("|" + ":---|" * (4 + len(extra)) + "---:|" * (3 * len(runs) - 1))
    for found in rows.values():
        row = next(item for item in found if item is not None)
        warp = metrics.warp_name(row["decode.temperature"], row["decode.top_k"], row["decode.top_p"])
        entries = [f"`{row['method']}`", row["ssms"], warp, row["verifying"]]
        entries += [metrics.shown(row.get(name)) for name in extra]
        entries += [_tokens(item, found[0]) for item in found] + [_speed(item) for item in found]
        entries += [_text(found[0], item, texts[0], texts[at]) for at, item in enumerate(found) if at]
        lines.append("| " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _keys(summaries: Sequence[pd.DataFrame]) -> list[str]:
    names = dict.fromkeys(str(name) for summary in summaries for name in summary.columns)
    decode = [name for name in names if name.startswith("decode.")]
    return [*decode, *(name for name in _varying(summaries) if name not in decode)]


def _varying(summaries: Sequence[pd.DataFrame]) -> list[str]:
    """What varies inside a run beyond what the table's first columns say."""
    return list(dict.fromkeys(name for summary in summaries for name in metrics.varying(summary)))


def _done(run: store.Store) -> str:
    cells = run.header["cells"].values()
    return f"{sum(cell['status'] == 'done' for cell in cells)} of {len(cells)} cells; {run.header['inputs']['device']}"


def _differences(letters: Sequence[str], runs: Sequence[store.Store]) -> list[str]:
    flat = []
    for run in runs:
        parts = {part: run.header["config"][part] for part in ("run", "models", "decode")}
        revisions = dict.fromkeys(str(session["revision"]) for session in run.header["sessions"])
        known = metrics.flat({**parts, "inputs": run.header["inputs"], "revision": ", ".join(revisions)})
        flat.append({name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()})
    lines = []
    for name in dict.fromkeys(key for each in flat for key in each):
        values = [each.get(name, "-") for each in flat]
        if len(set(values)) > 1:
            lines.append(f"- {name}: " + ", ".join(f"{letter} {value}" for letter, value in zip(letters, values)))
    return lines


def _tokens(row: dict[str, Any] | None, first: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    shown = metrics.shown(row["tokens_per_step"], ".2f")
    if row is first or first is None:
        return shown
    return f"{shown} ({metrics.shown(row['tokens_per_step'] / first['tokens_per_step'], '.2f')}x)"


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return metrics.untimed(row) if np.isnan(row["speedup"]) else f"{row['speedup']:.2f}x"


def _texts(table: pd.DataFrame) -> dict[tuple, Any]:
    """Tokens by cell, prompt's name and length, and how many such prompts came before it: names may repeat."""
    found, seen = {}, collections.Counter()
    for row in metrics.rows_of(table):
        key = row["cell"], row["name"], row["prompt_tokens"]
        found[*key, seen[key]] = row["tokens"]
        seen[key] += 1
    return found


def _text(first: dict[str, Any] | None, other: dict[str, Any] | None, ours: dict, theirs: dict) -> str:
    if first is None or other is None:
        return "-"
    mine = {key[1:]: tokens for key, tokens in ours.items() if key[0] == first["cell"]}
    pairs = [(tokens, mine[key[1:]]) for key, tokens in theirs.items() if key[0] == other["cell"] and key[1:] in mine]
    different = sum(a != b for a, b in pairs)
    return f"{different} of {len(pairs)} differ" if different else "identical" if pairs else "-"
