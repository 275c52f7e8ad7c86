"""Boost-tuning: which answers a model matches, and the loss on answers, against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.train import (
    Lesson,
    answers_covered,
    best_factor,
    causal_logits,
    cross_entropies,
    imitation_loss,
    init_train_state,
    make_lesson_step,
    make_optimizer,
    matched,
    next_token_loss,
    ranks_of_tokens,
    scale_logits,
    spans,
)
from tests.helpers import softmax, tiny


def test_spans_tile_the_places():
    """One-token answers inside the prompt, whole ones behind it, the last as long as what is left."""
    assert spans(3, 7, 3).tolist() == [0, 1, 2, 5, 8]
    assert spans(4, 0, 3).tolist() == [0, 1, 2]
    assert spans(1, 4, 4).tolist() == [0]


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("shape", [(5, 8, 4), (1, 9, 4), (6, 5, 9), (7, 0, 2)], ids=str)
def test_matches_are_those_found_place_by_place(shape, top):
    prompt, continuation, length = shape
    places = prompt - 1 + continuation
    ranks = np.random.default_rng(0).choice([0, 0, 0, 1, 2, 5], (40, places)).astype(np.uint16)
    marks = matched(ranks, spans(*shape), top)
    expected = np.zeros((40, places), bool)
    answers = []
    for row in range(40):
        at = 0
        while at < places:
            end = at + 1 if at < prompt - 1 else min(at + length, places)
            whole = all(ranks[row, place] < top for place in range(at, end))
            expected[row, at:end] = whole
            answers.append(whole)
            at = end
    np.testing.assert_array_equal(marks, expected)
    assert 0 < np.mean(answers) < 1
    assert answers_covered(marks, spans(*shape)) == pytest.approx(np.mean(answers))


def test_a_match_is_the_models_own_greedy_continuation():
    """The definition, run out: from the text before each answer the model says, on its own, what the target said."""
    target, model = tiny(0), tiny(0)
    noise = jax.random.normal(jax.random.key(1), model.params["embed_tokens"].shape) * 0.05
    model = model._replace(params={**model.params, "embed_tokens": model.params["embed_tokens"] + noise})
    prompts = np.random.default_rng(0).integers(0, 64, (16, 5))
    said = sj.generate(target, prompts.tolist(), max_new_tokens=12).tokens
    texts = np.concatenate([prompts, said], axis=1)
    ranks = ranks_of_tokens(jnp.asarray(texts[:, 1:]), causal_logits(model, model.params, jnp.asarray(texts[:, :-1])))
    marks = matched(np.asarray(ranks), spans(5, 12, 3))
    begins = range(5, 17, 3)
    before = [text[:begin].tolist() for text in texts for begin in begins]
    own = sj.generate(model, before, max_new_tokens=3).tokens
    after = [text[begin : begin + 3].tolist() for text in texts for begin in begins]
    agreed = np.array([a == b for a, b in zip(own, after, strict=True)]).reshape(16, 4)
    np.testing.assert_array_equal(marks[:, 4::3], agreed)
    assert 0.1 < agreed.mean() < 0.9


def test_imitation_loss_is_weighted_cross_entropy():
    """One token with all the share is next-token loss; all tokens with their probabilities, full distillation."""
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 2, 3, 7)).astype(np.float32)
    tokens, weights = rng.integers(0, 7, (2, 3)), rng.random((2, 3)).astype(np.float32)
    log_p = np.log(softmax(logits))
    each = -np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    alone = imitation_loss(jnp.asarray(logits), tokens[..., None], np.ones((2, 3, 1)), jnp.asarray(weights))
    assert float(alone) == pytest.approx((weights * each).sum() / weights.sum(), rel=1e-5)

    everything = np.broadcast_to(np.arange(7), (2, 3, 7))
    answers = np.concatenate([tokens[..., None], everything], axis=-1)
    shares = np.concatenate([np.full((2, 3, 1), 0.3), 0.7 * softmax(teacher)], axis=-1)
    mixed = imitation_loss(jnp.asarray(logits), answers, shares, jnp.ones((2, 3)))
    whole = next_token_loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(teacher), 0.7)
    assert float(mixed) == pytest.approx(float(whole), rel=1e-5)


def test_places_without_weight_teach_nothing():
    """What stands there does not move the gradient; without any weight, loss and gradient are zero and finite."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 4, 5)), jnp.float32)
    slope = jax.grad(imitation_loss)
    weights = jnp.asarray([[1.0, 0.0, 1.0, 0.0]])
    first = slope(logits, jnp.zeros((1, 4, 1), int), jnp.ones((1, 4, 1)), weights)
    other = slope(logits, jnp.asarray([[[0], [3], [0], [4]]]), jnp.ones((1, 4, 1)), weights)
    np.testing.assert_array_equal(first, other)
    np.testing.assert_array_equal(first[:, 1::2], 0)
    nothing = slope(logits, jnp.zeros((1, 4, 1), int), jnp.ones((1, 4, 1)), jnp.zeros((1, 4)))
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize("product_dtype", ["float32", "bfloat16"])
def test_lessons_are_learned_where_they_have_weight(product_dtype):
    """A model learns the answers it is taught, and not those at places without weight."""
    model = tiny(1)
    model = model._replace(params=jax.tree.map(lambda leaf: leaf / 10 if leaf.ndim > 1 else leaf, model.params))
    optimizer = make_optimizer(learning_rate=1e-2, warmup_steps=3, total_steps=40, weight_decay=0.0, clip_norm=1.0)
    rng = np.random.default_rng(0)
    answers = jnp.asarray(rng.integers(0, 64, (4, 9, 1)))
    lesson = Lesson(
        tokens=jnp.asarray(rng.integers(0, 64, (4, 9))),
        answers=answers,
        shares=jnp.ones((4, 9, 1)),
        weights=jnp.broadcast_to(jnp.arange(9) < 6, (4, 9)).astype(jnp.float32),
    )
    step = make_lesson_step(model, optimizer, product_dtype=product_dtype)
    state = init_train_state(jax.tree.map(jnp.array, model.params), optimizer)
    losses = []
    for _ in range(40):
        state, loss = step(state, lesson)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    ranks = np.asarray(ranks_of_tokens(answers[..., 0], causal_logits(model, state.params, lesson.tokens)))
    assert (ranks[:, :6] == 0).mean() > 0.9
    assert (ranks[:, 6:] == 0).mean() < 0.3


def test_a_model_too_sure_of_itself_is_brought_back():
    """A target with its logits multiplied by 1.19 is found out, and the losses are those of plain cross-entropy."""
    target = tiny(0)
    sure = target._replace(params=scale_logits(target.params, 2**0.25))
    batches = np.random.default_rng(0).integers(0, 64, (2, 4, 9))
    assert best_factor(target, sure, batches) == pytest.approx(2**-0.25)
    logits, ours = (np.asarray(causal_logits(m, m.params, jnp.asarray(batches[0]))) for m in (target, tiny(1)))
    found = cross_entropies(jnp.asarray(logits), jnp.asarray(ours), jnp.asarray([0.5, 1.0]))
    expected = [-(softmax(logits) * np.log(softmax(factor * ours))).sum(-1).mean() for factor in (0.5, 1.0)]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
