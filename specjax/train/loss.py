"""Next-token loss of a model, by way of the same forward that decodes."""

import jax
import jax.numpy as jnp

from specjax.types import ForwardOut, Model, PyTree, TreeMask


def causal_logits(model: Model, params: PyTree, tokens: jax.Array) -> jax.Array:
    """Logits [B, N, V] of whole sequences [B, N]."""
    return causal_pass(model, params, tokens).logits


def causal_pass(model: Model, params: PyTree, tokens: jax.Array, **known: jax.Array) -> ForwardOut:
    """One pass over whole sequences [B, N]: a chain of N nodes on an empty cache.

    ``known`` may hold the ``before`` of a draft model that reads the target's hidden states.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    causal = jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
    mask = TreeMask(jnp.zeros((batch,), jnp.int32), causal)
    return model.forward(params, tokens, positions, mask, model.init_cache(batch, 0), **known)


def next_token_loss(logits: jax.Array, tokens: jax.Array, teacher: jax.Array | None = None, weight: float = 0.0):
    """Mean loss in nats per token.

    Args:
      logits: [B, N, V] of the positions before each token.
      tokens: [B, N] int32, the tokens that came.
      teacher: [B, N, V] logits of a model to imitate, or None.
      weight: share of the loss that is cross-entropy to the teacher's probabilities (Hinton et al. 2015, at
        temperature 1); the rest is cross-entropy to the tokens.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    expected = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    if teacher is not None:
        imitated = jnp.sum(jax.nn.softmax(teacher.astype(jnp.float32)) * logits, axis=-1)
        expected = (1 - weight) * expected + weight * imitated
    return jnp.mean(total - expected)


def imitation_loss(logits: jax.Array, answers: jax.Array, shares: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted mean cross-entropy, in nats, to distributions given by a few tokens each.

    One token with all of the share is cross-entropy to a text; a target's likeliest tokens with their probabilities are
    distillation (Hinton et al. 2015, at temperature 1) without the target's [B, N, V] logits.

    Args:
      logits: [B, N, V].
      answers: [B, N, M] int32, tokens; one that is named twice has both shares.
      shares: [B, N, M] of the tokens; their sum is 1.
      weights: [B, N] >= 0; where all of them are zero the loss is zero.
    """
    logits = logits.astype(jnp.float32)
    expected = jnp.sum(shares * jnp.take_along_axis(logits, answers, axis=-1), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - expected
    return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
