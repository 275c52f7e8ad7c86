"""The training loop: a function of the step, so that a killed run goes on where it was."""

import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import matplotlib.figure
import optax
import rich.console
import rich.progress

from experiments import config as configs
from specjax.train import TrainState, make_optimizer, restore_latest, save_checkpoint
from specjax.types import PyTree


class Schedule(Protocol):
    """The settings of an optimiser, as configs give them."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...


def optimizer_of(schedule: Schedule) -> optax.GradientTransformation:
    """The optimiser of a config's settings."""
    return make_optimizer(
        learning_rate=schedule.learning_rate,
        warmup_steps=schedule.warmup_steps,
        total_steps=schedule.steps,
        weight_decay=schedule.weight_decay,
        clip_norm=schedule.clip_norm,
    )


def weights_digest(directory: str) -> str:
    """Of the weights of the model in a directory that a config names."""
    files = sorted(configs.resolve(directory).glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def check_unchanged(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Refuse to go on from what was made with other settings.

    Raises:
      ValueError: naming the settings that changed.
    """
    record = folder / "settings.json"
    settings = json.loads(json.dumps(settings))
    if not record.exists():
        record.write_text(json.dumps(settings, indent=2) + "\n")
        return
    made = json.loads(record.read_text())
    changed = sorted(key for key in made.keys() | settings.keys() if made.get(key) != settings.get(key))
    if changed:
        raise ValueError(
            f"{folder} holds checkpoints made with other settings ({', '.join(changed)}). Give those settings again, "
            "another work folder, or delete this one to start from nothing."
        )


def fit(
    name: str,
    folder: pathlib.Path,
    state: TrainState,
    step: Callable[..., tuple[TrainState, jax.Array]],
    inputs_at: Callable[[int], Any],
    evaluate: Callable[[PyTree], dict[str, float]],
    *,
    steps: int,
    tokens_per_step: int,
    evaluate_every: int,
    save_every: float,
    console: rich.console.Console,
) -> PyTree:
    """Train, or go on training from the newest checkpoint in ``folder``, and return the parameters.

    Args:
      name: for people.
      folder: of this run's checkpoints and log.jsonl.
      state: where training starts if there is no checkpoint.
      step: ``(state, inputs) -> (state, loss)``.
      inputs_at: the inputs of step 0, 1, ..; what it gives must depend on nothing else.
      evaluate: numbers for the log, from parameters.
      steps: how many in all.
      tokens_per_step: for the log.
      evaluate_every: steps between evaluations.
      save_every: seconds between checkpoints; the last step is always saved.
      console: what progress is written to.
    """
    state = restore_latest(folder, state) or state
    log = folder / "log.jsonl"
    done = int(state.step)
    records = [record for record in read_log(log) if record["step"] <= done]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    seconds_before = records[-1]["seconds"] if records else 0.0

    start = saved = time.monotonic()
    losses: list[jax.Array] = []
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as progress, log.open("a") as lines:
        task = progress.add_task(name, total=steps, completed=done)
        while done < steps:
            state, loss = step(state, inputs_at(done))
            losses.append(loss)
            done += 1
            progress.advance(task)
            if done % evaluate_every == 0 or done == steps:
                found = {"loss": float(jnp.mean(jnp.stack(losses))), **evaluate(state.params)}
                record = {
                    "step": done,
                    "tokens": done * tokens_per_step,
                    **found,
                    "seconds": seconds_before + time.monotonic() - start,
                }
                losses = []
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                numbers = ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in found.items())
                console.print(
                    f"{name} step {done} of {steps}: {numbers}, "
                    f"{record['tokens'] / 1e6:.1f} M tokens, {record['seconds'] / 60:.1f} minutes"
                )
            if done == steps or time.monotonic() - saved > save_every:
                save_checkpoint(folder, state)
                saved = time.monotonic()
    return state.params


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The evaluations of a run so far; a line cut off by a kill is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def plot_losses(logs: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Loss over tokens read, training thin and held-out thick."""
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="tokens read", ylabel="loss (nats per token)")
    for number, (name, records) in enumerate(logs.items()):
        tokens = [record["tokens"] for record in records]
        axes.plot(tokens, [record["loss"] for record in records], color=f"C{number}", linewidth=0.7, alpha=0.6)
        axes.plot(tokens, [record["held_out"] for record in records], color=f"C{number}", linewidth=2, label=name)
    axes.legend(title="held out (thin: training)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
