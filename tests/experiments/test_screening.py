"""Sweeps by replay: what is recorded is what decoding records, but for times; screened schedules become cells."""

import json
import math

import pytest

import specjax as sj
from experiments import run, workshop
from experiments.search import schedules


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Models that compile in no time, in place of those in the directories."""
    target = sj.testing.context_model(0, 256)
    models = {"target": target, "near": target, "far": sj.testing.context_model(1, 256)}
    monkeypatch.setattr(workshop, "_load_model", lambda path, *_: models[path.rpartition("/")[2]])


@pytest.fixture
def sweep(zoo, tmp_path):
    """A function that runs a config with these lines, and returns its records."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def one", "two = ")))
    path = tmp_path / "config.toml"

    def go(settings: str, blocks: str, expect: int = 0) -> list[dict]:
        path.write_text(
            f'[run]\nname = "tiny"\nprompts = "{prompts}"\nnum_prompts = 2\nmax_new_tokens = 12\n{settings}\n'
            f'[models]\ntarget = "{zoo / "target"}"\ndrafts = ["{zoo / "near"}", "{zoo / "far"}"]\n{blocks}'
        )
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert run.main([str(path), "--out", str(out)]) == expect
        return [] if expect else [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]

    return go


def test_a_replayed_cell_records_what_a_decoded_one_does(sweep):
    records = sweep(
        "",
        """
        [[sweep]]
        product.decode.tree = [[2, 1]]
        product.decode.drafts = [["near", "far"]]
        product.run.measure = ["decode", "replay"]
        """,
    )
    decoded, replayed = ([row for row in records if row["run.measure"] == kind] for kind in ("decode", "replay"))
    assert len(decoded) == len(replayed) == 2
    same = ("tokens", "finish_reason", "steps", "emitted", "accepted", "emitted_per_round", "accepted_by_depth")
    for one, other in zip(decoded, replayed):
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert other["same_text"]
        assert all(math.isnan(seconds) for seconds in other["decode_seconds"])
        assert one["drafted"] <= other["drafted"]  # before merging


def test_the_best_schedules_become_cells(sweep, capsys):
    settings = 'measure = "replay"\nscreen = 30\nscreen_nodes = 5\nconfirm = 3\npadded = true'
    block = '[[sweep]]\nproduct.decode.tree = [[1, 1]]\nproduct.decode.drafts = [["near"], ["far"]]\n'
    records = sweep(settings, block)
    assert len(list(schedules(5))) <= 30
    near = {tuple(row["decode.tree"]): row for row in records if row["decode.drafts"] == ["near"]}
    # The draft that is the target accepts all it drafts, so the deepest schedules win.
    steps = {tree: row["steps"] for tree, row in near.items()}
    assert len(steps) in (3, 4)  # three and the cell that was asked for, which may be one of them
    assert steps[1, 1, 1, 1] == min(steps.values())
    assert "replayed" in capsys.readouterr().out


def test_what_no_trace_fixes_is_refused(sweep, capsys):
    settings = {"tree": "[2]", "drafts": '["near", "far"]', "temperature": "1.0"}
    settings |= {"draft_mode": '"iid"', "verifier": '"multi_step"', "capacity": "2"}
    block = "[decode]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    sweep('measure = "replay"', block, expect=2)
    said = capsys.readouterr().err
    assert "decode: only static trees of SSMs, alone or merged whole, can be replayed" in said
    assert "decode.draft_mode: only top_k and shared_gumbel can be replayed" in said
    assert "multi_step cannot be replayed exactly at temperature 1" in said


def test_heads_are_not_replayed(zoo, tmp_path, capsys):
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text('{"model_type": "specjax_medusa"}')
    lines = [f'models.drafts=["{tmp_path / "heads"}"]', 'decode.drafts=["heads"]', "decode.tree=[2]"]
    path = tmp_path / "config.toml"
    path.write_text(f'[run]\nname = "tiny"\nmeasure = "replay"\n[models]\ntarget = "{zoo / "target"}"\n')
    assert run.main([str(path), *(word for line in lines for word in ("--set", line))]) == 2
    assert "heads read the target's hidden states" in capsys.readouterr().err
