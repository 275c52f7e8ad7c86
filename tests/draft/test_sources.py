"""Several sources in one decode: mapped over where alike, credited apart, cut to a capacity, or chained."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import decode
from specjax.draft import NO_DRAFT, ensemble, first_of, merge, ssm
from specjax.laws import LAWS
from specjax.sampling import fold_in, stack_warps
from specjax.testing import hostile, table_model
from specjax.types import Acceptance, Drafter, Emission
from specjax.verify.joint import path_law, target_law, walk_law
from specjax.verify.paths import traversal
from specjax.verify.rules import multi_step, naive_sampling, without_replacement
from tests.draft.test_ensemble import SIZES, random_tree, token_paths
from tests.helpers import VOCAB, context, prompts_of, round_keys, tight_topology
from tests.test_compiles import compiled, counting  # noqa: F401

TREE = tight_topology((2, 1))
WARPS = stack_warps([sj.Warp(1.0), sj.Warp(0.5), sj.Warp(1.0, 3)])


def started(drafter: Drafter):
    """A state of three rows, each after its first token, and the roots."""
    tokens = np.zeros((3, 128), np.int32)
    tokens[:, :4] = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    state = jax.jit(drafter.init)(drafter.params, tokens, jnp.array([3, 2, 4]), None)
    return commit(drafter, state, [[13], [14], [15]]), jnp.array([13, 14, 15])


def commit(drafter: Drafter, state, emitted: list[list[int]]):
    width = drafter.max_depth + 1
    padded = jnp.array([tokens + [0] * (width - len(tokens)) for tokens in emitted])
    counts = jnp.array([len(tokens) for tokens in emitted])
    return drafter.commit(drafter.params, state, Emission(padded, counts, jnp.zeros((3, width), jnp.int32)), None)


@pytest.mark.parametrize("law", ["deterministic", "iid"])
def test_alike_members_run_mapped_and_draft_what_each_would_alone(law):
    """Round after round, whatever stands between them in the list."""
    other = table_model(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)))
    members = [ssm(model, TREE, law) for model in (context(0), other, context(1), context(2))]
    both = ensemble(members)
    assert [len(part) for part in both.params] == [2, 2]  # stacked and shared leaves of three; the parameters of one
    state, roots = started(both)
    parts = [started(member)[0] for member in members]
    for lengths, emitted in (([4, 3, 5], [[1, 2, 3], [], [7]]), ([7, 3, 6], [[4], [5], [6]])):
        keys = round_keys([1, 2, 3], lengths)
        tree, state = jax.jit(both.propose)(both.params, keys, state, roots, WARPS)
        alone = []
        for place, member in enumerate(members):
            own = keys._replace(draft=fold_in(keys.draft, jnp.full(3, place)))
            drafted, parts[place] = jax.jit(member.propose)(member.params, own, parts[place], roots, WARPS)
            alone.append(drafted)
        want = jax.jit(jax.vmap(merge))(alone)
        for field in ("tokens", "parents", "valid", "draw_tokens", "draw_valid", "draw_source", "q_rows"):
            np.testing.assert_array_equal(getattr(tree, field), getattr(want, field), err_msg=field)
        np.testing.assert_allclose(tree.q, want.q, atol=1e-6)
        state = commit(both, state, emitted)
        parts = [commit(member, part, emitted) for member, part in zip(members, parts)]
        roots = jnp.array([(tokens or [int(root)])[-1] for tokens, root in zip(emitted, roots)])
    for leaf in jax.tree.leaves(state):
        assert leaf.shape[0] == 3  # the batch leads, so rows can be replaced


def test_an_ensemble_passes_each_model_once_and_other_members_compile_nothing(compiled):  # noqa: F811
    first, traced = counting(context(3))
    models = [first, *[first._replace(params=context(seed).params) for seed in (4, 5, 6)]]
    call = functools.partial(sj.generate, context(0), prompts_of([3]), tree=TREE, max_new_tokens=12)
    call(drafts=models[:1])
    alone = len(traced)
    traced.clear()
    one = call(drafts=models[:3])
    assert 0 < len(traced) <= alone  # mapped, so as often as for one; a prompt's pass is traced already
    traced.clear()
    compiled.clear()
    other = call(drafts=[models[3], models[0], models[2]])
    assert not traced
    assert not compiled
    assert one.tokens == other.tokens


def test_twins_are_one():
    """Two identical SSMs: the same text in the same steps, and credit for both."""
    call = functools.partial(sj.generate, context(0), prompts_of([3, 5]), tree=TREE, max_new_tokens=12)
    for draft in (context(1), context(0)):
        one, two = call(drafts=[draft]), call(drafts=[draft, draft])
        assert one.tokens == two.tokens
        for single, double in zip(one.rounds, two.rounds):
            assert [item[:4] for item in single] == [item[:4] for item in double]
            assert all(set(item.proposers) <= {(0,)} for item in single)
            assert all(set(item.proposers) <= {(0, 1)} for item in double)
    assert any(item.proposers for row in two.rounds for item in row)


def test_who_proposed_a_token_gets_the_credit():
    target = context(0)
    options = dict(tree=TREE, max_new_tokens=[9, 12], eos_ids=())
    for drafts, winner in (([hostile(target), target], 1), ([target, hostile(target)], 0)):
        result = sj.generate(target, prompts_of([3, 5]), drafts=drafts, **options)
        rounds = [item for row in result.rounds for item in row]
        assert all(item.proposers == ((winner,),) * item.accepted for item in rounds)
        assert {item.accepted for item in rounds} >= {2}
        steps = list(sj.stream(target, prompts_of([3, 5]), drafts=drafts, **options))
        assert [[step.rounds[row] for step in steps if step.rounds[row]] for row in range(2)] == result.rounds


def test_credit_on_any_tree():
    """Bit s iff source s drew the next token at the node, among draws of several sources that are valid or not."""
    rng = np.random.default_rng(0)
    trees = [jax.jit(merge)([random_tree(rng, *size) for size in SIZES]) for _ in range(4)]
    tree = jax.tree.map(lambda *fields: jnp.stack(fields), *trees)
    depth, count = tree.max_depth, tree.num_nodes
    path, tokens = rng.integers(0, count, (4, depth + 1)), rng.integers(0, 4, (4, depth + 1))
    bits = decode._proposers(tree, Acceptance(jnp.asarray(path), jnp.zeros(4, jnp.int32), jnp.asarray(tokens)))
    for row, step in itertools.product(range(4), range(depth)):
        node = path[row, step]
        drew = {
            int(tree.draw_source[row, column])
            for column in range(tree.draw_tokens.shape[2])
            if tree.draw_valid[row, node, column] and tree.draw_tokens[row, node, column] == tokens[row, step]
        }
        assert int(bits[row, step]) == sum(1 << source for source in drew)
    assert len(set(np.asarray(bits).ravel().tolist())) > 4


@pytest.mark.parametrize("capacity", [1, 6, 12])
def test_a_capacity_keeps_what_comes_first_slot_by_slot_the_sources_in_turn(capacity):
    cut, full = (jax.jit(functools.partial(merge, capacity=room)) for room in (capacity, None))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        trees = [random_tree(rng, *size) for size in SIZES]
        kept: set = set()
        paths = [token_paths(tree) for tree in trees]
        for slot, source in itertools.product(range(max(size[0] for size in SIZES)), range(len(SIZES))):
            if slot in paths[source] and len(kept) < capacity:
                kept.add(paths[source][slot])
        whole, part = full(trees), cut(trees)
        slots = [slot for slot, path in token_paths(whole).items() if path in kept]
        assert part.num_nodes == capacity
        assert token_paths(part) == dict(enumerate(token_paths(whole)[slot] for slot in slots))
        for field in ("draw_tokens", "draw_valid", "q_rows", "depths"):
            np.testing.assert_array_equal(getattr(part, field)[: len(slots)], getattr(whole, field)[jnp.array(slots)])
        assert not part.draw_valid[len(slots) :].any()


SMALL = 3  # tokens of the models whose trees are enumerated


def two_levels(law: str, root: np.ndarray, after: np.ndarray) -> tuple[sj.TokenTree, np.ndarray]:
    """Every tree of two draws at the root and one below each, [T, ..], with its probability [T]."""
    trees, probs = [], []
    for first, known, chance in zip(*LAWS[law].enumerate(root, 2)):
        below = [LAWS[law].enumerate(after[token], 1) for token in first]
        for left, right in itertools.product(range(SMALL), repeat=2):
            pair = [below[0].tokens[left, 0], below[1].tokens[right, 0]]
            trees.append(
                dict(
                    tokens=[0, first[0], pair[0], first[1], pair[1]],
                    valid=[True, known[0], known[0], known[1], known[1]],
                    draw_tokens=[first, [pair[0], 0], [0, 0], [pair[1], 0], [0, 0]],
                    draw_valid=[known, [known[0], False], [False] * 2, [known[1], False], [False] * 2],
                    q=[root, after[first[0]], after[first[1]]],
                )
            )
            probs.append(chance * below[0].probs[left] * below[1].probs[right])
    count = len(trees)
    spread = lambda values: np.broadcast_to(np.array(values, np.int32), (count, *np.shape(values)))
    fields = {name: np.array([tree[name] for tree in trees]) for name in trees[0]}
    tree = sj.TokenTree(
        **fields,
        parents=spread([-1, 0, 1, 0, 3]),
        depths=spread([0, 1, 2, 1, 2]),
        draw_source=spread([0, 0]),
        q_rows=spread([[0], [1], [-1], [2], [-1]]),
        laws=(law,),
        max_depth=2,
    )
    return tree, np.array(probs)


def text_law(rule, trees: sj.TokenTree, probs: np.ndarray, target: list[np.ndarray]) -> np.ndarray:
    """[V, V, V] the law of the first three tokens: what one verified tree emits, finished by the target."""
    parents, depths = np.asarray(trees.parents), np.asarray(trees.depths)
    codes = np.zeros(parents.shape, int)
    rows = np.arange(len(probs))
    for slot in range(1, parents.shape[1]):  # parents come first
        codes[:, slot] = codes[rows, np.maximum(parents[:, slot], 0)] * SMALL + np.asarray(trees.tokens)[:, slot]
    codes = np.where(trees.valid, codes, 0)
    flat = [table.reshape(-1, SMALL) for table in target]
    logits = np.log(np.stack([flat[depth][codes.clip(max=len(flat[depth]) - 1)] for depth in range(3)], -1))
    logits = np.take_along_axis(logits, np.where(trees.valid, depths, 0)[:, :, None, None], -1)[..., 0]
    law = functools.partial(path_law if rule is traversal else walk_law, rule)
    mass = probs[:, None, None] * np.asarray(jax.jit(law)(trees, logits))
    total = np.zeros((SMALL,) * 3)
    for depth in range(3):
        here = np.asarray(trees.valid) & (depths == depth)
        text = np.zeros((SMALL**depth, SMALL))
        np.add.at(text, codes[here], mass[here])
        text = text.reshape((SMALL,) * (depth + 1))
        for table in target[depth + 1 :]:
            text = text[..., None] * table
        total += text
    return total


@pytest.mark.parametrize(
    ("law", "rules"),
    [
        ("iid", (multi_step, naive_sampling, traversal)),
        ("without_replacement", (without_replacement, traversal)),
    ],
)
def test_a_capacity_keeps_every_law(law, rules):
    """Summed over all pairs of trees of two sources; nodes are dropped, draws are not. To drop the draws is biased."""
    rng = np.random.default_rng(1)
    table = lambda levels: [rng.dirichlet([0.5] * SMALL, (SMALL,) * level) for level in range(levels)]
    target = table(3)
    with jax.enable_x64(True):
        (a, a_probs), (b, b_probs) = (two_levels(law, *table(2)) for _ in range(2))
        left, right = (index.ravel() for index in np.indices((len(a_probs), len(b_probs))))
        probs = a_probs[left] * b_probs[right]
        left, right, probs = (values[probs > 0] for values in (left, right, probs))
        pairs = [jax.tree.map(lambda field: field[left], a), jax.tree.map(lambda field: field[right], b)]
        for capacity in (6, 4):
            trees = jax.jit(jax.vmap(functools.partial(merge, capacity=capacity)))(pairs)
            trees = jax.tree.map(lambda field: field.astype(jnp.int32) if field.dtype == jnp.int64 else field, trees)
            for rule in rules:
                np.testing.assert_allclose(text_law(rule, trees, probs, target), target_law(target), atol=1e-12)
        # The draws that have no node left out as well.
        children = (trees.parents[:, None] == np.arange(capacity)[:, None]) & trees.valid[:, None]  # [T, node, child]
        has_node = (children[:, :, None] & (trees.draw_tokens[..., None] == trees.tokens[:, None, None])).any(-1)
        biased = dataclasses.replace(trees, draw_valid=trees.draw_valid & has_node)
        assert np.abs(text_law(rules[0], biased, probs, target) - target_law(target)).sum() / 2 > 1e-4


@functools.cache
def _in_some_rows(propose):
    def sometimes(params, keys, state, roots, warp):
        tree, state = propose(params, keys, state, roots, warp)
        here = (roots % 2 == 0)[:, None]
        root = jnp.arange(tree.num_nodes) == 0
        valid, draw_valid = tree.valid & (here | root), tree.draw_valid & here[..., None]
        return dataclasses.replace(tree, valid=valid, draw_valid=draw_valid), state

    return sometimes


def in_some_rows(drafter: Drafter) -> Drafter:
    """Proposes only behind even tokens, as a lookup proposes only where it finds something."""
    return drafter._replace(propose=_in_some_rows(drafter.propose))


def test_the_first_that_proposes_is_taken_row_by_row():
    first, second = in_some_rows(ssm(context(1), TREE, "iid")), ssm(context(2), tight_topology((1, 1, 1)), "iid")
    chain = first_of([first, second])
    assert (chain.laws, chain.max_depth) == (("iid", "iid"), 3)
    state, roots = started(chain)
    keys = round_keys([1, 2, 3], [4, 3, 5])
    tree, _ = jax.jit(chain.propose)(chain.params, keys, state, roots, WARPS)
    assert tree.num_nodes == 5
    for place, member in enumerate([first, second]):
        own = keys._replace(draft=fold_in(keys.draft, jnp.full(3, place)))
        alone, _ = jax.jit(member.propose)(member.params, own, started(member)[0], roots, WARPS)
        for row in [1] if place == 0 else [0, 2]:  # roots are 13, 14, 15
            mine, theirs = (jax.tree.map(lambda field, row=row: field[row], part) for part in (tree, alone))
            assert token_paths(mine) == token_paths(jax.jit(merge)([theirs]))
            drawing = mine.draw_valid.any(0)
            assert set(np.asarray(mine.draw_source)[drawing].tolist()) == {place}


def test_a_chain_of_drafters_writes_the_same_text():
    target = context(0)
    chain = first_of([in_some_rows(ssm(target, TREE, "deterministic")), ssm(target, TREE, "iid")])
    prompts = prompts_of([3, 5])
    warp = [sj.Warp(0.0), sj.Warp(1.0)]
    result = sj.generate(target, prompts, drafts=[chain], warp=warp, seeds=3, max_new_tokens=20, eos_ids=())
    assert result.tokens == sj.generate(target, prompts, warp=warp, seeds=3, max_new_tokens=20, eos_ids=()).tokens
    assert {sources for row in result.rounds for item in row for sources in item.proposers} == {(0,), (1,)}
    with pytest.raises(ValueError, match=r"would bias the text for deterministic \+ iid draws"):
        sj.generate(target, prompts, drafts=[chain], verifier="multi_step")


def test_bad_sources_are_refused():
    one = ssm(context(0), TREE, "iid")
    with pytest.raises(ValueError, match="first_of needs at least one"):
        first_of([])
    with pytest.raises(ValueError, match="drafter 1 of an ensemble is a Model; expected a Drafter"):
        ensemble([one, context(0)])  # pyright: ignore[reportArgumentType]
    for capacity in (0, True, 2.0):
        with pytest.raises(ValueError, match="capacity is a number of nodes >= 1"):
            ensemble([one], capacity=capacity)
    with pytest.raises(ValueError, match="at most 32 sources; got 33"):
        ensemble([one] * 33)
    assert ensemble([NO_DRAFT, one], capacity=1).laws == ("iid",)
