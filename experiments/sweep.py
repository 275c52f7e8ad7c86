"""What a config of `experiments.run` may say, and the cells that its sweep stands for."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments import config
from experiments.config import ConfigError, setting
from specjax.tree import Topology

type Tree = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """The prompts, and how they are measured."""

    name: str = setting()  # of the run's directory
    prompts: str = "humaneval"  # or the path of a JSONL file whose rows have a "prompt"
    num_prompts: int = setting(10, low=1)  # the first so many
    max_prompt_tokens: int = setting(256, low=1)  # of longer prompts, the last so many tokens
    max_new_tokens: int = setting(64, low=1)
    batch_size: int = setting(1, low=1)
    repeats: int = setting(1, low=1)  # timed passes, after an untimed one
    seed: int = setting(0, low=0, high=2**31)  # prompt i decodes with seed + i
    measure: Literal["decode", "replay"] = "decode"  # replay: tokens per step as decoding would have them, no times
    screen: int = setting(0, low=0)  # schedules replayed for each set of drafts and warp; the best become cells
    screen_nodes: int = setting(16, low=2)  # of a screened schedule at most, the root included
    confirm: int = setting(8, low=1)  # how many of them
    padded: bool = False  # one executable for all trees of the sweep, instead of one of the right size for each

    def __post_init__(self):
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(
                f"name: expected letters, digits, '.', '_' and '-', a letter first, for a directory; got {self.name!r}"
            )


@dataclasses.dataclass(frozen=True)
class Models:
    """Model directories in the Hugging Face layout; relative paths start at the repository."""

    target: str = setting()
    drafts: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: str | None = None


@dataclasses.dataclass(frozen=True)
class Decode:
    """The method of one cell; with no tree and no drafts it is incremental decoding."""

    tree: Tree = setting((), low=0)  # an expansion schedule such as [3, 2, 1, 1], or paths such as [[0], [1], [0, 0]]
    drafts: tuple[str, ...] = ()  # the last part of the directories in models.drafts; several are an ensemble
    draft_mode: str = "top_k"
    verifier: str = "naive_sampling"
    temperature: float = setting(0.0, low=0.0)
    top_k: int = setting(0, low=0)
    top_p: float = setting(1.0, low=0.0, high=1.0)

    def __post_init__(self):
        if self.top_p == 0:
            raise ValueError("top_p: expected > 0, got 0; 1 keeps every token")

    @property
    def incremental(self) -> bool:
        """Whether there is nothing drafted."""
        return not self.tree and not self.drafts

    @property
    def same_text(self) -> bool:
        """Whether the text is promised to be that of incremental decoding with the same seeds, token by token.

        At temperature 0 it is for every lossless verifier, and for naive sampling always.
        """
        return self.temperature == 0 or self.verifier == "naive_sampling"


@dataclasses.dataclass(frozen=True)
class Block:
    """Part of a sweep: lists of values for dotted keys. Keys in ``zip`` advance together and count as one axis."""

    product: dict[str, Any] = dataclasses.field(default_factory=dict)
    zip: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A whole config. Several ``[[sweep]]`` blocks follow one another; without any there is one cell."""

    run: Run
    models: Models
    decode: Decode = dataclasses.field(default_factory=Decode)
    sweep: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of a sweep."""

    id: str
    config: Experiment  # with no sweep
    where: str  # the block and values it came from, for messages


def cells(experiment: Experiment) -> list[Cell]:
    """The sweep's cells in order, each once.

    Raises:
      ConfigError: every value that does not fit its key, every cell that makes no sense, every model nobody uses.
    """
    base = {**config.to_dict(experiment), "sweep": []}
    problems: dict[str, list[str]] = {}  # problem -> where it occurs
    found: dict[str, Cell] = {}
    used = set()
    for where, settings in _points(experiment.sweep):
        raw = base
        try:
            for key, value in settings.items():
                if key.split(".")[0] not in ("run", "models", "decode") or "." not in key:
                    raise ConfigError([f"{key}: not a setting; sweep keys are dotted, such as decode.tree"])
                raw = config.replace(raw, key, value)
            full = config.from_dict(Experiment, raw)
            used.update(_drafts(full).values())
            own = _canonical(full)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(where)
            continue
        found.setdefault(config.digest(own), Cell(config.digest(own), own, where))
    unused = []
    for path in experiment.models.drafts:
        if not problems and path not in used:
            name = path.rstrip("/").rpartition("/")[2]
            unused.append(f"models.drafts: no cell uses {path!r}; name it in decode.drafts as {name!r}, or remove it")
    if problems or unused:
        first = [where[0] + problem for problem, where in problems.items()]
        more = [f" (and at {len(where) - 1} more points)" if len(where) > 1 else "" for where in problems.values()]
        raise ConfigError([*map("".join, zip(first, more, strict=True)), *unused])
    return list(found.values())


def baseline(experiment: Experiment) -> Experiment:
    """Incremental decoding of the same prompts with the same warp, seeds and limits."""
    decode = experiment.decode
    warp = Decode(temperature=decode.temperature, top_k=decode.top_k, top_p=decode.top_p)
    return dataclasses.replace(
        experiment, models=dataclasses.replace(experiment.models, drafts=()), decode=warp, sweep=()
    )


def topology(tree: Tree) -> Topology:
    """The library's tree of a schedule or of paths.

    Raises:
      ValueError: if it is neither.
    """
    paths = [entry for entry in tree if not isinstance(entry, int)]
    schedule = [entry for entry in tree if isinstance(entry, int)]
    return Topology.from_paths(paths) if paths else Topology.from_schedule(schedule)


def label(tree: Tree) -> str:
    """A method's name: ``incremental``, ``<3,2,1,1>``, or ``paths(7)`` for seven nodes given as paths."""
    if not tree:
        return "incremental"
    if isinstance(tree[0], int):
        return f"<{','.join(map(str, tree))}>"
    return f"paths({len(tree)})"


def _points(blocks: Sequence[Block]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not blocks:
        yield "", {}
    for index, block in enumerate(blocks):
        name = "sweep" if len(blocks) == 1 else f"sweep[{index}]"
        product, together = (
            _lists(block.product, f"{name}.product", ""),
            _lists(block.zip, f"{name}.zip", ""),
        )
        if not product and not together:
            raise ConfigError([f"{name}: empty; expected lists of values under {name}.product or {name}.zip"])
        if both := product.keys() & together.keys():
            raise ConfigError([f"{name}: {', '.join(sorted(both))} is in both product and zip"])
        lengths = {key: len(values) for key, values in together.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError([f"{name}.zip: lists of one length expected, got lengths {lengths}"])
        axes = [[{key: value} for value in values] for key, values in product.items()]
        if together:
            axes.append([dict(zip(together, values, strict=True)) for values in zip(*together.values(), strict=True)])
        for point in itertools.product(*axes):
            settings = {key: value for part in point for key, value in part.items()}
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            yield f"{name} at {shown}: ", settings


def _lists(raw: Mapping[str, Any], name: str, prefix: str) -> dict[str, list]:
    """Dotted keys to lists of values; TOML reads an unquoted dotted key as nested tables."""
    found = {}
    for key, value in raw.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lists = _lists(value, name, f"{dotted}.")
        elif isinstance(value, list | tuple) and value:
            lists = {dotted: list(value)}
        else:
            raise ConfigError([f"{name}.{dotted}: expected a list with at least one value, got {value!r}"])
        twice = sorted(found.keys() & lists.keys())
        if twice:
            raise ConfigError([f"{name}.{twice[0]}: given twice, as a quoted key and as a table; keep one"])
        found |= lists
    return found


def _drafts(experiment: Experiment) -> dict[str, str]:
    """The drafts of a cell, name to path, in the order decode.drafts gives them."""
    paths = {path.rstrip("/").rpartition("/")[2]: path for path in experiment.models.drafts}
    known, decode = ", ".join(paths) or "none", experiment.decode
    problems = []
    if len(paths) < len(experiment.models.drafts):
        problems.append(f"models.drafts: directory names must differ, since they name the drafts; got {known}")
    problems += [
        f"decode.drafts: {name!r} is not among models.drafts ({known})" for name in decode.drafts if name not in paths
    ]
    if len(set(decode.drafts)) < len(decode.drafts):
        problems.append(f"decode.drafts: {', '.join(decode.drafts)} names a draft twice")
    if decode.tree and not decode.drafts:
        problems.append(f"decode.drafts: a tree needs a draft model to fill it; name some of models.drafts ({known})")
    if decode.drafts and not decode.tree:
        problems.append("decode.tree: drafts need a tree to fill, such as [3, 2, 1, 1]")
    if decode.tree:
        try:
            topology(decode.tree)
        except ValueError as error:
            problems.append(f"decode.tree: {error}")
    if problems:
        raise ConfigError(problems)
    return {name: paths[name] for name in decode.drafts}


def _canonical(experiment: Experiment) -> Experiment:
    """A cell with only what it uses, so that equal work has one id."""
    if experiment.decode.incremental:
        return baseline(experiment)
    drafts = tuple(_drafts(experiment).values())
    return dataclasses.replace(experiment, models=dataclasses.replace(experiment.models, drafts=drafts), sweep=())
