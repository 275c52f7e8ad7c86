"""The papers' tables: closed forms against enumeration and decoding, claims that can fail, configs that are valid."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from experiments import config, tables, tables_report, workshop
from experiments.tables import Above, Result, Row, Table, Value
from specjax import exact

CONFIGS = sorted((config.REPOSITORY / "configs/tables").glob("*.toml"))


@pytest.mark.parametrize("rule", tables.SUMMED)
def test_closed_forms_are_the_law_s_sum_over_all_draws(rule):
    rng = np.random.default_rng(0)
    for p, q in rng.dirichlet([0.5] * 4, (4, 2)):
        found = getattr(tables, rule)(jnp.asarray(p), jnp.asarray(q), 3)
        for draws in (1, 2, 3):
            wanted = exact.expected_acceptance(rule, p, q, num_draws=draws, law="iid")
            assert float(found[draws - 1].sum()) == pytest.approx(float(wanted), abs=1e-6)
            assert np.all(np.asarray(found[draws - 1]) <= p + 1e-6)


def test_equal_distributions_are_accepted_at_once():
    p = jnp.array([0.5, 0.5, 0.0])
    assert [float(each.sum()) for each in tables.multi_step(p, p, 2)] == [1.0, 1.0]


def write(path, zoo, row: str, drafts: str = '["far"]', **settings) -> str:
    prompts = path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):"}) for n in range(10, 34)))
    settings = {"title": "T", "quantity": "tokens", "columns": ["<2,1>"], "trees": [[2, 1]], **settings}
    lines = [
        *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
        f'[run]\nname = "t"\nprompts = "{prompts}"\nnum_prompts = 12\nmax_new_tokens = 32\nbatch_size = 12',
        f'[models]\ntarget = "{zoo / "target"}"\ndrafts = ["{zoo / "far"}"]',
        f"[decode]\ndrafts = {drafts}\n{row}",
    ]
    config_path = path / "table.toml"
    config_path.write_text("\n".join(lines))
    return str(config_path)


MULTI_STEP = 'decode = { temperature = 1.5, draft_mode = "iid", verifier = "multi_step" }'


def test_a_table_from_config_to_report(zoo, tmp_path, capsys, monkeypatch):
    """What is summed is what decoding counts: the same tree, given as paths, is decoded."""
    target = sj.testing.context_model(0, 256)
    marks, logits = target.params
    noise = np.random.default_rng(1).normal(size=logits.shape)
    models = {"target": target, "near": target, "far": target._replace(params=(marks, logits + noise))}
    monkeypatch.setattr(workshop, "_load_model", lambda path, *_: models[path.rpartition("/")[2]])
    row = f"""
[[row]]
name = "greedy"
published = ["9.99"]
models = "some 7B"
source = "somewhere"
[[row]]
name = "summed"
{MULTI_STEP}
[[row]]
name = "decoded"
trees = [[[0], [1], [0, 0], [1, 0]]]
{MULTI_STEP}
[[row]]
name = "best"
optimal = 3
[[above]]
row = "summed"
than = "greedy"
factor = 9
[[real]]
target = "{zoo / "target"}"
drafts = ["{zoo / "near"}"]
"""
    path = write(tmp_path, zoo, row)
    assert tables.main([path, "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out/tables.csv").read_text().splitlines()))
    found = {row["row"]: row for row in rows[:4]}
    assert [row["way"] for row in found.values()] == ["replayed", "summed", "decoded", "replayed"]
    summed, decoded = ((float(found[name]["mean"]), float(found[name]["error"])) for name in ("summed", "decoded"))
    assert abs(summed[0] - decoded[0]) < 4 * np.hypot(summed[1], decoded[1]) < 1
    # The real pair is a perfect draft here: rounds emit three of 31 tokens, and with the best tree, a chain, four.
    perfect = {row["row"]: float(row["mean"]) for row in rows[4:]}
    assert perfect == pytest.approx(
        {"greedy": 31 / 11, "summed": 31 / 11, "decoded": 31 / 11, "best": 31 / 8}, rel=1e-5
    )
    report = (tmp_path / "out/report.md").read_text()
    assert "| replayed | 9.99 | some 7B |" in report and "- some 7B: somewhere" in report
    assert "NOT as published: summed should be at least 9 times greedy" in report
    assert str(tmp_path / "out/report.md") in capsys.readouterr().out


def result(**rows: list[float]) -> Result:
    table = Table(
        title="T",
        quantity="tokens",
        columns=("a", "b"),
        run=tables.Run("t"),
        models=tables.Models("target", ("draft",)),
        row=tuple(Row(name) for name in rows),
        trees=((1,), (2,)),
        rises=True,
        above=(Above("high", "low", factor=1.1, first=2),),
    )
    return Result(table, table.models, {name: [Value(v, 0.1, "summed") for v in row] for name, row in rows.items()}, [])


def test_claims_are_checked():
    assert tables_report.verdicts(result(high=[1.0, 2.4], low=[1.5, 2.0])) == [
        "Every row rises, as published.",
        "high is at least 1.1 times low from b on, as published: 1.20 times.",
    ]
    bad = tables_report.verdicts(result(high=[2.0, 1.9], low=[1.0, 1.8]))
    assert bad[0] == "Not rising along the row: high."
    assert bad[1] == "NOT as published: high should be at least 1.1 times low from b on, and is 1.06 times."


def test_claims_about_what_was_not_measured_are_not_borne_out():
    nan = float("nan")
    lines = tables_report.verdicts(result(high=[nan, nan], low=[1.5, 2.0]))
    assert lines[0] == "Not measured, so rising or not: high."
    assert lines[1].startswith("Not measured: whether high is at least 1.1 times low from b on")
    for low in ([0.0, 0.0], [0.0, nan]):
        assert tables_report.verdicts(result(high=[1.0, 2.0], low=low))[-1] == lines[1]
    assert tables_report._show(Value(nan, nan, "decoded")) == "not measured"
    assert np.isnan(tables.ratio(np.zeros(2), np.zeros(2))).all()


def test_paths_are_the_inverse_of_from_paths():
    wanted = ((0,), (0, 2), (0, 2, 0), (1,), (3,))
    assert set(tables.paths(sj.Topology.from_paths(wanted))) == set(wanted)


def test_accepted_lengths_leave_out_rounds_that_were_cut():
    rounds = [[sj.Round(1, 1, 2, (1,), ()), sj.Round(1, 0, 1, (1,), ()), sj.Round(1, 1, 1, (1,), ())]]
    assert [value.mean for value in tables._distribution(rounds, 2, "replayed")] == [0.5, 1.0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_table_has_a_valid_config(path, monkeypatch):
    table = config.load(Table, path)
    monkeypatch.setattr(tables, "at_hand", lambda name: "llama" not in name)
    assert list(tables.pairs(table)) == [table.models]
    assert tables.cells_of(table, table.models).keys() == {row.name for row in table.row}
    monkeypatch.setattr(tables, "at_hand", lambda name: True)
    (_, real) = tables.pairs(table)
    for row in tables.cells_of(table, real).values():
        assert all(cell.config.decode.drafts == ("llama-68m",) for cell in row)
        assert all(cell.config.models.target == "huggyllama/llama-7b" for cell in row)


def test_there_is_a_config_for_each_table():
    assert len(CONFIGS) == 6


def test_weights_that_are_not_here_are_not_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    assert not tables.at_hand("nobody/nothing") and not tables.at_hand("a/b/c") and tables.at_hand(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ('[[row]]\nname = "a"\ntrees = [[1], [2]]', {}, "'a' has 2 trees; expected 1"),
        ('[[row]]\nname = "a"\npublished = ["1", "2"]', {}, "'a' has 2 published values"),
        ('[[row]]\nname = "a"\n[[above]]\nrow = "a"\nthan = "c"', {}, "no row is called 'c'"),
        ('[[row]]\nname = "a"\n[[above]]\nrow = "a"\nthan = "a"\nfirst = 2', {}, "first is 2; expected at most 1"),
        ('[[row]]\nname = "a"\ndecode = { verifier = "multistep" }', {}, "unknown verifier 'multistep'"),
        ('[[row]]\nname = "a"\ndecode = { tempature = 1 }', {}, "row 'a': decode.tempature: unknown key"),
        (f'[[row]]\nname = "a"\ntrees = [[[0], [1]]]\n{MULTI_STEP}', {"quantity": "success"}, "row 'a': it is decoded"),
    ],
)
def test_a_bad_table_is_refused(zoo, tmp_path, capsys, row, settings, words):
    assert tables.main([write(tmp_path, zoo, row, **settings), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
