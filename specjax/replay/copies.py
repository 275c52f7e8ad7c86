"""Replaying prompt lookup, alone or beside a chain of one SSM: what it copies depends on nothing but the text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.draft.ensemble import ensemble
from specjax.draft.lookup import prompt_lookup
from specjax.replay.ranks import RankTrace
from specjax.types import Drafter


class Copies(NamedTuple):
    """A chain that an SSM drafts, merged with one branch of prompt lookup, and cut to so many nodes.

    Where the two agree they are one branch, so what one does not need is the other's.
    """

    chain: int  # tokens the SSM drafts; 0 is prompt lookup alone
    nodes: int  # of the merged tree below its root, and tokens that are copied

    def drafter(self, chain: Drafter | None, vocab_size: int) -> Drafter:
        """What drafts it: ``chain`` is the SSM's drafter of a chain of this length, if there is one."""
        lookup = prompt_lookup(vocab_size, branches=1, length=self.nodes)
        return lookup if chain is None else ensemble([chain, lookup], capacity=self.nodes + 1)


def copy_steps(trace: RankTrace, copies: Sequence[Copies]) -> np.ndarray:
    """Verify steps [I, P] of each method on each prompt, as ``verify_steps`` counts those of trees.

    Args:
      trace: of the draft whose chain it is; of any drafts if there is none.
      copies: the methods.

    Raises:
      ValueError: for a trace of several drafts and a chain, a chain below 0 tokens, or a tree of no nodes.
    """
    if any(one.chain for one in copies) and len(trace.ranks) != 1:
        raise ValueError(f"a chain of one draft is replayed with its own trace; got one of {len(trace.ranks)} drafts")
    for one in copies:
        if one.chain < 0 or one.nodes < 1:
            raise ValueError(f"expected a chain of 0 or more tokens in a tree of 1 or more nodes; got {one}")
    chain, nodes = np.array(copies, int).reshape(-1, 2, 1, 1).swapaxes(0, 1)
    drafted, copied = np.minimum(_likeliest(trace), chain), np.minimum(trace.copied, nodes)
    both = np.minimum(drafted, np.maximum(copied, 0))  # [I, P, T] what both get right is one branch
    # Nodes are taken depth by depth, the chain's before the copy's. So the chain's node at depth d, where the copy has
    # gone astray, comes behind 2 d - 1 - both others, and the copy's, where the chain has, behind one more, until the
    # chain ends. Without a match the chain has all room for itself.
    chain_fits = np.where(copied < 0, nodes, (nodes + 1 + both) // 2)
    copy_fits = np.maximum(np.minimum((nodes + both) // 2, chain), nodes - chain + both)
    longer = np.where(drafted > copied, np.minimum(drafted, chain_fits), np.minimum(copied, copy_fits))
    accepted = np.maximum(both, longer)

    ends = np.maximum(trace.lengths - 1, 0)
    at, steps = np.zeros(accepted.shape[:2], int), np.zeros(accepted.shape[:2], int)
    while np.any(going := at < ends):
        steps += going
        here = np.minimum(at, ends)[..., None]  # rows that are done stay inside
        at += going * (1 + np.take_along_axis(accepted, here, axis=2)[..., 0])
    return steps


def _likeliest(trace: RankTrace) -> np.ndarray:
    """[P, T] how many tokens behind each are the draft's likeliest, one after the other."""
    right = (trace.ranks[0] == 0) & trace.drafted
    run = np.zeros_like(trace.lengths)
    runs = np.zeros(right.shape, int)
    for at in reversed(range(right.shape[1] - 1)):
        run = np.where(right[:, at + 1], run + 1, 0)
        runs[:, at] = run
    return runs
