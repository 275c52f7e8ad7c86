"""The product of activations with a weight matrix, written so that XLA's CPU backend multiplies finished matrices."""

import math

import jax
import jax.numpy as jnp

barrier = jax.lax.optimization_barrier


@jax.custom_vjp
def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T, the weight being [O, I] as in files.

    Multiplied in the weight's dtype, summed in float32, returned in the dtype of x. So bfloat16 weights under float32
    activations are mixed-precision training, and one dtype for both is plain.
    """
    *leading, inputs = x.shape
    rows = x.reshape(math.prod(leading), inputs).astype(weight.dtype)  # of which there may be none
    return _multiply(rows, weight).reshape(*leading, weight.shape[0]).astype(x.dtype)


@jax.jit  # so that the choice is lowered once for a shape, not once for a layer
def _multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
    # In bfloat16 a processor's matrix unit takes rows first.
    on_cpu = _weight_first if weight.dtype == jnp.float32 else _rows_first
    return jax.lax.platform_dependent(rows, weight, cpu=on_cpu, default=_rows_first)


def _rows_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
    # Left alone, what makes a single row is fused into its product and computed again for every output: one token's
    # decode step took 6.3 ms where it takes 4.9 behind a barrier.
    return jax.lax.dot_general(barrier(rows), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
    # The second factor is packed anew in each product, so the small one stands there: 2 to 8 rows of a large matrix
    # then take two thirds of the time (docs/performance.md). The barriers keep XLA from swapping the factors back. None
    # stands behind the last transposition: what reads the product reads it transposed, often to be a factor itself.
    out = jax.lax.dot_general(weight, barrier(rows.T), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return barrier(out).T


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


def _forward(x: jax.Array, weight: jax.Array):
    # For training, whose rows are many: transposed bfloat16 matrices are multiplied without AMX.
    return _dot(barrier(x.astype(weight.dtype)), barrier(weight.T), x.dtype), (x, weight)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array):
    # Left alone, the gradient of the activation function is computed inside a transposing copy.
    x, weight = saved
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    gradient_rows = barrier(gradient.reshape(-1, gradient.shape[-1]).astype(weight.dtype))
    for_x = _dot(gradient_rows, weight, x.dtype).reshape(x.shape)
    return for_x, _dot(barrier(gradient_rows.T), barrier(rows), weight.dtype)


product.defvjp(_forward, _backward)
