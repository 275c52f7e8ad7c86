"""Training states on disk: one Orbax checkpoint per step folder, the newest complete one restored."""

import json
import shutil
import warnings
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from specjax.train.step import TrainState

_PREFIX = "step_"


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _is_complete(path: Path) -> bool:
    # Whether Orbax renames a finished folder or writes into its final place depends on the file system; that it notes
    # the time of the commit does not.
    try:
        return bool(json.loads((path / "_CHECKPOINT_METADATA").read_text()).get("commit_timestamp_nsecs"))
    except (OSError, ValueError):
        return False


def save_checkpoint(folder: Path, state: TrainState, *, keep: int = 2) -> Path:
    """Write ``state`` to ``folder/step_N``; of the others stay the ``keep - 1`` newest complete ones."""
    folder = folder.absolute()
    target = folder / f"{_PREFIX}{int(state.step)}"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, state, force=True)
    older = [folder / f"{_PREFIX}{step}" for step in reversed(_steps(folder)) if step < int(state.step)]
    kept = {target, *[path for path in older if _is_complete(path)][: keep - 1]}
    for path in folder.glob(f"{_PREFIX}*"):  # unfinished ones of killed runs included
        if path not in kept:
            shutil.rmtree(path)
    return target


def restore_latest(folder: Path, like: TrainState) -> TrainState | None:
    """The newest complete checkpoint with the structure, shapes and dtypes of ``like``; None if there is none.

    A run that was killed while it wrote leaves an unfinished folder. It is passed over with a warning, so that an
    interrupted write costs the steps since the last complete one and no more.
    """
    for step in reversed(_steps(folder)):
        path = folder.absolute() / f"{_PREFIX}{step}"
        if not _is_complete(path):
            warnings.warn(f"{path} is an incomplete checkpoint; trying an older one", stacklevel=2)
            continue
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
    return None
