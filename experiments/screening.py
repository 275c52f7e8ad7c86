"""Sweeps by replay: cells that are not decoded, and schedules that are screened before they become cells."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import specjax as sj
from experiments import config, sweep
from experiments.config import ConfigError
from experiments.search import schedules, shape_of
from experiments.sweep import Cell, Experiment
from specjax.replay import RankTrace, rank_trace, rounds, tokens_per_step
from specjax.replay.ranks import MODES


class Screening:
    """Traces of a run, one for each set of drafts, warp and prompts."""

    def __init__(self, arguments: Callable[[Experiment], dict[str, Any]]):
        self._arguments = arguments  # of ``generate``, for all prompts of a cell
        self._traces: dict[str, RankTrace] = {}

    def trace(self, experiment: Experiment) -> RankTrace:
        """What replays every tree of the cell's drafts; recorded once."""
        # Rules that may be replayed have one text, so they share a trace.
        whole = dataclasses.replace(experiment.decode, tree=(1,), verifier="naive_sampling")
        key = config.digest(dataclasses.replace(experiment, decode=whole))
        if key not in self._traces:
            arguments = self._arguments(experiment)
            others = "tree", "verifier", "allow_lossy"
            arguments = {name: value for name, value in arguments.items() if name not in others}
            batch = experiment.run.batch_size
            self._traces[key] = rank_trace(**arguments, batch_size=batch)
        return self._traces[key]

    def replay(self, experiment: Experiment) -> list[tuple[list[int], str, list[sj.Round]]]:
        """Tokens, finish reason and rounds of each prompt, as decoding the cell would give them.

        Of several drafts, drafted nodes are counted before merging, since which of them are equal the trace does not
        know; and who proposed a token is left open.
        """
        trace, tree = self.trace(experiment), sweep.topology(experiment.decode.tree)
        depths = np.bincount(tree.depths, minlength=tree.shape.depth + 1)[1:] * len(trace.ranks)
        by_depth, stops = tuple(map(int, depths)), self._arguments(experiment)["target"].eos_ids
        found = []
        for row, own in enumerate(rounds(trace, tree)):
            tokens = trace.tokens[row, : trace.lengths[row]].tolist()
            reason = "eos" if tokens and tokens[-1] in stops else "length"
            found.append(
                (tokens, reason, [sj.Round(sum(by_depth), item.accepted, item.emitted, by_depth, ()) for item in own])
            )
        return found

    def cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells, and for each set of drafts and warp among them the schedules that accept most.

        Of all schedules of at most ``run.screen_nodes`` nodes, ``run.screen`` are replayed, evenly chosen where there
        are more, and the ``run.confirm`` with the most tokens per step become cells, of equals the smallest.
        """
        found = {cell.id: cell for cell in cells}
        groups = {}
        for cell in cells:
            if cell.config.run.screen and cell.config.decode.drafts:
                group = dataclasses.replace(cell.config.decode, tree=(1,))
                groups.setdefault(config.digest(dataclasses.replace(cell.config, decode=group)), cell)
        for cell in groups.values():
            run = cell.config.run
            every = list(schedules(run.screen_nodes))
            chosen = [every[at] for at in np.unique(np.linspace(0, len(every) - 1, run.screen).astype(int))]
            rates = tokens_per_step(self.trace(cell.config), chosen)
            nodes = np.array([shape_of(schedule).num_nodes for schedule in chosen])
            for index in np.lexsort((nodes, -rates))[: run.confirm]:
                decode = dataclasses.replace(cell.config.decode, tree=chosen[index])
                own = dataclasses.replace(cell.config, decode=decode)
                found.setdefault(config.digest(own), Cell(config.digest(own), own, "screened: "))
        return list(found.values())


def check(cells: Sequence[Cell]) -> None:
    """Refuse to replay what a trace does not fix.

    Raises:
      ConfigError: naming the cells.
    """
    problems = []
    for cell in cells:
        run, decode = cell.config.run, cell.config.decode
        if decode.incremental or not (run.screen or run.measure == "replay"):
            continue
        whole = decode.builder == "static" and decode.combine == "union" and not decode.capacity
        if not whole or sweep.LOOKUP in decode.drafts:
            problems.append(f"{cell.where}decode: only static trees of SSMs, alone or merged whole, can be replayed")
        if any(sj.is_heads(config.resolve(path)) for path in cell.config.models.drafts):
            problems.append(f"{cell.where}models.drafts: heads read the target's hidden states and cannot be replayed")
        if decode.draft_mode not in MODES:
            problems.append(f"{cell.where}decode.draft_mode: only {' and '.join(MODES)} can be replayed")
        if decode.verifier not in sj.verify.RULES or not decode.same_text:
            problems.append(
                f"{cell.where}decode.verifier: {decode.verifier} cannot be replayed exactly at temperature "
                f"{decode.temperature:g}; naive_sampling can, and every node rule at temperature 0"
            )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
