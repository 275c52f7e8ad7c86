"""From records to numbers: ratios are total over total, never means of ratios."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments import sweep
from specjax.verify import VERIFIERS

type Row = Mapping[str, Any]

# Settings of [decode] that a method's name, its drafts or a panel's title tell.
SHOWN = "drafts combine capacity builder tree dynamic.width dynamic.depth dynamic.nodes".split()
SHOWN += "lookup.branches lookup.length verifier allow_lossy temperature top_k top_p".split()


def frame(records: Sequence[Row], order: Sequence[str]) -> pd.DataFrame:
    """Records as a table, a row per cell and prompt, cells in the given order."""
    places = {cell: place for place, cell in enumerate(order)}
    return pd.DataFrame(sorted(records, key=lambda row: places[row["cell"]]))


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A table's rows as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell.

    ``tokens_per_step`` is emitted tokens over verify steps, prefill's token not counted; its ``_low`` and ``_high`` are
    the quartiles over prompts, and ``_resampled_low`` and ``_resampled_high`` hold 95 % of what it is for as many
    prompts drawn anew from these (Efron 1979). ``speedup`` is tokens per second over those of incremental decoding on
    the same prompts; its ``_low`` and ``_high`` are the extremes over timed passes of either side. ``same_text`` counts
    the prompts whose tokens are all identical to incremental decoding's.
    """
    return pd.DataFrame([_summary(rows) for rows in _by_cell(table)])


def acceptance_by_depth(table: pd.DataFrame) -> pd.DataFrame:
    """Columns cell, depth, tried, accepted, rate: how often a drafted token at a depth was accepted, given that its
    parent was. Rounds cut short by a stop token or the budget count up to the cut.
    """
    found = []
    for rows in _by_cell(table):
        tried, accepted = (
            [sum(level) for level in itertools.zip_longest(*(row[name] for row in rows), fillvalue=0)]
            for name in ("tried_by_depth", "accepted_by_depth")
        )
        found += [
            {"cell": rows[0]["cell"], "depth": depth, "tried": a, "accepted": b, "rate": b / a}
            for depth, (a, b) in enumerate(zip(tried, accepted, strict=True), start=1)
            if a
        ]
    return pd.DataFrame(found, columns=pd.Index(["cell", "depth", "tried", "accepted", "rate"]))


def credit_by_source(table: pd.DataFrame) -> pd.DataFrame:
    """Columns cell, source, accepted, share, alone, alone_share: who proposed the accepted tokens of cells with several
    drafts. A token that two proposed counts for both; alone are those that nobody else proposed.
    """
    columns = pd.Index(["cell", "source", "accepted", "share", "alone", "alone_share"])
    found = []
    for rows in _by_cell(table):
        drafts, total = list(rows[0]["decode.drafts"]), sum(row["accepted"] for row in rows)
        counts = [
            [sum(column) for column in itertools.zip_longest(*(row[name] for row in rows), fillvalue=0)]
            for name in ("accepted_by_source", "accepted_by_source_alone")
        ]
        if len(drafts) < 2 or not total:
            continue
        for name, accepted, alone in itertools.zip_longest(drafts, *counts):
            accepted, alone = accepted or 0, alone or 0
            found.append((rows[0]["cell"], name or "", accepted, accepted / total, alone, alone / total))
    return pd.DataFrame(found, columns=columns)


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables under dotted names."""
    found = {}
    for name, value in tables.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def panels(summary: pd.DataFrame) -> list[tuple[str, list[dict[str, Any]]]]:
    """Cells to be compared with one another, under a title: those with one warp and verifier, whatever drafts them.

    Incremental cells stand in every panel of their warp.
    """
    warps: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(summary):
        name = warp_name(row["decode.temperature"], row["decode.top_k"], row["decode.top_p"])
        warps.setdefault(name, []).append(row)
    found = []
    for name, rows in warps.items():
        plain = [row for row in rows if not row["ssms"]]
        verifiers = dict.fromkeys(row["verifying"] for row in rows if row["ssms"])
        for verifier in verifiers:
            group = [row for row in rows if row["ssms"] and row["verifying"] == verifier]
            modes = {row["drafting"] for row in group} - {""}
            drafts = f"{modes.pop()} drafts" if len(modes) == 1 else "drafts"
            found.append((f"{name}, {drafts} verified by {verifier}", plain + group))
        if not verifiers:
            found.append((name, plain))
    return found


def varying(summary: pd.DataFrame) -> list[str]:
    """Columns that differ beyond method, drafts, warp and verifier: settings, and how draws are made."""
    shown = {"models.drafts", "run.name", *(f"decode.{name}" for name in (*SHOWN, "draft_mode"))}
    names = [str(name) for name in summary.columns if str(name).split(".")[0] in ("run", "models", "decode")]
    found = [name for name in names if name not in shown and len(summary[name].drop_duplicates()) > 1]
    modes = set(summary["drafting"]) - {""}
    return [*(["drafting"] if len(modes) > 1 else []), *found]


def warp_name(temperature: float, top_k: int, top_p: float) -> str:
    """A warp in words."""
    name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return name + (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")


def short_names(names: Sequence[str]) -> str:
    """Drafts in few letters: ``ssm_a``, ``ssm_b`` becomes ``ssm_a+b``."""
    prefix = os.path.commonprefix(list(names)) if len(names) > 1 else ""
    prefix = prefix[: max(prefix.rfind("_"), prefix.rfind("-")) + 1]
    return prefix + "+".join(name.removeprefix(prefix) for name in names)


def untimed(row: Row) -> str:
    """Why a cell has no times, or "-" where it has them and every prompt ended at its first token."""
    if not row["steps"]:
        return "-"
    return "replayed" if row["run.measure"] == "replay" else "untimed"


def shown(value: Any, form: str = "") -> str:
    """A setting or a number in a table; "-" where a cell has none."""
    if value is None or value != value:
        return "-"
    if not form and isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers with gaps is one of floats
    return format(value, form) if form else str(value)


def one_line(records: Sequence[Row]) -> str:
    """A finished cell's result in a few words."""
    row = _summary(records)
    speed = untimed(row) if np.isnan(row["speedup"]) else f"{row['speedup']:.2f}x"
    return f"{shown(row['tokens_per_step'], '.2f')} tokens/step, {speed}"


def _by_cell(table: pd.DataFrame) -> list[list[dict[str, Any]]]:
    return [list(rows) for _, rows in itertools.groupby(rows_of(table), key=lambda row: row["cell"])]


def _verifier_name(name: str) -> str:
    return f"{name} (lossy)" if name in VERIFIERS and VERIFIERS[name].lossy else name


def _resampled(rows: Sequence[Row], draws: int = 4000) -> np.ndarray:
    """The 0.025 and 0.975 quantiles of tokens per step over prompts drawn with replacement."""
    chosen = np.random.default_rng(0).integers(0, len(rows), (draws, len(rows)))
    emitted, steps = (np.array([row[name] for row in rows])[chosen].sum(axis=1) for name in ("emitted", "steps"))
    return np.quantile(emitted[steps > 0] / steps[steps > 0], [0.025, 0.975]) if np.any(steps) else np.full(2, np.nan)


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    total = {name: sum(row[name] for row in rows) for name in ("new_tokens", "steps", "emitted", "drafted", "accepted")}
    steps = total["steps"] or np.nan  # a run of which every prompt ended at its first token has no ratios
    prefill, decode, base = (
        np.sum([row[f"{name}_seconds"] for row in rows], axis=0) for name in ("prefill", "decode", "baseline_decode")
    )
    speed, base_speed = total["emitted"] / decode, sum(row["baseline_emitted"] for row in rows) / base
    per_prompt = [row["emitted"] / row["steps"] for row in rows if row["steps"]] or [np.nan]
    resampled_low, resampled_high = _resampled(rows)
    settings = {name: value for name, value in first.items() if name.split(".")[0] in ("run", "models", "decode")}
    return {
        "cell": first["cell"],
        "method": first["method"],
        "ssms": short_names(first["decode.drafts"]),
        "drafting": first["decode.draft_mode"] if set(first["decode.drafts"]) - {sweep.LOOKUP} else "",
        "verifying": _verifier_name(first["decode.verifier"]) if first["decode.drafts"] else "",
        "prompts": len(rows),
        **total,
        "tokens_per_step": total["emitted"] / steps,
        "tokens_per_step_low": np.quantile(per_prompt, 0.25),
        "tokens_per_step_high": np.quantile(per_prompt, 0.75),
        "tokens_per_step_resampled_low": resampled_low,
        "tokens_per_step_resampled_high": resampled_high,
        "drafted_per_step": total["drafted"] / steps,
        "accepted_per_step": total["accepted"] / steps,
        "prefill_seconds": np.median(prefill),
        "decode_seconds": np.median(decode),
        "tokens_per_second": np.median(speed),
        "baseline_tokens_per_second": np.median(base_speed),
        "speedup": np.median(speed) / np.median(base_speed),
        "speedup_low": np.min(speed) / np.max(base_speed),
        "speedup_high": np.max(speed) / np.min(base_speed),
        "same_text_promised": first["same_text_promised"],
        "same_text": sum(row["same_text"] for row in rows),
        "differing_prompts": sum(not row["same_text"] for row in rows),
        "compiles": first["compiles"],
        "compile_seconds": first["compile_seconds"],
        **{name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in settings.items()},
    }
