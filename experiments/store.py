"""A run's directory: run.json says what is run, records.jsonl holds the rows of finished cells and nothing else."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.config import ConfigError


class Store:
    """The files of one run.

    A cell's rows are appended in one go when all are there; what a killed process left of an unfinished cell is dropped
    when the run is opened again. So a cell is done iff all its rows are in records.jsonl.
    """

    def __init__(self, directory: pathlib.Path, header: dict[str, Any], rows: list[dict[str, Any]]):
        self.directory = directory
        self.header = header  # what run.json holds
        self.rows = rows

    def append(self, cell: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record a finished cell."""
        with open(self.directory / "records.jsonl", "ab") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows += [dict(row) for row in rows]
        self.mark(cell, "done")

    def mark(self, cell: str, status: str, error: str | None = None) -> None:
        """Say in run.json what became of a cell: pending, done or failed."""
        entry = self.header["cells"][cell]
        entry["status"] = status
        entry["error"] = error
        self.save()

    def arrange(self) -> None:
        """Put rows into the order of the run's cells, whichever finished first."""
        places = {cell: place for place, cell in enumerate(self.header["cells"])}
        rows = sorted(self.rows, key=lambda row: places[row["cell"]])
        if any(own is not other for own, other in zip(rows, self.rows)):
            self.rows = rows
            _write(self.directory / "records.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def save(self) -> None:
        """Write run.json."""
        _write(self.directory / "run.json", json.dumps(self.header, indent=2) + "\n")


@contextlib.contextmanager
def opened(
    directory: pathlib.Path,
    header: Mapping[str, Any],
    cells: Mapping[str, Mapping[str, Any]],
    session: Mapping[str, Any],
) -> Iterator[Store]:
    """Begin a run in ``directory``, or go on with the one that is there.

    Args:
      directory: made where it does not exist.
      header: ``id``, ``config`` and ``inputs``, which must be those of the run that is there; what else run.json is to
        say.
      cells: id -> ``rows``, the number of rows of the cell when finished, and what else run.json is to say of it.
      session: about this process; sessions are listed in run.json, and rows refer to them.

    Raises:
      ConfigError: if the directory holds another run, rows of other cells, files that are no run, or a run somebody is
        working on. Nothing is touched then.
    """
    check(directory, header)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{directory}: cannot be a run's directory: {error.strerror}"]) from None
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except OSError:
            raise ConfigError([f"{directory}: another process is working on this run"]) from None
        before = check(directory, header)  # again, since another process may have been at work until now
        rows = _read_rows(directory / "records.jsonl", cells)
        finished = {row["cell"] for row in rows}
        entries = {
            cell: {**about, "status": "done" if cell in finished else "pending", "error": None}
            for cell, about in cells.items()
        }
        sessions = [*(before["sessions"] if before else []), session]
        store = Store(directory, {**header, "cells": entries, "sessions": sessions}, rows)
        store.save()
        yield store


def check(directory: pathlib.Path, header: Mapping[str, Any]) -> dict[str, Any] | None:
    """What run.json holds, where ``header`` is of the run that is there; None where a run would begin.

    Args:
      directory: of a run; need not exist.
      header: as for ``opened``; ``inputs`` are not compared where it has none yet.

    Raises:
      ConfigError: if the directory holds another run, or files that are no run.
    """
    before = _read_header(directory)
    if before is not None:
        _check_same(directory, before, header)
        return before
    try:
        others = sorted(path.name for path in directory.iterdir() if path.name not in (".lock", "run.json.new"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([f"{directory}: cannot be a run's directory: {error.strerror}"]) from None
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError([f"{directory}: holds {shown} and no run.json, so it is no run; choose another directory"])
    return None


def header(directory: pathlib.Path) -> dict[str, Any]:
    """What a run's run.json holds.

    Raises:
      ConfigError: if the directory holds no run.
    """
    found = _read_header(directory)
    if found is None:
        raise ConfigError([f"{directory}: holds no run; expected a directory with a run.json"])
    return found


def load(directory: pathlib.Path) -> Store:
    """A run as it stands, to be read.

    Raises:
      ConfigError: if the directory holds no run, or rows of cells that its run.json has not.
    """
    found = header(directory)
    if not isinstance(found.get("cells"), dict):
        raise ConfigError([f"{directory}/run.json: has no cells; run its config again"])
    return Store(directory, found, _whole(directory / "records.jsonl", found["cells"])[0])


def reason(entry: Mapping[str, Any]) -> str:
    """What a failed cell raised: the last line of its traceback that is not JAX's note about hidden frames."""
    lines = [line for line in entry["error"].strip().splitlines() if line and not line.startswith("-----")]
    return [line for line in lines if not line.startswith("For simplicity, JAX has removed")][-1]


def _read_header(directory: pathlib.Path) -> dict[str, Any] | None:
    """What run.json holds; None where a run begins."""
    path = directory / "run.json"
    if not path.exists():
        return None
    with contextlib.suppress(ValueError):
        header = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"config": dict, "inputs": dict, "sessions": list}
        if isinstance(header, dict) and all(isinstance(header.get(key), kind) for key, kind in wanted.items()):
            return header
    raise ConfigError([f"{path}: not a run.json of ours; choose another directory"])


def _check_same(directory: pathlib.Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Rows of two experiments are never mixed, nor those of one whose run.json was edited in between."""
    changed = [
        f"{key} was {json.dumps(old)}, is {json.dumps(new)}"
        for part in ("config", "inputs")
        if part in now
        for key, old, new in _differences(before[part], json.loads(json.dumps(now[part])), part)
    ]
    if changed:
        shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ConfigError([f"{directory}: holds another run ({shown}); choose another directory, or remove that one"])
    if before.get("id") != now.get("id"):
        raise ConfigError(
            [
                f"{directory}/run.json: the run began as {before.get('id')}, and its config is that of {now.get('id')} "
                "now; undo what was edited, or run the other config in another directory"
            ]
        )


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(new.keys() - old.keys())]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}")
    elif old != new:
        yield path.removeprefix("config."), old, new


def _read_rows(path: pathlib.Path, cells: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of whole cells; the file is rewritten where it holds anything else."""
    kept, text = _whole(path, cells)
    written = "".join(json.dumps(row) + "\n" for row in kept)
    if text != written:
        _write(path, written)
    return kept


def _whole(path: pathlib.Path, cells: Mapping[str, Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The rows of whole cells, and the file's text.

    What a kill left is passed over; rows of cells that the run has not are somebody's results, and are refused.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    by_cell: dict[str, dict[int, dict[str, Any]]] = {}
    for line in text.split("\n"):
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):  # the torn last line of a killed process
            row = json.loads(line)
            by_cell.setdefault(row["cell"], {})[row["prompt"]] = row
    strange = [cell for cell in by_cell if cell not in cells]
    if strange:
        shown = ", ".join(map(str, strange[:3])) + (", ..." if len(strange) > 3 else "")
        raise ConfigError(
            [
                f"{path}: holds rows of {len(strange)} cells that are not of this run ({shown}), which going on would "
                "lose: run.json was edited, or screening found other schedules; choose another directory"
            ]
        )
    whole = {cell: rows for cell, rows in by_cell.items() if len(rows) == cells[cell]["rows"]}
    return [row for rows in whole.values() for row in rows.values()], text


def _write(path: pathlib.Path, text: str) -> None:
    """Replace a file whole: a reader, or a kill, sees the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
