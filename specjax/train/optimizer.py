"""AdamW with warm-up, cosine decay and gradient clipping."""

import jax
import optax


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    weight_decay: float,
    clip_norm: float,
    b2: float = 0.95,
) -> optax.GradientTransformation:
    """AdamW whose rate rises linearly from zero, then falls along a half cosine back to zero.

    Weight decay acts on matrices only; norms and biases are left alone.

    Args:
      learning_rate: the highest, reached after ``warmup_steps`` of ``total_steps``.
      warmup_steps, total_steps: updates.
      weight_decay: of AdamW (Loshchilov and Hutter 2019), decoupled.
      clip_norm: gradients of a larger global norm are scaled down to it.
      b2: decay of the second moment.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=learning_rate, warmup_steps=warmup_steps, decay_steps=total_steps
    )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            schedule,
            b2=b2,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
