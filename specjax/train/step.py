"""One training step: float32 master weights, forward and backward in a dtype of choice."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from specjax.train.loss import causal_logits, next_token_loss
from specjax.types import Model, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What the next step needs."""

    step: jax.Array  # [] int32, steps done
    params: PyTree
    optimizer: PyTree


def init_train_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    product_dtype: str = "float32",
    teacher: Model | None = None,
    teacher_weight: float = 0.0,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """A jitted ``step(state, tokens [B, N + 1]) -> (state, loss)``; the old state's buffers are donated."""

    def loss_of(params: PyTree, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(product_dtype) if leaf.ndim > 1 else leaf, params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        taught = None if teacher is None else causal_logits(teacher, teacher.params, inputs)
        return next_token_loss(causal_logits(model, params, inputs), targets, taught, teacher_weight)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), loss

    return jax.jit(step, donate_argnums=0)
