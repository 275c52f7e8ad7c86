"""What measures the cells of a run: models, prompts and baselines, each made once, and what is recorded of a cell."""

import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import specjax as sj
from experiments import config, metrics, prompts, screening, sweep
from experiments.config import ConfigError
from experiments.prompts import Prompt
from experiments.sweep import Cell, Experiment
from experiments.timing import compile_log
from specjax.request import make_drafter, prepare


class Measured(NamedTuple):
    """One prompt's generation and what it took. Seconds are its batch's wall time over the batch's rows, one a pass."""

    tokens: list[int]
    finish_reason: str
    rounds: Sequence[Any]
    batch: int
    prefill_seconds: list[float]
    decode_seconds: list[float]


class Workshop:
    """What the cells of a run share: models, prompts and baselines, each made once.

    Where ``timed`` is false, cells are decoded once and have no times: others are decoded beside them.
    """

    def __init__(self, cells: Sequence[Cell], *, timed: bool = True):
        self.timed = timed
        self.model = functools.cache(_load_model)
        self.draft = functools.cache(self._load_draft)
        self.prompts = functools.cache(_load_prompts)
        self.baseline = functools.cache(self._baseline)
        self.screening = screening.Screening(self.arguments)
        self.fit(cells)

    def fit(self, cells: Sequence[Cell]) -> None:
        """Take the bounds that all trees of a padded run share from these cells."""
        trees = [sweep.builder(cell.config.decode) for cell in cells]
        trees = [tree for tree in trees if isinstance(tree, sj.Topology)]
        self._bounds = sj.common_shape(trees) if trees else None

    def check(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Load what the cells need and check that each can run, before anything is compiled.

        Returns:
          A fingerprint of every model and prompt set.

        Raises:
          ConfigError: everything that is missing or cannot be.
        """
        problems: list[str] = []
        fingerprints = {}
        pairs = set()
        for cell in cells:
            experiment = cell.config
            try:
                for path in (experiment.models.target, *experiment.models.drafts):
                    fingerprints[path] = _fingerprint(path)
                texts = self.texts(experiment)
                fingerprints[experiment.run.prompts] = prompts.fingerprint(texts)
                models = experiment.models
                for pair in {(models.target, path) for path in models.drafts} - pairs:
                    pairs.add(pair)
                    if not sj.is_heads(config.resolve(pair[1])):  # these have no ids of their own
                        sj.check_pair(*(self.model(path, models.attention, models.dtype) for path in pair))
                prepare(**self.call(experiment, texts))
            except ConfigError as error:
                problems += error.problems
            except (ValueError, OSError) as error:
                problems.append(f"{cell.where}{sweep.label(experiment.decode)}: {error}")
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        return fingerprints

    def measure(self, experiment: Experiment, tick: Callable[[float], None]) -> list[Measured]:
        """Decode every prompt, ``repeats`` times, compilation left out; once where nothing is timed.

        The first batch of each size is decoded once before it is timed, and a call that compiled is not counted.

        Args:
          experiment: a cell.
          tick: called with the share of the work that each timed call was.
        """
        if experiment.run.measure == "replay" and not experiment.decode.incremental:
            tick(1)
            unknown = [float("nan")] * experiment.run.repeats
            return [
                Measured(
                    *found, batch=row // experiment.run.batch_size, prefill_seconds=unknown, decode_seconds=unknown
                )
                for row, found in enumerate(self.screening.replay(experiment))
            ]
        texts, passes = self.texts(experiment), experiment.run.repeats if self.timed else 1
        batches = [list(batch) for batch in itertools.batched(texts, experiment.run.batch_size)]
        measured: list[Measured] = []
        warm: set[int] = set()
        first = 0
        for number, batch in enumerate(batches):
            call = functools.partial(sj.generate, **self.call(experiment, batch, first))
            if self.timed and len(batch) not in warm:
                call()
                warm.add(len(batch))
            results = []
            for _ in range(passes):
                results.append(_without_compiling(call) if self.timed else call())
                tick(1 / (len(batches) * passes))
            seconds = lambda stage, results=results, batch=batch: (
                [getattr(result.stats, f"{stage}_seconds") / len(batch) for result in results]
                if self.timed
                else [float("nan")] * experiment.run.repeats
            )
            for row in range(len(batch)):
                result = results[0]
                measured.append(
                    Measured(
                        tokens=result.tokens[row],
                        finish_reason=result.finish_reasons[row],
                        rounds=result.rounds[row],
                        batch=number,
                        prefill_seconds=seconds("prefill"),
                        decode_seconds=seconds("decode"),
                    )
                )
            first += len(batch)
        return measured

    def _load_draft(self, path: str, target: str, attention: str | None, dtype: str) -> sj.Model:
        """An SSM, or heads on the target's hidden states; the directory's config.json says which."""
        directory, large = config.resolve(path), self.model(target, attention, dtype)
        if sj.is_heads(directory):
            return sj.load_heads(directory, large, attention=attention, dtype=dtype)
        draft = self.model(path, attention, dtype)
        padded = draft.vocab_size != large.vocab_size  # and nothing else: check_pair has compared their tokenizers
        return sj.draft.with_vocabulary(draft, large.vocab_size) if padded else draft

    def _baseline(self, experiment: Experiment) -> list[Measured]:
        return self.measure(experiment, lambda share: None)

    def texts(self, experiment: Experiment) -> list[Prompt]:
        """The prompts of a cell."""
        return self.prompts(*_prompt_key(experiment))

    def arguments(self, experiment: Experiment) -> dict[str, Any]:
        """Arguments of ``generate`` for all prompts of a cell."""
        return self.call(experiment, self.texts(experiment))

    def call(self, experiment: Experiment, batch: Sequence[Prompt], first: int = 0) -> dict[str, Any]:
        """Arguments of ``generate`` for a batch that begins at prompt ``first``."""
        run, models, decode = experiment.run, experiment.models, experiment.decode
        drawn = decode.draft_warp
        target = self.model(models.target, models.attention, models.dtype)
        tree = sweep.builder(decode)
        if isinstance(tree, sj.Topology) and run.padded and self._bounds is not None:
            tree = tree.pad(self._bounds)
        directories = iter(models.drafts)  # of a cell, in the order of decode.drafts
        drafts = [
            sj.draft.prompt_lookup(target.vocab_size, **dataclasses.asdict(decode.lookup))
            if name == sweep.LOOKUP
            else self.draft(next(directories), models.target, models.attention, models.dtype)
            for name in decode.drafts
        ]
        if decode.combine == "first" or decode.capacity:
            own = lambda source: None if isinstance(source, sj.Drafter) else tree
            parts = [make_drafter([each], own(each), decode.draft_mode) for each in drafts]
            cut = functools.partial(sj.draft.ensemble, capacity=decode.capacity)
            drafts, tree = [(sj.draft.first_of if decode.combine == "first" else cut)(parts)], None
        return {
            "target": target,
            "prompts": [list(prompt.tokens) for prompt in batch],
            "drafts": drafts,
            "tree": tree,
            "draft_mode": decode.draft_mode,
            "draft_warp": sj.Warp(
                (decode.temperature or 1.0) if drawn.temperature is None else drawn.temperature,
                drawn.top_k,
                drawn.top_p,
            ),
            "verifier": decode.verifier,
            "allow_lossy": decode.allow_lossy,
            "warp": sj.Warp(decode.temperature, decode.top_k, decode.top_p),
            "max_new_tokens": run.max_new_tokens,
            "seeds": [run.seed + first + row for row in range(len(batch))],
        }


def rows(cell: Cell, workshop: Workshop, session: int, tick: Callable[[float], None]) -> list[dict[str, Any]]:
    """Measure a cell beside its baseline, and say it in one record per prompt."""
    experiment = cell.config
    texts = workshop.texts(experiment)
    before = len(compile_log())
    base = workshop.baseline(sweep.baseline(experiment))
    between = len(compile_log())
    measured = base if experiment.decode.incremental else workshop.measure(experiment, tick)
    compiles = compile_log()[before if experiment.decode.incremental else between :]
    return [
        {
            "cell": cell.id,
            "method": sweep.label(experiment.decode),
            "prompt": number,
            "name": text.name,
            "session": session,
            "batch": own.batch,
            "seed": experiment.run.seed + number,
            "prompt_tokens": len(text.tokens),
            "prompt_cut": text.cut,
            **_counts(own),
            "tokens": own.tokens,
            "finish_reason": own.finish_reason,
            "prefill_seconds": own.prefill_seconds,
            "decode_seconds": own.decode_seconds,
            "baseline_steps": len(other.rounds),
            "baseline_emitted": sum(item.emitted for item in other.rounds),
            "baseline_prefill_seconds": other.prefill_seconds,
            "baseline_decode_seconds": other.decode_seconds,
            "same_text_promised": experiment.decode.same_text,
            "same_text": own.tokens == other.tokens,
            "compiles": len(compiles),
            "compile_seconds": sum(compiles),
            **_settings(experiment),
        }
        for number, (text, own, other) in enumerate(zip(texts, measured, base, strict=True))
    ]


def _counts(measured: Measured) -> dict[str, Any]:
    """What the rounds of one prompt add up to.

    At a depth, a round tried its drafted tokens if the path reached their parent and was not cut there by a stop token
    or the budget: then nobody knows what would have come next.
    """
    rounds = measured.rounds
    depth = max((len(item.drafted_by_depth) for item in rounds), default=0)
    accepted = [sum(item.accepted > level for item in rounds) for level in range(depth)]
    refused = [
        sum(item.accepted == level < item.emitted and item.drafted_by_depth[level] > 0 for item in rounds)
        for level in range(depth)
    ]
    return {
        "new_tokens": len(measured.tokens),
        "steps": len(rounds),
        "emitted": sum(item.emitted for item in rounds),
        "drafted": sum(item.drafted for item in rounds),
        "accepted": sum(item.accepted for item in rounds),
        "emitted_per_round": [item.emitted for item in rounds],
        "accepted_per_round": [item.accepted for item in rounds],
        "drafted_by_depth": [sum(item.drafted_by_depth[level] for item in rounds) for level in range(depth)],
        "tried_by_depth": [a + b for a, b in zip(accepted, refused, strict=True)],
        "accepted_by_depth": accepted,
        **_credit([sources for item in rounds for sources in item.proposers]),
    }


def _credit(proposers: Sequence[tuple[int, ...]]) -> dict[str, list[int]]:
    """Of the accepted tokens, how many each source proposed, and how many it alone; a source past the end none."""
    sources = range(max((source + 1 for found in proposers for source in found), default=0))
    return {
        "accepted_by_source": [sum(source in found for found in proposers) for source in sources],
        "accepted_by_source_alone": [sum(found == (source,) for found in proposers) for source in sources],
    }


def _settings(experiment: Experiment) -> dict[str, Any]:
    """The cell's config under dotted names."""
    tables = config.to_dict(experiment)
    return metrics.flat({part: tables[part] for part in ("run", "models", "decode")})


def _load_model(path: str, attention: str | None, dtype: str) -> sj.Model:
    return sj.load_model(_directory(path), attention=attention, dtype=dtype)


def _load_prompts(target: str, source: str, num_prompts: int, max_tokens: int) -> list[Prompt]:
    tokenizer = sj.load_tokenizer(_directory(target))
    return prompts.load(source, num_prompts=num_prompts, max_tokens=max_tokens, tokenizer=tokenizer)


def _prompt_key(experiment: Experiment) -> tuple[str, str, int, int]:
    run = experiment.run
    return experiment.models.target, run.prompts, run.num_prompts, run.max_prompt_tokens


def _directory(path: str) -> pathlib.Path:
    """A model's directory, relative to the repository; where there is none, a copy of the hub's model of this id."""
    local = config.resolve(path)
    return local if local.exists() else config.resolve(str(sj.models.find_model(path)))


def _fingerprint(path: str) -> str:
    """Ten hex digits that change when a model does: from its files' names and contents."""
    directory = _directory(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            [f"models: no config.json in {directory}; expected a model directory in the Hugging Face layout"]
        )
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.is_file():
            with open(file, "rb") as content:
                digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()} ".encode())
    return digest.hexdigest()[:10]


def _without_compiling(call: Callable[[], Any]) -> Any:
    """The first result of ``call`` that took no compilation: another length of prompts may have needed one."""
    for _ in range(3):
        before = len(compile_log())
        result = call()
        if len(compile_log()) == before:
            return result
    raise RuntimeError("the same call compiles every time, so its time would be mostly compilation")
