"""Estimates and calibration against enumeration, real decoding, and counting by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.exact import expected_acceptance
from specjax.laws import LAWS
from specjax.replay import (
    RankTrace,
    RateTrace,
    calibrate,
    estimate_tokens_per_step,
    rank_trace,
    rate_trace,
    tokens_per_step,
)
from specjax.replay.rates import CONTAINING
from specjax.testing import table_model
from tests.helpers import context, prompts_of

RNG = np.random.default_rng(0)
P, Q = RNG.dirichlet([0.7] * 5), RNG.dirichlet([0.7] * 5)
PROMPTS = [[0]] * 24
COMMON = dict(warp=sj.Warp(1.0), max_new_tokens=33, eos_ids=(), seeds=range(24), batch_size=24)


@pytest.mark.parametrize("law", sorted(CONTAINING))
def test_sets_of_draws_that_contain_a_token_have_the_laws_weights(law):
    """Their weights add up, on average, to the probability that k draws contain the token."""
    q, k = jnp.asarray(Q, jnp.float32), 3
    keys = jax.random.split(jax.random.key(0), (6, 4000))
    tokens, valid = jax.vmap(lambda key: LAWS[law].sample(key, q, k))(keys[5])
    for token in range(5):
        found = jax.vmap(lambda key, token=token: CONTAINING[law](key, q, token, k))(keys[token])
        assert bool(jnp.all(jnp.where(found.weights > 0, found.tokens[:, jnp.arange(k), jnp.arange(k)] == token, True)))
        weight = np.asarray(found.weights.sum(1))
        seen = np.asarray(((tokens == token) & valid).any(1), float)
        assert abs(weight.mean() - seen.mean()) < 4 * np.sqrt((weight.var() + seen.var()) / 4000) + 1e-6


@pytest.mark.parametrize(
    ("mode", "law", "verifier"),
    [
        ("iid", "iid", "multi_step"),
        ("without_replacement", "without_replacement", "without_replacement"),
    ],
)
def test_estimates_agree_with_enumeration(mode, law, verifier):
    """One level: a model without context accepts at every node as enumeration says, so tokens per step are 1 + that."""
    trace = rate_trace(
        table_model(np.log(P)),
        table_model(np.log(Q)),
        PROMPTS,
        verifier=verifier,
        draft_mode=mode,
        most_draws=2,
        **COMMON,
    )
    found = estimate_tokens_per_step(trace, [(1,), (2,)])
    for k, mean, error in zip((1, 2), *found):
        # Of a text of 32 tokens the last round is cut, hence the slack beyond the standard errors.
        want = 1 + float(expected_acceptance(verifier, P, Q, num_draws=k, law=law))
        assert abs(mean - want) < 4 * error + 0.03
    rates = calibrate(trace, depth=2, most_draws=2)
    want = float(expected_acceptance(verifier, P, Q, num_draws=2, law=law))
    assert abs(rates.rates[0].sum() - want) < 0.02
    assert np.all(rates.low <= rates.rates + 1e-12)
    assert np.all(rates.rates <= rates.high + 1e-12)


def test_an_estimate_of_what_can_be_replayed_is_the_replay():
    """Top-k drafts under naive sampling: given the text nothing is random, so the estimate is exact, tree by tree."""
    options = dict(max_new_tokens=40, eos_ids=(), seeds=[1, 2, 3, 4], warp=sj.Warp(1.0))
    prompts = prompts_of([5, 9, 12, 1])
    trees = [(2, 2), (3, 2, 1), [[0], [1], [1, 0], [1, 2]], (1, 1, 1)]
    rates = rate_trace(
        context(0),
        context(1),
        prompts,
        verifier="naive_sampling",
        draft_mode="top_k",
        most_draws=3,
        samples=1,
        **options,
    )
    ranks = rank_trace(context(0), [context(1)], prompts, **options)
    np.testing.assert_array_equal(rates.tokens, ranks.tokens)
    estimate = estimate_tokens_per_step(rates, trees)
    np.testing.assert_allclose(estimate.tokens_per_step, tokens_per_step(ranks, trees), rtol=1e-5)
    assert np.all(estimate.standard_error > 0)


def test_an_estimate_agrees_with_decoding():
    """Multi-step verification of independent draws, two levels, 200 texts."""
    p, q = RNG.dirichlet([0.7] * 5, 5), RNG.dirichlet([0.7] * 5, 5)
    target, draft = table_model(np.log(p)), table_model(np.log(q))
    options = dict(warp=sj.Warp(1.0), max_new_tokens=40, eos_ids=())
    trace = rate_trace(
        target,
        draft,
        PROMPTS,
        verifier="multi_step",
        draft_mode="iid",
        most_draws=2,
        **options | dict(seeds=range(24), batch_size=24),
    )
    found = estimate_tokens_per_step(trace, [(2, 2)])
    real = sj.generate(
        target,
        [[0]] * 200,
        drafts=[draft],
        tree=(2, 2),
        draft_mode="iid",
        verifier="multi_step",
        seeds=range(200),
        **options,
    )
    assert abs(found.tokens_per_step[0] - real.stats.tokens_per_step) < 5 * found.standard_error[0]


def test_calibration_counts_ranks_by_depth():
    trace = rank_trace(context(0), [context(1)], prompts_of([5, 9, 12, 1]), max_new_tokens=40, eos_ids=())
    found = calibrate(trace, depth=3, most_draws=4)
    ranks, lengths = trace.ranks[0], trace.lengths
    for depth in range(3):
        tried, hits = 0, np.zeros(4)
        for row, length in zip(ranks, lengths):
            for at in range(1 + depth, length):
                if np.all(row[at - depth : at] < 4):
                    tried += 1
                    if row[at] < 4:
                        hits[row[at]] += 1
        assert found.tried[depth] == tried
        np.testing.assert_allclose(found.rates[depth], hits / tried)
    assert np.all((found.low <= found.rates) & (found.rates <= found.high))
    assert np.all(found.high - found.low > 0)


@pytest.mark.parametrize(("prompts", "alike"), [(24, 0), (24, 8), (5, 0), (5, 8)])
def test_intervals_and_standard_errors_cover(prompts, alike):
    """Of 300 simulated traces, whether or not the tokens of a prompt are alike, and with few prompts."""
    rng = np.random.default_rng(prompts + alike)
    law, tokens, times = np.array([0.6, 0.15, 0.05, 0.2]), 41, 300  # of ranks 0 to 2 and of none

    def ranks(prompts: int) -> np.ndarray:
        own = rng.dirichlet(alike * law, prompts) if alike else np.tile(law, (prompts, 1))
        return np.sum(rng.random((prompts, tokens, 1)) > np.cumsum(own, 1)[:, None, :3], axis=2).astype(np.int32)

    def trace(ranks: np.ndarray) -> RankTrace:
        near = np.zeros(ranks.shape, bool)
        return RankTrace(np.zeros_like(ranks), np.full(len(ranks), tokens), ranks[None], near[None], near, near)

    whole = trace(ranks(20_000))
    truth = calibrate(whole, depth=2, most_draws=3).rates
    rate = tokens_per_step(whole, [(2, 2)])[0]
    covered, within, errors = np.zeros((2, 3)), 0, []
    for _ in range(times):
        part = trace(ranks(prompts))
        found = calibrate(part, depth=2, most_draws=3)
        covered += (found.low <= truth) & (truth <= found.high)
        # As a rate trace of draws without chance in them.
        hits = part.ranks[0][..., None, None] == np.arange(2)
        chances = RateTrace(part.tokens, part.lengths, np.tile(hits, (2, 1)).astype(np.float32), hits[:, :, 0] * 1.0)
        mean, error = (float(field[0]) for field in estimate_tokens_per_step(chances, [(2, 2)]))
        within += abs(mean - rate) < 2 * error
        errors.append((mean - rate, error))
    assert np.all(covered / times > 0.9)
    deviations, stated = np.array(errors).T
    assert np.sqrt(np.mean(stated**2)) == pytest.approx(np.std(deviations), rel=0.15)
    assert within / times > (0.88 if prompts > 20 else 0.82)  # two standard errors; of five prompts, Student's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(verifier="block"), "unknown node rule"),
        (dict(draft_mode="hub"), "cannot be estimated"),
        (dict(draft_mode="top_k"), "would bias"),
        (dict(most_draws=0), "most_draws"),
        (dict(samples=True), "samples"),
    ],
)
def test_nonsense_is_refused(change, message):
    arguments = dict(verifier="multi_step", draft_mode="iid", most_draws=2, warp=sj.Warp(1.0)) | change
    with pytest.raises(ValueError, match=message):
        rate_trace(context(0), context(1), [[1]], **arguments)
