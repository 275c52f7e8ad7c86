"""What the commands that read a config have in common: their arguments, and where they print."""

import argparse
import pathlib

from rich.console import Console


def parser(module: str, about: str, *, runs: bool = False, configs: str | None = None) -> argparse.ArgumentParser:
    """Arguments ``config`` and ``set`` of `python -m experiments.MODULE`, and ``out``, a folder, with ``runs``.

    ``configs`` says how many there are: one, "?" for at most one, "+" for several.
    """
    made = argparse.ArgumentParser(prog=f"python -m experiments.{module}", description=about)
    made.add_argument("config", nargs=configs, help="a TOML file of configs/")
    made.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another value of a dotted key, such as a.b=0.7"
    )
    if runs:
        made.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: runs/NAME-ID")
    return made


def screen() -> Console:
    """Where a command prints: a log or a pipe wraps by itself."""
    made = Console()
    if not made.is_terminal:
        made.width = 120
    return made
