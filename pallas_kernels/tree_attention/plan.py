"""Which implementation can run a call and why another cannot, which one is picked, and its block sizes."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.tree_attention.fold import GPU_ROWS, power_of_two, round_up, tpu_nodes
from pallas_kernels.tree_attention.problem import MAX_NODES, Config, Device, Problem

HEAD_DIMS = (64, 80, 96, 128, 256)
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
_MULTIPROCESSORS = {r"\bH20\b": 78, r"\bH100 PCIe\b": 114}
_DEFAULT_MULTIPROCESSORS = 132  # H100 SXM, H200, GH200
_GPU_STAGES = {64: 4, 80: 4, 96: 4, 128: 4, 256: 2}  # what 227 KiB of shared memory hold beside queries and weights
# Shares of the TPU's 16 MiB of vector memory: keys and values take four blocks, scores three or four copies.
_TPU_BLOCK_BYTES = 1 << 19
_TPU_SCORES = 1 << 18  # float32
_TPU_ROW_ELEMENTS = 1 << 16  # query rows times their width


class Choice(NamedTuple):
    """What ``implementation=None`` picks for a call."""

    implementation: str
    config: Config  # complete; empty for an implementation without block sizes
    reason: str


def gpu_config(problem: Problem, kind: str) -> Config:
    """Block sizes for a Hopper GPU: two warpgroups where the rows fill them, and a program per multiprocessor."""
    folded = problem.group * power_of_two(problem.nodes)
    rows = GPU_ROWS * (2 if folded > GPU_ROWS and problem.head_dim <= 128 else 1)
    keys = 64
    programs = problem.batch * problem.kv_heads * (round_up(folded, rows) // rows)
    known = (count for name, count in _MULTIPROCESSORS.items() if re.search(name, kind))
    processors = next(known, _DEFAULT_MULTIPROCESSORS)
    # A split that holds less than four blocks costs more in merging than it gains.
    most = max(problem.capacity // (4 * keys), 1)
    return Config(
        rows, keys, splits=min(max(processors // programs, 1), most, 32), stages=_GPU_STAGES[problem.head_dim]
    )


def tpu_config(problem: Problem) -> Config:
    """Block sizes for a TPU: all rows of a KV head in one program, as they share the keys, and blocks that fit."""
    nodes, width = tpu_nodes(problem.nodes), max(problem.head_dim, 128)  # registers are 128 wide, and so is memory
    rows = min(round_up(problem.group * nodes, max(nodes, 16)), _TPU_ROW_ELEMENTS // width)
    keys = min(_TPU_SCORES // power_of_two(rows), _TPU_BLOCK_BYTES // (width * jnp.dtype(problem.dtype).itemsize))
    return Config(rows, min(keys, round_up(max(problem.capacity, 1), _tpu_keys_step(problem))))


def _tpu_keys_step(problem: Problem) -> int:
    """What a block's keys are a multiple of: they lie along the registers where heads are narrower than one."""
    return 128 if problem.head_dim < 128 else 16


def complete(name: str, problem: Problem, device: Device, config: Config | None) -> Config:
    """Fill in what ``config`` leaves open. A pure function of shapes, dtype and device.

    Raises:
      ValueError: a block size that the kernel cannot take, or a config for an implementation that has none.
    """
    if name not in ("mosaic_gpu", "mosaic_tpu"):
        if config is not None:
            raise ValueError(f"attention implementation {name!r} has no block sizes: pass config=None, got {config}")
        return Config()
    chosen = gpu_config(problem, device.kind) if name == "mosaic_gpu" else tpu_config(problem)
    for field, value in dataclasses.asdict(config or Config()).items():
        if value and field != "interpret":
            chosen = dataclasses.replace(chosen, **{field: value})
    chosen = dataclasses.replace(chosen, interpret=config.interpret if config else False)
    wrong = _wrong_gpu_config(problem, chosen) if name == "mosaic_gpu" else _wrong_tpu_config(problem, chosen)
    if wrong:
        raise ValueError(f"{name}: {wrong}, got {chosen}")
    return chosen


def _wrong_gpu_config(problem: Problem, config: Config) -> str | None:
    if config.rows not in (64, 128):
        return "rows must be 64 or 128, one or two warpgroups of 64"
    if config.rows == 128 and problem.head_dim == 256:
        return "rows must be 64 for head_dim 256, whose accumulators take the registers of two warpgroups"
    if config.keys not in (64, 128):
        return "keys must be 64 or 128"
    if config.splits < 1 or config.stages < 2:
        return "splits must be at least 1 and stages at least 2"
    return None


def _wrong_tpu_config(problem: Problem, config: Config) -> str | None:
    nodes = tpu_nodes(problem.nodes)
    if config.rows < 1 or config.rows % max(nodes, 16):
        return f"rows must be a multiple of {max(nodes, 16)}, the padded number of nodes"
    step = _tpu_keys_step(problem)
    if config.keys < 1 or config.keys % step:
        return f"keys must be a multiple of {step} for head_dim {problem.head_dim}"
    if config.splits or config.stages:
        return "splits and stages are for GPUs and must stay 0"
    return None


def _too_large(problem: Problem) -> str | None:
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {problem.head_dim}"
    if problem.nodes > MAX_NODES or problem.tree_rows > MAX_NODES:
        return (
            f"at most {MAX_NODES} nodes and {MAX_NODES} uncommitted rows fit, "
            f"got {problem.nodes} nodes and {problem.tree_rows} rows; feed longer prompts in chains of {MAX_NODES}"
        )
    return None


def _wrong_dtype(problem: Problem, known: tuple[str, ...], why: str) -> str | None:
    if problem.dtype not in known:
        return f"dtype must be {' or '.join(known)}{why}, got {problem.dtype}"
    if problem.cache_dtype != problem.dtype:
        return f"q, cache and tree must have one dtype, got {problem.dtype} and {problem.cache_dtype}"
    return None


def _refuse_gpu(problem: Problem, device: Device, interpreted: bool) -> str | None:
    if not interpreted and not (device.platform in ("gpu", "cuda") and HOPPER.search(device.kind)):
        return f"it needs a Hopper GPU (H100, H200, H20, H800, GH200), this is {device.platform}: {device.kind}"
    wrong = _wrong_dtype(problem, ("bfloat16", "float16"), " (wgmma would round float32 to TF32 without saying so)")
    if wrong or problem.capacity % 8 == 0:
        return wrong or _too_large(problem)
    return f"the cache's rows must be a multiple of 8, the rows of a TMA tile, got {problem.capacity}"


def _refuse_tpu(problem: Problem, device: Device, interpreted: bool) -> str | None:
    if not interpreted and device.platform != "tpu":
        return f"it needs a TPU, this is {device.platform}: {device.kind}"
    return _wrong_dtype(problem, ("bfloat16", "float32"), "") or _too_large(problem)


REFUSALS: Mapping[str, Callable[[Problem, Device, bool], str | None]] = MappingProxyType(
    {
        "reference": lambda problem, device, interpreted: None,
        "xla": lambda problem, device, interpreted: None,
        "mosaic_gpu": _refuse_gpu,
        "mosaic_tpu": _refuse_tpu,
    }
)
_KERNEL_OF = MappingProxyType({"gpu": "mosaic_gpu", "cuda": "mosaic_gpu", "tpu": "mosaic_tpu"})


def refusal(name: str, problem: Problem, device: Device, *, interpreted: bool = False) -> str | None:
    """Why the implementation of this name cannot run the problem on the device; None where it can.

    Raises:
      ValueError: no implementation has this name.
    """
    if not isinstance(name, str) or name not in REFUSALS:
        raise ValueError(f"unknown attention implementation {name!r}; known are {', '.join(sorted(REFUSALS))}")
    return REFUSALS[name](problem, device, interpreted)


def choose(problem: Problem, device: Device) -> Choice:
    """The platform's kernel where it can run the problem, else XLA; and why."""
    kernel = _KERNEL_OF.get(device.platform)
    if kernel is None:
        return Choice("xla", Config(), f"there is no kernel for {device.platform}: {device.kind}")
    why_not = refusal(kernel, problem, device)
    if why_not:
        return Choice("xla", Config(), f"{kernel} cannot run: {why_not}")
    return Choice(kernel, complete(kernel, problem, device, None), f"the kernel for {device.platform}: {device.kind}")
