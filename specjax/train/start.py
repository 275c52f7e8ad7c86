"""Where a small model starts when there is a larger one to learn from."""

import jax
import jax.numpy as jnp


def embedding_from(teacher: jax.Array, width: int) -> jax.Array:
    """The principal components of a teacher's embedding: what of it fits a narrower model.

    The rows keep their scalar products as well as any matrix of this rank can (Eckart and Young 1936), so tokens that
    the teacher takes for similar start out similar.

    Args:
      teacher: [V, D].
      width: of the embedding wanted, at most D.

    Returns:
      [V, width].

    Raises:
      ValueError: the teacher is narrower than what it should fill.
    """
    if width > teacher.shape[1]:
        raise ValueError(f"expected a teacher of at least {width} dimensions to start from, got {teacher.shape[1]}")
    _, directions = jnp.linalg.eigh(teacher.T @ teacher)  # by increasing weight
    return teacher @ directions[:, ::-1][:, :width]
