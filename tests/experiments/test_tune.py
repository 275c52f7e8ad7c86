"""The tuner: what it ranks and decodes, and that its predictions are of what it measures."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import specjax as sj
from experiments import search, tune, tuner
from experiments.search import schedules
from experiments.tuner import KINDS, Confirmed, Tune
from specjax.models import DecoderConfig
from specjax.replay import DEVICES, Forwards, Latency, RankTrace, RoundCost, roofline

LLAMA = DecoderConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=4096,
)


@pytest.fixture
def tuned(zoo, tmp_path):
    """A finished run on tiny models; the draft is the target itself."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three")))
    path = tmp_path / "tune.toml"
    path.write_text(
        f"""
        [tune]
        name = "tiny"
        prompts = "{prompts}"
        num_prompts = 2
        max_new_tokens = 16
        max_nodes = 4
        max_depth = 1
        most_draws = 2
        confirm = 1
        repeats = 1
        devices = ["h200"]
        contexts = [512]
        [models]
        target = "{zoo / "target"}"
        drafts = ["{zoo / "near"}"]
        """
    )
    assert tune.main([str(path), "--out", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_a_run_confirms_the_best_of_each_kind(tuned):
    records = json.loads((tuned / "confirmed.json").read_text())
    # A draft that is never wrong makes every optimal tree a chain.
    assert {record["kind"] for record in records} == set(KINDS) - {"tree"}
    assert all(record["steps_agree"] and record["measured_ms"] > 0 for record in records)
    assert all(record["tokens_per_step"] > 1.8 for record in records if record["drafts"])
    report = (tuned / "report.md").read_text()
    assert "Verify steps of every prompt as replayed: " in report
    assert "(modelled)" in report
    assert (tuned / "predicted.png").stat().st_size > 10_000
    curve = Latency.load(tuned / "latency_target.json")
    assert curve.source.startswith("measured on")
    assert np.all(curve.seconds > 0)


def test_errors_are_of_what_was_not_fitted_to():
    """Errors of 10% and 30% beside a probe that is right by construction."""
    method = search.Candidate("chain", "<1>", sj.Topology.from_schedule((1,)), (0,), 1.5, np.array([3]))
    found = [
        Confirmed(method, 1, predicted, 10.0, steps_agree, fresh)
        for predicted, steps_agree, fresh in ((11.0, True, True), (7.0, False, True), (10.0, True, False))
    ]
    errors, steps = tune.verdict(found, near_ties=4)
    assert "over 2 decoded methods" in errors
    assert "20.0% (largest 30.0%)" in errors
    assert steps == "Verify steps of every prompt as replayed: 2 of 3 methods; 4 near ties in the texts."
    assert "no prediction was put to the test" in tune.verdict(found[2:], 0)[0]


def test_every_schedule_is_there_once():
    """All compositions into levels, counted another way; none has more nodes."""
    found = list(schedules(10))
    assert len(set(found)) == len(found)
    assert all(1 + np.cumprod(schedule).sum() <= 10 for schedule in found)

    def count(budget: int) -> int:  # trees below one node, or none; k children share what is left evenly
        return 1 + sum(count((budget - k) // k) for k in range(1, budget + 1))

    assert len(found) + 1 == count(9)
    assert max(map(len, schedules(30, 4))) == 4


def test_shapes_without_trees():
    for schedule in schedules(14):
        own = sj.Topology.from_schedule(schedule).shape
        assert search.shape_of(schedule) == own


def test_a_modelled_card_reads_weights_until_it_multiplies():
    """A 7B model in bfloat16 on an H200: 13 GB at 4.8 TB/s; one row and sixteen cost the same, a thousand do not."""
    curve = roofline(LLAMA, DEVICES["h200"])
    one = curve(1, 1, 128)
    assert one == pytest.approx(2.7e-3, rel=0.05)
    assert curve(1, 16, 128) == pytest.approx(one, rel=1e-6)
    assert curve(64, 64, 128) > 10 * one
    assert curve(64, 1, 8192) > 5 * one  # caches
    assert curve.source == "modelled for H200 SXM"
    # So on such a card large trees are chosen at batch 1, and small ones at batch 64.
    small = DecoderConfig(**{**LLAMA.__dict__, "num_layers": 2, "hidden_size": 1024, "intermediate_size": 2816})
    cost = RoundCost(curve, (roofline(small, DEVICES["h200"]),))
    ranks = np.random.default_rng(0).geometric(0.5, (1, 8, 64)).astype(np.int32) - 1
    near = np.zeros(ranks.shape, bool)
    trace = RankTrace(np.zeros((8, 64), np.int32), np.full(8, 64, np.int32), ranks, near, near[0], np.full((8, 64), -1))
    bounds = search.Bounds(max_nodes=40, max_depth=4, most_draws=6, screen=500)
    sizes = []
    for batch in (1, 16, 64):
        best = search.rank(trace, bounds, cost, batch, 512, finished_rows_wait=False)[0]
        sizes.append(best.candidate.tree.shape.num_nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_curves_are_linear_between_their_points_and_beyond():
    seconds = np.array([[[1.0], [2.0], [6.0]], [[2.0], [4.0], [12.0]]])
    curve = Latency("measured on paper", (1, 3), (1, 2, 4), (128,), seconds)
    assert curve(1, 2, 128) == 2.0
    assert curve(1, 3, 999) == 4.0
    assert curve(2, 2, 128) == 3.0
    assert curve(5, 8, 128) == pytest.approx(3 * (6 + 2 * 4))


def test_overheads_are_fitted_to_rounds():
    curve = Latency("measured on paper", (1,), (1, 2), (128,), np.array([[[1.0], [2.0]]]))
    bare = [Forwards(1.0, 0.0), Forwards(4.0, 2.0), Forwards(9.0, 3.0), Forwards(9.0, 8.0)]
    cost = RoundCost(curve, (curve,)).fitted(bare, [0.5 + 1.2 * one.target + 2 * one.drafts for one in bare])
    assert cost[2:] == pytest.approx((1.2, 2.0, 0.5))
    assert cost(search.shape_of((1, 1)), (0,), batch=1, context=128) == pytest.approx(0.5 + 1.2 * 3 + 2 * (3 + 1))
    # What grows faster than the forwards has no overhead, and incremental decoding alone tells nothing of drafts.
    assert RoundCost(curve, (curve,)).fitted(bare[:2], [1.0, 8.0]).fixed == 0
    assert RoundCost(curve, (curve,)).fitted(bare[:1], [2.0])(search.shape_of((1,)), (), batch=1, context=128) > 0


@pytest.mark.parametrize(
    ("forwards", "seconds", "message"),
    [
        ([], [], "0 rounds"),
        ([(1.0, 0.0)], [1.0, 2.0], "1 rounds"),
        *(([(1.0, 0.0)], [value], "finite seconds above 0") for value in (0.0, -1.0, np.nan, np.inf)),
        *(([(value, 0.0)], [1.0], "its forwards >= 0") for value in (-1.0, np.nan, np.inf)),
    ],
)
def test_costs_are_not_fitted_to_what_are_no_times(forwards, seconds, message):
    curve = Latency("measured on paper", (1,), (1,), (128,), np.ones((1, 1, 1)))
    with pytest.raises(ValueError, match=message):
        RoundCost(curve, (curve,)).fitted([Forwards(*each) for each in forwards], seconds)


@pytest.mark.parametrize("batches", [(2, 1), (1, 1), (), (0, 1)])
def test_curves_are_over_axes_that_ascend(batches):
    seconds = np.ones((len(batches), 1, 1))
    with pytest.raises(ValueError, match="batches: expected ascending"):
        Latency("measured on paper", batches, (1,), (128,), seconds)
    with pytest.raises(ValueError, match="rows: expected ascending"):
        roofline(LLAMA, DEVICES["h200"], rows=batches)
    with pytest.raises(ValueError, match="2, 1, 1"):
        Latency("measured on paper", (1, 2), (1,), (128,), np.ones((1, 1, 1)))


def test_batch_sizes_of_a_config_come_in_any_order(monkeypatch):
    """A curve over batches 8 and 1, of a machine that takes a second a sequence."""

    def measured(model, *, batches, rows, contexts, repeats):
        seconds = np.broadcast_to(np.reshape(batches, (-1, 1, 1)), (len(batches), len(rows), len(contexts)))
        return Latency("measured on paper", tuple(batches), tuple(rows), tuple(contexts), seconds)

    monkeypatch.setattr(tuner, "measure_latency", measured)
    bench = SimpleNamespace(tune=Tune(name="any", batch_sizes=(8, 1)), target=None, drafts=[], capacity=64)
    curve = tuner.Bench.curves.func(bench).target
    assert [curve(batch, 1, 64) for batch in (1, 4, 8)] == [1, 4, 8]


def test_texts_without_rounds_are_not_ranked():
    curve = Latency("measured on paper", (1,), (1,), (128,), np.ones((1, 1, 1)))
    ranks = np.zeros((1, 2, 8), np.int32)
    trace = RankTrace(ranks[0], np.ones(2, np.int32), ranks, ranks > 0, ranks[0] > 0, ranks[0] - 1)
    with pytest.raises(ValueError, match="ends at its first token"):
        search.rank(trace, search.Bounds(4, 2, 2, 9), RoundCost(curve, (curve,)), 1, 128, finished_rows_wait=True)


def test_rounds_of_a_batch():
    """Prompts of 3, 5, 1 and 2 verify steps, two at a time: the longer one of each pair, or half of all."""
    steps = np.array([[3, 5, 1, 2], [1, 1, 1, 1]])
    assert search.batch_rounds(steps, 2, finished_rows_wait=True).tolist() == [7, 2]
    assert search.batch_rounds(steps, 3, finished_rows_wait=True).tolist() == [7, 2]
    assert search.batch_rounds(steps, 2, finished_rows_wait=False).tolist() == [5.5, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tune.devices=['abacus']", "expected names among a100"),
        ("models.drafts=[]", "at least one draft"),
        ("tune.batch_sizes=[4, 1, 4]", "batch_sizes: expected at least one, and each once"),
        ("tune.batch_sizes=[]", "batch_sizes"),
    ],
)
def test_a_bad_config_is_refused(line, message, capsys):
    assert tune.main(["configs/tune.toml", "--set", line]) == 2
    assert message in capsys.readouterr().err
