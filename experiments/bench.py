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
from experiments.timing import interleaved, timed
from specjax import decode
from specjax.request import prepare
from specjax.types import Model, TreeMask

LOOP = 16  # forwards per timed call: like rounds, they run in a loop inside one executable


def bare_forward(
    model: Model, *, rows: int, tree_rows: int, prefix: int, capacity: int, last_only: bool = False
) -> Callable[[], float]:
    """Seconds of one forward of ``rows`` rows, the last of ``tree_rows`` uncommitted ones, and nothing else.

    ``last_only`` asks for the logits of the last row alone.
    """
    lengths = jnp.full((1,), prefix, jnp.int32)
    mask = TreeMask(lengths, jnp.ones((1, rows, tree_rows), bool))
    cache = model.init_cache(1, capacity)
    earlier = lambda buffers: tuple(buffer[:, :, : tree_rows - rows] for buffer in buffers)
    cache = dataclasses.replace(cache, k_tree=earlier(cache.k), v_tree=earlier(cache.v), lengths=lengths)
    positions = jnp.full((1, rows), prefix, jnp.int32)
    wanted = jnp.full((1, 1), rows - 1, jnp.int32) if last_only else None

    @jax.jit
    def loop(params, cache):
        def body(_, tokens):
            logits = model.forward(params, tokens, positions, mask, cache, rows=wanted).logits
            return tokens + (logits[..., 0] * 0).astype(jnp.int32)  # each waits for the one before

        return lax.fori_loop(0, LOOP, body, jnp.ones((1, rows), jnp.int32))

    return lambda: timed(lambda: loop(model.params, cache)) / LOOP


def round_cost(target: Model, draft: Model, schedule: Sequence[int], *, prompt: Sequence[int], new_tokens: int) -> dict:
    """The calls to be timed: rounds of greedy decoding at batch 1, and the bare forwards of one round."""
    shape = sj.Topology.from_schedule(schedule).shape
    plan = prepare(target, [prompt], drafts=[draft], tree=tuple(schedule), max_new_tokens=new_tokens, eos_ids=())
    capacity = plan.inputs[0].shape[1]
    middle = len(prompt) + new_tokens // 2
    forward = functools.partial(bare_forward, prefix=middle, capacity=capacity)

    def rounds() -> float:
        state = jax.block_until_ready(plan.start())
        began = time.perf_counter()
        state = jax.block_until_ready(decode.run_decode(plan.spec, plan.params, state))
        return (time.perf_counter() - began) / int(jnp.sum(state.rounds.emitted > 0))

    calls = {"round": rounds, "target": forward(target, rows=shape.num_nodes, tree_rows=shape.num_nodes)}
    # The draft is fed what the last round emitted (up to depth + 1 tokens), then every level that has children.
    emitted = shape.depth + 1
    calls["draft, emitted tokens"] = forward(draft, rows=emitted, tree_rows=emitted, last_only=True)
    fed = 0
    for level, width in enumerate(shape.widths[1:], 1):
        fed += width
        calls[f"draft, level {level}"] = forward(draft, rows=width, tree_rows=fed)
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
    bare = sum(seconds for name, seconds in median.items() if name != "round")
    ratio = median["round"] / bare
    table = Table(title=f"A round of <{options.schedule}>, batch 1, greedy", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, seconds in {**median, "all bare forwards": bare}.items():
        table.add_row(name, f"{1e3 * seconds:.3f}")
    attention = attention_ratios(repeats=options.repeats)
    console = Console()
    console.print(table)
    console.print(f"round / its bare forwards: {ratio:.2f}")
    for name, value in attention.items():
        console.print(f"attention, {name}: {value:.2f}")
    milliseconds = {name: 1e3 * seconds for name, seconds in median.items()}
    print(
        json.dumps({"schedule": schedule, "round / bare": ratio, "milliseconds": milliseconds, "attention": attention})
    )


if __name__ == "__main__":
    main()
