"""Coverage of what a target says, by several small models together: measured, drawn and set in tables."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from experiments import answers as said
from experiments.answers import Answers
from specjax.train import answers_covered, matched, spans
from specjax.types import Model

_TOP = 5  # coverage of held-out text is reported for the 1..5 most likely tokens of every SSM


def measure(
    models: Mapping[str, Model], text: Answers, asked: Answers, *, prompt_tokens: int, span: int, top: int
) -> dict[str, Any]:
    """Coverage of what the target says, by each SSM and by it together with those before it.

    Args:
      models: the SSMs, in order.
      text: windows of text; every place counts.
      asked: prompts of ``prompt_tokens`` and the target's continuations; only these count.
      prompt_tokens: as it says.
      span: tokens of an answer in a continuation.
      top: see ``specjax.train.matched``.

    Returns:
      "text" and "text_union": name -> how often the k likeliest tokens hold the target's choice, k = 1..5;
      "answers" and "answers_union": name -> share of the answers in continuations that are matched.
    """
    starts = spans(1, asked.said.shape[1] - prompt_tokens + 1, span)
    result: dict[str, Any] = {"text": {}, "text_union": {}, "answers": {}, "answers_union": {}}
    shares = lambda ranks: [float((ranks < k).mean()) for k in range(1, _TOP + 1)]
    best = known = None
    for name, model in models.items():
        ranks = said.ranks(model, model.params, text, batch=8)
        asked_ranks = said.ranks(model, model.params, asked, batch=16)[:, prompt_tokens - 1 :]
        marks = matched(asked_ranks, starts, top)
        best = ranks if best is None else np.minimum(best, ranks)
        known = marks if known is None else known | marks
        result["text"][name], result["text_union"][name] = shares(ranks), shares(best)
        result["answers"][name] = answers_covered(marks, starts)
        result["answers_union"][name] = answers_covered(known, starts)
    return result


def plot(result: Mapping[str, Any], logs: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Coverage after each SSM, of answers and of held-out text, and agreement with the target while training."""
    figure = matplotlib.figure.Figure(figsize=(13, 4), layout="constrained")
    answers, text, training = figure.subplots(1, 3)
    names = list(result["tuned"]["answers"])
    for number, (title, values) in enumerate(
        {
            "training answers": result["training"]["union"],
            "held-out answers": result["tuned"]["answers_union"],
            "held-out answers, alone": result["tuned"]["answers"],
        }.items()
    ):
        answers.plot(names, [values[name] for name in names], marker="o", label=title, color=f"C{number}")
    answers.set(xlabel="after tuning", ylabel="share of answers matched")
    tops = range(1, _TOP + 1)
    for number, name in enumerate(names):
        label = names[0] if number == 0 else f"with {name}"
        text.plot(tops, result["tuned"]["text_union"][name], marker="o", label=label, color=f"C{number}")
    if result["compare"]:
        text.plot(tops, list(result["compare"]["text_union"].values())[-1], "k--", label="compared ensemble")
    text.set(xlabel="likeliest tokens of each SSM", ylabel="share of held-out places covered", xticks=list(tops))
    for number, (name, records) in enumerate(logs.items()):
        steps = [record["step"] for record in records]
        agreed = [record["held_out_agreement"] for record in records]
        training.plot(steps, agreed, marker=".", label=name, color=f"C{number}")
    training.set(xlabel="step", ylabel="agreement with the target on held-out text")
    for axes in (answers, text, training):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def tables(result: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """The result as tables of text, by title, each with its header first."""
    tuned, compared = result["tuned"], result["compare"]
    number = lambda value: f"{value:.3f}"
    answers = [["SSM", "training, alone", "with those before", "held out, alone", "with those before"]]
    for name in tuned["answers"]:
        parts = (result["training"]["alone"], result["training"]["union"], tuned["answers"], tuned["answers_union"])
        answers.append([name, *(number(part[name]) for part in parts)])
    if compared:
        answers += [
            [f"before: {name}", "", "", *map(number, (compared["answers"][name], compared["answers_union"][name]))]
            for name in compared["answers"]
        ]
    text = [["SSM", *(f"k={k}" for k in range(1, _TOP + 1))]]
    for prefix, part in (("", tuned), ("before: ", compared)):
        if part:
            text += [[prefix + name, *map(number, values)] for name, values in part["text"].items()]
            text.append([prefix + "union", *map(number, list(part["text_union"].values())[-1])])
    return {
        "Share of the target's answers that are matched": answers,
        "How often the k likeliest tokens hold the target's choice, held-out text": text,
    }
