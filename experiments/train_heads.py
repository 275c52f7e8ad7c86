"""Training of draft heads on a frozen target: `python -m experiments.train_heads configs/heads.toml [--only NAME]`."""

import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table

from experiments import answers, command
from experiments import config as configs
from experiments import corpus as corpora
from experiments.fit import check_unchanged, fit, optimizer_of, plot_losses, read_log, weights_digest
from specjax.models import (
    EagleConfig,
    MedusaConfig,
    eagle_model,
    init_eagle,
    init_medusa,
    load_model,
    medusa_logits,
    save_heads,
)
from specjax.train import (
    TrainState,
    cast_matrices,
    causal_pass,
    eagle_loss,
    init_train_state,
    make_eagle_step,
    make_medusa_step,
    medusa_loss,
    ranks_of_choice,
    shifted,
)
from specjax.types import Model, PyTree

_TOP, _SHOWN = 10, 5  # agreement is reported for a head's 1..10 most likely tokens, and shown for the first of them
_NODES = 21  # of the tree that is recommended for Medusa's heads, as many as <3,2,1,1> has
_ROWS = 8  # sequences of one pass of the target
_ASKED = 64  # sequences that it continues at once


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast something is trained."""

    batch: int = configs.setting(low=1)  # sequences per step
    steps: int = configs.setting(low=1)
    learning_rate: float = configs.setting(low=0)
    warmup_steps: int = configs.setting(low=0)
    weight_decay: float = configs.setting(0.0, low=0)
    clip_norm: float = configs.setting(1.0, low=0)

    def __post_init__(self):
        if self.warmup_steps >= self.steps:
            raise ValueError(f"expected fewer warmup_steps than steps, got {self.warmup_steps} and {self.steps}")


@dataclasses.dataclass(frozen=True)
class Medusa:
    """Medusa's heads."""

    schedule: Schedule
    num_heads: int = configs.setting(4, low=1)
    num_blocks: int = configs.setting(1, low=1)
    tied_projection: bool = False  # whether the target's own head projects to the vocabulary
    decay: float = configs.setting(0.8, low=0, high=1)  # weight of a head against the one before


@dataclasses.dataclass(frozen=True)
class Eagle:
    """EAGLE's layer."""

    schedule: Schedule
    intermediate_size: int = configs.setting(low=1)
    num_heads: int = configs.setting(low=1)
    num_kv_heads: int = configs.setting(low=1)
    head_dim: int = configs.setting(low=2)
    num_layers: int = configs.setting(1, low=1)
    class_weight: float = configs.setting(0.1, low=0)  # of the cross-entropy beside the regression


@dataclasses.dataclass(frozen=True)
class Heads:
    """What is trained, on which target and text."""

    target: str  # directory of the frozen model
    out: str  # folder of the finished heads
    work: str  # folder of the corpus, the hidden states, the checkpoints and the report
    medusa: Medusa
    eagle: Eagle
    windows: int = configs.setting(low=1)  # sequences of training text, whose hidden states are kept on disk
    length: int = configs.setting(low=2)  # tokens per sequence
    continuation: int = configs.setting(0, low=0)  # of them the last so many are what the target says to those before
    held_out_windows: int = configs.setting(64, low=1)
    source: str | None = None  # folder of Python files to learn from; none is the interpreter's standard library
    product_dtype: Literal["float32", "bfloat16"] = "float32"  # matrices are multiplied in it; all else is float32
    seed: int = 0
    evaluate_every: int = configs.setting(100, low=1)  # steps
    save_every: float = configs.setting(120.0, low=0)  # seconds

    def __post_init__(self):
        if self.continuation >= self.length:
            raise ValueError(f"continuation: expected less than length={self.length}, got {self.continuation}")


@dataclasses.dataclass(frozen=True)
class Text:
    """Sequences of text and what the target makes of them."""

    tokens: np.ndarray  # [W, N] int32
    hidden: np.ndarray  # [W, N, D] float16, after each of them

    def batches(self, batch: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        """All of it, in order."""
        return (self.at(slice(start, start + batch)) for start in range(0, len(self.tokens), batch))

    def batch_of_step(self, step: int, *, batch: int, seed: int) -> tuple[jax.Array, jax.Array]:
        """A function of the step, so that a resumed run sees the same; every epoch reads each sequence once."""
        places = [divmod(index, len(self.tokens)) for index in range(step * batch, (step + 1) * batch)]
        return self.at(np.array([_shuffled(seed, epoch, len(self.tokens))[place] for epoch, place in places]))

    def at(self, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Tokens and hidden states of some sequences."""
        return jnp.asarray(self.tokens[rows]), jnp.asarray(self.hidden[rows], jnp.float32)


@functools.lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def spread(text: np.ndarray, windows: int, length: int) -> np.ndarray:
    """Sequences [windows, length] at even distances.

    Raises:
      ValueError: the text is too short.
    """
    if len(text) < windows + length:
        raise ValueError(f"{len(text)} tokens are too few for {windows} sequences of {length}")
    starts = np.linspace(0, len(text) - length, windows).astype(int)
    return np.stack([text[start : start + length] for start in starts]).astype(np.int32)


def read_by_target(
    target: Model, tokens: np.ndarray, file: pathlib.Path, product_dtype: str, console: rich.console.Console
) -> Text:
    """Sequences and the target's hidden states, which are made once and kept in ``file``."""
    if not file.exists():
        assert target.hidden_size is not None
        params = cast_matrices(target.params, product_dtype)
        one = jax.jit(lambda params, tokens: causal_pass(target, params, tokens).hidden)
        unfinished = file.with_suffix(".new.npy")
        shape = (*tokens.shape, target.hidden_size)
        made = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float16, shape=shape)
        for start in rich.progress.track(range(0, len(tokens), _ROWS), "reading the text", console=console):
            part = tokens[start : start + _ROWS]
            made[start : start + _ROWS] = np.asarray(one(params, np.resize(part, (_ROWS, part.shape[1]))))[: len(part)]
        made.flush()
        unfinished.rename(file)
    return Text(tokens, np.load(file, mmap_mode="r"))


def made_with(heads: Heads, corpus: corpora.Corpus) -> dict[str, Any]:
    """What the training text depends on."""
    names = ("windows", "length", "continuation", "product_dtype", "seed")
    own = {name: getattr(heads, name) for name in names}
    return {**own, "target": weights_digest(heads.target), "corpus": corpus.digest}


def texts(heads: Heads, target: Model, corpus: corpora.Corpus, console: rich.console.Console) -> tuple[Text, Text]:
    """What is trained on, and what is measured on: held-out text, none of it said by the target.

    Raises:
      ValueError: the text is too short.
    """
    work = configs.resolve(heads.work)
    tokens = spread(corpus.slices[0], heads.windows, heads.length - heads.continuation)
    held_out = spread(corpus.held_out, heads.held_out_windows, heads.length)
    made_of = {**made_with(heads, corpus), "held_out_windows": heads.held_out_windows}
    name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:10]
    if heads.continuation:
        tokens = answers.collect(
            work / f"answers_{name}",
            target,
            tokens,
            continuation_tokens=heads.continuation,
            temperature=0.0,
            top=1,
            batch=_ASKED,
            product_dtype=heads.product_dtype,
            seed=heads.seed,
            console=console,
        ).tokens.astype(np.int32)
    read = functools.partial(read_by_target, target, product_dtype=heads.product_dtype, console=console)
    return read(tokens, work / f"hidden_{name}.npy"), read(held_out, work / f"held_out_{name}.npy")


class Trainee(NamedTuple):
    """One kind of heads: its shape, where it starts, a step of its training, and what is measured of it."""

    config: MedusaConfig | EagleConfig
    start: TrainState
    step: Callable[[TrainState, Any], tuple[TrainState, jax.Array]]
    measure: Callable[..., tuple[jax.Array, list[jax.Array]]]  # (params, target's, tokens, hidden) -> loss, ranks

    def on(self, params: PyTree, target: Model, text: Text) -> tuple[float, list[np.ndarray]]:
        """The loss on a text, and per head the ranks of the target's choices."""
        parts = [(len(batch[0]), *self.measure(params, target.params, *batch)) for batch in text.batches(_ROWS)]
        loss = sum(count * float(loss) for count, loss, _ in parts) / len(text.tokens)
        by_head = zip(*(ranks for _, _, ranks in parts))
        return loss, [np.concatenate([np.ravel(rank) for rank in ranks]) for ranks in by_head]


def medusa(run: Medusa, heads: Heads, target: Model) -> Trainee:
    """Medusa's heads, which start out saying what the target's own does."""
    assert target.hidden_size is not None
    assert target.head is not None
    head, optimizer = target.head, optimizer_of(run.schedule)
    config = MedusaConfig(target.hidden_size, target.vocab_size, run.num_heads, run.num_blocks, run.tied_projection)

    @jax.jit
    def measure(params: PyTree, target_params: PyTree, tokens: jax.Array, hidden: jax.Array):
        del tokens
        logits = medusa_logits(config, target._replace(params=target_params), params, hidden)
        teacher = head(target_params, hidden)
        ranks = [ranks_of_choice(teacher[:, at + 1 :], logits[:, : -at - 1, at]) for at in range(run.num_heads)]
        return medusa_loss(logits, teacher, decay=run.decay), ranks

    step = make_medusa_step(config, target, optimizer, decay=run.decay, product_dtype=heads.product_dtype)
    return Trainee(config, init_train_state(init_medusa(config, target), optimizer), step, measure)


def eagle(run: Eagle, heads: Heads, target: Model, text: Text) -> Trainee:
    """EAGLE's layer."""
    assert target.hidden_size is not None
    assert target.embed is not None
    assert target.head is not None
    head, optimizer = target.head, optimizer_of(run.schedule)
    config = EagleConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=run.intermediate_size,
        num_layers=run.num_layers,
        num_heads=run.num_heads,
        num_kv_heads=run.num_kv_heads,
        head_dim=run.head_dim,
        max_positions=target.max_positions,
    )
    tokens, hidden = text.at(slice(_ROWS))
    embedded = target.embed(target.params, tokens)
    start = init_eagle(config, jax.random.key(heads.seed), embedded=embedded, hidden=hidden)
    model = eagle_model(config, start, target)

    @jax.jit
    def measure(params: PyTree, target_params: PyTree, tokens: jax.Array, hidden: jax.Array):
        out = causal_pass(model, (params, target_params), tokens, before=shifted(hidden))
        assert out.hidden is not None
        teacher = head(target_params, hidden)
        loss = eagle_loss(out.hidden, hidden, out.logits, teacher, class_weight=run.class_weight)
        return loss, [ranks_of_choice(teacher, out.logits)]

    step = make_eagle_step(config, target, optimizer, class_weight=run.class_weight, product_dtype=heads.product_dtype)
    return Trainee(config, init_train_state(start, optimizer), step, measure)


def best_paths(agreement: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """The static tree of so many nodes that accepts most tokens (Cai et al. 2024, section 2.3.3).

    As the paper does, it takes for the chance that a node is accepted the product of how often the tokens on its path
    are right, each at its own head and rank.

    Args:
      agreement: per head, how often its k most likely tokens hold the target's choice, k = 1, 2, ..
      nodes: below the root.
    """
    alone = [[after - before for before, after in itertools.pairwise([0.0, *shares])] for shares in agreement]
    paths: list[list[int]] = []
    frontier = [(-alone[0][0], [0])]
    while frontier and len(paths) < nodes:
        chance, path = heapq.heappop(frontier)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(alone[depth - 1]):
            share = alone[depth - 1]
            sibling = chance * share[rank + 1] / share[rank] if share[rank] else 0.0
            heapq.heappush(frontier, (sibling, [*path[:-1], rank + 1]))
        if depth < len(alone):
            heapq.heappush(frontier, (chance * alone[depth][0], [*path, 0]))
    return sorted(paths)


def train_one(
    name: str,
    heads: Heads,
    target: Model,
    text: Text,
    held_out: Text,
    corpus: corpora.Corpus,
    console: rich.console.Console,
) -> dict[str, Any]:
    """Train one kind of heads, or go on training it, save it, and return what is reported of it.

    Raises:
      ValueError: the work folder holds checkpoints made with other settings.
    """
    folder = configs.resolve(heads.work) / name
    folder.mkdir(parents=True, exist_ok=True)
    run = heads.medusa if name == "medusa" else heads.eagle
    check_unchanged(folder, {**configs.to_dict(run), **made_with(heads, corpus)})
    trainee = medusa(run, heads, target) if isinstance(run, Medusa) else eagle(run, heads, target, text)

    def evaluate(params: PyTree) -> dict[str, float]:
        loss, ranks = trainee.on(params, target, held_out)
        return {"held_out": loss, "agrees": float(np.mean(ranks[0] == 0))}

    params = fit(
        name,
        folder,
        trainee.start,
        trainee.step,
        functools.partial(text.batch_of_step, batch=run.schedule.batch, seed=heads.seed),
        evaluate,
        steps=run.schedule.steps,
        tokens_per_step=run.schedule.batch * heads.length,
        evaluate_every=heads.evaluate_every,
        save_every=heads.save_every,
        console=console,
    )
    save_heads(configs.resolve(heads.out) / name, trainee.config, params)
    loss, ranks = trainee.on(params, target, held_out)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "held_out_loss": loss,
        "seconds": read_log(folder / "log.jsonl")[-1]["seconds"],
        "agreement": [[float((rank < k).mean()) for k in range(1, _TOP + 1)] for rank in ranks],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the config names and is not finished, export it, and report."""
    parser = command.parser("train_heads", "Train draft heads; a killed run goes on where it was.")
    parser.add_argument("--only", choices=("medusa", "eagle"), help="train this one")
    options = parser.parse_args(arguments)
    console = rich.console.Console()
    try:
        heads = configs.load(Heads, options.config, options.set)
        work, directory = configs.resolve(heads.work), configs.resolve(heads.target)
        target = load_model(directory)
        corpus = corpora.load(
            work / "corpus",
            vocab_size=target.vocab_size,
            slices=1,
            root=heads.source,
            tokenizer=directory / "tokenizer.json",
        )
        text, held_out = texts(heads, target, corpus, console)
        names = ["medusa", "eagle"] if options.only is None else [options.only]
        result = {name: train_one(name, heads, target, text, held_out, corpus, console) for name in names}
        if options.only is None:
            (work / "report.json").write_text(json.dumps(result, indent=2) + "\n")
            plot_losses({name: read_log(work / name / "log.jsonl") for name in names}, work / "losses.png")
        columns = (f"k={k}" for k in range(1, _SHOWN + 1))
        table = rich.table.Table("head", *columns, title="Top-k holds the target's choice")
        for name, row in result.items():
            for place, shares in enumerate(row["agreement"], 1):
                table.add_row(f"{name} {place}", *(f"{share:.3f}" for share in shares[:_SHOWN]))
        console.print(table)
        if "medusa" in result:
            paths = best_paths(result["medusa"]["agreement"], _NODES)
            console.print(f"The best tree of {_NODES} nodes for Medusa's heads: tree = {paths}", highlight=False)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
