"""Prompt sets, read offline."""

import json
import sys
from types import SimpleNamespace

import pytest
import tokenizers

from experiments import config, prompts
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
        ('{"prompt": "a", "name": null}', 1, "line 1: 'name' is None"),
        ("[" * 99_999, 1, "line 1: not JSON"),
        ('{"prompt": "a", "more": ' + "[" * 9999 + "]" * 9999 + "}", 1, "line 1: not JSON"),
        ('{"prompt": "a", "more": ' + "1" * 5000 + "}", 1, "line 1: not JSON"),
    ],
)
def test_a_bad_file_is_named_with_its_line(load, tmp_path, content, count, words):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="run.") as error:
        load(path, count)
    assert words in str(error.value) and str(path) in str(error.value)


def test_a_json_array_is_not_read_line_by_line(load, tmp_path):
    path = tmp_path / "some.json"
    path.write_text('[\n{"prompt": "a"}\n]')
    with pytest.raises(ConfigError, match="expected JSONL"):
        load(path)


def test_fingerprints_change_with_the_tokens(load):
    assert prompts.fingerprint(load("humaneval", 2)) != prompts.fingerprint(load("humaneval", 2, 10))
    assert prompts.fingerprint(load("humaneval", 2)) == prompts.fingerprint(load("humaneval", 2))


def test_a_text_file_has_a_prompt_a_line(load, tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("first\n\n second one\n", encoding="utf-8")
    assert [(prompt.name, prompt.text) for prompt in load(path, 2)] == [("some/1", "first"), ("some/3", " second one")]


PARAGRAPH = " ".join(f"w{number}" for number in range(64))
ROWS = {
    "alpaca": [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Sing.", "input": ""}],
    "gsm8k": [{"question": "1 + 1?", "answer": "2"}],
    "wikitext": [{"text": " = Heading = \n"}, {"text": ""}, {"text": PARAGRAPH}],
    "mt_bench": [{"prompt": ["First turn.", "Second turn."]}],
}
TEXTS = {
    "alpaca": [
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n"
        "### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSing.\n\n### Response:\n",
    ],
    "gsm8k": ["Question: 1 + 1?\nAnswer:"],
    "wikitext": [" ".join(PARAGRAPH.split()[:32])],
    "mt_bench": ["First turn."],
}


@pytest.mark.parametrize("name", prompts.NAMED)
def test_public_sets_have_their_templates(load, monkeypatch, tmp_path, name):
    """Through the library, and from a file that was placed where the message says."""
    asked = []

    def load_dataset(path, subset, *, split):
        asked.append((path, subset, split))
        return ROWS[name]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(config, "REPOSITORY", tmp_path)
    assert [prompt.text for prompt in load(name, len(TEXTS[name]))] == TEXTS[name]
    given = prompts.NAMED[name]
    assert asked == [(given.path, given.subset, given.split)]
    (tmp_path / "data").mkdir()
    (tmp_path / f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS[name])))
    assert [prompt.text for prompt in load(name, len(TEXTS[name]))] == TEXTS[name] and len(asked) == 1
    with pytest.raises(ConfigError, match="99 asked for"):
        load(name, 99)
    (tmp_path / f"data/{name}.jsonl").write_text('{"something": "else"}')
    with pytest.raises(ConfigError, match=f"row 0 of {name} has no '{next(iter(given.fields))}'"):
        load(name)


@pytest.mark.parametrize("name", prompts.NAMED)
def test_fields_of_public_sets_have_their_types(load, monkeypatch, tmp_path, name):
    """Every field of every set, of the second row; a text where a list of turns is wanted, and no turn, too."""
    monkeypatch.setattr(config, "REPOSITORY", tmp_path)
    (tmp_path / "data").mkdir()
    good = ROWS[name][-1]
    for field, kind in prompts.NAMED[name].fields.items():
        for wrong in (None, 3, {}, *(("Hello world", [], [None]) if kind is list else (["Hello world"],))):
            rows = [good, {**good, field: wrong}]
            (tmp_path / f"data/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            with pytest.raises(ConfigError, match=f"row 1 of {name}: '{field}' is "):
                load(name, 2)


def test_a_set_that_is_not_here_names_the_file(load, monkeypatch, tmp_path):
    monkeypatch.setattr(config, "REPOSITORY", tmp_path)
    file = str(tmp_path / "data/gsm8k.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where the extra is not installed
    with pytest.raises(ConfigError) as error:
        load("gsm8k")
    for word in ("pip install 'specjax[datasets]'", file, "openai/gsm8k, main, split test", "'question'"):
        assert word in str(error.value)

    def offline(*_, **__):
        raise ConnectionError("no route\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(ConfigError) as error:
        load("gsm8k")
    for word in ("cannot be downloaded (ConnectionError: no route)", file):
        assert word in str(error.value)
