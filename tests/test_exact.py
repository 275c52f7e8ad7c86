"""Expectations without sampling: the public functions, their gradients, and that they sum what really runs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import exact
from specjax.sampling import Warp, stack_warps
from specjax.types import Draws, RoundKeys
from specjax.verify.joint import enumerate_trees, node_logits, target_law, walk_law
from specjax.verify.rules import RULES, naive_sampling
from specjax.verify.traverse import traverse

RNG = np.random.default_rng(0)
P, Q, Q2 = RNG.dirichlet([0.4] * 4, 3)
LARGE = np.full((2, 5000), 1 / 5000)
DEEP = ([np.full((3,) * level, 1 / 3) for level in (1, 2, 3, 4)],) * 2


def random_table(rng: np.random.Generator, levels: int, vocab_size: int = 3) -> list[np.ndarray]:
    return [rng.dirichlet([0.4] * vocab_size, (vocab_size,) * level) for level in range(levels)]


def test_laws_come_in_float64_whatever_the_setting():
    assert not jax.config.jax_enable_x64
    law = exact.emitted_law("multi_step", P, Q, num_draws=2, law="iid")
    assert isinstance(law, np.ndarray) and law.dtype == np.float64
    np.testing.assert_allclose(law, P, atol=1e-15)
    assert exact.expected_acceptance("multi_step", P, Q, num_draws=2, law="iid").dtype == np.float64
    assert not jax.config.jax_enable_x64


def test_rules_go_by_name_or_by_value_and_sources_one_by_one():
    by_name = exact.emitted_law("spectr", P, Q, num_draws=2, law="iid")
    np.testing.assert_array_equal(by_name, exact.emitted_law(RULES["spectr"].rule, P, Q, num_draws=2, law="iid"))
    stop_word = lambda p, q, draws: jnp.zeros_like(p).at[0].set(1)
    np.testing.assert_array_equal(exact.emitted_law(stop_word, P, Q, num_draws=1, law="iid"), [1, 0, 0, 0])

    both = np.stack([Q, Q2])
    arguments = {"num_draws": (2, 1), "law": ("without_replacement", "iid")}
    np.testing.assert_allclose(exact.emitted_law("without_replacement", P, both, **arguments), P, atol=1e-15)
    most = exact.optimal_acceptance(P, both, **arguments)
    assert exact.expected_acceptance("without_replacement", P, both, **arguments) <= most
    np.testing.assert_allclose(exact.expected_acceptance("optimal", P, both, **arguments), most, atol=1e-12)
    # A source that draws nothing is no source.
    alone = exact.expected_acceptance("multi_step", P, Q, num_draws=2, law="iid")
    np.testing.assert_allclose(exact.expected_acceptance("multi_step", P, both, num_draws=(2, 0), law="iid"), alone)


def test_the_optimum_by_prefixes_is_the_optimum_by_all_sets():
    """Several sources of one and the same q are one source, but take the slow way."""
    for k in (1, 2, 3):
        fast = exact.optimal_acceptance(P, Q, num_draws=k, law="iid")
        slow = exact.optimal_acceptance(P, np.stack([Q] * k), num_draws=1, law="iid")
        np.testing.assert_allclose(fast, slow, atol=1e-14)
    large = np.random.default_rng(1).dirichlet([0.2] * 5000, 2)
    values = [exact.optimal_acceptance(*large, num_draws=k, law="iid") for k in (1, 2, 8)]
    np.testing.assert_allclose(values[0], np.minimum(*large).sum(), atol=1e-12)
    assert values[0] < values[1] < values[2] < 1


def test_draws_are_counted_by_numpy_too():
    laws = [exact.emitted_law("multi_step", P, Q, num_draws=count, law="iid") for count in (2, np.int64(2))]
    np.testing.assert_array_equal(*laws)
    both = {"num_draws": np.array([2, 0]), "law": ["iid", "iid"]}
    np.testing.assert_allclose(exact.emitted_law("multi_step", P, np.stack([Q, Q2]), **both), P, atol=1e-15)


def test_shared_noise_goes_through_the_small_sets_only():
    """All 2^V sets of 40 tokens are too many; what is left of p and q beyond four tokens changes nothing."""
    p, q = (np.pad(law, (0, 36)) for law in (P, Q))
    arguments = {"num_draws": 2, "law": "shared_gumbel"}
    few = exact.expected_acceptance("naive_sampling", P, Q, **arguments)
    assert exact.expected_acceptance("naive_sampling", p, q, **arguments) == pytest.approx(few, abs=1e-12)


def test_shared_noise_is_summed_or_refused():
    one = exact.emitted_law("naive_sampling", P, Q, num_draws=1, law="shared_gumbel")
    np.testing.assert_allclose(one, P, atol=1e-15)
    ratios = np.maximum(P[None] / P[:, None], Q[None] / Q[:, None])
    got = exact.expected_acceptance("naive_sampling", P, Q, num_draws=1, law="shared_gumbel")
    np.testing.assert_allclose(got, (1 / ratios.sum(1)).sum(), atol=1e-14)
    biased = exact.emitted_law("multi_step", P, Q, num_draws=1, law="shared_gumbel")
    assert abs(biased.sum() - 1) < 1e-12 and np.abs(biased - P).sum() / 2 > 1e-3
    # The same by sampling, noise and all.
    noise = np.random.default_rng(2).gumbel(size=(100_000, 4))
    drafted, own = np.argsort(-(np.log(Q) + noise)), np.argmax(np.log(P) + noise, 1)
    for k in (1, 2, 3):
        value = exact.expected_acceptance("naive_sampling", P, Q, num_draws=k, law="shared_gumbel")
        assert abs((drafted[:, :k] == own[:, None]).any(1).mean() - value) < 0.008
    given = [np.asarray(RULES["multi_step"].rule(jnp.asarray(P), jnp.asarray(Q)[None], _draw(x))) for x in range(4)]
    emitted = np.argmax(np.log(np.stack(given).astype(float)[drafted[:, 0]] + 1e-300) + noise, 1)
    np.testing.assert_allclose(np.bincount(emitted, minlength=4) / len(emitted), biased, atol=0.008)
    with pytest.raises(ValueError, match="not independent of the emission"):
        exact.emitted_law("multi_step", P, Q, num_draws=2, law="shared_gumbel")


def _draw(token: int):
    return Draws(jnp.array([token]), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))


GRADIENTS = [
    ("naive_sampling", "iid", 2),
    ("naive_sampling", "shared_gumbel", 2),
    ("naive_tree", "iid", 2),
    ("multi_step", "iid", 3),
    ("without_replacement", "without_replacement", 2),
    ("spectr", "iid", 3),
    ("khisti", "iid", 2),
    ("top_k_plus_one", "top_k_plus_one", 2),
    ("hub", "hub", 2),
    (None, "iid", 3),
    (None, "without_replacement", 2),
]


@pytest.mark.parametrize(("rule", "law", "k"), GRADIENTS)
def test_gradients_match_finite_differences(rule, law, k):
    """By the logits of p and of q; None is the bound. For spectr the derivative of the root is part of it."""

    def acceptance(logits):
        p, q = jax.nn.softmax(logits[0]), jax.nn.softmax(logits[1])
        if rule is None:
            return exact.optimal_acceptance(p, q, num_draws=k, law=law)
        return exact.expected_acceptance(rule, p, q, num_draws=k, law=law)

    logits, step = np.log(np.stack([P, Q])), 1e-6
    with jax.enable_x64(True):
        gradient = np.asarray(jax.grad(acceptance)(jnp.asarray(logits)))
        shift = lambda direction: acceptance(logits + step * direction) - acceptance(logits - step * direction)
        differences = [float(shift(direction)) / (2 * step) for direction in np.eye(8).reshape(8, 2, 4)]
    np.testing.assert_allclose(gradient.ravel(), differences, atol=1e-8)
    assert np.abs(gradient).max() > 0.01


def test_the_optimum_refuses_to_be_differentiated():
    """Solved on the host, it would have a gradient of zero."""
    acceptance = functools.partial(exact.expected_acceptance, "optimal", num_draws=1, law="iid")
    for place in (0, 1):
        with pytest.raises(ValueError, match="no derivative; specjax.exact.optimal_acceptance"):
            jax.grad(acceptance, place)(jnp.asarray(P), jnp.asarray(Q))


def test_gradients_are_finite_where_draft_and_target_agree():
    for rule in ("multi_step", "spectr", "khisti"):
        acceptance = functools.partial(exact.expected_acceptance, rule, num_draws=2, law="iid")
        p = jnp.asarray(P, jnp.float32)
        assert jnp.isfinite(jnp.stack(jax.grad(acceptance, argnums=(0, 1))(p, p))).all()


@pytest.mark.parametrize("merge", [False, True])
def test_the_walk_that_runs_ends_where_its_law_says(merge):
    """The real while loop, fed with a target that leaves it no choice, against the reach computed from the law."""
    rng = np.random.default_rng(3)
    draft = [table[None] for table in random_table(rng, 2)]
    forest = enumerate_trees([draft], ("iid",), [[2], [2]], merge=merge)
    trees, texts = forest.trees, list(itertools.product(range(3), repeat=3))
    pick = np.arange(0, len(forest.probs), 5)
    trees = jax.tree.map(lambda field: np.repeat(field[pick], len(texts), 0), trees)
    wanted = np.tile(np.array(texts), (len(pick), 1))  # the token emitted at each depth
    logits = np.where(np.arange(3) == np.take_along_axis(wanted, trees.depths, 1)[..., None], 0.0, -np.inf)
    count = len(wanted)
    draft, path, emit = (jax.random.split(jax.random.key(seed), count) for seed in range(3))
    keys = RoundKeys(draft, path, emit, jnp.zeros(count, jnp.int32))
    warp = Warp(jnp.ones(count), jnp.zeros(count, jnp.int32), jnp.ones(count))
    result = jax.jit(traverse(naive_sampling))(keys, trees, logits, warp)
    law = np.asarray(jax.jit(lambda *a: walk_law(naive_sampling, *a))(trees, logits))  # [T, N, V], one entry is 1
    reach = jax.jit(functools.partial(exact.reach, "naive_sampling"))(trees, logits, warp)  # 1 at the path's nodes
    np.testing.assert_allclose(reach.sum(1), result.num_accepted + 1, atol=1e-5)
    place, token = np.divmod(law.reshape(count, -1).argmax(1), 3)
    np.testing.assert_allclose(law.max((1, 2)), 1, atol=1e-6)
    np.testing.assert_allclose(law.sum((1, 2)), 1, atol=1e-6)
    accepted = np.asarray(result.num_accepted)
    np.testing.assert_array_equal(np.asarray(result.path)[np.arange(count), accepted], place)
    np.testing.assert_array_equal(result.next_token, token)
    assert set(accepted) == {0, 1, 2}


@pytest.mark.parametrize("verifier", ["multi_step", "traversal", "multi_path_block", "optimal"])
def test_the_expected_tokens_of_a_tree_average_to_the_block_efficiency(verifier):
    """What needs the tree alone, in any vocabulary, is what sums every outcome."""
    rng = np.random.default_rng(7)
    target, draft = random_table(rng, 3), random_table(rng, 2)
    arguments = {"num_draws": (2, 1), "law": "iid"}
    want = exact.block_efficiency(verifier, target, draft, **arguments)
    forest = enumerate_trees([[table[None] for table in draft]], ("iid",), [[2], [1]])
    warp = stack_warps([Warp(1.0)] * len(forest.probs))
    logits = node_logits(forest, [table[None] for table in target])
    with jax.enable_x64(True):
        reach = np.asarray(jax.jit(functools.partial(exact.reach, verifier))(forest.trees, logits, warp))
    np.testing.assert_allclose(reach[:, 0], 1, atol=1e-12)
    np.testing.assert_allclose(forest.probs @ reach.sum(1), want, atol=1e-12)


@pytest.mark.parametrize("merge", [False, True])
def test_joint_laws_of_node_rules(merge):
    """Rules that are exact at a node are exact over trees, and the others are not."""
    rng = np.random.default_rng(4)
    target, draft = random_table(rng, 3), random_table(rng, 2)
    want = target_law(target)
    efficiency = {}
    for rule in ("naive_sampling", "naive_tree", "multi_step", "spectr", "optimal", "top_k_plus_one"):
        arguments = {"num_draws": (2, 1), "law": "iid", "merge": merge}
        law = exact.joint_law(rule, target, draft, **arguments)
        variation = np.abs(law - want).sum() / 2
        assert variation > 1e-3 if rule == "top_k_plus_one" else variation <= 1e-12, rule
        efficiency[rule] = exact.block_efficiency(rule, target, draft, **arguments)
    order = [efficiency[name] for name in ("naive_sampling", "naive_tree", "multi_step", "spectr", "optimal")]
    assert order == sorted(order)
    assert all(1 <= value <= 3 for value in order)


def test_block_efficiency_is_the_sum_of_accepted_prefixes():
    """On a chain, token by token: 1 + sum over prefixes of the product of overlaps along them."""
    rng = np.random.default_rng(5)
    target, draft = random_table(rng, 3), random_table(rng, 2)
    first = np.minimum(target[0], draft[0])
    want = 1 + first.sum() + (first[:, None] * np.minimum(target[1], draft[1])).sum()
    got = exact.block_efficiency("multi_step", target, draft, num_draws=(1, 1), law="iid")
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_no_verifier_exceeds_the_prefix_bound_and_block_exceeds_composed_optima():
    exceeded = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        target, draft = random_table(rng, 3), random_table(rng, 2)
        chain = {"num_draws": (1, 1), "law": "iid"}
        most = exact.block_efficiency_bound(target, draft, **chain)
        as_block = exact.block_efficiency("block", target, draft, **chain)
        composed = exact.block_efficiency("optimal", target, draft, **chain)
        assert max(as_block, composed) <= most + 1e-12
        exceeded += as_block > composed + 1e-3
        tree = {"num_draws": (2, 1), "law": "iid"}
        most = exact.block_efficiency_bound(target, draft, **tree)
        for verifier in ("optimal", "traversal", "multi_path_block"):
            assert exact.block_efficiency(verifier, target, draft, **tree) <= most + 1e-12
    assert exceeded


def test_several_sources_over_trees():
    rng = np.random.default_rng(6)
    target, drafts = random_table(rng, 3), [random_table(rng, 2), random_table(rng, 2)]
    arguments = {"num_draws": [(1, 1), (1, 0)], "law": ("iid", "without_replacement"), "merge": True}
    for verifier in ("without_replacement", "traversal", "optimal"):
        law = exact.joint_law(verifier, target, drafts, **arguments)
        np.testing.assert_allclose(law, target_law(target), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exact.emitted_law("mss", P, Q, num_draws=1, law="iid"), "unknown node rule 'mss'; expected one of"),
        (lambda: exact.emitted_law("hub", P, Q, num_draws=1, law="top_k"), "unknown proposal law 'top_k'"),
        (
            lambda: exact.emitted_law("hub", P, Q, num_draws=3, law="hub"),
            "hub expected 0 to 2 draws from 4 tokens; got 3",
        ),
        (lambda: exact.emitted_law(3, P, Q, num_draws=1, law="iid"), "expected the name of a node rule, .* got 3"),
        (lambda: exact.emitted_law("hub", "abc", Q, num_draws=1, law="hub"), "over one vocabulary"),
        (lambda: exact.emitted_law("hub", P, np.zeros((0, 4)), num_draws=1, law="hub"), r"got shape \(0, 4\)"),
        (lambda: exact.emitted_law("multi_step", P, Q, num_draws=1, law=None), "unknown proposal law None"),
        (lambda: exact.emitted_law("multi_step", P, Q, num_draws=2.0, law="iid"), "expected whole numbers of draws"),
        (lambda: exact.emitted_law("spectr", P, Q, num_draws=-1, law="iid"), "iid expected 0 to any number of draws"),
        *[
            (lambda law=law: exact.expected_acceptance("naive_sampling", P, Q, num_draws=5, law=law), "0 to 4 draws")
            for law in ("deterministic", "without_replacement", "top_k_plus_one", "shared_gumbel")
        ],
        (lambda: exact.optimal_acceptance(*LARGE, num_draws=1, law="top_k_plus_one"), "all sets of 5000 are about 10"),
        (lambda: exact.block_efficiency_bound(*DEEP, num_draws=(1, 1, 1), law="iid"), "all sets of 27 are about 10"),
        (lambda: exact.block_efficiency("block", *DEEP, num_draws=(), law="iid"), "expected num_draws with an entry"),
        (lambda: exact.joint_law("block", [P], [], num_draws=(1,), law="iid"), "expected drafts with an entry"),
        (lambda: exact.joint_law("block", [0.5], [Q], num_draws=(1,), law="iid"), "tabular target of 2 arrays"),
        (lambda: sj.verify.table(0), "at least one problem"),
        (lambda: exact.emitted_law("hub", P, Q[:3], num_draws=1, law="hub"), "over one vocabulary"),
        (lambda: exact.emitted_law("hub", P, Q, num_draws=(1, 1), law="hub"), "one num_draws, or one for each of 1"),
        (lambda: exact.emitted_law("hub", [P], [[Q]], num_draws=1, law="hub"), r"expected q \[V\], or \[S, V\]"),
        (lambda: exact.emitted_law("spectr", P, Q, num_draws=12, law="iid"), "take fewer draws"),
        (lambda: exact.emitted_law("spectr", np.log(P), Q, num_draws=1, law="iid"), "p must hold probabilities"),
        (lambda: exact.optimal_acceptance(P, 2 * Q, num_draws=1, law="iid"), "q must hold probabilities .*sum 2"),
        (lambda: exact.joint_law("block", [P, [P] * 4], [Q * np.nan], num_draws=(1,), law="iid"), "draft must hold"),
        (lambda: exact.reach("mss", None, None, None), "unknown verifier 'mss'; expected one of naive_sampling"),
        (lambda: exact.joint_law("mss", [P], [Q], num_draws=(1,), law="iid"), "unknown verifier 'mss'"),
        (lambda: exact.joint_law("block", [P], [Q], num_draws=(1,), law="iid"), "tabular target of 2 arrays"),
        (lambda: exact.joint_law("block", [P], [Q], num_draws=(1,), law="shared_gumbel"), "tabular target of 2 arrays"),
    ],
)
def test_bad_questions_get_clear_answers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_draws_nothing_can_be_accepted():
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    for law in ("iid", "without_replacement"):
        assert exact.optimal_acceptance(p, q, num_draws=0, law=law) == pytest.approx(0, abs=1e-12)


def test_levels_without_draws_are_no_levels():
    target, draft = random_table(RNG, 3, 2), random_table(RNG, 2, 2)
    accepted = exact.expected_acceptance("multi_step", target[0], draft[0], num_draws=2, law="iid")
    for num_draws, tokens in (((2, 0), 1 + accepted), ((0,), 1)):
        got = exact.block_efficiency("multi_step", target, draft, num_draws=num_draws, law="iid")
        assert got == pytest.approx(tokens, abs=1e-12)
