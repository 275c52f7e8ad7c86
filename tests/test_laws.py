"""Proposal laws: what is sampled is what is enumerated, whatever the padding, and never a token without mass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.laws import LAWS, gumbel_noise, law_key
from tests.helpers import chi_square_z

VOCAB = 4
DISTRIBUTIONS = {
    "dense": [0.45, 0.05, 0.3, 0.2],
    "two tokens": [0.5, 0.0, 0.5, 0.0],
    "one-hot": [0.0, 1.0, 0.0, 0.0],
    "uniform": [0.25] * 4,
}
CASES = [(name, k) for name, law in LAWS.items() for k in (1, 2, 3) if k <= (law.max_draws or 3)]


@functools.cache
def sampler(name: str, k: int):
    return jax.jit(jax.vmap(functools.partial(LAWS[name].sample, k=k), in_axes=(0, None)))


def as_numbers(tokens, valid) -> np.ndarray:
    """Outcomes as numbers; what an invalid draw holds does not matter."""
    digits = np.where(valid, tokens, VOCAB)
    return (digits * (VOCAB + 1) ** np.arange(digits.shape[-1])).sum(-1)


@pytest.mark.parametrize(("name", "k"), CASES)
def test_samples_follow_the_enumeration(name, k):
    count = 20_000
    for seed, (label, q) in enumerate(DISTRIBUTIONS.items()):
        keys, q = jax.random.split(jax.random.key(seed), count), np.array(q)
        outcomes = LAWS[name].enumerate(q, k)
        want = np.bincount(as_numbers(outcomes.tokens, outcomes.valid), outcomes.probs, (VOCAB + 1) ** k)
        tokens, valid = sampler(name, k)(keys, jnp.asarray(q, jnp.float32))
        got = np.bincount(as_numbers(np.asarray(tokens), np.asarray(valid)), minlength=(VOCAB + 1) ** k)
        assert chi_square_z(got, want) < 5, label


@pytest.mark.parametrize(("name", "k"), CASES)
def test_enumeration_sums_to_one_in_numpy_and_in_jax(name, k):
    for q in map(np.array, DISTRIBUTIONS.values()):
        outcomes = LAWS[name].enumerate(q, k)
        assert outcomes.probs.dtype == np.float64
        assert abs(outcomes.probs.sum() - 1) < 1e-15 * 4**k
        traced = jax.jit(lambda q: LAWS[name].enumerate(q, k))(jnp.asarray(q, jnp.float32))
        np.testing.assert_array_equal(traced.tokens, outcomes.tokens)
        np.testing.assert_array_equal(traced.valid, outcomes.valid)
        np.testing.assert_allclose(traced.probs, outcomes.probs, atol=1e-6)


@pytest.mark.parametrize("name", LAWS)
def test_validity_depends_on_the_distribution_and_never_on_the_token(name):
    k = LAWS[name].max_draws or 3
    for seed, (label, q) in enumerate(DISTRIBUTIONS.items()):
        keys = jax.random.split(jax.random.key(seed), 500)
        tokens, valid = map(np.asarray, sampler(name, k)(keys, jnp.asarray(q, jnp.float32)))
        assert (valid == valid[0]).all(), label
        assert (np.array(q)[tokens[valid]] > 0).all(), label


@pytest.mark.parametrize("name", LAWS)
def test_a_node_with_fewer_draws_takes_the_same_ones(name):
    """Padding a topology must change no token: k grows, count stays."""
    q = jnp.asarray(DISTRIBUTIONS["dense"], jnp.float32)
    most = LAWS[name].max_draws or 4
    padded_sampler = jax.jit(jax.vmap(lambda key, count: LAWS[name].sample(key, q, most, count), in_axes=(0, None)))
    for count in range(1, most + 1):
        keys = jax.random.split(jax.random.key(count), 50)
        padded, padded_valid = padded_sampler(jax.random.clone(keys), jnp.int32(count))
        tokens, valid = sampler(name, count)(keys, q)
        np.testing.assert_array_equal(padded[:, :count], tokens)
        np.testing.assert_array_equal(padded_valid[:, :count], valid)
        assert not padded_valid[:, count:].any()


def test_top_k_breaks_ties_by_the_lowest_index():
    tokens, valid = LAWS["deterministic"].sample(jax.random.key(0), jnp.array([0.1, 0.3, 0.3, 0.3]), 3)
    np.testing.assert_array_equal(tokens, [1, 2, 3])
    np.testing.assert_array_equal(
        LAWS["deterministic"].enumerate(np.array([0.1, 0.3, 0.3, 0.3]), 3).tokens, [[1, 2, 3]]
    )
    assert valid.all()


@pytest.mark.parametrize("vocab_size", [3, 17, 1000, 5000])
def test_large_vocabularies_are_drawn_evenly_to_the_last_token(vocab_size):
    """Independent draws go through blocks of tokens: no block edge may gain or lose."""
    q = np.random.default_rng(0).dirichlet([0.5] * vocab_size)
    q[::3] = 0
    q[-1] = 0.1
    q /= q.sum()
    draws, keys = 8, jax.random.split(jax.random.key(3), 10_000)
    tokens, valid = sampler("iid", draws)(keys, jnp.asarray(q, jnp.float32))
    assert valid.all()
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocab_size)
    assert counts[q == 0].sum() == 0
    big = q * tokens.size > 20
    deviation = (counts - q * tokens.size)[big] / np.sqrt(q * (1 - q) * tokens.size)[big]
    assert np.abs(deviation).max() < 5
    if len(deviation) > 50:
        assert 0.8 < np.sqrt((deviation**2).mean()) < 1.2


def test_shared_noise_anticipates_the_gumbel_max_emission():
    key, q = jax.random.key(5), jnp.asarray(DISTRIBUTIONS["dense"], jnp.float32)
    tokens, _ = LAWS["shared_gumbel"].sample(key, q, 2)
    scores = jnp.log(q) + gumbel_noise(jax.random.clone(key), VOCAB)
    np.testing.assert_array_equal(tokens, jnp.argsort(-scores)[:2])


def test_noise_of_a_larger_vocabulary_begins_with_that_of_a_smaller():
    """A draft with a padded vocabulary shares the noise of the tokens both have."""
    key = jax.random.key(6)
    np.testing.assert_allclose(
        gumbel_noise(key, 50), gumbel_noise(jax.random.clone(key), 64)[:50], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("name", "k"), [("deterministic", 5), ("without_replacement", 5), ("hub", 3), ("iid", 0)])
def test_impossible_numbers_of_draws_are_refused(name, k):
    with pytest.raises(ValueError, match="expected .* draws"):
        LAWS[name].sample(jax.random.key(0), jnp.full(VOCAB, 0.25), k)


def test_law_keys():
    assert law_key(["iid"]) == "iid"
    assert law_key(["iid", "iid"]) == "iid x sources"
    assert law_key(["hub", "iid"]) == "hub + iid"


def test_noise_has_no_lattice_where_it_is_large():
    """A token's chance rests on the largest values: of 2^-23 steps of a uniform number the top ones would repeat."""
    noise = np.asarray(gumbel_noise(jax.random.key(0), 1 << 22))
    largest = np.sort(noise)[-200:]
    assert len(np.unique(largest)) == 200
