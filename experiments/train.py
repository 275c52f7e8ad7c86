"""Training of the small-model zoo: ``python -m experiments.train configs/zoo.toml [--set a.b=value] [--only NAME]``."""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import config as configs
from experiments import corpus as corpora
from specjax.models import DecoderConfig, init_model
from specjax.train import (
    causal_logits,
    init_train_state,
    make_optimizer,
    make_train_step,
    next_token_loss,
    restore_latest,
    save_checkpoint,
)
from specjax.types import Model, PyTree

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  the backend is chosen first, since there may be no display


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """One model: its shape, what it reads, and how it is trained."""

    hidden_size: int = configs.setting(low=1)
    intermediate_size: int = configs.setting(low=1)
    num_layers: int = configs.setting(low=1)
    num_heads: int = configs.setting(low=1)
    num_kv_heads: int = configs.setting(low=1)
    head_dim: int = configs.setting(low=2)
    slices: tuple[int, ...] = configs.setting(low=0)  # of the training files
    batch: int = configs.setting(low=1)  # sequences per step
    length: int = configs.setting(low=2)  # tokens per sequence
    steps: int = configs.setting(low=1)
    learning_rate: float = configs.setting(low=0)
    warmup_steps: int = configs.setting(low=0)
    weight_decay: float = configs.setting(0.1, low=0)
    clip_norm: float = configs.setting(1.0, low=0)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of forward and backward; weights are float32
    teacher: str | None = None  # an earlier model whose probabilities this one is trained to imitate
    teacher_weight: float = configs.setting(0.0, low=0, high=1)  # the imitation's share of the loss

    def __post_init__(self):
        if self.warmup_steps >= self.steps:
            raise ValueError(f"expected fewer warmup_steps than steps, got {self.warmup_steps} and {self.steps}")


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A family of models with one tokenizer."""

    out: str  # folder of the finished models
    work: str  # folder of the corpus, the checkpoints and the report
    vocab_size: int = configs.setting(low=257)
    max_positions: int = configs.setting(low=1)
    slices: int = configs.setting(low=1)  # the training files are dealt into so many
    models: dict[str, ModelRun] = dataclasses.field(default_factory=dict)  # trained in this order
    seed: int = 0
    held_out_windows: int = configs.setting(64, low=1)  # sequences of held-out text a loss is measured on
    evaluate_every: int = configs.setting(100, low=1)  # steps
    save_every_seconds: float = configs.setting(120.0, low=0)


def decoder_config(zoo: Zoo, run: ModelRun) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=zoo.vocab_size,
        hidden_size=run.hidden_size,
        intermediate_size=run.intermediate_size,
        num_layers=run.num_layers,
        num_heads=run.num_heads,
        num_kv_heads=run.num_kv_heads,
        head_dim=run.head_dim,
        max_positions=zoo.max_positions,
        tied_head=True,
    )


@functools.lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)


def batch_at(tokens: np.ndarray, step: int, *, batch: int, length: int, seed: int) -> np.ndarray:
    """The sequences [batch, length + 1] of one step: a function of the step, so that a resumed run sees the same.

    Every epoch reads each window of the text once, in another order and cut at other places.
    """
    windows = (len(tokens) - 1) // length - 1
    if windows < 1:
        raise ValueError(f"{len(tokens)} training tokens are too few for sequences of {length} tokens")
    rows = []
    for index in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(index, windows)
        shift = int(np.random.default_rng([seed, epoch, 1]).integers(length))
        start = shift + int(_shuffled(seed, epoch, windows)[place]) * length
        rows.append(tokens[start : start + length + 1])
    return np.stack(rows).astype(np.int32)


def held_out_batches(tokens: np.ndarray, *, windows: int, length: int, batch: int = 8) -> list[np.ndarray]:
    """Evenly spread windows [<= batch, length + 1] of the held-out text."""
    starts = np.linspace(0, len(tokens) - length - 1, windows).astype(int)
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)
    return [rows[i : i + batch] for i in range(0, windows, batch)]


def held_out_loss(model: Model, params: PyTree, batches: list[np.ndarray]) -> float:
    """Nats per token over the held-out windows."""
    losses = [float(_window_loss(model.forward, model.init_cache, params, batch)) * len(batch) for batch in batches]
    return sum(losses) / sum(map(len, batches))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _window_loss(forward, init_cache, params: PyTree, tokens: jax.Array) -> jax.Array:
    model = Model(forward, params, init_cache, 0, 0)
    return next_token_loss(causal_logits(model, params, tokens[:, :-1]), tokens[:, 1:])


def train_one(zoo: Zoo, name: str, corpus: corpora.Corpus, teacher: Model | None, console: Console) -> PyTree:
    """Train (or go on training) one model and return its parameters."""
    run = zoo.models[name]
    folder = configs.resolve(zoo.work) / name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"

    model = init_model(decoder_config(zoo, run), jax.random.key(zoo.seed), dtype=run.compute_dtype)
    params = init_model(decoder_config(zoo, run), jax.random.key(zoo.seed)).params
    optimizer = make_optimizer(
        learning_rate=run.learning_rate,
        warmup_steps=run.warmup_steps,
        total_steps=run.steps,
        weight_decay=run.weight_decay,
        clip_norm=run.clip_norm,
    )
    state = init_train_state(params, optimizer)
    state = restore_latest(folder, state) or state
    step = make_train_step(
        model, optimizer, compute_dtype=run.compute_dtype, teacher=teacher, teacher_weight=run.teacher_weight
    )
    evaluated = init_model(decoder_config(zoo, run), jax.random.key(zoo.seed))

    tokens = np.concatenate([corpus.slices[i] for i in run.slices])
    batches = held_out_batches(corpus.held_out, windows=zoo.held_out_windows, length=run.length)
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    records = [record for record in records if record["step"] <= int(state.step)]
    seconds_before = records[-1]["seconds"] if records else 0.0
    log.write_text("".join(json.dumps(record) + "\n" for record in records))

    start = saved = time.monotonic()
    progress = Progress(
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress, log.open("a") as lines:
        task = progress.add_task(name, total=run.steps, completed=int(state.step))
        losses = []
        for index in range(int(state.step), run.steps):
            text = batch_at(tokens, index, batch=run.batch, length=run.length, seed=zoo.seed)
            state, loss = step(state, text)
            losses.append(loss)
            progress.advance(task)
            done = index + 1
            if done % zoo.evaluate_every == 0 or done == run.steps:
                record = {
                    "step": done,
                    "loss": float(jnp.mean(jnp.stack(losses))),
                    "held_out": held_out_loss(evaluated, state.params, batches),
                    "seconds": seconds_before + time.monotonic() - start,
                    "tokens": done * run.batch * run.length,
                }
                losses = []
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                console.print(
                    f"{name} {done}/{run.steps} loss {record['loss']:.3f} held out {record['held_out']:.3f} "
                    f"after {record['seconds']:.0f} s"
                )
            if time.monotonic() - saved > zoo.save_every_seconds or done == run.steps:
                save_checkpoint(folder, state)
                saved = time.monotonic()
    return state.params


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the models of a zoo; a killed run goes on where it was.")
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides")
    parser.add_argument("--only", metavar="NAME")
    arguments = parser.parse_args()
    zoo = configs.load(Zoo, arguments.config, arguments.overrides)
    console = Console()
    corpus = corpora.load(configs.resolve(zoo.work) / "corpus", vocab_size=zoo.vocab_size, slices=zoo.slices)
    for name in zoo.models:
        if arguments.only in (None, name):
            train_one(zoo, name, corpus, None, console)


if __name__ == "__main__":
    main()
