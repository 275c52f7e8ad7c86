"""How sure a draft model is: one factor on its logits, which moves no favourite and fits its draws to the target."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.train.loss import causal_logits
from specjax.types import Model, PyTree

_FACTORS = np.geomspace(0.25, 4.0, 33)


def cross_entropies(target_logits: jax.Array, draft_logits: jax.Array, factors: jax.Array) -> jax.Array:
    """Cross-entropy, in nats per place, of a draft with scaled logits to the target's probabilities.

    Args:
      target_logits: [..., V].
      draft_logits: [..., V].
      factors: [F], each multiplied to the draft's logits.

    Returns:
      [F].
    """
    expected = jnp.sum(jax.nn.softmax(target_logits.astype(jnp.float32)) * draft_logits, axis=-1)
    loss = lambda factor: jnp.mean(jax.nn.logsumexp(factor * draft_logits, axis=-1) - factor * expected)
    return jax.lax.map(loss, factors)


def best_factor(target: Model, draft: Model, batches: Iterable[Any]) -> float:
    """The factor on the draft's logits that brings it closest to the target (temperature scaling, Guo et al. 2017).

    Args:
      target: the model to agree with.
      draft: the model whose logits are scaled.
      batches: token arrays [B, N] of one shape.

    Returns:
      One of 33 factors between 1/4 and 4.
    """
    measure: Callable[..., jax.Array] = jax.jit(
        lambda ours, theirs, tokens: cross_entropies(
            causal_logits(target, theirs, tokens), causal_logits(draft, ours, tokens), jnp.asarray(_FACTORS)
        )
    )
    losses = sum(np.asarray(measure(draft.params, target.params, jnp.asarray(tokens))) for tokens in batches)
    return float(_FACTORS[np.argmin(losses)])


def scale_logits(params: PyTree, factor: float) -> PyTree:
    """A decoder's parameters (``specjax.models``) with its logits multiplied: the head is linear in the last norm.

    Raises:
      ValueError: these parameters have no last norm.
    """
    is_last = lambda path: getattr(path[0], "key", None) == "norm"
    if not any(is_last(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
        raise ValueError("expected a decoder with a norm before its head, whose logits it can scale")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: factor * leaf if is_last(path) else leaf, params)
