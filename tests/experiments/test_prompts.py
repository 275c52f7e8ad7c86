"""Prompt sets, read offline."""

import json

import pytest
import tokenizers

from experiments import prompts
from experiments.config import ConfigError


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(byte_tokenizer))


@pytest.fixture
def load(tokenizer):
    return lambda source, num_prompts=1, max_tokens=999: prompts.load(
        str(source), num_prompts=num_prompts, max_tokens=max_tokens, tokenizer=tokenizer
    )


def test_humaneval_is_in_its_package(load, tokenizer):
    found = load("humaneval", 164, 100_000)
    assert len(found) == 164 and found[0].name == "HumanEval/0" and not any(prompt.cut for prompt in found)
    assert all(tokenizer.decode(prompt.tokens) == prompt.text for prompt in found[:5])


def test_long_prompts_keep_their_end(load, tokenizer):
    (prompt,) = load("humaneval", 1, 50)
    assert prompt.cut and len(prompt.tokens) == 50 and prompt.text.endswith(tokenizer.decode(prompt.tokens))


def test_jsonl(load, tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [{"prompt": "a\u2028b"}, {"prompt": "x", "name": "second", "more": 1}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert [(prompt.name, prompt.text) for prompt in load(path, 2)] == [("some/1", "a\u2028b"), ("second", "x")]


@pytest.mark.parametrize(
    ("content", "count", "words"),
    [
        (None, 1, "cannot read"),
        ("", 1, "1 asked for, but"),
        ('{"prompt": "a"}\n', 2, "2 asked for, but"),
        ('{"prompt": "a"}\n{"prompt"', 1, "line 2: not JSON"),
        ('{"text": "a"}', 1, 'line 1: expected {"prompt": "text"}'),
        ('{"prompt": 3}', 1, "line 1: expected"),
        ('["prompt"]', 1, "line 1: expected"),
        ('{"prompt": ""}', 1, "has no tokens"),
    ],
)
def test_a_bad_file_is_named_with_its_line(load, tmp_path, content, count, words):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="run.") as error:
        load(path, count)
    assert words in str(error.value) and str(path) in str(error.value)


def test_fingerprints_change_with_the_tokens(load):
    assert prompts.fingerprint(load("humaneval", 2)) != prompts.fingerprint(load("humaneval", 2, 10))
    assert prompts.fingerprint(load("humaneval", 2)) == prompts.fingerprint(load("humaneval", 2))
