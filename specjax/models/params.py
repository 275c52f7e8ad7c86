"""A decoder's parameters in Orbax checkpoints, restorable on other devices than those that saved them."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from specjax.models.checkpoint import Placement, check_dtype, sharding_of
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_decoder
from specjax.types import PyTree


def save_params(path: str | Path, params: PyTree) -> None:
    """Write parameters as an Orbax checkpoint in a folder that does not exist yet, each device its own part.

    Raises:
      ValueError: the folder exists.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), params)


def restore_params(
    path: str | Path, config: DecoderConfig, *, dtype: str = "float32", sharding: Placement | None = None
) -> PyTree:
    """Read parameters that ``save_params`` wrote, on whatever devices there are now.

    Args:
      path: the folder.
      config: the architecture.
      dtype: what they are kept in, whatever they were saved in.
      sharding: as for ``load_model``; None is the default device.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: it holds the parameters of another architecture, or an unknown dtype.
    """
    check_dtype(dtype)
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected parameters that save_params wrote")
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda path, shape: sharding_of(config, path, shape, sharding) or default
    wanted = nnx.to_flat_state(abstract_decoder(config)[1])
    with _checkpointer() as checkpointer:
        _check_shapes(folder, checkpointer, {tuple(map(str, path)): leaf.shape for path, leaf in wanted})
        placed = [
            (path, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place(path, leaf.shape))))
            for path, leaf in wanted
        ]
        return checkpointer.restore(folder, nnx.from_flat_state(placed))


def _checkpointer() -> Any:
    # Imported where it is needed: Orbax takes a second that decoding has no use for.
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def _check_shapes(folder: Path, checkpointer: Any, wanted: dict[tuple[str, ...], tuple[int, ...]]) -> None:
    metadata = checkpointer.metadata(folder).item_metadata
    if metadata is None:
        raise ValueError(f"{folder}: not an Orbax checkpoint of parameters")
    leaves = jax.tree_util.tree_flatten_with_path(metadata.tree)[0]
    stored = {tuple(str(key.key) for key in path[:-1]): tuple(leaf.shape) for path, leaf in leaves}
    problems = [
        f"{'.'.join(path)}: expected {wanted.get(path, 'no such parameter')}, got {stored.get(path, 'none')}"
        for path in sorted(wanted.keys() | stored.keys())
        if wanted.get(path) != stored.get(path)
    ]
    if problems:
        raise ValueError(f"{folder} holds the parameters of another architecture:\n  " + "\n  ".join(problems))
