"""Training: the corpus, the losses, and runs that are killed and go on."""

import dataclasses
import json
import shutil
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import experiments.train
from experiments import config as configs
from experiments import corpus as corpora
from experiments.train import Zoo, agreement, batch_at, held_out_batches, main
from specjax.models import DecoderConfig, init_model, load_model, load_tokenizer
from specjax.testing import fresh_logits
from specjax.train import (
    causal_logits,
    embedding_from,
    init_train_state,
    make_optimizer,
    make_train_step,
    next_token_loss,
    ranks_of_choice,
    restore_latest,
    save_checkpoint,
)
from tests.helpers import softmax

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    tied_head=True,
)
ZOO = """
    vocab_size = 300
    max_positions = 64
    slices = 2
    evaluate_every = 3
    save_every = 0
    held_out_windows = 4

    [models.target]
    hidden_size = 16
    intermediate_size = 32
    num_layers = 1
    num_heads = 2
    num_kv_heads = 1
    head_dim = 8
    slices = [0, 1]
    batch = 2
    length = 16
    steps = 9
    learning_rate = 1e-2
    warmup_steps = 2
    product_dtype = "bfloat16"

    [models.small]
    hidden_size = 8
    intermediate_size = 16
    num_layers = 1
    num_heads = 1
    num_kv_heads = 1
    head_dim = 8
    slices = [1]
    batch = 2
    length = 16
    steps = 3
    learning_rate = 1e-2
    warmup_steps = 1
    teacher = "target"
    teacher_weight = 0.5
"""


@pytest.fixture
def zoo(tmp_path, source):
    """A function that writes a config with its own folders, and returns its path."""

    def write(name):
        path = tmp_path / f"{name}.toml"
        head = f'out = "{tmp_path / name / "out"}"\nwork = "{tmp_path / name / "work"}"\nsource = "{source}"\n'
        path.write_text(head + textwrap.dedent(ZOO))
        return str(path)

    return write


def log_of(path):
    records = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [(record["step"], record["tokens"], record["loss"], record["held_out"]) for record in records]


class Killed(BaseException):
    """Stands for a signal: nothing in the run may catch it."""


def test_killed_run_goes_on_to_the_same_result(zoo, tmp_path, monkeypatch):
    """B40: killed in mid-training, with a half-written checkpoint left behind, it ends as if never interrupted."""
    assert main([zoo("whole")]) == 0

    def killed(tokens, step, **settings):
        if step == 5:
            raise Killed
        return batch_at(tokens, step, **settings)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(experiments.train, "batch_at", killed)
        main([zoo("cut")])
    folder = tmp_path / "cut" / "work" / "target"
    assert [step for step, *_ in log_of(folder)] == [3]
    (folder / "step_6").mkdir()
    with pytest.warns(UserWarning, match="step_6 is an incomplete checkpoint"):
        assert main([zoo("cut")]) == 0

    for name in ("target", "small"):
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        assert [step for step, *_ in log_of(whole / "work" / name)] == ([3, 6, 9] if name == "target" else [3])
        # The mean of the three losses that the kill interrupted covers only those after it.
        same = [np.delete(log_of(side / "work" / name), 2, axis=1) for side in (whole, cut)]
        np.testing.assert_array_equal(*same)
        models = [load_model(side / "out" / name) for side in (whole, cut)]
        jax.tree.map(np.testing.assert_array_equal, models[0].params, models[1].params)
        assert models[1].eos_ids == (load_tokenizer(cut / "out" / name).token_to_id(corpora.END_OF_TEXT),)
    report = json.loads((tmp_path / "cut" / "work" / "report.json").read_text())
    assert report["models"].keys() == {"target", "small"}
    assert report["agreement"]["union"] == report["agreement"]["small"]
    assert (tmp_path / "cut" / "work" / "losses.png").stat().st_size > 1000

    def untouched(*_, **__):
        raise AssertionError("a finished model was trained again")

    monkeypatch.setattr(experiments.train, "batch_at", untouched)
    assert main([zoo("cut")]) == 0


def test_other_settings_do_not_continue_a_run(zoo, capsys):
    """B40: a changed config is refused, and says which settings changed."""
    assert main([zoo("run"), "--only", "target", "--set", "models.target.steps=3"]) == 0
    assert main([zoo("run"), "--only", "target", "--set", "models.target.learning_rate=0.5"]) == 1
    assert "other settings (learning_rate, steps)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.small.teacher=small", "models.small.teacher: expected a model trained before it, got 'small'"),
        ("models.small.slices=[2]", r"models.small.slices: expected some of 0..1, got \(2,\)"),
        ("models.target.warmup_steps=9", "models.target: expected fewer warmup_steps than steps"),
        ("models.target.length=65", "models.target.length: expected at most max_positions=64"),
        ("models.target.learning_rat=1", "did you mean models.target.learning_rate"),
    ],
)
def test_bad_configs_are_refused(zoo, override, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.load(Zoo, zoo("bad"), [override])


def test_shipped_config_is_valid():
    loaded = configs.load(Zoo, configs.resolve("configs/zoo.toml"))
    assert next(iter(loaded.models)) == "target"


def test_corpus_parts_share_no_file(tmp_path, source):
    """Held-out files are in no slice; every readable file is in exactly one part, whatever the slices."""
    corpus = corpora.load(tmp_path, vocab_size=300, slices=3, root=source)
    tokenizer = load_tokenizer(tmp_path)
    parts = [*corpus.slices, corpus.held_out]
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    documents = [set(text.split(corpora.END_OF_TEXT)) - {""} for text in texts]
    files = {path.read_text() for path in source.rglob("file*.py")}
    assert set().union(*documents) == files
    assert sum(map(len, documents)) == len(files)
    assert all(documents)
    assert all(part[0] == part[-1] == corpus.eos_id for part in parts)
    again = corpora.load(tmp_path / "again", vocab_size=300, slices=2, root=source)
    np.testing.assert_array_equal(again.held_out, corpus.held_out)


def test_corpus_is_made_again_when_its_files_change(tmp_path, source):
    """A cache of other files, or one that a kill left unfinished, is not taken."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    first = corpora.load(tmp_path / "made", vocab_size=300, slices=2, root=copy)
    tokens = sum(map(len, first.slices))
    changed = next(
        path for path in copy.rglob("file*.py") if not corpora.is_held_out(path.relative_to(copy).as_posix())
    )
    changed.write_text(changed.read_text() * 4)
    second = corpora.load(tmp_path / "made", vocab_size=300, slices=2, root=copy)
    assert sum(map(len, second.slices)) > tokens
    assert second.digest != first.digest
    (tmp_path / "made" / "corpus.json").unlink()
    (tmp_path / "made" / "held_out.npy").write_bytes(b"")
    third = corpora.load(tmp_path / "made", vocab_size=300, slices=2, root=copy)
    np.testing.assert_array_equal(third.held_out, second.held_out)


def test_corpus_that_cannot_be_split_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="too few Python files"):
        corpora.load(tmp_path / "made", vocab_size=300, slices=2, root=tmp_path)
    with pytest.raises(ValueError, match="expected vocab_size"):
        corpora.load(tmp_path / "made", vocab_size=256, slices=2, root=tmp_path)


def test_epochs_read_every_window_once_in_another_order():
    """Batches are a function of the step, the same in every run."""
    tokens = np.arange(1 + 4 * 11)
    settings = dict(batch=2, length=4, seed=0)
    starts = np.array([batch_at(tokens, step, **settings)[:, 0] for step in range(10)]).reshape(2, 10)
    for epoch in starts:
        assert len(set(epoch)) == 10
        assert len(set(epoch % 4)) == 1  # one cut per epoch
    assert list(starts[0]) != list(starts[1])
    batch = batch_at(tokens, 3, **settings)
    np.testing.assert_array_equal(batch, batch_at(tokens, 3, **settings))
    np.testing.assert_array_equal(np.diff(batch, axis=1), 1)
    assert batch.shape == (2, 5)
    with pytest.raises(ValueError, match="too few for sequences of 50 tokens"):
        batch_at(tokens, 0, batch=1, length=50, seed=0)


def test_held_out_windows_are_spread_over_the_text():
    batches = held_out_batches(np.arange(100), windows=5, length=9, batch=2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert np.concatenate(batches)[:, 0].tolist() == [0, 22, 45, 67, 90]
    with pytest.raises(ValueError, match="too few"):
        held_out_batches(np.arange(9), windows=1, length=9)


def test_loss_is_cross_entropy_to_tokens_and_teacher():
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 2, 3, 7))
    tokens = rng.integers(0, 7, (2, 3))
    log_p = np.log(softmax(logits))
    hard = -np.take_along_axis(log_p, tokens[..., None], -1).mean()
    soft = -(softmax(teacher) * log_p).sum(-1).mean()
    found = [
        next_token_loss(jnp.asarray(logits), jnp.asarray(tokens)),
        next_token_loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(teacher), 0.3),
    ]
    np.testing.assert_allclose(found, [hard, 0.7 * hard + 0.3 * soft], rtol=1e-5)


def test_narrow_embedding_keeps_the_scalar_products_best():
    """Its Gram matrix is the truncated one, which no matrix of this rank comes closer to; too wide is refused."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(20, 6)) @ np.diag([9, 5, 3, 1, 0.5, 0.1]) @ np.linalg.qr(rng.normal(size=(6, 6)))[0]
    left, sizes, _ = np.linalg.svd(wide)
    narrow = np.asarray(embedding_from(jnp.asarray(wide), 3))
    assert narrow.shape == (20, 3)
    np.testing.assert_allclose(narrow @ narrow.T, left[:, :3] * sizes[:3] ** 2 @ left[:, :3].T, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="at least 7 dimensions"):
        embedding_from(jnp.asarray(wide), 7)


def test_teacher_alone_is_learned_from_when_its_weight_is_one():
    """A model that starts as its teacher stays; with another start the loss falls to the teacher's own entropy."""
    teacher, model = (init_model(CONFIG, jax.random.key(seed)) for seed in (0, 1))
    teacher = teacher._replace(params=jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, teacher.params))
    optimizer = make_optimizer(learning_rate=2e-2, warmup_steps=5, total_steps=80, weight_decay=0.0, clip_norm=1.0)
    step = make_train_step(model, optimizer, teacher=teacher, teacher_weight=1.0)
    tokens = np.random.default_rng(0).integers(0, 48, (4, 17)).astype(np.int32)
    p = softmax(np.asarray(causal_logits(teacher, teacher.params, jnp.asarray(tokens[:, :-1]))))
    entropy = -(p * np.log(p)).sum(-1).mean()
    _, loss = step(init_train_state(jax.tree.map(jnp.array, teacher.params), optimizer), jnp.asarray(tokens))
    assert float(loss) == pytest.approx(entropy, rel=1e-4)
    state = init_train_state(model.params, optimizer)
    for _ in range(80):
        state, loss = step(state, jnp.asarray(tokens))
    assert entropy <= float(loss) < entropy + 0.3


def test_causal_logits_do_not_look_ahead():
    model = init_model(CONFIG, jax.random.key(0))
    tokens = np.arange(12).reshape(1, 12)
    other = tokens.copy()
    other[0, 8:] = 40
    first, second = (np.asarray(causal_logits(model, model.params, jnp.asarray(text))) for text in (tokens, other))
    np.testing.assert_allclose(first[:, :8], second[:, :8], atol=1e-6)
    assert np.abs(first[:, 8:] - second[:, 8:]).max() > 1e-3


@pytest.mark.parametrize("product_dtype", ["float32", "bfloat16"])
def test_training_learns_a_pattern_and_keeps_float32_weights(product_dtype):
    """Counting modulo 7: the loss goes to nearly nothing in either dtype."""
    model = init_model(CONFIG, jax.random.key(0))
    optimizer = make_optimizer(learning_rate=2e-2, warmup_steps=5, total_steps=60, weight_decay=0.0, clip_norm=1.0)
    state = init_train_state(model.params, optimizer)
    step = make_train_step(model, optimizer, product_dtype=product_dtype)
    tokens = (np.arange(17) + np.arange(4)[:, None]) % 7
    losses = []
    for _ in range(60):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(48), abs=0.1)
    assert losses[-1] < 0.05
    assert int(state.step) == 60
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_decay_spares_norms_and_the_rate_follows_its_schedule():
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    optimizer = make_optimizer(learning_rate=0.1, warmup_steps=2, total_steps=6, weight_decay=0.5, clip_norm=1.0)
    state = optimizer.init(params)
    shrink = []
    for _ in range(6):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        np.testing.assert_array_equal(updates["norm"], 0)
        shrink.append(-float(updates["matrix"][0, 0]) / 0.5)
    cosine = [0.05 * (1 + np.cos(np.pi * at / 4)) for at in range(4)]
    np.testing.assert_allclose(shrink, [0, 0.05, *cosine], atol=1e-6)
    huge = jax.tree.map(lambda leaf: 1e6 * leaf, params)
    moments = optimizer.update(huge, optimizer.init(params), params)[1][1][0].mu
    assert float(optax.tree.norm(moments)) == pytest.approx(0.1, rel=1e-4)  # (1 - b1) times the clipped gradient


def test_restored_state_is_the_saved_one(tmp_path):
    """B40: a list of layers comes back with its structure and dtypes; the half-written step 20 costs a warning."""
    model = init_model(CONFIG, jax.random.key(0))
    optimizer = make_optimizer(learning_rate=1e-2, warmup_steps=1, total_steps=30, weight_decay=0.1, clip_norm=1.0)
    state = init_train_state(model.params, optimizer)
    assert restore_latest(tmp_path, state) is None
    step = make_train_step(model, optimizer)
    for _ in range(10):
        state, _ = step(state, np.ones((1, 9), np.int32))
    save_checkpoint(tmp_path, state)
    (tmp_path / "step_20").mkdir()
    half = tmp_path / "step_19"  # what a kill leaves where folders are not renamed into place
    shutil.copytree(tmp_path / "step_10", half)
    record = json.loads((half / "_CHECKPOINT_METADATA").read_text()) | {"commit_timestamp_nsecs": None}
    (half / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
    (tmp_path / "step_15.orbax-checkpoint-tmp-0").mkdir()
    with pytest.warns(UserWarning, match="incomplete checkpoint") as warned:
        restored = restore_latest(tmp_path, init_train_state(init_model(CONFIG, jax.random.key(1)).params, optimizer))
    assert [str(warning.message).split()[0].rsplit("_")[-1] for warning in warned] == ["20", "19"]
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert [a.dtype for a in jax.tree.leaves(restored)] == [a.dtype for a in jax.tree.leaves(state)]
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(
        causal_logits(model, restored.params, tokens), causal_logits(model, state.params, tokens)
    )
    for _ in range(2):
        state, _ = step(state, np.ones((1, 9), np.int32))
    save_checkpoint(tmp_path, state)
    assert {path.name for path in tmp_path.iterdir()} == {"step_10", "step_12"}


def test_ranks_are_places_in_a_stable_descending_sort():
    rng = np.random.default_rng(0)
    target, draft = rng.integers(0, 4, (2, 50, 6)).astype(np.float32)  # many ties
    order = np.argsort(-draft, axis=-1, kind="stable")
    expected = [list(order[i]).index(target[i].argmax()) for i in range(50)]
    np.testing.assert_array_equal(ranks_of_choice(jnp.asarray(target), jnp.asarray(draft)), expected)


def test_agreement_of_a_model_with_itself_is_whole():
    untied = dataclasses.replace(CONFIG, tied_head=False)  # a fresh tied model repeats its input, as any other does
    model, other = (init_model(untied, jax.random.key(seed)) for seed in (0, 1))
    batches = [np.random.default_rng(0).integers(0, 48, (4, 17)).astype(np.int32)]
    found = agreement(model, {"self": model, "other": other}, batches)
    assert found["self"] == found["union"] == [1.0] * 5
    assert found["other"] == sorted(found["other"])
    assert found["other"][4] < 0.9


def test_shipped_models_are_one_family_within_their_limits():
    """All of them load, share one tokenizer and its end, have read code, and fit an ordinary repository."""
    zoo = configs.load(Zoo, configs.resolve("configs/zoo.toml"))
    folder = configs.resolve(zoo.out)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) < 20_000_000
    assert sum(path.stat().st_size for path in files) < 40_000_000
    text = load_tokenizer(folder / "target").encode("class Point:\n    def __init__(").ids
    answer = load_tokenizer(folder / "target").encode("self").ids
    for name in zoo.models:
        model = load_model(folder / name)
        assert model.vocab_size == zoo.vocab_size
        assert model.eos_ids == (load_tokenizer(folder / name).token_to_id(corpora.END_OF_TEXT),)
        assert (folder / name / "tokenizer.json").read_bytes() == (folder / "target" / "tokenizer.json").read_bytes()
        assert [int(fresh_logits(model, text)[-1].argmax())] == answer
