"""On a GPU or TPU: the kernels against the reference, then every implementation's time beside bytes / bandwidth.

`python experiments/device.py` in a checkout needs nothing but jax and a device, and takes less than four minutes. It
prints a table and writes it as JSON. Times are compared within one run only: the bandwidth is that of a copy here.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from pallas_kernels.tree_attention import pick, tree_attention

SECONDS = 200.0  # no measurement starts later than this
REPEATS = 5
CALL_SECONDS = 0.02  # of work in one timed call, so that its launch does not count
COPY_BYTES = 1 << 30
FOOTPRINT = 1 << 28  # layers of a call read this many bytes in turn, more than any L2 cache holds
TOLERANCE = 2e-2

Attend = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call, with a full cache."""

    batch: int
    nodes: int
    prefix: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    earlier: int = 0  # uncommitted rows before the fed ones, which all of them see
    window: int | None = None
    dtype: str = "bfloat16"

    @property
    def tree_rows(self) -> int:
        """Rows of the tree buffer."""
        return self.earlier + self.nodes

    @property
    def row_bytes(self) -> int:
        """One head of one key, value or query."""
        return self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the prefix."""
        return 2 * self.batch * self.kv_heads * self.prefix * self.row_bytes

    @property
    def least_bytes(self) -> int:
        """What has to move: keys and values once per KV head, queries in, the result out."""
        tree = 2 * self.batch * self.kv_heads * self.tree_rows * self.row_bytes
        return self.cache_bytes + tree + 2 * self.batch * self.nodes * self.q_heads * self.row_bytes

    @property
    def flops(self) -> int:
        """Both matrix products."""
        return 4 * self.batch * self.q_heads * self.nodes * (self.prefix + self.tree_rows) * self.head_dim

    def __str__(self) -> str:
        unusual = {
            f" Hq{self.q_heads} Hkv{self.kv_heads}": (self.q_heads, self.kv_heads) != (32, 8),
            f" D{self.head_dim}": self.head_dim != 128,
            f" M{self.tree_rows}": self.earlier,
            f" W{self.window}": self.window,
            f" {self.dtype}": self.dtype != "bfloat16",
        }
        return f"B{self.batch} N{self.nodes} S{self.prefix}" + "".join(text for text, shown in unusual.items() if shown)


SHAPES = (
    Shape(1, 1, 8192),
    Shape(1, 16, 8192),
    Shape(1, 64, 8192),
    Shape(1, 64, 32768),
    Shape(4, 32, 2048),
    Shape(8, 8, 4096),
    Shape(8, 64, 8192),
    Shape(32, 1, 2048),
    Shape(32, 64, 512),
)
SMALL = (Shape(2, 1, 512), Shape(2, 33, 1024), Shape(1, 64, 2048), Shape(3, 128, 768))
# Checked of ``tree_attention`` alone: others take neither windows nor every width, and time is short.
UNUSUAL = (
    Shape(2, 33, 1024, head_dim=64),
    Shape(2, 33, 1024, head_dim=96, earlier=40),
    Shape(2, 16, 1024, q_heads=8, head_dim=256),
    Shape(2, 33, 1024, window=100),
    Shape(2, 33, 1024, q_heads=15, kv_heads=5, earlier=40, window=20),
)
OTHER_DTYPE = {"gpu": "float16", "tpu": "float32"}  # that the platform's kernel takes


def inputs_of(shape: Shape, key: jax.Array, lengths: Sequence[int] | None = None) -> dict[str, Any]:
    """Random arguments of ``tree_attention``: a complete binary tree, behind rows that it sees, on a full cache."""
    keys = jax.random.split(key, 5)
    cache = shape.batch, shape.kv_heads, shape.prefix, shape.head_dim
    tree = shape.batch, shape.kv_heads, shape.tree_rows, shape.head_dim
    sizes = (shape.batch, shape.nodes, shape.q_heads, shape.head_dim), cache, cache, tree, tree
    q, k_cache, v_cache, k_tree, v_tree = (
        jax.random.normal(key, size, shape.dtype) for key, size in zip(keys, sizes, strict=True)
    )
    ancestors = []
    for node in range(shape.nodes):
        path = [node]
        while path[-1]:
            path.append((path[-1] - 1) // 2)
        ancestors.append([True] * shape.earlier + [column in path for column in range(shape.nodes)])
    return dict(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k_tree=k_tree,
        v_tree=v_tree,
        prefix_lengths=jnp.asarray(lengths or [shape.prefix] * shape.batch, jnp.int32),
        tree_mask=jnp.broadcast_to(jnp.asarray(ancestors), (shape.batch, shape.nodes, shape.tree_rows)),
    )


def dot_product_attention(implementation: Any, q, k_cache, v_cache, k_tree, v_tree, *, prefix_lengths, tree_mask):
    """jax.nn's attention with a mask over [prefix, tree]; it wants keys and values joined and heads behind rows."""

    def joined(cache: jax.Array, tree: jax.Array) -> jax.Array:
        return jnp.concatenate([cache, tree], axis=2).swapaxes(1, 2)

    in_prefix = jnp.arange(k_cache.shape[2]) < prefix_lengths[:, None]
    in_prefix = jnp.broadcast_to(in_prefix[:, None], (*tree_mask.shape[:2], k_cache.shape[2]))
    mask = jnp.concatenate([in_prefix, tree_mask], axis=-1)[:, None]
    return jax.nn.dot_product_attention(
        q, joined(k_cache, k_tree), joined(v_cache, v_tree), mask=mask, implementation=implementation
    )


def jax_decode_attention(q, k_cache, v_cache, k_tree, v_tree, *, prefix_lengths, tree_mask):
    """jax's own GPU decode attention over the prefix, nodes folded into heads, and the tree merged in plain XLA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is on its way out
        from jax.experimental.pallas.ops.gpu import decode_attention

    batch, nodes, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    folded = q.reshape(batch, nodes, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    rows = folded.reshape(batch, q_heads * nodes, head_dim)
    out, (total, maximum) = decode_attention.gqa(
        rows,
        k_cache.swapaxes(1, 2),
        v_cache.swapaxes(1, 2),
        kv_seq_len=prefix_lengths,
        return_residuals=True,
    )
    out, total, maximum = (part.reshape(*folded.shape[:4], -1) for part in (out, total, maximum))
    scores = jnp.einsum("bhgnd,bhmd->bhgnm", folded, k_tree, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(tree_mask[:, None, None], scores, -1e30)
    highest = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    before = jnp.exp(maximum - highest) * total
    tree = jnp.einsum("bhgnm,bhmd->bhgnd", weights.astype(q.dtype), v_tree, preferred_element_type=jnp.float32)
    mixed = (out * before + tree) / (before + weights.sum(axis=-1, keepdims=True))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def contenders(platform: str) -> dict[str, Attend]:
    """What is timed on this platform; all have the arguments of ``tree_attention``."""
    named = lambda name: functools.partial(tree_attention, implementation=name)
    known: dict[str, Attend] = {
        "xla": named("xla"),
        "dot_product_attention xla": functools.partial(dot_product_attention, "xla"),
    }
    if platform == "gpu":
        known["mosaic_gpu"] = named("mosaic_gpu")
        known["dot_product_attention cudnn"] = functools.partial(dot_product_attention, "cudnn")
        known["jax decode_attention"] = jax_decode_attention
    if platform == "tpu":
        known["mosaic_tpu"] = named("mosaic_tpu")
    return known


def unusual(platform: str) -> tuple[Shape, ...]:
    """Other widths, groups, windows, buffers and dtypes than a model in bfloat16 has, all within the kernel's reach."""
    return *UNUSUAL, Shape(2, 33, 1024, dtype=OTHER_DTYPE[platform])


def largest_error(attend: Attend, shape: Shape) -> float:
    """Largest difference from the reference in float32, over ragged lengths."""
    lengths = [max(shape.prefix - 67 * row, 0) for row in range(shape.batch)]
    inputs = inputs_of(shape, jax.random.key(0), lengths)
    wide = {
        name: array.astype(jnp.float32) if array.ndim == 4 and array.dtype != bool else array
        for name, array in inputs.items()
    }
    window: dict[str, Any] = {} if shape.window is None else {"window": shape.window}
    right = jax.jit(functools.partial(tree_attention, implementation="reference", **window))(**wide)
    return float(jnp.abs(jax.jit(functools.partial(attend, **window))(**inputs).astype(jnp.float32) - right).max())


def median_seconds(run: Callable[[], Any]) -> float:
    """Median time of a call, the first ones not counted."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = jnp.ones((COPY_BYTES // 4,), jnp.float32)
    step = jax.jit(lambda x: x + 1)
    return 2 * COPY_BYTES / median_seconds(lambda: step(source))


def seconds_per_call(attend: Attend, shape: Shape, bandwidth: float) -> float:
    """Time of one attention, as a layer of a model sees it: each call reads another cache and feeds the next."""
    layers = max(1, min(16, FOOTPRINT // shape.cache_bytes))
    stacked = [inputs_of(shape, key) for key in jax.random.split(jax.random.key(1), layers)]
    rounds = max(1, round(CALL_SECONDS * bandwidth / (shape.least_bytes * layers)))

    @jax.jit
    def run(q: jax.Array, stacked: list[dict[str, Any]]) -> jax.Array:
        def once(_, q: jax.Array) -> jax.Array:
            for inputs in stacked:
                q = attend(**(inputs | {"q": q}))
            return q

        return jax.lax.fori_loop(0, rounds, once, q)

    return median_seconds(lambda: run(stacked[0]["q"], stacked)) / (rounds * layers)


def attempt(measure: Callable[[], float], deadline: float) -> float | str:
    """A figure, or why there is none."""
    if time.perf_counter() > deadline:
        return "no time left"
    try:
        return measure()
    except Exception as error:  # a contender that cannot run is a finding
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


def is_below(figure: float | str, limit: float) -> bool:
    """Whether it was measured and is small enough; NaN is not."""
    return isinstance(figure, float) and figure < limit


def show(title: str, names: Sequence[str], rows: dict[str, dict[str, Any]], digits: int) -> None:
    """Print a table; what could not be measured follows it."""
    print(f"\n{title}\n" + " " * 36 + "".join(f"{name:>28}" for name in names))
    for row, cells in rows.items():
        figures = (cells[name] for name in names)
        print(f"{row:36}" + "".join(f"{f'{x:.{digits}f}' if isinstance(x, float) else '-':>28}" for x in figures))
    for row, cells in rows.items():
        for name in names:
            if isinstance(cells[name], str):
                print(f"  {row} {name}: {cells[name]}")


def main() -> int:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description="Check and time the attention kernels on this machine's GPU or TPU.")
    parser.add_argument("--out", type=Path, default=Path("runs/device.json"), help="where the figures go")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    if device.platform not in ("gpu", "tpu"):
        print(f"Expected a GPU or a TPU, found {device.platform}: there is nothing to time here.", file=sys.stderr)
        return 1
    deadline = time.perf_counter() + SECONDS
    attends = contenders(device.platform)
    print(f"{device.device_kind}, jax {jax.__version__}")

    own = {name: attend for name, attend in attends.items() if name in ("xla", "mosaic_gpu", "mosaic_tpu")}
    errors = {}
    for title, shapes, checked in (
        ("Largest difference from the reference", SMALL, attends),
        ("Of other shapes", unusual(device.platform), own),
    ):
        part = {
            str(shape): {
                name: attempt(functools.partial(largest_error, attend, shape), deadline)
                for name, attend in checked.items()
            }
            for shape in shapes
        }
        show(title, list(checked), part, 4)
        errors |= part

    bandwidth = copy_bandwidth()
    print(f"\nA copy moves {bandwidth / 1e9:.0f} GB/s")
    times, ratios, picked = {}, {}, {}
    for shape in SHAPES:
        floor = shape.least_bytes / bandwidth
        measured = {
            name: attempt(functools.partial(seconds_per_call, attend, shape, bandwidth), deadline)
            for name, attend in attends.items()
        }
        times[str(shape)] = {name: x * 1e6 if isinstance(x, float) else x for name, x in measured.items()}
        ratios[str(shape)] = {name: x / floor if isinstance(x, float) else x for name, x in measured.items()}
        inputs = inputs_of(shape, jax.random.key(0))
        picked[str(shape)] = str(pick(inputs["q"], inputs["k_cache"], inputs["k_tree"]))
    show("Microseconds per call", list(attends), times, 1)
    show("Times bytes / bandwidth (1 is the floor)", list(attends), ratios, 2)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figures = dict(
        device=device.device_kind,
        jax=jax.__version__,
        date=time.strftime("%Y-%m-%d"),
        bandwidth=bandwidth,
        shapes={
            str(shape): dataclasses.asdict(shape) | dict(bytes=shape.least_bytes, flops=shape.flops) for shape in SHAPES
        },
        errors=errors,
        microseconds=times,
        ratios=ratios,
        picked=picked,
    )
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    ours = next(name for name in attends if name.startswith("mosaic"))
    failed = [shape for shape, cells in errors.items() if not is_below(cells[ours], TOLERANCE)]
    if failed:
        print(f"FAILED: {ours} is wrong or cannot run at {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
