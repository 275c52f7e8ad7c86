"""The hub's models that the configs name, without their weights: shapes, and a decode step compiled for a TPU.

python -m experiments.shapes [CONFIG ...]    # needs libtpu; `make shapes` puts it into an environment of its own

Exits with an error where a model does not compile or does not fit the chip.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from experiments import config, kernels, sweep
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_decoder, decoder_functions
from specjax.models.families import from_hugging_face
from specjax.types import PyTree, TreeMask

CONFIGS = ("llama3_8b", "qwen2_5", "mistral", "opt")
CHIP = "v6e"  # 32 GB
ROWS, CAPACITY = 64, 4096  # a tree, and the committed rows behind it


@functools.cache
def architectures() -> dict[str, DecoderConfig]:
    """By id, from what the models' config.json on the hub say."""
    path = Path(__file__).parent / "architectures.json"
    return {name: from_hugging_face(raw) for name, raw in json.loads(path.read_text()).items()}


def models_of(name: str) -> tuple[str, ...]:
    """The ids of a config's target and drafts."""
    models = config.load(sweep.Experiment, config.REPOSITORY / f"configs/{name}.toml").models
    return models.target, *models.drafts


def abstract_step(
    architecture: DecoderConfig,
    dtype: str,
    attention: str | None,
    *,
    rows: int,
    capacity: int,
    sharding: Sharding | None = None,
) -> tuple[Any, tuple[PyTree, ...]]:
    """One verify step for a batch of one, and its arguments as shapes.

    The step feeds a tree of ``rows`` nodes behind ``capacity`` committed rows and commits a path of it. It returns the
    likeliest next token of every node [1, rows] and the cache, which is donated.
    """
    forward, init_cache, *_ = decoder_functions(architecture, attention, dtype)

    def step(params, cache, tokens, positions, tree_mask, path, count):
        out = forward(params, tokens, positions, TreeMask(cache.lengths, tree_mask), cache)
        return jnp.argmax(out.logits, axis=-1), out.cache.commit(path, count)

    shape = lambda dims, kind: jax.ShapeDtypeStruct(dims, kind, sharding=sharding)
    params = jax.tree.map(lambda leaf: shape(leaf.shape, dtype), abstract_decoder(architecture)[1])
    cache = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(lambda: init_cache(1, capacity)))
    numbers = [shape(dims, jnp.int32) for dims in ((1, rows), (1, rows), (1, 8), (1,))]
    arguments = params, cache, *numbers[:2], shape((1, rows, rows), jnp.bool_), *numbers[2:]
    return jax.jit(step, donate_argnums=1), arguments


def check(name: str, target: kernels.Target, sharding: Sharding) -> str | None:
    """Compile a model's step and print a line; returns what is wrong."""
    architecture = architectures()[name]
    step, arguments = abstract_step(
        architecture, "bfloat16", None, rows=ROWS, capacity=min(CAPACITY, architecture.max_positions), sharding=sharding
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    began = time.perf_counter()
    try:
        with target.device():
            compiled = step.trace(*arguments).lower(lowering_platforms=(target.lowering,)).compile()
    except Exception as error:  # whatever the compiler raises is the finding
        print(f"{name:32} {parameters:>13,}  does not compile", flush=True)
        return f"{name}: {error}"
    memory, seconds = compiled.memory_analysis(), time.perf_counter() - began
    print(
        f"{name:32} {parameters:>13,}  arguments {memory.argument_size_in_bytes / 2**30:5.2f} GiB, "
        f"cache aliased {memory.alias_size_in_bytes / 2**20:5.1f} MiB, temporary "
        f"{memory.temp_size_in_bytes / 2**20:6.1f} MiB  {seconds:5.1f} s",
        flush=True,
    )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.shapes", description=__doc__)
    parser.add_argument("configs", nargs="*", default=CONFIGS, help=f"names in configs/, default {' '.join(CONFIGS)}")
    options = parser.parse_args(arguments)
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its lock guards a device, and there is none
    target = next(target for target in kernels.targets() if target.name == CHIP)
    sharding = target.sharding()
    names = dict.fromkeys(model for name in options.configs for model in models_of(name))
    problems = [problem for name in names if (problem := check(name, target, sharding))]
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
