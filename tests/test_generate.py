"""Texts: speculation never changes them, whatever is drafted, verified, batched, stopped or streamed."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.testing import reference_text, table_model, total_variation
from tests.helpers import (
    BOUNDS,
    HOSTILE,
    MIXED,
    PERFECT,
    VOCAB,
    chi_square_z,
    context,
    prompts_of,
    row_kinds,
    tiny,
    topology,
)

PROMPTS = prompts_of([5, 9, 12, 1])
SHAPES = [
    0,
    1,
    2,
    4,
    (4,),
    (3, 2),
    (3, 2, 1, 1),
    (1, 1, 3, 1),
    (4, 1, 1, 1),
    (2, 2, 1),
    [[0], [1], [0, 0], [1, 1], [1, 1, 0], [1, 1, 0, 1]],
    [[3], [1], [3, 2], [3, 2, 0]],
]
KINDS = {"perfect": [PERFECT] * 4, "hostile": [HOSTILE] * 4, "mixed": [MIXED] * 4, "rows": [0, 1, 2, 2]}


def generate(prompts=PROMPTS, *, eos_ids=(), **options) -> sj.Generation:
    """generate with the defaults of these tests; a batch of four, a capacity of 128."""
    return sj.generate(context(0), prompts, eos_ids=eos_ids, **options)


def speculate(spec, kinds=(0, 1, 2, 2), prompts=PROMPTS, *, source: int = 0, **options) -> sj.Generation:
    """generate with a topology padded to BOUNDS, so that all share one executable per mode and verifier."""
    draft = row_kinds(context(source), kinds)
    return generate(prompts, drafts=[draft], tree=topology(spec), **options)


def check_records(result: sj.Generation, budgets, depth: int):
    """Rounds, steps and tokens per step follow from one another; the token of prefill is in none of them."""
    steps = emitted = 0
    for row, (tokens, rounds) in enumerate(zip(result.tokens, result.rounds)):
        assert len(tokens) <= budgets[row]
        assert sum(item.emitted for item in rounds) == max(len(tokens) - 1, 0)
        for index, item in enumerate(rounds):
            assert 1 <= item.emitted <= depth + 1
            assert item.accepted in (item.emitted, item.emitted - 1)
            if index < len(rounds) - 1:
                assert item.accepted == item.emitted - 1
            assert item.drafted == sum(item.drafted_by_depth)
            assert sum(item.accepted_by_depth) == item.accepted
            assert all(taken <= drafted for taken, drafted in zip(item.accepted_by_depth, item.drafted_by_depth))
        steps += len(rounds)
        emitted += sum(item.emitted for item in rounds)
    assert result.stats.verify_steps == steps
    if steps:
        assert result.stats.tokens_per_step == emitted / steps
    else:
        assert np.isnan(result.stats.tokens_per_step)


# Greedy


def test_incremental_decoding_is_the_reference_text():
    """B04: 1 or 5 or 30 tokens, the first of them the one that prefill chose."""
    result = generate(max_new_tokens=[30, 1, 5, 12])
    for row, (prompt, budget) in enumerate(zip(PROMPTS, [30, 1, 5, 12])):
        assert result.tokens[row] == reference_text(context(0), prompt, budget)
    assert result.finish_reasons == ["length"] * 4
    check_records(result, [30, 1, 5, 12], 0)
    assert result.stats.verify_steps == 29 + 0 + 4 + 11
    assert result.stats.tokens_per_step == 1


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("spec", SHAPES, ids=str)
def test_greedy_text_does_not_depend_on_the_tree_or_draft(spec, kinds):
    """B03, B05, B24: every shape and draft gives the incremental text; hostile rows accept nothing."""
    result = speculate(spec, KINDS[kinds], max_new_tokens=40)
    assert result.tokens == generate(max_new_tokens=40).tokens
    depth = topology(spec).depths.max()
    check_records(result, [40] * 4, depth)
    for row, kind in enumerate(KINDS[kinds]):
        *rounds, last = result.rounds[row]
        if kind == PERFECT and (spec in (0, 1, 2, 4) or isinstance(spec, tuple)):
            assert all(item.accepted == depth for item in rounds)
            assert last.emitted == 39 - len(rounds) * (depth + 1)
        if kind == HOSTILE:
            assert all(item.accepted == 0 for item in (*rounds, last))


def test_tight_topologies_do_as_padded_ones():
    kinds = [0, 1, 2, 2]
    tight = generate(drafts=[row_kinds(context(0), kinds)], tree=(3, 2), max_new_tokens=25)
    padded = speculate((3, 2), kinds, max_new_tokens=25)
    assert tight.tokens == padded.tokens == generate(max_new_tokens=25).tokens
    for ours, theirs in zip(tight.rounds, padded.rounds):
        assert [item[:3] for item in ours] == [item[:3] for item in theirs]
        assert [(*item.drafted_by_depth, 0, 0) for item in ours] == [item.drafted_by_depth for item in theirs]


@pytest.mark.parametrize("mode", ["iid", "without_replacement"])
@pytest.mark.parametrize("verifier", ["naive_sampling", "multi_step", "without_replacement"])
def test_greedy_text_does_not_depend_on_how_drafts_are_drawn(mode, verifier):
    if (mode, verifier) == ("without_replacement", "multi_step"):
        with pytest.raises(ValueError, match="would bias"):
            speculate((3, 2), draft_mode=mode, verifier=verifier)
        return
    result = speculate((3, 2, 1, 1), draft_mode=mode, verifier=verifier, seeds=[1, 2, 3, 4], max_new_tokens=40)
    assert result.tokens == generate(max_new_tokens=40).tokens
    check_records(result, [40] * 4, 4)


def unlike_drafts(*kinds: int) -> list[sj.Model]:
    """Models of one forward, so that ensembles of as many share an executable; the second is of other weights."""
    return [row_kinds(context(index % 2), [kind] * 4) for index, kind in enumerate(kinds)]


@pytest.mark.parametrize("drafts", [2, 3])
def test_ensembles_give_the_incremental_text(drafts):
    """Merged trees of unlike drafts: greedy, and at temperature 0.7 and 1 with the same seeds."""
    models = unlike_drafts(MIXED, PERFECT, HOSTILE)[:drafts]
    options = dict(warp=[sj.Warp(0.0), sj.Warp(0.7), sj.Warp(1.0), sj.Warp(1.0, 5, 0.9)], seeds=[1, 2, 3, 4])
    plain = generate(max_new_tokens=40, **options)
    for spec in (4, (3, 2), (2, 2, 1, 1), [[0], [1], [0, 0], [1, 0], [1, 0, 1]]):
        result = generate(drafts=models, tree=topology(spec), max_new_tokens=40, **options)
        assert result.tokens == plain.tokens
        check_records(result, [40] * 4, BOUNDS.depth)


def test_an_ensemble_accepts_what_its_best_member_would():
    alone = speculate((1, 1, 1, 1), [PERFECT] * 4, max_new_tokens=21)
    models = unlike_drafts(HOSTILE, MIXED, PERFECT)
    together = generate(drafts=models, tree=topology((1, 1, 1, 1)), max_new_tokens=21)
    assert alone.stats.verify_steps == together.stats.verify_steps == 4 * 4
    assert [item.accepted for item in together.rounds[0]] == [4, 4, 4, 4]


# Four paths of at most these ranks fit into BOUNDS.
path_ends = st.tuples(*(st.integers(0, arity - 1) for arity in BOUNDS.arities), st.integers(1, 4)).map(
    lambda ranks: ranks[: ranks[-1]]
)


@settings(max_examples=15)
@given(
    st.lists(path_ends, min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.integers(1, 20), min_size=4, max_size=4),
    st.integers(0, 1000),
)
def test_random_topologies_give_the_incremental_text(ends, kinds, lengths, seed):
    tree = sj.Topology.from_paths(list({path[:end] for path in ends for end in range(1, len(path) + 1)}))
    prompts = prompts_of(lengths, seed=seed)
    options = dict(warp=[sj.Warp(0.0)] * 2 + [sj.Warp(1.0)] * 2, seeds=seed, max_new_tokens=25)
    draft = row_kinds(context(0), kinds)
    result = generate(prompts, drafts=[draft], tree=tree.pad(BOUNDS), **options)
    assert result.tokens == generate(prompts, **options).tokens


def test_a_decoder_gives_the_reference_text_with_every_draft():
    """B01, B05: a model with rotary positions, trees with siblings, and a draft that shares its weights."""
    target = tiny(0)
    prompts = prompts_of([6, 3, 11], 64)
    want = [reference_text(target, prompt, 30) for prompt in prompts]
    plain = sj.generate(target, prompts, max_new_tokens=30)
    assert plain.tokens == want
    for source in (0, 1):
        for spec in ((3, 2, 1, 1), (1, 1, 3), 4, [[1], [0], [1, 0], [0, 1], [0, 1, 1]]):
            result = sj.generate(target, prompts, drafts=[tiny(source)], tree=topology(spec), max_new_tokens=30)
            assert result.tokens == want
            if source == 0 and spec == 4:
                assert [item.accepted for item in result.rounds[0]][:-1] == [4] * 5


def test_no_child_but_the_argmax_is_accepted():
    """B05: logits [1, 1.9, 2, 0], children {0, 1}: nothing is accepted and 2 is emitted."""
    target, draft = table_model([1.0, 1.9, 2.0, 0.0]), table_model([2.0, 1.0, 0.0, -1.0])
    result = sj.generate(target, [[0]], drafts=[draft], tree=(2, 2), max_new_tokens=8)
    assert result.tokens == [[2] * 8]
    assert all(item == sj.Round(6, 0, 1, (2, 4), ()) for item in result.rounds[0])


def test_ties_go_to_the_lowest_id_everywhere():
    """B06: 5 and 9 tie at the maximum and the children are [9, 5]; always 5."""
    logits = np.zeros(12)
    logits[[5, 9]] = 2.0
    likes = np.zeros(12)
    likes[[5, 9]] = 2.0, 3.0
    target = table_model(logits)
    assert sj.generate(target, [[1]], max_new_tokens=6).tokens == [[5] * 6]
    result = sj.generate(target, [[1]], drafts=[table_model(likes)], tree=(2, 1), max_new_tokens=6)
    assert result.tokens == [[5] * 6]
    # 9 first: the second node 5 is accepted, its child 9 never is.
    assert all(item.accepted == 1 for item in result.rounds[0][:-1])


# Temperature


@pytest.mark.parametrize("mode", ["top_k", "iid", "without_replacement"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_naive_sampling_gives_the_incremental_text_of_the_seed(mode, temperature):
    """B09, B16: plain, top-k and top-p rows of one batch, whatever is drafted and from whatever distribution."""
    warp = [sj.Warp(temperature), sj.Warp(temperature, 3), sj.Warp(temperature, 0, 0.8), sj.Warp(temperature, 6, 0.9)]
    seeds = [11, 12, 13, 11]
    plain = generate(warp=warp, seeds=seeds, max_new_tokens=40)
    for row in range(4):
        assert plain.tokens[row] == reference_text(context(0), PROMPTS[row], 40, warp=warp[row], seed=seeds[row])
    accepted = 0
    for spec in ((3, 2, 1, 1), 4, [[3], [1], [3, 2], [3, 2, 0]]):
        for draft_warp in (None, sj.Warp(0.3), sj.Warp(2.0, 8)):
            result = speculate(spec, warp=warp, seeds=seeds, max_new_tokens=40, draft_mode=mode, draft_warp=draft_warp)
            assert result.tokens == plain.tokens
            check_records(result, [40] * 4, 4)
            accepted += sum(item.accepted for row in result.rounds for item in row)
    assert accepted > 100


def test_greedy_rows_stay_greedy_among_sampled_ones():
    """B09: temperature 0 beside temperature 1, with a rule that looks at the draws."""
    warp = [sj.Warp(0.0), sj.Warp(1.0), sj.Warp(0.0), sj.Warp(0.9, 4)]
    greedy = generate(max_new_tokens=40)
    for mode, verifier in [("iid", "multi_step"), ("without_replacement", "without_replacement")]:
        result = speculate((3, 2, 1, 1), warp=warp, draft_mode=mode, verifier=verifier, seeds=5, max_new_tokens=40)
        assert result.tokens[0] == greedy.tokens[0]
        assert result.tokens[2] == greedy.tokens[2]


@pytest.mark.parametrize("mode", ["top_k", "iid", "without_replacement"])
def test_a_temperature_near_zero_is_greedy(mode):
    """B11: T=1e-6 gives finite laws and the greedy text, also with one-hot residuals and -inf logits."""
    verifier = {"top_k": "naive_sampling", "iid": "multi_step", "without_replacement": "without_replacement"}[mode]
    result = speculate(
        (3, 2, 1, 1), (0, 0, 2, 2), warp=sj.Warp(1e-6), draft_mode=mode, verifier=verifier, seeds=3, max_new_tokens=40
    )
    assert result.tokens == generate(max_new_tokens=40).tokens


# Laws of the text: 20,000 rows of one prompt each, seeds 0..19999

ROWS = 20_000
P_TABLE = np.array([[0.4, 0.3, 0.2, 0.1], [0.05, 0.15, 0.5, 0.3], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
Q_TABLE = np.array([[0.5, 0.25, 0.15, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.1, 0.4, 0.4, 0.1]])


def sample_texts(p_logits, q_logits, tree, budget: int, **options):
    drafts = [table_model(logits) for logits in q_logits]
    result = sj.generate(
        table_model(p_logits),
        [[0]] * ROWS,
        drafts=drafts,
        tree=tree,
        max_new_tokens=budget,
        seeds=range(ROWS),
        eos_ids=(),
        **options,
    )
    return np.array(result.tokens), result


@pytest.mark.parametrize(
    ("mode", "verifier", "sources"),
    [
        ("top_k", "naive_sampling", 1),
        ("top_k", "naive_sampling", 2),
        ("iid", "multi_step", 1),
        ("iid", "multi_step", 2),
        ("without_replacement", "without_replacement", 1),
        ("iid", "naive_tree", 1),
    ],
)
def test_the_texts_law_is_the_targets(mode, verifier, sources):
    """B07: joint law of three tokens behind the prompt for every pairing; children of one draft, or of two merged."""
    drafts = [np.log(Q_TABLE), np.log(Q_TABLE[::-1])][:sources]
    texts, result = sample_texts(
        np.log(P_TABLE), drafts, (2, 2), 4, draft_mode=mode, verifier=verifier, warp=sj.Warp(1.0)
    )
    want = np.einsum("a,ab,bc,cd->abcd", P_TABLE[0], P_TABLE, P_TABLE, P_TABLE)
    counts = np.zeros((4,) * 4)
    np.add.at(counts, tuple(texts.T), 1)
    assert chi_square_z(counts, ROWS * want) < 4
    for first, second in ((0, 1), (1, 2), (2, 3)):
        other = tuple({0, 1, 2, 3} - {first, second})
        assert total_variation(counts.sum(other) / ROWS, want.sum(other)) < 0.02
    # The text differs from the one that is not drafted unless sampling is naive, so this was no trivial agreement.
    accepted = np.mean([item.accepted for row in result.rounds for item in row])
    assert 0.2 < accepted < 1.9
    assert np.mean([len(row) for row in result.rounds]) < 2.9


def test_filters_hold_at_every_position():
    """B09: T=.5, top_k=2 on [2, 1, 0, -1, -2] with a uniform draft: accepted, corrected and bonus tokens in {0, 1}."""
    law = np.array([0.8808, 0.1192, 0, 0, 0])
    for mode, verifier in [("iid", "naive_sampling"), ("iid", "multi_step")]:
        texts, result = sample_texts(
            [2.0, 1, 0, -1, -2],
            [np.zeros(5)],
            (1, 1),
            4,
            draft_mode=mode,
            verifier=verifier,
            warp=sj.Warp(0.5, 2),
            draft_warp=sj.Warp(1.0),
        )
        classes = {"prefill": texts[:, 0], "accepted": [], "correction": [], "bonus": []}
        for row, rounds in enumerate(result.rounds):
            at = 1
            for item in rounds:
                classes["accepted"] += texts[row, at : at + item.accepted].tolist()
                if item.emitted > item.accepted:
                    name = "bonus" if item.accepted == 2 else "correction"
                    classes[name].append(texts[row, at + item.accepted])
                at += item.emitted
        for name, tokens in classes.items():
            counts = np.bincount(tokens, minlength=5)
            assert counts[2:].sum() == 0
            if verifier == "naive_sampling" or name in ("prefill", "bonus"):
                assert total_variation(counts / counts.sum(), law) < 0.02, (verifier, name)
        for at in range(4):
            assert total_variation(np.bincount(texts[:, at], minlength=5) / ROWS, law) < 0.02


def test_an_empty_residual_is_no_problem():
    """B11: p = q, and children that cover all of p, V = 2, logits of -inf: tokens stay valid, nothing is NaN."""
    logits = np.array([[0.3, -0.4, -np.inf], [-np.inf, 1.0, 0.5], [0.1, -np.inf, 0.2]])
    for mode, verifier in [("iid", "multi_step"), ("without_replacement", "without_replacement")]:
        texts, result = sample_texts(logits, [logits], (2, 2), 4, draft_mode=mode, verifier=verifier, warp=sj.Warp(1.0))
        before = np.concatenate([np.zeros((ROWS, 1), int), texts[:, :-1]], axis=1)
        assert np.all(np.isfinite(logits[before, texts]))
        law = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert total_variation(np.bincount(texts[:, 0], minlength=3) / ROWS, law) < 0.02
        # p = q: the first draw is always accepted.
        assert all(item.accepted == 2 for row in result.rounds for item in row if item.emitted == 3)
        assert all(item.emitted == 3 for row in result.rounds for item in row)


# Seeds


def test_a_row_depends_on_its_own_seed_only():
    """B16: the same seed gives the same text in any row, order, batch and call; other seeds give others."""
    options = dict(warp=sj.Warp(1.0), max_new_tokens=30, draft_mode="iid", verifier="multi_step")
    prompt = PROMPTS[0]
    batch = speculate((3, 2, 1, 1), [2] * 4, [prompt] * 4, seeds=[1, None, 1, 2], **options)
    assert batch.seeds[0] == batch.seeds[2] == 1
    assert batch.seeds[3] == 2
    assert batch.tokens[0] == batch.tokens[2]
    assert len({tuple(tokens) for tokens in batch.tokens}) == 3
    # The seed that was drawn is returned and gives the text again, in another place and with other prompts around it.
    mates = [PROMPTS[1], prompt, prompt, PROMPTS[2]]
    again = speculate((3, 2, 1, 1), [2] * 4, mates, seeds=[9, 2, batch.seeds[1], 7], **options)
    assert again.tokens[1:3] == [batch.tokens[3], batch.tokens[1]]
    solo = speculate((3, 2, 1, 1), [2], [prompt], seeds=1, **options)
    assert solo.tokens[0] == batch.tokens[0]
    assert solo.rounds[0] == batch.rounds[0]


def test_seeds_of_one_call_are_drawn_apart():
    """B16: unseeded rows and calls differ."""
    options = dict(warp=sj.Warp(1.0), max_new_tokens=20)
    first, second = (generate([PROMPTS[0]] * 4, **options) for _ in range(2))
    assert len({*first.seeds, *second.seeds}) == 8
    assert len({tuple(tokens) for tokens in first.tokens + second.tokens}) == 8
    largest = generate([PROMPTS[0]] * 4, seeds=[2**32 - 1, 0, 2**31, np.uint32(2**32 - 1)], **options)
    assert largest.tokens[0] == largest.tokens[3]
    assert largest.tokens[0] != largest.tokens[2] != largest.tokens[1]


def test_a_new_process_gives_the_same_text():
    """B16: seeds mean the same in another process."""
    code = (
        "import specjax as sj; from specjax.testing import context_model;"
        "print(sj.generate(context_model(0, 16), [[1, 2, 3]] * 2, warp=sj.Warp(1.0), seeds=[5, 6],"
        " max_new_tokens=15).tokens)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    here = sj.generate(context(0), [[1, 2, 3]] * 2, warp=sj.Warp(1.0), seeds=[5, 6], max_new_tokens=15)
    assert out.stdout.strip() == str(here.tokens)


# Stopping

CHAIN = 20.0 * np.eye(8)[[1, 2, 3, 4, 5, 6, 7, 0]]  # after token t comes t + 1


def chain_texts(eos_ids, budget=7, draft=CHAIN, prompts=([0], [1], [2], [5])) -> sj.Generation:
    return sj.generate(
        table_model(CHAIN),
        prompts,
        drafts=[table_model(draft)],
        tree=topology(4),
        max_new_tokens=budget,
        eos_ids=eos_ids,
    )


def test_a_stop_token_inside_the_accepted_path_ends_the_text():
    """B17: prefill's, first, middle, last and bonus place; the stop token is included and nothing follows it."""
    for stop in range(1, 8):
        result = chain_texts([stop])
        for row, prompt in enumerate([0, 1, 2, 5]):
            want = [(prompt + step) % 8 for step in range(1, 8)]
            cut = want[: want.index(stop) + 1] if stop in want else want
            assert result.tokens[row] == cut
            assert result.finish_reasons[row] == ("eos" if stop in want else "length")
            left = len(cut) - 1
            counts = [item.emitted for item in result.rounds[row]]
            assert counts == [5] * (left // 5) + ([left % 5] if left % 5 else [])
            # All of a cut round were drafted; a full one has its bonus token.
            assert [item.accepted for item in result.rounds[row]] == [min(count, 4) for count in counts]


def test_a_stop_token_from_prefill_costs_no_round():
    """B04: the first token is a stop token: it is the whole output, no verify step runs."""
    result = chain_texts([1, 2, 3, 6])
    assert result.tokens == [[1], [2], [3], [6]]
    assert result.finish_reasons == ["eos"] * 4
    assert result.stats.verify_steps == 0
    assert np.isnan(result.stats.tokens_per_step)
    assert result.rounds == [[]] * 4


def test_several_stop_tokens_and_none():
    """B17: each id stops; None reads the target's own; () ignores them all."""
    assert chain_texts([7, 3]).tokens[0] == [1, 2, 3]
    assert chain_texts([3, 7]).tokens[2:] == [[3], [6, 7]]
    target = table_model(CHAIN, eos_ids=(2, 5))
    assert sj.generate(target, [[0], [3]], max_new_tokens=9).tokens == [[1, 2], [4, 5]]
    assert sj.generate(target, [[0], [3]], max_new_tokens=4, eos_ids=()).tokens == [[1, 2, 3, 4], [4, 5, 6, 7]]
    # More ids than one pad of them holds.
    assert chain_texts([7] * 9 + [2]).tokens[0] == [1, 2]


def test_a_stop_token_that_is_only_drafted_does_not_stop():
    """B17: the hostile draft proposes the stop token everywhere; the target never emits it."""
    target = np.copy(CHAIN)
    target[6] = 20 * np.eye(8)[1]  # 1 2 3 4 5 6 1 2 ..
    liked = np.tile(5.0 * np.eye(8)[7], (8, 1))
    result = sj.generate(
        table_model(target), [[0]], drafts=[table_model(liked)], tree=(2, 1), max_new_tokens=12, eos_ids=[7]
    )
    assert result.tokens == [[1, 2, 3, 4, 5, 6] * 2]
    assert result.finish_reasons == ["length"]


def test_a_stop_token_in_the_prompt_or_as_padding_is_not_content():
    """B26: rows of 3 and 7 tokens, the pad id 0 is a real token, inside the prompt, and a stop token."""
    prompts = [[0, 3, 0], [1, 0, 0, 2, 0, 5, 4], [0], [7, 0, 7]]
    together = generate(prompts, eos_ids=[0], max_new_tokens=30)
    for row, prompt in enumerate(prompts):
        want = reference_text(context(0), prompt, 30)
        want = want[: want.index(0) + 1] if 0 in want else want
        assert together.tokens[row] == want
    result = speculate((3, 2, 1, 1), prompts=prompts, eos_ids=[0], max_new_tokens=30)
    assert (result.tokens, result.finish_reasons) == (together.tokens, together.finish_reasons)


def test_stop_strings_are_said_not_to_be_offered():
    """B19: the API says so, and refuses them rather than ignoring them."""
    assert "Stop strings" in sj.generate.__doc__.replace("\n", " ")
    for call in (sj.generate, sj.stream):
        with pytest.raises(TypeError, match="stop"):
            call(context(0), [[1]], stop=["STOP"])


@pytest.mark.parametrize("kinds", KINDS)
def test_budgets_are_met_exactly(kinds):
    """B21: the incremental text's first n tokens for every n, mixed in one batch; 0 is empty."""
    full = generate(max_new_tokens=9).tokens
    for budgets in ([0, 1, 2, 3], [4, 5, 6, 9], [9, 0, 1, 5], [0] * 4):
        for spec in (4, (3, 2, 1, 1)):
            result = speculate(spec, KINDS[kinds], max_new_tokens=budgets)
            assert result.tokens == [tokens[:budget] for tokens, budget in zip(full, budgets)]
            assert result.finish_reasons == ["length"] * 4
            check_records(result, budgets, 4)


def test_a_stop_token_at_the_budget_is_the_reason():
    result = chain_texts([3], budget=3)
    assert result.tokens[0] == [1, 2, 3]
    assert result.finish_reasons[0] == "eos"
    assert chain_texts([4], budget=3).finish_reasons[0] == "length"


def test_a_text_may_fill_the_context_to_the_last_position():
    """The tree then hangs over the end of the context; what is emitted is not touched by it."""
    target = tiny(0)
    prompts = prompts_of([100, 90, 124], 64)
    budgets = [28, 38, 4]
    plain = sj.generate(target, prompts, max_new_tokens=budgets)
    assert plain.tokens == [reference_text(target, prompt, budget) for prompt, budget in zip(prompts, budgets)]
    result = sj.generate(target, prompts, drafts=[tiny(0)], tree=topology((3, 2, 1, 1)), max_new_tokens=budgets)
    assert result.tokens == plain.tokens


def test_prompts_longer_than_a_chunk():
    """Prefill in chunks of 128: lengths around the boundary, in one batch and capacity."""
    prompts = prompts_of([127, 128, 129, 200])
    result = generate(prompts, max_new_tokens=20)
    for row, prompt in enumerate(prompts):
        assert result.tokens[row] == reference_text(context(0), prompt, 20)
    drafted = speculate((3, 2, 1, 1), prompts=prompts, max_new_tokens=20)
    assert drafted.tokens == result.tokens


# Batches


def test_rows_are_alone_in_their_batch():
    """B24: perfect, hostile and mixed rows equal batches of one; a permutation only permutes."""
    kinds = [PERFECT, HOSTILE, MIXED, MIXED]
    options = dict(max_new_tokens=40, warp=sj.Warp(1.0), draft_mode="iid", verifier="multi_step")
    seeds = [3, 4, 5, 6]
    together = speculate((3, 2, 1), kinds, seeds=seeds, **options)
    order = [2, 0, 3, 1]
    pick = lambda values: [values[index] for index in order]
    permuted = speculate((3, 2, 1), pick(kinds), pick(PROMPTS), seeds=pick(seeds), **options)
    assert permuted.tokens == pick(together.tokens)
    assert permuted.rounds == pick(together.rounds)
    for row in range(4):
        solo = speculate((3, 2, 1), kinds[row : row + 1], PROMPTS[row : row + 1], seeds=seeds[row], **options)
        assert solo.tokens == [together.tokens[row]]
        assert solo.rounds == [together.rounds[row]]


# Streaming


def joined(steps: list[sj.StreamStep]) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(len(steps[0].tokens))]


def test_a_stream_yields_what_generate_returns():
    """B21: the same tokens and rounds, with per-row budgets and stops; a row is silent once it has finished."""
    options = dict(max_new_tokens=[1, 7, 30, 40], eos_ids=[3], warp=sj.Warp(1.0), seeds=[1, 2, 3, 4])
    whole = speculate((3, 2, 1, 1), **options)
    draft = row_kinds(context(0), (0, 1, 2, 2))
    steps = list(sj.stream(context(0), PROMPTS, drafts=[draft], tree=topology((3, 2, 1, 1)), **options))
    assert joined(steps) == whole.tokens
    assert steps[-1].finish_reasons == whole.finish_reasons
    assert [[step.rounds[row] for step in steps if step.rounds[row]] for row in range(4)] == whole.rounds
    assert steps[0].rounds == [None] * 4
    for step, after in zip(steps, steps[1:]):
        for row in range(4):
            if step.finish_reasons[row]:
                assert after.finish_reasons[row] == step.finish_reasons[row]
                assert after.tokens[row] == []
                assert after.rounds[row] is None
            else:
                assert len(after.tokens[row]) == after.rounds[row].emitted


def test_a_stream_may_be_dropped_and_interleaved():
    """B21: closing in the middle leaves a usable engine; two streams at once do not disturb each other."""
    draft = row_kinds(context(0), (0, 1, 2, 2))
    options = dict(drafts=[draft], tree=topology((3, 2, 1, 1)), eos_ids=(), max_new_tokens=40)
    want = generate(max_new_tokens=40).tokens
    dropped = sj.stream(context(0), PROMPTS, **options)
    seen = [next(dropped) for _ in range(3)]
    other = sj.stream(context(0), PROMPTS[::-1], **options)
    others = [next(other) for _ in range(2)]
    seen.append(next(dropped))
    dropped.close()
    for row, tokens in enumerate(joined(seen)):
        assert tokens == want[row][: len(tokens)]
    assert joined([*others, *other]) == want[::-1]
    assert joined(list(sj.stream(context(0), PROMPTS, **options))) == want


def test_a_stream_holds_a_constant_number_of_arrays():
    """B39: fifty rounds of a stream keep no buffers alive but the state's."""
    stream = sj.stream(context(0), PROMPTS, eos_ids=(), max_new_tokens=60)
    counts = []
    for _ in range(50):
        step = next(stream)
        del step
        counts.append(len(jax.live_arrays()))
    assert len(set(counts[3:])) == 1


def test_vocabulary_is_what_the_helpers_say():
    assert context(0).vocab_size == VOCAB
