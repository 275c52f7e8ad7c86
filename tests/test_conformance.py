"""The proofs for contributed parts accept what is right and catch what is broken on purpose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.draft import NO_DRAFT, ensemble, first_of, ssm
from specjax.laws import LAWS
from specjax.testing import check_drafter, check_verifier
from specjax.types import Drafter
from tests.helpers import VOCAB, context, tight_topology

TREE = tight_topology((2, 1))
TABLE = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(VOCAB), 64), jnp.float32)


# A drafter as a third party would write it: what comes next depends on the sum of all tokens. Two draws at the root,
# one behind each.
def start(params, tokens, lengths, *rest):
    return jnp.sum(jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, 0), axis=1)


def propose(law, params, keys, state, roots, warp):
    batch = roots.shape[0]
    noise = jax.vmap(lambda key: jax.random.split(key, 3))(keys.draft)
    sample = jax.vmap(LAWS[law].sample, in_axes=(0, 0, None))
    q = params[state % 64]
    first, known = sample(noise[:, 0], q, 2)
    below = params[(state[:, None] + first) % 64]
    next_tokens, next_known = zip(*(sample(noise[:, 1 + child], below[:, child], 1) for child in range(2)))
    token, exists = jnp.concatenate(next_tokens, 1), jnp.concatenate(next_known, 1) & known
    spread = lambda values: jnp.broadcast_to(jnp.asarray(values, jnp.int32), (batch, *np.shape(values)))
    tree = sj.TokenTree(
        tokens=jnp.stack([roots, first[:, 0], token[:, 0], first[:, 1], token[:, 1]], 1),
        parents=spread([-1, 0, 1, 0, 3]),
        depths=spread([0, 1, 2, 1, 2]),
        valid=jnp.stack([roots >= 0, known[:, 0], exists[:, 0], known[:, 1], exists[:, 1]], 1),
        draw_tokens=jnp.zeros((batch, 5, 2), jnp.int32).at[:, 0].set(first).at[:, [1, 3], 0].set(token),
        draw_valid=jnp.zeros((batch, 5, 2), bool).at[:, 0].set(known).at[:, [1, 3], 0].set(exists),
        draw_source=spread([0, 0]),
        q=jnp.concatenate([q[:, None], below], 1),
        q_rows=spread([[0], [1], [-1], [2], [-1]]),
        laws=(law,),
        max_depth=2,
    )
    return tree, state


def commit(params, state, emission, hidden):
    emitted = jnp.arange(emission.tokens.shape[1]) < emission.counts[:, None]
    return state + jnp.sum(jnp.where(emitted, emission.tokens, 0), axis=1)


def summing(law: str = "iid") -> Drafter:
    return Drafter(
        start, functools.partial(propose, law), commit, params=TABLE, max_depth=2, laws=(law,), vocab_size=VOCAB
    )


GOOD = {
    "nothing": lambda: NO_DRAFT,
    "sources": lambda: ensemble([ssm(context(1), TREE, "iid"), ssm(context(2), TREE, "iid")], capacity=7),
    "chain": lambda: first_of([ssm(context(1), tight_topology((2,)), "shared_gumbel"), summing()]),
    "top": lambda: summing("top_k_plus_one"),
    "hub": lambda: summing("hub"),
}


@pytest.mark.parametrize("name", GOOD)
def test_correct_drafters_pass(name):
    check_drafter(GOOD[name](), context(0), samples=1024)


def mutant(change, law: str = "iid", **declared) -> Drafter:
    """The drafter, altered: ``change(propose, params, keys, state, roots, warp) -> (tree, state)``."""
    sound = summing(law)
    return sound._replace(propose=functools.partial(change, sound.propose), **declared)


def of_tree(change):
    """Alter the proposed tree alone."""

    def altered(propose, params, keys, state, roots, warp):
        tree, state = propose(params, keys, state, roots, warp)
        return dataclasses.replace(tree, **change(tree, roots)), state

    return altered


def flattened(tree, roots):
    q = jnp.sqrt(tree.q)
    return dict(q=q / q.sum(-1, keepdims=True))


def drop_by_value(tree, roots):
    """No repeats: whether a draw exists depends on its own token."""
    repeated = tree.draw_tokens[..., 1] == tree.draw_tokens[..., 0]
    gone = repeated[:, :1] & (jnp.arange(tree.num_nodes) >= 3)
    draw_valid = tree.draw_valid.at[:, 0, 1].set(tree.draw_valid[:, 0, 1] & ~repeated[:, 0])
    return dict(draw_valid=draw_valid & ~gone[..., None], valid=tree.valid & ~gone)


def peek(propose, params, keys, state, roots, warp):
    together = jnp.broadcast_to(jnp.sum(roots), keys.draft.shape)
    return propose(params, keys._replace(draft=jax.vmap(jax.random.fold_in)(keys.draft, together)), state, roots, warp)


def same_noise_below(propose, params, keys, state, roots, warp):
    """The draw below the first child is made with the noise of the root's first: it copies that draw's luck."""
    tree, state = propose(params, keys, state, roots, warp)
    rows = jnp.arange(roots.shape[0])
    first, below = tree.q[rows, tree.q_rows[:, 0, 0]], tree.q[rows, tree.q_rows[:, 1, 0]]
    drawn = tree.draw_tokens[:, 0, 0]
    within = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 9), (1,)))(keys.draft)
    luck = jnp.take_along_axis(jnp.cumsum(first, -1) - first * within, drawn[:, None], 1)
    token = jnp.argmax(jnp.cumsum(below, -1) > luck, -1)
    return dataclasses.replace(
        tree, draw_tokens=tree.draw_tokens.at[:, 1, 0].set(token), tokens=tree.tokens.at[:, 2].set(token)
    ), state


def counting():
    calls = []

    def impure(tree, roots):
        calls.append(1)
        return dict(tokens=tree.tokens, q=tree.q, draw_valid=tree.draw_valid & (len(calls) % 2 == 1))

    return of_tree(impure)


def no_batch_axis() -> Drafter:
    sound = summing()
    return sound._replace(
        init=lambda *inputs: (start(*inputs), jnp.zeros(())),
        propose=lambda params, keys, state, *rest: (sound.propose(params, keys, state[0], *rest)[0], state),
        commit=lambda params, state, *rest: (commit(params, state[0], *rest), state[1]),
    )


def stale() -> Drafter:
    """Never learns what was emitted."""
    return summing()._replace(commit=lambda params, state, emission, hidden: state)


def of_another_type(propose, params, keys, state, roots, warp):
    tree, state = propose(params, keys, state, roots, warp)
    return tree, state.astype(jnp.float32)


MUTANTS = {
    "no batch axis": (no_batch_axis, r"the state's \[1\] has shape \(\)"),
    "another root": (
        lambda: mutant(of_tree(lambda tree, roots: dict(tokens=tree.tokens.at[:, 0].set(0)))),
        "the tree's root is 0, the text ends in",
    ),
    "invalid parents": (
        lambda: mutant(of_tree(lambda tree, roots: dict(parents=tree.parents.at[:, 1].set(2)))),
        "slot 1: its parent is 2, expected a valid slot before it",
    ),
    "a state that changes": (
        lambda: mutant(of_another_type),
        "a round changes the structure, shapes or dtypes of the state",
    ),
    "undeclared law": (lambda: mutant(of_tree(lambda tree, roots: {}), laws=("hub",)), "the drafter declares"),
    "impure": (lambda: mutant(counting()), "propose is not pure"),
    "peeks at batch-mates": (lambda: mutant(peek), "with other rows beside it, row 1 is drafted otherwise"),
    "stale": (stale, "after 3 rounds, row 1 is not drafted as from a fresh start"),
    "another q than drawn from": (lambda: mutant(of_tree(flattened)), "standard deviations away from its law"),
    "another law than declared": (
        lambda: mutant(of_tree(lambda tree, roots: dict(laws=("iid",))), "deterministic", laws=("iid",)),
        "standard deviations away from its law",
    ),
    "drops by value": (lambda: mutant(of_tree(drop_by_value)), "draw 1 at depth 0 is"),
    "noise used twice": (lambda: mutant(same_noise_below), "draw 0 at depth 1 is"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_drafters_are_caught(name):
    make, message = MUTANTS[name]
    with pytest.raises(ValueError, match=message):
        check_drafter(make(), context(0), samples=2048)


def test_prompts_come_by_the_batch():
    with pytest.raises(ValueError, match="takes 16 prompts; got 1"):
        check_drafter(NO_DRAFT, context(0), prompts=[[1]])


def test_exact_rules_pass():
    for rule, law in (("multi_step", "iid"), ("without_replacement", "without_replacement"), ("naive_sampling", "hub")):
        draws = (1, 2) if law == "hub" else (1, 2, (1, 1))
        assert check_verifier(rule, law, num_draws=draws) <= 1e-12


def accept_drafted(p, q, draws):
    """Takes the first draw whatever the target says."""
    del q
    return jnp.where(draws.valid[0], jax.nn.one_hot(draws.tokens[0], p.shape[0]), p)


def empty_residual(p, q, draws):
    """Right but where nothing is left."""
    del draws
    left = jnp.maximum(p - q[0], 0)
    return p + 0 * left / left.sum()


def test_wrong_rules_are_caught():
    with pytest.raises(ValueError, match="not exact for iid draws: with p="):
        check_verifier(accept_drafted, "iid")
    with pytest.raises(ValueError, match=r"it emits \[nan"):
        check_verifier(empty_residual, "iid")
    with pytest.raises(ValueError, match="not exact for deterministic draws"):
        check_verifier("multi_step", "deterministic", num_draws=(2,))


def test_checks_are_where_the_guide_says():
    assert sj.testing.check_drafter is check_drafter
    assert np.isfinite(check_verifier("spectr", "iid", num_draws=(2,), problems=2))
