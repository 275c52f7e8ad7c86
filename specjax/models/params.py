"""A decoder's parameters in Orbax checkpoints, restorable on other devices than those that saved them."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax import nnx

from specjax.models.checkpoint import Placement, sharding_of
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract_decoder
from specjax.types import PyTree


def save_params(path: str | Path, params: PyTree) -> None:
    """Write parameters as an Orbax checkpoint in a folder that does not exist yet, each device its own part.

    Raises:
      ValueError: the folder exists.
    """
    with ocp.StandardCheckpointer() as checkpointer:
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
      ValueError: it holds the parameters of another architecture.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected parameters that save_params wrote")
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda key, shape: sharding_of(config, key, shape, sharding) or default
    flat = [
        (key, leaf.replace(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place(key, leaf.shape))))
        for key, leaf in nnx.to_flat_state(abstract_decoder(config)[1])
    ]
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(folder, nnx.from_flat_state(flat))
        except ValueError as error:
            raise ValueError(f"{folder} does not hold the parameters of this architecture: {error}") from None
