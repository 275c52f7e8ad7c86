"""The product of activations with a weight matrix, with a gradient that suits XLA's CPU backend too."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., I] @ kernel [I, O], multiplied in the kernel's dtype, summed in float32, returned in the dtype of x.

    So bfloat16 kernels under float32 activations are mixed-precision training, and one dtype for both is plain.
    """
    return _dot(x.astype(kernel.dtype), kernel, x.dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


def _forward(x: jax.Array, kernel: jax.Array):
    return product(x, kernel), (x, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array):
    # Behind a barrier XLA's CPU backend sees plain products of finished matrices. Left alone, it computes the gradient
    # of the activation function inside a transposing copy, and multiplies transposed bfloat16 matrices without AMX.
    barrier = jax.lax.optimization_barrier
    x, kernel = saved
    rows = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    gradient_rows = barrier(gradient.reshape(-1, gradient.shape[-1]).astype(kernel.dtype))
    for_x = _dot(gradient_rows, barrier(kernel.T), x.dtype).reshape(x.shape)
    return for_x, _dot(barrier(rows.T), gradient_rows, kernel.dtype)


product.defvjp(_forward, _backward)
