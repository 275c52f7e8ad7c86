"""The command that trains draft heads: killed and resumed, refused where settings changed, loaded where it is used."""

import itertools
import json
import textwrap

import jax
import numpy as np
import pytest
import rich.console

import experiments.train_heads
import specjax as sj
from experiments import config as configs
from experiments import corpus as corpora
from experiments.train_heads import Heads, Text, best_paths, main, read_by_target, spread, texts
from specjax.models import DecoderConfig, init_model, save_model
from specjax.train import causal_pass

CONFIG = """
    windows = 6
    length = 16
    continuation = 4
    held_out_windows = 2
    evaluate_every = 2
    save_every = 0

    [medusa]
    num_heads = 2
    tied_projection = true

    [medusa.schedule]
    batch = 2
    steps = 5
    learning_rate = 1e-2
    warmup_steps = 1

    [eagle]
    intermediate_size = 8
    num_heads = 2
    num_kv_heads = 1
    head_dim = 4

    [eagle.schedule]
    batch = 2
    steps = 3
    learning_rate = 1e-2
    warmup_steps = 1
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory, source):
    """A directory of a small random target and a tokenizer of the source's text."""
    folder = tmp_path_factory.mktemp("target")
    corpus = corpora.load(folder / "corpus", vocab_size=300, slices=1, root=source)
    config = DecoderConfig(300, 8, 16, 1, 2, 1, 4, 64, tied_head=True)
    save_model(folder / "target", config, init_model(config, jax.random.key(0)).params, tokenizer=corpus.tokenizer)
    return folder / "target"


@pytest.fixture
def written(tmp_path, source, target):
    """A function that writes a config with its own folders, and returns its path."""

    def write(name):
        path = tmp_path / f"{name}.toml"
        folders = {"target": target, "out": tmp_path / name / "out", "work": tmp_path / name / "work", "source": source}
        head = "".join(f'{key} = "{value}"\n' for key, value in folders.items())
        path.write_text(head + textwrap.dedent(CONFIG))
        return str(path)

    return write


class Killed(BaseException):
    """Stands for a signal: nothing in the run may catch it."""


def test_killed_run_goes_on_to_the_same_heads(written, tmp_path, target, monkeypatch):
    """B40: killed in mid-training it ends as if never interrupted, without reading the text again."""
    assert main([written("whole")]) == 0
    batch_of_step = Text.batch_of_step

    def killed(self, step, **settings):
        if step == 3:
            raise Killed
        return batch_of_step(self, step, **settings)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Text, "batch_of_step", killed)
        main([written("cut")])

    def untouched(*_, **__):
        raise AssertionError("the text was read again")

    with monkeypatch.context() as patch:
        patch.setattr(experiments.train_heads.rich.progress, "track", untouched)
        assert main([written("cut")]) == 0
    loaded = sj.load_model(target)
    for name in ("medusa", "eagle"):
        models = [sj.load_heads(tmp_path / side / "out" / name, loaded) for side in ("whole", "cut")]
        jax.tree.map(np.testing.assert_array_equal, models[0].params, models[1].params)
    report = json.loads((tmp_path / "cut" / "work" / "report.json").read_text())
    assert [len(report[name]["agreement"]) for name in ("medusa", "eagle")] == [2, 1]
    assert (tmp_path / "cut" / "work" / "losses.png").stat().st_size > 1000


def test_other_settings_do_not_continue_a_run(written, capsys):
    assert main([written("run"), "--only", "eagle"]) == 0
    assert main([written("run"), "--only", "eagle", "--set", "eagle.class_weight=0.5"]) == 1
    assert "other settings (class_weight)" in capsys.readouterr().err


def test_hidden_states_are_those_of_the_sequences_they_stand_beside(written, tmp_path, target):
    """Whatever the order batches come in, and though the last pass of the target has rows to spare."""
    heads, model = configs.load(Heads, written("text")), sj.load_model(target)
    tokens = spread(np.arange(200) % 300, 11, 16)
    text = read_by_target(model, tokens, tmp_path / "states.npy", "float32", rich.console.Console())
    for step in range(4):
        tokens, hidden = text.batch_of_step(step, batch=3, seed=heads.seed)
        want = causal_pass(model, model.params, tokens).hidden
        np.testing.assert_allclose(hidden, want, atol=1e-2)
    firsts = [int(row) for step in range(11) for row in text.batch_of_step(step, batch=1, seed=0)[0][:, 0]]
    assert sorted(firsts) == sorted(text.tokens[:, 0].tolist())
    with pytest.raises(ValueError, match="200 tokens are too few for 190 sequences of 16"):
        spread(np.arange(200), 190, 16)


def test_sequences_end_in_what_the_target_says_and_held_out_ones_do_not(written, source, target):
    heads, model = configs.load(Heads, written("said")), sj.load_model(target)
    corpus = corpora.load(configs.resolve(heads.work) / "corpus", vocab_size=300, slices=1, root=source)
    text, held_out = texts(heads, model, corpus, rich.console.Console())
    assert (text.tokens.shape, held_out.tokens.shape) == ((6, 16), (2, 16))
    said = sj.generate(model, text.tokens[:, :12].tolist(), max_new_tokens=4, eos_ids=()).tokens
    assert text.tokens[:, 12:].tolist() == said
    np.testing.assert_array_equal(text.tokens[:, :12], spread(corpus.slices[0], 6, 12))
    np.testing.assert_array_equal(held_out.tokens, spread(corpus.held_out, 2, 16))


def test_shipped_config_is_valid():
    loaded = configs.load(Heads, configs.resolve("configs/heads.toml"))
    assert sj.load_model(configs.resolve(loaded.target)).hidden_size == 384


def test_the_best_tree_accepts_most_of_all_trees_of_its_size():
    """Against every tree of five nodes that two heads of three ranks can fill."""
    agreement = [[0.5, 0.8, 0.9], [0.6, 0.7, 0.9]]
    alone = np.diff(agreement, axis=1, prepend=0)
    nodes = [(first,) for first in range(3)] + [(first, second) for first in range(3) for second in range(3)]
    value = lambda tree: sum(np.prod([alone[depth][rank] for depth, rank in enumerate(path)]) for path in tree)
    trees = [tree for tree in itertools.combinations(nodes, 5) if all(path[:1] in tree for path in tree)]
    found = [tuple(path) for path in best_paths(agreement, 5)]
    assert all(path[:-1] in [(), *found] for path in found)
    assert value(found) == pytest.approx(max(map(value, trees)))
    assert len(best_paths(agreement, 100)) == len(nodes)
