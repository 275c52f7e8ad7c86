"""Files of a model directory: JSON, and tensors of safetensors files, with or without an index."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}


class Stored(NamedTuple):
    """A tensor in a file."""

    file: str
    name: str  # as the file has it
    shape: tuple[int, ...]
    dtype: str

    def read(self, directory: Path) -> np.ndarray:
        """Its values. The file is opened and closed, so that no page of it stays mapped into this process's memory."""
        with safetensors.safe_open(directory / self.file, framework="numpy") as reader:
            return reader.get_tensor(self.name)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected a Hugging Face model directory") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON that people can read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def stored_tensors(directory: Path, prefix: str) -> tuple[dict[str, Stored], set[str], list[str]]:
    """What a directory's weight files hold; names are without ``prefix``, which some files have and some have not.

    Where an index exists it alone says which files hold weights; files it does not name are ignored.

    Returns:
      The tensors by name, the names that the index promises, and what is wrong with the files.

    Raises:
      FileNotFoundError: there are no weights.
      ValueError: the index is not one, or the weights exist only as pickles.
    """
    weight_map: dict[str, str] = {}
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map") or {}
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{directory / INDEX}: expected an object with a 'weight_map' object of file names")
        files = sorted(set(weight_map.values()))
    elif (directory / WEIGHTS).exists():
        files = [WEIGHTS]
    else:
        raise _no_weights(directory)
    found: dict[str, Stored] = {}
    problems = []
    for file in files:
        try:
            tensors = _tensors(directory, file)
        except FileNotFoundError:
            problems.append(f"{file}: this weight file is missing")
            continue
        except (safetensors.SafetensorError, OSError) as error:
            problems.append(f"{file}: truncated or not a safetensors file ({error})")
            continue
        names = {tensor.name for tensor in tensors}
        problems += [
            f"{name}: the index says it is in {file}, and it is not"
            for name, place in weight_map.items()
            if place == file and name not in names
        ]
        for tensor in tensors:
            twin = found.setdefault(tensor.name.removeprefix(prefix), tensor)
            if twin is not tensor:
                problems.append(f"{tensor.name}: in {file}, and {twin.name} in {twin.file}; expected it once")
    return found, {name.removeprefix(prefix) for name in weight_map}, problems


def _tensors(directory: Path, file: str) -> list[Stored]:
    with safetensors.safe_open(directory / file, framework="numpy") as reader:
        described = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  no dict
        return [Stored(file, name, tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in described.items()]


def _no_weights(directory: Path) -> Exception:
    convert = (
        "Convert them with transformers: AutoModelForCausalLM.from_pretrained(NAME, dtype='auto').save_pretrained(DIR) "
        "with the model's id or directory as NAME; then pass DIR"
    )
    pickled = ", ".join(sorted(path.name for path in directory.glob("*.bin")))
    if pickled:
        return ValueError(
            f"{directory} has its weights only as PyTorch pickles ({pickled}), which are not read. {convert}"
        )
    expected = f"expected {WEIGHTS} or {INDEX} with its shards"
    return FileNotFoundError(f"{directory}: no weights; {expected}. Some models on the hub are pickles only. {convert}")
