"""How often a draft model's favourites hold the target's choice."""

import jax
import jax.numpy as jnp


def ranks_of_choice(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Where the target's most likely token stands in the draft's order, 0 being first.

    Args:
      target_logits: [..., V].
      draft_logits: [..., V].

    Returns:
      [...] int32. Equal logits are ordered by token id, as a top-k orders them.
    """
    choice = jnp.argmax(target_logits, axis=-1, keepdims=True)
    value = jnp.take_along_axis(draft_logits, choice, axis=-1)
    before = (draft_logits == value) & (jnp.arange(draft_logits.shape[-1]) < choice)
    return jnp.sum((draft_logits > value) | before, axis=-1, dtype=jnp.int32)
