"""What a config of `experiments.run` may say, and the cells that its sweep stands for."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments import config
from experiments.config import ConfigError, setting
from specjax import draft
from specjax.tree import Topology
from specjax.types import Drafter, Model
from specjax.verify import VERIFIERS

type Tree = tuple[int, ...] | tuple[tuple[int, ...], ...]

LOOKUP = "prompt_lookup"  # in decode.drafts: a source that needs no directory


@dataclasses.dataclass(frozen=True)
class Run:
    """The prompts, and how they are measured."""

    name: str = setting()  # of the run's directory
    prompts: str = "humaneval"  # or another set that ``experiments.prompts`` knows, or the path of a file
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
    """Model directories in the Hugging Face layout, relative to the repository; or ids on its hub (``org/name``)."""

    target: str = setting()
    drafts: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: str | None = None


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Bounds of a tree whose shape is decided while it is drafted (``specjax.draft.grow``)."""

    width: int = setting(6, low=1)  # nodes expanded at each depth, and draws at each of them
    depth: int = setting(5, low=1)
    nodes: int = setting(21, low=1)  # below the root


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Settings of prompt lookup (``specjax.draft.prompt_lookup``)."""

    branches: int = setting(3, low=1)  # matches followed
    length: int = setting(7, low=1)  # tokens copied from each
    min_match: int = setting(2, low=1)  # tokens that must agree
    max_match: int = setting(8, low=1)  # tokens compared

    def __post_init__(self):
        if self.max_match < self.min_match:
            raise ValueError(f"max_match: expected >= min_match, which is {self.min_match}; got {self.max_match}")


@dataclasses.dataclass(frozen=True)
class DraftWarp:
    """What SSMs draw from."""

    temperature: float | None = setting(None, low=0.0)  # not given: that of the text, or 1 where it is greedy
    top_k: int = setting(0, low=0)
    top_p: float = setting(1.0, low=0.0, high=1.0)

    def __post_init__(self):
        if self.top_p == 0:
            raise ValueError("top_p: expected > 0, got 0; 1 keeps every token")


@dataclasses.dataclass(frozen=True)
class Decode:
    """The method of one cell; with no tree and no drafts it is incremental decoding."""

    drafts: tuple[str, ...] = ()  # the last part of directories in models.drafts, or "prompt_lookup"
    combine: Literal["union", "first"] = "union"  # of several drafts: their trees merged, or the first that proposes
    capacity: int = setting(0, low=0)  # nodes of the merged tree at most, the root included; 0: room for all
    builder: Literal["static", "expand_and_rerank", "grow"] = "static"  # what shapes the trees of models
    tree: Tree = setting((), low=0)  # static: a schedule such as [3, 2, 1, 1], or paths such as [[0], [1], [0, 0]]
    dynamic: Dynamic = dataclasses.field(default_factory=Dynamic)  # the other builders
    lookup: Lookup = dataclasses.field(default_factory=Lookup)
    draft_mode: str = "top_k"
    verifier: str = "naive_sampling"
    temperature: float = setting(0.0, low=0.0)
    top_k: int = setting(0, low=0)
    top_p: float = setting(1.0, low=0.0, high=1.0)
    draft_warp: DraftWarp = dataclasses.field(default_factory=DraftWarp)
    allow_lossy: bool = False  # needed for verifiers that change the target's distribution

    def __post_init__(self):
        if self.top_p == 0:
            raise ValueError("top_p: expected > 0, got 0; 1 keeps every token")
        if self.capacity and self.combine == "first":
            raise ValueError('capacity: cuts trees that are merged; expected combine = "union", or no capacity')

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
            used.update(_directories(full).values())
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


def builder(decode: Decode) -> Topology | Callable[[Model, str], Drafter] | None:
    """What shapes the trees of a cell's models; None where it has none.

    Raises:
      ValueError: if its settings are no tree.
    """
    if set(decode.drafts) <= {LOOKUP}:
        return None
    if decode.builder == "static":
        return topology(decode.tree)
    makers = {"expand_and_rerank": draft.expand_and_rerank, "grow": draft.grow}
    return makers[decode.builder](**dataclasses.asdict(decode.dynamic))


def topology(tree: Tree) -> Topology:
    """The library's tree of a schedule or of paths.

    Raises:
      ValueError: if it is neither.
    """
    paths = [entry for entry in tree if not isinstance(entry, int)]
    schedule = [entry for entry in tree if isinstance(entry, int)]
    return Topology.from_paths(paths) if paths else Topology.from_schedule(schedule)


def label(decode: Decode) -> str:
    """A method's name, whatever its drafts: ``incremental``, ``<3,2,1,1>``, or ``paths(7)`` for seven nodes as paths.

    ``grow(6x5:21)`` is 21 nodes out of a width of 6 and a depth of 5, ``copy(3x7)`` three matches of seven tokens, and
    ``copy(3x7) + <3,2,1,1>`` the union of two; ``to 12`` behind it is the union's capacity.
    """
    parts = [_copies(decode) if name == LOOKUP else _shape(decode) for name in decode.drafts]
    between = " + " if decode.combine == "union" else " or "
    cut = f" to {decode.capacity}" if decode.capacity else ""
    return between.join(dict.fromkeys(parts)) + cut if parts else "incremental"


def _copies(decode: Decode) -> str:
    return f"copy({decode.lookup.branches}x{decode.lookup.length})"


def _shape(decode: Decode) -> str:
    if decode.builder != "static":
        size = decode.dynamic
        return f"{decode.builder}({size.width}x{size.depth}:{size.nodes})"
    return tree_label(decode.tree)


def tree_label(tree: Tree) -> str:
    """A static tree's name: ``<3,2,1,1>``, or ``paths(7)`` for seven nodes given as paths."""
    return f"<{','.join(map(str, tree))}>" if isinstance(tree[0], int) else f"paths({len(tree)})"


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


def _directories(experiment: Experiment) -> dict[str, str]:
    """The draft models of a cell, name to path, in the order decode.drafts gives them."""
    paths = {path.rstrip("/").rpartition("/")[2]: path for path in experiment.models.drafts}
    known, decode = ", ".join(paths) or "none", experiment.decode
    named = [name for name in decode.drafts if name != LOOKUP]
    problems = []
    if len(paths) < len(experiment.models.drafts):
        problems.append(f"models.drafts: directory names must differ, since they name the drafts; got {known}")
    if LOOKUP in paths:
        problems.append(f"models.drafts: {LOOKUP!r} names a source that needs no directory; rename {paths[LOOKUP]!r}")
    problems += [
        f"decode.drafts: {name!r} is neither among models.drafts ({known}) nor {LOOKUP!r}"
        for name in named
        if name not in paths
    ]
    if len(set(decode.drafts)) < len(decode.drafts):
        problems.append(f"decode.drafts: {', '.join(decode.drafts)} names a draft twice")
    if decode.tree and not decode.drafts:
        problems.append(f"decode.drafts: a tree needs a draft model to fill it; name some of models.drafts ({known})")
    if named and decode.builder == "static" and not decode.tree:
        problems.append("decode.tree: drafts need a tree to fill, such as [3, 2, 1, 1]")
    else:
        try:
            builder(decode)
        except ValueError as error:
            problems.append(f"decode.{'tree' if decode.builder == 'static' else 'dynamic'}: {error}")
    if problems:
        raise ConfigError(problems)
    return {name: paths[name] for name in named}


def _canonical(experiment: Experiment) -> Experiment:
    """A cell with only what it uses, so that equal work has one id."""
    if experiment.decode.incremental:
        return baseline(experiment)
    directories, decode, unused = tuple(_directories(experiment).values()), experiment.decode, Decode()
    names = []
    if not directories:
        names += ["builder", "draft_mode"]
    if not directories or decode.builder != "static":
        names.append("tree")
    if not directories or decode.builder == "static":
        names.append("dynamic")
    if LOOKUP not in decode.drafts:
        names.append("lookup")
    if len(decode.drafts) == 1:
        names += ["combine", "capacity"]
    if decode.verifier in VERIFIERS and not VERIFIERS[decode.verifier].lossy:
        names.append("allow_lossy")
    return dataclasses.replace(
        experiment,
        models=dataclasses.replace(experiment.models, drafts=directories),
        decode=dataclasses.replace(decode, **{name: getattr(unused, name) for name in names}),
        sweep=(),
    )
