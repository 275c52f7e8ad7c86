"""The walk down a tree against a walk in plain Python, with rules that dictate where it goes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.laws import gumbel_noise
from specjax.sampling import stack_warps
from specjax.testing import random_parents
from specjax.verify import VERIFIERS, check_laws
from specjax.verify.rules import multi_step, naive_sampling, without_replacement
from specjax.verify.traverse import traverse
from tests.helpers import round_keys

BATCH, NODES, DRAWS, ROWS, VOCAB, DEPTH = 8, 12, 3, 5, 4, 6


def draft_law(p, q, draws):
    """Emit from the last source's q: shows which row of q a node was given."""
    del p, draws
    return q[-1]


def second_draw(p, q, draws):
    """Emit the second draw if it is valid, else the target's token."""
    del q
    return jnp.where(draws.valid[1], jax.nn.one_hot(draws.tokens[1], p.shape[0]), p)


def random_trees(seed: int) -> tuple[sj.TokenTree, np.ndarray]:
    """Trees of any kind: siblings may repeat a token, invalid slots hold anything."""
    rng = np.random.default_rng(seed)
    parents = np.stack([random_parents(rng, NODES) for _ in range(BATCH)])
    depths = np.zeros((BATCH, NODES), int)
    valid = rng.random((BATCH, NODES)) < 0.8
    valid[:, 0] = True
    for row in range(BATCH):
        for slot in range(1, NODES):
            if depths[row, parents[row, slot]] == DEPTH:
                parents[row, slot] = 0
            depths[row, slot] = depths[row, parents[row, slot]] + 1
            valid[row, slot] &= valid[row, parents[row, slot]]
    tree = sj.TokenTree(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (BATCH, NODES))),
        parents=jnp.asarray(parents),
        depths=jnp.asarray(depths),
        valid=jnp.asarray(valid),
        draw_tokens=jnp.asarray(rng.integers(0, VOCAB, (BATCH, NODES, DRAWS))),
        draw_valid=jnp.asarray(rng.random((BATCH, NODES, DRAWS)) < 0.7),
        draw_source=jnp.asarray(np.tile([0, 0, 1], (BATCH, 1))),
        q=jnp.asarray(rng.dirichlet(np.ones(VOCAB), (BATCH, ROWS)), jnp.float32),
        q_rows=jnp.asarray(rng.integers(0, ROWS, (BATCH, NODES, 2))),
        laws=("iid", "iid"),
        max_depth=DEPTH,
    )
    return tree, rng.normal(size=(BATCH, NODES, VOCAB)).astype(np.float32)


@functools.cache
def noise_of(seed: int, position: int) -> np.ndarray:
    """The EMIT noise of a request at a position."""
    emit = jax.random.fold_in(jax.random.key(seed), 2)
    return np.asarray(gumbel_noise(jax.random.fold_in(emit, position), VOCAB))


def walk_by_hand(law_at, seed: int, position: int, tree: sj.TokenTree, row: int) -> tuple[list[int], list[int]]:
    """Slots of the path and the emitted tokens."""
    node, path, tokens = 0, [0], []
    while True:
        law = law_at(row, node)
        with np.errstate(divide="ignore"):
            token = int(np.argmax(np.log(law) + noise_of(seed, position + len(tokens))))
        tokens.append(token)
        children = [
            slot
            for slot in range(1, NODES)
            if tree.valid[row, slot] and tree.parents[row, slot] == node and tree.tokens[row, slot] == token
        ]
        if not children:
            return path, tokens
        node = children[0]
        path.append(node)


@pytest.mark.parametrize("rule", [naive_sampling, draft_law, second_draw])
def test_the_walk_equals_a_walk_in_python(rule):
    """The rule gets the node's own p, q and draws; any child that carries the token counts, residual hits included."""
    verify = jitted(rule)
    warp = stack_warps([sj.Warp(0.5 + 0.25 * row) for row in range(BATCH)])
    longest = 0
    for seed in range(6):
        tree, logits = random_trees(seed)
        keys = round_keys(range(seed, seed + BATCH), np.arange(BATCH) * 3 + 1)
        acceptance = jax.device_get(verify(keys, tree, jnp.asarray(logits), warp))
        tree = jax.device_get(tree)

        def law_at(row, node, logits=logits, tree=tree):
            weights = np.exp(logits[row, node] / (0.5 + 0.25 * row))
            p = weights / weights.sum()
            if rule is draft_law:
                return np.asarray(tree.q[row, tree.q_rows[row, node, 1]])
            if rule is second_draw and tree.draw_valid[row, node, 1]:
                return np.eye(VOCAB)[tree.draw_tokens[row, node, 1]]
            return p

        for row in range(BATCH):
            path, tokens = walk_by_hand(law_at, seed + row, row * 3 + 1, tree, row)
            count = len(path) - 1
            assert int(acceptance.num_accepted[row]) == count
            assert acceptance.path[row, : count + 1].tolist() == path
            assert acceptance.tokens[row].tolist() == tokens + [0] * (DEPTH - count)
            assert int(acceptance.next_token[row]) == tokens[-1]
            longest = max(longest, count)
    assert longest >= 2


def test_rows_of_temperature_zero_walk_along_the_argmax():
    """B05, B06, B09: alone or among sampled rows, ties to the lowest id, whatever rule exact for the draws is used."""
    tree, logits = jax.device_get(random_trees(0))
    logits = np.round(logits)  # ties
    for temperatures in (np.zeros(BATCH), np.arange(BATCH) % 2):
        warp = stack_warps([sj.Warp(float(temperature)) for temperature in temperatures])
        verify = jitted(naive_sampling)
        acceptance = jax.device_get(verify(round_keys(range(BATCH), range(BATCH)), tree, logits, warp))
        for row in np.flatnonzero(temperatures == 0):
            law_at = lambda row, node: np.eye(VOCAB)[np.argmax(logits[row, node])]
            path, tokens = walk_by_hand(law_at, row, row, tree, row)
            assert acceptance.tokens[row, : len(tokens)].tolist() == tokens
            assert acceptance.path[row, : len(path)].tolist() == path


def one_node(p, q, draws) -> tuple[sj.TokenTree, jax.Array]:
    """A batch of one: a root whose valid draws are its children, padded to three draws and VOCAB tokens."""
    drawn = np.arange(DRAWS) < len(draws)
    draws = np.append(draws, np.zeros(DRAWS - len(draws), int))
    pad = lambda law: np.append(law, np.zeros(VOCAB - len(law)))
    tree = sj.TokenTree(
        tokens=jnp.asarray([[0, *draws]]),
        parents=jnp.asarray([[-1, *[0] * DRAWS]]),
        depths=jnp.asarray([[0, *[1] * DRAWS]]),
        valid=jnp.asarray([[True, *drawn]]),
        draw_tokens=jnp.asarray([[draws] * (DRAWS + 1)]),
        draw_valid=jnp.asarray([[drawn, *[[False] * DRAWS] * DRAWS]]),
        draw_source=jnp.zeros((1, DRAWS), int),
        q=jnp.asarray(pad(q), jnp.float32)[None, None],
        q_rows=jnp.asarray([[[0], *[[-1]] * DRAWS]]),
        laws=("iid",),
        max_depth=1,
    )
    with np.errstate(divide="ignore"):
        return tree, jnp.asarray(np.log(np.tile(pad(p), (1, DRAWS + 1, 1))), jnp.float32)


@functools.cache
def jitted(rule):
    return jax.jit(traverse(rule))


@pytest.mark.parametrize("rule", [naive_sampling, multi_step, without_replacement])
@pytest.mark.parametrize(
    ("p", "q", "draws"),
    [
        ([1, 0, 0], [1, 0, 0], [0]),
        ([1, 0, 0], [0, 0.5, 0.5], [1, 2]),
        ([0.25] * 4, [0.25] * 4, [3, 3]),
        ([0.25] * 4, [0.25] * 4, [0, 1, 2]),
        ([0.5, 0.5], [0.9, 0.1], [0, 1]),
        ([0.6, 0.4, 0, 0], [0.5, 0.5, 0, 0], [1, 0]),
        ([0.6, 0.4, 0, 0], [0, 0, 0.5, 0.5], [2, 3]),
    ],
)
def test_empty_residuals_give_a_valid_token(rule, p, q, draws):
    """B11: p = q, one-hot p, V = 2, logits of -inf, children that cover all of p; jit or not, T=1e-6 too."""
    tree, logits = one_node(p, q, draws)
    for temperature in (1.0, 1e-6):
        warp = stack_warps([sj.Warp(temperature)])
        with jax.debug_nans(True):
            for seed in range(5):
                acceptance = jitted(rule)(round_keys([seed], [3]), tree, logits, warp)
                token = int(acceptance.tokens[0, 0])
                assert p[token] > 0
                assert int(acceptance.num_accepted[0]) == (token in draws)
    if draws == [0, 1]:
        with jax.disable_jit():
            eager = traverse(rule)(round_keys([4], [3]), tree, logits, warp)
        np.testing.assert_array_equal(eager.tokens, acceptance.tokens)


def test_at_one_draw_a_node_laws_that_draw_alike_are_one():
    for law in ("hub", "top_k_plus_one", "without_replacement"):
        check_laws(VERIFIERS["multi_step"], (law,), max_draws=1, vocab_size=9)
    with pytest.raises(ValueError, match="would bias"):
        check_laws(VERIFIERS["multi_step"], ("deterministic",), max_draws=1, vocab_size=9)


@pytest.mark.parametrize(
    ("verifier", "laws", "exact"),
    [
        ("naive_sampling", ("deterministic",), True),
        ("naive_sampling", ("deterministic", "iid"), True),
        ("multi_step", ("iid",), True),
        ("multi_step", ("iid", "iid"), True),
        ("multi_step", ("deterministic",), False),
        ("multi_step", ("deterministic", "deterministic"), False),
        ("multi_step", ("without_replacement",), False),
        ("multi_step", ("iid", "deterministic"), False),
        ("without_replacement", ("without_replacement",), True),
        ("without_replacement", ("deterministic",), False),
        ("spectr", ("iid", "iid"), False),
        ("multi_step", (), True),
    ],
)
def test_biased_pairs_are_refused_with_an_exact_one_named(verifier, laws, exact):
    if exact:
        check_laws(VERIFIERS[verifier], laws)
    else:
        with pytest.raises(ValueError, match="would bias .*naive_sampling"):
            check_laws(VERIFIERS[verifier], laws)
