"""Path rules: joint laws over whole trees, how they are ordered, and the sampler that draws from them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.laws import LAWS, law_key
from specjax.sampling import Warp
from specjax.tree import TokenTree
from specjax.types import RoundKeys
from specjax.verify.joint import (
    enumerate_trees,
    in_chunks,
    join_trees,
    joint,
    node_logits,
    path_law,
    target_law,
    walk_law,
)
from specjax.verify.measure import for_laws
from specjax.verify.paths import PATH_RULES, block, multi_path_block, stop_at, traversal, typical
from specjax.verify.rules import RULES
from specjax.verify.table import BIASED, EXACT
from specjax.verify.table import random_tables as tables
from tests.helpers import chi_square_z

pytestmark = pytest.mark.optimised

V = 3


def random_tables(rng: np.random.Generator, levels: int, count: int = 1) -> list[np.ndarray]:
    """A tabular model of ``count`` problems."""
    return [rng.dirichlet([0.4] * V, (count, *(V,) * level)) for level in range(levels)]


@functools.cache
def compiled(rule, laws=("iid",)):
    """Where walks end [T, N, V], by a path rule's function or a node rule's name."""
    by_name = isinstance(rule, str)
    return jax.jit(functools.partial(walk_law, for_laws(rule, laws)) if by_name else functools.partial(path_law, rule))


class Problems:
    """Random tabular models with all their trees in one batch."""

    def __init__(self, laws, schedule, *, count, merge=False, seed=0):
        rng, depth = np.random.default_rng(seed), len(schedule)
        self.target = random_tables(rng, depth + 1, count)
        drafts = [random_tables(rng, depth, count) for _ in laws]
        self.forest = enumerate_trees(drafts, laws, schedule, merge=merge)
        self.logits = node_logits(self.forest, self.target)

    def ends(self, rule) -> np.ndarray:
        """[T, N, V] where walks end, by a path rule's function or a node rule's name."""
        trees = self.forest.trees
        with jax.enable_x64(True):
            return in_chunks(compiled(rule, trees.laws), trees, self.logits)

    def averaged(self, rule) -> tuple[float, np.ndarray]:
        """The worst total variation from the target, and every problem's block efficiency."""
        result = joint(self.ends(rule), self.forest, self.target)
        difference = np.abs(result.law - target_law(self.target)).reshape(len(result.law), -1)
        return difference.sum(1).max() / 2, result.block_efficiency


@functools.cache
def chains() -> Problems:
    return Problems(("iid",), [[1], [1]], count=200)


def test_the_block_paper_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 accepted token by token, 11/9 as a block."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    everywhere = lambda law, levels: [np.broadcast_to(law, (1, *(2,) * level, 2)) for level in range(levels)]
    forest = enumerate_trees([everywhere(q, 2)], ("iid",), [[1], [1]])
    target = everywhere(p, 3)
    logits = node_logits(forest, target)
    with jax.enable_x64(True):
        for rule, accepted in ((block, 11 / 9), (traversal, 11 / 9)):
            result = joint(np.asarray(compiled(rule)(forest.trees, logits)), forest, target)
            assert abs(result.block_efficiency - 1 - accepted) < 1e-12
        result = joint(np.asarray(compiled("multi_step")(forest.trees, logits)), forest, target)
        assert abs(result.block_efficiency - 1 - 10 / 9) < 1e-12


def test_on_a_chain_block_and_traversal_are_one_law_and_beat_token_by_token():
    problems = chains()
    np.testing.assert_allclose(problems.ends(block), problems.ends(traversal), atol=1e-12)
    variation, as_block = problems.averaged(block)
    assert variation <= 1e-12
    variation, by_token = problems.averaged("multi_step")
    assert variation <= 1e-12
    assert (as_block >= by_token - 1e-12).all()
    assert (as_block > by_token + 1e-3).any()


def test_traversal_is_at_least_multi_step_on_trees_and_equal_at_depth_one():
    flat = Problems(("iid",), [[3]], count=100)
    variation, value = flat.averaged(traversal)
    assert variation <= 1e-12
    np.testing.assert_allclose(value, flat.averaged("multi_step")[1], atol=1e-12)
    tree = Problems(("iid",), [[2], [1]], count=200)
    variation, value = tree.averaged(traversal)
    assert variation <= 1e-12
    by_node = tree.averaged("multi_step")[1]
    assert (value >= by_node - 1e-12).all()
    assert (value > by_node + 1e-3).any()


@pytest.mark.parametrize("merge", [False, True], ids=["a node per copy", "copies merged"])
@pytest.mark.parametrize(
    ("laws", "schedule"),
    [
        (("iid",), [[3], [1]]),
        (("without_replacement",), [[2], [2]]),
        (("iid", "without_replacement"), [[1, 1], [1, 0]]),
    ],
    ids=str,
)
def test_traversal_gives_the_targets_joint_law(laws, schedule, merge):
    variation, _ = Problems(laws, schedule, count=10, merge=merge, seed=1).averaged(traversal)
    assert variation <= 1e-12


def test_multi_path_block_gives_the_targets_joint_law_with_a_node_per_copy():
    variation, value = Problems(("iid",), [[3], [1]], count=10, seed=2).averaged(multi_path_block)
    assert variation <= 1e-12
    assert (value > 1).all()


@functools.cache
def trees_of_every_law():
    """200 targets, and their trees by law and schedule: one, two and three draws, from one source and from two."""
    rng = np.random.default_rng(8)
    target, drafts = tables(rng, 3, 200), [tables(rng, 2, 200) for _ in range(2)]
    schedules = [[[1], [1]], [[2], [1]], [[3], [1]], [[1, 1], [1, 0]], [[2, 1], [0, 1]]]
    cases = [
        (law, enumerate_trees(drafts[: len(schedule[0])], (law,) * len(schedule[0]), schedule, merge=True))
        for law, schedule in itertools.product(LAWS, schedules)
        if law != "shared_gumbel" and np.max(schedule) <= (LAWS[law].max_draws or 3)
    ]
    return target, cases


@pytest.mark.parametrize("name", RULES)
def test_node_rules_give_the_targets_joint_law_where_they_are_exact_and_nowhere_else(name):
    target, cases = trees_of_every_law()
    record, worst = RULES[name], {}
    for laws in LAWS if record.takes_laws else [None]:  # the others never ask for the law
        chosen = [(law, forest) for law, forest in cases if laws in (None, law)]
        if not chosen:
            continue
        trees = join_trees([forest.trees for _, forest in chosen], laws or "iid")
        logits = np.concatenate([node_logits(forest, target, trees.tokens.shape[1]) for _, forest in chosen])
        with jax.enable_x64(True):
            ends = in_chunks(compiled(name, trees.laws), trees, logits)
        splits = np.cumsum([len(forest.probs) for _, forest in chosen])[:-1]
        for (law, forest), part in zip(chosen, np.split(ends, splits), strict=True):
            key = law_key([law] * len(forest.trees.laws))
            difference = np.abs(joint(part, forest, target).law - target_law(target)).reshape(200, -1).sum(1) / 2
            worst[key] = max(worst.get(key, 0), difference.max())
    for key, variation in worst.items():
        exact = record.exact_for is None or key in record.exact_for
        assert variation <= EXACT if exact else variation > BIASED, (key, variation)
    assert len(worst) == 2 * (len(LAWS) - 1)


ONE_HOT_TREES = [[[1], [1]], [[2], [2]], [[3], [1]], [[2, 1], [0, 1]]]


@functools.cache
def trees_for_a_certain_target():
    """Every tree of 40 problems whose target leaves no choice, by law; shared noise draws as without replacement."""
    rng = np.random.default_rng(9)
    target = [np.eye(V)[table.argmax(-1)] for table in random_tables(rng, 3, 40)]
    drafts = [random_tables(rng, 2, 40) for _ in range(2)]
    drafts[0][0][:10] = target[0][:10]  # a draft that agrees, and one that never drafts the right token
    drafts[0][0][10:20] = np.roll(target[0][10:20], 1, -1)
    cases = [
        (law, enumerate_trees(drafts[: len(schedule[0])], (law,) * len(schedule[0]), schedule, merge=True))
        for law, schedule in itertools.product(LAWS, ONE_HOT_TREES)
        if np.max(schedule) <= (LAWS[law].max_draws or 3)
    ]
    return target, cases


@pytest.mark.parametrize("name", PATH_RULES)
def test_at_temperature_zero_every_path_rule_emits_the_argmax_whatever_was_drafted(name):
    """B05: in every tree that any law can draft, exact for it or not; biased pairs are refused, but not for this."""
    target, cases = trees_for_a_certain_target()
    text = np.stack(np.nonzero(target_law(target))[1:], 1)  # [P, 3] the only text there is
    cases = [case for case in cases if name != "block" or case[1].trees.draw_tokens.shape[-1] == 1]
    for distinct in (False, True) if name == "traversal" else (None,):
        chosen = [forest for law, forest in cases if distinct in (None, law == "without_replacement")]
        trees = join_trees([forest.trees for forest in chosen], "without_replacement" if distinct else "iid")
        logits = np.concatenate([node_logits(forest, target, trees.tokens.shape[1]) for forest in chosen])
        with jax.enable_x64(True):
            ends = in_chunks(compiled(PATH_RULES[name].rule), trees, logits)
        wanted = np.concatenate([text[forest.problems] for forest in chosen])
        rows = np.arange(len(wanted))
        right = np.zeros(ends.shape[:2], bool)  # nodes whose path is the text
        right[:, 0] = True
        for node in range(1, right.shape[1]):  # parents come before children
            level = trees.depths[:, node]
            right[:, node] = (
                trees.valid[:, node]
                & right[rows, trees.parents[:, node]]
                & (trees.tokens[:, node] == wanted[rows, np.maximum(level, 1) - 1])
            )
        next_token = np.take_along_axis(wanted, trees.depths, 1)
        mass = np.take_along_axis(ends, next_token[..., None], 2)[..., 0]
        np.testing.assert_allclose(np.where(right, mass, 0).sum(1), 1, atol=1e-12)


@pytest.mark.parametrize("rule", [traversal, multi_path_block])
def test_a_draw_without_a_node_can_still_be_accepted(rule):
    """A topology may leave out a rank: its draw is made and verified, but the path can only end with it."""
    problems = Problems(("iid",), [[2], [1]], count=50, seed=3)
    kept, efficiency = problems.averaged(rule)
    gone = np.isin(np.arange(5), [1, 2])  # the first child and what is below it
    trees = problems.forest.trees
    problems.forest = problems.forest._replace(trees=dataclasses.replace(trees, valid=trees.valid & ~gone))
    variation, without = problems.averaged(rule)
    assert max(kept, variation) <= 1e-12
    assert (without < efficiency).all()


def test_block_refuses_trees():
    problems = Problems(("iid",), [[2]], count=1)
    with pytest.raises(ValueError, match="takes chains, one draw a node; the tree has room for 2"):
        path_law(block, problems.forest.trees, problems.logits)


@pytest.mark.parametrize(
    ("name", "law"), [*((name, "iid") for name in PATH_RULES), ("traversal", "without_replacement")]
)
def test_edge_laws_are_finite_and_right(name, law):
    """p = q, one-hot laws, missing tokens, disjoint supports, draws that cover all of p: B11 for paths."""
    laws = {"dense": [0.5, 0.3, 0.2], "one-hot": [0, 1.0, 0], "other one-hot": [0, 0, 1.0], "gap": [0.4, 0, 0.6]}
    levels = lambda laws, count: [
        np.broadcast_to(np.reshape(laws, (-1, *(1,) * level, V)), (len(laws), *(V,) * (level + 1)))
        for level in range(count)
    ]
    schedule = [[1], [1]] if name == "block" else [[2], [1]]
    pairs = list(itertools.product(laws, laws))
    target = levels([laws[p] for p, _ in pairs], 3)
    forest = enumerate_trees([levels([laws[q] for _, q in pairs], 2)], (law,), schedule)
    with jax.enable_x64(True):
        ends = in_chunks(compiled(PATH_RULES[name].rule), forest.trees, node_logits(forest, target))
    assert np.isfinite(ends).all() and (ends >= 0).all()
    np.testing.assert_allclose(ends.sum((1, 2)), 1, atol=1e-12)
    exact = [name != "typical" or "one-hot" in p for p, _ in pairs]
    np.testing.assert_allclose(joint(ends, forest, target).law[exact], target_law(target)[exact], atol=1e-12)


def test_with_the_target_as_its_own_draft_a_chain_is_always_accepted():
    target = random_tables(np.random.default_rng(4), 3)
    forest = enumerate_trees([target], ("iid",), [[1], [1]])
    with jax.enable_x64(True):
        ends = np.asarray(compiled(block)(forest.trees, node_logits(forest, target)))
    assert abs(joint(ends, forest, target).block_efficiency[0] - 3) < 1e-12


def chain(tokens: list[int], q: list[float]) -> TokenTree:
    """One chain below root token 0, every token drawn from q."""
    count = len(tokens) + 1
    ints = lambda values: jnp.asarray([values], jnp.int32)
    return TokenTree(
        tokens=ints([0, *tokens]),
        parents=ints(range(-1, count - 1)),
        depths=ints(range(count)),
        valid=jnp.ones((1, count), bool),
        draw_tokens=ints([[token] for token in [*tokens, 0]]),
        draw_valid=jnp.asarray([[[True]] * len(tokens) + [[False]]]),
        draw_source=ints([0]),
        q=jnp.asarray([[q]]),
        q_rows=ints([[0]] * len(tokens) + [[-1]]),
        laws=("iid",),
        max_depth=len(tokens),
    )


def test_typical_follows_plausible_tokens_only_and_says_that_it_is_lossy():
    p = jnp.array([0.94, 0.05, 0.01])  # the threshold is min(0.09, 0.3 exp(-entropy)) = 0.09
    target = lambda nodes: jnp.broadcast_to(p, (nodes.shape[0], 3))
    for tokens, stop in (([0, 0], 2), ([0, 1], 1), ([1, 0], 0)):
        decision = typical(chain(tokens, [0.2, 0.3, 0.5]), target)
        assert jnp.argmax(decision.stop[0]) == stop
        assert decision.stop.sum() == 1
    flat = lambda nodes: jnp.full((nodes.shape[0], 3), 1 / 3)  # where all are alike, all pass
    assert jnp.argmax(typical(chain([2, 1], [0.2, 0.3, 0.5]), flat).stop[0]) == 2
    assert [name for name, record in PATH_RULES.items() if record.lossy] == ["typical"]
    assert not PATH_RULES["typical"].exact_for


@pytest.mark.parametrize("rule", [block, traversal])
def test_what_is_sampled_is_the_law(rule):
    """Chi-square of (accepted, next token) over fixed seeds, through the sampler."""
    count = 5_000
    tree = chain([1, 2], [0.2, 0.5, 0.3])
    logits = jnp.log(jnp.asarray([[[0.5, 0.2, 0.3], [0.1, 0.3, 0.6], [0.2, 0.2, 0.6]]]))
    law = np.asarray(compiled(rule)(tree, logits))[0]  # [N, V]
    many = jax.tree.map(lambda field: jnp.repeat(field, count, 0), tree)
    draft, path, emit = (jax.random.split(jax.random.key(seed), count) for seed in range(3))
    keys = RoundKeys(draft, path, emit, jnp.zeros(count, jnp.int32))
    warp = Warp(jnp.ones(count), jnp.zeros(count, jnp.int32), jnp.ones(count))
    result = jax.jit(stop_at(rule))(keys, many, jnp.repeat(logits, count, 0), warp)
    seen = np.zeros_like(law)
    np.add.at(seen, (np.asarray(result.num_accepted), np.asarray(result.next_token)), 1)
    assert chi_square_z(seen, np.where(law > 1e-7, law, 0)) < 5
    # The path is the chain down to where it ended, the tokens those of its nodes and then the next one.
    for path, tokens, accepted in zip(*map(np.asarray, (result.path, result.tokens, result.num_accepted)), strict=True):
        assert list(path[: accepted + 1]) == list(range(accepted + 1))
        assert list(tokens[:accepted]) == [1, 2][:accepted]
        assert not tokens[accepted + 1 :].any()


def test_a_row_does_not_depend_on_its_batch_mates():
    problems = Problems(("iid",), [[2], [1]], count=4, seed=5)
    together = problems.ends(traversal)
    rng = np.random.default_rng(6)
    order = rng.permutation(len(together))
    trees = jax.tree.map(lambda field: field[order], problems.forest.trees)
    problems.forest = problems.forest._replace(trees=trees)
    problems.logits = problems.logits[order]
    np.testing.assert_array_equal(problems.ends(traversal), together[order])
