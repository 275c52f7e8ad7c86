"""Training of draft heads on a frozen target: Medusa's, and EAGLE's layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.models import EagleConfig, MedusaConfig, eagle_model, medusa_logits
from specjax.train.loss import causal_pass
from specjax.train.step import TrainState, cast_matrices, make_update
from specjax.types import Model, PyTree

HeadsStep = Callable[[TrainState, Any], tuple[TrainState, jax.Array]]


def medusa_loss(logits: jax.Array, teacher: jax.Array, *, decay: float) -> jax.Array:
    """The heads' losses, summed with weights decay, decay^2, .. (Cai et al. 2024, section 2.2.1).

    Each is cross-entropy to the target's probabilities, as in the paper's self-distillation (section 2.3.2): it is the
    target's choice that a draft must meet, not the text's.

    Args:
      logits: [B, N, K, V] of the K heads after each of N tokens.
      teacher: [B, N, V] of the target.
      decay: weight of a head against the one before; later ones are less certain.
    """
    probs = jax.nn.softmax(teacher.astype(jnp.float32))
    total = jnp.zeros(())
    for head in range(logits.shape[2]):
        ahead = head + 1  # behind what the target's own head predicts
        total += decay**ahead * _soft_cross_entropy(logits[:, :-ahead, head], probs[:, ahead:])
    return total


def _soft_cross_entropy(logits: jax.Array, probs: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(probs * logits, axis=-1))


def eagle_loss(
    predicted: jax.Array, hidden: jax.Array, logits: jax.Array, teacher: jax.Array, *, class_weight: float
) -> jax.Array:
    """Smooth L1 between hidden states [B, N, D], and cross-entropy between what they say (Li et al. 2024, section 4.2).

    Args:
      predicted: the layer's.
      hidden: the target's.
      logits: [B, N, V] that the target's head makes of ``predicted``.
      teacher: [B, N, V] that it makes of ``hidden``.
      class_weight: of the cross-entropy.
    """
    regression = jnp.mean(optax.losses.huber_loss(predicted.astype(jnp.float32), hidden.astype(jnp.float32)))
    return regression + class_weight * _soft_cross_entropy(logits, jax.nn.softmax(teacher.astype(jnp.float32)))


def shifted(hidden: jax.Array) -> jax.Array:
    """For each token the state [B, N, D] that chose it, from the states ``hidden`` [B, N, D] behind them."""
    return jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def make_medusa_step(
    config: MedusaConfig,
    target: Model,
    optimizer: optax.GradientTransformation,
    *,
    decay: float,
    product_dtype: str = "float32",
) -> HeadsStep:
    """A jitted ``step(state, (tokens [B, N], hidden [B, N, D])) -> (state, loss)``; the old state is donated.

    The target's hidden states after the tokens are given, since several trainings can share one pass over them.
    ``product_dtype`` is that of ``make_train_step``, ``decay`` that of ``medusa_loss``.
    """

    def loss_of(params: PyTree, target_params: PyTree, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        _, hidden = inputs
        assert target.head is not None
        teacher = target.head(target_params, hidden)
        frozen = target._replace(params=target_params)
        logits = medusa_logits(config, frozen, cast_matrices(params, product_dtype), hidden)
        return medusa_loss(logits, teacher, decay=decay)

    return _with_target(loss_of, target, optimizer, product_dtype)


def make_eagle_step(
    config: EagleConfig,
    target: Model,
    optimizer: optax.GradientTransformation,
    *,
    class_weight: float,
    product_dtype: str = "float32",
) -> HeadsStep:
    """As ``make_medusa_step``, for EAGLE's layer; ``class_weight`` is that of ``eagle_loss``."""

    def loss_of(params: PyTree, target_params: PyTree, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, hidden = inputs
        assert target.head is not None
        model = eagle_model(config, params, target._replace(params=target_params))
        known = (cast_matrices(params, product_dtype), target_params)
        out = causal_pass(model, known, tokens, before=shifted(hidden))
        assert out.hidden is not None
        teacher = target.head(target_params, hidden)
        return eagle_loss(out.hidden, hidden, out.logits, teacher, class_weight=class_weight)

    return _with_target(loss_of, target, optimizer, product_dtype)


def _with_target(
    loss_of: Callable[..., jax.Array], target: Model, optimizer: optax.GradientTransformation, product_dtype: str
) -> HeadsStep:
    update = make_update(loss_of, optimizer)
    # The target's parameters are an argument: closed over, they would be constants of the compiled program.
    target_params = cast_matrices(target.params, product_dtype)
    return lambda state, inputs: update(state, target_params, inputs)
