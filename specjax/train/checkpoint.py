"""Training states on disk: one Orbax checkpoint per step folder, the newest complete one restored."""

import shutil
import warnings
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from specjax.train.step import TrainState

_PREFIX = "step_"
_COMPLETE = "_CHECKPOINT_METADATA"  # Orbax writes it last


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def save_checkpoint(folder: Path, state: TrainState, *, keep: int = 2) -> Path:
    """Write ``state`` to ``folder/step_N`` and delete all but the ``keep`` newest."""
    step = int(state.step)
    target = (folder / f"{_PREFIX}{step}").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, state, force=True)
    for old in _steps(folder)[:-keep]:
        shutil.rmtree(folder / f"{_PREFIX}{old}")
    return target


def restore_latest(folder: Path, like: TrainState) -> TrainState | None:
    """The newest complete checkpoint with the structure, shapes and dtypes of ``like``; None if there is none.

    A run that was killed while it wrote leaves a folder without Orbax's closing record. Such a folder is passed over
    with a warning, so that one interrupted write costs the steps since the last complete one and no more.
    """
    for step in reversed(_steps(folder)):
        path = (folder / f"{_PREFIX}{step}").absolute()
        if not (path / _COMPLETE).exists():
            warnings.warn(f"{path} is an incomplete checkpoint; trying an older one", stacklevel=2)
            continue
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, abstract)
    return None
