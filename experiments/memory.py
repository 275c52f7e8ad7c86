"""What loading takes: the host's peak memory against the size of the loaded parameters, for a synthetic checkpoint.

python -m experiments.memory [--megabytes 1000] [--stored bfloat16] [--dtype float32]

Exits with an error where the peak is more than 1.3 times the parameters. Linux only: it reads /proc/self/status.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.models import DecoderConfig, load_model
from specjax.models.checkpoint import stored_shapes
from specjax.models.families import to_hugging_face

MOST = 1.3


def _config(parameters: float) -> DecoderConfig:
    """A Llama of about so many parameters, an eighth of them in the embedding and as many in the head."""
    layer = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096
    return DecoderConfig(
        vocab_size=int(parameters / 8 / 1024),
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=max(1, round(0.75 * parameters / layer)),
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        max_positions=2048,
    )


def write(directory: Path, megabytes: int, stored: str, dtype: str) -> None:
    """A checkpoint whose parameters take ``megabytes`` in ``dtype``, a tensor to a file."""
    config = _config(megabytes * 1e6 / jnp.dtype(dtype).itemsize)
    weight_map = {}
    for name, shape in stored_shapes(config).items():
        weight_map[name] = f"{name}.safetensors"
        tensor = np.full(shape, 0.5, jnp.dtype(stored))
        safetensors.numpy.save_file({name: tensor}, directory / weight_map[name], {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(to_hugging_face(config, (), stored)))


def _status(key: str) -> int:
    """A line of this process's status, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, key
    return 1024 * int(found[1])


def load(directory: str, dtype: str) -> dict[str, int]:
    """Bytes of the parameters, and what the peak added to this process."""
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    before = _status("VmRSS")
    params = load_model(directory, dtype=dtype).params
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"parameters": size, "peak": _status("VmHWM") - before}


def measure(megabytes: int, stored: str, dtype: str) -> dict[str, int]:
    """Write a checkpoint, and ``load`` it in a process of its own, whose peak nothing else raised."""
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), megabytes, stored, dtype)
        command = [sys.executable, "-m", "experiments.memory", "--directory", directory, "--dtype", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.memory", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the loaded parameters")
    parser.add_argument("--stored", default="bfloat16", help="dtype of the files")
    parser.add_argument("--dtype", default="float32", help="dtype of the loaded parameters")
    parser.add_argument("--directory", help="load this one, and print bytes as JSON")
    options = parser.parse_args(arguments)
    if options.directory:
        print(json.dumps(load(options.directory, options.dtype)))
        return 0
    found = measure(options.megabytes, options.stored, options.dtype)
    ratio = found["peak"] / found["parameters"]
    print(f"parameters {found['parameters'] / 1e6:.0f} MB, peak {found['peak'] / 1e6:.0f} MB, ratio {ratio:.2f}")
    return int(ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
