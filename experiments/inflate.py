"""A larger model that computes the same function, so that speed at any size is measured with a small pair's acceptance.

python -m experiments.inflate experiments/zoo/target build/inflated/target \\
    --hidden 768 --layers 12 --ffn 2048 --vocab 32000

Logits of the old vocabulary stay what they were, and the new entries are never chosen. What it says about speed is
real, for all of its matrices are dense and all are multiplied. What it says about size is not, so its config.json has a
key ``inflated_from``, and reports mark it.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import config
from specjax.models import DecoderConfig
from specjax.models.checkpoint import save_tensors, stored_shapes
from specjax.models.families import PREFIX, from_hugging_face
from specjax.models.files import read_json, stored_tensors, write_json

MARK = "inflated_from"
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
_FAINT, _NEVER = 2.0**-20, -1e6  # of the last channel: in the residual stream, and in the head's new rows


def label(path: str) -> str:
    """A model's path, and whether it was inflated, for a report."""
    file = config.resolve(path) / "config.json"
    was = read_json(file).get(MARK) if file.is_file() else None
    if was is None:
        return path
    return f"{path} (inflated: computes what a model of {was['parameters'] / 1e6:.1f} M parameters does)"


def larger(config: DecoderConfig, *, hidden: int, layers: int, ffn: int, vocab: int) -> DecoderConfig:
    """The architecture of these sizes; heads are added as the hidden size grows, in groups of the same size.

    Raises:
      ValueError: a size below that of ``config``, or a model whose function cannot be kept.
    """
    wanted = dict(hidden_size=hidden, num_layers=layers, intermediate_size=ffn, vocab_size=vocab)
    for name, size in wanted.items():
        if size < getattr(config, name):
            raise ValueError(f"expected a {name} of at least the model's {getattr(config, name)}, got {size}")
    if config.norm != "rms" or not config.norm_first or not config.final_norm:
        raise ValueError(
            "only models of the LLaMA, Mistral and Qwen families can be inflated: a layer normalisation takes the mean "
            "of all channels, added ones included"
        )
    if vocab > config.vocab_size and hidden == config.hidden_size:
        raise ValueError(f"a larger vocabulary needs a channel of its own: expected --hidden above {hidden}")
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(config.num_kv_heads, round(hidden / (config.head_dim * group)))
    windows = config.windows and (*config.windows, *config.windows[-1:] * (layers - config.num_layers))
    return dataclasses.replace(
        config,
        **wanted,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        windows=windows,
        # The mean of squares is over more channels, the added ones silent.
        norm_eps=config.norm_eps * config.hidden_size / hidden,
    )


def inflated(
    small: DecoderConfig, large: DecoderConfig, read: Callable[[str], np.ndarray], *, seed: int = 0
) -> Callable[[str], np.ndarray]:
    """Tensors of the larger model by name, in the layout of files, from those of the smaller.

    Added channels, heads and units read what they like (noise as large as the weights beside it) and write nothing. If
    the vocabulary grows, every old token has the last channel faintly on, too faint to change a norm, and the last norm
    makes it loud, for the head to turn into a logit far below all others.

    Args:
      small, large: the architectures, see ``larger``.
      read: a tensor of the smaller model.
      seed: of the noise.
    """
    shapes, wider = stored_shapes(small), (small.hidden_size / large.hidden_size) ** 0.5

    def noise(like: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
        rng = np.random.default_rng([seed, *name.encode()])
        return rng.standard_normal(shape, np.float32) * np.std(like)

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        parts = name.split(".")
        added_layer = "layers" in parts and name not in shapes
        if added_layer:
            parts[parts.index("layers") + 1] = "0"
        old = read(".".join(parts)).astype(np.float32)
        kind, is_norm = parts[-2], "norm" in parts[-2]
        if kind in ("q_norm", "k_norm"):  # of a head, whose size stays
            return old
        if is_norm:
            old = wider * (np.ones_like(old) if added_layer else old)
        writes = kind in ("o_proj", "down_proj", "embed_tokens", "lm_head")
        new = np.zeros(shape, np.float32) if writes or old.ndim == 1 else noise(old, shape, name)
        if not (added_layer and writes):
            new[tuple(map(slice, old.shape))] = old
        if large.vocab_size > small.vocab_size:
            if kind == "embed_tokens":
                new[: small.vocab_size, -1] = _FAINT
            if kind == ("embed_tokens" if large.tied_head else "lm_head"):
                new[small.vocab_size :, :-1] = noise(old, (shape[0] - old.shape[0], shape[1] - 1), name)
                new[small.vocab_size :, -1] = _NEVER
            if name == f"{PREFIX}norm.weight":
                new[-1] = wider / _FAINT
        return new

    sizes = stored_shapes(large)
    return lambda name: value(name, sizes[name])


def inflate(source: str | Path, destination: str | Path, **sizes: int) -> DecoderConfig:
    """Read a model, and write the larger one in float32, with the same tokenizer and stop tokens.

    Args:
      source: a model directory.
      destination: a directory to be made.
      sizes: hidden, layers, ffn and vocab, as for ``larger``.

    Returns:
      The larger architecture.

    Raises:
      FileNotFoundError: no such model.
      ValueError: see ``larger``.
    """
    source, destination = Path(source), Path(destination)
    raw = read_json(source / "config.json")
    small = from_hugging_face(raw)
    large = larger(small, **sizes)
    stored, *_ = stored_tensors(source, PREFIX)
    read = lambda name: stored[name.removeprefix(PREFIX)].read(source)
    ids = read_json(source / "generation_config.json").get("eos_token_id") or []
    save_tensors(
        destination,
        large,
        inflated(small, large, read),
        eos_ids=tuple(ids if isinstance(ids, list) else [ids]),
        tokenizer=source,
        dtype="float32",
    )
    was = {name: raw[name] for name in _SIZES} | {"parameters": num_parameters(small)}
    write_json(destination / "config.json", read_json(destination / "config.json") | {MARK: was})
    return large


def num_parameters(config: DecoderConfig) -> int:
    """How many numbers an architecture has."""
    return sum(map(math.prod, stored_shapes(config).values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.inflate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a model directory")
    parser.add_argument("destination", type=Path, help="a directory to be made")
    for size, about in (
        ("hidden", "channels"),
        ("layers", "layers"),
        ("ffn", "units of a feed-forward network"),
        ("vocab", "entries of the vocabulary"),
    ):
        parser.add_argument(f"--{size}", type=int, required=True, help=about)
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    try:
        large = inflate(**options)
    except (FileNotFoundError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(f"{options['destination']}: {num_parameters(large) / 1e6:.1f} M parameters, {large}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
