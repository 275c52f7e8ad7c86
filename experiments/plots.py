"""Figures from summary tables; readable in print and without colour vision."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import metrics
from experiments.metrics import Row

# Okabe and Ito's palette, less its yellow and black: a tree has one colour in all figures, a set of SSMs one style.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#777777"
MARKERS = "osD^vP"
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "////", "....", "xxxx")
MOST_BARS, MOST_LINES = 40, 12
FEW_TRIES = 20


def methods(summary: pd.DataFrame) -> Figure:
    """Tokens per step and speed-up, a bar per cell, a row of axes per panel, from ``metrics.summarize``."""
    panels = [_best(title, rows, MOST_BARS) for title, rows in metrics.panels(summary)]
    heights = [0.9 + 0.27 * len(rows) for _, rows in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col", sharey="row", height_ratios=heights)
    styles, varying = _styles(summary), metrics.varying(summary)
    for (title, rows), (left, right) in zip(panels, grid, strict=True):
        left.set_title(title, loc="left", fontsize=9)
        for axes, name, suffix in ((left, "tokens_per_step", ""), (right, "speedup", "x")):
            for place, row in enumerate(rows):
                style, value = styles[row["cell"]], row[name]
                axes.barh(place, value, 0.72, color=style["color"], hatch=style["hatch"], edgecolor="white", lw=0)
                low, high = row[f"{name}_low"], row[f"{name}_high"]
                axes.plot([low, high], [place, place], color="black", linewidth=0.8, marker="|", markersize=5)
                axes.annotate(
                    f"{value:.2f}{suffix}",
                    (max(value, high), place),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    bbox={"color": "white", "pad": 1},
                )
            axes.axvline(1, color="black", linewidth=0.8)
            _plain(axes, "x")
        left.set_yticks(range(len(rows)), [_name(row, varying) for row in rows], fontsize=8)
        left.set_ylim(len(rows) - 0.4, -0.6)  # the table's order, from the top
    for axes, name, label in (
        (grid[-1, 0], "tokens_per_step", "tokens per verify step"),
        (grid[-1, 1], "speedup", "decode speed, incremental decoding = 1"),
    ):
        axes.set_xlim(0, 1.15 * np.nanmax([1, *summary[f"{name}_high"]]))
        axes.set_xlabel(label)
    return figure


def acceptance(summary: pd.DataFrame, by_depth: pd.DataFrame) -> Figure:
    """Acceptance by depth, a line per cell, axes per panel; hollow markers rest on fewer than 20 rounds.

    Args:
      summary: from ``metrics.summarize``.
      by_depth: from ``metrics.acceptance_by_depth``.
    """
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in metrics.rows_of(by_depth):
        lines.setdefault(point["cell"], []).append(point)
    panels = [(title, [row for row in rows if row["cell"] in lines]) for title, rows in metrics.panels(summary)]
    panels = [_best(title, rows, MOST_LINES) for title, rows in panels if rows]
    figure = Figure(figsize=(max(4.2 * len(panels), 6), 4.6), layout="constrained")
    if not panels:
        figure.text(0.5, 0.5, "nothing was drafted", ha="center")
        return figure
    (grid,) = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)
    styles, varying, handles = _styles(summary), metrics.varying(summary), {}
    for (title, rows), axes in zip(panels, grid, strict=True):
        for row in rows:
            points, style = lines[row["cell"]], styles[row["cell"]]
            few = [point for point in points if point["tried"] < FEW_TRIES]
            look = {"color": style["color"], "marker": style["marker"], "markersize": 5}
            (handle,) = axes.plot(*_xy(points), linestyle=style["line"], linewidth=1.4, **look)
            axes.plot(*_xy(few), linestyle="", markerfacecolor="white", **look)
            handles.setdefault(_name(row, varying), handle)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("depth in the tree")
        axes.set_xticks(range(1, max(point["depth"] for points in lines.values() for point in points) + 1))
        _plain(axes, "y")
    grid[0].set_ylim(0, 1.02)
    grid[0].set_ylabel("accepted, given that the parent was")
    columns = min(len(handles), 2 * len(panels))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
    return figure


def _xy(points: Sequence[Row]) -> tuple[list[int], list[float]]:
    return [point["depth"] for point in points], [point["rate"] for point in points]


def _best(title: str, rows: list[dict[str, Any]], most: int) -> tuple[str, list[dict[str, Any]]]:
    """The rows with most tokens per step, in the order they stood in, where there are too many to draw."""
    if len(rows) <= most:
        return title, rows
    least = sorted((row["tokens_per_step"] for row in rows), reverse=True)[most - 1]
    return f"{title} (best {most} of {len(rows)})", [row for row in rows if row["tokens_per_step"] >= least][:most]


def _styles(summary: pd.DataFrame) -> dict[str, dict[str, Any]]:
    rows = metrics.rows_of(summary)
    trees = list(dict.fromkeys(row["method"] for row in rows if row["ssms"]))
    sets = list(dict.fromkeys(row["ssms"] for row in rows if row["ssms"]))
    styles = {}
    for row in rows:
        tree, draft = (trees.index(row["method"]), sets.index(row["ssms"])) if row["ssms"] else (0, 0)
        styles[row["cell"]] = {
            "color": PALETTE[tree % len(PALETTE)] if row["ssms"] else GREY,
            "marker": MARKERS[tree % len(MARKERS)],
            "line": LINES[draft % len(LINES)],
            "hatch": HATCHES[draft % len(HATCHES)],
        }
    return styles


def _name(row: Row, varying: Sequence[str]) -> str:
    settings = [f"{name.rpartition('.')[2]}={row[name]}" for name in varying if row[name] != ""]
    parts = [row["method"], row["ssms"], *settings]
    return "  ".join(filter(None, parts))


def _plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
