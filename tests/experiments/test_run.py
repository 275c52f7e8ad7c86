"""The runner on the real library: what it records is what happened, and it survives kills (cases B38, B40)."""

import csv
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants as hub_constants

import specjax as sj
from experiments import config, report, run, store, workshop
from experiments import sweep as sweep_settings

# In place of what the directories hold, which is still what is named and hashed: these compile in no time. Drafts
# differ in data alone, so they share executables as models of one architecture do.
TARGET = sj.testing.context_model(0, 256)


def like_target(seed: int) -> sj.Model:
    marks, logits = TARGET.params
    return TARGET._replace(params=(marks, logits + np.random.default_rng(seed).normal(size=logits.shape)))


MODELS = {"target": TARGET, "near": TARGET, "far": like_target(1), "other": like_target(2)}
PROMPTS = ("def first(n):", "class Second", "import os\n\nthird = ")
SWEEP = """
[[sweep]]
product.decode.temperature = [0.0, 0.8]
product.decode.tree = [[]]
[[sweep]]
product.decode.temperature = [0.0, 0.8]
zip.decode.tree = [[2, 1], [2, 1], [[0], [1], [0, 0]]]
zip.decode.drafts = [["near"], ["far"], ["far"]]
"""
MORE = """
[[sweep]]
product.decode.temperature = [0.0, 0.8]
product.decode.tree = [[2, 1]]
product.decode.drafts = [["far", "other"]]
[[sweep]]
product.decode.tree = [[2, 1]]
product.decode.drafts = [["far"]]
zip.decode.temperature = [0.8]
zip.decode.draft_mode = ["iid"]
zip.decode.verifier = ["multi_step"]
[[sweep]]
product.decode.drafts = [["prompt_lookup", "far"]]
zip.decode.combine = ["union", "first"]
zip.decode.capacity = [9, 0]
product.decode.builder = ["expand_and_rerank"]
product.decode.lookup.min_match = [1]
product.decode.dynamic.nodes = [4]
product.decode.dynamic.depth = [2]
"""
SEEDS = """
product.decode.tree = [[1, 1], [2, 1]]
product.run.seed = [0, 1, 2]
"""


class Runs:
    """A config in a directory of its own, run in this process."""

    def __init__(self, directory: pathlib.Path, zoo: pathlib.Path):
        self.out = directory / "out"
        self.config = directory / "config.toml"
        self.zoo = zoo
        lines = [json.dumps({"prompt": prompt, "name": f"p{number}"}) for number, prompt in enumerate(PROMPTS)]
        (directory / "prompts.jsonl").write_text("\n".join(lines))

    def write(self, sweep: str, drafts=("near", "far", "other"), decode: str = "", **settings) -> None:
        settings = {"num_prompts": 3, "max_new_tokens": 12, **settings}
        lines = [
            '[run]\nname = "test"',
            f'prompts = "{self.config.parent / "prompts.jsonl"}"',
            *(f"{key} = {json.dumps(value)}" for key, value in settings.items()),
            f'[models]\ntarget = "{self.zoo / "target"}"',
            f"drafts = {json.dumps([str(self.zoo / name) for name in drafts])}",
            f"[decode]\n{decode}",
            sweep if "[[sweep]]" in sweep else f"[sweep]\n{sweep}",
        ]
        self.config.write_text("\n".join(lines))

    def __call__(self, *arguments: str) -> int:
        return run.main([str(self.config), "--out", str(self.out), *arguments])

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "records.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> list[dict]:
        return list(csv.DictReader((self.out / "summary.csv").read_text().splitlines()))

    @property
    def header(self) -> dict:
        return json.loads((self.out / "run.json").read_text())

    @property
    def statuses(self) -> list[str]:
        return [entry["status"] for entry in self.header["cells"].values()]


@pytest.fixture(scope="module", autouse=True)
def light():
    """Models of ``MODELS`` instead of those in the directories."""
    load = workshop._load_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            workshop, "_load_model", lambda path, *rest: MODELS.get(pathlib.Path(path).name) or load(path, *rest)
        )
        yield load


@pytest.fixture
def loaded(light, monkeypatch):
    """The models in the directories, for tests of loading them."""
    monkeypatch.setattr(workshop, "_load_model", light)


@pytest.fixture
def runs(tmp_path, zoo) -> Runs:
    return Runs(tmp_path, zoo)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, zoo, light) -> Runs:
    """A finished sweep of every kind of cell."""
    runs = Runs(tmp_path_factory.mktemp("sweep"), zoo)
    runs.write(SWEEP + MORE, batch_size=3, repeats=2, seed=7)
    assert runs() == 0
    return runs


def test_every_cell_and_prompt_has_one_row(sweep):
    rows = sweep.records
    assert len(rows) == 13 * 3 == len({(row["cell"], row["prompt"]) for row in rows})
    assert sweep.statuses == ["done"] * 13


def test_what_is_recorded_is_what_the_library_does(sweep, zoo):
    """Each cell against one call on the prompts in another order, which shares nothing with the runner."""
    tokenizer = sj.load_tokenizer(zoo / "target")
    cells = {}
    for row in sweep.records:
        cells.setdefault(row["cell"], []).insert(0, row)
    for rows in cells.values():
        first = rows[0]
        tree = first["decode.tree"]
        if first["decode.builder"] == "expand_and_rerank":
            name = {"union": "copy(3x7) + {} to 9", "first": "copy(3x7) or {}"}[first["decode.combine"]]
            assert (first["method"], tree) == (name.format("expand_and_rerank(6x2:4)"), [])
            tree = sj.draft.expand_and_rerank(width=6, depth=2, nodes=4)
        elif tree:
            tree = tuple(tree) if isinstance(tree[0], int) else sj.Topology.from_paths(tree)
        sources = {**MODELS, "prompt_lookup": sj.draft.prompt_lookup(256, length=7, min_match=1)}
        drafts = [sources[name] for name in first["decode.drafts"]]
        if "prompt_lookup" in first["decode.drafts"]:
            parts = [drafts[0], tree(drafts[1], "deterministic")]
            union = first["decode.combine"] == "union"
            drafts, tree = [sj.draft.ensemble(parts, capacity=9) if union else sj.draft.first_of(parts)], None
        result = sj.generate(
            TARGET,
            [tokenizer.encode(PROMPTS[row["prompt"]]).ids for row in rows],
            drafts=drafts,
            tree=tree or None,
            draft_mode=first["decode.draft_mode"],
            verifier=first["decode.verifier"],
            warp=sj.Warp(first["decode.temperature"]),
            max_new_tokens=12,
            seeds=[7 + row["prompt"] for row in rows],
        )
        assert [row["tokens"] for row in rows] == result.tokens
        assert [row["finish_reason"] for row in rows] == result.finish_reasons
        assert sum(row["steps"] for row in rows) == result.stats.verify_steps
        assert sum(row["emitted"] for row in rows) / result.stats.verify_steps == result.stats.tokens_per_step
        for row, rounds in zip(rows, result.rounds, strict=True):
            assert row["drafted"] == sum(item.drafted for item in rounds) == sum(row["drafted_by_depth"])
            assert row["accepted_per_round"] == [item.accepted for item in rounds]
            assert row["emitted_per_round"] == [item.emitted for item in rounds]


def test_texts_that_must_be_equal_are_and_the_report_says_so(sweep):
    for row in sweep.records:
        promised = row["decode.temperature"] == 0 or row["decode.verifier"] == "naive_sampling"
        assert row["same_text_promised"] == promised and (row["same_text"] or not promised)
    report = (sweep.out / "report.md").read_text()
    assert "greedy: all tokens identical to incremental decoding in all 6 cells." in report
    assert "sampled with naive_sampling: all tokens identical to incremental decoding in all 4 cells." in report


def test_a_different_text_is_counted(runs, monkeypatch):
    real = sj.generate

    def wrong(**arguments):
        result = real(**arguments)
        if arguments["drafts"] and arguments["seeds"] == [1]:
            result.tokens[0][-1] ^= 1
        return result

    monkeypatch.setattr(sj, "generate", wrong)
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]')
    assert runs() == 0
    assert [row["same_text"] for row in runs.records] == [True, False, True]
    assert "greedy: <2,1> far: 1 of 3 prompts DIFFER." in (runs.out / "report.md").read_text()


def test_a_perfect_draft_is_accepted_whole_until_the_budget(sweep):
    for row in sweep.records:
        if row["decode.drafts"] == ["near"] and row["decode.temperature"] == 0:
            assert row["accepted_per_round"] == [2, 2, 2, 2] and row["emitted_per_round"] == [3, 3, 3, 2]
            assert row["tried_by_depth"] == row["accepted_by_depth"] == [4, 4]


def test_files_for_people(sweep, capsys):
    assert sweep() == 0  # nothing left to run: the report is made again
    out = capsys.readouterr().out
    assert "All 13 cells were finished before" in out and "paths(3)" in out and "identical" in out
    rows = sweep.summary
    assert [row["method"] for row in rows].count("incremental") == 2 and len(rows) == 13
    for row in rows:
        assert float(row["tokens_per_step"]) == int(row["emitted"]) / int(row["steps"])
        assert float(row["speedup_low"]) <= float(row["speedup"]) <= float(row["speedup_high"])
    report = (sweep.out / "report.md").read_text()
    for name in ("methods.png", "acceptance.png"):
        assert f"]({name})" in report and (sweep.out / name).read_bytes().startswith(b"\x89PNG")
    assert "each tree has an executable of its own size" in report


def test_run_json_says_what_ran(sweep):
    header = sweep.header
    assert header["config"]["run"]["batch_size"] == 3 and header["config"]["decode"]["top_p"] == 1.0
    assert header["inputs"]["device"] == run._device()
    session = header["sessions"][0]
    assert session["versions"]["jax"] == importlib.metadata.version("jax") and "config.toml" in session["command"]
    known = run._git("rev-parse", "--short=12", session["revision"] or "HEAD")  # None where this is no git checkout
    assert session["revision"] == known


def test_an_override_is_what_runs_and_what_is_recorded(runs):
    runs.write("product.run.seed = [0]", ["far"], 'tree = [2]\ndrafts = ["far"]')
    assert runs("--set", "decode.tree=[2, 1]", "--set", "run.num_prompts=1") == 0
    (row,) = runs.records
    assert row["decode.tree"] == [2, 1] == runs.header["config"]["decode"]["tree"]
    assert row["drafted"] == row["steps"] * (2 + 2)
    assert row["drafted_by_depth"] == [row["steps"] * 2, row["steps"] * 2]
    assert "run.num_prompts=1" in runs.header["sessions"][0]["command"]


def test_padded_trees_share_one_executable_and_emit_the_same(sweep, runs):
    runs.write(SWEEP, ["near", "far"], batch_size=3, seed=7, padded=True)
    assert runs() == 0
    texts = {}
    for row in sweep.records + runs.records:
        key = [row[f"decode.{name}"] for name in ("tree", "drafts", "combine", "temperature", "verifier")]
        key.append(row["prompt"])
        texts.setdefault(json.dumps(key), []).append(row["tokens"])
    pairs = [found for found in texts.values() if len(found) == 2]
    assert len(pairs) == 8 * 3 and all(a == b for a, b in pairs)
    compiles = {row["cell"]: row["compiles"] for row in runs.records if row["decode.tree"]}
    assert len(compiles) == 6 and sum(list(compiles.values())[1:]) == 0
    assert "share one executable" in (runs.out / "report.md").read_text()


KILLER = """
import os, signal, sys
import specjax as sj
from experiments import run, workshop

real = sj.generate
models = {"target": sj.testing.context_model(0, 256)}
models["far"] = sj.testing.context_model(1, 256)
workshop._load_model = lambda path, *_: models[path.rpartition("/")[2]]

def generate(**arguments):
    tree = arguments["tree"]
    if tree is not None and tree.shape.num_nodes == 5 and arguments["seeds"] == [1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(**arguments)

sj.generate = generate
run.main(sys.argv[1:])
"""


def test_a_killed_sweep_resumes_with_unique_rows(runs):
    """Case B40: six cells, killed in the second prompt of the fourth; resumed; resumed again; changed."""
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=2)
    environment = {**os.environ, "PYTHONPATH": str(config.REPOSITORY), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLER, str(runs.config), "--out", str(runs.out)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = (runs.out / "records.jsonl").read_bytes()
    assert len(runs.records) == 3 * 2 and runs.statuses == ["done"] * 3 + ["pending"] * 3

    assert runs() == 0
    assert (runs.out / "records.jsonl").read_bytes().startswith(finished)
    rows = runs.records
    assert len(rows) == 12 == len({(row["cell"], row["prompt"]) for row in rows})
    assert {(len(row["decode.tree"]), row["decode.tree"][0], row["run.seed"]) for row in rows} == {
        (2, width, seed) for width in (1, 2) for seed in (0, 1, 2)
    }
    assert [row["session"] for row in rows] == [0] * 6 + [1] * 6

    resumed = (runs.out / "records.jsonl").read_bytes()
    assert runs() == 0
    assert (runs.out / "records.jsonl").read_bytes() == resumed


def test_another_temperature_in_the_same_directory_is_refused(runs, capsys):
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    assert runs("--set", "sweep.product.run.seed=[0]") == 0
    before = {path.name: path.read_bytes() for path in runs.out.iterdir()}
    assert runs("--set", "sweep.product.run.seed=[0]", "--set", "decode.temperature=0.5") == 2
    assert "decode.temperature was 0.0, is 0.5" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in runs.out.iterdir()} == before


def test_without_out_another_config_has_another_directory(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(config, "REPOSITORY", tmp_path)
    runs.write("product.decode.tree = [[]]", (), num_prompts=1, max_new_tokens=2)
    for seed in (0, 0, 1):
        assert run.main([str(runs.config), "--set", f"run.seed={seed}"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_replaced_weights_are_another_run(runs, tmp_path, capsys):
    for name in ("target", "far"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        for file in (runs.zoo / name).iterdir():
            (tmp_path / "zoo" / name / file.name).write_bytes(file.read_bytes())
    runs.zoo = tmp_path / "zoo"
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]', num_prompts=1)
    assert runs() == 0
    weights = tmp_path / "zoo/far/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert runs() == 2
    assert "inputs." in capsys.readouterr().err


def test_a_cell_that_raises_is_marked_and_tried_again(runs, monkeypatch, capsys):
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    real = sj.generate

    def broken(**arguments):
        if arguments["drafts"] and arguments["seeds"] == [1]:
            raise RuntimeError("no memory [left]")
        return real(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sj, "generate", broken)
        assert runs() == 1
    assert runs.statuses == ["done", "failed", "done", "done", "failed", "done"]
    assert len(runs.records) == 4
    failed = [entry for entry in runs.header["cells"].values() if entry["status"] == "failed"]
    assert "no memory" in failed[0]["error"] and "Traceback" in failed[0]["error"]
    assert "failed: <1,1> far, naive_sampling, greedy: RuntimeError: no memory [left]" in capsys.readouterr().out
    assert "## Failed cells" in (runs.out / "report.md").read_text()

    assert runs() == 0
    assert runs.statuses == ["done"] * 6 and len(runs.records) == 6
    order = [row["cell"] for row in runs.summary]
    assert order == list(runs.header["cells"])  # the config's order, not the order of finishing
    assert "Failed cells" not in (runs.out / "report.md").read_text()


def test_an_interrupt_keeps_what_is_finished(runs, monkeypatch, capsys):
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    real = sj.generate

    def interrupted(**arguments):
        if arguments["drafts"] and arguments["seeds"] == [2]:
            raise KeyboardInterrupt
        return real(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sj, "generate", interrupted)
        assert runs() == 130
    assert "the same command goes on from here" in capsys.readouterr().out
    assert len(runs.records) == 2 and (runs.out / "report.md").exists()
    assert runs() == 0 and len(runs.records) == 6


def stub_library(monkeypatch, step_seconds: float, first_call_seconds: float, tokens_per_step) -> None:
    """A library whose calls take known times: case B38's stub, slow when it is called with a new shape."""
    seen = set()

    def generate(*, prompts, drafts, max_new_tokens, **_):
        began = time.perf_counter()
        shape = len(prompts), len(drafts)
        time.sleep(0 if shape in seen else first_call_seconds)
        seen.add(shape)
        per_step = tokens_per_step if drafts else 1
        rounds, left = [], max_new_tokens - 1
        while left:
            emitted = min(per_step, left)
            rounds.append(
                SimpleNamespace(
                    drafted=4 * len(drafts),
                    accepted=min(per_step - 1, emitted),
                    emitted=emitted,
                    drafted_by_depth=(4,) * len(drafts),
                    proposers=((0,),) * min(per_step - 1, emitted),
                )
            )
            left -= emitted
        prefilled = time.perf_counter()
        time.sleep(step_seconds * len(rounds))
        return SimpleNamespace(
            tokens=[[1] * max_new_tokens for _ in prompts],
            finish_reasons=["length" for _ in prompts],
            rounds=[rounds for _ in prompts],
            stats=SimpleNamespace(
                prefill_seconds=prefilled - began, decode_seconds=time.perf_counter() - prefilled + (prefilled - began)
            ),
        )

    monkeypatch.setattr(sj, "generate", generate)


def test_the_first_call_is_outside_the_timing(runs, monkeypatch):
    """Case B38: 10 ms a step and 200 ms for the first call of each shape; only the steps are reported."""
    stub_library(monkeypatch, 0.010, 0.200, tokens_per_step=2)
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]', max_new_tokens=9, batch_size=2, repeats=2)
    assert runs() == 0
    rows = runs.records
    for row in rows:
        batch_rows = 2 if row["prompt"] < 2 else 1
        assert len(row["decode_seconds"]) == 2
        for seconds in row["decode_seconds"]:
            assert 0.04 / batch_rows <= seconds < 0.15 / batch_rows
        for seconds in row["baseline_decode_seconds"]:
            assert 0.08 / batch_rows <= seconds < 0.19 / batch_rows
    (summary,) = runs.summary
    assert 1.3 < float(summary["speedup"]) < 2.6


def test_a_hostile_draft_is_reported_as_slower(runs, monkeypatch, tmp_path):
    """Case B38: nothing accepted, and a speed below 1.00x, with drafted, accepted, steps and time side by side."""
    monkeypatch.setitem(MODELS, "far", sj.testing.hostile(TARGET))
    runs.write("product.decode.tree = [[2, 2, 1, 1]]", ["far"], 'drafts = ["far"]', max_new_tokens=40, repeats=3)
    assert runs() == 0
    (summary,) = runs.summary
    assert summary["accepted"] == "0" and int(summary["drafted"]) == 3 * 39 * 14
    assert float(summary["tokens_per_step"]) == 1.0 and float(summary["speedup"]) < 1.0
    report = (runs.out / "report.md").read_text()
    (header,) = [
        line for line in report.splitlines() if line.startswith("| method | drafts | drafted | accepted | steps")
    ]
    assert (
        header.endswith("| decode s | tokens/s | speed-up | text |") and f"{float(summary['speedup']):.2f}x" in report
    )


def test_a_call_that_compiled_is_not_counted():
    calls = []

    @jax.jit
    def work(x):
        return x + 1

    def call():
        calls.append(1)
        return work(jnp.zeros(3 if len(calls) < 3 else 4)).block_until_ready()

    call()
    assert workshop._without_compiling(call).shape == (3,) and len(calls) == 2
    assert workshop._without_compiling(call).shape == (4,) and len(calls) == 4
    with pytest.raises(RuntimeError, match="compiles every time"):
        workshop._without_compiling(lambda: jax.jit(lambda x: x * 2)(jnp.zeros(len(calls))))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "models.target='nowhere'"], ["no config.json in", "nowhere"]),
        (["--set", "run.prompts='nowhere.jsonl'"], ["run.prompts: cannot read", "nowhere.jsonl"]),
        (["--set", "run.num_prompts=99"], ["run.num_prompts: 99 asked for"]),
        (["--set", "decode.verifier='multistep'"], ["<2,1>: unknown verifier 'multistep'", "'multi_step'"]),
        (["--set", "decode.verifier='multi_step'"], ["<2,1>:", "multi_step", "deterministic"]),
        (["--set", "decode.draft_mode='topk'"], ["unknown draft_mode 'topk'", "'top_k'"]),
        (["--set", "run.max_new_tokens=9999"], ["<2,1>: prompts[0]", "context of 256"]),
        (["--set", "sweep.product.decode.tree=[[2], []]"], ["at decode.tree=[]: decode.tree: drafts need a tree"]),
        (["--set", "sweep.product.decode.tree=[[0]]"], ["decode.tree: ", "entry 0 is 0"]),
        (["--set", "decode.drafts=[]"], ["a tree needs a draft model"]),
        (["--set", "decode.temprature=1"], ["decode.temprature: unknown key; did you mean decode.temperature?"]),
        (["--set", "models.attention='flash'"], ["flash"]),
        (["--set", "models.target='org/name'"], ["org/name: no such directory", "run `hf download org/name`"]),
    ],
)
def test_bad_input_is_refused_before_anything_runs(loaded, runs, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(sj, "generate", lambda **_: pytest.fail("something ran"))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]')
    assert runs(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and not runs.out.exists()
    for word in words:
        assert word in message


def test_a_draft_of_another_tokenizer_is_refused(loaded, runs, capsys, tmp_path):
    """With both sides named: equal sizes alone say nothing."""
    shutil.copytree(runs.zoo / "far", tmp_path / "far")
    other = json.loads((tmp_path / "far/tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (tmp_path / "far/tokenizer.json").write_text(json.dumps(other))
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]')
    assert runs("--set", f"models.drafts=['{tmp_path / 'far'}']") == 2
    message = capsys.readouterr().err
    for word in (str(runs.zoo / "target"), str(tmp_path / "far"), "differ at 2 ids", "is 'A' and 'B'"):
        assert word in message


def test_missing_weights_are_an_error_for_people(loaded, runs, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_bytes((runs.zoo / "target/config.json").read_bytes())
    (tmp_path / "empty/tokenizer.json").write_bytes((runs.zoo / "target/tokenizer.json").read_bytes())
    runs.write("product.decode.tree = [[]]", ())
    assert runs("--set", f"models.target='{tmp_path / 'empty'}'") == 2
    assert "safetensors" in capsys.readouterr().err


def test_what_drafts_draw_from_and_lossy_verifiers_are_settings():
    decode = sweep_settings.Decode(tree=(2,), drafts=("far",), temperature=0.5, verifier="typical", allow_lossy=True)
    models = sweep_settings.Models("target", ("far",))
    block = sweep_settings.Block(product={"decode.draft_warp.temperature": [0.0, 0.8], "decode.draft_warp.top_k": [5]})
    base = sweep_settings.Experiment(sweep_settings.Run("test"), models, decode)
    cells = [*sweep_settings.cells(base), *sweep_settings.cells(dataclasses.replace(base, sweep=(block,)))]
    makes = workshop.Workshop(cells)
    makes.model = makes.draft = lambda *arguments: arguments
    calls = [makes.call(cell.config, []) for cell in cells]
    assert [call["draft_warp"] for call in calls] == [sj.Warp(0.5), sj.Warp(0.0, 5), sj.Warp(0.8, 5)]
    assert all(call["allow_lossy"] for call in calls)


def test_heads_are_drafts_as_models_are(loaded, runs, zoo, tmp_path, capsys):
    """A directory of heads, told by its config.json; the text is incremental decoding's, and a deep tree is refused."""
    target = sj.load_model(zoo / "target")
    shape = sj.models.MedusaConfig(target.hidden_size, target.vocab_size, num_heads=2, tied_projection=True)
    sj.models.save_heads(tmp_path / "medusa", shape, sj.models.init_medusa(shape, target))
    runs.write("product.decode.tree = [[2, 1]]", [str(tmp_path / "medusa")], 'drafts = ["medusa"]')
    assert runs() == 0
    assert [(row["same_text"], row["drafted"] / row["steps"]) for row in runs.records] == [(True, 4)] * 3
    shutil.rmtree(runs.out)  # which another config may not use
    runs.write("product.decode.tree = [[1, 1, 1]]", [str(tmp_path / "medusa")], 'drafts = ["medusa"]')
    assert runs() == 2
    assert "3 levels deep, and the draft model drafts 2 tokens ahead" in capsys.readouterr().err


def test_a_dry_run_prints_the_cells_and_runs_nothing(runs, capsys, monkeypatch):
    monkeypatch.setattr(sj, "load_model", lambda *_, **__: pytest.fail("something was loaded"))
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    assert runs("--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and str(runs.out) in lines[-1] and not runs.out.exists()
    assert lines[0].startswith("1/6 ") and lines[0].endswith("<1,1> far, naive_sampling, greedy: pending")
    assert runs("--set", "sweep.product.run.seed=[0]") == 0
    capsys.readouterr()
    assert runs("--set", "sweep.product.run.seed=[0]", "--dry-run") == 0
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()[:2]] == ["done", "done"]
    assert runs("--set", "sweep.product.decode.tree=[[0]]", "--dry-run") == 2


def test_an_edited_or_other_config_is_refused_before_anything_is_loaded(runs, monkeypatch, capsys):
    """By --resume, by the command itself, and by its dry run; rows stay."""
    monkeypatch.setattr(run, "Workshop", lambda *_, **__: pytest.fail("something was loaded"))
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    experiment = config.load(sweep_settings.Experiment, str(runs.config), [])
    header = {"id": config.digest(experiment), "config": config.to_dict(experiment), "inputs": {}}
    cells = {cell.id: {"rows": 1} for cell in sweep_settings.cells(experiment)}
    with store.opened(runs.out, header, cells, {}) as records:
        for cell in cells:
            records.append(cell, [{"cell": cell, "prompt": 0}])
    for arguments in ([], ["--dry-run"]):
        assert runs("--set", "run.max_new_tokens=5", *arguments) == 2
        assert "run.max_new_tokens was 12, is 5" in capsys.readouterr().err
    edited = runs.header
    edited["config"]["run"]["max_new_tokens"] = 5
    (runs.out / "run.json").write_text(json.dumps(edited))
    before = (runs.out / "records.jsonl").read_bytes()
    for arguments in ([], ["--dry-run"]):
        assert run.main(["--resume", str(runs.out), *arguments]) == 2
        assert f"the run began as {header['id']}, and its config is that of" in capsys.readouterr().err
    assert (runs.out / "records.jsonl").read_bytes() == before and len(runs.records) == 6
    (runs.out / "run.json").unlink()
    assert runs("--dry-run") == 2 and "no run.json" in capsys.readouterr().err


def test_a_run_goes_on_from_its_directory_alone(runs, monkeypatch, capsys):
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)
    with monkeypatch.context() as patch:
        patch.setattr(run.workshop, "rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert runs("--set", "run.max_new_tokens=5") == 130
    runs.config.unlink()
    assert run.main(["--resume", str(runs.out)]) == 0
    assert len(runs.records) == 6 and {row["new_tokens"] for row in runs.records} == {5}
    assert run.main(["--resume", str(runs.out / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    for wrong in ([], ["a.toml", "--resume", "b"], ["--resume", "b", "--set", "run.seed=1"], ["a.toml", "--jobs", "0"]):
        with pytest.raises(SystemExit):
            run.main(wrong)


def test_cells_side_by_side_give_the_same_rows_without_times(loaded, runs, tmp_path, byte_tokenizer, capsys):
    """Records in the config's order, the same but for what is timed, and labelled."""
    shape = sj.models.DecoderConfig(256, 8, 8, 1, 1, 1, 8, 128, tied_head=True)
    params = sj.models.init_model(shape, jax.random.key(0)).params
    sj.models.save_model(tmp_path / "zoo/target", shape, params, tokenizer=byte_tokenizer, dtype="float32")
    runs.zoo = tmp_path / "zoo"
    runs.write("product.run.seed = [0, 1]", [], "temperature = 1.0", num_prompts=1)
    assert runs("--jobs", "2") == 0
    said = capsys.readouterr().out
    assert "2 cells at a time: what is decoded beside other cells is not timed." in said and "untimed" in said
    beside, header = runs.records, runs.header
    assert [row["cell"] for row in beside] == list(header["cells"])
    assert all(
        value != value
        for row in beside
        for name in row
        if name.endswith("_seconds") and name != "compile_seconds"
        for value in row[name]
    )
    runs.out = tmp_path / "again"
    assert runs() == 0
    unlike = {name for name in beside[0] if name.endswith("_seconds")} | {"compiles"}
    same = lambda rows: [{name: value for name, value in row.items() if name not in unlike} for row in rows]
    assert same(runs.records) == same(beside) and beside[0]["tokens"] != beside[1]["tokens"]


def test_a_process_that_dies_stops_the_run(runs, monkeypatch, capsys):
    runs.write(SEEDS, ["far"], 'drafts = ["far"]', num_prompts=1)

    def dies(*_):
        raise run.BrokenProcessPool
        yield

    monkeypatch.setattr(run, "_beside", dies)
    assert runs("--jobs", "3") == 130 and "One of 3 processes died" in capsys.readouterr().out


def test_runs_are_compared(sweep, runs, capsys):
    """Another budget and a cell that the other has not: what differs is said, and texts are compared."""
    runs.write("product.decode.tree = [[2, 1]]", ["far"], 'drafts = ["far"]', batch_size=3, seed=7, max_new_tokens=8)
    assert runs() == 0
    out = runs.out / "compared.md"
    assert report.main([str(sweep.out), str(runs.out), "--out", str(out)]) == 0
    text = out.read_text()
    assert text.strip() in capsys.readouterr().out
    assert "- run.max_new_tokens: A 12, B 8" in text and "A 2, B 1" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| `<2,1>` | far | greedy | naive_sampling |")]
    assert line.count("x") >= 3 and line.endswith("3 of 3 differ |")
    assert text.count("\n| `") == 13 and text.count("| - |") >= 12
    itself = runs.out / "new/itself.md"
    assert report.main([str(sweep.out), str(sweep.out), "--out", str(itself)]) == 0
    assert itself.read_text().count("| identical |") == 13 and "nan" not in itself.read_text()
    assert report.main([str(sweep.out), str(sweep.out), "--out", str(runs.out)]) == 2
    assert "--out" in capsys.readouterr().err
    assert report.main([str(sweep.out), str(runs.out / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert report.main([str(sweep.out)]) == 0 and "paths(3)" in capsys.readouterr().out
