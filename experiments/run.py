"""Run a sweep: `python -m experiments.run configs/quickstart.toml [--set a.b=value] [--out DIR] [--jobs N]`."""

import datetime
import importlib.metadata
import multiprocessing
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import command, config, metrics, report, screening, store, sweep, workshop
from experiments.config import ConfigError
from experiments.sweep import Cell, Experiment
from experiments.workshop import Workshop

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 if a cell failed, 2 for a bad config, 130 if it was stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = command.parser("run", "Run the sweep of a config.", runs=True, configs="?")
    parser.add_argument(
        "--resume", type=pathlib.Path, metavar="DIR", help="go on with the run in DIR, without a config"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the cells, and run nothing")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="cells at a time, each in a process; nothing is timed then"
    )
    args = parser.parse_args(arguments)
    if (args.config is None) == (args.resume is None) or (args.resume and (args.out or args.set)):
        parser.error("expected a config, or --resume DIR alone, whose run.json has the config")
    if args.jobs < 1:
        parser.error(f"argument --jobs: expected at least 1, got {args.jobs}")
    screen = command.screen()
    try:
        if args.resume:
            experiment, directory = config.from_dict(Experiment, store.header(args.resume)["config"]), args.resume
        else:
            experiment = config.load(Experiment, args.config, args.set)
            name = f"{experiment.run.name}-{config.digest(experiment)}"
            directory = args.out or config.REPOSITORY / "runs" / name
        cells = sweep.cells(experiment)
        screening.check(cells)
        header = {"id": config.digest(experiment), "config": config.to_dict(experiment)}
        known = store.check(directory, header)
        if args.dry_run:
            _print(cells, (known or {}).get("cells", {}), directory, screen)
            return 0
        return _run(header, cells, directory, args.jobs, arguments, screen)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2


def _print(cells: Sequence[Cell], known: Mapping[str, Any], directory: pathlib.Path, screen: Console) -> None:
    """What would run, and what run.json knows of it; nothing is loaded."""
    for number, cell in enumerate(cells, start=1):
        status = known.get(cell.id, {}).get("status", "pending")
        screen.print(f"{number}/{len(cells)} {cell.id} {_title(cell.config)}: {status}", markup=False, highlight=False)
    if any(cell.config.run.screen for cell in cells):
        screen.print("Schedules that screening finds come on top; which, is known when the models have been asked.")
    screen.print(f"into {directory}", markup=False, highlight=False, soft_wrap=True)


def _run(
    header: Mapping[str, Any],
    cells: Sequence[Cell],
    directory: pathlib.Path,
    jobs: int,
    arguments: Sequence[str],
    screen: Console,
) -> int:
    if jobs > 1 and jax.devices()[0].platform != "cpu":
        raise ConfigError([f"--jobs {jobs}: processes cannot share {_device()}; leave it out"])
    makes = Workshop(cells, timed=jobs == 1)
    header = {**header, "inputs": {**makes.check(cells), "device": _device()}}
    cells = makes.screening.cells(cells)
    makes.fit(cells)
    about = {cell.id: {"method": _title(cell.config), "rows": cell.config.run.num_prompts} for cell in cells}
    with store.opened(directory, header, about, _session(arguments)) as records:
        pending = [cell for cell in cells if records.header["cells"][cell.id]["status"] != "done"]
        if jobs > 1 and pending:
            screen.print(f"{jobs} cells at a time: what is decoded beside other cells is not timed.")
        stopped = _run_cells(pending, cells, jobs, makes, records, screen)
        records.arrange()
        failed = [entry for entry in records.header["cells"].values() if entry["status"] == "failed"]
        if not pending:
            screen.print(f"All {len(cells)} cells were finished before; to measure again, choose another --out.")
        report.write(records, screen)
        for entry in failed:
            screen.print(f"failed: {entry['method']}: {store.reason(entry)}", markup=False)
        if failed:
            screen.print("Failed cells are tried again when the command is run again; run.json has the tracebacks.")
        if stopped:
            screen.print("Stopped. Finished cells are kept; the same command goes on from here.")
            return 130
    return 1 if failed else 0


def _run_cells(
    pending: Sequence[Cell], cells: Sequence[Cell], jobs: int, makes: Workshop, records: store.Store, screen: Console
) -> bool:
    """Measure cells; returns whether it was stopped. A cell that fails does not stop the others."""
    session = len(records.header["sessions"]) - 1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    done = len(cells) - len(pending)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=screen) as bar:
        task = bar.add_task("", total=len(cells), completed=done)
        begin = lambda cell: bar.update(task, description=_title(cell.config))
        tick = lambda share: bar.advance(task, share)
        found = _beside(pending, cells, jobs, session) if jobs > 1 else _in_turn(pending, makes, session, begin, tick)
        try:
            for number, (cell, rows) in enumerate(found, start=done + 1):
                if isinstance(rows, str):
                    records.mark(cell.id, "failed", rows)
                    line = "failed"
                else:
                    records.append(cell.id, rows)
                    line = metrics.one_line(rows)
                bar.console.print(f"{number}/{len(cells)} {_title(cell.config)}: {line}", markup=False, highlight=False)
                bar.update(task, completed=number)
        except KeyboardInterrupt:
            return True
        except BrokenProcessPool:
            bar.console.print(f"One of {jobs} processes died, perhaps for want of memory: try fewer --jobs.")
            return True
    return False


type Rows = list[dict[str, Any]] | str  # or a traceback


def _in_turn(
    pending: Sequence[Cell],
    makes: Workshop,
    session: int,
    begin: Callable[[Cell], None],
    tick: Callable[[float], None],
) -> Iterator[tuple[Cell, Rows]]:
    for cell in pending:
        begin(cell)
        yield cell, _attempt(cell, makes, session, tick)


def _beside(pending: Sequence[Cell], cells: Sequence[Cell], jobs: int, session: int) -> Iterator[tuple[Cell, Rows]]:
    """Cells as they are finished, measured in ``jobs`` processes that share nothing."""
    spawn = multiprocessing.get_context("spawn")  # JAX has threads by now, which a fork would lose
    with futures.ProcessPoolExecutor(min(jobs, len(pending) or 1), spawn, _begin, (cells,)) as pool:
        asked = {pool.submit(_measure, cell, session): cell for cell in pending}
        try:
            for one in futures.as_completed(asked):
                yield asked[one], one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_own: list[Workshop] = []  # of a process that measures some of the cells


def _begin(cells: Sequence[Cell]) -> None:
    _own.append(Workshop(cells, timed=False))


def _measure(cell: Cell, session: int) -> Rows:
    return _attempt(cell, _own[0], session, lambda share: None)


def _attempt(cell: Cell, makes: Workshop, session: int, tick: Callable[[float], None]) -> Rows:
    try:
        return workshop.rows(cell, makes, session, tick)
    except Exception:
        return traceback.format_exc()


def _title(experiment: Experiment) -> str:
    decode = experiment.decode
    warp = metrics.warp_name(decode.temperature, decode.top_k, decode.top_p)
    if decode.incremental:
        return f"{sweep.label(decode)}, {warp}"
    return f"{sweep.label(decode)} {metrics.short_names(decode.drafts)}, {decode.verifier}, {warp}"


def _device() -> str:
    device, count = jax.devices()[0], jax.device_count()
    if device.platform == "cpu":
        return f"CPU, {_processor()}, {os.cpu_count()} cores"
    return f"{count} x {device.device_kind}"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _session(arguments: Sequence[str]) -> dict[str, Any]:
    """Who runs this, and with what."""
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "experiments.run", *arguments]),
        "revision": _git("rev-parse", "--short=12", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(config.REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
