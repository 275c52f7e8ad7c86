"""Replay: what any static tree would have accepted, from one recorded text; what it costs, and which to choose."""

from specjax.replay.cost import DEVICES, Device, Forwards, Latency, RoundCost, measure_latency, roofline
from specjax.replay.lookup import LookupTree, lookup_steps
from specjax.replay.optimal import Optimum, best_size, expected_tokens, optimal_trees
from specjax.replay.ranks import RankTrace, rank_trace
from specjax.replay.rates import Acceptance, Estimate, RateTrace, calibrate, estimate_tokens_per_step, rate_trace
from specjax.replay.walk import ReplayedRound, rounds, tokens_per_step, verify_steps

__all__ = [
    "DEVICES",
    "Acceptance",
    "Device",
    "Estimate",
    "Forwards",
    "Latency",
    "LookupTree",
    "Optimum",
    "RankTrace",
    "RateTrace",
    "ReplayedRound",
    "RoundCost",
    "best_size",
    "calibrate",
    "estimate_tokens_per_step",
    "expected_tokens",
    "lookup_steps",
    "measure_latency",
    "optimal_trees",
    "rank_trace",
    "rate_trace",
    "roofline",
    "rounds",
    "tokens_per_step",
    "verify_steps",
]
