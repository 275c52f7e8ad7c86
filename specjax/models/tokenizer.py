"""Tokenizers from Hugging Face directories."""

from pathlib import Path

import tokenizers

from specjax.models.hub import find_model


def load_tokenizer(path: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory, of a model on the hub, or of a tokenizer.json.

    Raises:
      FileNotFoundError: the directory has no tokenizer.json.
      ValueError: the file is not one the ``tokenizers`` library reads.
    """
    file = find_model(path, weights=False)
    if file.suffix != ".json":
        file = file / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: no such file; expected the tokenizer of a Hugging Face model directory. Older models have it "
            "in other files only. Convert those with transformers: "
            "AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file}: not a tokenizer file: {error}") from error
