"""Boost-tuning: several small models taught on a target's own answers, each on what those before it leave."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax

from specjax.train.loss import causal_logits, imitation_loss
from specjax.train.step import TrainState, cast_matrices, make_update
from specjax.types import Model, PyTree


class Lesson(NamedTuple):
    """Texts, and what the target says after each of their prefixes."""

    tokens: jax.Array  # [B, N] int32
    answers: jax.Array  # [B, N, M] int32, tokens that the target says after tokens[:, : n + 1]
    shares: jax.Array  # [B, N, M], of the answer that falls to each of them; their sum is 1
    weights: jax.Array  # [B, N], of each place in the loss


def make_lesson_step(
    model: Model, optimizer: optax.GradientTransformation, *, product_dtype: str = "float32"
) -> Callable[[TrainState, Lesson], tuple[TrainState, jax.Array]]:
    """A jitted ``step(state, lesson) -> (state, loss)``; the old state's buffers are donated.

    Args:
      model: what is trained; its own parameters are not used.
      optimizer: what turns gradients into updates.
      product_dtype: as in ``make_train_step``.
    """

    def loss_of(params: PyTree, lesson: Lesson) -> jax.Array:
        logits = causal_logits(model, cast_matrices(params, product_dtype), lesson.tokens)
        return imitation_loss(logits, lesson.answers, lesson.shares, lesson.weights)

    return make_update(loss_of, optimizer)


def spans(prompt_tokens: int, continuation_tokens: int, length: int) -> np.ndarray:
    """Where the target's answers begin in a text of a prompt and the target's continuation of it.

    A continuation is cut into answers of ``length`` tokens (the last may be shorter): each is what the target says to
    the text before it. Inside the prompt each place has an answer of one token.

    Args:
      prompt_tokens: P >= 1.
      continuation_tokens: C >= 0.
      length: of an answer in the continuation, >= 1.

    Returns:
      [S] int, the first place of each answer, of P - 1 + C places; place n is the one after token n.
    """
    first = prompt_tokens - 1
    return np.concatenate([np.arange(first), np.arange(first, first + continuation_tokens, length)])


def matched(ranks: np.ndarray, starts: np.ndarray, top: int = 1) -> np.ndarray:
    """Which answers a model gives as the target does (SpecInfer, section 3.2), marked at each of their places.

    A model's greedy continuation equals the target's answer iff its likeliest token is the target's at each place of
    the answer, reading the target's own text; so one pass over the texts finds all matches.

    Args:
      ranks: [N, L] of the target's tokens in the model's order, see ``ranks_of_tokens``.
      starts: [S] of the answers, increasing from 0, see ``spans``.
      top: a place is matched if the rank there is below this: 1 is greedy, k what a tree of k branches would hold.

    Returns:
      [N, L] bool.
    """
    whole = np.maximum.reduceat(ranks, starts, axis=1) < top
    return np.repeat(whole, np.diff(starts, append=ranks.shape[1]), axis=1)


def answers_covered(marks: np.ndarray, starts: np.ndarray) -> float:
    """Share of the answers that are matched, each counted once, from ``matched``'s marks [N, L]."""
    return float(marks[:, starts].mean())
