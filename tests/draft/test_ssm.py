"""What an SSM drafts, against expansions by whole passes without a cache, round after round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.draft import ssm
from specjax.sampling import stack_warps
from specjax.testing import table_model
from specjax.tree import check_tree
from specjax.types import Emission
from tests.helpers import (
    VOCAB,
    context,
    logits_after,
    prompts_of,
    round_keys,
    slot_paths,
    softmax,
    tight_topology,
    tiny,
    topology,
)

LAWS = ["deterministic", "iid", "without_replacement"]
WARPS = [sj.Warp(1.0), sj.Warp(0.5), sj.Warp(1.0, 3), sj.Warp(0.8, 0, 0.9)]
RAGGED = [[1], [3], [1, 0], [3, 2], [3, 2, 0], [3, 2, 1], [3, 2, 1, 1]]  # ranks skipped, branches of unequal length


def row_of(tree: sj.TokenTree, row: int) -> sj.TokenTree:
    return jax.tree.map(lambda field: np.asarray(field)[row], tree)


def check_expansion(model, tree: sj.TokenTree, shape: sj.Topology, law: str, warp: sj.Warp, text: list[int]):
    """One row's tree: q and draws of every expanded node equal those of a fresh pass over text + path."""
    check_tree(tree)
    assert tree.tokens[0] == text[-1]
    paths = slot_paths(tree.parents, tree.valid)
    for slot in np.flatnonzero(shape.valid):
        expanded = slot in paths and shape.num_draws[slot] > 0
        assert np.sum(tree.draw_valid[slot]) <= shape.num_draws[slot]
        if not expanded:
            assert not np.any(tree.draw_valid[slot])
            continue
        logits = logits_after(model, text + [int(tree.tokens[at]) for at in paths[slot]]) / warp.temperature
        q = softmax(logits)
        order = np.argsort(-q, kind="stable")
        if warp.top_k:
            q[order[warp.top_k :]] = 0
        q /= q.sum()
        q[order[np.cumsum(q[order]) - q[order] >= warp.top_p - 1e-6 * (warp.top_p == 1)]] = 0
        q /= q.sum()
        np.testing.assert_allclose(tree.q[tree.q_rows[slot, 0]], q, atol=2e-5)
        draws = tree.draw_tokens[slot][tree.draw_valid[slot]]
        wanted = shape.num_draws[slot] if law == "iid" else min(shape.num_draws[slot], int((q > 0).sum()))
        assert len(draws) == wanted
        assert np.all(tree.draw_valid[slot][:wanted])
        assert np.all(q[draws] > 0)
        if law == "deterministic":
            assert draws.tolist() == order[:wanted].tolist()
        if law == "without_replacement":
            assert len(set(draws.tolist())) == wanted
        for child in np.flatnonzero(np.asarray(shape.parents) == slot):
            assert tree.valid[child] == (shape.ranks[child] < wanted)
            assert tree.parents[child] == slot
            if tree.valid[child]:
                assert tree.tokens[child] == draws[shape.ranks[child]]
    assert not np.any(tree.valid[~shape.valid])
    assert tree.draw_source.tolist() == [0] * tree.draw_tokens.shape[1]
    assert tree.laws == (law,)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["context", "tiny"])
def test_drafts_equal_fresh_passes_round_after_round(name, law):
    """B01, B03, B24: positions, cache and ragged commits, for four rounds in which rows emit 0 to 5 tokens."""
    if name == "tiny" and law == "without_replacement":
        pytest.skip("the law is the context model's business; the decoder is here for its positions")
    model = context(0) if name == "context" else tiny(0)
    texts = prompts_of([5, 9, 12, 1], model.vocab_size)
    shape = topology(RAGGED)
    drafter = ssm(model, shape, law)
    assert (drafter.max_depth, drafter.laws, drafter.vocab_size) == (4, (law,), model.vocab_size)
    tokens = np.zeros((4, 128), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    init, propose = jax.jit(drafter.init), jax.jit(drafter.propose)
    state = init(drafter.params, tokens, jnp.array([len(text) for text in texts]), None)
    rng = np.random.default_rng(1)
    width = drafter.max_depth + 1
    emitted = [[int(rng.integers(model.vocab_size))] for _ in range(4)]  # by prefill
    for _ in range(4):
        counts = np.array([len(tokens) for tokens in emitted])
        padded = np.array([tokens + [7] * (width - len(tokens)) for tokens in emitted])
        emission = Emission(jnp.asarray(padded), jnp.asarray(counts), jnp.zeros((4, width), jnp.int32))
        state = drafter.commit(drafter.params, state, emission, None)
        texts = [text + tokens for text, tokens in zip(texts, emitted)]
        keys = round_keys(range(4), [len(text) for text in texts])
        roots = jnp.array([text[-1] for text in texts])
        tree, state = propose(drafter.params, keys, state, roots, stack_warps(WARPS))
        emitted = []
        for row in range(4):
            drafted = row_of(tree, row)
            if counts[row]:
                check_expansion(model, drafted, shape, law, WARPS[row], texts[row])
            paths = list(slot_paths(drafted.parents, drafted.valid).values())
            path = paths[rng.integers(len(paths))]
            emitted.append([int(drafted.tokens[at]) for at in path] + [int(rng.integers(model.vocab_size))])
        # A row that has finished, as every row will some day, emits nothing.
        if len(texts[0]) > 10:
            emitted[0] = []


@pytest.mark.parametrize("law", LAWS)
def test_padding_a_topology_changes_no_draft(law):
    """B27: node for node the same tokens, q and draws, within wider, deeper and larger bounds."""
    model = context(0)
    tokens = np.zeros((4, 128), np.int32)
    tokens[:, :3] = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    trees = []
    for shape in (tight_topology(RAGGED[:4]), topology(RAGGED[:4])):
        drafter = ssm(model, shape, law)
        state = jax.jit(drafter.init)(drafter.params, tokens, jnp.full(4, 2), None)
        width = drafter.max_depth + 1
        emission = Emission(jnp.tile(tokens[:, 2:3], (1, width)), jnp.ones(4, jnp.int32), jnp.zeros((4, width), int))
        state = drafter.commit(drafter.params, state, emission, None)
        keys = round_keys(range(4), [3] * 4)
        trees.append(jax.jit(drafter.propose)(drafter.params, keys, state, tokens[:, 2], stack_warps(WARPS))[0])
    tight, padded = trees
    count, draws = tight.num_nodes, tight.draw_tokens.shape[2]
    assert padded.num_nodes > count
    assert not np.any(padded.valid[:, count:])
    assert not np.any(padded.draw_valid[:, count:])
    assert not np.any(padded.draw_valid[:, :, draws:])
    np.testing.assert_array_equal(padded.valid[:, :count], tight.valid)
    np.testing.assert_array_equal(padded.parents[:, :count], tight.parents)
    np.testing.assert_array_equal(padded.depths[:, :count], tight.depths)
    np.testing.assert_array_equal(padded.draw_valid[:, :count, :draws], tight.draw_valid)
    for mine, theirs, where in [
        (padded.tokens[:, :count], tight.tokens, tight.valid),
        (padded.draw_tokens[:, :count, :draws], tight.draw_tokens, tight.draw_valid),
    ]:
        np.testing.assert_array_equal(np.where(where, mine, -1), np.where(where, theirs, -1))
    for row in range(4):
        for slot in np.flatnonzero(np.any(tight.draw_valid[row], axis=1)):
            ours, wanted = (tree.q[row, tree.q_rows[row, slot, 0]] for tree in (padded, tight))
            np.testing.assert_array_equal(ours, wanted)


def pair_tables(draws: np.ndarray, vocab: int) -> list[tuple[int, int, np.ndarray]]:
    """Joint counts of every pair of columns."""
    tables = []
    for first in range(draws.shape[1]):
        for second in range(first):
            table = np.zeros((vocab, vocab))
            np.add.at(table, (draws[:, first], draws[:, second]), 1)
            tables.append((first, second, table))
    return tables


@pytest.mark.parametrize("law", ["iid", "without_replacement"])
def test_draws_of_different_nodes_and_rounds_are_independent(law):
    """No key is used twice: every pair of draws of a tree, and of the next round's tree, has its exact joint law."""
    q = np.array([0.45, 0.3, 0.25])
    rows, shape = 6000, sj.Topology.from_schedule((2, 2))
    drafter = ssm(table_model(np.log(q)), shape, law)
    state = drafter.init(drafter.params, jnp.zeros((rows, 128), jnp.int32), jnp.ones(rows, jnp.int32), None)
    propose = jax.jit(drafter.propose)
    drawn = []
    for length in (2, 3):
        emission = Emission(jnp.zeros((rows, 3), jnp.int32), jnp.ones(rows, jnp.int32), jnp.zeros((rows, 3), jnp.int32))
        state = drafter.commit(drafter.params, state, emission, None)
        warp = stack_warps([sj.Warp(1.0)] * rows)
        keys = round_keys(range(rows), [length] * rows)
        tree, state = propose(drafter.params, keys, state, jnp.zeros(rows, jnp.int32), warp)
        drawn.append(np.asarray(tree.draw_tokens)[:, [0, 1, 4]].reshape(rows, 6))  # slots 0, 1, 4 are expanded
    draws = np.concatenate(drawn, axis=1)
    second = (
        q if law == "iid" else np.array([sum(q[x] * q[y] / (1 - q[x]) for x in range(3) if x != y) for y in range(3)])
    )
    alone = [q, second] * 6
    for first, other, table in pair_tables(draws, 3):
        want = np.outer(alone[first], alone[other])
        if law == "without_replacement" and first // 2 == other // 2:
            want = np.array([[0 if x == y else q[x] * q[y] / (1 - q[x]) for x in range(3)] for y in range(3)])
        used = want > 0
        assert table[~used].sum() == 0
        statistic = np.sum((table[used] - rows * want[used]) ** 2 / (rows * want[used]))
        assert statistic < 35, (first, other)  # 8 degrees of freedom: 35 is one in 40,000


@pytest.mark.parametrize(
    ("spec", "law", "message"),
    [
        ((3,), "top_k", "unknown proposal law"),
        (0, "iid", "at least one level"),
        ((17,), "deterministic", "17 draws"),
        ([[16]], "without_replacement", "17 draws"),
        ((3,), "hub", "at most 2 draws"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused(spec, law, message):
    """B27: wider than the vocabulary, or than the law allows."""
    with pytest.raises(ValueError, match=message):
        ssm(context(0), tight_topology(spec), law)


def test_a_tree_as_wide_as_the_vocabulary_is_fine():
    """B27: width V, and i.i.d. draws may be more than V."""
    assert ssm(context(0), tight_topology((VOCAB,)), "deterministic").max_depth == 1
    assert ssm(context(0), tight_topology((20,)), "iid").max_depth == 1


def test_functions_are_the_same_objects_per_architecture_law_and_shape():
    """B39: what compiled code is looked up by."""
    one, two = ssm(context(0), topology(2), "iid"), ssm(context(1), topology((3, 2)), "iid")
    assert one[:3] == two[:3]
    assert ssm(context(0), topology(2), "deterministic")[:3] != one[:3]
