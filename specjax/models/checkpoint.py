"""Models from and to Hugging Face directories: config.json, safetensors with or without an index."""

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from pallas_kernels.tree_attention import TreeAttention
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_decoder, decoder_functions
from specjax.models.families import HEAD, PREFIX, from_hugging_face, tensor_name, to_hugging_face
from specjax.models.files import DTYPES, INDEX, WEIGHTS, Stored, read_json, stored_tensors, write_json
from specjax.models.hub import find_model
from specjax.types import Model, PyTree

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_DTYPE_NAMES = ("float32", "bfloat16", "float16")

type Placement = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


class _Parameter(NamedTuple):
    """A parameter of an architecture, and the tensor that holds it in files."""

    path: tuple[Any, ...]
    leaf: Any  # with a shape instead of a value
    name: str
    shape: tuple[int, ...]


def _parameters(config: DecoderConfig) -> list[_Parameter]:
    def describe(path: tuple[Any, ...], leaf: Any) -> _Parameter:
        return _Parameter(path, leaf, tensor_name(config, path), tuple(leaf.shape))

    return [describe(path, leaf) for path, leaf in nnx.to_flat_state(abstract_decoder(config)[1])]


def stored_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of an architecture by its Hugging Face name, and its shape."""
    return {parameter.name: parameter.shape for parameter in _parameters(config)}


def sharding_of(
    config: DecoderConfig, path: tuple[Any, ...], shape: tuple[int, ...], placement: Placement | None
) -> jax.sharding.Sharding | None:
    """Where the parameter at a path of ``Decoder`` goes; None is the default device."""
    return placement(tensor_name(config, path), shape) if callable(placement) else placement


def _is_buffer(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")  # old files store what positions are computed from


def _eos_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    source = directory / "generation_config.json"
    ids = read_json(source).get("eos_token_id") if source.exists() else None
    if ids is None:
        source = directory / "config.json"
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    listed = ids if isinstance(ids, list) else [ids]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config["vocab_size"]:
            raise ValueError(
                f"{source}: eos_token_id is {ids!r}; expected a token id in [0, {config['vocab_size']}), or several"
            )
    return tuple(listed)


def _mismatches(
    config: DecoderConfig,
    stored: dict[str, Stored],
    promised: set[str],
    wanted: dict[str, _Parameter],
) -> list[str]:
    """Everything in which the tensors of the files differ from those of the architecture."""
    problems = []
    for short in sorted(wanted.keys() - stored.keys() - promised):
        hint = " (config.json does not tie the head to the embedding)" if short == HEAD else ""
        problems.append(f"{wanted[short].name}: missing{hint}")
    for short, tensor in sorted(stored.items()):
        if _is_buffer(short) or (config.tied_head and short == HEAD):
            continue
        if short not in wanted:
            problems.append(f"{tensor.name}: in {tensor.file}, but this architecture has no such tensor")
        elif tensor.shape != wanted[short].shape:
            problems.append(f"{tensor.name}: expected shape {list(wanted[short].shape)}, got {list(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{tensor.name}: expected dtype F32, F16 or BF16, got {tensor.dtype}")
    return problems


def check_dtype(dtype: str) -> None:
    """Refuse what weights cannot be kept in.

    Raises:
      ValueError: naming what they can.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"unknown dtype {dtype!r}; expected {', '.join(_DTYPE_NAMES)}")


def load_model(
    path: str | Path,
    *,
    attention: str | TreeAttention | None = None,
    dtype: str = "float32",
    sharding: Placement | None = None,
) -> Model:
    """Read a model of the LLaMA, Mistral, Qwen2.5, Qwen3 or OPT family from a Hugging Face directory.

    Tensors are read one by one, the largest first, and each goes to its dtype and devices before the next is read: the
    host needs memory for the one in hand beside the model. Where an index exists it alone says which files hold
    weights; files it does not name are ignored. EOS ids come from generation_config.json, or from config.json if it
    names none there.

    Args:
      path: the directory, or the id of a model on the hub (``org/name``), which is downloaded once.
      attention: the tree attention to use, the name of an implementation or a function of the same signature; None
        picks one for the device. A named one that cannot run raises when the model does.
      dtype: what the weights and the cache are kept in, whatever they are stored in.
      sharding: of every parameter, or a function from a parameter's Hugging Face name and its shape (matrices are
        [outputs, inputs]) to its sharding; None is the default device. Meshes whose axes are Auto leave the sharding of
        everything else to the compiler.

    Raises:
      FileNotFoundError: no such directory, config or weights, or a model that the hub does not give.
      ValueError: everything that is wrong with the files, in one list: missing, truncated, misshaped or unused
        tensors; or weights that only exist as pickles, an architecture that is not supported, stop tokens that are no
        token ids, an unknown dtype.
    """
    check_dtype(dtype)
    directory = find_model(path)
    raw = read_json(directory / "config.json")
    try:
        config = from_hugging_face(raw)
    except ValueError as error:
        raise ValueError(f"{directory} cannot be loaded:\n  {error}") from None
    eos_ids = _eos_ids(directory, raw)
    wanted = {parameter.name.removeprefix(PREFIX): parameter for parameter in _parameters(config)}
    functions = decoder_functions(config, attention, dtype)
    stored, promised, problems = stored_tensors(directory, PREFIX)
    problems += _mismatches(config, stored, promised, wanted)
    if problems:
        raise ValueError(f"{directory} cannot be loaded:\n  " + "\n  ".join(problems))
    _warn_of_another_head(directory, config, stored)

    def place(short: str, parameter: _Parameter) -> jax.Array:
        value = stored[short].read(directory)
        where = sharding_of(config, parameter.path, value.shape, sharding)
        # Copied into the order and dtype of a device's memory here, for jax's own conversions keep more copies.
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(value, jax.numpy.dtype(dtype))
        if dtype == "float16" and np.isinf(value).any():
            raise ValueError(f"{directory}: {short} has values beyond float16; load with dtype='bfloat16' or 'float32'")
        return jax.block_until_ready(jax.device_put(value, where))

    by_size = sorted(wanted.items(), key=lambda item: math.prod(item[1].shape), reverse=True)
    placed = [(parameter.path, parameter.leaf.replace(place(short, parameter))) for short, parameter in by_size]
    params = nnx.from_flat_state(placed)
    return functions.model(config, params, eos_ids, str(directory))


def _warn_of_another_head(directory: Path, config: DecoderConfig, stored: dict[str, Stored]) -> None:
    if not config.tied_head or HEAD not in stored:
        return
    embedding = next(tensor for short, tensor in stored.items() if short.endswith("embed_tokens.weight"))
    if not np.array_equal(stored[HEAD].read(directory), embedding.read(directory)):
        warnings.warn(
            f"{directory}: {HEAD} differs from the embedding, but config.json ties the two; the embedding is used",
            stacklevel=3,
        )


def save_model(
    path: str | Path,
    config: DecoderConfig,
    params: PyTree,
    *,
    eos_ids: tuple[int, ...] = (),
    tokenizer: str | Path | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a Hugging Face directory that ``load_model`` and transformers read back.

    Args:
      path: the directory; made if it is missing. Its files of these names are replaced.
      config: the architecture.
      params: its parameters.
      eos_ids: written to generation_config.json.
      tokenizer: a tokenizer.json, or a model directory whose tokenizer and chat template are copied.
      dtype: float32, float16 or bfloat16, what the weights are stored in.
      max_shard_bytes: above this size the weights are split into shards with an index. A single tensor is not split.

    Raises:
      ValueError: a dtype that cannot be stored, or an architecture that no family has.
    """
    leaves = {tensor_name(config, key): leaf for key, leaf in nnx.to_flat_state(params)}
    value = lambda name: np.asarray(leaves[name][...])
    save_tensors(
        path, config, value, eos_ids=eos_ids, tokenizer=tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def save_tensors(
    path: str | Path,
    config: DecoderConfig,
    value: Callable[[str], np.ndarray],
    *,
    eos_ids: tuple[int, ...] = (),
    tokenizer: str | Path | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """As ``save_model``, from ``value(name)``, a tensor in the shape that ``stored_shapes`` gives for its name."""
    check_dtype(dtype)
    described = to_hugging_face(config, eos_ids, dtype)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    wide = jax.numpy.dtype(dtype)

    shards: list[list[str]] = [[]]
    sizes = {name: math.prod(shape) * wide.itemsize for name, shape in stored_shapes(config).items()}
    for name in sorted(sizes):
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    for old in [directory / INDEX, *directory.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    if len(shards) == 1:
        files = {WEIGHTS: shards[0]}
    else:
        files = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
        weight_map = {name: file for file, shard in files.items() for name in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    for file, shard in files.items():
        tensors = {name: np.ascontiguousarray(value(name), wide) for name in shard}
        safetensors.numpy.save_file(tensors, directory / file, {"format": "pt"})
    write_json(directory / "config.json", described)
    write_json(directory / "generation_config.json", {"eos_token_id": list(eos_ids)})
    if tokenizer is not None:
        source = Path(tokenizer)
        for file in [source] if source.is_file() else [source / name for name in _TOKENIZER_FILES]:
            if file.exists():
                shutil.copyfile(file, directory / (file.name if source.is_dir() else "tokenizer.json"))
