"""Models by their id on the hub: a copy that is there, and what one is told where none is to be had."""

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from specjax.models import find_model, load_chat_template, load_model, load_tokenizer
from tests.models import directories

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and huggingface_hub kept from the network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_downloaded_model_is_loaded_by_its_id(offline):
    """By huggingface_hub's own lookup in its own layout."""
    kept = offline / "models--org--name"
    directories.write(kept / "snapshots" / REVISION, directories.config(), directories.tensors())
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(REVISION)
    assert load_model("org/name").directory == str(kept / "snapshots" / REVISION)


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_chat_template])
def test_offline_it_says_so_and_what_to_do(offline, load):
    with pytest.raises(FileNotFoundError, match="org/name: no such directory.*cannot be reached") as caught:
        load("org/name")
    assert "run `hf download org/name`, and pass the directory that it prints" in str(caught.value)


def response(kind):
    """An error of the hub's, without the response that carried it."""
    error = kind.__new__(kind)
    error.args = ("401 Client Error",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (response(errors.GatedRepoError), "accept their terms on its page, and log in with `hf auth login`"),
        (response(errors.RepositoryNotFoundError), "the hub has no public model of this id"),
        (response(errors.HfHubHTTPError), "the hub cannot be reached.*HfHubHTTPError"),
        (ConnectionError("refused"), "the hub cannot be reached.*ConnectionError: refused"),
        (RuntimeError("403 from a proxy"), "the hub cannot be reached.*403 from a proxy"),
        (errors.HFValidationError("bad name"), "this cannot be the id of a model .bad name."),
    ],
    ids=["gated", "unknown", "failing", "unreachable", "proxy", "invalid"],
)
def test_the_hubs_refusals_are_told_apart(monkeypatch, error, message):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=message):
        find_model("org/name")


def test_pickles_are_not_downloaded(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **given: asked.update(given) or tmp_path)
    assert find_model("org/name") == tmp_path
    assert set(asked["allow_patterns"]) == {"*.json", "*.jinja", "*.safetensors"}


@pytest.mark.parametrize("load", [load_tokenizer, load_chat_template])
def test_a_tokenizer_comes_without_weights(monkeypatch, tmp_path, load):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **given: asked.update(given) or tmp_path)
    with pytest.raises(FileNotFoundError):
        load("org/name")
    assert set(asked["allow_patterns"]) == {"*.json", "*.jinja"}


@pytest.mark.parametrize("path", ["nowhere", "a/b/c", "./org/name", "/org/name", "org/name/", "../name"])
def test_paths_are_not_taken_for_ids(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_model(path)


def test_a_directory_that_is_there_wins_over_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directories.write(tmp_path / "org" / "name", directories.config(), directories.tensors())
    assert load_model("org/name").directory == "org/name"
