"""What a target says to prompts cut from a text: its continuations, and its likeliest tokens at every place."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

import specjax as sj
from specjax.train import cast_matrices, causal_logits, ranks_of_tokens
from specjax.types import Model, PyTree

_DTYPES = {"tokens": np.uint16, "said": np.uint16, "top_tokens": np.uint16, "top_shares": np.float16}


@dataclasses.dataclass(frozen=True)
class Answers:
    """N texts of T tokens, a prompt and its continuation each; place n is the one after token n."""

    tokens: np.ndarray  # [N, T] uint16
    said: np.ndarray  # [N, T - 1] uint16: the continuation's own token, inside the prompt the target's likeliest
    top_tokens: np.ndarray  # [N, T - 1, M] uint16, the target's likeliest
    top_shares: np.ndarray  # [N, T - 1, M] float16, their probabilities, made to sum to 1


def cut_prompts(text: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """Prompts [count, length]: one from a random place of each of ``count`` equal parts of the text, in random order.

    Raises:
      ValueError: a part would be shorter than a prompt.
    """
    part = len(text) // count
    if part < length:
        raise ValueError(f"{len(text)} tokens of text are too few for {count} prompts of {length} tokens")
    rng = np.random.default_rng(seed)
    starts = np.arange(count) * part + rng.integers(0, part - length + 1, count)
    return np.stack([text[start : start + length] for start in rng.permutation(starts)])


def collect(
    folder: pathlib.Path,
    target: Model,
    prompts: np.ndarray,
    *,
    continuation_tokens: int,
    temperature: float,
    top: int,
    batch: int,
    product_dtype: str,
    seed: int,
    console: rich.console.Console,
) -> Answers:
    """Let the target answer, a batch at a time; batches that are in ``folder`` already are taken from there.

    Args:
      folder: where answers are kept, one file per batch.
      target: who answers.
      prompts: [N, P].
      continuation_tokens: C >= 0, which the target says to each prompt; stop tokens do not stop it, as documents follow
        one another in the text too.
      temperature: of the continuations; 0 is greedy.
      top: M, how many of the target's likeliest tokens are kept at every place.
      batch: prompts at once.
      product_dtype: matrices are multiplied in it.
      seed: prompt i is continued with seed + i.
      console: what progress is written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = target._replace(params=cast_matrices(target.params, product_dtype))
    read = functools.partial(_read, target.forward, target.init_cache, target.params, top=top)
    chunks = []
    with rich.progress.Progress(console=console) as progress:
        for start in progress.track(range(0, len(prompts), batch), description=folder.name):
            path = folder / f"{start:06d}.npz"
            if not path.exists():
                part = prompts[start : start + batch].astype(np.int32)
                rows = np.resize(part, (batch, part.shape[1]))  # the last batch filled up: one shape is compiled
                said = np.zeros((batch, 0), np.int32)
                if continuation_tokens:
                    said = sj.generate(
                        target,
                        rows.tolist(),
                        max_new_tokens=continuation_tokens,
                        eos_ids=(),
                        warp=sj.Warp(temperature),
                        seeds=[seed + start + row for row in range(batch)],
                    ).tokens
                tokens = np.concatenate([rows, said], axis=1)
                best, shares = jax.device_get(read(jnp.asarray(tokens[:, :-1])))
                answers = np.where(np.arange(1, tokens.shape[1]) < rows.shape[1], best[..., 0], tokens[:, 1:])
                found = {"tokens": tokens, "said": answers, "top_tokens": best, "top_shares": shares}
                _write(path, {name: rows[: len(part)].astype(_DTYPES[name]) for name, rows in found.items()})
            with np.load(path) as chunk:
                chunks.append(dict(chunk))
    return Answers(**{name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]})


def ranks(model: Model, params: PyTree, answers: Answers, *, batch: int, product_dtype: str = "float32") -> np.ndarray:
    """Where what the target says stands in a model's order at every place: [N, T - 1] uint16."""
    params = cast_matrices(params, product_dtype)
    found = []
    for start in range(0, len(answers.tokens), batch):
        part = slice(start, start + batch)
        tokens, said = (np.asarray(rows[part], np.int32) for rows in (answers.tokens[:, :-1], answers.said))
        count = len(tokens)
        tokens, said = (np.resize(rows, (batch, rows.shape[1])) for rows in (tokens, said))
        found.append(np.asarray(_ranks(model.forward, model.init_cache, params, tokens, said))[:count])
    return np.concatenate(found).astype(np.uint16)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="top")
def _read(
    forward: Callable, init_cache: Callable, params: PyTree, tokens: jax.Array, *, top: int
) -> tuple[jax.Array, jax.Array]:
    logits = causal_logits(Model(forward, params, init_cache, 0, 0), params, tokens).astype(jnp.float32)
    values, best = jax.lax.top_k(logits, top)
    return best, jax.nn.softmax(values)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ranks(forward: Callable, init_cache: Callable, params: PyTree, tokens: jax.Array, said: jax.Array) -> jax.Array:
    return ranks_of_tokens(said, causal_logits(Model(forward, params, init_cache, 0, 0), params, tokens))


def _write(path: pathlib.Path, arrays: dict[str, Any]) -> None:
    """All of the file or none of it, also when the process is killed."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(unfinished, path)
