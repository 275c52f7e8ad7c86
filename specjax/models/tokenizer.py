"""Tokenizers from Hugging Face directories."""

from pathlib import Path

import tokenizers


def load_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory (or the tokenizer.json itself).

    Raises:
      FileNotFoundError: the directory has no tokenizer.json.
      ValueError: the file is not one the ``tokenizers`` library reads.
    """
    file = Path(path)
    if file.suffix != ".json":
        file = file / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file; expected the tokenizer of a Hugging Face model directory")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file}: not a tokenizer file: {error}") from error
