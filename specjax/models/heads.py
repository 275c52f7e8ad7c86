"""Draft heads from and to directories: Medusa's and EAGLE's, each a config.json beside a model.safetensors."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from pallas_kernels.tree_attention import TreeAttention
from specjax.models.eagle import EagleConfig, abstract_eagle, eagle_model
from specjax.models.files import DTYPES, WEIGHTS, read_json, stored_tensors, write_json
from specjax.models.medusa import MedusaConfig, abstract_medusa, medusa_model
from specjax.types import Model, PyTree

_CONFIG = "config.json"
_KINDS: dict[str, type[MedusaConfig] | type[EagleConfig]] = {
    "specjax_medusa": MedusaConfig,
    "specjax_eagle": EagleConfig,
}


def is_heads(directory: str | Path) -> bool:
    """Whether a directory's config.json says that it holds draft heads, for ``load_heads`` and not ``load_model``."""
    try:
        return read_json(Path(directory) / _CONFIG).get("model_type") in _KINDS
    except (OSError, ValueError):
        return False


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


def save_heads(
    path: str | Path, config: MedusaConfig | EagleConfig, params: PyTree, *, dtype: str = "bfloat16"
) -> None:
    """Write draft heads as a directory that ``load_heads`` reads back; its files of these names are replaced.

    Tensors are named by their path among the parameters; matrices are [outputs, inputs].

    Args:
      path: the directory; made if it is missing.
      config: their shape.
      params: the parameters.
      dtype: float32, float16 or bfloat16, what they are stored in.

    Raises:
      ValueError: a dtype that cannot be stored.
    """
    kinds = {str(kind): kind for kind in DTYPES.values()}
    if dtype not in kinds:
        raise ValueError(f"expected dtype {', '.join(kinds)}, got {dtype!r}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _name(key): np.ascontiguousarray(np.asarray(leaf[...]).astype(kinds[dtype]))
        for key, leaf in nnx.to_flat_state(params)
    }
    safetensors.numpy.save_file(tensors, directory / WEIGHTS)
    (kind,) = (kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    write_json(directory / _CONFIG, {"model_type": kind, **dataclasses.asdict(config)})


def _name(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _read_config(directory: Path) -> MedusaConfig | EagleConfig:
    file = directory / _CONFIG
    raw = read_json(file)
    kind = raw.get("model_type")
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
    wanted = {_name(key): (key, leaf) for key, leaf in nnx.to_flat_state(abstract)}
    stored, _, problems = stored_tensors(directory, "")
    if not problems:
        problems += [f"{name}: missing" for name in sorted(wanted.keys() - stored.keys())]
    for name, tensor in sorted(stored.items()):
        if name not in wanted:
            problems.append(f"{name}: config.json describes no such tensor")
        elif tensor.shape != wanted[name][1].shape:
            problems.append(f"{name}: expected shape {list(wanted[name][1].shape)}, got {list(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{name}: expected dtype {', '.join(DTYPES)}, got {tensor.dtype}")
    if problems:
        raise ValueError(f"{directory} cannot be loaded:\n  " + "\n  ".join(problems))
    return nnx.from_flat_state(
        [(key, leaf.replace(jnp.asarray(stored[name].read(directory), dtype))) for name, (key, leaf) in wanted.items()]
    )
