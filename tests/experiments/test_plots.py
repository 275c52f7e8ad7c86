"""Figures show what their tables hold, and what differs looks different."""

import numpy as np
import pandas as pd
import pytest

from experiments import drawings, plots


@pytest.fixture
def nodes():
    """A root, two children, and one below the first, which was accepted with its parent; slot 2 holds nothing."""
    found = [(0, -1, 0, False), (1, 0, 1, True), (3, 1, 2, True), (4, 0, 1, False)]
    names = ("slot", "parent", "depth", "accepted")
    return drawings.frame([dict(zip(names, node)) for node in found], ["'a'", "'b'", "'c'", "'d'"])


def test_a_drawing_numbers_nodes_without_the_slots_that_hold_nothing(nodes):
    assert nodes.slot.tolist() == [0, 1, 2, 3]
    assert nodes.parent.tolist() == [-1, 0, 1, 0]
    assert nodes.accepted.tolist() == [True, True, True, False]


def test_a_tree_shows_every_node_and_the_accepted_path_in_bold(nodes):
    (axes,) = drawings.tree(nodes).axes
    assert [(text.get_text(), text.get_fontweight()) for text in axes.texts] == [
        ("'a'", "bold"),
        ("'b'", "bold"),
        ("'c'", "bold"),
        ("'d'", "normal"),
    ]
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places["'a'"][0] < places["'b'"][0] == places["'d'"][0] < places["'c'"][0]  # by depth
    assert places["'b'"][1] == places["'c'"][1] != places["'d'"][1]  # a leaf a line
    assert sorted(line.get_linewidth() for line in axes.lines) == [0.8, 2.4, 2.4]


def test_a_mask_has_a_cell_for_the_prefix_and_for_every_ancestor(nodes):
    (axes,) = drawings.mask(nodes).axes
    cells = {(round(cell.get_y() + 0.5), round(cell.get_x() + 0.5)) for cell in axes.patches}
    prefix = {(row, -1) for row in range(4)}
    assert cells == prefix | {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 3)}


def test_the_frontier_joins_what_nothing_beats_in_both():
    points = pd.DataFrame(
        {
            "method": ["plain", "plain", "tree", "tree"],
            "batch": [1, 4, 1, 4],
            "per_request": [10.0, 8.0, 15.0, 6.0],
            "total": [10.0, 32.0, 15.0, 24.0],
        }
    )
    (axes,) = plots.frontier(points).axes
    (line,) = axes.lines
    assert sorted(zip(*line.get_data())) == [(8.0, 32.0), (15.0, 15.0)]
    assert [text.get_text() for text in axes.texts] == ["1", "4", "1", "4"]


def test_the_best_of_each_kind_never_falls_with_size():
    trees = pd.DataFrame({"kind": "chain", "nodes": [1, 1, 2, 3], "tokens_per_step": [1.5, 1.7, 1.6, 2.0]})
    (axes,) = plots.sizes(trees).axes
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [1.7, 1.7, 2.0]


def test_acceptance_by_rank_writes_every_rate():
    rates = pd.DataFrame([{"depth": d + 1, "rank": r + 1, "rate": rate} for (d, r), rate in np.ndenumerate(np.eye(2))])
    (axes,) = plots.ranks(rates).axes
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.00", "0.00", "1.00"]


def test_cells_of_one_method_with_other_settings_look_different():
    common = {"run.name": "x", "decode.temperature": 1.0, "decode.top_k": 0, "decode.top_p": 1.0, "ssms": "ssm_a"}
    common |= {"drafting": "iid", "verifying": "multi_step", "tokens_per_step": 2.0}
    methods = [f"<{width},1>" for width in range(1, 9)]  # more than there are colours
    cells = [
        {**common, "cell": f"{method} {size}", "method": method, "run.batch_size": size}
        for method in methods
        for size in (1, 4, 8)
    ]
    summary = pd.DataFrame(cells)
    points = [{"cell": cell["cell"], "depth": 1, "tried": 30, "rate": 0.5} for cell in cells[:12]]
    figure = plots.acceptance(summary[:12], pd.DataFrame(points))
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines[::2]]
    assert len(set(looks)) == len(looks) == 12
    styles = plots._styles(summary)
    assert len({(style["color"], style["marker"], style["line"]) for style in styles.values()}) == 24
    assert len({(style["color"], style["marker"], style["hatch"]) for style in styles.values()}) == 24
