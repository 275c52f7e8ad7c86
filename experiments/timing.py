"""Timing things against each other on a machine that is not quiet."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def interleaved[K](calls: dict[K, Callable[[], float]], repeats: int) -> dict[K, float]:
    """Median seconds of each call, which times itself; they take turns, so that a busy machine slows all alike."""
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            took = call()
            if repeat:  # the first compiles
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the result is there."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began
