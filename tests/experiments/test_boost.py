"""Boost-tuning runs: what is dropped, runs that are killed and go on, and configs that cannot be."""

import json
import textwrap

import jax
import numpy as np
import pytest

import experiments.boost
from experiments import answers as said
from experiments import config as configs
from experiments import corpus as corpora
from experiments.boost import Boost, lesson_at, main, place_weights
from experiments.fit import read_log
from specjax.models import DecoderConfig, init_model, load_model, save_model
from specjax.train import matched, spans

CONFIG = """
    product_dtype = "bfloat16"
    held_out_windows = 4
    held_out_tokens = 24
    evaluate_every = 3
    save_every = 0

    [prompts]
    count = 24
    tokens = 8
    continuation = 6
    top = 2
    batch = 16
    held_out = 8

    [match]
    span = 3
    prompt_weight = 0.5

    [ssms.one]
    base = "{zoo}/near"
    batch = 4
    steps = 6
    learning_rate = 3e-2
    warmup_steps = 2
    teacher_weight = 0.5

    [ssms.two]
    base = "{zoo}/far"
    batch = 4
    steps = 3
    learning_rate = 3e-2
    warmup_steps = 2
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory, source):
    """Directories target, near, far (random weights and one tokenizer of code) and foreign (another tokenizer)."""
    folder = tmp_path_factory.mktemp("family")
    texts = list(corpora.sources(source).values())
    shape = dict(intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
    for name, seed, vocab_size in (("target", 0, 300), ("near", 1, 300), ("far", 2, 300), ("foreign", 1, 290)):
        tokenizer = folder / f"{name}.json"
        corpora.train_tokenizer(texts, vocab_size).save(str(tokenizer))
        config = DecoderConfig(vocab_size=vocab_size, hidden_size=16, tied_head=False, **shape)
        params = jax.tree.map(lambda leaf: leaf * 4, init_model(config, jax.random.key(seed)).params)
        save_model(folder / name, config, params, tokenizer=tokenizer, eos_ids=(0,))
    return folder


@pytest.fixture
def config(tmp_path, source, family):
    """A function that writes a config with its own folders, and returns its path."""

    def write(name):
        path = tmp_path / f"{name}.toml"
        head = f'out = "{tmp_path / name / "out"}"\nwork = "{tmp_path / name / "work"}"\nsource = "{source}"\n'
        head += f'target = "{family}/target"\ncompare = ["{family}/near"]\n'
        path.write_text(head + textwrap.dedent(CONFIG).replace("{zoo}", str(family)))
        return str(path)

    return write


class Killed(BaseException):
    """Stands for a signal: nothing in the run may catch it."""


def killing(function, when):
    """``function``, but its call number ``when`` (from 0) does not come back."""
    calls = []

    def called(*arguments, **settings):
        calls.append(None)
        if len(calls) == when + 1:
            raise Killed
        return function(*arguments, **settings)

    return called


def test_run_killed_at_any_stage_goes_on_to_the_same_result(config, tmp_path, monkeypatch, capsys):
    """B40: killed while answers are written, in the first SSM and in the second, it ends as if never interrupted."""
    assert main([config("whole")]) == 0
    for module, name, when in (
        (said, "_write", 1),  # the second batch of training answers
        (experiments.boost, "lesson_at", 4),  # in the first SSM
        (experiments.boost, "lesson_at", 2 + 2),  # in the second SSM
    ):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(module, name, killing(getattr(module, name), when))
            main([config("cut")])
    assert main([config("cut")]) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for name in ("one", "two"):
        jax.tree.map(np.testing.assert_array_equal, *(load_model(side / "out" / name).params for side in (whole, cut)))
    reports = [json.loads((side / "work" / "report.json").read_text()) for side in (whole, cut)]
    assert reports[0] == reports[1]
    assert "![Coverage" in (cut / "work" / "report.md").read_text()
    assert (cut / "work" / "coverage.png").stat().st_size > 1000

    # Tuning taught the first SSM something, and coverage only grows.
    tuned, training = reports[0]["tuned"], reports[0]["training"]
    losses = [record["loss"] for record in read_log(cut / "work" / "one" / "log.jsonl")]
    assert losses[1] < losses[0]
    assert training["union"]["two"] >= training["union"]["one"] == training["alone"]["one"] > 0
    assert tuned["text_union"]["two"][0] >= max(tuned["text"]["one"][0], tuned["text"]["two"][0])

    def untouched(*_, **__):
        raise AssertionError("a finished stage was done again")

    monkeypatch.setattr(said, "_write", untouched)
    monkeypatch.setattr(np, "save", untouched)
    monkeypatch.setattr(experiments.boost, "lesson_at", untouched)
    assert main([config("cut")]) == 0
    assert main([config("cut"), "--set", "match.top=2"]) == 1  # teaches the second SSM other places
    assert "two holds checkpoints made with other settings (lessons)" in capsys.readouterr().err
    assert main([config("cut"), "--set", "prompts.temperature=1"]) == 1
    assert "answers holds checkpoints made with other settings (temperature)" in capsys.readouterr().err


def test_nothing_left_to_teach_is_an_error(config, capsys):
    everything = ["--set", "match.top=300", "--set", "ssms.one.steps=3"]
    assert main([config("all"), *everything]) == 1
    assert "ssms.two: the SSMs before it match every answer" in capsys.readouterr().err


def test_matched_answers_are_dropped_and_the_rest_is_read_once_an_epoch(config):
    """Texts with no unmatched answer are not read; in the others, matched places have no weight."""
    boost = configs.load(Boost, config("drop"))
    rng = np.random.default_rng(0)
    ranks = rng.integers(0, 2, (9, 13)).astype(np.uint16)
    ranks[3] = ranks[7] = 0
    known = matched(ranks, spans(8, 6, 3))
    weights = place_weights(boost, known)
    assert set(weights[:, :7][~known[:, :7]]) == {0.5}
    assert set(weights[:, 7:][~known[:, 7:]]) == {1.0}
    np.testing.assert_array_equal(weights[known], 0)
    lessons = said.Answers(
        tokens=np.arange(9)[:, None].repeat(14, axis=1).astype(np.uint16),
        said=rng.integers(0, 300, (9, 13)).astype(np.uint16),
        top_tokens=rng.integers(0, 300, (9, 13, 2)).astype(np.uint16),
        top_shares=np.full((9, 13, 2), 0.5, np.float16),
    )
    draw = dict(batch=7, teacher_weight=0.25, seed=0)
    epochs = [lesson_at(lessons, weights, step, **draw) for step in range(2)]
    for lesson in epochs:
        rows = np.asarray(lesson.tokens)[:, 0]
        assert sorted(rows) == [0, 1, 2, 4, 5, 6, 8]
        np.testing.assert_array_equal(lesson.weights, weights[rows])
        np.testing.assert_array_equal(lesson.answers[..., 0], lessons.said[rows])
        np.testing.assert_array_equal(lesson.answers[..., 1:], lessons.top_tokens[rows])
        np.testing.assert_allclose(lesson.shares, np.broadcast_to([0.75, 0.125, 0.125], (7, 13, 3)))
    assert epochs[0].tokens.tolist() != epochs[1].tokens.tolist()


def test_prompts_are_cut_from_all_over_the_text():
    text = np.arange(1000)
    prompts = said.cut_prompts(text, 10, 30, seed=0)
    np.testing.assert_array_equal(np.diff(prompts, axis=1), 1)
    assert sorted(prompts[:, 0] // 100) == list(range(10))
    assert (prompts[:, -1] // 100 == prompts[:, 0] // 100).all()
    with pytest.raises(ValueError, match="too few for 10 prompts of 101 tokens"):
        said.cut_prompts(text, 10, 101, seed=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ssms.one.warmup_steps=6", "ssms.one.warmup_steps: expected fewer than steps=6, got 6"),
        ("match.span=0", "match.span: expected >= 1, got 0"),
        ("match.spam=3", "did you mean match.span"),
        ("ssms={}", r"ssms: expected at least one table \[ssms.NAME\]"),
        ("ssms.one.teacher_weight=2", "ssms.one.teacher_weight: expected >= 0 and <= 1"),
    ],
)
def test_bad_configs_are_refused(config, override, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.load(Boost, config("bad"), [override])


def test_models_that_do_not_fit_are_refused(config, family, capsys):
    """An output that would overwrite its own input, another tokenizer, no such folder: each is named."""
    assert main([config("bad"), "--set", f"out={family}", "--set", f"ssms.one.base={family}/one"]) == 1
    assert "is read by this config; write to another folder" in capsys.readouterr().err
    assert main([config("bad"), "--set", f"ssms.two.base={family}/foreign"]) == 1
    assert "foreign: has another tokenizer than the target" in capsys.readouterr().err
    assert main([config("bad"), "--set", "prompts.tokens=60"]) == 1
    assert "target: reads at most 64 tokens, and texts here have up to 66" in capsys.readouterr().err
    assert main([config("bad"), "--set", f"target={family}/nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_shipped_config_is_valid():
    boost = configs.load(Boost, configs.resolve("configs/boost.toml"))
    assert list(boost.ssms) == ["ssm_a", "ssm_b", "ssm_c"]
