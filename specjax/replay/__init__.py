"""Replay: what any static tree would have accepted, from one recorded text; and which tree to choose."""

from specjax.replay.optimal import Optimum, best_size, expected_tokens, optimal_trees
from specjax.replay.ranks import RankTrace, rank_trace
from specjax.replay.walk import ReplayedRound, rounds, tokens_per_step, verify_steps

__all__ = [
    "Optimum",
    "RankTrace",
    "ReplayedRound",
    "best_size",
    "expected_tokens",
    "optimal_trees",
    "rank_trace",
    "rounds",
    "tokens_per_step",
    "verify_steps",
]
