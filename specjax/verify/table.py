"""The compatibility table: which verifier is exact for which proposal law, measured by summing every draw."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.laws import LAWS, law_key
from specjax.types import Draws
from specjax.verify.joint import enumerate_trees, in_chunks, join_trees, joint, node_logits, path_law, target_law
from specjax.verify.measure import average_coupled, for_laws, node_outcomes
from specjax.verify.paths import PATH_RULES
from specjax.verify.rules import RULES

EXACT = 1e-12  # total variation from the target below which a pair is called exact
BIASED = 1e-3  # and above which it is called biased; nothing may lie between

NODE_VOCAB, NODE_DRAWS = 4, 3
PATH_VOCAB = 3


class Cell(NamedTuple):
    """One verifier for one law."""

    verdict: str  # "exact", "biased", or "refused" where the verifier cannot take such draws at all
    worst: float  # largest total variation from the target over all problems and draw counts; nan where refused


Table = dict[str, dict[str, Cell]]  # verifier -> law key -> cell


@functools.cache
def table(num_problems: int = 200, seed: int = 0) -> Table:
    """Measure every verifier against every law, one source and several.

    Node rules: the law of the emitted token, V = 4, up to three draws in all. Path rules: the joint law of three tokens
    over trees of depth two, V = 3 in an eighth of the problems and 2 in the others, up to three draws a node. Random p
    and q from Dirichlet(0.4), in float64. Takes about half a minute, once.

    Raises:
      ValueError: for less than one problem.
      RuntimeError: if a pair is neither exact nor clearly biased, which more problems would decide.
    """
    if num_problems < 1:
        raise ValueError(f"expected at least one problem to measure; got {num_problems=}")
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        worst = {**_node_rules(rng, num_problems), **_path_rules(rng, num_problems)}
    keys = [law_key([law] * sources) for sources in (1, 2) for law in LAWS]
    unclear = [(name, key, tv) for name, row in worst.items() for key, tv in row.items() if EXACT < tv < BIASED]
    if unclear:
        raise RuntimeError(f"neither exact nor clearly biased: {unclear}; measure with more than {num_problems=}")
    return {name: {key: _cell(row.get(key, np.nan)) for key in keys} for name, row in worst.items()}


def _cell(worst: float) -> Cell:
    if np.isnan(worst):
        return Cell("refused", worst)
    return Cell("exact" if worst <= EXACT else "biased", worst)


def format_table(cells: Table) -> str:
    """A table as Markdown, of one source and of several: exact, or the worst total variation, or a dash if refused."""
    parts = []
    for title, suffix in (("One source", ""), ("Several sources, each with its own distribution", " x sources")):
        lines = ["| verifier | " + " | ".join(f"`{law}`" for law in LAWS) + " |", "|---" * (len(LAWS) + 1) + "|"]
        for name, row in cells.items():
            lines.append(f"| `{name}` | " + " | ".join(_entry(row[law + suffix]) for law in LAWS) + " |")
        parts.append("\n".join([f"## {title}", "", *lines]))
    return "\n\n".join(parts)


def _entry(cell: Cell) -> str:
    return {"exact": "exact", "refused": "-"}.get(cell.verdict, f"{cell.worst:.2f}")


def node_cases() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every (law, draws of each source) with at most three draws, except draws coupled to the emission."""
    for name, law in LAWS.items():
        for counts in ((1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1)):
            if name != "shared_gumbel" and max(counts) <= (law.max_draws or NODE_DRAWS):
                yield name, counts


def _worst(law: np.ndarray, target: np.ndarray) -> float:
    return float(np.abs(law - target).reshape(len(law), -1).sum(1).max() / 2)


def _node_rules(rng: np.random.Generator, num_problems: int) -> dict[str, dict[str, float]]:
    p = rng.dirichlet([0.4] * NODE_VOCAB, num_problems)
    q = rng.dirichlet([0.4] * NODE_VOCAB, (num_problems, NODE_DRAWS))
    cases = list(node_cases())
    # All cases side by side, each padded to three draws from three sources, so that a rule is compiled once.
    draws, probs = [], []
    for law, counts in cases:
        parts = [node_outcomes(rows[: len(counts)], (law,) * len(counts), counts) for rows in q]
        spare = ((0, 0), (0, 0), (0, NODE_DRAWS - sum(counts)))
        tokens, valid = (np.pad(np.stack([part[field] for part, _ in parts]), spare) for field in (0, 1))
        source = np.broadcast_to(np.pad(parts[0][1], spare[-1]), tokens.shape)
        draws.append((tokens, source, valid))
        probs.append(np.stack([part.probs for part, _ in parts]))
    coupled = jax.jit(jax.vmap(average_coupled))

    worst: dict[str, dict[str, float]] = {}
    for name, record in RULES.items():
        row = worst[name] = {}
        for laws in LAWS if record.takes_laws else [None]:
            chosen = [at for at, (law, _) in enumerate(cases) if laws in (None, law)]
            if not chosen:
                continue
            rule = for_laws(name, () if laws is None else (laws,) * NODE_DRAWS)
            fields: Any = [np.concatenate(field, 1) for field in zip(*[draws[at] for at in chosen], strict=True)]
            one_problem = jax.vmap(rule, in_axes=(None, None, 0))
            emitted = np.asarray(
                jax.jit(lambda args, rule=one_problem: jax.lax.map(lambda a: rule(*a), args))((p, q, Draws(*fields)))
            )
            ends = np.cumsum([probs[at].shape[1] for at in chosen])[:-1]
            for at, part in zip(chosen, np.split(emitted, ends, 1), strict=True):
                law, counts = cases[at]
                key = law_key([law] * len(counts))
                row[key] = max(row.get(key, 0.0), _worst(np.einsum("pm,pmv->pv", probs[at], part), p))
                if (law, counts) == ("iid", (1,)) and not record.takes_laws:
                    # Several sources that share their noise include the case that only one of them draws.
                    tv = _worst(np.asarray(coupled(q[:, 0], part).emitted), p)
                    row |= {law_key(["shared_gumbel"] * sources): tv for sources in (1, 2)}
    return worst


def random_tables(rng: np.random.Generator, levels: int, num_problems: int) -> list[np.ndarray]:
    """A random tabular model: over three tokens in every eighth problem, over two, with far fewer trees, in the others.

    Returns:
      entry d: [P] + [V] * (d + 1), from Dirichlet(0.4).
    """
    tables = [rng.dirichlet([0.4] * PATH_VOCAB, (num_problems, *(PATH_VOCAB,) * level)) for level in range(levels)]
    few = np.arange(num_problems) % 8 > 0
    for table in tables:
        table[few, ..., 2:] = 0
        table /= table.sum(-1, keepdims=True)
    return tables


def path_cases() -> Iterator[tuple[str, list[list[int]]]]:
    """Every (law, draws per depth and source) with at most three draws a node; of coupled draws see ``_path_rules``."""
    one = [[[1], [1]], [[2], [2]], [[3], [1]]]
    several = [[[1, 1], [1, 0]], [[2, 1], [1, 0]], [[1, 2], [0, 1]]]
    for name, law in LAWS.items():
        for schedule in one + several:
            if name != "shared_gumbel" and np.max(schedule) <= (law.max_draws or NODE_DRAWS):
                yield name, schedule


def _path_rules(rng: np.random.Generator, num_problems: int) -> dict[str, dict[str, float]]:
    # Draws of shared_gumbel are left out: a path rule's decisions depend on noise that the next round would draft from
    # again, which one round does not show.
    target = random_tables(rng, 3, num_problems)
    drafts = [random_tables(rng, 2, num_problems) for _ in range(2)]
    worst: dict[str, dict[str, float]] = {name: {} for name in PATH_RULES}
    cases = []
    for law, schedule in path_cases():
        sources = len(schedule[0])
        forest = enumerate_trees(drafts[:sources], (law,) * sources, schedule, merge=True)
        cases.append((law_key([law] * sources), law, forest))
    for name, rule in PATH_RULES.items():
        taken = [case for case in cases if name != "block" or case[2].trees.draw_tokens.shape[-1] == 1]
        # Of the laws, path rules only ask whether draws are without replacement: the others run as one batch.
        for distinct in (False, True) if name == "traversal" else (None,):
            chosen = [case for case in taken if distinct in (None, case[1] == "without_replacement")]
            trees = join_trees([forest.trees for _, _, forest in chosen], "without_replacement" if distinct else "iid")
            size = trees.tokens.shape[1]
            logits = np.concatenate([node_logits(forest, target, size) for _, _, forest in chosen])
            ends = in_chunks(jax.jit(functools.partial(path_law, rule.rule)), trees, logits)
            splits = np.cumsum([len(forest.probs) for _, _, forest in chosen])[:-1]
            for (key, _, forest), part in zip(chosen, np.split(ends, splits), strict=True):
                variation = _worst(joint(part, forest, target).law, target_law(target))
                worst[name][key] = max(worst[name].get(key, 0.0), variation)
    return worst
