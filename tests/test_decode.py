"""The round and its state: tree passes, commits, positions, slots that are used again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import decode, prefill
from specjax.request import prepare
from specjax.testing import random_parents
from specjax.types import TreeMask
from tests.helpers import MIXED, context, fresh_logits, logits_after, prompts_of, row_kinds, slot_paths, tiny, topology

NODES = 12
prefilled = jax.jit(prefill.prefill, static_argnums=0)
passed = jax.jit(lambda forward, *inputs: forward(*inputs), static_argnums=0)
committed = jax.jit(lambda cache, rows, counts: cache.commit(rows, counts))


def padded(texts) -> tuple[jax.Array, jax.Array]:
    tokens = np.zeros((len(texts), 128), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return jnp.asarray(tokens), jnp.array([len(text) for text in texts])


def relabel(parents: np.ndarray, order: list[int]) -> np.ndarray:
    """The same tree with old slot order[i] in slot i."""
    place = {old: new for new, old in enumerate(order)}
    return np.array([place[int(parents[old])] if parents[old] >= 0 else -1 for old in order])


def orders(parents: np.ndarray) -> dict[str, list[int]]:
    depth = [len(slot_paths(parents, np.ones(NODES, bool))[slot]) for slot in range(NODES)]

    def below(slot):
        return [slot] + [node for child in np.flatnonzero(parents == slot) for node in below(int(child))]

    return {
        "depth first": below(0),
        "breadth first": sorted(range(NODES), key=lambda slot: depth[slot]),
        "any": [0, *np.random.default_rng(5).permutation(np.arange(1, NODES)).tolist()],
    }


@pytest.mark.parametrize("name", ["tiny", "context"])
def test_a_tree_pass_equals_fresh_passes_and_its_commit_a_fresh_prefill(name):
    """B01, B24: every node's logits in every slot order, for ragged rows; then a random accepted path is committed."""
    model = tiny(0) if name == "tiny" else context(0)
    rng = np.random.default_rng(0)
    texts = prompts_of([6, 11, 3], model.vocab_size)
    parents = [random_parents(rng, NODES) for _ in texts]
    node_tokens = rng.integers(0, model.vocab_size, (3, NODES))
    tokens, lengths = padded(texts)
    *_, cache = prefilled(model.forward, model.params, model.init_cache(3, 128), tokens, lengths)
    for order in ("depth first", "breadth first", "any"):
        slots = [orders(row)[order] for row in parents]
        moved = np.stack([relabel(row, order) for row, order in zip(parents, slots)])
        fed = np.stack([row[order] for row, order in zip(node_tokens, slots)])
        paths = [slot_paths(row, np.ones(NODES, bool)) for row in moved]
        depths = np.array([[len(path[slot]) for slot in range(NODES)] for path in paths])
        mask = TreeMask(lengths, jax.vmap(sj.ancestor_mask)(jnp.asarray(moved)))
        positions = lengths[:, None] + depths
        out = passed(model.forward, model.params, jnp.asarray(fed), positions, mask, cache)
        scored, chosen = np.asarray(out.logits), []
        for row, text in enumerate(texts):
            for slot in range(NODES):
                path = [0, *paths[row][slot]]
                want = logits_after(model, text + [int(fed[row, at]) for at in path])
                np.testing.assert_allclose(scored[row, slot], want, atol=1e-4)
            chosen.append([0, *paths[row][int(rng.integers(NODES))]])
        counts = np.array([len(path) for path in chosen])
        rows = np.array([path + [0] * (NODES - len(path)) for path in chosen])
        after = committed(out.cache, jnp.asarray(rows), jnp.asarray(counts))
        whole = [text + [int(fed[row, at]) for at in chosen[row]] for row, text in enumerate(texts)]
        *_, fresh = prefilled(model.forward, model.params, model.init_cache(3, 128), *padded(whole))
        np.testing.assert_array_equal(after.lengths, fresh.lengths)
        for ours, theirs in zip((*after.k, *after.v), (*fresh.k, *fresh.v)):
            for row, text in enumerate(whole):
                np.testing.assert_allclose(ours[row, :, : len(text)], theirs[row, :, : len(text)], atol=1e-5)
    # The reference is not blind: one position off is far outside the tolerance.
    wrong = passed(model.forward, model.params, jnp.asarray(fed), positions + 1, mask, cache)
    assert np.abs(wrong.logits - out.logits).max() > 1e-2


def plan_of(prompts, kinds, seeds=1, **options):
    draft = row_kinds(context(0), kinds)
    return prepare(context(0), prompts, drafts=[draft], tree=topology((3, 2, 1, 1)), eos_ids=(), seeds=seeds, **options)


PROMPTS = prompts_of([5, 9, 12, 1])


def test_every_round_keeps_positions_without_gaps():
    """B03: after each round the cache holds exactly the text but its last token, each at its position, in each row."""
    plan = plan_of(PROMPTS, [0, 1, 2, 2], max_new_tokens=[30, 9, 30, 1])
    marks = np.asarray(context(0).params[0])
    state = plan.start()
    for _ in range(40):
        lengths, tokens = np.asarray(state.lengths), np.asarray(state.tokens)
        np.testing.assert_array_equal(state.cache.lengths, lengths - 1)
        for row in range(4):
            kept = np.asarray(state.cache.k[0][row, 0, : lengths[row] - 1, 0])
            np.testing.assert_array_equal(kept, marks[np.arange(lengths[row] - 1), tokens[row, : lengths[row] - 1]])
            assert not np.any(tokens[row, lengths[row] :])
        if not np.any(state.running):
            break
        before = lengths
        state, info = decode.run_round(plan.spec, plan.params, state)
        np.testing.assert_array_equal(state.lengths, before + info.emission.counts)
        assert np.all((np.asarray(info.emission.counts) > 0) == (before < np.asarray(state.limits)))
    assert lengths.tolist() == [5 + 30, 9 + 9, 12 + 30, 1 + 1]
    assert np.asarray(state.reasons).tolist() == [decode.LENGTH] * 4


def poison(state: decode.DecodeState, row: int) -> decode.DecodeState:
    """NaN, and nonsense where there is no NaN, in everything that a row holds."""

    def spoil(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return leaf.at[row].set(jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 1)

    return jax.tree.map(spoil, state)


def texts_of(state: decode.DecodeState) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(np.asarray(state.tokens), np.asarray(state.lengths))]


def test_a_freed_slot_serves_a_new_request():
    """B25: rows end after 1, 7 and 30 tokens; a poisoned slot is used again; all equal their solo runs."""
    options = dict(warp=sj.Warp(1.0))
    plan = plan_of(PROMPTS, [MIXED] * 4, seeds=[1, 2, 3, 4], max_new_tokens=[1, 7, 30, 40], **options)
    alone = plan_of([PROMPTS[0][::-1]], [MIXED], seeds=9, max_new_tokens=25, **options)
    whole = decode.run_decode(plan.spec, plan.params, plan.start())
    solo = decode.run_decode(alone.spec, alone.params, alone.start())
    want, want_new = texts_of(whole), texts_of(solo)[0]

    state = plan.start()
    for _ in range(6):
        state, _ = decode.run_round(plan.spec, plan.params, state)
    assert np.asarray(state.running).tolist() == [False, False, True, True]
    finished = texts_of(state)[1]
    state = decode.replace_row(poison(state, 0), 0, alone.start())
    state = decode.run_decode(plan.spec, plan.params, state)
    assert texts_of(state) == [want_new, *want[1:]]
    assert finished == want[1]
    # Naive sampling's text cannot show what was drafted; the rounds do.
    for got, new, old in zip(state.rounds, solo.rounds, whole.rounds):
        np.testing.assert_array_equal(got[0], new[0])
        np.testing.assert_array_equal(got[1:], old[1:])
    emitted = np.asarray(state.rounds.emitted).sum(axis=1)
    assert emitted.tolist() == [24, 6, 29, 39]  # the freed request's rounds are gone, finished rows ran none
    for leaf in (*state.cache.k, *state.cache.v):
        assert np.all(np.isfinite(leaf[:, :, :20]))


def test_a_decoder_never_reads_what_a_former_request_left():
    """B25: the transformer's caches filled with NaN in a row before its slot is used again."""
    prompts = prompts_of([6, 3, 11], 64)
    options = dict(drafts=[tiny(1)], tree=topology((3, 2, 1, 1)), eos_ids=(), max_new_tokens=20)
    plan, alone = prepare(tiny(0), prompts, **options), prepare(tiny(0), [prompts[1] + [5]], **options)
    want = texts_of(decode.run_decode(plan.spec, plan.params, plan.start()))
    state = decode.replace_row(poison(plan.start(), 2), 2, alone.start())
    # Behind every row's own length, too.
    stale = jnp.arange(128)[None, None, :, None] >= state.lengths[:, None, None, None]
    spoil = lambda cache: dataclasses.replace(
        cache,
        k=tuple(jnp.where(stale, jnp.nan, leaf) for leaf in cache.k),
        v=tuple(jnp.where(stale, jnp.nan, leaf) for leaf in cache.v),
    )
    drafter = state.drafter._replace(cache=spoil(state.drafter.cache))
    state = dataclasses.replace(state, cache=spoil(state.cache), drafter=drafter)
    texts = texts_of(decode.run_decode(plan.spec, plan.params, state))
    assert texts[:2] == want[:2]
    greedy = list(prompts[1] + [5])
    for _ in range(20):
        greedy.append(int(np.argmax(logits_after(tiny(0), greedy))))
    assert texts[2] == greedy


def test_a_python_loop_may_take_the_while_loops_place():
    plan = plan_of(PROMPTS, [0, 1, 2, 2], max_new_tokens=12)
    calls = []

    def python_loop(condition, body, state):
        step = jax.jit(body)
        while condition(state):
            calls.append(1)
            state = step(state)
        return state

    texts = texts_of(decode.decode(plan.spec, plan.params, plan.start(), loop_fn=python_loop))
    assert texts == texts_of(decode.run_decode(plan.spec, plan.params, plan.start()))
    assert len(calls) == 11  # the hostile row's


def test_one_warp_may_serve_target_and_draft():
    """B39: the state is donated; an array given for two of its fields is not donated twice, nor lost to the caller."""
    plan = plan_of(PROMPTS, [0, 1, 2, 2], max_new_tokens=12)
    inputs = (*plan.inputs[:-1], plan.inputs[-2])
    start = decode.run_start(plan.spec, plan.params, *inputs)
    texts = texts_of(decode.run_decode(plan.spec, plan.params, start))
    again = decode.run_start(plan.spec, plan.params, *inputs)
    assert texts_of(decode.run_decode(plan.spec, plan.params, again)) == texts


def test_fresh_logits_need_no_cache():
    assert fresh_logits(context(0), [1, 2, 3]).shape == (3, 16)
