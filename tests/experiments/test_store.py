"""A run's directory survives kills, and never mixes two runs (case B40)."""

import json
import multiprocessing

import pytest

from experiments import store
from experiments.config import ConfigError

HEADER = {"config": {"decode": {"temperature": 0.0}}, "inputs": {"device": "cpu"}}
CELLS = {"one": {"rows": 2}, "two": {"rows": 2}}


def rows(cell: str) -> list[dict]:
    return [{"cell": cell, "prompt": number, "value": f"{cell}{number}"} for number in range(2)]


@pytest.fixture
def opened(tmp_path):
    return lambda header=HEADER: store.opened(tmp_path / "run", header, CELLS, {"started": "now"})


def read(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]


def test_finished_cells_are_there_again(opened, tmp_path):
    with opened() as first:
        assert first.rows == []
        first.append("one", rows("one"))
        first.mark("two", "failed", "Traceback\nValueError: no")
    header = json.loads((tmp_path / "run/run.json").read_text())
    assert {cell: entry["status"] for cell, entry in header["cells"].items()} == {"one": "done", "two": "failed"}
    assert store.reason(header["cells"]["two"]) == "ValueError: no"
    before = (tmp_path / "run/records.jsonl").read_bytes()
    with opened() as second:
        assert second.rows == rows("one")
        assert {cell: entry["status"] for cell, entry in second.header["cells"].items()} == {
            "one": "done",
            "two": "pending",  # failed cells are tried again
        }
        assert len(second.header["sessions"]) == 2
    assert (tmp_path / "run/records.jsonl").read_bytes() == before


@pytest.mark.parametrize("torn", ['{"cell": "two", "pro', '{"cell": "two", "prompt": 0, "value": "two0"}\n', "\0\0\0"])
def test_what_a_kill_left_of_a_cell_is_dropped(opened, tmp_path, torn):
    with opened() as first:
        first.append("one", rows("one"))
    with open(tmp_path / "run/records.jsonl", "a") as file:
        file.write(torn)
    with opened() as second:
        assert second.rows == rows("one") == read(tmp_path)
        second.append("two", rows("two"))
    assert read(tmp_path) == rows("one") + rows("two")


def test_rows_are_unique_even_if_a_file_was_pasted_together(opened, tmp_path):
    with opened() as first:
        first.append("one", rows("one"))
    path = tmp_path / "run/records.jsonl"
    path.write_text(path.read_text() * 2)
    with opened() as second:
        assert second.rows == rows("one") == read(tmp_path)


def test_another_config_or_device_is_refused_and_nothing_is_touched(opened, tmp_path):
    with opened() as first:
        first.append("one", rows("one"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    hot = {**HEADER, "config": {"decode": {"temperature": 1.0}}}
    elsewhere = {**HEADER, "inputs": {"device": "gpu"}}
    with pytest.raises(ConfigError, match=r"decode.temperature was 0.0, is 1.0.*choose another directory"), opened(hot):
        pass
    with pytest.raises(ConfigError, match='inputs.device was "cpu", is "gpu"'), opened(elsewhere):
        pass
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_records_of_unknown_origin_are_refused(opened, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/records.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds records.jsonl and no run.json"), opened():
        pass


def test_files_that_are_no_run_are_refused_and_nothing_is_added(opened, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("text")
    with pytest.raises(ConfigError, match="holds thesis.tex and no run.json"), opened():
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    (tmp_path / "run/thesis.tex").rename(tmp_path / "run/run.json.new")  # what a kill leaves at the very beginning
    (tmp_path / "run/.lock").touch()
    with opened() as first:
        assert first.rows == []


@pytest.mark.parametrize("number", [1, 2])
def test_rows_of_cells_that_the_run_has_not_are_never_lost(opened, tmp_path, number):
    """A whole cell and a part of one, as where screening finds another schedule than before."""
    with opened() as first:
        first.append("one", rows("one"))
    with open(tmp_path / "run/records.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows("other")[:number])
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match=r"rows of 1 cells that are not of this run \(other\)"), opened():
        pass
    with pytest.raises(ConfigError, match=r"not of this run \(other\)"):
        store.load(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_an_id_that_is_not_the_config_s_is_refused(opened):
    with opened({**HEADER, "id": "before"}):
        pass
    with pytest.raises(ConfigError, match="began as before, and its config is that of now"):
        with opened({**HEADER, "id": "now"}):
            pass


@pytest.mark.parametrize("content", ["{}", "[]", '{"config": ', '{"config": {}, "inputs": {}}'])
def test_a_foreign_run_json_is_refused_and_its_records_stay(opened, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(content)
    (tmp_path / "run/records.jsonl").write_text('{"somebody": "else"}\n')
    with pytest.raises(ConfigError, match="not a run.json of ours"), opened():
        pass
    assert (tmp_path / "run/records.jsonl").read_text() == '{"somebody": "else"}\n'


def test_a_file_is_no_run(opened, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be a run's directory"), opened():
        pass


def test_the_reason_of_a_failure_is_not_the_note_about_hidden_frames():
    error = (
        "Traceback\nValueError: too wide\n--------------------\nFor simplicity, JAX has removed its internal frames\n"
    )
    assert store.reason({"error": error}) == "ValueError: too wide"


def _try_to_open(path, answers):
    try:
        with store.opened(path, HEADER, CELLS, {}):
            answers.put("opened")
    except ConfigError as error:
        answers.put(str(error))


def test_two_processes_cannot_work_on_one_run(opened, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with opened():
        process = spawn.Process(target=_try_to_open, args=(tmp_path / "run", answers))
        process.start()
        assert "another process is working on this run" in answers.get(timeout=60)
        process.join()
    with opened():
        pass


def test_rows_are_put_in_the_order_of_the_cells(opened, tmp_path):
    with opened() as first:
        first.append("two", rows("two"))
        first.append("one", rows("one"))
        first.arrange()
        assert first.rows == rows("one") + rows("two") == read(tmp_path)
    run = store.load(tmp_path / "run")
    assert run.rows == rows("one") + rows("two") and store.header(tmp_path / "run") == run.header


def test_reading_a_run_leaves_its_files_alone(opened, tmp_path):
    with opened() as first:
        first.append("one", rows("one"))
    with open(tmp_path / "run/records.jsonl", "a") as file:
        file.write('{"cell": "two", "pro')
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert store.load(tmp_path / "run").rows == rows("one")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    with pytest.raises(ConfigError, match="holds no run"):
        store.load(tmp_path)
