"""The product of activations with a weight matrix, written so that XLA's CPU backend multiplies finished matrices."""

import jax
import jax.numpy as jnp

barrier = jax.lax.optimization_barrier


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., I] @ kernel [I, O], multiplied in the kernel's dtype, summed in float32, returned in the dtype of x.

    So bfloat16 kernels under float32 activations are mixed-precision training, and one dtype for both is plain.
    """
    # Left alone, what makes a single row is fused into its product and computed again for every output: one token's
    # decode step took 6.3 ms where it takes 4.9 behind a barrier.
    return _dot(barrier(x.astype(kernel.dtype)), kernel, x.dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


def _forward(x: jax.Array, kernel: jax.Array):
    return product(x, kernel), (x, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array):
    # Left alone, the gradient of the activation function is computed inside a transposing copy, and transposed bfloat16
    # matrices are multiplied without AMX.
    x, kernel = saved
    rows = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    gradient_rows = barrier(gradient.reshape(-1, gradient.shape[-1]).astype(kernel.dtype))
    for_x = _dot(gradient_rows, barrier(kernel.T), x.dtype).reshape(x.shape)
    return for_x, _dot(barrier(rows.T), gradient_rows, kernel.dtype)


product.defvjp(_forward, _backward)
