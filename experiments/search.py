"""The search of the tuner: every chain, schedule and optimal tree, replayed and costed."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.replay import RankTrace, RoundCost, calibrate, optimal_trees, tokens_per_step, verify_steps
from specjax.tree import Topology, TreeShape


def schedules(max_nodes: int, max_depth: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every expansion schedule of at most ``max_nodes`` nodes, the root included."""

    def below(prefix: tuple[int, ...], width: int, nodes: int) -> Iterator[tuple[int, ...]]:
        for arity in range(1, (max_nodes - nodes) // width + 1):
            schedule = (*prefix, arity)
            yield schedule
            if max_depth is None or len(schedule) < max_depth:
                yield from below(schedule, width * arity, nodes + width * arity)

    return below((), 1, 1)


class Bounds(NamedTuple):
    """What is searched."""

    max_nodes: int  # of a tree, the root included
    max_depth: int
    most_draws: int  # of a node of an optimal tree
    screen: int  # schedules replayed, for each set of drafts
    seed: int = 0


class Candidate(NamedTuple):
    """A method, and what it costs a device."""

    kind: str
    name: str
    tree: Topology
    drafts: tuple[int, ...]
    tokens_per_step: float  # replayed
    steps: np.ndarray  # [P] verify steps of each prompt, replayed


class Choice(NamedTuple):
    """A candidate on a device at one batch size and context."""

    candidate: Candidate
    milliseconds: float  # predicted for a token


def shape_of(schedule: Sequence[int]) -> TreeShape:
    """A schedule's static bounds, without building its tree."""
    widths = np.cumprod([1, *schedule]).tolist()
    return TreeShape(sum(widths), tuple(widths[:-1]), tuple(schedule))


def candidates(trace: RankTrace, bounds: Bounds) -> Iterator[tuple[str, tuple[int, ...], list[Any], list[TreeShape]]]:
    """Kind, drafts and trees to be replayed: schedules for every set of drafts, optimal trees for every draft."""
    rng = np.random.default_rng(bounds.seed)
    yield "incremental", (), [Topology.chain(0)], [Topology.chain(0).shape]
    every = list(schedules(bounds.max_nodes, bounds.max_depth))
    count = len(trace.ranks)
    for size in range(1, count + 1):
        for drafts in itertools.combinations(range(count), size):
            chains = [(1,) * depth for depth in range(1, min(bounds.max_depth, bounds.max_nodes - 1) + 1)]
            yield "chain", drafts, chains, [shape_of(chain) for chain in chains]
            wide = [schedule for schedule in every if max(schedule) > 1]
            if len(wide) > bounds.screen:
                wide = [wide[index] for index in np.sort(rng.choice(len(wide), bounds.screen, replace=False))]
            yield "schedule", drafts, wide, [shape_of(schedule) for schedule in wide]
            if size == 1:
                rates = calibrate(trace.select(drafts), depth=bounds.max_depth, most_draws=bounds.most_draws).rates
                optimum = optimal_trees(rates, bounds.max_nodes)
                trees = [optimum.topology(nodes) for nodes in range(2, bounds.max_nodes + 1)]
                yield "tree", drafts, trees, [tree.shape for tree in trees]


def batch_rounds(steps: np.ndarray, batch: int, *, finished_rows_wait: bool) -> np.ndarray:
    """Rounds of decoding prompts of verify steps [.., P] in batches.

    With ``finished_rows_wait`` they go on until a batch's last row is done, as in ``generate``; else slots are taken to
    be refilled, which is what a modelled server is asked about.
    """
    if not finished_rows_wait:
        return np.sum(steps, axis=-1) / batch
    parts = [steps[..., at : at + batch] for at in range(0, steps.shape[-1], batch)]
    return np.sum([np.max(part, axis=-1) for part in parts], axis=0)


def check_drafted(trace: RankTrace) -> None:
    """Check that rounds emitted anything, for there is no time per token otherwise.

    Raises:
      ValueError: if no text goes on beyond its first token, which is prefill's.
    """
    if not np.any(trace.drafted):
        raise ValueError("every text ends at its first token, which prefill emits: there are no rounds to compare")


def rank(
    trace: RankTrace, bounds: Bounds, cost: RoundCost, batch: int, context: int, *, finished_rows_wait: bool
) -> list[Choice]:
    """Every candidate by predicted milliseconds a token, best first; of each kind and set of drafts the best eight.

    Args:
      trace: of all drafts.
      bounds: of the search.
      cost: of the device.
      batch, context: what a round is costed at.
      finished_rows_wait: as in ``batch_rounds``.

    Raises:
      ValueError: as ``check_drafted``.
    """
    check_drafted(trace)
    found: list[Choice] = []
    for kind, drafts, trees, shapes in candidates(trace, bounds):
        own = trace.select(drafts) if drafts else trace
        steps = verify_steps(own, trees)  # [I, P]
        rates = tokens_per_step(own, trees)
        seconds = np.array([cost(shape, drafts, batch=batch, context=context) for shape in shapes])
        rounds = batch_rounds(steps, batch, finished_rows_wait=finished_rows_wait)
        per_token = seconds * rounds / np.sum(trace.drafted)
        for index in np.argsort(per_token, kind="stable")[:8]:
            tree = trees[index] if isinstance(trees[index], Topology) else Topology.from_schedule(trees[index])
            name = _name(kind, trees[index], tree)
            candidate = Candidate(kind, name, tree, drafts, float(rates[index]), steps[index])
            found.append(Choice(candidate, 1e3 * float(per_token[index])))
    return sorted(found, key=lambda choice: choice.milliseconds)


def _name(kind: str, tree: Any, built: Topology) -> str:
    if kind == "incremental":
        return kind
    return f"optimal({built.shape.num_nodes})" if kind == "tree" else f"<{','.join(map(str, tree))}>"
