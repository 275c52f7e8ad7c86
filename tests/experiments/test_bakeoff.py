"""The bake-off: recorded trees are the library's, paths merged by hand, and what the report says."""

import functools

import jax
import numpy as np
import pandas as pd
import pytest

import specjax as sj
from experiments import bakeoff, bakeoff_report, config
from experiments.estimate import Estimate
from experiments.recorded import expected, iid_paths, prompts_of, record, sampled
from specjax.request import prepare
from specjax.testing import table_model
from specjax.tree import check_tree
from specjax.verify.joint import enumerate_trees, in_chunks, joint, node_logits, path_law, target_law, walk_law
from specjax.verify.paths import traversal
from specjax.verify.rules import multi_step

V, PATHS, LENGTH = 3, 3, 2


@functools.cache
def forest():
    """Every tree of three i.i.d. paths of two tokens, for four random problems, and their targets."""
    rng = np.random.default_rng(0)
    table = lambda levels: [rng.dirichlet([0.4] * V, (4, *(V,) * level)) for level in range(levels)]
    return enumerate_trees([table(LENGTH)], ("iid",), [[PATHS], [1]]), table(LENGTH + 1)


@pytest.mark.parametrize("per_copy", [True, False])
@pytest.mark.parametrize(("count", "length"), [(3, 2), (2, 2), (3, 1), (1, 2)])
def test_merged_paths_are_the_prefixes_of_the_paths(count, length, per_copy):
    whole = forest()[0].trees
    merged = jax.device_get(iid_paths(whole, count, length, per_copy))
    for row in range(0, len(whole.tokens), 97):
        paths = whole.tokens[row, 1:].reshape(PATHS, LENGTH)[:count, :length].tolist()
        tree = jax.tree.map(lambda field, row=row: field[row], merged)
        check_tree(tree)
        at, nodes = {0: ()}, {}
        for slot in np.flatnonzero(tree.valid):
            if slot:
                at[slot] = (*at[int(tree.parents[slot])], int(tree.tokens[slot]))
            nodes[at[slot]] = tree.draw_tokens[slot][tree.draw_valid[slot]].tolist()
        assert len(nodes) == tree.valid.sum() and set(nodes) == {tuple(p[:n]) for p in paths for n in range(length + 1)}
        for node, draws in nodes.items():
            through = [path[len(node)] for path in paths if path[: len(node)] == list(node) and len(node) < length]
            assert draws == (through if per_copy or not node else through[:1])


@functools.cache
def compiled(rule):
    by_path = rule is traversal
    return jax.jit(functools.partial(path_law if by_path else walk_law, rule))


@pytest.mark.parametrize("rule", [multi_step, traversal])
def test_merged_paths_keep_the_text_exact_and_copies_are_worth_something(rule):
    """Although how often a merged node was drawn depends on the later draws."""
    whole, target = forest()
    logits, values = node_logits(whole, target), {}
    for count, per_copy in ((3, True), (3, False), (2, True)):
        with jax.enable_x64(True):
            trees = jax.device_get(iid_paths(whole.trees, count, LENGTH, per_copy))
            ends = in_chunks(compiled(rule), trees, logits)
        result = joint(ends, whole, target)  # slots stay, and with them their paths
        np.testing.assert_allclose(result.law, target_law(target), atol=1e-12)
        values[count, per_copy] = result.block_efficiency
    assert (values[3, True] >= values[3, False] - 1e-12).all() and (values[3, True] > values[3, False] + 1e-3).any()
    assert (values[3, True] > values[2, True]).all()


TABLES = np.random.default_rng(1).normal(size=(2, 5, 5))


@functools.cache
def recordings():
    options = dict(warp=sj.Warp(1.0), seeds=range(20), eos_ids=[4])
    target, draft = (table_model(2 * table) for table in TABLES)
    text = sj.generate(target, [[0]] * 20, max_new_tokens=6, **options).tokens
    plan = prepare(target, [[0]] * 20, drafts=[draft], tree=(2, 1), draft_mode="iid", max_new_tokens=6, **options)
    return record(plan, 5), text


def test_recorded_positions_are_those_of_the_incremental_text_until_it_ends():
    seen, text = recordings()
    for step, item in enumerate(seen):
        np.testing.assert_array_equal(item.running, [len(row) > step + 1 for row in text])
        roots = [int(row[step]) for row in text if len(row) > step + 1]
        np.testing.assert_array_equal(np.asarray(item.trees.tokens)[np.asarray(item.running), 0], roots)
        np.testing.assert_allclose(item.logits[:, 0], 2 * TABLES[0][np.asarray(item.trees.tokens[:, 0])], rtol=1e-6)
    assert not all(seen[-1].running) and any(seen[-1].running)


def test_expectations_and_samples_are_of_the_running_rows():
    (first, *rest, last), _ = recordings()
    running = [[row for row, runs in enumerate(item.running) if runs] for item in (first, *rest, last)]
    assert prompts_of([first, *rest, last]).tolist() == sum(running, [])
    for item in (first, last):
        by_depth, accepted = expected("multi_step", item), sampled("multi_step", item)
        assert by_depth.shape == (int(item.running.sum()), 2) and accepted.shape == by_depth.shape[:1]
        assert (by_depth[:, 0] >= by_depth[:, 1]).all() and (by_depth <= 1 + 1e-6).all()
    again = sampled("multi_step", first)
    np.testing.assert_array_equal(again, sampled("multi_step", first))


def test_every_verifier_meets_the_draft_modes_it_is_exact_for():
    assert bakeoff.draft_modes((1, 1)) == ["iid", "shared_gumbel"]
    assert "hub" in bakeoff.draft_modes((2, 2)) and "hub" not in bakeoff.draft_modes((3, 1))
    assert bakeoff.entrants("top_k", (2, 2), 3) == ["naive_sampling", "optimal"]
    assert bakeoff.entrants("top_k", (2, 2), 4096) == ["naive_sampling"]
    assert "block" in bakeoff.entrants("iid", (1, 1), 3) and "block" not in bakeoff.entrants("iid", (2,), 3)
    everyone = {name for mode in bakeoff.draft_modes((2, 2)) for name in bakeoff.entrants(mode, (2, 2), 3)}
    assert everyone == set(sj.verify.VERIFIERS) - {"block", "typical"}


def test_estimates_weigh_kinds_alike_and_know_that_positions_of_a_prompt_are():
    values = np.array([[0.0, 2.0, 4.0, 2.0], [10.0, 10.0, 10.0, 10.0]])
    mean, error = Estimate.of_kinds(values)
    assert mean == 6 and error == pytest.approx(np.std([0, 2, 4, 2], ddof=1) / 2 / 2)
    rng = np.random.default_rng(0)
    means, groups = rng.normal(size=20), np.tile(np.arange(20), 50)
    mean, error = Estimate.of_groups(means[groups], groups)  # 50 times the same says no more than once
    assert mean == pytest.approx(means.mean()) and error == pytest.approx(np.std(means, ddof=1) / np.sqrt(20))
    alone = rng.normal(size=1000)
    assert Estimate.of_groups(alone, np.arange(1000)).error == pytest.approx(np.std(alone, ddof=1) / np.sqrt(1000))
    assert Estimate(0.0, 0.0).from_zero == 0 and Estimate(-1.0, 0.5).from_zero == 2 and Estimate(1.0, 0.0).from_zero > 9


def test_the_report_says_which_order_holds():
    holds = [("a", "b", 0.5, 0.1), ("b", "c", 0.1, 0.1)]
    assert bakeoff_report.order(holds) == "The published order holds. Within two standard errors: b and c."
    assert bakeoff_report.order([("a", "b", -0.5, 0.1)]) == "The published order does NOT hold: b below a."
    cell = {"tree": (2, 1), "draft_mode": "iid"}
    rows = [
        {**cell, "verifier": "near", "tokens_expected": 2.0, "tokens_apart": 1.0},
        {**cell, "verifier": "coupled", "tokens_expected": None, "tokens_apart": None},
    ]
    assert "at most 1.0 standard errors" in bakeoff_report.agreement(pd.DataFrame(rows))
    rows.append({**cell, "verifier": "far", "tokens_expected": 2.0, "tokens_apart": 10.0})
    assert "FURTHER THAN 4: far on iid <2,1>" in bakeoff_report.agreement(pd.DataFrame(rows))


SMALL = """
name = "small"
[tabular]
models = 2
rows = 500
trees = [[2, 1]]
[zoo]
target = "{zoo}/target"
draft = "{zoo}/far"
num_prompts = 2
steps = 2
max_prompt_tokens = 20
trees = [[2, 1]]
[paths]
counts = [1, 2]
lengths = [1, 2]
"""


def test_the_whole_command_on_little(zoo, tmp_path, monkeypatch, capsys):
    # Each verifier, draft mode and tree is compiled, so only few of them.
    monkeypatch.setattr(bakeoff, "draft_modes", lambda tree: ["iid"])
    monkeypatch.setattr(bakeoff, "entrants", lambda mode, tree, vocab_size: ["naive_sampling", "multi_step"])
    monkeypatch.setattr(bakeoff, "PATHS", ("naive_sampling", "multi_step"))
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(zoo=zoo))
    assert bakeoff.main([str(path), "--out", str(tmp_path / "out")]) == 0
    tabular, models, paths = (pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("tabular", "zoo", "paths"))
    known = tabular.dropna(subset="tokens_expected").set_index("verifier")
    assert (abs(known["tokens_sampled"] - known["tokens_expected"]) < 4 * known["tokens_sampled_se"]).all()
    assert (abs(tabular["acceptance_sampled"] - tabular["acceptance_expected"]) < 0.1).all()
    assert (known["tokens_expected"] <= known["tokens_bound"] + 1e-12).all()
    assert list(known["tokens_expected"]) == sorted(known["tokens_expected"])
    assert list(models["verifier"]) == ["naive_sampling", "multi_step"]
    assert len(paths) == 2 * (2 * 2 + 1)
    for (_, count), rows in paths[paths["per_copy"]].groupby(["verifier", "paths"]):
        assert rows["tokens_expected"].is_monotonic_increasing, count
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| `multi_step` | 4.58 |" in text and "a token expands once" in text and "expands once per copy" in text
    assert "report.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "message"),
    [("zoo.trees=[[300, 300]]", "90301 nodes"), ("zoo.steps=1000", "context of 256")],
)
def test_requests_that_cannot_run_are_refused_before_anything_runs(zoo, tmp_path, monkeypatch, capsys, part, message):
    monkeypatch.setattr(bakeoff, "tabular", lambda *_: pytest.fail("it ran"))
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(zoo=zoo))
    assert bakeoff.main([str(path), "--set", part]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_config_is_refused(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text('name = "bad"\n[zoo]\nstep = 3\n')
    assert bakeoff.main([str(path)]) == 2
    assert "zoo.step: unknown key; did you mean zoo.steps?" in capsys.readouterr().err
    path.write_text('name = "bad"\n[zoo]\ntrees = [[]]\n[tabular]\ntrees = [[1, 1, 1]]\n')
    assert bakeoff.main([str(path)]) == 2
    told = capsys.readouterr().err
    assert "zoo.trees: expected expansion schedules" in told and "tabular.trees: [1, 1, 1] over 3 tokens" in told
    path.write_text('name = "bad"\n[zoo]\ntrees = []\n[tabular]\ntrees = [[4]]\n[paths]\ncounts = [1]\nlengths = []\n')
    assert bakeoff.main([str(path)]) == 2
    told = capsys.readouterr().err
    assert "zoo.trees: expected at least one entry" in told and "paths.lengths: expected at least one entry" in told
    assert "tabular.trees: [4] has nodes of 4 draws" in told
    settings = config.load(bakeoff.Bakeoff, config.REPOSITORY / "configs" / "verifier_bakeoff.toml")
    assert max(settings.paths.counts) == 4 and max(settings.paths.lengths) == 8
