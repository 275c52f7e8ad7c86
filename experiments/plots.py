"""Figures from summary tables; readable in print and without colour vision."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import metrics
from experiments.metrics import Row

# Okabe and Ito's palette, less its yellow and black. A method has one colour and marker in all figures, a set of drafts
# and settings one line and hatch. There is a marker more than there are colours, so that forty methods differ in one.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#777777"
MARKERS = "osD^vPX"
LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))
HATCHES = ("", "////", "....", "xxxx", "----", "oooo")
MOST_BARS, MOST_LINES = 40, 12
FEW_TRIES = 20


def methods(summary: pd.DataFrame) -> Figure:
    """Tokens per step and speed-up, a bar per cell, a row of axes per panel, from ``metrics.summarize``."""
    panels = [_best(title, rows, MOST_BARS) for title, rows in metrics.panels(summary)]
    heights = [0.9 + 0.27 * len(rows) for _, rows in panels]
    styles, varying = _styles(summary), metrics.varying(summary)
    longest = max(len(_name(row, varying)) for _, rows in panels for row in rows)
    figure = Figure(figsize=(max(9, 6.5 + 0.075 * longest), sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col", sharey="row", height_ratios=heights)
    for (title, rows), (left, right) in zip(panels, grid, strict=True):
        left.set_title(title, loc="left", fontsize=9)
        for axes, name, suffix in ((left, "tokens_per_step", ""), (right, "speedup", "x")):
            for place, row in enumerate(rows):
                style, value = styles[row["cell"]], row[name]
                if np.isnan(value):  # a replayed cell has no time
                    continue
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


def ranks(rates: pd.DataFrame) -> Figure:
    """How often the draw of each rank is accepted at each depth, as a table of shades with the numbers in it.

    Args:
      rates: columns depth (from 1), rank (from 1) and rate, a row per cell of the table; as of ``replay.calibrate``.
    """
    table = rates.pivot(index="depth", columns="rank", values="rate")
    rows, columns = table.shape
    figure = Figure(figsize=(1.6 + 0.62 * columns, 1.0 + 0.36 * rows), layout="constrained")
    axes = figure.subplots()
    axes.imshow(table, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for (row, column), rate in np.ndenumerate(table.to_numpy()):
        axes.text(column, row, f"{rate:.2f}", ha="center", va="center", color="white" if rate > 0.5 else "black")
    axes.set_xticks(range(columns), [str(rank) for rank in table.columns])
    axes.set_yticks(range(rows), [str(depth) for depth in table.index])
    axes.set_xlabel("rank among the SSM's tokens")
    axes.set_ylabel("depth")
    axes.tick_params(length=0, labelsize=8)
    return figure


def sizes(trees: pd.DataFrame) -> Figure:
    """Tokens per step against drafted nodes, a line for the best tree of each kind at every size.

    Args:
      trees: columns kind, nodes (below the root) and tokens_per_step, a row per tree.
    """
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, (kind, group) in enumerate(trees.groupby("kind", sort=False)):
        best = group.groupby("nodes").tokens_per_step.max().cummax()
        color, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        axes.scatter(group.nodes, group.tokens_per_step, s=4, color=color, alpha=0.25, linewidth=0)
        axes.plot(
            best.index,
            best,
            color=color,
            linestyle=LINES[place % len(LINES)],
            marker=marker,
            markersize=4,
            markevery=max(1, len(best) // 8),
            label=str(kind),
        )
    axes.set_xlabel("nodes drafted for a step")
    axes.set_ylabel("tokens per verify step")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _plain(axes, "both")
    return figure


def frontier(points: pd.DataFrame) -> Figure:
    """Speed of one request against that of all together; what nothing beats in both is joined by a line.

    Args:
      points: columns method, batch, per_request and total (both tokens per second), a row per cell.
    """
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, (method, group) in enumerate(points.groupby("method", sort=False)):
        color, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        axes.scatter(group.per_request, group.total, s=36, color=color, marker=marker, label=str(method))
    for row in metrics.rows_of(points):
        at = (row["per_request"], row["total"])
        axes.annotate(f"{row['batch']}", at, (5, 4), textcoords="offset points", fontsize=8)
    ordered = points.sort_values("per_request", ascending=False)
    best = ordered[ordered.total > ordered.total.cummax().shift(fill_value=-np.inf)]
    axes.plot(best.per_request, best.total, color=GREY, linewidth=1, zorder=0)
    axes.set_xlim(0, 1.15 * points.per_request.max())
    axes.set_ylim(0, 1.15 * points.total.max())
    axes.set_xlabel("tokens per second of one request")
    axes.set_ylabel("tokens per second of the batch")
    axes.legend(frameon=False, fontsize=8)
    _plain(axes, "both")
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
    rows, varying = metrics.rows_of(summary), metrics.varying(summary)
    setting = lambda row: (row["ssms"], *(row[name] for name in varying))
    trees = list(dict.fromkeys(row["method"] for row in rows if row["ssms"]))
    settings = list(dict.fromkeys(setting(row) for row in rows if row["ssms"]))
    styles = {}
    for row in rows:
        tree, draft = (trees.index(row["method"]), settings.index(setting(row))) if row["ssms"] else (0, 0)
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


def _plain(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
