"""Drawings of one token tree and of its mask; `python -m experiments.drawings` makes those of README and docs."""

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import specjax as sj
from experiments import metrics
from experiments.config import REPOSITORY
from specjax import decode
from specjax.request import prepare
from specjax.sampling import fold_in
from specjax.types import RoundKeys

# Weight and fill say the same as colour, for print and for eyes that see few colours.
ACCEPTED, EDGE = "#0072B2", "#999999"
EXAMPLE = "def fib(n):\n    if n < 2:\n        return"


def frame(tree: sj.TokenTree, labels: Sequence[str], accepted: Iterable[int] = ()) -> pd.DataFrame:
    """One unbatched tree as a table: columns slot, parent (-1 for the root), depth, label, accepted.

    Args:
      tree: a drafted tree; padding is left out, and slots are numbered anew.
      labels: [N] what to write at each slot of it.
      accepted: slots on the accepted path; the root always is.
    """
    kept = np.flatnonzero(np.asarray(tree.valid)).tolist()
    place = {slot: number for number, slot in enumerate(kept)} | {-1: -1}
    on_path = {0, *map(int, accepted)}
    return pd.DataFrame(
        [
            {
                "slot": number,
                "parent": place[int(tree.parents[slot])],
                "depth": int(tree.depths[slot]),
                "label": labels[slot],
                "accepted": slot in on_path,
            }
            for number, slot in enumerate(kept)
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


def first_round(
    target: sj.Model, drafts: Sequence[sj.Model], prompt: Sequence[int], **arguments: Any
) -> tuple[sj.TokenTree, list[int], list[int]]:
    """The tree that is drafted first behind a prompt, and what becomes of it.

    Args:
      target, drafts, prompt, arguments: as in ``specjax.generate``, for one prompt.

    Returns:
      (tree, slots, tokens): the unbatched tree, the slots of its accepted nodes, and the emitted tokens.
    """
    plan = prepare(target, [prompt], drafts=drafts, **arguments)
    state = plan.start()
    keys = RoundKeys(
        fold_in(state.streams.draft, state.lengths),
        fold_in(state.streams.path, state.lengths),
        state.streams.emit,
        state.lengths,
    )
    roots = state.tokens[jnp.arange(1), state.lengths - 1]
    drafted, _ = jax.jit(plan.spec.draft_propose)(plan.params.drafter, keys, state.drafter, roots, state.draft_warp)
    _, info = decode.run_round(plan.spec, plan.params, state)
    accepted, emitted = int(info.accepted[0]), int(info.emission.counts[0])
    slots = np.asarray(info.emission.path[0])[1 : accepted + 1].tolist()
    return jax.tree.map(lambda field: field[0], drafted), slots, info.emission.tokens[0, :emitted].tolist()


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
    prompt = tokenizer.encode(EXAMPLE).ids
    models = sj.load_model(zoo / "target"), [sj.load_model(zoo / "ssm_a")]
    drafted, accepted, _ = first_round(*models, prompt, tree=(3, 2, 1, 1))
    nodes = frame(drafted, written(tokenizer, np.asarray(drafted.tokens).tolist()), accepted)
    for name, figure in (("tree", tree(nodes)), ("mask", mask(nodes))):
        figure.savefig(images / f"{name}.png", dpi=130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
