"""The kernels compiled ahead of time for TPU and Hopper, without a device: registers, spills, memory, bytes.

Needs libtpu and jax's CUDA plugin, which `make kernels` puts into an environment of their own. Exits with an error when
a kernel does not compile, spills registers, or takes more than a fifth of the memory that the reference takes, and when
a decode loop on a TPU copies its cache every round or does not count the kernel.
"""

import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels.tree_attention import tree_attention
from specjax import decode
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_decoder, decoder_functions
from specjax.request import prepare
from specjax.types import Model

GPU_TARGET = Path(__file__).parent / "gpu_target_h100.pbtxt"  # written by hand; it steers XLA's heuristics only
MOST_OF_PLAIN_MEMORY = 0.2


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call."""

    batch: int
    nodes: int
    q_heads: int
    kv_heads: int
    prefix: int
    head_dim: int
    dtype: str = "bfloat16"
    window: int | None = None

    def specs(self, sharding: Any, platform: str) -> dict[str, Any]:
        """The arguments of ``tree_attention``."""
        b, n, d = self.batch, self.nodes, self.head_dim
        cache, tree = (b, self.kv_heads, self.prefix, d), (b, self.kv_heads, n, d)
        shapes = dict(q=(b, n, self.q_heads, d), k_cache=cache, v_cache=cache, k_tree=tree, v_tree=tree)
        # As a decode loop carries them: on a TPU, rows lie along the registers where heads are narrower than one.
        order = (0, 1, 3, 2) if platform == "tpu" and d < 128 else (0, 1, 2, 3)
        stored = Format(Layout(order), sharding)
        arrays = {name: jax.ShapeDtypeStruct(shape, self.dtype, sharding=stored) for name, shape in shapes.items()}
        return arrays | {
            "prefix_lengths": jax.ShapeDtypeStruct((b,), jnp.int32, sharding=sharding),
            "tree_mask": jax.ShapeDtypeStruct((b, n, n), jnp.bool_, sharding=sharding),
        }

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        window = f" window {self.window}" if self.window else ""
        return f"B{self.batch} N{self.nodes} H{heads} S{self.prefix} D{self.head_dim} {self.dtype}{window}"


MEMORY = Shape(8, 64, 32, 8, 8192, 128)  # where the kernel's memory is held against the reference's
SHAPES = (
    MEMORY,
    Shape(1, 1, 32, 8, 32768, 128),
    Shape(1, 64, 32, 8, 8192, 128, window=4096),
    Shape(4, 33, 16, 2, 1000, 64),
    Shape(4, 7, 32, 32, 1000, 80),
    Shape(4, 31, 32, 8, 1000, 96),
    Shape(2, 128, 16, 8, 4096, 256),
)
ONLY = {
    "mosaic_tpu": (Shape(4, 64, 16, 8, 1000, 128, "float32"),),
    "mosaic_gpu": (Shape(4, 64, 16, 8, 1000, 128, "float16"),),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for."""

    name: str
    implementation: str
    platform: str
    lowering: str
    kind: str
    topology: dict[str, str]

    def sharding(self) -> SingleDeviceSharding:
        """One device of the described machine."""
        return SingleDeviceSharding(topologies.get_topology_desc(**self.topology).devices[0])

    def device(self) -> contextlib.AbstractContextManager:
        """Trace for this device."""
        described = AbstractDevice(device_kind=self.kind, num_cores=None, platform=self.platform)
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=described))


def targets() -> tuple[Target, ...]:
    """TPU v5e and v6e, and an H100."""

    def tpu(name: str, kind: str) -> Target:
        return Target(name, "mosaic_tpu", "tpu", "tpu", kind, dict(platform="tpu", topology_name=f"{name}:2x2"))

    hopper = dict(platform="cuda", topology_name="", topology="1x1x1", target_config=GPU_TARGET.read_text())
    return (
        tpu("v5e", "TPU v5 lite"),
        tpu("v6e", "TPU v6 lite"),
        Target("hopper", "mosaic_gpu", "gpu", "cuda", "NVIDIA H100 80GB HBM3", hopper),
    )


@dataclasses.dataclass(frozen=True)
class Registers:
    """What ptxas says of a kernel."""

    used: int
    spill_bytes: int


def compiled(target: Target, shape: Shape, implementation: str, sharding: Any) -> Any:
    """The executable of one call."""
    attend = functools.partial(tree_attention, implementation=implementation, window=shape.window)
    with target.device():
        traced = jax.jit(lambda inputs: attend(**inputs)).trace(shape.specs(sharding, target.platform))
        return traced.lower(lowering_platforms=(target.lowering,)).compile()


@contextlib.contextmanager
def ptxas_reports() -> Iterator[Path]:
    """A folder where Mosaic leaves ptxas's reports. Mosaic reads these variables when it first compiles."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_TO=folder)
        yield Path(folder)


def read_report(folder: Path) -> Registers | None:
    """Registers of the kernel compiled last, and forget it; None if there is none."""
    reports = sorted(folder.glob("*.ptxas"))
    text = "".join(path.read_text() for path in reports)
    for path in folder.iterdir():
        path.unlink()
    used = [int(count) for count in re.findall(r"Used (\d+) registers", text)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", text)]
    return Registers(max(used), sum(spills)) if used else None


def check(target: Target, shape: Shape, sharding: Any, reports: Path) -> tuple[str, list[str]]:
    """One line of the table, and what is wrong."""
    wrong = []
    began = time.perf_counter()
    try:
        executable = compiled(target, shape, target.implementation, sharding)
    except Exception as error:  # whatever the compiler raises is the finding
        return f"{target.name:7} {shape}  does not compile", [f"{target.name} {shape}: {error}"]
    seconds = time.perf_counter() - began
    temporary = executable.memory_analysis().temp_size_in_bytes
    line = f"{target.name:7} {shape!s:48} {seconds:5.1f} s  temp {temporary / 2**20:6.2f} MiB"
    if target.platform == "gpu":
        registers = read_report(reports)
        if registers is None:
            wrong.append(f"{target.name} {shape}: ptxas left no report")
        else:
            line += f"  {registers.used} registers, {registers.spill_bytes} bytes spilled"
            if registers.spill_bytes:
                wrong.append(f"{target.name} {shape}: {registers.spill_bytes} bytes of registers are spilled")
    else:
        cost = executable.cost_analysis()
        scores = shape.batch * shape.q_heads * shape.nodes * (shape.prefix + shape.nodes)
        keys = shape.batch * shape.kv_heads * (shape.prefix + shape.nodes)
        rows = 2 * keys + 2 * shape.batch * shape.q_heads * shape.nodes
        least = rows * shape.head_dim * jnp.dtype(shape.dtype).itemsize
        line += f"  {cost['flops'] / 1e9:7.2f} Gflop, least bytes / bytes {least / cost['bytes accessed']:.2f}"
        if cost["flops"] < 4 * scores * shape.head_dim:
            wrong.append(
                f"{target.name} {shape}: the cost analysis does not count the kernel, {cost['flops']:.3g} flops"
            )
    if shape == MEMORY:
        others = {name: compiled(target, shape, name, sharding).memory_analysis() for name in ("reference", "xla")}
        plain, blocks = (memory.temp_size_in_bytes for memory in others.values())
        line += f"; reference {plain / 2**20:.0f} MiB, ratio {temporary / plain:.4f}; xla {blocks / 2**20:.1f} MiB"
        if temporary > MOST_OF_PLAIN_MEMORY * plain:
            wrong.append(f"{target.name} {shape}: {temporary} bytes, more than a fifth of the reference's {plain}")
    return line, wrong


def without_weights(num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Model:
    """A decoder whose parameters are shapes; its vocabulary is small, since only the layers matter here."""
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=num_heads * head_dim,
        intermediate_size=4 * num_heads * head_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=8192,
        tied_head=False,
    )
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_decoder(config)[1])
    return decoder_functions(config, None, "bfloat16").model(config, params, eos_ids=())


def check_loop(target: Target, head_dim: int) -> tuple[str, list[str]]:
    """The whole decode loop with trees <3,2,1,1> at batch 4: its line of the table, and what is wrong."""
    batch, layers, heads = 4, 2, 32
    model = without_weights(layers, heads, 8, head_dim)
    draft = without_weights(1, 8, 2, head_dim)
    name = f"{target.name:7} decode loop <3,2,1,1> B{batch} S4096 D{head_dim}"
    sharding = target.sharding()
    with target.device():
        plan = prepare(model, [[1]] * batch, drafts=[draft], tree=(3, 2, 1, 1), max_new_tokens=4000)
        state = jax.eval_shape(functools.partial(decode.run_start, plan.spec), plan.params, *plan.inputs)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (plan.params, state)
        )
        traced = decode.run_decode.trace(plan.spec, *shapes)
        executable = traced.lower(lowering_platforms=(target.lowering,)).compile()
    cache = state.cache.k[0].shape
    # Behind ENTRY is what happens once: XLA may store a program's arguments in another layout than its loops do.
    every_round = str(executable.as_text()).partition("\nENTRY ")[0]
    *outer, length, width = map(str, cache)
    either = "|".join(",".join([*outer, *last]) for last in ((length, width), (width, length)))
    copied = re.findall(rf"= bf16\[(?:{either})\]\S* (?:copy|transpose)\(", every_round)
    wrong = [f"{name}: every round copies {len(copied)} of the cache's arrays"] if copied else []
    rows = batch * plan.params.drafter.topology.shape.num_nodes
    products = sum(leaf.size for leaf in jax.tree.leaves(model.params) if leaf.ndim == 2) - 512 * heads * head_dim
    least = 2 * rows * products + layers * 4 * rows * heads * cache[2] * head_dim
    cost, memory = executable.cost_analysis(), executable.memory_analysis()
    flops, temporary = (cost or {})["flops"], memory.temp_size_in_bytes if memory else 0
    if flops < least:
        wrong.append(f"{name}: {flops:.3g} flops are counted, fewer than the target's {least:.3g}: the kernel is not")
    line = f"{name:60}temp {temporary / 2**20:6.2f} MiB  {flops / 1e9:7.2f} Gflop, the target's {least / 1e9:.2f}"
    return line, wrong


def main() -> int:
    """Compile everything and print the table."""
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its lock guards a device, and there is none
    wrong = []
    with ptxas_reports() as reports:
        for target in targets():
            sharding = target.sharding()
            for shape in (*SHAPES, *ONLY[target.implementation]):
                line, problems = check(target, shape, sharding, reports)
                print(line, flush=True)
                wrong += problems
            for head_dim in (128, 64) if target.platform == "tpu" else ():
                line, problems = check_loop(target, head_dim)
                print(line, flush=True)
                wrong += problems
    for problem in wrong:
        print(f"FAILED: {problem}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
