"""Losses of draft heads against NumPy, and steps that learn what can be learned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import EagleConfig, MedusaConfig, init_eagle, init_medusa
from specjax.testing import fresh_logits
from specjax.train import (
    causal_pass,
    eagle_loss,
    init_train_state,
    make_eagle_step,
    make_medusa_step,
    make_optimizer,
    medusa_loss,
    shifted,
)
from tests.helpers import TINY, softmax, tiny

SIZES = dict(learning_rate=1e-2, warmup_steps=2, total_steps=60, weight_decay=0.0, clip_norm=1.0)


def test_medusa_loss_sets_each_head_against_the_targets_later_choices():
    """Head i after token t against the target after token t + 1 + i, by section 2.2.1's weights."""
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 6, 3, 5)), rng.normal(size=(2, 6, 5))
    want = 0.0
    for head in range(3):
        losses = [
            -np.sum(softmax(teacher[row, at + 1 + head]) * np.log(softmax(logits[row, at, head])))
            for row in range(2)
            for at in range(6 - 1 - head)
        ]
        want += 0.7 ** (head + 1) * np.mean(losses)
    found = medusa_loss(jnp.asarray(logits), jnp.asarray(teacher), decay=0.7)
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_eagle_loss_is_smooth_l1_and_cross_entropy():
    rng = np.random.default_rng(0)
    predicted, hidden = 2 * rng.normal(size=(2, 2, 4, 6))
    logits, teacher = rng.normal(size=(2, 2, 4, 5))
    off = np.abs(predicted - hidden)
    regression = np.mean(np.where(off < 1, off**2 / 2, off - 0.5))
    soft = -np.mean(np.sum(softmax(teacher) * np.log(softmax(logits)), axis=-1))
    found = eagle_loss(*map(jnp.asarray, (predicted, hidden, logits, teacher)), class_weight=0.3)
    np.testing.assert_allclose(found, regression + 0.3 * soft, rtol=1e-5)


def test_states_are_shifted_to_the_tokens_they_chose():
    hidden = jnp.arange(12.0).reshape(1, 4, 3)
    np.testing.assert_array_equal(shifted(hidden)[0], [[0, 0, 0], [0, 1, 2], [3, 4, 5], [6, 7, 8]])


def test_hidden_states_are_what_the_head_reads():
    target, tokens = tiny(0), [3, 1, 4, 1, 5]
    out = causal_pass(target, target.params, jnp.asarray([tokens]))
    np.testing.assert_allclose(target.head(target.params, out.hidden)[0], fresh_logits(target, tokens), atol=1e-5)


@pytest.mark.parametrize(("name", "product_dtype"), [("medusa", "bfloat16"), ("eagle", "float32")])
def test_training_lowers_the_loss_and_leaves_the_target_alone(name, product_dtype):
    """On one batch, to less than half of what can be saved; weights stay float32."""
    target, optimizer = tiny(0), make_optimizer(**SIZES)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
    hidden = causal_pass(target, target.params, tokens).hidden
    if name == "medusa":
        config = MedusaConfig(TINY.hidden_size, TINY.vocab_size, num_heads=2)
        params = init_medusa(config, target)
        step = make_medusa_step(config, target, optimizer, decay=0.8, product_dtype=product_dtype)
    else:
        config = EagleConfig(TINY.hidden_size, TINY.vocab_size, 64, 4, 2, 8, TINY.max_positions)
        params = init_eagle(config, jax.random.key(0), hidden=hidden)
        step = make_eagle_step(config, target, optimizer, class_weight=0.1, product_dtype=product_dtype)
    before = jax.tree.map(np.array, target.params)
    state, losses = init_train_state(params, optimizer), []
    for _ in range(60):
        state, loss = step(state, (tokens, hidden))
        losses.append(float(loss))
    p = softmax(target.head(target.params, hidden))
    entropy = -(p * np.log(p)).sum(-1)
    least = (
        sum(0.8**ahead * entropy[:, ahead:].mean() for ahead in (1, 2)) if name == "medusa" else 0.1 * entropy.mean()
    )
    assert least < losses[-1] < least + 0.5 * (losses[0] - least)
    jax.tree.map(np.testing.assert_array_equal, target.params, before)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
