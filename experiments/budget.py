"""Trees whose size is chosen at run time beside every fixed size: `python -m experiments.budget`."""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Sequence

import numpy as np
from rich.table import Table

import specjax as sj
from experiments import command, prompts
from experiments.replay import ZOO
from experiments.timing import decode_seconds, interleaved, samples
from specjax import decode
from specjax.draft import NO_DRAFT, adaptive, ssm
from specjax.replay import calibrate, optimal_trees, rank_trace, tokens_per_step
from specjax.request import Plan, prepare
from specjax.types import Drafter, Model

PROMPTS = 8  # decoded at least


def sizes_of(draft: Model, trees: Sequence[sj.Topology]) -> list[Drafter]:
    """A drafter for each tree; the lone root is drafted by nobody."""
    return [ssm(draft, tree, "deterministic") if tree.shape.depth else NO_DRAFT for tree in trees]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tokens per second of every size at every batch, and of the adaptive drafter.

    Returns:
      1 if it is over 5% behind the best size at some batch, or takes no smaller trees in larger batches.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.budget", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16], help="sizes, the root included")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--target", default=ZOO / "target", help="directory of the target, such as an inflated one")
    parser.add_argument("--draft", default=ZOO / "ssm_a", help="directory of the draft model")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or len(set(options.nodes)) < 2:
        parser.error(f"expected at least one repeat and two sizes; got {options.repeats} and {options.nodes}")
    screen = command.screen()
    target, draft = sj.load_model(options.target), sj.load_model(options.draft)
    tokenizer = sj.load_tokenizer(options.target)
    most = max(*options.batches, PROMPTS)
    found = prompts.load("humaneval", num_prompts=most + 16, max_tokens=48, tokenizer=tokenizer)
    texts = [list(prompt.tokens) for prompt in found]
    # Calibrated on prompts of its own; budgets are alike, so that all rows end at about the same time.
    trace = rank_trace(target, [draft], texts[most:], max_new_tokens=options.new_tokens, eos_ids=())
    optimum = optimal_trees(calibrate(trace, depth=options.depth, most_draws=6).rates, max(options.nodes))
    trees = [optimum.topology(nodes) for nodes in sorted(options.nodes)]
    expected = tokens_per_step(trace, trees)
    fixed = sizes_of(draft, trees)

    table = Table(title="Tokens per second, one run; sizes take turns", title_justify="left")
    names = [f"{tree.shape.num_nodes} rows" for tree in trees]
    for name in ("batch", *names, "adaptive", "of the best", "sizes it chose"):
        table.add_column(name, justify="right")
    worst, favourites = np.inf, []
    for batch in options.batches:
        # A few prompts at least: what is best for one is chance.
        groups = list(itertools.batched(texts[: max(batch, PROMPTS)], batch))
        plan = lambda drafter, groups=groups: [
            prepare(target, list(group), drafts=[drafter], max_new_tokens=options.new_tokens, eos_ids=())
            for group in groups
        ]
        plans = [plan(drafter) for drafter in fixed]
        calls = {index: functools.partial(decode_seconds, own) for index, own in enumerate(plans)}
        # What a round takes with each size: measured here first, on the same batches.
        rounds = [_rounds(own) for own in plans]
        first = interleaved(calls, max(2, options.repeats // 2))
        seconds = [first[index] / len(rounds[index]) for index in calls]
        flexible = plan(adaptive(fixed, expected=expected.tolist(), seconds=seconds, batches=(batch,)))
        calls[len(fixed)] = functools.partial(decode_seconds, flexible)
        taken = samples(calls, options.repeats)
        emitted = sum(map(len, groups)) * (options.new_tokens - 1)
        speeds = [emitted / statistics.median(taken[index]) for index in calls]
        chosen = np.array(
            [
                min(trees, key=lambda tree: abs(tree.shape.num_nodes - 1 - drafted)).shape.num_nodes
                for drafted in _rounds(flexible)
            ]
        )
        # Of times of the same turn, since a machine's speed drifts.
        share = min(
            statistics.median(own / adapted for own, adapted in zip(taken[index], taken[len(fixed)]))
            for index in range(len(fixed))
        )
        worst = min(worst, share)
        favourites.append(float(np.mean(chosen)))
        counts = ", ".join(f"{size}: {int(np.sum(chosen == size))}" for size in sorted(set(chosen.tolist())))
        table.add_row(str(batch), *(f"{speed:.0f}" for speed in speeds), f"{share:.2f}", counts)
        ahead = ", ".join(f"{name} {1e3 * second:.1f} ms" for name, second in zip(names, seconds))
        screen.print(
            f"batch {batch}: a round took {ahead} before; adaptive then chose {counts} and had {share:.2f} of the best "
            f"fixed size's tokens per second",
            highlight=False,
        )
    screen.print(table)
    screen.print(
        f"adaptive is at worst {worst:.2f} of the best fixed size; mean rows a round at batches {options.batches}: "
        f"{', '.join(f'{mean:.1f}' for mean in favourites)}",
        highlight=False,
    )
    falls = favourites == sorted(favourites, reverse=True) and (len(favourites) < 2 or favourites[-1] < favourites[0])
    return 0 if worst >= 0.95 and falls else 1


def _rounds(plans: Sequence[Plan]) -> list[int]:
    """Nodes drafted below the root in each round of each batch's longest row."""
    found = []
    for plan in plans:
        end = decode.run_decode(plan.spec, plan.params, plan.start())
        emitted, drafted = np.asarray(end.rounds.emitted), np.asarray(end.rounds.drafted)
        row = int(np.argmax(np.sum(emitted > 0, axis=1)))
        found += np.sum(drafted[row], axis=-1)[emitted[row] > 0].tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
