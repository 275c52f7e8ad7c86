"""Node rules, summed over every draw in float64: which are exact for which law, how they are ordered, what edges do."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.exact import expected_acceptance
from specjax.laws import LAWS, law_key
from specjax.types import Draws
from specjax.verify.measure import bound, for_laws, node_outcomes, shared_noise_acceptance
from specjax.verify.paths import PATH_RULES
from specjax.verify.rules import RULES, multi_step, naive_sampling, without_replacement
from specjax.verify.table import BIASED, EXACT, format_table, table

pytestmark = pytest.mark.optimised

V = 4
ONE_HOT = np.eye(V)
EDGES = {
    "p = q": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "both uniform": ([0.25] * 4, [0.25] * 4),
    "one-hot p": (ONE_HOT[1], [0.4, 0.3, 0.2, 0.1]),
    "one-hot q": ([0.4, 0.3, 0.2, 0.1], ONE_HOT[1]),
    "the same one-hot": (ONE_HOT[2], ONE_HOT[2]),
    "different one-hots": (ONE_HOT[2], ONE_HOT[0]),
    "disjoint": ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),
    "two of four tokens": ([0.6, 0.4, 0, 0], [0.1, 0.9, 0, 0]),
    "q misses a token": ([0.4, 0.3, 0.2, 0.1], [0.6, 0.4, 0, 0]),
    "p misses a token": ([0.6, 0.4, 0, 0], [0.4, 0.3, 0.2, 0.1]),
    "tiny masses": ([1 - 3e-30, 1e-30, 1e-30, 1e-30], [1e-30, 1 - 3e-30, 1e-30, 1e-30]),
    "equal ratios": ([0.2, 0.4, 0.1, 0.3], [0.1, 0.2, 0.3, 0.4]),
}
RANDOM = 200


@functools.cache
def problems() -> tuple[np.ndarray, np.ndarray]:
    """p [P, V] and q [P, 3, V]: 200 random ones, then the edges (each source with the same q)."""
    rng = np.random.default_rng(1)
    p = [*rng.dirichlet([0.4] * V, RANDOM), *[np.array(p, float) for p, _ in EDGES.values()]]
    q = [*rng.dirichlet([0.4] * V, (RANDOM, 3)), *[np.array([q] * 3, float) for _, q in EDGES.values()]]
    return np.stack(p), np.stack(q)


@functools.cache
def outcomes_of(law: str, counts: tuple[int, ...]):
    """All outcomes of all problems [P, 64, 3], padded so that every case has one shape; and their probabilities."""
    _, q = problems()
    parts = [node_outcomes(rows[: len(counts)], (law,) * len(counts), counts) for rows in q]
    size, width = parts[0][0].tokens.shape
    pad = ((0, 0), (0, V**3 - size), (0, 3 - width))
    tokens, valid = (np.pad(np.stack([part[field] for part, _ in parts]), pad) for field in (0, 1))
    probs = np.pad(np.stack([part.probs for part, _ in parts]), pad[:2])
    source = np.broadcast_to(np.pad(parts[0][1], (0, 3 - width)), tokens.shape)
    return Draws(tokens, source, valid), probs


@functools.cache
def compiled(name: str, laws: tuple[str, ...]):
    rule = for_laws(name, laws)
    one_problem = jax.vmap(rule, in_axes=(None, None, 0))
    return jax.jit(lambda p, q, draws: jax.lax.map(lambda each: one_problem(*each), (p, q, draws)))


@functools.cache
def summed(name: str, law: str, *counts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Laws given each outcome [P, 64, V], the emitted law [P, V] and the acceptance [P] of a rule."""
    draws, probs = outcomes_of(law, counts)
    with jax.enable_x64(True):
        laws = compiled(name, (law,) * 3 if RULES[name].takes_laws else ())(*problems(), draws)
    laws = np.asarray(laws)
    drawn = (draws.valid[..., None] & (draws.tokens[..., None] == np.arange(V))).any(2)
    accepted = np.einsum("pm,pmv->p", probs, np.where(drawn, laws, 0))
    return laws, np.einsum("pm,pmv->pv", probs, laws), accepted


@functools.cache
def bounds(law: str, *counts: int) -> np.ndarray:
    p, q = problems()
    with jax.enable_x64(True):
        one = lambda p, q: bound(p, node_outcomes(q[: len(counts)], (law,) * len(counts), counts)[0])
        return np.asarray(jax.jit(jax.vmap(one))(p, q))


def variation(laws: np.ndarray) -> np.ndarray:
    return np.abs(laws - problems()[0]).sum(1) / 2


# What is exact


def test_the_measured_table_is_what_verifiers_declare():
    cells = table()
    for name, record in {**RULES, **PATH_RULES}.items():
        measured = {key for key, cell in cells[name].items() if cell.verdict == "exact"}
        declared = set(cells[name]) if record.exact_for is None else record.exact_for
        assert measured == {key for key in declared if not key.startswith("grown ")}, name  # those are no node's law
        for key, cell in cells[name].items():
            assert cell.verdict == "refused" or cell.worst <= EXACT or cell.worst > BIASED, (name, key, cell)


def test_the_documented_table_is_the_measured_one():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "verifiers.md").read_text(encoding="utf-8")
    for part in format_table(table()).split("\n\n"):
        assert part in text, f"docs/verifiers.md needs:\n{part}"


def test_every_law_has_an_exact_rule_and_only_naive_sampling_survives_shared_noise():
    cells = table()
    for key in next(iter(cells.values())):
        assert [name for name, row in cells.items() if row[key].verdict == "exact"], key
    exact = [name for name, row in cells.items() if row["shared_gumbel"].verdict == "exact"]
    assert exact == ["naive_sampling"]


@pytest.mark.parametrize("name", RULES)
def test_exact_pairs_stay_exact_at_the_edges(name):
    """B11: p = q, one-hot laws, missing tokens, disjoint supports, repeats, draws that cover all of p."""
    for law in LAWS:
        for counts in ((1,), (2,), (3,), (1, 1)):
            if law == "shared_gumbel" or max(counts) > (LAWS[law].max_draws or 3):
                continue
            laws, emitted, _ = summed(name, law, *counts)
            assert np.isfinite(laws).all() and (laws >= 0).all()
            np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-12)
            key, exact_for = law_key([law] * len(counts)), RULES[name].exact_for
            if exact_for is None or key in exact_for:
                assert variation(emitted).max() <= EXACT, (law, counts)
                # Nothing outside the target's support, in any outcome that can happen.
                possible = outcomes_of(law, counts)[1] > 0
                outside = np.where(problems()[0][:, None] == 0, laws, 0).sum(-1)
                assert outside[possible].max() <= 1e-15


@pytest.mark.parametrize("name", RULES)
def test_a_one_hot_target_emits_its_argmax_whatever_was_drafted(name):
    """B05: temperature 0, every draft mode, every outcome that can happen."""
    target = [at for at, p in enumerate(problems()[0]) if (p > 0).sum() == 1]
    assert len(target) == 3
    for law in LAWS:
        for k in (1, 2, 3):
            if law != "shared_gumbel" and k <= (LAWS[law].max_draws or 3):
                laws, _, _ = summed(name, law, k)
                possible = outcomes_of(law, (k,))[1][target] > 0
                wanted = np.broadcast_to(problems()[0][target][:, None], laws[target].shape)
                np.testing.assert_allclose(laws[target][possible], wanted[possible], atol=1e-15)


def test_top_k_children_verified_as_if_sampled_give_the_known_wrong_law():
    """B07: children {0, 1} always, accept test divided by q."""
    p, q = jnp.array([0.4, 0.3, 0.2, 0.1]), jnp.array([[0.5, 0.25, 0.15, 0.1]])
    draws = Draws(jnp.array([0, 1]), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    np.testing.assert_allclose(multi_step(p, q, draws), [0.8, 0.2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(naive_sampling(p, q, draws), p)


def test_without_replacement_in_reversed_order_is_biased():
    p, q = problems()
    draws, probs = outcomes_of("without_replacement", (2,))
    order = np.array([1, 0, 2])
    turned = Draws(draws.tokens[..., order], draws.source, draws.valid[..., order])
    with jax.enable_x64(True):
        laws = np.asarray(compiled("without_replacement", ())(p, q, turned))
    assert variation(np.einsum("pm,pmv->pv", probs, laws)).max() > BIASED


def test_dropping_a_draw_by_its_value_is_biased():
    """A draw may be missing because of earlier ones, never because of its own token."""
    draws, probs = outcomes_of("iid", (2,))
    dropped = draws._replace(valid=draws.valid & ~((np.arange(3) == 1) & (draws.tokens == 0)))
    with jax.enable_x64(True):
        laws = np.asarray(compiled("multi_step", ())(*problems(), dropped))
    assert variation(np.einsum("pm,pmv->pv", probs, laws)).max() > BIASED


def test_merging_repeated_draws_is_biased_for_multi_step():
    """Why a tree keeps the multiplicity of its draws beside the merged nodes."""
    draws, probs = outcomes_of("iid", (2,))
    repeat = (np.arange(3) == 1) & (draws.tokens == draws.tokens[..., :1])
    with jax.enable_x64(True):
        laws = np.asarray(compiled("multi_step", ())(*problems(), draws._replace(valid=draws.valid & ~repeat)))
    assert variation(np.einsum("pm,pmv->pv", probs, laws)).max() > BIASED


# How rules are ordered


def test_the_order_of_rules_on_independent_draws():
    for k in (1, 2, 3):
        chain = ["naive_sampling", "naive_tree", "multi_step", "spectr", "optimal"]
        values = [summed(name, "iid", k)[2] for name in chain]
        for low, high, names in zip(values, values[1:], zip(chain, chain[1:], strict=False), strict=False):
            assert (low <= high + 1e-12).all(), (k, names)
            if k > 1:
                assert (low < high - 1e-3).any(), (k, names, "never apart")


def test_one_draw_is_speculative_sampling_for_every_rule():
    p, q = problems()
    overlap = np.minimum(p, q[:, 0]).sum(1)
    for name in RULES:
        for law in ("iid", "without_replacement", "top_k_plus_one", "hub"):
            if name != "naive_sampling":
                np.testing.assert_allclose(summed(name, law, 1)[2], overlap, atol=1e-12, err_msg=f"{name} {law}")
                assert variation(summed(name, law, 1)[1]).max() <= EXACT, (name, law)  # so it takes any of these laws
    np.testing.assert_allclose(summed("naive_sampling", "iid", 1)[2], (p * q[:, 0]).sum(1), atol=1e-12)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "shared_gumbel"])
def test_no_exact_rule_accepts_more_than_its_laws_bound_and_the_optimum_reaches_it(law):
    for counts in ((1,), (2,), (3,), (2, 1)):
        if max(counts) > (LAWS[law].max_draws or 3):
            continue
        most, key = bounds(law, *counts), law_key([law] * len(counts))
        np.testing.assert_allclose(summed("optimal", law, *counts)[2], most, atol=1e-12)
        for name, record in RULES.items():
            if record.exact_for is None or key in record.exact_for:
                assert (summed(name, law, *counts)[2] <= most + 1e-12).all(), (name, counts)


def test_rules_that_reach_their_optimum():
    for k in (1, 2, 3):
        np.testing.assert_allclose(
            summed("top_k_plus_one", "top_k_plus_one", k)[2], bounds("top_k_plus_one", k), atol=1e-12
        )
    np.testing.assert_allclose(summed("hub", "hub", 2)[2], bounds("top_k_plus_one", 2), atol=1e-12)


def test_draws_without_replacement_are_worth_at_least_independent_ones():
    for k in (2, 3):
        assert (bounds("without_replacement", k) >= bounds("iid", k) - 1e-12).all()
        sequential = summed("without_replacement", "without_replacement", k)[2]
        assert (sequential >= summed("multi_step", "iid", k)[2] - 1e-12).all()


def test_shared_noise_raises_the_acceptance_of_naive_sampling():
    p, q = (field[:RANDOM] for field in problems())
    q = q[:, 0]
    with jax.enable_x64(True):
        values = [np.asarray(jax.vmap(functools.partial(shared_noise_acceptance, count=k))(p, q)) for k in (1, 2, 3, 4)]
    ratios = np.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])  # [P, x, y]: y against x
    np.testing.assert_allclose(values[0], (1 / ratios.sum(2)).sum(1), atol=1e-12)
    for k in (1, 2, 3):
        assert (values[k - 1] >= summed("naive_sampling", "without_replacement", k)[2][:RANDOM] - 1e-12).all()
        assert (values[k - 1] <= bounds("without_replacement", k)[:RANDOM] + 1e-12).all()
    np.testing.assert_allclose(values[3], 1, atol=1e-12)


# How rules are called


@pytest.mark.parametrize("name", RULES)
def test_invalid_draws_change_nothing_wherever_they_stand(name):
    rng = np.random.default_rng(2)
    p, q = jnp.asarray(rng.dirichlet([0.4] * V), jnp.float32), jnp.asarray(rng.dirichlet([0.4] * V, 1), jnp.float32)
    rule = jax.jit(for_laws(name, ("without_replacement",)))
    for tokens in ([2, 0], [1], []):
        tight = Draws(jnp.array(tokens, jnp.int32), jnp.zeros(len(tokens), jnp.int32), jnp.ones(len(tokens), bool))
        spaced = np.full(5, 3)
        valid = np.zeros(5, bool)
        places = [1, 3][: len(tokens)]
        spaced[places], valid[places] = tokens, True
        padded = Draws(jnp.asarray(spaced, jnp.int32), jnp.zeros(5, jnp.int32), jnp.asarray(valid))
        np.testing.assert_allclose(rule(p, q, padded), rule(p, q, tight), atol=2e-6)
        if not tokens:
            np.testing.assert_allclose(rule(p, q, padded), p, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "law"), [("multi_step", "iid"), ("spectr", "iid"), ("without_replacement", "without_replacement")]
)
def test_gradients_in_float32_are_finite_at_the_edges(name, law):
    """Masses of 1e-30, whose squares are 0 in float32, among them."""
    acceptance = lambda p, q: expected_acceptance(name, p, q, num_draws=2, law=law)
    p, q = (jnp.asarray(side, jnp.float32) for side in zip(*EDGES.values(), strict=True))
    gradients = jax.jit(jax.vmap(jax.grad(acceptance, (0, 1))))(p, q)
    assert np.isfinite(np.stack(gradients)).all()


@pytest.mark.parametrize("name", [name for name in RULES if name != "optimal"])
def test_float32_stays_float32_and_sums_to_one_over_a_large_vocabulary(name):
    vocab_size, k = 32_000, 2
    logits = jax.random.normal(jax.random.key(0), (2, vocab_size)) * 3
    p, q = jax.nn.softmax(logits[0]), jax.nn.softmax(logits[0] + 0.5 * logits[1])[None]
    rule = jax.jit(RULES[name].rule)
    for tokens in ([11, 5000], [int(jnp.argmax(q)), 31_999]):
        draws = Draws(jnp.array(tokens, jnp.int32), jnp.zeros(k, jnp.int32), jnp.ones(k, bool))
        emitted = rule(p, q, draws)
        assert emitted.dtype == jnp.float32
        assert (emitted >= 0).all() and abs(emitted.sum() - 1) < 1e-5


def test_masked_logits_are_tokens_of_probability_zero():
    """B11: -inf logits, under jit and, one by one in the rules that loop, not."""
    logits = jnp.array([1.0, -jnp.inf, 0.5, -jnp.inf])
    p, q = jax.nn.softmax(logits), jax.nn.softmax(logits[::-1])[None]
    draws = Draws(jnp.array([1, 3]), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    for record in RULES.values():
        rule = for_laws(record.name, ("iid",))
        np.testing.assert_allclose(jax.jit(rule)(p, q, draws), p, atol=1e-6, err_msg=record.name)
        if record.name in ("multi_step", "spectr"):
            np.testing.assert_allclose(rule(p, q, draws), p, atol=1e-6)


def test_the_optimum_refuses_what_it_cannot_sum():
    p, q = jnp.full(100, 0.01), jnp.full((1, 100), 0.01)
    draws = Draws(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"optimal cannot be solved: .*at most 62 tokens; this one has 100"):
        RULES["optimal"].rule(p, q, draws, laws=("iid",))
    with pytest.raises(ValueError, match=r"optimal cannot be solved: .*3 draws at a node from 62 tokens have 62\^3"):
        RULES["optimal"].rule(p[:62], q[:, :62], draws, laws=("iid",))
    with pytest.raises(ValueError, match="depend on the emission's noise"):
        RULES["optimal"].rule(p[:4] * 25, q[:, :4] * 25, draws, laws=("shared_gumbel",))
    with pytest.raises(ValueError, match="one law for each of 1 sources"):
        RULES["optimal"].rule(p[:4] * 25, q[:, :4] * 25, draws, laws=("iid", "iid"))


def test_rules_by_hand():
    """Two draws, worked out on paper: p = (1/2, 1/2), q = (3/4, 1/4), draws 0 then 1."""
    p, q = jnp.array([0.5, 0.5]), jnp.array([[0.75, 0.25]])
    draws = Draws(jnp.array([0, 1]), jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    # Token 0 is accepted with 2/3; what is left of p is all on token 1, which the second draw hits for certain.
    np.testing.assert_allclose(multi_step(p, q, draws), [2 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(without_replacement(p, q, draws), [2 / 3, 1 / 3], atol=1e-6)
    repeated = draws._replace(tokens=jnp.array([0, 0]))
    np.testing.assert_allclose(multi_step(p, q, repeated), [2 / 3, 1 / 3], atol=1e-6)
