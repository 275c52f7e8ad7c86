"""Warps against a plain NumPy reference, and streams of noise that never mix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.sampling import Streams, argmax, check_warp, sample_at, stack_warps
from specjax.testing import total_variation

VOCAB = 8
warped = jax.jit(lambda warp, logits: warp(logits))


def reference(logits, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """One row in float64: temperature, then the k likeliest, then the fewest of those with mass top_p."""
    logits = [float(logit) for logit in logits]
    if temperature == 0:
        return np.eye(len(logits))[logits.index(max(logits))]
    weights = np.array([np.exp((logit - max(logits)) / temperature) for logit in logits])
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = order[: top_k or None]
    mass, total, shortest = 0.0, sum(weights[token] for token in kept), []
    for token in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        shortest.append(token)
        mass += weights[token]
    probs = np.zeros(len(logits))
    probs[shortest] = weights[shortest]
    return probs / probs.sum()


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([-np.inf, -2.0, -1.0, 0.0, 0.25, 1.0, 1.5, 3.0]), min_size=VOCAB, max_size=VOCAB),
    st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0]),
    st.integers(0, VOCAB + 2),
    st.sampled_from([0.123, 0.5432, 0.789, 0.9511, 1.0]),
)
def test_warp_equals_the_reference(logits, temperature, top_k, top_p):
    """B06, B11: with ties, -inf logits, and a temperature that almost divides by zero."""
    if np.max(logits) == -np.inf:
        logits[3] = 0.0
    warp = stack_warps([sj.Warp(temperature, top_k, top_p)])
    probs = np.asarray(warped(warp, jnp.asarray([logits])))[0]
    np.testing.assert_allclose(probs, reference(logits, temperature, top_k, top_p), atol=1e-6)
    assert set(np.flatnonzero(probs)) <= set(np.flatnonzero(np.isfinite(logits)))


def test_numbers_worked_by_hand():
    """B09: T=.5 with top_k=2 on [2,1,0,-1,-2]; top_p=.9 at T=.7 keeps the first three of [2,1.5,1,.5,0]."""
    probs = sj.Warp(0.5, 2)(jnp.array([2.0, 1, 0, -1, -2]))
    np.testing.assert_allclose(probs, [0.8808, 0.1192, 0, 0, 0], atol=1e-4)
    full = sj.Warp(0.7)(jnp.array([2, 1.5, 1, 0.5, 0]))
    np.testing.assert_allclose(np.cumsum(full)[:3], [0.525, 0.782, 0.908], atol=1e-3)
    probs = sj.Warp(0.7, top_p=0.9)(jnp.array([2, 1.5, 1, 0.5, 0]))
    np.testing.assert_allclose(probs, np.append(full[:3] / full[:3].sum(), [0, 0]), atol=1e-6)


def test_ties_go_to_the_lowest_ids():
    """B06: 5 and 9 tie at the maximum."""
    logits = jnp.zeros(12).at[jnp.array([5, 9])].set(2.0)
    assert int(jnp.argmax(sj.Warp(0.0)(logits))) == 5
    assert np.flatnonzero(sj.Warp(1.0, top_k=1)(logits)).tolist() == [5]
    for tiny in (1e-9, 1e-38, 1e-45):  # the last two vanish beside a mass in float32
        assert np.flatnonzero(sj.Warp(1.0, top_p=tiny)(logits)).tolist() == [5]
    assert np.flatnonzero(sj.Warp(1.0, top_k=3)(logits)).tolist() == [0, 5, 9]
    assert np.flatnonzero(sj.Warp(1e-6)(logits)).tolist() == [5, 9]


def test_rows_of_a_batch_are_warped_on_their_own():
    """B09: each row has its own temperature and filters; filters of one row do not reach another."""
    logits = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32)
    rows = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 3, 1.0), (0.7, 0, 0.6), (1.3, 4, 0.5), (0.0, 2, 0.5)]
    warp = stack_warps([sj.Warp(*row) for row in rows])
    together = np.asarray(warped(warp, jnp.asarray(logits)))
    for row, fields in enumerate(rows):
        np.testing.assert_allclose(together[row], reference(logits[row], *fields), atol=1e-6)
        np.testing.assert_allclose(together[row], sj.Warp(*fields)(jnp.asarray(logits[row])), atol=1e-6)
    # An axis between batch and vocabulary, as nodes of a tree have.
    nodes = sj.Warp(*(field[:, None] for field in (warp.temperature, warp.top_k, warp.top_p)))
    twice = nodes(jnp.stack([jnp.asarray(logits), jnp.asarray(logits[::-1])], axis=1))
    np.testing.assert_allclose(twice[:, 0], together, atol=1e-6)
    np.testing.assert_allclose(twice[2, 1], reference(logits[3], *rows[2]), atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e-2, 1e6])
@pytest.mark.parametrize("logits", [[3e38, 1.0], [-3e38, 3e38], [-np.inf, 0.0], [1e4, 1e4 - 1], [0.0, 0.0]])
def test_extreme_logits_and_temperatures_stay_finite(temperature, logits):
    """B11: no NaN, whatever the temperature."""
    probs = np.asarray(warped(stack_warps([sj.Warp(temperature, 0, 0.99)]), jnp.asarray([logits], jnp.float32)))
    assert np.all(np.isfinite(probs))
    assert probs.sum() == pytest.approx(1)
    assert probs[0, np.argmax(logits)] > 0


def test_half_precision_logits_are_warped_in_float32():
    """B06: probabilities of bfloat16 logits are float32."""
    logits = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
    probs = sj.Warp()(logits)
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs, reference(np.asarray(logits, float), 1, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("warp", "message"),
    [
        (sj.Warp(-0.1), "Warp.temperature must be"),
        (sj.Warp(float("nan")), "Warp.temperature must be"),
        (sj.Warp(float("inf")), "Warp.temperature must be"),
        (sj.Warp("hot"), "Warp.temperature must be"),
        (sj.Warp(None), "Warp.temperature must be"),
        (sj.Warp(1.0, -1), "Warp.top_k must be"),
        (sj.Warp(1.0, 1.5), "Warp.top_k must be"),
        (sj.Warp(1.0, 0, 0.0), "Warp.top_p must be"),
        (sj.Warp(1.0, 0, 1.1), "Warp.top_p must be"),
        (sj.Warp(1.0, 0, float("nan")), "Warp.top_p must be"),
        (stack_warps([sj.Warp(0.0), sj.Warp(1.0)]), "Warp.temperature must be"),
    ],
)
def test_bad_warps_name_the_field(warp, message):
    with pytest.raises(ValueError, match=message):
        check_warp(warp)


def test_good_warps_pass():
    for warp in (sj.Warp(), sj.Warp(0), sj.Warp(0.5, 3, 0.5), sj.Warp(np.float32(0.5), np.int64(3))):
        check_warp(warp)


@pytest.mark.parametrize("values", [[1, 3, 3, 2], [5, 5], [-np.inf, -np.inf], [-np.inf, -2, np.inf, np.inf], [7]])
def test_argmax_takes_the_lowest_id_of_the_largest(values):
    assert argmax(jnp.asarray(values, jnp.float32)) == np.argmax(values)


def test_argmax_stays_in_the_vocabulary_whatever_it_is_given():
    rows = jnp.asarray([[jnp.nan] * 3, [0, jnp.nan, 1]])
    assert np.all((0 <= argmax(rows)) & (argmax(rows) < 3))
    assert argmax(rows).dtype == jnp.int32


def test_streams_differ_by_seed_and_by_purpose():
    streams = Streams.from_seeds(jnp.asarray([0, 1, 2**31, 2**32 - 1], jnp.uint32))
    words = np.concatenate([np.asarray(jax.random.key_data(keys)) for keys in streams])
    assert len({tuple(row) for row in words.tolist()}) == 12


def test_sampling_uses_its_own_key_and_position_only():
    """B16: a row's token does not depend on its batch-mates or its place among them."""
    seeds = jnp.arange(64, dtype=jnp.uint32)
    emit = Streams.from_seeds(seeds).emit
    rng = np.random.default_rng(0)
    probs = jnp.asarray(rng.dirichlet(np.ones(VOCAB), 64), jnp.float32)
    positions = jnp.asarray(rng.integers(1, 100, 64))
    together = np.asarray(sample_at(emit, positions, probs))
    order = rng.permutation(64)
    np.testing.assert_array_equal(sample_at(emit[order], positions[order], probs[order]), together[order])
    np.testing.assert_array_equal(sample_at(emit[5:6], positions[5:6], probs[5:6]), together[5:6])
    assert np.any(np.asarray(sample_at(emit, positions + 1, probs)) != together)


def test_samples_have_their_law_and_positions_are_independent():
    """The token at one position says nothing about the next: joint total variation under 0.02 for 20,000 seeds."""
    p = np.array([0.5, 0.3, 0.2, 0.0])
    emit = Streams.from_seeds(jnp.arange(20_000, dtype=jnp.uint32)).emit
    tokens = [
        np.asarray(sample_at(emit, jnp.full(20_000, at), jnp.broadcast_to(jnp.asarray(p, jnp.float32), (20_000, 4))))
        for at in (7, 8)
    ]
    joint = np.histogram2d(*tokens, bins=np.arange(5) - 0.5)[0] / 20_000
    assert total_variation(joint, np.outer(p, p)) < 0.02
    assert joint[3].sum() + joint[:, 3].sum() == 0
