"""The config loader: strict about keys, types and ranges, and its overrides are what runs."""

import dataclasses
from typing import Literal

import pytest

from experiments import config


@dataclasses.dataclass(frozen=True)
class Optim:
    rate: float = config.setting(1e-3, low=0.0, high=1.0)
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Literal["adamw", "sgd"] = "adamw"


@dataclasses.dataclass(frozen=True)
class Block:
    tree: tuple[int, ...] | tuple[tuple[int, ...], ...] = config.setting((), low=0)
    fast: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    steps: int = config.setting(low=1)
    name: str = "job"
    optim: Optim = dataclasses.field(default_factory=Optim)
    blocks: tuple[Block, ...] = ()
    limit: int | None = None

    def __post_init__(self):
        if self.name == "bad":
            raise ValueError("name: this name is taken")


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return path

    return write


def test_nested_tables_defaults_and_overrides(write):
    path = write("steps = 3\n[optim]\nrate = 1\n[[blocks]]\ntree = [[0], [0, 1]]\n[[blocks]]\ntree = [3, 2]\n")
    job = config.load(Job, path, ["optim.kind=sgd", "name='x y'", "limit=4", "optim.betas=[0.5, 1]"])
    assert job == Job(3, "x y", Optim(1.0, (0.5, 1.0), "sgd"), (Block(((0,), (0, 1))), Block((3, 2))), 4)
    assert isinstance(job.optim.rate, float)


def test_one_table_counts_as_a_tuple_of_one(write):
    assert config.load(Job, write("steps = 1\n[blocks]\ntree = [1]\n")).blocks == (Block((1,)),)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("steps = 1\n[optim]\nrat = 1", (), ["optim.rat: unknown key", "optim.rate"]),
        ("steps = 1\nzzz = 1", (), ["zzz: unknown key", "expected one of steps, name"]),
        ("name = 'a'", (), ["steps: missing"]),
        ("steps = 1.0", (), ["steps: expected a whole number, got 1.0"]),
        ("steps = true", (), ["steps: expected a whole number, got true"]),
        ("steps = 0", (), ["steps: expected >= 1, got 0"]),
        ("steps = 1\n[optim]\nrate = 2", (), ["optim.rate: expected >= 0.0 and <= 1.0, got 2.0"]),
        ("steps = 1\n[optim]\nrate = nan", (), ["optim.rate: expected >= 0.0", "got nan"]),
        ("steps = 1\n[optim]\nkind = 'adam'", (), ["optim.kind: expected one of 'adamw', 'sgd'", "'adamw'?"]),
        ("steps = 1\n[optim]\nbetas = [1]", (), ["optim.betas: expected a list of 2, got [1]"]),
        ("steps = 1\n[[blocks]]\ntree = [1, -1]", (), ["blocks[0].tree[1]: expected >= 0, got -1"]),
        ("steps = 1\n[[blocks]]\ntree = [1, 'a']", (), ["blocks[0].tree: expected a list", '"a"']),
        ("steps = 1\n[[blocks]]\nfast = 1", (), ["blocks[0].fast: expected true or false, got 1"]),
        ("steps = 1\noptim = 3", (), ["optim: expected a table, got 3"]),
        ("steps = 1\nname = 'bad'", (), ["name: this name is taken"]),
        ("steps = \nname = 1", (), ["not valid TOML", "line 1"]),
        ("steps = 1", ["optim.rates=1"], ["optim.rates: unknown key"]),
        ("steps = 1", ["steps=0"], ["steps: expected >= 1"]),
        ("steps = 1", ["steps"], ["expected key=value"]),
        ("steps = 1", ["steps.x=1"], ["steps.x", "not a table"]),
        ("steps = 1", ["limit=a"], ["limit: expected a whole number", '"a"']),
        ("steps = 1", ["steps=2\nname='sneaked in'"], ["steps: expected a whole number"]),
    ],
)
def test_a_bad_config_names_the_dotted_path_and_the_remedy(write, text, overrides, words):
    with pytest.raises(config.ConfigError) as error:
        config.load(Job, write(text), overrides)
    for word in words:
        assert word in str(error.value)


def test_all_problems_are_reported_at_once(write):
    with pytest.raises(config.ConfigError) as error:
        config.load(Job, write("steps = 0\nnam = 'x'\n[optim]\nrate = 'fast'"))
    assert len(error.value.problems) == 3


def test_a_missing_file_is_an_error_for_people(tmp_path):
    with pytest.raises(config.ConfigError, match="nothing.toml: cannot read this config"):
        config.load(Job, tmp_path / "nothing.toml")


def test_dict_round_trip_and_digest():
    job = Job(3, blocks=(Block(((0,), (0, 1)), True),))
    plain = config.to_dict(job)
    assert plain["blocks"] == [{"tree": [[0], [0, 1]], "fast": True}] and plain["optim"]["rate"] == 1e-3
    assert config.from_dict(Job, plain) == job
    assert config.digest(job) == config.digest(config.from_dict(Job, plain))
    assert config.digest(job) != config.digest(dataclasses.replace(job, limit=1))
