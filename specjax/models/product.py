"""The product of activations with a weight matrix, written so that XLA's CPU backend multiplies finished matrices."""

import jax
import jax.numpy as jnp

barrier = jax.lax.optimization_barrier


@jax.custom_vjp
def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T, the weight being [O, I] as in files.

    Multiplied in the weight's dtype, summed in float32, returned in the dtype of x. So bfloat16 weights under float32
    activations are mixed-precision training, and one dtype for both is plain.
    """
    # Left alone, what makes a single row is fused into its product and computed again for every output: one token's
    # decode step took 6.3 ms where it takes 4.9 behind a barrier.
    x, dtype = barrier(x.astype(weight.dtype)), x.dtype
    # Contracted as it lies, which is no slower for one row than a weight [I, O], and for 8 to 32 rows up to 1.6 times
    # as fast (docs/performance.md).
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(
        dtype
    )


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
