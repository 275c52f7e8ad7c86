"""Draft heads from and to directories: Medusa's and EAGLE's, each a config.json beside a model.safetensors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from pallas_kernels.tree_attention import TreeAttention
from specjax.models.config import DecoderConfig
from specjax.models.eagle import abstract_eagle, eagle_model
from specjax.models.medusa import MedusaConfig, abstract_medusa, medusa_model
from specjax.types import Model, PyTree

HeadsConfig = MedusaConfig | DecoderConfig  # an EAGLE layer is described as a decoder's is

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_KINDS: dict[str, type[MedusaConfig] | type[DecoderConfig]] = {
    "specjax_medusa": MedusaConfig,
    "specjax_eagle": DecoderConfig,
}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_heads(directory: str | Path) -> bool:
    """Whether a directory's config.json says that it holds draft heads, for ``load_heads`` and not ``load_model``."""
    try:
        raw = json.loads((Path(directory) / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("model_type") in _KINDS


def load_heads(
    path: str | Path, target: Model, *, attention: str | TreeAttention | None = None, dtype: str = "float32"
) -> Model:
    """Read Medusa heads or an EAGLE layer as a draft model on top of ``target``, to be used as any SSM is.

    Args:
      path: a directory as ``save_heads`` writes it.
      target: the model they were trained for. Its embedding and head are used where they are, not copied.
      attention: EAGLE's tree attention, as in ``load_model``.
      dtype: what the weights and the cache are kept in, whatever they are stored in.

    Raises:
      FileNotFoundError: no config.json or weights.
      ValueError: the directory holds something else, its tensors are not those of its config, or the target is not one
        that such heads can read.
    """
    directory = Path(path)
    config = _read_config(directory)
    for name, own, given in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if own != given:
            raise ValueError(
                f"{directory} was trained for a target of {name} {own}; {target.directory or 'the target'} has "
                f"{'none' if given is None else given}"
            )
    if target.embed is None or target.head is None:
        raise ValueError(f"{directory} works on the target's embedding and head, and this target's Model names neither")
    if isinstance(config, MedusaConfig):
        params = _read_params(directory, abstract_medusa(config)[1], dtype)
        return medusa_model(config, params, target, dtype=dtype, directory=str(directory))
    params = _read_params(directory, abstract_eagle(config)[1], dtype)
    return eagle_model(config, params, target, attention=attention, dtype=dtype, directory=str(directory))


def save_heads(path: str | Path, config: HeadsConfig, params: PyTree, *, dtype: str = "bfloat16") -> None:
    """Write draft heads as a directory that ``load_heads`` reads back; its files of these names are replaced.

    Tensors are named by their path among the parameters, and stored as they multiply (x @ W).

    Args:
      path: the directory; made if it is missing.
      config: a ``MedusaConfig``, or a ``DecoderConfig`` for an EAGLE layer.
      params: the parameters.
      dtype: float32, float16 or bfloat16, what they are stored in.

    Raises:
      ValueError: a dtype that cannot be stored.
    """
    if dtype not in _STORED.values():
        raise ValueError(f"expected dtype {', '.join(_STORED.values())}, got {dtype!r}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _name(key): np.ascontiguousarray(np.asarray(leaf[...]).astype(jnp.dtype(dtype)))
        for key, leaf in nnx.to_flat_state(params)
    }
    safetensors.numpy.save_file(tensors, directory / _WEIGHTS)
    (kind,) = (kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    content = {"model_type": kind, **dataclasses.asdict(config)}
    (directory / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _name(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _read_config(directory: Path) -> HeadsConfig:
    file = directory / _CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file; expected a directory of draft heads") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in _KINDS:
        raise ValueError(
            f"{file}: model_type {kind!r} is no draft head, which are {', '.join(_KINDS)}; load_model reads models"
        )
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(_KINDS[kind])}
    given = {name: value for name, value in raw.items() if name != "model_type"}
    if given.keys() != fields.keys():
        raise ValueError(f"{file}: expected the keys model_type, {', '.join(fields)}; got {', '.join(raw)}")
    for name, value in given.items():
        if type(value) is not fields[name] and not (fields[name] is float and type(value) is int):
            raise ValueError(f"{file}: expected {name} to be {fields[name].__name__}, got {value!r}")
    try:
        return _KINDS[kind](**given)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_params(directory: Path, abstract: nnx.State, dtype: str) -> PyTree:
    """Parameters of these names and shapes, or one error that lists all that is wrong with the file."""
    file = directory / _WEIGHTS
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file; expected the weights beside config.json")
    expected = {_name(key): (key, leaf) for key, leaf in nnx.to_flat_state(abstract)}
    flat, problems = [], []
    try:
        with safetensors.safe_open(file, framework="numpy") as reader:
            names = set(reader.keys())
            problems += [f"{name}: missing" for name in sorted(expected.keys() - names)]
            problems += [f"{name}: config.json describes no such tensor" for name in sorted(names - expected.keys())]
            for name in sorted(names & expected.keys()):
                key, leaf = expected[name]
                described = reader.get_slice(name)
                shape, stored = tuple(described.get_shape()), described.get_dtype()
                if shape != leaf.shape:
                    problems.append(f"{name}: expected shape {list(leaf.shape)}, got {list(shape)}")
                elif stored not in _STORED:
                    problems.append(f"{name}: expected dtype {', '.join(_STORED)}, got {stored}")
                else:
                    flat.append((key, leaf.replace(jnp.asarray(reader.get_tensor(name), dtype))))
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from None
    if problems:
        raise ValueError(f"{file} cannot be loaded:\n  " + "\n  ".join(problems))
    return nnx.from_flat_state(flat)
