"""The search of the tuner: chains, schedules, optimal trees, and prompt lookup; replayed and costed."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.replay import LookupTree, RankTrace, RoundCost, calibrate, lookup_steps, optimal_trees, verify_steps
from specjax.request import make_drafter
from specjax.tree import Topology, TreeShape
from specjax.types import Drafter, Model


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
    max_depth: int  # that drafts draft; what prompt lookup copies may go deeper, since it costs no pass
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
    copied: int = 0  # nodes below the root of its union with prompt lookup, ``LookupTree.nodes``; 0: it is not used

    @property
    def nodes(self) -> int:
        """That the target scores in a round, the root left out."""
        return self.copied or len(self.drafts) * (self.tree.shape.num_nodes - 1)

    def drafters(self, target: Model, models: Sequence[Model], mode: str = "top_k") -> list[Drafter]:
        """What drafts it, to be given to ``generate``: of the drafts that were traced, those that it takes."""
        own = [models[draft] for draft in self.drafts]
        if self.copied:
            return [LookupTree(self.tree.shape.depth, self.copied).drafter(target.vocab_size, *own, draft_mode=mode)]
        return [make_drafter(own, self.tree, mode)] if own else []


class Choice(NamedTuple):
    """A candidate on a device at one batch size and context."""

    candidate: Candidate
    milliseconds: float  # predicted for a token


def shape_of(schedule: Sequence[int]) -> TreeShape:
    """A schedule's static bounds, without building its tree."""
    widths = np.cumprod([1, *schedule]).tolist()
    return TreeShape(sum(widths), tuple(widths[:-1]), tuple(schedule))


class _Group(NamedTuple):
    """Methods of one kind and set of drafts, to be replayed."""

    kind: str
    drafts: tuple[int, ...]
    trees: list[Any]
    shapes: list[TreeShape]
    copied: list[int] | None = None

    def steps(self, trace: RankTrace) -> np.ndarray:
        """Verify steps [I, P]."""
        own = trace.select(self.drafts) if self.drafts else trace
        if self.copied is None:
            return verify_steps(own, self.trees)
        return lookup_steps(own, [LookupTree(shape.depth, nodes) for shape, nodes in zip(self.shapes, self.copied)])


def _groups(trace: RankTrace, bounds: Bounds) -> Iterator[_Group]:
    """Chains and schedules for every set of drafts; optimal trees and prompt lookup for every draft."""
    rng = np.random.default_rng(bounds.seed)
    lone = Topology.chain(0)
    yield _Group("incremental", (), [lone], [lone.shape])
    yield _lookups((), [lone], bounds)
    every = list(schedules(bounds.max_nodes, bounds.max_depth))
    count = len(trace.ranks)
    for size in range(1, count + 1):
        for drafts in itertools.combinations(range(count), size):
            chains = [(1,) * depth for depth in range(1, min(bounds.max_depth, bounds.max_nodes - 1) + 1)]
            yield _Group("chain", drafts, chains, [shape_of(chain) for chain in chains])
            wide = [schedule for schedule in every if max(schedule) > 1]
            if len(wide) > bounds.screen:
                wide = [wide[index] for index in np.sort(rng.choice(len(wide), bounds.screen, replace=False))]
            yield _Group("schedule", drafts, wide, [shape_of(schedule) for schedule in wide])
            if size == 1:
                trees = _optimal(trace.select(drafts), bounds)
                yield _Group("tree", drafts, trees, [tree.shape for tree in trees])
                yield _lookups(drafts, [Topology.from_schedule(chain) for chain in chains], bounds)


def _optimal(trace: RankTrace, bounds: Bounds) -> list[Topology]:
    """The best trees of every size within every depth, for a level costs a pass of the draft; chains left out."""
    rates, found = calibrate(trace, depth=bounds.max_depth, most_draws=bounds.most_draws).rates, {}
    for depth in range(1, bounds.max_depth + 1):
        optimum = optimal_trees(rates[:depth], bounds.max_nodes)
        for nodes in range(2, bounds.max_nodes + 1):
            tree = optimum.topology(nodes)
            if tree.shape.num_draws > 1:
                found[tuple(np.asarray(tree.parents).tolist()), tuple(np.asarray(tree.ranks).tolist())] = tree
    return list(found.values())


def _lookups(drafts: tuple[int, ...], chains: list[Topology], bounds: Bounds) -> _Group:
    """Chains in unions of every larger size with what prompt lookup copies."""
    pairs = [(chain, nodes) for chain in chains for nodes in range(chain.shape.depth + 1, bounds.max_nodes)]
    trees = [chain for chain, _ in pairs]
    return _Group("lookup", drafts, trees, [tree.shape for tree in trees], [nodes for _, nodes in pairs])


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
    for group in _groups(trace, bounds):
        steps, copied = group.steps(trace), group.copied or [0] * len(group.trees)
        seconds = [
            cost(shape, group.drafts, batch=batch, context=context, copied=nodes)
            for shape, nodes in zip(group.shapes, copied)
        ]
        rounds, tokens = batch_rounds(steps, batch, finished_rows_wait=finished_rows_wait), np.sum(trace.drafted)
        per_token = np.array(seconds) * rounds / tokens
        for index in np.argsort(per_token, kind="stable")[:8]:
            given = group.trees[index]
            tree = given if isinstance(given, Topology) else Topology.from_schedule(given)
            name, rate = _name(group.kind, given, copied[index]), tokens / np.sum(steps[index])
            candidate = Candidate(group.kind, name, tree, group.drafts, float(rate), steps[index], copied[index])
            found.append(Choice(candidate, 1e3 * float(per_token[index])))
    return sorted(found, key=lambda choice: choice.milliseconds)


def _name(kind: str, tree: Any, copied: int) -> str:
    if kind == "incremental":
        return kind
    if kind == "tree":
        return f"optimal({tree.shape.num_nodes}, depth {tree.shape.depth})"
    if kind == "lookup":
        copy = f"copy(1x{copied})"  # as in sweeps
        return f"<{','.join('1' * tree.shape.depth)}> + {copy} to {copied + 1}" if tree.shape.depth else copy
    return f"<{','.join(map(str, tree))}>"
