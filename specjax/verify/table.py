"""The compatibility table: which verifier is exact for which proposal law, measured by summing every draw."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.laws import LAWS, law_key
from specjax.tree import TokenTree
from specjax.types import Draws
from specjax.verify.joint import enumerate_trees, in_chunks, joint, node_logits, path_law, target_law
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
    over trees of depth two, V = 3 in an eighth of the problems and 2 in the others. Random p and q from Dirichlet(0.4),
    in float64. Takes about half a minute, once.

    Raises:
      RuntimeError: if a pair is neither exact nor clearly biased, which more problems would decide.
    """
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
    """A table as Markdown: exact, or the worst total variation, or a dash where the draws are refused."""
    laws = list(next(iter(cells.values())))
    lines = ["| verifier | " + " | ".join(laws) + " |", "|---" * (len(laws) + 1) + "|"]
    for name, row in cells.items():
        entries = [
            "exact" if c.verdict == "exact" else "-" if c.verdict == "refused" else f"{c.worst:.2f}"
            for c in row.values()
        ]
        lines.append(f"| {name} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


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


def _path_rules(rng: np.random.Generator, num_problems: int) -> dict[str, dict[str, float]]:
    def random_tables(levels: int) -> list[np.ndarray]:
        """Laws of all problems: over two tokens, which has far fewer trees, but for every eighth problem."""
        tables = [rng.dirichlet([0.4] * PATH_VOCAB, (num_problems, *(PATH_VOCAB,) * level)) for level in range(levels)]
        few = np.arange(num_problems) % 8 > 0
        for table in tables:
            table[few, ..., 2:] = 0
            table /= table.sum(-1, keepdims=True)
        return tables

    target, drafts = random_tables(3), [random_tables(2), random_tables(2)]
    # Draws of shared_gumbel are left out: a path rule's decisions depend on noise that the next round would draft from
    # again, which one round does not show.
    laws = [law for law in LAWS if law != "shared_gumbel"]
    worst: dict[str, dict[str, float]] = {name: {} for name in PATH_RULES}
    # Two draws a node from one source; or two and one from two sources at the root, and one below.
    trees = [(1, law, [[2, 0], [2, 0]]) for law in laws] + [(2, law, [[2, 1], [1, 0]]) for law in laws]
    chains = [(1, law, [[1, 0], [1, 0]]) for law in laws]
    for kinds, names in ((trees, [name for name in PATH_RULES if name != "block"]), (chains, ["block"])):
        cases = [
            (law_key([law] * sources), law, enumerate_trees(drafts, (law, law), schedule, merge=True))
            for sources, law, schedule in kinds
        ]
        for name in names:
            # Of the laws, path rules only ask whether draws are without replacement: the others run as one batch.
            for static in ("iid", "without_replacement") if name == "traversal" else (None,):
                chosen = [
                    case for case in cases if static is None or (case[1] == "without_replacement") == (static != "iid")
                ]
                batch = _batch([forest.trees for _, _, forest in chosen], static or "iid")
                logits = np.concatenate([node_logits(forest, target) for _, _, forest in chosen])
                ends = in_chunks(jax.jit(functools.partial(path_law, PATH_RULES[name].rule)), batch, logits)
                splits = np.cumsum([len(forest.probs) for _, _, forest in chosen])[:-1]
                for (key, _, forest), part in zip(chosen, np.split(ends, splits), strict=True):
                    worst[name][key] = _worst(joint(part, forest, target).law, target_law(target))
    return worst


def _batch(trees: list[TokenTree], law: str) -> TokenTree:
    """Trees of equally many nodes as one batch, padded to the same numbers of draws and of rows of q."""
    draws, rows = (
        max(getattr(tree, field).shape[axis] for tree in trees) for field, axis in (("draw_tokens", 2), ("q", 1))
    )

    def pad(field: Any, axis: int, size: int) -> Any:
        return np.pad(field, [(0, size - have if at == axis else 0) for at, have in enumerate(field.shape)])

    padded = [
        dataclasses.replace(
            tree,
            draw_tokens=pad(tree.draw_tokens, 2, draws),
            draw_valid=pad(tree.draw_valid, 2, draws),
            draw_source=pad(tree.draw_source, 1, draws),
            q=pad(tree.q, 1, rows),
            laws=(law,) * len(tree.laws),
        )
        for tree in trees
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *padded)
