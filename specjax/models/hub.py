"""Model directories by path, or by the id of a model on the Hugging Face hub."""

import re
from pathlib import Path

_TEXTS = ["*.json", "*.jinja"]
_WEIGHTS = ["*.safetensors"]  # no pickles
_OTHER = ["consolidated*", "original/*"]  # the same weights under other names
_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def find_model(path: str | Path, *, weights: bool = True) -> Path:
    """The directory of a model: ``path`` itself, or a snapshot of the hub's model of this id, downloaded once.

    What is not a directory and looks like ``org/name`` is taken for an id. ``huggingface_hub`` decides where snapshots
    are kept and how one logs in. Without ``weights`` only what says what a model is comes: config, tokenizer, template.

    Raises:
      FileNotFoundError: there is no such directory, and the hub has no such model, does not let one have it, or cannot
        be reached.
    """
    directory = Path(path)
    if directory.exists() or not (isinstance(path, str) and _ID.fullmatch(path)):
        return directory
    # Imported where they are needed: directories need no client of the hub.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        wanted = _TEXTS + _WEIGHTS if weights else _TEXTS
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=wanted, ignore_patterns=_OTHER))
    except errors.GatedRepoError:
        why = "its authors ask that you accept their terms on its page, and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "the hub has no public model of this id; for a private one, log in with `hf auth login`"
    except errors.HFValidationError as error:
        why = f"this cannot be the id of a model ({error})"
    except Exception as error:  # whatever a lost connection is called by the client's client
        reason = str(error).strip().partition("\n")[0]
        why = (
            f"the hub cannot be reached, and no copy was downloaded before ({type(error).__name__}: {reason}); where "
            f"it can be, run `hf download {path}`, and pass the directory that it prints"
        )
    raise FileNotFoundError(f"{path}: no such directory, and no model to be had from the hub: {why}")
