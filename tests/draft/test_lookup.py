"""Prompt lookup against a search in plain Python, round after round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.draft import ensemble, prompt_lookup, ssm
from specjax.sampling import stack_warps
from specjax.testing import table_model
from specjax.tree import check_tree
from specjax.types import Emission
from tests.helpers import VOCAB, context, prompts_of, round_keys, slot_paths, topology

BRANCHES, LENGTH, MIN_MATCH, MAX_MATCH = 3, 4, 2, 3


def reference(text: list[int]) -> list[tuple[int, ...]]:
    """The paths to follow, best first."""
    ranked = []
    for start in range(1, len(text)):  # what follows a match begins here
        matched = 0
        while matched < min(start, MAX_MATCH) and text[start - 1 - matched] == text[-1 - matched]:
            matched += 1
        copy = list(text)
        for place in range(LENGTH):
            copy.append(copy[start + place])
        if matched >= MIN_MATCH:
            ranked.append((-matched, -start, tuple(copy[len(text) :])))
    paths = []
    for *_, path in sorted(ranked):
        if path not in paths:
            paths.append(path)
    return paths[:BRANCHES]


def check_row(tree: sj.TokenTree, text: list[int]) -> int:
    """Compare one row's tree with the reference; returns its number of paths."""
    check_tree(tree)
    assert tree.tokens[0] == text[-1]
    wanted = reference(text)
    nodes = {(): None} | {path[:depth]: None for path in wanted for depth in range(1, LENGTH + 1)}
    paths = {
        slot: tuple(int(tree.tokens[at]) for at in path) for slot, path in slot_paths(tree.parents, tree.valid).items()
    }
    assert sorted(paths.values()) == sorted(nodes)
    for slot, path in paths.items():
        depth = len(path)
        children = list(dict.fromkeys(other[depth] for other in wanted if other[:depth] == path and depth < LENGTH))
        assert tree.draw_tokens[slot][tree.draw_valid[slot]].tolist() == children
        assert (tree.q_rows[slot, 0] >= 0) == bool(children)
        if children:  # what the law deterministic would draw from q
            q = tree.q[tree.q_rows[slot, 0]]
            np.testing.assert_allclose(q.sum(), 1, atol=1e-6)
            assert np.argsort(-q, kind="stable")[: len(children)].tolist() == children
            assert np.count_nonzero(q) == len(children)
    invalid = ~tree.valid
    assert np.all(tree.parents[invalid] == -1) and not np.any(tree.draw_valid[invalid])
    return len(wanted)


def test_drafts_equal_a_plain_search_round_after_round():
    """B24: rows without a match, with one, with several; texts that repeat themselves; rows that emit nothing."""
    rng = np.random.default_rng(0)
    batch, capacity = 32, 64
    texts = [rng.integers(0, 3 + row % 4, rng.integers(1, 24)).tolist() for row in range(batch)]
    texts[0], texts[1], texts[2] = [5], [2] * 9, [1, 2, 3] * 4
    tokens = np.full((batch, capacity), 2, np.int32)  # padding that looks like text
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    drafter = prompt_lookup(VOCAB, branches=BRANCHES, length=LENGTH, min_match=MIN_MATCH, max_match=MAX_MATCH)
    assert (drafter.laws, drafter.max_depth, drafter.max_positions) == (("deterministic",), LENGTH, None)
    state = drafter.init(None, jnp.asarray(tokens), jnp.array([len(text) for text in texts]), None)
    propose = jax.jit(drafter.propose)
    warp, seen = stack_warps([sj.Warp()] * batch), set()
    for _ in range(6):
        counts = rng.integers(0, LENGTH + 2, batch)
        emitted = rng.integers(0, 3, (batch, LENGTH + 1)).astype(np.int32)
        emission = Emission(jnp.asarray(emitted), jnp.asarray(counts), jnp.zeros((batch, LENGTH + 1), jnp.int32))
        state = drafter.commit(None, state, emission, None)
        texts = [text + own[:count].tolist() for text, own, count in zip(texts, emitted, counts)]
        keys = round_keys(range(batch), [len(text) for text in texts])
        trees, state = propose(None, keys, state, jnp.array([text[-1] for text in texts]), warp)
        trees = jax.tree.map(np.asarray, trees)
        seen |= {check_row(jax.tree.map(lambda field, row=row: field[row], trees), texts[row]) for row in range(batch)}
    assert seen == {0, 1, 2, 3}


def test_text_is_that_of_incremental_decoding_alone_and_merged_and_compiles_once():
    """B03, B05, B25, B39: greedy and sampled; rows with and without matches; other texts are other data."""
    traced = []
    lookup = prompt_lookup(VOCAB, min_match=1)
    assert lookup == prompt_lookup(VOCAB, min_match=1)  # the same functions, so compiled code is reused

    def propose(*args):
        traced.append(1)
        return lookup.propose(*args)

    counted = lookup._replace(propose=propose)
    merged = ensemble([ssm(context(0), topology((3, 2)), "deterministic"), lookup])
    warps = [sj.Warp(0.0), sj.Warp(0.0), sj.Warp(0.7), sj.Warp(1.0)]
    options = dict(warp=warps, seeds=[1, 2, 3, 4], eos_ids=(), max_new_tokens=40)
    for prompts in ([[4], [1, 2, 3] * 5, *prompts_of([9, 12])], prompts_of([5, 9, 12, 1], seed=1)):
        plain = sj.generate(context(0), prompts, **options)
        alone = sj.generate(context(0), prompts, drafts=[counted], **options)
        assert alone.tokens == plain.tokens
        if prompts[0] == [4]:  # two unlike tokens have no match, so the first round's tree is a lone root
            assert plain.tokens[0][0] != 4
            assert (alone.rounds[0][0].drafted, alone.rounds[0][0].emitted) == (0, 1)
    assert len(traced) == 1
    both = sj.generate(context(0), prompts, drafts=[merged], **options)
    assert both.tokens == plain.tokens
    assert both.stats.tokens_per_step > 2


def test_a_text_that_repeats_itself_is_followed_for_the_whole_length():
    """A copy that reaches the end goes on with itself: 0, 1, 2, 0, 1, 2, .. is drafted as far as the tree is deep."""
    target = table_model(10 * np.roll(np.eye(3), 1, axis=1))  # 0 -> 1 -> 2 -> 0
    result = sj.generate(target, [[0, 1, 2, 0]], drafts=[prompt_lookup(3, length=8, branches=1)], max_new_tokens=28)
    assert [item.accepted for item in result.rounds[0]] == [8, 8, 8]
    assert result.tokens[0] == [(1 + step) % 3 for step in range(28)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(branches=0), "branches is 0; expected an integer >= 1"),
        (dict(length=0), "length is 0"),
        (dict(length=True), "length is True"),
        (dict(min_match=0), "min_match is 0"),
        (dict(branches=64, length=64), "64 branches of 64 and the root; trees have at most 4096 nodes"),
        (dict(min_match=1, max_match=True), "max_match is True"),
        (dict(min_match=3, max_match=2), "max_match is 2; expected an integer >= min_match=3"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        prompt_lookup(VOCAB, **arguments)


def test_another_vocabulary_and_a_biased_verifier_are_refused():
    with pytest.raises(ValueError, match="share one vocabulary"):
        sj.generate(context(0), [[1]], drafts=[prompt_lookup(VOCAB + 1)])
    with pytest.raises(ValueError, match="would bias the text for deterministic draws"):
        sj.generate(context(0), [[1]], drafts=[prompt_lookup(VOCAB)], verifier="multi_step", warp=sj.Warp())
