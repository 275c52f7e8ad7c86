"""Timing things against each other on a machine that is not quiet."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Spread(NamedTuple):
    """A median, and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """That of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, form: str = ".2f") -> str:
        """For a table."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def samples[K](calls: dict[K, Callable[[], float]], repeats: int) -> dict[K, list[float]]:
    """Seconds of each call, which times itself; they take turns, so that a busy machine slows all alike."""
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            took = call()
            if repeat:  # the first compiles
                seconds[name].append(took)
    return seconds


def interleaved[K](calls: dict[K, Callable[[], float]], repeats: int) -> dict[K, float]:
    """Median seconds of each call, which times itself; they take turns, so that a busy machine slows all alike."""
    return {name: statistics.median(values) for name, values in samples(calls, repeats).items()}


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the result is there."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began
