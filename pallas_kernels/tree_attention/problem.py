"""What a call of tree attention is: shapes, dtypes and cost, the device it is for, and the block sizes it runs with."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

MAX_NODES = 128  # fed rows, and uncommitted rows, that the kernels take


class ArrayLike(Protocol):
    """An array, or its description such as ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> jnp.dtype: ...


class Device(NamedTuple):
    """The kind of device a computation is traced for."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as jax names it: "NVIDIA H200", "TPU v6 lite", ..


def target_device() -> Device:
    """The abstract mesh's device where one is set (ahead-of-time compilation), else the default backend's first one."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return Device(described.platform, described.device_kind)
    first = jax.devices()[0]
    return Device(first.platform, first.device_kind)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes and dtypes of one call."""

    batch: int
    nodes: int  # N, fed rows
    q_heads: int
    kv_heads: int
    capacity: int  # S, cache rows
    tree_rows: int  # M, uncommitted rows
    head_dim: int
    dtype: str
    cache_dtype: str

    @classmethod
    def of(cls, q: ArrayLike, k_cache: ArrayLike, k_tree: ArrayLike) -> "Problem":
        """From q [B, N, Hq, D], k_cache [B, Hkv, S, D] and k_tree [B, Hkv, M, D]."""
        batch, nodes, q_heads, head_dim = q.shape
        _, kv_heads, tree_rows, _ = k_tree.shape
        dtypes = {jnp.dtype(keys.dtype).name for keys in (k_cache, k_tree)}
        cache_dtype = " and ".join(sorted(dtypes))
        return cls(
            batch,
            nodes,
            q_heads,
            kv_heads,
            k_cache.shape[2],
            tree_rows,
            head_dim,
            jnp.dtype(q.dtype).name,
            cache_dtype,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def cost(self) -> pl.CostEstimate:
        """Operations and bytes with a full cache: a prefix's length is data, so this is the most a call can cost.

        Keys and values are counted once per KV head, not once per query head or node.
        """
        scores = self.batch * self.q_heads * self.nodes * (self.capacity + self.tree_rows)
        rows = 2 * self.nodes * self.q_heads + 2 * self.kv_heads * (self.capacity + self.tree_rows)
        return pl.CostEstimate(
            flops=4 * scores * self.head_dim,
            transcendentals=scores,
            bytes_accessed=self.batch * rows * self.head_dim * jnp.dtype(self.dtype).itemsize,
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes of a kernel; a field that is 0 is chosen from the problem and the device."""

    rows: int = 0  # folded query rows of one program
    keys: int = 0  # cache rows of one step
    splits: int = 0  # programs that share the prefix of a sequence and KV head; GPU
    stages: int = 0  # steps whose keys and values are in shared memory at once; GPU
    # Run the kernel's body on the CPU, to test it: True, or the platform's parameters (pltpu.InterpretParams,
    # plgpu.InterpretGPUParams).
    interpret: Any = False

    def interpreter(self, parameters: Callable[..., Any]) -> Any:
        """``interpret`` with True made into parameters: what was not written, or lies past an end, reads as NaN."""
        if self.interpret is not True:
            return self.interpret
        return parameters(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
