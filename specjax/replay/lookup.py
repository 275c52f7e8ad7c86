"""Replaying prompt lookup, alone or beside a chain of one SSM: what it copies depends on nothing but the text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.draft.ensemble import ensemble
from specjax.draft.lookup import prompt_lookup
from specjax.replay.ranks import RankTrace
from specjax.request import make_drafter
from specjax.tree import MAX_NODES
from specjax.types import Drafter, Model


class LookupTree(NamedTuple):
    """A chain that an SSM drafts, merged with one branch of prompt lookup, and cut to so many nodes.

    Where the two agree they are one branch, so room that one does not need is the other's.
    """

    chain: int  # tokens that the SSM drafts; 0 is prompt lookup alone
    nodes: int  # of the merged tree below its root, and tokens that are copied

    def drafter(self, vocab_size: int, draft: Model | None = None, draft_mode: str = "top_k") -> Drafter:
        """What drafts it, for ``generate(.., drafts=[..])``.

        Args:
          vocab_size: the target's.
          draft: the SSM of the chain, if there is one.
          draft_mode: of the chain, as in ``generate``.

        Raises:
          ValueError: for sizes as ``lookup_steps``; for a chain without a draft, or a draft without a chain.
        """
        self._check()
        if (draft is None) != (self.chain == 0):
            given = "no draft" if draft is None else "a draft"
            raise ValueError(f"a chain needs the draft that drafts it, and a draft a chain; got {self} and {given}")
        lookup = prompt_lookup(vocab_size, branches=1, length=self.nodes)
        if draft is None:
            return lookup
        return ensemble([make_drafter([draft], (1,) * self.chain, draft_mode), lookup], capacity=self.nodes + 1)

    def _check(self) -> None:
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in self)
        if not whole or self.chain < 0 or not 1 <= self.nodes < MAX_NODES:
            raise ValueError(
                "a LookupTree has a chain of 0 or more tokens, and 1 or more nodes below its root, at most "
                f"{MAX_NODES - 1}, both integers; got {self}"
            )


def lookup_steps(trace: RankTrace, trees: Sequence[LookupTree]) -> np.ndarray:
    """Verify steps [I, P] of each tree on each prompt, as ``verify_steps`` counts those of other trees.

    Args:
      trace: of the one draft whose chain it is; of any drafts where prompt lookup is alone.
      trees: with prompt lookup as ``LookupTree.drafter`` has it.

    Raises:
      ValueError: for a trace of several drafts and a chain, or sizes that are no integers or out of range.
    """
    if any(tree.chain for tree in trees) and len(trace.ranks) != 1:
        raise ValueError(f"a chain is replayed with the trace of its draft alone; got one of {len(trace.ranks)} drafts")
    for tree in trees:
        tree._check()
    chain, nodes = np.array(trees, int).reshape(-1, 2, 1, 1).swapaxes(0, 1)
    drafted, copied = np.minimum(_likeliest(trace), chain), np.minimum(trace.copied, nodes)
    both = np.minimum(drafted, np.maximum(copied, 0))  # [I, P, T] what both get right is one branch
    # Nodes are taken depth by depth, the chain's before the copy's. So the chain's node at depth d, where the copy has
    # gone astray, is number 2 d - 1 - both of the nodes; the copy's, where the chain has, number 2 d - both, and behind
    # the chain's end d + chain - both. Solved for d, with that number at most ``nodes``, it is how deep each fits.
    # Without a match the chain has all room for itself.
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
    """[P, T] how many tokens behind each are the draft's first draws, one after the other."""
    right = (trace.ranks[0] == 0) & trace.drafted
    run, runs = np.zeros_like(trace.lengths), np.zeros(right.shape, int)
    for at in reversed(range(right.shape[1] - 1)):
        run = np.where(right[:, at + 1], run + 1, 0)
        runs[:, at] = run
    return runs
