"""Models from and to Hugging Face directories: config.json, safetensors with or without an index."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from pallas_kernels.tree_attention import TreeAttention
from specjax.models.config import DecoderConfig, from_hugging_face, to_hugging_face
from specjax.models.decoder import abstract_decoder, make_model
from specjax.types import Model, PyTree

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _tensor_name(path: tuple[Any, ...]) -> str:
    """The Hugging Face name of the parameter at a path of ``Decoder``."""
    parts = [str(part) for part in path]
    if parts[-1] in ("kernel", "scale"):
        parts[-1] = "weight"
    elif parts[-1] == "embed_tokens":
        parts.append("weight")
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def _is_transposed(path: tuple[Any, ...]) -> bool:
    # Hugging Face stores W of x @ W.T; here a kernel is W of x @ W.
    return path[-1] == "kernel"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected a Hugging Face model directory") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _eos_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    source = directory / "generation_config.json"
    ids = _read_json(source).get("eos_token_id") if source.exists() else None
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


def _weight_map(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The weight files to read, and what the index says each tensor is in (empty without an index)."""
    if (directory / _INDEX).exists():
        weight_map = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{directory / _INDEX}: expected an object with a 'weight_map' object")
        return sorted(set(weight_map.values())), weight_map
    if (directory / _WEIGHTS).exists():
        return [_WEIGHTS], {}
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ValueError(
            f"{directory} holds its weights only as PyTorch pickles ({', '.join(pickled)}), which are not read. "
            "Convert them with transformers: AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(PATH, "
            "safe_serialization=True)"
        )
    raise FileNotFoundError(f"{directory}: no weights; expected {_WEIGHTS} or {_INDEX} with its shards")


@contextlib.contextmanager
def _opened(directory: Path, names: list[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The readers of the weight files by name, and what is wrong with those that cannot be read."""
    readers, problems = {}, []
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                readers[name] = stack.enter_context(safetensors.safe_open(directory / name, framework="numpy"))
            except FileNotFoundError:
                problems.append(f"{name}: this weight file is missing")
            except (safetensors.SafetensorError, OSError) as error:
                problems.append(f"{name}: truncated or not a safetensors file ({error})")
        yield readers, problems


def _is_buffer(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")  # old files store what positions are computed from


def _check_tensors(
    config: DecoderConfig, readers: dict[str, Any], weight_map: dict[str, str], expected: dict[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str]]:
    """Which file each tensor is in, and every mismatch between the files and the architecture."""
    home = {tensor: name for name, reader in readers.items() for tensor in reader.keys()}  # noqa: SIM118  no dict
    problems = [
        f"{tensor}: the index says it is in {name}, and it is not"
        for tensor, name in weight_map.items()
        if name in readers and home.get(tensor) != name
    ]
    for tensor in sorted(expected.keys() - home.keys() - weight_map.keys()):
        hint = " (config.json does not tie the head to the embedding)" if tensor == _HEAD else ""
        problems.append(f"{tensor}: missing{hint}")
    for tensor, name in sorted(home.items()):
        if _is_buffer(tensor) or (config.tied_head and tensor == _HEAD):
            continue
        described = readers[name].get_slice(tensor)
        shape, dtype = tuple(described.get_shape()), described.get_dtype()
        if tensor not in expected:
            problems.append(f"{tensor}: in {name}, but this architecture has no such tensor")
        elif shape != expected[tensor]:
            problems.append(f"{tensor}: expected shape {list(expected[tensor])}, got {list(shape)}")
        elif dtype not in _DTYPES:
            problems.append(f"{tensor}: expected dtype F32, F16 or BF16, got {dtype}")
    return home, problems


def load_model(path: str | Path, *, attention: str | TreeAttention | None = None, dtype: str = "float32") -> Model:
    """Read a model from a Hugging Face directory.

    Where an index exists it alone says which files hold weights; files it does not name are ignored. EOS ids come from
    generation_config.json, or from config.json if it names none there.

    Args:
      path: the directory.
      attention: the tree attention to use, the name of an implementation or a function of the same signature; None
        picks one for the device. A named one that cannot run raises when the model does.
      dtype: what the weights and the cache are kept in, whatever they are stored in.

    Raises:
      FileNotFoundError: no such directory, config or weights.
      ValueError: everything that is wrong with the files, in one list: missing, truncated, misshaped or unused
        tensors, weights that only exist as pickles, an architecture that is not supported, stop tokens that are no
        token ids, an unknown dtype.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"unknown dtype {dtype!r}; expected float32, bfloat16 or float16")
    directory = Path(path)
    raw = _read_json(directory / "config.json")
    config = from_hugging_face(raw)
    eos_ids = _eos_ids(directory, raw)
    graph_params = nnx.to_flat_state(abstract_decoder(config)[1])
    expected = {
        _tensor_name(key): tuple(leaf.shape[::-1] if _is_transposed(key) else leaf.shape) for key, leaf in graph_params
    }
    files, weight_map = _weight_map(directory)
    with _opened(directory, files) as (readers, problems):
        home: dict[str, str] = {}
        if not problems:
            home, problems = _check_tensors(config, readers, weight_map, expected)
        if problems:
            raise ValueError(f"{directory} cannot be loaded:\n  " + "\n  ".join(problems))

        def read(tensor: str) -> np.ndarray:
            return readers[home[tensor]].get_tensor(tensor)

        if config.tied_head and _HEAD in home and not np.array_equal(read(_HEAD), read(_EMBEDDING)):
            warnings.warn(
                f"{directory}: {_HEAD} differs from the embedding, but config.json ties the two; the embedding is used",
                stacklevel=2,
            )
        flat = []
        for key, leaf in graph_params:
            value = read(_tensor_name(key))
            flat.append((key, leaf.replace(jax.numpy.asarray(value.T if _is_transposed(key) else value, dtype))))
    params = nnx.from_flat_state(flat)
    return make_model(config, params, attention=attention, dtype=dtype, eos_ids=eos_ids, directory=str(directory))


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
    """Write a model as a Hugging Face directory that ``load_model`` reads back.

    Args:
      path: the directory; made if it is missing. Its files of these names are replaced.
      config: the architecture.
      params: its parameters.
      eos_ids: written to generation_config.json.
      tokenizer: a tokenizer.json to copy beside the weights.
      dtype: float32, float16 or bfloat16, what the weights are stored in.
      max_shard_bytes: above this size the weights are split into shards with an index. A single tensor is not split.

    Raises:
      ValueError: a dtype that cannot be stored.
    """
    stored = {str(value): value for value in _DTYPES.values()}
    if dtype not in stored:
        raise ValueError(f"expected dtype {', '.join(stored)}, got {dtype!r}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, leaf in nnx.to_flat_state(params):
        value = np.asarray(leaf[...]).astype(stored[dtype])
        tensors[_tensor_name(key)] = np.ascontiguousarray(value.T if _is_transposed(key) else value)

    shards: list[dict[str, np.ndarray]] = [{}]
    for name in sorted(tensors):
        used = sum(tensor.nbytes for tensor in shards[-1].values())
        if shards[-1] and used + tensors[name].nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensors[name]
    for old in [directory / _INDEX, *directory.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    if len(shards) == 1:
        files = {_WEIGHTS: shards[0]}
    else:
        files = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, shard in files.items() for name in shard},
        }
        _write_json(directory / _INDEX, index)
    for file, shard in files.items():
        safetensors.numpy.save_file(shard, directory / file, metadata={"format": "pt"})
    _write_json(directory / "config.json", to_hugging_face(config, eos_ids, dtype))
    _write_json(directory / "generation_config.json", {"eos_token_id": list(eos_ids)})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
