"""The papers' tables on the models at hand, in one report: `python -m experiments.tables configs/tables/*.toml`."""

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from experiments import command, config, screening, sweep, tables_report
from experiments.config import ConfigError, setting
from experiments.sweep import Cell, Decode, Experiment, Models, Run, Tree
from experiments.workshop import Workshop
from specjax.replay import RateTrace, calibrate, estimate_tokens_per_step, optimal_trees, rounds
from specjax.replay.record import Record, Window, record

SUMMED = ("multi_step", "naive_sampling")  # node rules whose acceptance of i.i.d. draws has a closed form here
MOST = 8  # draws at a node that are summed


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: one way to decode, on a tree a column; and what was published for it."""

    name: str = setting()
    decode: dict[str, Any] = dataclasses.field(default_factory=dict)  # other settings than the table's [decode]
    trees: tuple[Tree, ...] = setting((), low=0)  # one a column; not given: the table's
    optimal: int = setting(0, low=0)  # instead of trees: Sequoia's tree of so many nodes below the root
    published: tuple[str, ...] = ()  # one a column, "" where none was found
    models: str = ""  # of the published values
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Above:
    """A claim: row ``row`` is at least ``factor`` times row ``than``, from column ``first`` (counted from 1) on."""

    row: str = setting()
    than: str = setting()
    factor: float = setting(1.0, low=0.0)
    first: int = setting(1, low=1)


@dataclasses.dataclass(frozen=True)
class Table:
    """A whole config: a table, and the models and prompts that it is made on."""

    title: str = setting()
    quantity: Literal["success", "tokens", "accepted"] = setting()  # what its cells say, see ``measure``
    columns: tuple[str, ...] = setting()  # their headings
    run: Run = setting()
    models: Models = setting()
    row: tuple[Row, ...] = setting()
    decode: Decode = dataclasses.field(default_factory=Decode)
    trees: tuple[Tree, ...] = setting((), low=0)
    real: tuple[Models, ...] = ()  # other pairs, one draft each, for which it is made where their weights are at hand
    rises: bool = False  # a claim: values rise along every row
    above: tuple[Above, ...] = ()
    about: str = ""  # what a reader should know

    def __post_init__(self):
        names = [row.name for row in self.row]
        for claim in self.above:
            if claim.first > len(self.columns):
                raise ValueError(f"above: first is {claim.first}; expected at most {len(self.columns)}")
            for name in (claim.row, claim.than):
                if name not in names:
                    raise ValueError(f"above: no row is called {name!r}; expected one of {', '.join(names)}")
        for row in self.row:
            count = 1 if self.quantity == "accepted" else len(self.columns)
            trees = row.trees or self.trees
            if len(trees or [()]) != count or (row.optimal and row.trees):
                raise ValueError(f"row: {row.name!r} has {len(trees)} trees; expected {count}, one for each column")
            if row.published and len(row.published) != len(self.columns):
                raise ValueError(f"row: {row.name!r} has {len(row.published)} published values; expected one a column")
        for pair in self.real:
            if len(pair.drafts) != 1:
                raise ValueError(f"real: {pair.target} needs one draft; got {len(pair.drafts)}")


class Value(NamedTuple):
    """A measured cell."""

    mean: float
    error: float  # standard error over prompts
    way: str  # "replayed", "summed" or "decoded"


class Result(NamedTuple):
    """A table measured on one pair of models."""

    table: Table
    models: Models
    values: dict[str, list[Value]]  # by row, one a column
    notes: list[str]  # what explains them


@dataclasses.dataclass(frozen=True)
class Sums:
    """Closed forms along a text that the target sampled, for k = 1..``MOST`` i.i.d. draws [P, T, k]."""

    text: Record
    given: dict[str, np.ndarray]  # by rule: how often the text's token is among k draws and accepted, given the token
    success: dict[str, np.ndarray]  # by rule: how often any token is
    largest: np.ndarray  # [P, T] the target's largest probability

    def trace(self, rule: str) -> RateTrace:
        """What ``estimate_tokens_per_step`` needs, for schedules: which draw it was makes no difference to them."""
        given = self.given[rule]
        accepted = np.zeros((*given.shape, given.shape[-1]))
        accepted[..., 0] = given
        return RateTrace(self.text.tokens, self.text.lengths, accepted, self.success[rule])


def _closed_forms(window: Window) -> dict[str, jax.Array]:
    p, q = window.warp(window.logits[0]), window.draft_warp(window.logits[1])
    at = lambda law: jnp.take_along_axis(law, window.tokens[..., None], axis=-1)[..., 0]
    own, facts = at(p), {"largest": jnp.max(p, axis=-1)}
    for name, law in (("multi_step", multi_step), ("naive_sampling", naive_sampling)):
        accepted = law(p, q, MOST)
        facts[f"given {name}"] = jnp.stack([at(each) / jnp.maximum(own, 1e-30) for each in accepted], -1)
        facts[f"success {name}"] = jnp.stack([jnp.sum(each, axis=-1) for each in accepted], -1)
    return facts


def multi_step(p: jax.Array, q: jax.Array, most: int) -> list[jax.Array]:
    """How often each token [.., V] is emitted by a draw that multi-step sampling accepted, for k = 1..``most`` draws.

    A refusal leaves (p - q)+ whatever was refused (SpecInfer, Algorithm 2), and nothing at the refused token, so no
    draw needs to be sampled: the sum is exact.

    Args:
      p, q: [.., V] the target's and the draft's distribution.
      most: how many i.i.d. draws.
    """
    residual, refused, total, found = p, jnp.ones(p.shape[:-1])[..., None], jnp.zeros_like(p), []
    for _ in range(most):
        accepted = jnp.minimum(residual, q)
        total += refused * accepted
        left = residual - accepted
        mass = jnp.sum(left, axis=-1, keepdims=True)
        refused *= mass
        residual = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), residual)
        found.append(total)
    return found


def naive_sampling(p: jax.Array, q: jax.Array, most: int) -> list[jax.Array]:
    """As ``multi_step``, for a token drawn from p: it is among k draws from q with probability 1 - (1 - q)^k."""
    return [p * (1 - (1 - q) ** count) for count in range(1, most + 1)]


class Bench:
    """Measures cells, each in the cheapest way that is exact for it."""

    def __init__(self, cells: Sequence[Cell]):
        self.workshop = Workshop(cells)
        self.workshop.check(cells)
        self._sums: dict[str, Sums] = {}

    def way(self, cell: Cell) -> str:
        """``replayed`` from a rank trace, ``summed`` from closed forms along a sampled text, or ``decoded``."""
        decode, models = cell.config.decode, cell.config.models
        replay = dataclasses.replace(cell.config, run=dataclasses.replace(cell.config.run, measure="replay"))
        drafts = [self.workshop.draft(path, models.target, models.attention, models.dtype) for path in models.drafts]
        try:
            screening.check([dataclasses.replace(cell, config=replay)])
        except ConfigError:
            pass
        else:
            if all(draft.reads_hidden is None for draft in drafts):
                return "replayed"
        draws = [entry for entry in decode.tree if isinstance(entry, int)]  # none in a tree of paths
        iid = decode.draft_mode == "iid" and decode.verifier in SUMMED and decode.temperature > 0
        return "summed" if len(drafts) == 1 and iid and draws and max(draws) <= MOST else "decoded"

    def sums(self, experiment: Experiment) -> Sums:
        """Closed forms of a cell's models and warp."""
        whole = dataclasses.replace(experiment.decode, tree=(1,), verifier="naive_sampling")
        key = config.digest(dataclasses.replace(experiment, decode=whole))
        if key not in self._sums:
            arguments = self.workshop.arguments(experiment)
            for name in ("tree", "verifier", "allow_lossy"):
                del arguments[name]
            batch = experiment.run.batch_size
            found = record(**arguments, score=_closed_forms, batch_size=batch)
            given, success = ({rule: found.facts[f"{kind} {rule}"] for rule in SUMMED} for kind in ("given", "success"))
            self._sums[key] = Sums(found, given, success, found.facts["largest"])
        return self._sums[key]

    def rounds(self, cell: Cell) -> list[list[Any]]:
        """Every prompt's rounds, replayed or decoded; each has ``accepted`` and ``emitted``."""
        experiment = cell.config
        if self.way(cell) == "replayed":
            return list(rounds(self.workshop.screening.trace(experiment), sweep.topology(experiment.decode.tree)))
        found, first = [], 0
        for batch in itertools.batched(self.workshop.texts(experiment), experiment.run.batch_size):
            found += sj.generate(**self.workshop.call(experiment, list(batch), first)).rounds
            first += len(batch)
        return found

    def optimal(self, cell: Cell, nodes: int) -> Tree:
        """Sequoia's tree of ``nodes`` nodes below the root, for prompts that follow the table's."""
        count = cell.config.run.num_prompts
        more = dataclasses.replace(cell.config, run=dataclasses.replace(cell.config.run, num_prompts=2 * count))
        trace = self.workshop.screening.trace(more)
        rest = trace._replace(
            tokens=trace.tokens[count:],
            lengths=trace.lengths[count:],
            ranks=trace.ranks[:, count:],
            near=trace.near[:, count:],
            target_near=trace.target_near[count:],
        )
        return paths(optimal_trees(calibrate(rest, depth=10, most_draws=8).rates, nodes + 1).topology(nodes + 1))


def paths(tree: sj.Topology) -> tuple[tuple[int, ...], ...]:
    """A tree's nodes as paths of ranks: the inverse of ``Topology.from_paths``."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for slot in np.flatnonzero(np.asarray(tree.valid))[1:].tolist():  # parents come first
        found[slot] = (*found[int(tree.parents[slot])], int(tree.ranks[slot]))
    return tuple(found[slot] for slot in list(found)[1:])


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """Total over total of prompts [P], and its standard error over prompts; NaN where there is nothing to count."""
    total = denominators.sum()
    if not total:
        return math.nan, math.nan
    mean = numerators.sum() / total
    count = len(numerators)
    spread = np.sum((numerators - mean * denominators) ** 2) * count / max(count - 1, 1)
    return float(mean), float(np.sqrt(spread) / total)


def measure(table: Table, models: Models, bench: Bench, cells: dict[str, list[Cell]]) -> Result:
    """Measure a table.

    Its quantity is ``success``, how often the target's token is among a node's draws and accepted, over all tokens of a
    text; ``tokens``, emitted tokens per verify step; or ``accepted``, in how many of the rounds at most so many drafted
    tokens were accepted, a column for 0, 1, ... Rounds cut by a stop token or the budget do not count there.
    """
    values: dict[str, list[Value]] = {}
    for name, row in cells.items():
        if table.quantity == "accepted":
            (cell,) = row
            values[name] = _distribution(bench.rounds(cell), len(table.columns), bench.way(cell))
        else:
            one = _success if table.quantity == "success" else _tokens
            values[name] = [one(cell, bench) for cell in row]
    notes = _why(cells, bench) if table.quantity == "success" else []
    return Result(table, models, values, notes)


def _success(cell: Cell, bench: Bench) -> Value:
    way, experiment = bench.way(cell), cell.config
    draws = sweep.topology(experiment.decode.tree).shape.arities[0]
    if way == "replayed":
        trace = bench.workshop.screening.trace(experiment)
        hits = trace.ranks.min(0) < draws
    elif way == "summed":
        sums = bench.sums(experiment)
        trace = sums.trace(experiment.decode.verifier)
        hits = sums.success[experiment.decode.verifier][..., draws - 1]
    else:
        raise ConfigError([f"{cell.where}it is decoded, and only what is replayed or summed has a success rate"])
    return Value(*ratio((hits * trace.drafted).sum(1), trace.drafted.sum(1)), way)


def _tokens(cell: Cell, bench: Bench) -> Value:
    way, experiment = bench.way(cell), cell.config
    if way == "summed":
        trace = bench.sums(experiment).trace(experiment.decode.verifier)
        estimate = estimate_tokens_per_step(trace, [experiment.decode.tree])
        return Value(float(estimate.tokens_per_step[0]), float(estimate.standard_error[0]), way)
    found = bench.rounds(cell)
    emitted = np.array([sum(item.emitted for item in own) for own in found], float)
    return Value(*ratio(emitted, np.array([len(own) for own in found], float)), way)


def _distribution(found: Sequence[Sequence[Any]], columns: int, way: str) -> list[Value]:
    whole = [[item.accepted for item in own if item.accepted < item.emitted] for own in found]
    counts = np.array([len(own) for own in whole], float)
    at_most = lambda length: np.array([sum(item <= length for item in own) for own in whole], float)
    return [Value(*ratio(at_most(length), counts), way) for length in range(columns)]


def _why(cells: dict[str, list[Cell]], bench: Bench) -> list[str]:
    """What success rests on, in numbers: models differ in it more than in anything else."""
    cell = next((row[0] for row in cells.values() if bench.way(row[0]) == "summed"), None)
    if cell is None:
        return []
    sums = bench.sums(cell.config)
    counted = sums.trace("multi_step").drafted
    means = [0.0, *(float(sums.success["multi_step"][..., k][counted].mean()) for k in range(5))]
    # Where all earlier draws are accepted, there is no later one.
    first, *rest = [1 - (1 - after) / (1 - before) for before, after in itertools.pairwise(means) if before < 1]
    later = ", ".join(f"{value:.2f}" for value in rest) or "none"
    return [
        "What it rests on: greedy rows read the target's greedy text, whose next token is often plain; the others read "
        f"text sampled at temperature {cell.config.decode.temperature:g}, where the target's likeliest token has "
        f"probability {float(sums.largest[counted].mean()):.2f} on average. Multi-step sampling accepts the first draw "
        f"with probability {first:.2f} there, and each later one, given that all before were refused, with {later}: a "
        "refusal leaves the tokens that the SSM gives too little to, and the smaller its share of them, the less is "
        "gained by another draw."
    ]


def pairs(table: Table) -> Iterator[Models]:
    """The models that the table is made on: its own, and the real pairs whose weights are here."""
    yield table.models
    for pair in table.real:
        if all(map(at_hand, (pair.target, *pair.drafts))):
            yield pair


def at_hand(path: str) -> bool:
    """Whether a model is in a directory or in the hub's local cache; nothing is downloaded."""
    if config.resolve(path).is_dir():
        return True
    try:
        return isinstance(huggingface_hub.try_to_load_from_cache(path, "config.json"), str)
    except huggingface_hub.errors.HFValidationError:
        return False


def cells_of(table: Table, models: Models) -> dict[str, list[Cell]]:
    """By row, the cells of a table on one pair; on another pair than its own, the rows of its first draft.

    Rows of Sequoia's tree have a chain in its place until there are traces.
    """
    own = models is table.models
    name_of = lambda path: path.rstrip("/").rpartition("/")[2]
    first, problems, found = name_of(table.models.drafts[0]), [], {}
    base = config.to_dict(Experiment(dataclasses.replace(table.run, name="tables"), table.models, table.decode))
    for row in table.row:
        raw = base
        for key, value in row.decode.items():
            raw = config.replace(raw, f"decode.{key}", value)
        if not own:
            if list(raw["decode"]["drafts"]) != [first]:
                continue
            raw = config.replace(raw, "decode.drafts", [name_of(models.drafts[0])])
        used = [path for path in models.drafts if name_of(path) in raw["decode"]["drafts"]]
        raw = config.replace({**raw, "models": config.to_dict(models)}, "models.drafts", used)
        found[row.name] = []
        for tree in ((1,),) if row.optimal else row.trees or table.trees or ((),):
            try:
                full = config.from_dict(Experiment, config.replace(raw, "decode.tree", tree))
                (cell,) = sweep.cells(full)
                found[row.name].append(dataclasses.replace(cell, where=f"row {row.name!r}: "))
            except ConfigError as error:
                problems += [f"row {row.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return found


def with_optimal(table: Table, cells: dict[str, list[Cell]], bench: Bench) -> dict[str, list[Cell]]:
    """The cells with Sequoia's trees in their rows."""
    made = {}
    for row in table.row:
        if row.name in cells:
            made[row.name] = cells[row.name]
            if row.optimal:
                (cell,) = cells[row.name]
                decode = dataclasses.replace(cell.config.decode, tree=bench.optimal(cell, row.optimal))
                (cell,) = sweep.cells(dataclasses.replace(cell.config, decode=decode))
                made[row.name] = [cell]
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 2 for a bad config."""
    parser = command.parser("tables", "Make the papers' tables, one for each config, in one report.", configs="+")
    parser.add_argument("--out", type=pathlib.Path, default=config.REPOSITORY / "runs/tables", metavar="DIR")
    args = parser.parse_args(arguments)
    screen = command.screen()
    try:
        tables = [config.load(Table, path, args.set) for path in args.config]
        planned = [(table, models, cells_of(table, models)) for table in tables for models in pairs(table)]
        bench = Bench([cell for *_, cells in planned for row in cells.values() for cell in row])
        results = []
        for table, models, cells in planned:
            screen.print(f"{table.title}, {models.target}", markup=False, highlight=False)
            results.append(measure(table, models, bench, with_optimal(table, cells, bench)))
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tables_report.write(args.out, results, screen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
