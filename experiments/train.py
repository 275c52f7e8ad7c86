"""Training of the small-model zoo: ``python -m experiments.train configs/zoo.toml [--set a.b=value] [--only NAME]``."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments import command
from experiments import config as configs
from experiments import corpus as corpora
from experiments.fit import check_unchanged, fit, optimizer_of, plot_losses, read_log
from specjax.models import DecoderConfig, init_model, load_model, save_model
from specjax.train import (
    causal_logits,
    embedding_from,
    init_train_state,
    make_train_step,
    next_token_loss,
    ranks_of_choice,
)
from specjax.types import Model, PyTree

_SHARD_BYTES = 19_000_000  # what many hosts of repositories take without large-file storage
_TOP = 5  # agreement is reported for the draft's 1..5 most likely tokens


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
    product_dtype: Literal["float32", "bfloat16"] = "float32"  # matrices are multiplied in it; all else is float32
    teacher: str | None = None  # an earlier model that this one starts from and is trained to imitate
    teacher_weight: float = configs.setting(0.0, low=0, high=1)  # the imitation's share of the loss

    def __post_init__(self):
        if self.warmup_steps >= self.steps:
            raise ValueError(f"expected fewer warmup_steps than steps, got {self.warmup_steps} and {self.steps}")


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A family of models with one tokenizer; the first is the target that the others draft for."""

    out: str  # folder of the finished models
    work: str  # folder of the corpus, the checkpoints and the report
    models: dict[str, ModelRun]  # trained in this order
    vocab_size: int = configs.setting(low=257)
    max_positions: int = configs.setting(low=1)
    slices: int = configs.setting(low=1)  # the training files are dealt into so many
    source: str | None = None  # folder of Python files to learn from; none is the interpreter's standard library
    seed: int = 0
    held_out_windows: int = configs.setting(64, low=1)  # sequences of held-out text that losses are measured on
    evaluate_every: int = configs.setting(100, low=1)  # steps
    save_every: float = configs.setting(120.0, low=0)  # seconds

    def __post_init__(self):
        names = list(self.models)
        if not names:
            raise ValueError("models: expected at least one table [models.NAME]")
        for name, run in self.models.items():
            if not run.slices or max(run.slices) >= self.slices:
                raise ValueError(f"models.{name}.slices: expected some of 0..{self.slices - 1}, got {run.slices}")
            if run.length > self.max_positions:
                raise ValueError(f"models.{name}.length: expected at most max_positions={self.max_positions}")
            if run.teacher is not None and run.teacher not in names[: names.index(name)]:
                raise ValueError(f"models.{name}.teacher: expected a model trained before it, got {run.teacher!r}")

    def decoder(self, name: str) -> DecoderConfig:
        """The architecture of one of the models."""
        run = self.models[name]
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=run.hidden_size,
            intermediate_size=run.intermediate_size,
            num_layers=run.num_layers,
            num_heads=run.num_heads,
            num_kv_heads=run.num_kv_heads,
            head_dim=run.head_dim,
            max_positions=self.max_positions,
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
    if len(tokens) <= length:
        raise ValueError(f"{len(tokens)} held-out tokens are too few for sequences of {length} tokens")
    starts = np.linspace(0, len(tokens) - length - 1, windows).astype(int)
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)
    return [rows[i : i + batch] for i in range(0, windows, batch)]


def held_out_loss(model: Model, params: PyTree, batches: Sequence[np.ndarray]) -> float:
    """Nats per token over the held-out windows."""
    losses = [float(_batch_loss(model.forward, model.init_cache, params, batch)) * len(batch) for batch in batches]
    return sum(losses) / sum(map(len, batches))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_loss(forward: Callable, init_cache: Callable, params: PyTree, tokens: jax.Array) -> jax.Array:
    logits = causal_logits(Model(forward, params, init_cache, 0, 0), params, tokens[:, :-1])
    return next_token_loss(logits, tokens[:, 1:])


def agreement(target: Model, drafts: dict[str, Model], batches: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Per draft, and for all of them together, how often its k most likely tokens hold the target's, k = 1..5."""

    @jax.jit
    def ranks(params: dict[str, PyTree], tokens: jax.Array) -> dict[str, jax.Array]:
        chosen = causal_logits(target, params["target"], tokens)
        return {
            name: ranks_of_choice(chosen, causal_logits(draft, params["drafts"][name], tokens))
            for name, draft in drafts.items()
        }

    params = {"target": target.params, "drafts": {name: draft.params for name, draft in drafts.items()}}
    found = [ranks(params, batch[:, :-1]) for batch in batches]
    by_draft = {name: np.concatenate([np.ravel(part[name]) for part in found]) for name in drafts}
    by_draft["union"] = np.min(np.stack(list(by_draft.values())), axis=0)
    return {name: [float((rank < k).mean()) for k in range(1, _TOP + 1)] for name, rank in by_draft.items()}


def train_one(zoo: Zoo, name: str, corpus: corpora.Corpus, console: rich.console.Console) -> PyTree:
    """Train one model, or go on training it, and return its parameters.

    Raises:
      ValueError: the work folder holds checkpoints made with other settings, or the text is too short.
    """
    run = zoo.models[name]
    folder = configs.resolve(zoo.work) / name
    folder.mkdir(parents=True, exist_ok=True)
    check_unchanged(folder, {**configs.to_dict(run), "seed": zoo.seed, "corpus": corpus.digest})

    model = init_model(zoo.decoder(name), jax.random.key(zoo.seed))
    teacher = None if run.teacher is None else load_model(configs.resolve(zoo.out) / run.teacher)
    if teacher is not None:
        embedding = embedding_from(teacher.params["embed_tokens"][...], run.hidden_size)
        model.params["embed_tokens"].set_value(embedding)
    optimizer = optimizer_of(run)
    step = make_train_step(
        model,
        optimizer,
        product_dtype=run.product_dtype,
        teacher=teacher,
        teacher_weight=run.teacher_weight,
    )
    text = np.concatenate([corpus.slices[i] for i in run.slices])
    held_out = held_out_batches(corpus.held_out, windows=zoo.held_out_windows, length=run.length)

    batch_of = functools.partial(batch_at, text, batch=run.batch, length=run.length, seed=zoo.seed)
    return fit(
        name,
        folder,
        init_train_state(model.params, optimizer),
        step,
        lambda done: jnp.asarray(batch_of(done)),
        lambda params: {"held_out": held_out_loss(model, params, held_out)},
        steps=run.steps,
        tokens_per_step=run.batch * run.length,
        evaluate_every=zoo.evaluate_every,
        save_every=zoo.save_every,
        console=console,
    )


def report(zoo: Zoo, corpus: corpora.Corpus, console: rich.console.Console) -> dict[str, Any]:
    """Measure the finished models as they are stored, print the tables and write report.json and losses.png."""
    work = configs.resolve(zoo.work)
    logs = {name: read_log(work / name / "log.jsonl") for name in zoo.models}
    models = {name: load_model(configs.resolve(zoo.out) / name) for name in zoo.models}
    length = max(run.length for run in zoo.models.values())
    batches = held_out_batches(corpus.held_out, windows=zoo.held_out_windows, length=length)
    target, *drafts = zoo.models
    result: dict[str, Any] = {
        "models": {
            name: {
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
                "held_out_loss": held_out_loss(model, model.params, batches),
                "tokens": logs[name][-1]["tokens"],
                "seconds": logs[name][-1]["seconds"],
            }
            for name, model in models.items()
        },
        "agreement": agreement(models[target], {name: models[name] for name in drafts}, batches) if drafts else {},
    }
    (work / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    plot_losses(logs, work / "losses.png")

    table = rich.table.Table("model", "parameters", "held-out loss", "tokens", "minutes", title="Training")
    for name, row in result["models"].items():
        table.add_row(
            name,
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['held_out_loss']:.3f}",
            f"{row['tokens'] / 1e6:.1f} M",
            f"{row['seconds'] / 60:.1f}",
        )
    console.print(table)
    table = rich.table.Table("draft", *(f"k={k}" for k in range(1, _TOP + 1)), title=f"Top-k holds {target}'s choice")
    for name, shares in result["agreement"].items():
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    console.print(table)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the config names and is not finished, export it, and report once all of it is there."""
    parser = command.parser("train", "Train a family of small models; a killed run goes on where it was.")
    parser.add_argument("--only", metavar="NAME", help="train this one of the models")
    options = parser.parse_args(arguments)
    console = rich.console.Console()
    try:
        zoo = configs.load(Zoo, options.config, options.set)
        if options.only is not None and options.only not in zoo.models:
            raise ValueError(f"--only: expected one of {', '.join(zoo.models)}, got {options.only!r}")
        corpus = corpora.load(
            configs.resolve(zoo.work) / "corpus",
            vocab_size=zoo.vocab_size,
            slices=zoo.slices,
            root=zoo.source,
        )
        for name in zoo.models if options.only is None else [options.only]:
            params = train_one(zoo, name, corpus, console)
            save_model(
                configs.resolve(zoo.out) / name,
                zoo.decoder(name),
                params,
                eos_ids=(corpus.eos_id,),
                tokenizer=corpus.tokenizer,
                max_shard_bytes=_SHARD_BYTES,
            )
        if options.only is None:
            report(zoo, corpus, console)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
