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
    """The state before the first step: the parameters as they are given, and the optimiser's own."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def cast_matrices(params: PyTree, dtype: str) -> PyTree:
    """The parameters with every matrix in ``dtype``, in which it is then multiplied; norms and biases stay."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)


def make_update(
    loss_of: Callable[..., jax.Array], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """A jitted ``update(state, *inputs) -> (state, loss)`` of ``loss_of(params, *inputs)``.

    The old state's buffers are donated.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, *inputs: PyTree) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, *inputs)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state), loss

    return update


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

    def loss_of(params: PyTree, teacher_params: PyTree, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        taught = None if teacher is None else causal_logits(teacher, teacher_params, inputs)
        logits = causal_logits(model, cast_matrices(params, product_dtype), inputs)
        return next_token_loss(logits, targets, taught, teacher_weight)

    update = make_update(loss_of, optimizer)
    # The teacher's parameters are an argument: closed over, they would be constants of the compiled program.
    teacher_params = None if teacher is None else cast_matrices(teacher.params, product_dtype)
    return lambda state, tokens: update(state, teacher_params, tokens)
