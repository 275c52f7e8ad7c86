"""Replay against real decoding on the models that ship, and its speed: `python -m experiments.replay`."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import specjax as sj
from experiments import command, config, prompts
from experiments.search import schedules
from specjax.replay import RankTrace, rank_trace, rounds, tokens_per_step
from specjax.types import Model

ZOO = config.REPOSITORY / "experiments" / "zoo"
SSMS = ("ssm_a", "ssm_b", "ssm_c")
# Room for every tree that is drawn: padded to it they share one executable per number of drafts.
BOUNDS = sj.TreeShape(num_nodes=16, widths=(1, 4, 5, 4), arities=(6, 4, 3, 3))


class Agreement(NamedTuple):
    """Rounds of replay and real decoding side by side."""

    rounds: int  # compared
    excused: int  # texts cut at a difference where two logits lie within specjax.replay.NEAR
    wrong: int  # texts cut at any other difference


def compare(trace: RankTrace, tree: sj.Topology, real: sj.Generation) -> Agreement:
    """Compare round by round; a text is followed up to its first difference."""
    near = trace.near.any(0) | trace.target_near
    compared = excused = wrong = 0
    for row, replayed in enumerate(rounds(trace, tree)):
        length, at = int(trace.lengths[row]), 0
        theirs = [(item.accepted, item.emitted) for item in real.rounds[row]]
        for index in range(max(len(replayed), len(theirs))):
            pair = [tuple(side[index]) if index < len(side) else (0, 0) for side in (replayed, theirs)]
            end = at + max(emitted for _, emitted in pair)
            texts = trace.tokens[row, : min(end + 1, length)].tolist()
            if pair[0] != pair[1] or real.tokens[row][: len(texts)] != texts:
                if near[row, at + 1 : end + 2].any():
                    excused += 1
                else:
                    wrong += 1
                break
            compared, at = compared + 1, end
    return Agreement(compared, excused, wrong)


def random_tree(rng: np.random.Generator, bounds: sj.TreeShape = BOUNDS) -> sj.Topology:
    """A random schedule or set of paths, ranks left out here and there, within ``bounds``."""
    while True:
        if rng.random() < 0.5:
            depth = int(rng.integers(1, bounds.depth + 1))
            tree = sj.Topology.from_schedule([int(rng.integers(1, most + 1)) for most in bounds.arities[:depth]])
        else:
            paths: set[tuple[int, ...]] = set()
            for _ in range(int(rng.integers(1, 2 * bounds.num_nodes))):
                above = [(), *sorted(path for path in paths if len(path) < bounds.depth)]
                parent = above[int(rng.integers(len(above)))]
                paths.add((*parent, int(rng.integers(bounds.arities[len(parent)]))))
            tree = sj.Topology.from_paths(sorted(paths)[: bounds.num_nodes - 1])
        try:
            return tree.pad(bounds)
        except ValueError:  # too wide somewhere: draw again
            continue


def check(
    target: Model, drafts: Sequence[Model], texts: Sequence[Sequence[int]], *, cases: int, seed: int, new_tokens: int
) -> Agreement:
    """Random trees and sets of drafts, two thirds greedy and one third sampled, replayed and decoded."""
    rng = np.random.default_rng(seed)
    kinds = [
        dict(warp=sj.Warp(0.0)),
        dict(warp=sj.Warp(0.0)),
        dict(warp=sj.Warp(0.8, 0, 0.95), draft_mode="top_k"),
        dict(warp=sj.Warp(0.0)),
        dict(warp=sj.Warp(0.0)),
        dict(warp=sj.Warp(0.8, 0, 0.95), draft_mode="shared_gumbel"),
    ]
    common = dict(max_new_tokens=new_tokens, seeds=range(len(texts)))
    traces: dict[str, RankTrace] = {}
    total = Agreement(0, 0, 0)
    for case in range(cases):
        options = {**common, **kinds[case % len(kinds)]}
        if repr(options) not in traces:
            traces[repr(options)] = rank_trace(target, drafts, texts, **options)
        most = 1 if options.get("draft_mode") == "shared_gumbel" else len(drafts)  # an executable less per size
        members = sorted(rng.permutation(len(drafts))[: int(rng.integers(1, most + 1))].tolist())
        tree = random_tree(rng)
        real = sj.generate(target, texts, drafts=[drafts[member] for member in members], tree=tree, **options)
        found = compare(traces[repr(options)].select(members), tree, real)
        total = Agreement(*(a + b for a, b in zip(total, found)))
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how far replay agrees with real decoding and how fast it is; 1 if it disagrees."""
    parser = argparse.ArgumentParser(prog="python -m experiments.replay", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="random trees and sets of drafts to decode")
    parser.add_argument("--prompts", type=int, default=2, help="HumanEval prompts each is decoded on")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="time 10,000 schedules over 128 prompts x 128 tokens")
    options = parser.parse_args(arguments)
    screen = command.screen()
    target, *drafts = (sj.load_model(ZOO / name) for name in ("target", *SSMS))
    tokenizer = sj.load_tokenizer(ZOO / "target")
    count = 128 if options.speed else options.prompts
    texts = [
        list(prompt.tokens)
        for prompt in prompts.load("humaneval", num_prompts=count, max_tokens=128, tokenizer=tokenizer)
    ]
    if options.speed:
        began = time.perf_counter()
        trace = rank_trace(target, drafts, texts, max_new_tokens=128, eos_ids=(), batch_size=32)
        traced = time.perf_counter()
        rng = np.random.default_rng(options.seed)
        every = list(schedules(64))
        chosen = [every[index] for index in rng.choice(len(every), 10_000, replace=False)]
        replaying = time.perf_counter()
        for members in ([0], [0, 1, 2]):
            tokens_per_step(trace.select(members), chosen)
            took = time.perf_counter() - replaying
            screen.print(
                f"{len(chosen)} schedules of up to 64 nodes, {len(members)} drafts, {len(texts)} prompts x 128 tokens: "
                f"{took:.2f} s, compilation included",
                highlight=False,
            )
            replaying = time.perf_counter()
        screen.print(f"the trace took {traced - began:.1f} s; near ties: {trace.near_ties}", highlight=False)
        return 0
    found = check(target, drafts, texts, cases=options.cases, seed=options.seed, new_tokens=options.new_tokens)
    screen.print(
        f"{options.cases} trees and ensembles: {found.rounds} rounds agree; "
        f"{found.excused} texts differ at a near tie, {found.wrong} texts differ otherwise",
        highlight=False,
    )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
