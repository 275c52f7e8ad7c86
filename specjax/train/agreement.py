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
    return ranks_of_tokens(jnp.argmax(target_logits, axis=-1), draft_logits)


def ranks_of_tokens(tokens: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Where given tokens stand in the draft's order, 0 being first: what is in its top k has a rank below k.

    Args:
      tokens: [...] int32.
      draft_logits: [..., V].

    Returns:
      [...] int32. Equal logits are ordered by token id, as a top-k orders them.
    """
    tokens = tokens[..., None]
    value = jnp.take_along_axis(draft_logits, tokens, axis=-1)
    before = (draft_logits == value) & (jnp.arange(draft_logits.shape[-1]) < tokens)
    return jnp.sum((draft_logits > value) | before, axis=-1, dtype=jnp.int32)
