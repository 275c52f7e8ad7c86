"""The corpus of the zoo: the running interpreter's own standard library, split by file, as token arrays."""

import dataclasses
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments import config as configs

END_OF_TEXT = "<|endoftext|>"
_HELD_OUT_PERCENT = 3
# Installed packages are not the standard library; the other two are generated tables and prose, not code.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token arrays, each document preceded by the end-of-text token and the last one followed by it."""

    tokenizer: Path  # tokenizer.json
    slices: tuple[np.ndarray, ...]  # uint16 training tokens, one array per slice of the files
    held_out: np.ndarray  # uint16, files no model is trained on
    eos_id: int
    digest: str  # of the files' names and contents


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Whether the file of this relative path is kept from training; it depends on nothing but the path."""
    return _digest(f"held out: {name}") % 100 < _HELD_OUT_PERCENT


def slice_of(name: str, slices: int) -> int:
    """The training slice a file belongs to."""
    return _digest(f"slice: {name}") % slices


def sources(root: Path | str | None = None) -> dict[str, str]:
    """Python files below ``root`` (the interpreter's standard library) by relative path, in a shuffled fixed order.

    Files that are not UTF-8, which are test inputs, are left out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else configs.resolve(str(root))
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT.isdisjoint(name.split("/")):
            try:
                found[name] = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
    # Neighbours in a folder resemble each other, so the order is that of the hashes.
    return dict(sorted(found.items(), key=lambda item: _digest(item[0])))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that can write any text; its last entry is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _read(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    if END_OF_TEXT not in tokenizer.get_vocab():
        raise ValueError(f"{path}: expected a tokenizer with the token {END_OF_TEXT}, which parts documents")
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str], eos_id: int) -> np.ndarray:
    parts = [np.array([eos_id, *encoding.ids], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([*parts, np.array([eos_id], np.uint16)])


def load(
    folder: Path, *, vocab_size: int, slices: int, root: Path | str | None = None, tokenizer: Path | None = None
) -> Corpus:
    """Read the token arrays from ``folder``, making them first if they are missing or made from other files.

    Args:
      folder: where they are kept.
      vocab_size: of the tokenizer.
      slices: the training files are dealt into so many.
      root: folder of Python files, as a config names it; None is the interpreter's standard library.
      tokenizer: the tokenizer.json of models that are to read the text; None trains one on it.

    Raises:
      ValueError: the source folder holds no Python file for one of the parts, or vocab_size does not fit 16 bits.
    """
    if not 256 < vocab_size <= 1 << 16:
        raise ValueError(f"expected vocab_size in 257..65536 (bytes, the end token, 16-bit ids), got {vocab_size}")
    files = sources(root)
    content = hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in files.items()).encode()).hexdigest()
    wanted = {"content": content, "vocab_size": vocab_size, "slices": slices}
    if tokenizer is not None:
        wanted["tokenizer"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    record = folder / "corpus.json"
    if not (record.exists() and (made := json.loads(record.read_text()))["wanted"] == wanted):
        training = {name: text for name, text in files.items() if not is_held_out(name)}
        by_slice = [[text for name, text in training.items() if slice_of(name, slices) == i] for i in range(slices)]
        held_out = [text for name, text in files.items() if is_held_out(name)]
        if not held_out or not all(by_slice):
            raise ValueError(f"too few Python files ({len(files)}) to fill {slices} slices and a held-out part")
        folder.mkdir(parents=True, exist_ok=True)
        encoder = train_tokenizer(training.values(), vocab_size) if tokenizer is None else _read(tokenizer)
        eos_id = encoder.get_vocab()[END_OF_TEXT]
        encoder.save(str(folder / "tokenizer.json"))
        for i, texts in enumerate(by_slice):
            np.save(folder / f"slice_{i}.npy", _encode(encoder, texts, eos_id))
        np.save(folder / "held_out.npy", _encode(encoder, held_out, eos_id))
        made = {
            "wanted": wanted,
            "eos_id": eos_id,
            "python": sys.version.split()[0],
            "files": len(files),
        }
        unfinished = record.with_suffix(".new")
        unfinished.write_text(json.dumps(made, indent=2) + "\n")
        os.replace(unfinished, record)  # the record comes last, so a killed run is made again
    return Corpus(
        tokenizer=folder / "tokenizer.json",
        slices=tuple(np.load(folder / f"slice_{i}.npy") for i in range(slices)),
        held_out=np.load(folder / "held_out.npy"),
        eos_id=made["eos_id"],
        digest=content,
    )
