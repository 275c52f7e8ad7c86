"""Boost-tuning of small models: ``python -m experiments.boost configs/boost.toml [--set a.b=value]``."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments import answers as said
from experiments import command, coverage
from experiments import config as configs
from experiments import corpus as corpora
from experiments.answers import Answers
from experiments.fit import check_unchanged, fit, optimizer_of, read_log, weights_digest
from experiments.train import held_out_batches
from specjax.models import load_model, save_model
from specjax.models.families import from_hugging_face
from specjax.train import (
    Lesson,
    answers_covered,
    best_factor,
    init_train_state,
    make_lesson_step,
    matched,
    scale_logits,
    spans,
)
from specjax.types import Model


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What the target is asked, and how it answers."""

    count: int = configs.setting(low=1)  # training prompts
    tokens: int = configs.setting(low=1)  # of a prompt
    continuation: int = configs.setting(low=1)  # tokens that the target says to each
    temperature: float = configs.setting(0.0, low=0)  # 0: its greedy continuation
    top: int = configs.setting(8, low=1)  # of the target's tokens at every place, so many are kept for distillation
    batch: int = configs.setting(64, low=1)  # prompts at once
    held_out: int = configs.setting(64, low=1)  # prompts from held-out text, to measure on


@dataclasses.dataclass(frozen=True)
class Match:
    """When an SSM counts as matching an answer, and what becomes of it."""

    span: int = configs.setting(low=1)  # tokens of an answer; a continuation holds several
    top: int = configs.setting(1, low=1)  # matched if each of them is among the SSM's so many likeliest; 1 is greedy
    weight: float = configs.setting(0.0, low=0, high=1)  # in the loss of the next SSMs; 0 drops what is matched
    prompt_weight: float = configs.setting(0.0, low=0)  # of the prompts' own tokens, which are answers of one token


@dataclasses.dataclass(frozen=True)
class Ssm:
    """One SSM: what it starts from and how it is trained."""

    base: str  # a directory in the Hugging Face layout
    batch: int = configs.setting(low=1)  # texts per step
    steps: int = configs.setting(low=1)
    learning_rate: float = configs.setting(low=0)
    warmup_steps: int = configs.setting(low=0)
    weight_decay: float = configs.setting(0.1, low=0)
    clip_norm: float = configs.setting(1.0, low=0)
    teacher_weight: float = configs.setting(0.0, low=0, high=1)  # share of the loss: imitation of probabilities

    def __post_init__(self):
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps: expected fewer than steps={self.steps}, got {self.warmup_steps}")


@dataclasses.dataclass(frozen=True)
class Boost:
    """A target and the SSMs that are tuned to it, one after the other."""

    out: str  # folder of the finished models
    work: str  # folder of the corpus, the answers, the checkpoints and the report
    target: str  # a directory in the Hugging Face layout
    prompts: Prompts
    match: Match
    ssms: dict[str, Ssm]  # trained in this order
    compare: tuple[str, ...] = ()  # directories of an ensemble to compare with
    source: str | None = None  # folder of Python files to cut prompts from; none is the interpreter's standard library
    product_dtype: Literal["float32", "bfloat16"] = "float32"  # matrices are multiplied in it; all else is float32
    seed: int = configs.setting(0, low=0)
    held_out_windows: int = configs.setting(64, low=1)  # sequences of held-out text that coverage is measured on
    held_out_tokens: int = configs.setting(384, low=1)  # places in each
    evaluate_every: int = configs.setting(100, low=1)  # steps
    save_every: float = configs.setting(120.0, low=0)  # seconds

    def __post_init__(self):
        if not self.ssms:
            raise ValueError("ssms: expected at least one table [ssms.NAME]")
        read = (self.target, *self.compare, *(ssm.base for ssm in self.ssms.values()))
        for name in self.ssms:
            if configs.resolve(self.out) / name in map(configs.resolve, read):
                raise ValueError(f"out: {self.out}/{name} is read by this config; write to another folder")


@dataclasses.dataclass(frozen=True)
class Material:
    """What every SSM is taught and measured with."""

    lessons: Answers  # to prompts from the training text
    starts: np.ndarray  # [S] first places of the answers in a text
    text: Answers  # held-out windows; every place is an answer of one token
    asked: Answers  # held-out prompts with the target's continuations


def collect(boost: Boost, target: Model, corpus: corpora.Corpus, console: rich.console.Console) -> Material:
    """Have the target answer everything; what was answered before is read from the work folder.

    Raises:
      ValueError: the work folder holds the answers of another target or to other prompts, or the text is too short.
    """
    folder = configs.resolve(boost.work) / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"target": weights_digest(boost.target), "corpus": corpus.digest, "product_dtype": boost.product_dtype}
    windows = {"held_out_windows": boost.held_out_windows, "held_out_tokens": boost.held_out_tokens}
    check_unchanged(folder, {**dataclasses.asdict(boost.prompts), **settings, **windows, "seed": boost.seed})
    wanted = boost.prompts
    ask = functools.partial(
        said.collect,
        target=target,
        temperature=wanted.temperature,
        batch=wanted.batch,
        product_dtype=boost.product_dtype,
        seed=boost.seed,
        console=console,
    )
    spread = held_out_batches(corpus.held_out, windows=boost.held_out_windows, length=boost.held_out_tokens)
    return Material(
        lessons=ask(
            folder / "training",
            prompts=said.cut_prompts(corpus.slices[0], wanted.count, wanted.tokens, boost.seed),
            continuation_tokens=wanted.continuation,
            top=wanted.top,
        ),
        starts=spans(wanted.tokens, wanted.continuation, boost.match.span),
        text=ask(folder / "held_out_text", prompts=np.concatenate(spread), continuation_tokens=0, top=1),
        asked=ask(
            folder / "held_out_prompts",
            prompts=said.cut_prompts(corpus.held_out, wanted.held_out, wanted.tokens, boost.seed),
            continuation_tokens=wanted.continuation,
            top=1,
        ),
    )


def place_weights(boost: Boost, known: np.ndarray) -> np.ndarray:
    """Weight of each place [N, L] in the loss, given which places earlier SSMs match."""
    in_prompt = np.arange(known.shape[1]) < boost.prompts.tokens - 1
    return np.where(in_prompt, boost.match.prompt_weight, 1.0) * np.where(known, boost.match.weight, 1.0)


def lesson_at(
    lessons: Answers, weights: np.ndarray, step: int, *, batch: int, teacher_weight: float, seed: int
) -> Lesson:
    """The texts of one step: a function of the step. Every epoch reads each text with any weight once."""
    rows = np.flatnonzero(weights.any(axis=1))
    epochs, places = np.divmod(np.arange(step * batch, (step + 1) * batch), len(rows))
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(rows) for epoch in set(epochs.tolist())}
    chosen = np.array([orders[epoch][place] for epoch, place in zip(epochs.tolist(), places)])
    hard, soft = lessons.said[chosen][..., None], lessons.top_tokens[chosen]
    shares = [np.full(hard.shape, 1 - teacher_weight), teacher_weight * lessons.top_shares[chosen]]
    return Lesson(
        tokens=jnp.asarray(lessons.tokens[chosen, :-1], jnp.int32),
        answers=jnp.asarray(np.concatenate([hard, soft], axis=-1), jnp.int32),
        shares=jnp.asarray(np.concatenate(shares, axis=-1), jnp.float32),
        weights=jnp.asarray(weights[chosen], jnp.float32),
    )


def tune(
    boost: Boost, name: str, target: Model, material: Material, known: np.ndarray, console: rich.console.Console
) -> np.ndarray:
    """Tune one SSM on what earlier ones leave, or go on tuning it, and write it to the out folder.

    Args:
      boost: the config.
      name: of the SSM.
      target: whose confidence the SSM is given in the end.
      material: what the target says.
      known: [N, L] bool, the places of the training texts that earlier SSMs match.
      console: what progress is written to.

    Returns:
      [N, L] ranks of the target's answers to the training prompts, in the tuned SSM's order.

    Raises:
      ValueError: the work folder holds checkpoints made with other settings, the SSM does not fit the target, or
        nothing is left to train on.
    """
    ssm = boost.ssms[name]
    folder = configs.resolve(boost.work) / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = place_weights(boost, known)
    taught = hashlib.sha256(weights.tobytes() + material.lessons.tokens.tobytes()).hexdigest()
    settings = {**dataclasses.asdict(ssm), "base": weights_digest(ssm.base), "product_dtype": boost.product_dtype}
    check_unchanged(folder, {**settings, "seed": boost.seed, "lessons": taught})
    if not weights.any():
        raise ValueError(f"ssms.{name}: the SSMs before it match every answer, so nothing is left to train it on")

    model = load_model(configs.resolve(ssm.base))
    optimizer = optimizer_of(ssm)
    ranks = functools.partial(said.ranks, model, batch=16, product_dtype=boost.product_dtype)
    lesson_of = functools.partial(
        lesson_at, material.lessons, weights, batch=ssm.batch, teacher_weight=ssm.teacher_weight, seed=boost.seed
    )
    params = fit(
        name,
        folder,
        init_train_state(model.params, optimizer),
        make_lesson_step(model, optimizer, product_dtype=boost.product_dtype),
        lesson_of,
        lambda params: {"held_out_agreement": float((ranks(params, material.text) == 0).mean())},
        steps=ssm.steps,
        tokens_per_step=ssm.batch * material.lessons.said.shape[1],
        evaluate_every=boost.evaluate_every,
        save_every=boost.save_every,
        console=console,
    )
    # Cross-entropy to what the target says makes an SSM surer than the target is.
    factor = best_factor(target, model._replace(params=params), _calibration_batches(material.lessons))
    console.print(f"{name}: logits times {factor:.2f}")
    params = scale_logits(params, factor)
    base = configs.resolve(ssm.base)
    save_model(
        configs.resolve(boost.out) / name,
        from_hugging_face(json.loads((base / "config.json").read_text())),
        params,
        eos_ids=model.eos_ids,
        tokenizer=base / "tokenizer.json",
    )
    found = folder / "ranks.npy"
    if not found.exists():
        unfinished = folder / "ranks.new.npy"
        np.save(unfinished, ranks(params, material.lessons))
        os.replace(unfinished, found)
    return np.load(found)


def report(boost: Boost, training: dict[str, Any], material: Material, console: rich.console.Console) -> dict[str, Any]:
    """Measure what is stored, print the tables and write report.json, report.md and coverage.png."""
    work = configs.resolve(boost.work)
    tuned = {name: load_model(configs.resolve(boost.out) / name) for name in boost.ssms}
    compared = {pathlib.Path(path).name: load_model(configs.resolve(path)) for path in boost.compare}
    measured = functools.partial(
        coverage.measure,
        text=material.text,
        asked=material.asked,
        prompt_tokens=boost.prompts.tokens,
        span=boost.match.span,
        top=boost.match.top,
    )
    result = {
        "training": training,
        "tuned": measured(tuned),
        "compare": measured(compared) if compared else {},
    }
    (work / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    coverage.plot(result, {name: read_log(work / name / "log.jsonl") for name in boost.ssms}, work / "coverage.png")
    lines = ["# Boost-tuning", ""]
    for title, rows in coverage.tables(result).items():
        table = rich.table.Table(*rows[0], title=title)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
        lines += [f"{title}:", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
        lines.insert(-len(rows), "|---" * len(rows[0]) + "|")
    lines += [
        f"An answer in a continuation is {boost.match.span} tokens, matched if each is among the SSM's "
        f"{boost.match.top} likeliest.",
        "",
        "![Coverage after each SSM](coverage.png)",
    ]
    (work / "report.md").write_text("\n".join(lines) + "\n")
    return result


def run(boost: Boost, console: rich.console.Console) -> dict[str, Any]:
    """Everything the config asks for that is not done yet.

    Raises:
      ValueError: for models that do not fit together, and as ``collect`` and ``tune`` do.
    """
    target = load_model(configs.resolve(boost.target))
    tokenizer = configs.resolve(boost.target) / "tokenizer.json"
    longest = max(boost.prompts.tokens + boost.prompts.continuation, boost.held_out_tokens)
    for path in (boost.target, *(ssm.base for ssm in boost.ssms.values()), *boost.compare):
        if (configs.resolve(path) / "tokenizer.json").read_bytes() != tokenizer.read_bytes():
            raise ValueError(f"{path}: has another tokenizer than the target {boost.target}, so their ids differ")
        limit = load_model(configs.resolve(path)).max_positions
        if longest > limit:
            raise ValueError(f"{path}: reads at most {limit} tokens, and texts here have up to {longest}")
    corpus = corpora.load(
        configs.resolve(boost.work) / "corpus",
        vocab_size=target.vocab_size,
        slices=1,
        root=boost.source,
        tokenizer=tokenizer,
    )
    material = collect(boost, target, corpus, console)
    known = np.zeros(material.lessons.said.shape, bool)
    training: dict[str, Any] = {"alone": {}, "union": {}}
    for name in boost.ssms:
        marks = matched(tune(boost, name, target, material, known, console), material.starts, boost.match.top)
        known |= marks
        training["alone"][name] = answers_covered(marks, material.starts)
        training["union"][name] = answers_covered(known, material.starts)
    return report(boost, training, material, console)


def _calibration_batches(lessons: Answers) -> list[np.ndarray]:
    """A few of the training texts, in batches of one shape."""
    texts = lessons.tokens[:64].astype(np.int32)
    size = min(8, len(texts))
    return [texts[start : start + size] for start in range(0, len(texts) - size + 1, size)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune what the config names and is not finished, and report."""
    parser = command.parser("boost", "Boost-tune small models on a target; a killed run goes on.")
    options = parser.parse_args(arguments)
    try:
        run(configs.load(Boost, options.config, options.set), rich.console.Console())
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
