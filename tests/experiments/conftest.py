"""Tiny random models in directories, as the runner reads them."""

import pathlib

import jax
import pytest
import tokenizers

from specjax.models import DecoderConfig, init_model, save_model


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> pathlib.Path:
    """A tokenizer.json with a token per byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(tokenizers.models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return path


@pytest.fixture(scope="session")
def zoo(tmp_path_factory, byte_tokenizer) -> pathlib.Path:
    """Directories target, near (the target again, a perfect draft), far and other (drafts of other weights)."""
    directory = tmp_path_factory.mktemp("zoo")
    config = DecoderConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
        tied_head=True,
    )
    for name, seed in (("target", 0), ("near", 0), ("far", 1), ("other", 2)):
        model = init_model(config, jax.random.key(seed))
        # Random weights of the usual size make every token about equally likely; larger ones give a text that varies.
        params = jax.tree.map(lambda leaf: leaf * 4, model.params)
        save_model(directory / name, config, params, tokenizer=byte_tokenizer, dtype="float32")
    return directory


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A folder of small Python files, some of which do not count."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(120):
        path = folder / f"part{number % 5}" / f"file{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def f{number}(x, y):\n    return x + y * {number}\n\n\nprint(f{number}(1, 2), 'é')\n" * 3)
    (folder / "encodings").mkdir()
    (folder / "encodings" / "table.py").write_text("A = 1\n")
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    return folder
