"""Replayed prompt lookup is decoding, alone and beside chains; greedily, and sampled with fixed seeds."""

import itertools

import numpy as np
import pytest

import specjax as sj
from specjax.replay import LookupTree, RankTrace, lookup_steps, rank_trace, verify_steps
from specjax.testing import table_model
from tests.helpers import MIXED, PERFECT, VOCAB, prompts_of, row_kinds

# Texts of a target that sees one token run in circles, and leave them where they are sampled.
TARGET = table_model(np.random.default_rng(5).normal(0, 2, (VOCAB, VOCAB)))
DRAFT = row_kinds(TARGET, [MIXED, PERFECT, MIXED, MIXED])
PROMPTS = prompts_of([5, 30, 12, 1])
OPTIONS = dict(max_new_tokens=[60, 60, 30, 2], eos_ids=[3], seeds=[1, 2, 3, 4])
SIZES = ((0, 1), (0, 4), (0, 9), (1, 2), (2, 4), (3, 4), (3, 7), (3, 12), (6, 7), (6, 4))
TREES = [LookupTree(*size) for size in SIZES]


@pytest.mark.parametrize("warp", [None, sj.Warp(0.3)], ids=["greedy", "sampled"])
def test_lookup_is_decoded_as_replayed(warp):
    trace = rank_trace(TARGET, [DRAFT], PROMPTS, warp=warp, **OPTIONS)
    steps, plain = lookup_steps(trace, TREES), verify_steps(trace, [sj.Topology.chain(0)])[0]
    for tree, replayed in zip(TREES, steps):
        drafter = tree.drafter(VOCAB, DRAFT if tree.chain else None)
        real = sj.generate(TARGET, PROMPTS, drafts=[drafter], warp=warp, **OPTIONS)
        assert [len(row) for row in real.rounds] == replayed.tolist(), tree
    assert np.all(steps <= plain)
    assert steps[2].sum() < 0.7 * plain.sum()  # texts repeat themselves
    assert steps[TREES.index(LookupTree(3, 7))].sum() < min(steps[2].sum(), verify_steps(trace, [(1,) * 3]).sum())


def test_what_is_copied_right():
    """A text of period three from its prompt on; the first two tokens have nothing to match, the end cuts the rest."""
    circle = table_model(np.where(np.arange(6)[:, None] % 3 == (np.arange(6) + 2) % 3, 5.0, 0.0) * (np.arange(6) < 3))
    trace = rank_trace(circle, [circle], [[0, 1, 2, 0], [0]], max_new_tokens=8, eos_ids=())
    assert trace.tokens[0, :8].tolist() == [1, 2, 0, 1, 2, 0, 1, 2]
    assert trace.copied[0, :8].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert trace.copied[1, :8].tolist() == [-1, -1, -1, 4, 3, 2, 1, 0]


def test_room_is_shared_as_nodes_are_drafted():
    """Every agreement of a chain and a copy, against the union made node by node."""

    def accepted(chain: int, nodes: int, drafted: int, copied: int) -> int:
        """Depth of the text's path in the union: at each depth the chain's node comes first, equal ones are one."""
        kept: list[tuple[str, int]] = []
        for depth, source in itertools.product(range(1, nodes + 1), ("chain", "copy")):
            length, right = (chain, drafted) if source == "chain" else (nodes if copied >= 0 else 0, copied)
            node = ("text" if depth <= right else source, depth)
            if depth <= length and node not in kept and len(kept) < nodes:
                kept.append(node)
        return sum(name == "text" for name, _ in kept)

    compared = 0
    for chain, nodes in itertools.product(range(6), range(1, 9)):
        for drafted, copied in itertools.product(range(chain + 1), range(-1, nodes + 1)):
            most = max(drafted, copied, 0) + 2
            ranks = np.where(np.arange(most) <= drafted, 0, 1)[None, None]
            found = np.where(np.arange(most) == 0, copied, -1)[None]
            none = np.zeros((1, most), bool)
            trace = RankTrace(none.astype(int), np.array([most]), ranks, none[None], none, found)
            # Behind the first round only the chain goes on, one round a token where it has ended.
            at, steps = 0, 0
            while at < most - 1:
                left = max(min(drafted - at, chain), 0)
                at, steps = at + 1 + accepted(chain, nodes, left, copied if at == 0 else -1), steps + 1
            assert lookup_steps(trace, [LookupTree(chain, nodes)]).tolist() == [[steps]]
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize(
    ("tree", "drafts", "message"),
    [
        (LookupTree(2, 0), [0], "1 or more nodes"),
        (LookupTree(-1, 2), [0], "0 or more tokens"),
        (LookupTree(0, 10**6), [0], "at most 4095"),
        (LookupTree(1.9, 4), [0], "both integers"),
        (LookupTree("1", 4), [0], "both integers"),
        (LookupTree(True, 4), [0], "both integers"),
        (LookupTree(2, 4), [0, 1], "got one of 2 drafts"),
    ],
)
def test_nonsense_is_refused(tree, drafts, message):
    trace = rank_trace(TARGET, [TARGET, TARGET], [[1, 2]], max_new_tokens=3).select(drafts)
    with pytest.raises(ValueError, match=message):
        lookup_steps(trace, [tree])


def test_a_chain_and_its_draft_come_together():
    for tree, draft in ((LookupTree(2, 4), None), (LookupTree(0, 4), DRAFT)):
        with pytest.raises(ValueError, match="a chain needs the draft") as refused:
            tree.drafter(VOCAB, draft)
        assert len(str(refused.value)) < 200  # no parameters in it
    with pytest.raises(ValueError, match="1 or more nodes"):
        LookupTree(0, 0).drafter(VOCAB)
