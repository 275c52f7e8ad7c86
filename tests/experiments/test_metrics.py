"""The numbers: ratios are total over total, cut rounds count up to the cut, slower is less than one (case B38)."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments import compare, metrics, plots, report, store, workshop

SETTINGS = {
    "method": "<2,1>",
    "run.seed": 0,
    "decode.tree": [2, 1],
    "decode.drafts": ["ssm_a"],
    "decode.draft_mode": "top_k",
    "decode.verifier": "naive_sampling",
    "decode.temperature": 0.0,
    "decode.top_k": 0,
    "decode.top_p": 1.0,
}


def record(cell="c", prompt=0, **changes) -> dict:
    row = {
        "cell": cell,
        "prompt": prompt,
        "name": f"p{prompt}",
        "new_tokens": 11,
        "steps": 5,
        "emitted": 10,
        "drafted": 20,
        "accepted": 5,
        "tried_by_depth": [5, 3],
        "accepted_by_depth": [3, 2],
        "accepted_by_source": [5],
        "accepted_by_source_alone": [5],
        "prefill_seconds": [9.0],
        "decode_seconds": [1.0],
        "baseline_emitted": 10,
        "baseline_decode_seconds": [2.0],
        "same_text_promised": True,
        "same_text": True,
        "compiles": 0,
        "compile_seconds": 0.0,
        **SETTINGS,
    }
    return {**row, **changes}


def summary(*records: dict) -> dict:
    order = list(dict.fromkeys(row["cell"] for row in records))
    (row,) = metrics.rows_of(metrics.summarize(metrics.frame(records, order)))
    return row


def test_ratios_are_total_over_total():
    row = summary(record(), record(prompt=1, emitted=90, steps=10, decode_seconds=[3.0], baseline_emitted=90))
    assert row["tokens_per_step"] == 100 / 15  # the mean of the ratios would be 5.5
    assert row["tokens_per_step_low"] == 2 + 7 / 4 and row["tokens_per_step_high"] == 9 - 7 / 4
    assert row["tokens_per_step_resampled_low"] == 2 and row["tokens_per_step_resampled_high"] == 9
    assert row["decode_seconds"] == 4 and row["tokens_per_second"] == 25
    assert row["speedup"] == 1.0
    assert row["prefill_seconds"] == 18  # apart from decode


def test_texts_of_different_lengths_are_compared_by_tokens_per_second():
    row = summary(record(emitted=5, decode_seconds=[1.0], baseline_emitted=50, baseline_decode_seconds=[5.0]))
    assert row["speedup"] == 0.5  # wall times alone would say five times as fast


def test_speed_is_the_median_of_passes_and_shows_their_extremes():
    row = summary(record(decode_seconds=[1.0, 2.0, 4.0], baseline_decode_seconds=[2.0, 2.0, 1.0]))
    assert row["tokens_per_second"] == 5 and row["speedup"] == 1.0
    assert row["speedup_low"] == 2.5 / 10 and row["speedup_high"] == 10 / 5


def test_a_run_without_rounds_has_no_ratios():
    row = summary(record(emitted=0, steps=0, drafted=0, accepted=0, new_tokens=1))
    assert row["tokens_per_step"] != row["tokens_per_step"] and row["steps"] == 0


def test_counts_of_rounds():
    def round_(accepted, emitted, *proposers):
        return SimpleNamespace(
            drafted=4, accepted=accepted, emitted=emitted, drafted_by_depth=(2, 2), proposers=proposers
        )

    # Refused at once; refused at depth 2; all accepted; cut by the budget behind an accepted token of depth 1.
    rounds = [round_(0, 1), round_(1, 2, (0, 2)), round_(2, 3, (0,), (2,)), round_(1, 1, (0,))]
    counts = workshop._counts(workshop.Measured(list(range(8)), "length", rounds, 0, [], []))
    assert (counts["steps"], counts["emitted"], counts["drafted"], counts["accepted"]) == (4, 7, 16, 4)
    assert counts["accepted_by_depth"] == [3, 1]
    assert counts["tried_by_depth"] == [4, 2]  # nobody knows what the cut round would have accepted at depth 2
    assert counts["drafted_by_depth"] == [8, 8]
    assert counts["accepted_by_source"] == [3, 0, 2]
    assert counts["accepted_by_source_alone"] == [2, 0, 1]


def test_credit_is_summed_over_prompts_and_told_by_source():
    drafts = {"decode.drafts": ["ssm_a", "ssm_b", "ssm_c"]}
    rows = [
        record("c", accepted=6, accepted_by_source=[4, 3], accepted_by_source_alone=[3, 2], **drafts),
        record("c", 1, accepted=4, accepted_by_source=[2], accepted_by_source_alone=[2], **drafts),
        record("single"),
    ]
    table = metrics.frame(rows, ["c", "single"])
    assert metrics.rows_of(metrics.credit_by_source(table)) == [
        {"cell": "c", "source": "ssm_a", "accepted": 6, "share": 0.6, "alone": 5, "alone_share": 0.5},
        {"cell": "c", "source": "ssm_b", "accepted": 3, "share": 0.3, "alone": 2, "alone_share": 0.2},
        {"cell": "c", "source": "ssm_c", "accepted": 0, "share": 0.0, "alone": 0, "alone_share": 0.0},
    ]
    lines = report._credit(table, metrics.summarize(table))
    assert "| `<2,1>` | ssm_a+b+c | greedy | `ssm_b` | 3 | 30% | 2 | 20% |" in lines
    assert report._credit(metrics.frame(rows[2:], ["single"]), metrics.summarize(table)) == []


def test_acceptance_by_depth_sums_over_prompts_of_different_depths():
    rows = [record(), record(prompt=1, tried_by_depth=[5], accepted_by_depth=[1])]
    table = metrics.acceptance_by_depth(metrics.frame(rows, ["c"]))
    assert metrics.rows_of(table) == [
        {"cell": "c", "depth": 1, "tried": 10, "accepted": 4, "rate": 0.4},
        {"cell": "c", "depth": 2, "tried": 3, "accepted": 2, "rate": pytest.approx(2 / 3)},
    ]


def test_panels_keep_what_may_be_compared_together():
    plain = {"method": "incremental", "decode.tree": [], "decode.drafts": []}
    hot = {"decode.temperature": 1.0}
    rows = [
        record("greedy", **plain),
        record("warm", **plain, **hot),
        record("tree"),
        record("hot", **hot),
        record("mss", **hot, **{"decode.verifier": "multi_step", "decode.draft_mode": "iid"}),
        record("noise", **hot, **{"decode.draft_mode": "shared_gumbel"}),
        record("copy", **hot, **{"method": "copy(3x7)", "decode.drafts": ["prompt_lookup"]}),
        record("plausible", **hot, **{"decode.verifier": "typical", "same_text_promised": False}),
    ]
    table = metrics.summarize(metrics.frame(rows, [row["cell"] for row in rows]))
    assert [(title, [row["cell"] for row in part]) for title, part in metrics.panels(table)] == [
        ("greedy, top_k drafts verified by naive_sampling", ["greedy", "tree"]),
        ("temperature 1, drafts verified by naive_sampling", ["warm", "hot", "noise", "copy"]),
        ("temperature 1, iid drafts verified by multi_step", ["warm", "mss"]),
        ("temperature 1, top_k drafts verified by typical (lossy)", ["warm", "plausible"]),
    ]
    assert report._same_text(metrics.rows_of(table)[-1]) == "not the target's"
    # How draws are made differs within a table, and is a column of it; a lookup makes none that has a name.
    assert metrics.varying(table) == ["drafting"]
    assert [row["drafting"] for row in metrics.rows_of(table)][4:7] == ["iid", "shared_gumbel", ""]
    labels = [label.get_text() for label in plots.methods(table).axes[2].get_yticklabels()]
    assert labels[1:] == [
        "<2,1>  ssm_a  drafting=top_k",
        "<2,1>  ssm_a  drafting=shared_gumbel",
        "copy(3x7)  prompt_lookup",
    ]


def test_the_verdict_names_every_cell_that_breaks_its_promise():
    rows = [record("a"), record("b"), record("b", 1, same_text=False), record("c", same_text_promised=False)]
    rows[3]["same_text"] = False
    lines = report.verdict(metrics.summarize(metrics.frame(rows, ["a", "b", "c"])))
    assert lines == ["greedy: <2,1> ssm_a: 1 of 2 prompts DIFFER."]
    good = report.verdict(metrics.summarize(metrics.frame(rows[:2], ["a", "b"])))
    assert good == ["greedy: all tokens identical to incremental decoding in all 2 cells."]


def test_settings_that_vary_are_told_apart():
    rows = [record("a"), record("b", **{"run.seed": 1})]
    table = metrics.summarize(metrics.frame(rows, ["a", "b"]))
    assert metrics.varying(table) == ["run.seed"]
    labels = [label.get_text() for label in plots.methods(table).axes[0].get_yticklabels()]
    assert labels == ["<2,1>  ssm_a  seed=0", "<2,1>  ssm_a  seed=1"]


def test_names_of_ensembles_are_short():
    assert metrics.short_names(["ssm_a", "ssm_b", "ssm_c"]) == "ssm_a+b+c"
    assert metrics.short_names(["ssm_a"]) == "ssm_a"
    assert metrics.short_names(["draft", "drift"]) == "draft+drift"
    assert metrics.short_names([]) == ""


def test_plots_of_large_sweeps_show_the_best():
    rows = [record(str(n), emitted=n, method=f"<{n + 1}>") for n in range(300)]
    table = metrics.summarize(metrics.frame(rows, [row["cell"] for row in rows]))
    axes = plots.methods(table).axes[0]
    assert len(axes.patches) == plots.MOST_BARS and "best 40 of 300" in axes.get_title(loc="left")
    assert axes.get_yticklabels()[-1].get_text().startswith("<300>")
    lines = plots.acceptance(table, metrics.acceptance_by_depth(metrics.frame(rows, [row["cell"] for row in rows])))
    assert len(lines.legends[0].get_texts()) == plots.MOST_LINES


def test_plots_of_incremental_decoding_alone():
    rows = [
        record(
            drafted=0, accepted=0, tried_by_depth=[], accepted_by_depth=[], **{"decode.tree": [], "decode.drafts": []}
        )
    ]
    table = metrics.frame(rows, ["c"])
    assert plots.acceptance(metrics.summarize(table), metrics.acceptance_by_depth(table)).axes == []
    assert len(plots.methods(metrics.summarize(table)).axes) == 2


def test_a_setting_that_no_cell_has_does_not_vary():
    unset = {"models.attention": [None, None], "decode.draft_warp.temperature": [np.nan, np.nan]}
    summary = pd.DataFrame({"drafting": ["iid", "iid"], "run.batch_size": [1, 4], **unset})
    assert metrics.varying(summary) == ["run.batch_size"]


def finished(directory, *rows: dict, **failed: str) -> store.Store:
    """A run with these rows, and cells that failed of what is given."""
    about = {"prompt_tokens": 7, "prompt_cut": False, "session": 0, "tokens": [1, 2], "run.prompts": "p.jsonl"}
    cells = {row["cell"]: {"method": "m", "rows": 1, "status": "done", "error": None} for row in rows}
    for cell, error in failed.items():
        cells[cell] = {"method": "m", "rows": 1, "status": "failed", "error": error}
    session = {"command": "c", "started": "s", "revision": None, "modified": False, "python": "3", "platform": "p"}
    run = {"name": "test", "padded": False, "prompts": "p.jsonl", "max_new_tokens": 9, "batch_size": 1, "repeats": 1}
    models = {"target": "t", "drafts": ["ssm_a"], "dtype": "float32"}
    header = {
        "config": {"run": run, "models": models, "decode": {}},
        "inputs": {"device": "CPU"},
        "cells": cells,
        "sessions": [{**session, "versions": {}}],
    }
    return store.Store(directory, header, [{"run.measure": "decode", **about, **row} for row in rows])


def markdown(run: store.Store) -> str:
    table = metrics.frame(run.rows, list(run.header["cells"]))
    return "\n".join(report._markdown(run.header, table, metrics.summarize(table)))


def line_of(text: str, word: str) -> str:
    (line,) = [line for line in text.splitlines() if word in line and line.startswith("|")]
    return line


def test_a_setting_that_some_cells_have_not_is_a_dash_and_matches(tmp_path):
    """In the report and beside other runs: one with the same cells, and one that has not got the setting at all."""
    name = "decode.draft_warp.top_k"
    some = finished(tmp_path, record("a", method="without"), record("b", method="with", **{name: 5}))
    text = markdown(some)
    assert "| ssm_a | - |" in line_of(text, "`without`") and "| ssm_a | 5 |" in line_of(text, "`with`")
    text = compare.markdown([some, some])
    assert [line_of(text, word).endswith("| identical |") for word in ("`without`", "`with`")] == [True, True]
    text = compare.markdown([some, finished(tmp_path, record("a", method="without"))])
    assert line_of(text, "`without`").endswith("| identical |") and line_of(text, "`with`").endswith("| - |")


def test_what_has_no_rounds_has_dashes(tmp_path):
    empty = record("a", steps=0, emitted=0, baseline_emitted=0, decode_seconds=[0.1], baseline_decode_seconds=[0.1])
    with np.errstate(invalid="ignore"):
        run = finished(tmp_path, empty, record("b"))
        for text in (markdown(run), compare.markdown([run, run]), metrics.one_line([empty])):
            assert "nan" not in text and "-" in text


def test_prompts_of_one_name_are_prompts_of_their_own(tmp_path):
    """Three, of which the last is another text in the second run."""
    rows = [record(prompt=number, name="same", tokens=[number]) for number in range(3)]
    text = markdown(finished(tmp_path, *rows))
    assert "3 prompts of p.jsonl" in text
    other = finished(tmp_path, *rows[:2], {**rows[2], "tokens": [9]})
    text = compare.markdown([finished(tmp_path, *rows), other])
    assert line_of(text, "`<2,1>`").endswith("| 1 of 3 differ |")


def test_the_report_gives_a_failure_s_reason(tmp_path):
    note = "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback."
    text = markdown(finished(tmp_path, record(), bad=f"Traceback\nValueError: too wide\n{note}\n"))
    assert "(`bad`): `ValueError: too wide`" in text and "simplicity" not in text


def test_a_run_without_a_finished_cell_has_no_report(tmp_path, capsys):
    with store.opened(tmp_path, {"config": {}, "inputs": {}}, {"a": {"rows": 1}}, {}):
        pass
    for directories in ([str(tmp_path)], [str(tmp_path)] * 2):
        assert report.main(directories) == 2
        assert f"{tmp_path}: no cell is finished" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "--out", str(tmp_path / "a.md")])
    assert "expected several runs" in capsys.readouterr().err
