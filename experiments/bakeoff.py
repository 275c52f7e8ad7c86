"""All lossless verifiers under matched trees: `python -m experiments.bakeoff configs/verifier_bakeoff.toml`."""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import specjax as sj
from experiments import bakeoff_report, command, config, prompts
from experiments.config import ConfigError, setting
from experiments.estimate import Estimate
from experiments.recorded import Recording, accepted_by_depth, expected, iid_paths, prompts_of, record, sampled
from specjax import exact
from specjax.laws import LAWS
from specjax.request import DRAFT_MODES, Plan, prepare
from specjax.testing import table_model
from specjax.verify import RULES, VERIFIERS
from specjax.verify.joint import block_efficiency_bound, enumerate_trees, in_chunks, node_logits

PATHS = ("naive_sampling", "naive_tree", "multi_step", "spectr", "khisti", "multi_path_block", "traversal")


def _check_filled(part: "Zoo | Tabular | Paths", *names: str) -> None:
    for name in names:
        if not getattr(part, name):
            raise ValueError(f"{name}: expected at least one entry, got []")


@dataclasses.dataclass(frozen=True)
class Zoo:
    """Trees drafted and scored by models along the target's own text."""

    target: str = "experiments/zoo/target"
    draft: str = "experiments/zoo/ssm_a"
    prompts: str = "humaneval"
    num_prompts: int = setting(32, low=2)  # one batch
    max_prompt_tokens: int = setting(128, low=1)
    steps: int = setting(16, low=1)  # trees per prompt, at as many consecutive positions
    temperature: float = setting(1.0, low=1e-3)  # of target and draft
    trees: tuple[tuple[int, ...], ...] = setting(((1, 1, 1, 1), (2, 2, 1, 1)), low=1)

    def __post_init__(self):
        _check_filled(self, "trees")
        if not all(self.trees):
            raise ValueError("trees: expected expansion schedules such as [2, 2, 1, 1]; got an empty one")


@dataclasses.dataclass(frozen=True)
class Tabular:
    """Random laws of the next token after each token, from Dirichlet(0.4), whose trees are summed."""

    models: int = setting(4, low=1)
    vocab_size: int = setting(3, low=2, high=4)
    rows: int = setting(4000, low=2)  # sampled trees of each model
    trees: tuple[tuple[int, ...], ...] = setting(((1, 1), (2, 2)), low=1)

    def __post_init__(self):
        _check_filled(self, "trees")
        for tree in self.trees:
            draws = sum(math.prod(tree[: level + 1]) for level in range(len(tree)))
            if not tree or self.vocab_size ** len(tree) > 16 or self.vocab_size**draws > 20_000:
                raise ValueError(
                    f"trees: {list(tree)} over {self.vocab_size} tokens is empty, or has too many outcomes to sum; "
                    "expected one or two levels, such as [2, 2]"
                )
            if max(tree) > self.vocab_size:
                raise ValueError(
                    f"trees: {list(tree)} has nodes of {max(tree)} draws, which are distinct in most draft modes; "
                    f"expected at most {self.vocab_size}, the tokens of tabular.vocab_size"
                )


@dataclasses.dataclass(frozen=True)
class Paths:
    """The published comparison: the best of K i.i.d. paths of L tokens, their common prefixes merged."""

    counts: tuple[int, ...] = setting((1, 2, 3, 4), low=1, high=8)  # K
    lengths: tuple[int, ...] = setting((2, 4, 6, 8), low=1, high=16)  # L

    def __post_init__(self):
        _check_filled(self, "counts", "lengths")

    @property
    def tree(self) -> tuple[int, ...]:
        """The schedule that holds all smaller counts and lengths."""
        return (max(self.counts), *(1,) * (max(self.lengths) - 1))


@dataclasses.dataclass(frozen=True)
class Bakeoff:
    """A whole config. Every lossless verifier meets every draft mode it is exact for, on every tree it can take."""

    name: str = setting()
    seed: int = setting(0, low=0, high=2**16)
    zoo: Zoo = dataclasses.field(default_factory=Zoo)
    tabular: Tabular = dataclasses.field(default_factory=Tabular)
    paths: Paths = dataclasses.field(default_factory=Paths)


def draft_modes(tree: Sequence[int]) -> list[str]:
    """The draft modes that can draft a tree. With one draw a node they are all one law but for the coupled one."""
    most = max(tree)
    if most == 1:
        return ["iid", "shared_gumbel"]
    return [mode for mode, law in DRAFT_MODES.items() if most <= (LAWS[law].max_draws or most)]


def _drafted(trees: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], str]]:
    return [(tree, mode) for tree in trees for mode in draft_modes(tree)]


def entrants(mode: str, tree: Sequence[int], vocab_size: int) -> list[str]:
    """The verifiers that are exact for a draft mode and can take the tree."""
    law = DRAFT_MODES[mode]
    return [
        name
        for name, verifier in VERIFIERS.items()
        if (verifier.exact_for is None or law in verifier.exact_for)
        and (name != "block" or max(tree) == 1)
        and (name != "optimal" or vocab_size ** max(tree) <= 1000)  # solved on the host, for a few tokens
    ]


def tabular(settings: Tabular, seed: int) -> Iterator[dict]:
    """Cells on random tabular models: a row per tree, draft mode and verifier."""
    rng, vocab_size = np.random.default_rng(seed), settings.vocab_size
    p, q = rng.dirichlet([0.4] * vocab_size, (2, settings.models, vocab_size))
    for tree, mode in _drafted(settings.trees):
        recordings = [
            record(_plan(table_model(np.log(p[m])), table_model(np.log(q[m])), [[0]] * settings.rows, tree, mode, m), 1)
            for m in range(settings.models)
        ]
        summed = _Summed(p, q, tree, DRAFT_MODES[mode])
        for verifier in entrants(mode, tree, vocab_size):
            accepted = np.stack([sampled(verifier, recording) for (recording,) in recordings])
            acceptance, tokens = summed.expectations(verifier)
            apart = None if tokens is None else Estimate.of_kinds(accepted + 1 - tokens.mean)
            yield {
                "tree": tree,
                "draft_mode": mode,
                "verifier": verifier,
                **_columns("acceptance", acceptance, Estimate.of_kinds(accepted > 0)),
                "acceptance_bound": summed.acceptance_bound,
                **_columns("tokens", tokens, Estimate.of_kinds(accepted + 1)),
                "tokens_apart": apart and apart.from_zero,
                "tokens_bound": summed.tokens_bound,
            }


class _Summed:
    """Every tree of tabular models p and q [M, V, V], laws by the last token, behind every first token of a text."""

    acceptance_bound = tokens_bound = None

    def __init__(self, p: np.ndarray, q: np.ndarray, tree: Sequence[int], law: str):
        # A problem for each model and each root, which is the first token of a text that begins with 0.
        self.roots = p[:, 0].ravel() / len(p)
        self.tree, self.law = tree, law
        self.target, draft = ([_after(table, level) for level in range(len(tree) + 1)] for table in (p, q))
        self.pairs = list(zip(self.target[0], draft[0], strict=True))
        if LAWS[law].shares_emission:
            return
        self.forest = enumerate_trees([draft[:-1]], (law,), [[draws] for draws in tree])
        self.logits = node_logits(self.forest, self.target)
        optima = [exact.optimal_acceptance(*pair, num_draws=tree[0], law=law) for pair in self.pairs]
        self.acceptance_bound = float(self.roots @ optima)
        self.tokens_bound = float(self.roots @ block_efficiency_bound(self.forest, self.target))

    def expectations(self, verifier: str) -> tuple[Estimate | None, Estimate | None]:
        """Of the acceptance at the root and of the tokens a step; coupled draws are only summed at one node."""
        if LAWS[self.law].shares_emission:
            one = functools.partial(exact.expected_acceptance, verifier, num_draws=self.tree[0], law=self.law)
            return Estimate(float(self.roots @ [one(*pair) for pair in self.pairs]), 0), None
        with jax.enable_x64(True):
            given = in_chunks(functools.partial(_by_depth, verifier), self.forest.trees, self.logits)
        by_depth = (self.forest.probs * self.roots[self.forest.problems]) @ given
        return Estimate(float(by_depth[0]), 0), Estimate(float(1 + by_depth.sum()), 0)


def _by_depth(verifier: str, trees: sj.TokenTree, logits: np.ndarray) -> jax.Array:
    return accepted_by_depth(verifier, trees, jnp.asarray(logits), sj.Warp())


def _after(table: np.ndarray, level: int) -> np.ndarray:
    """Laws [M, V, V], by the last token, as entry ``level`` of a tabular model of M V problems, one a root."""
    models, vocab_size, _ = table.shape
    if level == 0:
        return table.reshape(-1, vocab_size)
    wide = table.reshape(models, 1, *(1,) * (level - 1), vocab_size, vocab_size)
    full = (models, vocab_size, *(vocab_size,) * (level - 1), vocab_size, vocab_size)
    return np.broadcast_to(wide, full).reshape(models * vocab_size, *(vocab_size,) * (level + 1))


def _plan(
    target: sj.Model, draft: sj.Model, texts: Sequence, tree: Sequence[int], mode: str, seed: int, **options
) -> Plan:
    count = len(texts)
    return prepare(
        target,
        texts,
        drafts=[draft],
        tree=tuple(tree),
        draft_mode=mode,
        warp=sj.Warp(options.pop("temperature", 1.0)),
        seeds=range(seed * count, (seed + 1) * count),
        **options,
    )


def _columns(name: str, expectation: Estimate | None, sample: Estimate) -> dict[str, float | None]:
    mean, error = expectation or (None, None)
    return {
        f"{name}_expected": mean,
        f"{name}_expected_se": error,
        f"{name}_sampled": sample.mean,
        f"{name}_sampled_se": sample.error,
    }


class Pair:
    """The models of the zoo part and their recordings."""

    def __init__(self, settings: Zoo, seed: int):
        self.settings, self.seed = settings, seed
        self.target, self.draft = (sj.load_model(config.resolve(path)) for path in (settings.target, settings.draft))
        self.texts = prompts.load(
            settings.prompts,
            num_prompts=settings.num_prompts,
            max_tokens=settings.max_prompt_tokens,
            tokenizer=sj.load_tokenizer(config.resolve(settings.target)),
        )

    def plan(self, tree: Sequence[int], mode: str) -> Plan:
        """A request for all prompts, checked."""
        settings = self.settings
        return _plan(
            self.target,
            self.draft,
            [list(prompt.tokens) for prompt in self.texts],
            tree,
            mode,
            self.seed,
            temperature=settings.temperature,
            max_new_tokens=settings.steps + 1,
        )

    def record(self, tree: Sequence[int], mode: str) -> list[Recording]:
        """Trees of all prompts, a recording for each step."""
        return record(self.plan(tree, mode), self.settings.steps)


def zoo(pair: Pair) -> Iterator[dict]:
    """Cells on the models: a row per tree, draft mode and verifier; every verifier meets the same trees."""
    for tree, mode in _drafted(pair.settings.trees):
        recordings = pair.record(tree, mode)
        by_prompt = functools.partial(Estimate.of_groups, groups=prompts_of(recordings))
        bound = None
        if mode == "iid":
            bound = float(np.concatenate([_root_bound(item, tree[0]) for item in recordings]).mean())
        for verifier in entrants(mode, tree, pair.target.vocab_size):
            accepted = np.concatenate([sampled(verifier, item) for item in recordings])
            acceptance = tokens = apart = None
            if not LAWS[DRAFT_MODES[mode]].shares_emission:
                by_depth = np.concatenate([expected(verifier, item) for item in recordings])
                acceptance, tokens = by_prompt(by_depth[:, 0]), by_prompt(1 + by_depth.sum(1))
                apart = by_prompt(accepted - by_depth.sum(1))  # on the same trees, so only the verifier's noise is left
            yield {
                "tree": tree,
                "draft_mode": mode,
                "verifier": verifier,
                **_columns("acceptance", acceptance, by_prompt(accepted > 0)),
                "acceptance_bound": bound,
                **_columns("tokens", tokens, by_prompt(accepted + 1)),
                "tokens_apart": apart and apart.from_zero,
                "tokens_bound": None,
            }


@functools.cache
def _optimum(draws: int):
    return jax.jit(jax.vmap(functools.partial(exact.optimal_acceptance, num_draws=draws, law="iid")))


def _root_bound(recording: Recording, draws: int) -> np.ndarray:
    """[R] the most that any exact rule can accept of i.i.d. draws at the roots."""
    rows, trees = np.arange(len(recording.running)), recording.trees
    q = trees.q[rows, trees.q_rows[:, 0, 0]]
    return np.asarray(_optimum(draws)(recording.warp(recording.logits[:, 0]), q))[np.asarray(recording.running)]


def paths(pair: Pair, settings: Paths) -> Iterator[dict]:
    """Rows per verifier, K and L on one set of recorded trees, which hold all smaller K and L.

    ``rows`` has every tree's expected tokens and ``prompts`` its prompt, to compare verifiers tree by tree.
    """
    most, longest = max(settings.counts), max(settings.lengths)
    recordings = pair.record(settings.tree, "iid")
    groups = prompts_of(recordings)
    grid = [(count, length, True) for count in settings.counts for length in settings.lengths]
    for verifier in PATHS:
        by_depth = functools.cache(functools.partial(_by_depth_of_paths, verifier, recordings))
        for count, length, per_copy in [*grid, (most, longest, False)]:
            # A node rule does not look at what hangs below a node, so shorter paths are the upper part of longer ones.
            drafted = longest if verifier in RULES else length
            rows = 1 + by_depth(count, drafted, per_copy)[:, :length].sum(1)
            yield {
                "verifier": verifier,
                "paths": count,
                "length": length,
                "per_copy": per_copy,
                **dict(zip(("tokens_expected", "tokens_expected_se"), Estimate.of_groups(rows, groups), strict=True)),
                "rows": rows,
                "prompts": groups,
            }


def _by_depth_of_paths(
    verifier: str, recordings: Sequence[Recording], count: int, length: int, per_copy: bool
) -> np.ndarray:
    merged = [item._replace(trees=iid_paths(item.trees, count, length, per_copy)) for item in recordings]
    return np.concatenate([expected(verifier, item) for item in merged])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 2 for a bad config."""
    args = command.parser("bakeoff", "Compare lossless verifiers.", runs=True).parse_args(arguments)
    try:
        settings = config.load(Bakeoff, args.config, args.set)
        pair = Pair(settings.zoo, settings.seed)
        for tree, mode in [*_drafted(settings.zoo.trees), (settings.paths.tree, "iid")]:
            pair.plan(tree, mode)  # a request that cannot run is refused before others have run for an hour
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    directory = args.out or config.REPOSITORY / "runs" / f"{settings.name}-{config.digest(settings)}"
    screen = command.screen()
    tables = {}
    for name, cells in (
        ("tabular", tabular(settings.tabular, settings.seed)),
        ("zoo", zoo(pair)),
        ("paths", paths(pair, settings.paths)),
    ):
        rows = []
        for row in cells:
            rows.append(row)
            shown = {key: value for key, value in row.items() if key in ("tree", "draft_mode", "paths", "length")}
            screen.print(f"{name}: {row['verifier']} {shown}", markup=False, highlight=False)
        tables[name] = pd.DataFrame(rows)
    bakeoff_report.write(directory, config.to_dict(settings), tables, screen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
