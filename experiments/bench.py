"""Timing, as ratios inside one run: what a round costs beside the bare forwards it is made of."""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

import specjax as sj
from experiments.bench_attention import attention_ratios
from experiments.bench_draft import drafting_ratios
from experiments.bench_verify import verify_ratios
from experiments.timing import interleaved, timed
from specjax import decode
from specjax.request import prepare
from specjax.types import Model, TreeMask

IN_A_LOOP, ALONE = 16, 1  # forwards per timed call: in a loop inside one executable, as rounds are, or each on its own


def bare_forward(
    model: Model, *, passes: int, rows: int, tree_rows: int, prefix: int, capacity: int, last_only: bool = False
) -> Callable[[], float]:
    """Seconds of one forward of ``rows`` rows, the last of ``tree_rows`` uncommitted ones, and nothing else.

    ``last_only`` asks for the logits of the last row alone.
    """
    lengths = jnp.full((1,), prefix, jnp.int32)
    tree_mask = jnp.ones((1, rows, tree_rows), bool)
    cache = model.init_cache(1, capacity)
    earlier = lambda buffers: tuple(buffer[:, :, : tree_rows - rows] for buffer in buffers)
    cache = dataclasses.replace(cache, k_tree=earlier(cache.k), v_tree=earlier(cache.v), lengths=lengths)
    wanted = jnp.full((1, 1), rows - 1, jnp.int32) if last_only else None

    @jax.jit
    def loop(params, cache):
        # Each waits for the one before, and nothing but the cache is known beforehand: no pass is cheaper than a first.
        def body(_, token):
            tokens, prefixes = jnp.full((1, rows), token), lengths + token - 1
            mask = TreeMask(prefixes, tree_mask)
            positions = jnp.broadcast_to(prefixes[:, None], (1, rows))
            logits = model.forward(params, tokens, positions, mask, cache, rows=wanted).logits
            return token + (logits[0, 0, 0] * 0).astype(jnp.int32)

        return lax.fori_loop(0, passes, body, jnp.int32(1))

    return lambda: timed(lambda: loop(model.params, cache)) / passes


def round_cost(
    target: Model, draft: Model, schedule: Sequence[int], *, prompt: Sequence[int], new_tokens: int
) -> dict[tuple[str, int], Callable[[], float]]:
    """The calls to be timed: rounds of greedy decoding at batch 1, and the bare forwards of one round.

    Keys are a name and how many passes one call makes; a round has only the one way.
    """
    shape = sj.Topology.from_schedule(schedule).shape
    plan = prepare(target, [prompt], drafts=[draft], tree=tuple(schedule), max_new_tokens=new_tokens, eos_ids=())
    capacity = plan.inputs[0].shape[1]
    middle = len(prompt) + new_tokens // 2

    def rounds() -> float:
        state = jax.block_until_ready(plan.start())
        began = time.perf_counter()
        state = jax.block_until_ready(decode.run_decode(plan.spec, plan.params, state))
        return (time.perf_counter() - began) / int(jnp.sum(state.rounds.emitted > 0))

    # The draft is fed what the last round emitted (up to depth + 1 tokens), then every level that has children.
    emitted = shape.depth + 1
    forward = functools.partial(bare_forward, prefix=middle, capacity=capacity)
    calls: dict[tuple[str, int], Callable[[], float]] = {("round", IN_A_LOOP): rounds}
    for passes in (IN_A_LOOP, ALONE):
        calls["target", passes] = forward(target, passes=passes, rows=shape.num_nodes, tree_rows=shape.num_nodes)
        calls["draft, emitted tokens", passes] = forward(
            draft, passes=passes, rows=emitted, tree_rows=emitted, last_only=True
        )
        fed = 0
        for level, width in enumerate(shape.widths[1:], 1):
            fed += width
            calls[f"draft, level {level}", passes] = forward(draft, passes=passes, rows=width, tree_rows=fed)
    return calls


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and the same as JSON."""
    zoo = Path(__file__).parent / "zoo"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=zoo / "target")
    parser.add_argument("--draft", type=Path, default=zoo / "ssm_a")
    parser.add_argument("--schedule", default="3,2,1,1")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    schedule = tuple(map(int, options.schedule.split(",")))
    target, draft = sj.load_model(options.target), sj.load_model(options.draft)
    prompt = np.random.default_rng(0).integers(0, target.vocab_size, options.prompt_tokens).tolist()

    calls = round_cost(target, draft, schedule, prompt=prompt, new_tokens=options.new_tokens)
    median = interleaved(calls, options.repeats)
    attention = attention_ratios(repeats=options.repeats)
    ssms = [sj.load_model(zoo / f"ssm_{letter}") for letter in "abc"]
    drafting = drafting_ratios(ssms, schedule, prompt=prompt, repeats=options.repeats)
    verify = verify_ratios(repeats=options.repeats)
    round_seconds = median["round", IN_A_LOOP]
    bare = {passes: sum(median[key] for key in median if key[1] == passes) for passes in (IN_A_LOOP, ALONE)}
    bare[IN_A_LOOP] -= round_seconds

    table = Table(title=f"A round of <{options.schedule}>, batch 1, greedy", title_justify="left")
    table.add_column("milliseconds")
    table.add_column("in a loop", justify="right")
    table.add_column("each its own call", justify="right")
    rows = {name: [median.get((name, passes)) for passes in (IN_A_LOOP, ALONE)] for name, _ in median}
    rows["all bare forwards"] = [bare[IN_A_LOOP], bare[ALONE]]
    for name, values in rows.items():
        table.add_row(name, *["" if value is None else f"{1e3 * value:.3f}" for value in values])
    console = Console()
    console.print(table)
    ratios = {
        "round / bare forwards, each its own call": round_seconds / bare[ALONE],
        "round / bare forwards, in a loop": round_seconds / bare[IN_A_LOOP],
        **{f"attention, {name}": value for name, value in attention.items()},
        **{f"drafting, {name}": value for name, value in drafting.items()},
        **{f"verify, {name}": value for name, value in verify.items()},
    }
    for name, value in ratios.items():
        console.print(f"{name}: {value:.2f}")
    milliseconds = {name: [value and 1e3 * value for value in values] for name, values in rows.items()}
    print(json.dumps({"schedule": schedule, "ratios": ratios, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
