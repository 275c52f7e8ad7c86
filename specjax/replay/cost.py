"""What a round costs: latency curves measured on the machine at hand, or modelled for a named device."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import optimize

from specjax.models import DecoderConfig
from specjax.tree import TreeShape
from specjax.types import Model, TreeMask

ROWS = (1, 2, 4, 8, 16, 32, 64)
PASSES = 8  # forwards in one timed call: in a loop inside one executable, as rounds are


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds of one forward of a model, on a grid; between its points linear, beyond them the slope of the last.

    Raises:
      ValueError: for an axis that does not ascend, or seconds of another shape.
    """

    source: str  # "measured on .." or "modelled for .."
    batches: tuple[int, ...]
    rows: tuple[int, ...]  # fed per sequence
    contexts: tuple[int, ...]  # rows of the cache that attention runs over: its capacity, unless a kernel skips
    seconds: np.ndarray  # [batches, rows, contexts]

    def __post_init__(self):
        shape = _check_axes(self.batches, self.rows, self.contexts)
        if np.shape(self.seconds) != shape:
            raise ValueError(f"seconds has shape {np.shape(self.seconds)}; the axes' points are {shape}")

    def __call__(self, batch: float, rows: float, context: float) -> float:
        """Seconds of a forward of ``rows`` rows in each of ``batch`` sequences."""
        values: Any = self.seconds
        for knots, at in ((self.batches, batch), (self.rows, rows), (self.contexts, context)):
            values = _linear(np.asarray(knots, float), values, at)
        return float(values)

    def save(self, path: pathlib.Path) -> None:
        """Write the curve as JSON."""
        path.write_text(json.dumps({**vars(self), "seconds": self.seconds.tolist()}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: pathlib.Path) -> "Latency":
        """Read a curve that ``save`` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        axes = {name: tuple(raw[name]) for name in ("batches", "rows", "contexts")}
        return cls(raw["source"], **axes, seconds=np.array(raw["seconds"]))


def _check_axes(*axes: Sequence[int]) -> tuple[int, ...]:
    """The grid's shape."""
    for name, knots in zip(("batches", "rows", "contexts"), axes):
        if not len(knots) or not knots[0] > 0 or not np.all(np.diff(knots) > 0):
            raise ValueError(f"{name}: expected ascending numbers above 0, at least one; got {tuple(knots)}")
    return tuple(map(len, axes))


def _linear(knots: np.ndarray, values: np.ndarray, at: float) -> np.ndarray:
    if len(knots) == 1:
        return values[0]
    left = int(np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2))
    share = max(0.0, (at - knots[left]) / (knots[left + 1] - knots[left]))
    return values[left] + share * (values[left + 1] - values[left])


def measure_latency(
    model: Model,
    *,
    batches: Sequence[int] = (1,),
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = (256,),
    repeats: int = 5,
) -> Latency:
    """Time a model's forward on this machine: the fastest of ``repeats`` calls, compilation left out.

    The fastest, since whatever else a machine does only adds to a call this short.

    Args:
      model: a target or draft.
      batches, rows, contexts: the grid; contexts are cache capacities, half full.
      repeats: timed calls per point. They go round the grid, so that a busy spell slows all points alike.

    Raises:
      ValueError: for an axis that does not ascend.
    """
    shape = _check_axes(batches, rows, contexts)
    grid = [(batch, count, context) for batch in batches for count in rows for context in contexts]
    calls = {point: _timed_forward(model, *point) for point in grid}
    taken: dict[tuple[int, int, int], list[float]] = {point: [] for point in grid}
    for _ in range(repeats):
        for point, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            taken[point].append((time.perf_counter() - began) / PASSES)
    seconds = np.array([min(taken[point]) for point in grid])
    source = f"measured on {jax.devices()[0].device_kind}"
    return Latency(source, tuple(batches), tuple(rows), tuple(contexts), seconds.reshape(shape))


def _timed_forward(model: Model, batch: int, rows: int, context: int):
    lengths = jnp.full((batch,), context // 2, jnp.int32)
    mask = TreeMask(lengths, jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows)))
    positions = jnp.minimum(lengths[:, None] + jnp.arange(rows), model.max_positions - 1)

    @jax.jit
    def loop(params, cache):
        # Each pass waits for the one before, as rounds do.
        def body(_, token):
            tokens = jnp.broadcast_to(token, (batch, rows))
            logits = model.forward(params, tokens, positions, mask, cache).logits
            return token + (jnp.max(logits) * 0).astype(jnp.int32)

        return lax.fori_loop(0, PASSES, body, jnp.int32(1))

    cache = model.init_cache(batch, context)
    jax.block_until_ready(loop(model.params, cache))
    return lambda: loop(model.params, cache)


# Roofline


class Device(NamedTuple):
    """A device's published peaks."""

    name: str
    flops: float  # per second, dense bfloat16
    bandwidth: float  # bytes of memory per second


DEVICES = {
    "a100": Device("A100 80GB SXM", 312e12, 2.039e12),
    "h200": Device("H200 SXM", 989e12, 4.8e12),
    "tpu_v5e": Device("TPU v5e", 197e12, 819e9),
}


def roofline(
    config: DecoderConfig,
    device: Device,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts: Sequence[int] = (128, 512, 2048, 8192),
    bytes_per_number: int = 2,
) -> Latency:
    """A modelled curve: the larger of the time to read weights and cache, and the time to multiply, both at peak.

    A bound from below, never a measurement: nothing is added for launches, communication or imperfect kernels.

    Args:
      config: the model's sizes.
      device: its peaks, one of ``DEVICES`` say.
      batches, rows, contexts: the grid: sequences, rows fed to each, and committed tokens before them.
      bytes_per_number: of weights and cache.
    """
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = 3 if config.mlp == "swiglu" else 2
    layer = config.hidden_size * (2 * q_width + 2 * kv_width + matrices * config.intermediate_size)
    weights = config.num_layers * layer + (config.embed_size or config.hidden_size) * config.vocab_size
    batch, count, context = np.meshgrid(*(np.array(axis, float) for axis in (batches, rows, contexts)), indexing="ij")
    windows = config.windows or (None,) * config.num_layers
    seen = sum(context if window is None else np.minimum(context, window) for window in windows)  # over all layers
    cache = 2 * kv_width * batch * seen
    attention = 4 * q_width * batch * count * (seen + config.num_layers * count)
    reading = bytes_per_number * (weights + cache) / device.bandwidth
    multiplying = (2 * weights * batch * count + attention) / device.flops
    axes = (tuple(batches), tuple(rows), tuple(contexts))
    return Latency(f"modelled for {device.name}", *axes, seconds=np.maximum(reading, multiplying))


# Rounds


class Forwards(NamedTuple):
    """Seconds of a round's bare forwards."""

    target: float
    drafts: float


class RoundCost(NamedTuple):
    """Seconds of a round from the forwards it is made of, and what comes on top of them."""

    target: Latency
    drafts: tuple[Latency, ...]
    target_factor: float = 1.0  # of the target's forward, with its verification
    draft_factor: float = 1.0  # of the drafts' forwards, with their draws
    fixed: float = 0.0  # seconds a round

    def forwards(
        self, shape: TreeShape, drafts: Sequence[int], *, batch: int, context: int, copied: int = 0
    ) -> Forwards:
        """The bare forwards: the drafts are fed what was emitted, then level by level; then the target.

        Args:
          shape: of the tree that each draft drafts.
          drafts: which drafts; their merged tree has room for all their nodes.
          batch, context: as in ``Latency``.
          copied: nodes below the root of the union with prompt lookup (``LookupTree.nodes``), 0 without it. Copying
            costs nothing; the union's nodes are the target's rows, and its depth is what the drafts may be fed.
        """
        members = list(drafts) if shape.depth else []
        levels = (max(shape.depth, copied) + 1, *shape.widths[1:])
        return Forwards(
            self.target(batch, (copied or len(members) * (shape.num_nodes - 1)) + 1, context),
            sum(self.drafts[draft](batch, rows, context) for draft in members for rows in levels),
        )

    def __call__(self, shape: TreeShape, drafts: Sequence[int], *, batch: int, context: int, copied: int = 0) -> float:
        """Seconds of a round; arguments as ``forwards``."""
        bare = self.forwards(shape, drafts, batch=batch, context=context, copied=copied)
        return self.fixed + self.target_factor * bare.target + self.draft_factor * bare.drafts

    def fitted(self, forwards: Sequence[Forwards], seconds: Sequence[float]) -> "RoundCost":
        """With both factors and ``fixed``, none negative, fitted to a few real rounds: least squares, relative.

        Args:
          forwards: of each round, from ``forwards``.
          seconds: that it took.

        Raises:
          ValueError: for no round, forwards and seconds that do not pair up, or numbers that are no times.
        """
        bare, taken = np.array(forwards, float), np.asarray(seconds, float)
        if not len(bare) or taken.shape != (len(bare),):
            raise ValueError(f"expected seconds of each of {len(bare)} rounds, and a round; got shape {taken.shape}")
        if not (np.all((bare >= 0) & np.isfinite(bare)) and np.all((taken > 0) & np.isfinite(taken))):
            raise ValueError(f"a round takes finite seconds above 0, and its forwards >= 0; got {taken} and {bare}")
        design = np.column_stack([bare, np.ones(len(bare))]) / taken[:, None]
        # Each column by its size, so that a tolerance means the same for a factor and for seconds.
        sizes = np.maximum(np.linalg.norm(design, axis=0), np.finfo(float).tiny)
        found = optimize.nnls(design / sizes, np.ones(len(design)))[0] / sizes
        return self._replace(**dict(zip(("target_factor", "draft_factor", "fixed"), map(float, found))))
