"""Timing things against each other on a machine that is not quiet."""

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from specjax import decode
from specjax.request import Plan


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


def decode_seconds(plans: Iterable[Plan]) -> float:
    """Seconds of decoding these batches, prefill left out."""
    total = 0.0
    for plan in plans:
        state = jax.block_until_ready(plan.start())
        total += timed(lambda plan=plan, state=state: decode.run_decode(plan.spec, plan.params, state))
    return total


@functools.cache
def compile_log() -> list[float]:
    """Seconds of every compilation of this process since the first call of this."""
    log: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return log
