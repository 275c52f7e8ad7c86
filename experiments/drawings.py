"""Drawings of one token tree and of its mask; `python -m experiments.drawings` makes those of README and docs."""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import specjax as sj
from experiments import metrics, trace
from experiments.config import REPOSITORY
from specjax.request import prepare

# Weight and fill say the same as colour, for print and for eyes that see few colours.
ACCEPTED, EDGE = "#0072B2", "#999999"
EXAMPLE = "def fib(n):\n    if n < 2:\n        return"


def frame(nodes: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> pd.DataFrame:
    """A round's tree as a table: columns slot, parent (-1 for the root), depth, label, accepted (the root always is).

    Args:
      nodes: of one round of ``experiments.trace.rounds``; slots are numbered anew, without those that hold nothing.
      labels: what to write at each.
    """
    place = {node["slot"]: number for number, node in enumerate(nodes)} | {-1: -1}
    return pd.DataFrame(
        [
            {
                "slot": number,
                "parent": place[node["parent"]],
                "depth": node["depth"],
                "label": label,
                "accepted": node["accepted"] or number == 0,
            }
            for number, (node, label) in enumerate(zip(nodes, labels, strict=True))
        ]
    )


def tree(nodes: pd.DataFrame) -> Figure:
    """A token tree from left to right, the accepted path in bold on blue, from ``frame``'s columns."""
    rows = metrics.rows_of(nodes)
    x, y, right = _places(rows)
    lines = max(y) + 1
    figure = Figure(figsize=(0.4 + 0.085 * right, 0.3 + 0.27 * lines), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        at, parent = row["slot"], row["parent"]
        if parent >= 0:
            elbow = x[at] - 1.5
            ends = x[parent] + len(rows[parent]["label"]) + 0.8, x[at] - 0.8
            axes.plot(
                [ends[0], elbow, elbow, ends[1]],
                [y[parent], y[parent], y[at], y[at]],
                color=ACCEPTED if row["accepted"] else EDGE,
                linewidth=2.4 if row["accepted"] else 0.8,
                zorder=2 if row["accepted"] else 1,
                solid_capstyle="butt",
            )
        axes.text(
            x[at],
            y[at],
            row["label"],
            family="monospace",
            fontsize=9,
            va="center",
            weight="bold" if row["accepted"] else "normal",
            color="white" if row["accepted"] else "black",
            bbox={
                "boxstyle": "round,pad=0.22",
                "facecolor": ACCEPTED if row["accepted"] else "white",
                "edgecolor": ACCEPTED if row["accepted"] else EDGE,
                "linewidth": 0.8,
            },
            zorder=3,
        )
    axes.set_xlim(-1, right + 1)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.set_axis_off()
    return figure


def mask(nodes: pd.DataFrame) -> Figure:
    """The ancestor mask of a tree, from ``frame``'s columns: dark where the node of the row sees that of the column.

    The first column stands for everything committed, which all nodes see; rows of the accepted path are blue.
    """
    rows = metrics.rows_of(nodes)
    seen = np.asarray(sj.ancestor_mask(jnp.asarray([row["parent"] for row in rows])))
    labels, count = [row["label"] for row in rows], len(rows)
    side = 0.6 + 0.24 * count
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        for column in (-1, *np.flatnonzero(seen[at])):
            cell = Rectangle((column - 0.5, at - 0.5), 1, 1, edgecolor="white", linewidth=0.4)
            cell.set_facecolor(ACCEPTED if row["accepted"] else "#555555")
            cell.set_hatch("////" if column < 0 else "")
            axes.add_patch(cell)
    axes.set_xticks(range(-1, count), ["prefix", *labels], rotation=90, fontsize=7, family="monospace")
    axes.set_yticks(range(count), labels, fontsize=7, family="monospace")
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["accepted"] else "normal")
    edges = np.arange(-1, count) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.4)
    axes.tick_params(which="both", length=0, labeltop=True, labelbottom=False)
    axes.set_axisbelow(True)
    axes.set_aspect("equal")
    axes.set_xlim(-1.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_ylabel("this node sees ..", fontsize=8)
    return figure


def written(tokenizer, tokens: Iterable[int]) -> list[str]:
    """Tokens as they are to be read in a drawing: quoted, so that spaces and line breaks show."""
    return [repr(tokenizer.decode([token])) for token in tokens]


def _places(rows: Sequence[metrics.Row]) -> tuple[list[float], list[int], float]:
    """Where nodes stand: x [N] in characters, by depth; y [N] in lines, one a leaf; and where the drawing ends."""
    widths = [0] * (max(row["depth"] for row in rows) + 1)
    for row in rows:
        widths[row["depth"]] = max(widths[row["depth"]], len(row["label"]))
    starts = [0, *itertools.accumulate(width + 4 for width in widths)]
    y, leaves = [0] * len(rows), 0

    def place(slot: int) -> None:
        nonlocal leaves
        y[slot] = leaves
        children = [row["slot"] for row in rows if row["parent"] == slot]
        for child in children:
            place(child)
        leaves += not children

    place(0)
    return [starts[row["depth"]] for row in rows], y, starts[-1] - 4


def main() -> int:
    """Write docs/images/tree.png and docs/images/mask.png."""
    zoo, images = REPOSITORY / "experiments/zoo", REPOSITORY / "docs/images"
    tokenizer = sj.load_tokenizer(zoo / "target")
    target, ssm = sj.load_model(zoo / "target"), sj.load_model(zoo / "ssm_a")
    prompt = tokenizer.encode(EXAMPLE).ids
    _, (first, *_), _ = trace.rounds(prepare(target, [prompt], drafts=[ssm], tree=(3, 2, 1, 1), max_new_tokens=6))
    nodes = frame(first["nodes"], written(tokenizer, (node["token"] for node in first["nodes"])))
    for name, figure in (("tree", tree(nodes)), ("mask", mask(nodes))):
        figure.savefig(images / f"{name}.png", dpi=130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
