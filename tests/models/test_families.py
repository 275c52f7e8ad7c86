"""Every family against Hugging Face transformers: logits, and texts decoded one by one and with trees."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax as sj
from specjax.testing import table_model
from specjax.types import TreeMask
from tests.models.references import make

FOLDERS = sorted(path.parent for path in make.HERE.glob("*/reference.safetensors"))
ROWS = 8  # of a pass: prompts in chunks, single tokens and trees share one executable
names = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@functools.cache
def model(folder: Path) -> sj.Model:
    return sj.load_model(folder)


def reference(folder: Path) -> tuple[list[int], np.ndarray]:
    """The text [P + new] and the logits [P + new - 1, V]."""
    made = safetensors.numpy.load_file(folder / "reference.safetensors")
    return made["text"].tolist(), made["logits"]


CHAIN = [-1, *range(ROWS - 1)]
TREE = [-1, 0, 0, 1, 1, 2, 2, 3]  # two children, two for each, and one more


@functools.partial(jax.jit, static_argnums=0)
def run(forward, params, tokens, positions, mask, cache):
    return forward(params, tokens, positions, mask, cache)


commit = jax.jit(lambda cache, rows, count: cache.commit(rows, count))


class Decoding:
    """A text being decoded by hand, with one executable for the prompt, for single tokens and for trees."""

    def __init__(self, decoder: sj.Model):
        self.decoder, self.cache, self.length = decoder, decoder.init_cache(1, 96), 0

    def score(self, tokens: list[int], parents: list[int]) -> np.ndarray:
        """Logits [ROWS, V] after each node of a tree behind what is committed."""
        padding = ROWS - len(tokens)
        parents = [*parents[: len(tokens)], *[0] * padding]
        seen = np.asarray(sj.ancestor_mask(jnp.asarray(parents)))
        positions = np.minimum(self.length + seen.sum(axis=1) - 1, self.decoder.max_positions - 1)
        mask = TreeMask(jnp.asarray([self.length]), jnp.asarray(seen)[None])
        fed = jnp.asarray([*tokens, *[0] * padding])[None]
        out = run(self.decoder.forward, self.decoder.params, fed, jnp.asarray(positions)[None], mask, self.cache)
        self.cache = out.cache
        return np.asarray(out.logits[0])

    def keep(self, path: list[int]) -> None:
        """Commit these rows of the last tree."""
        rows = jnp.asarray([*path, *[0] * (ROWS - len(path))])[None]
        self.cache, self.length = commit(self.cache, rows, jnp.asarray([len(path)])), self.length + len(path)

    def read(self, tokens: list[int]) -> np.ndarray:
        """Commit a text; the logits [N, V] after each of its tokens."""
        logits = []
        for start in range(0, len(tokens), ROWS):
            chunk = tokens[start : start + ROWS]
            logits.append(self.score(chunk, CHAIN)[: len(chunk)])
            self.keep(list(range(len(chunk))))
        return np.concatenate(logits)


def test_every_case_is_there():
    assert [folder.name for folder in FOLDERS] == sorted(make.CASES)


def test_the_files_stay_small_and_say_what_made_them():
    files = [path for path in make.HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    for folder in FOLDERS:
        with safetensors.safe_open(folder / "reference.safetensors", framework="numpy") as reader:
            assert set(json.loads(reader.metadata()["versions"])) == {"torch", "transformers"}


@names
def test_logits_are_those_of_transformers(folder):
    """Beyond the original context of a stretched rope, beyond the window, with every bias and norm at work."""
    text, logits = reference(folder)
    np.testing.assert_allclose(Decoding(model(folder)).read(text[:-1]), logits, atol=1e-4, rtol=0)


def likely(text: list[int], token: int) -> list[int]:
    """Two guesses at what follows a token: what followed it first and last in ``text``, each in its own right."""
    after = [later for before, later in itertools.pairwise(text) if before == token] or [0]
    return [after[0], after[-1] if after[-1] != after[0] else (after[0] + 1) % make.SIZES["vocab_size"]]


@names
@pytest.mark.parametrize("with_tree", [False, True], ids=["incremental", "tree"])
def test_greedy_text_is_that_of_transformers(folder, with_tree):
    text, _ = reference(folder)
    decoding, decoded, steps = Decoding(model(folder)), text[: make.PROMPT], 0
    decoded.append(int(decoding.read(decoded)[-1].argmax()))
    while len(decoded) < len(text):
        tokens, path, steps = [decoded[-1]], [0], steps + 1
        for slot in range(1, ROWS if with_tree else 1):
            parent = TREE[slot]
            tokens.append(likely(text, tokens[parent])[TREE[:slot].count(parent)])
        best = decoding.score(tokens, TREE).argmax(-1)
        while path:
            decoded.append(int(best[path[-1]]))
            children = [slot for slot in range(1, len(tokens)) if TREE[slot] == path[-1]]
            agreeing = [slot for slot in children if tokens[slot] == decoded[-1]]
            if not agreeing:
                break
            path.append(agreeing[0])
        decoding.keep(path)
    assert decoded[: len(text)] == text
    assert steps < make.NEW / 1.5 if with_tree else steps == make.NEW - 1


@pytest.mark.parametrize("name", ["qwen2_window", "opt_350m"])
def test_generate_gives_the_text_of_transformers(name):
    """The library's own loop with a tree that is often right, past a window and up to OPT's last position (B35)."""
    folder = make.HERE / name
    text, _ = reference(folder)
    table = np.zeros((make.SIZES["vocab_size"],) * 2)
    np.add.at(table, (text[:-1], text[1:]), 1)
    request = dict(prompts=[text[: make.PROMPT]], drafts=[table_model(table)], tree=(2, 2, 1), eos_ids=())
    result = sj.generate(model(folder), max_new_tokens=make.NEW, **request)
    assert result.tokens[0] == text[make.PROMPT :]
    assert result.stats.tokens_per_step > 1.5
    if name == "opt_350m":
        assert model(folder).max_positions == len(text)
        with pytest.raises(ValueError, match="beyond the target model's context of 88"):
            sj.generate(model(folder), max_new_tokens=make.NEW + 1, **request)


@names
def test_live_parity_with_transformers(folder, tmp_path):
    """The same cases with other weights, made on the spot where torch and transformers are installed."""
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"live parity needs {module}, which is not installed")
    other = make.build(folder.name, seed=1000)
    other.save_pretrained(tmp_path)
    prompt = np.random.default_rng(1).integers(0, make.SIZES["vocab_size"], make.PROMPT).tolist()
    text, logits = make.decode(other, prompt, make.NEW)
    np.testing.assert_allclose(Decoding(sj.load_model(tmp_path)).read(text[:-1].tolist()), logits, atol=1e-4, rtol=0)
