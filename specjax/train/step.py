"""One training step: float32 weights and activations, matrix products in a dtype of choice."""

import dataclasses
import functools
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
    """A jitted ``step(state, tokens [B, N + 1]) -> (state, loss)``; the old state's buffers are donated.

    Args:
      model: what is trained; its own parameters are not used.
      optimizer: what turns gradients into updates.
      product_dtype: matrices are multiplied in it and summed in float32 (Micikevicius et al. 2018); all else is
        float32. bfloat16 is the faster one wherever the processor multiplies it natively.
      teacher: a model to imitate, see ``next_token_loss``.
      teacher_weight: the imitation's share of the loss.
    """

    def cast(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(product_dtype) if leaf.ndim > 1 else leaf, params)

    def loss_of(params: PyTree, teacher_params: PyTree, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        taught = None if teacher is None else causal_logits(teacher, teacher_params, inputs)
        return next_token_loss(causal_logits(model, cast(params), inputs), targets, taught, teacher_weight)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, teacher_params: PyTree, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, teacher_params, tokens)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), loss

    # The teacher's parameters are an argument: closed over, they would be constants of the compiled program.
    teacher_params = None if teacher is None else cast(teacher.params)
    return lambda state, tokens: step(state, teacher_params, tokens)
