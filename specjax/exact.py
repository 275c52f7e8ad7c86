"""Expectations without sampling: rules and whole verifiers summed over every draw, in float64.

Arrays are computed and returned in float64, whatever JAX's setting. Functions of p and q can also be traced, for
instance by ``jax.grad``: then they keep the dtype they are given, and ``jax.enable_x64(True)`` around the caller makes
that float64. Sums are over V^K draws, so vocabularies are small.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.laws import LAWS
from specjax.sampling import Warp
from specjax.tree import TokenTree
from specjax.types import NodeRule
from specjax.verify import joint as trees
from specjax.verify import measure
from specjax.verify.joint import Schedule, Table
from specjax.verify.paths import PATH_RULES
from specjax.verify.rules import RULES, naive_sampling

__all__ = [
    "block_efficiency",
    "block_efficiency_bound",
    "emitted_law",
    "expected_acceptance",
    "joint_law",
    "optimal_acceptance",
    "reach",
]

MOST_OUTCOMES = 2_000_000


def emitted_law(
    rule: str | NodeRule, p: Any, q: Any, *, num_draws: int | Sequence[int], law: str | Sequence[str]
) -> Any:
    """The law [V] of the token a node rule emits, over all draws: p itself, if the rule is exact for the law.

    Args:
      rule: a name in ``specjax.verify.RULES``, or a node rule.
      p: [V] the target's distribution.
      q: [V], or [S, V] for several sources.
      num_draws: draws at the node, one number for every source or one each.
      law: proposal law, one for every source or one each.

    Raises:
      ValueError: for an unknown name, shapes that do not fit, what is no distribution (unless traced), draws the law
        cannot make, or too many outcomes to sum.
    """
    return _expectation(rule, p, q, num_draws, law).emitted


def expected_acceptance(
    rule: str | NodeRule, p: Any, q: Any, *, num_draws: int | Sequence[int], law: str | Sequence[str]
) -> Any:
    """The probability [] that a node rule emits one of the drawn tokens, so that the path goes on.

    Differentiable in p and q, but for the rule ``optimal``, whose value ``optimal_acceptance`` gives differentiably.
    Arguments and errors are those of ``emitted_law``.
    """
    return _expectation(rule, p, q, num_draws, law).acceptance


def optimal_acceptance(p: Any, q: Any, *, num_draws: int | Sequence[int], law: str | Sequence[str]) -> Any:
    """The largest acceptance [] that any exact rule can have for these draws. Differentiable in p and q.

    1 + min over sets H of tokens of p(H) - Pr(all draws in H) (SpecTr, Sun et al. 2023, by duality). For i.i.d. draws
    from one source the sets of smallest p / q suffice (Hu et al. 2025), in any vocabulary; otherwise all 2^V are tried.
    Arguments and errors are those of ``emitted_law``.
    """
    laws, counts = _sources(p, q, num_draws, law)

    def prefixes(p: jax.Array, q: jax.Array) -> jax.Array:
        order = jnp.argsort(jnp.where(q[0] > 0, p / jnp.where(q[0] > 0, q[0], 1), jnp.inf))
        return 1 + jnp.minimum(0, (jnp.cumsum(p[order]) - jnp.cumsum(q[0][order]) ** counts[0]).min())

    def all_sets(p: jax.Array, q: jax.Array) -> jax.Array:
        return measure.bound(p, measure.node_outcomes(q, laws, counts)[0])

    if laws == ("iid",) and counts[0]:
        return _run(prefixes, p, q)
    _check_size(np.shape(p)[0], counts, sets_of=np.shape(p)[0])
    return _run(all_sets, p, q)


def joint_law(
    verifier: str | NodeRule,
    target: Table,
    drafts: Table | Sequence[Table],
    *,
    num_draws: Schedule | Sequence[int],
    law: str | Sequence[str],
    merge: bool = False,
) -> np.ndarray:
    """The law [V] * (D + 1) of the first D + 1 tokens of a text whose beginning is what one verified tree emits.

    Every tree of depth D and every outcome is summed; where fewer than D + 1 tokens were emitted the target finishes
    the text. An exact verifier gives the target's own law, the product of its tables.

    Args:
      verifier: a name in ``specjax.verify.RULES`` or ``PATH_RULES``, or a node rule.
      target: tabular model: entry d, of shape [V] * (d + 1), is the law after each path of d tokens; D + 1 entries.
      drafts: a tabular model of at least D entries, or one per source.
      num_draws: draws at every node of each depth, a number for every source or one each.
      law: proposal law, one for every source or one each.
      merge: siblings of one token become one node that expands once; otherwise each copy is a node.

    Raises:
      ValueError: as ``emitted_law``.
    """
    return _joint(verifier, target, drafts, num_draws, law, merge).law[0]


def block_efficiency(
    verifier: str | NodeRule,
    target: Table,
    drafts: Table | Sequence[Table],
    *,
    num_draws: Schedule | Sequence[int],
    law: str | Sequence[str],
    merge: bool = False,
) -> float:
    """Expected tokens per verify step, 1..D + 1, over every tree and outcome. Arguments as ``joint_law``."""
    return float(_joint(verifier, target, drafts, num_draws, law, merge).block_efficiency[0])


def block_efficiency_bound(
    target: Table,
    drafts: Table | Sequence[Table],
    *,
    num_draws: Schedule | Sequence[int],
    law: str | Sequence[str],
) -> float:
    """The most tokens per verify step that any exact verifier can emit, from above. Arguments as ``joint_law``.

    It bounds the accepted prefixes of every length apart. The optimum of each node composed down the tree is no bound:
    block verification exceeds it.
    """
    forest, target = _forest(target, drafts, num_draws, law, False, bounded=True)
    return float(trees.block_efficiency_bound(forest, target)[0])


def reach(verifier: str | NodeRule, tree: TokenTree, logits: jax.Array, warp: Warp) -> jax.Array:
    """How often a verifier accepts each node [B, N] of drafted trees [B, ..], given all that was drafted.

    The root's entry is 1, so the sum over nodes is the expected number of tokens emitted, for any vocabulary and
    without sampling the verifier; its average over trees as drafted is the block efficiency. Not for draws of
    ``shared_gumbel``, which say more about the emission than their tree does.

    Args:
      verifier: a name in ``specjax.verify.RULES`` or ``PATH_RULES``, or a node rule.
      tree: a batch of trees.
      logits: [B, N, V] the target's, at every node.
      warp: [B] fields, of the target.

    Raises:
      ValueError: for an unknown name, or a tree that the verifier cannot take.
    """
    _check_known("verifier", verifier, [*RULES, *PATH_RULES])
    if isinstance(verifier, str) and verifier in PATH_RULES:
        return trees.path_reach(PATH_RULES[verifier].rule, tree, logits, warp)
    return trees.walk_reach(measure.for_laws(verifier, tree.laws), tree, logits, warp)


def _per_source(value: Any, sources: int, name: str) -> tuple:
    values = tuple(value) if np.iterable(value) and not isinstance(value, str) else (value,) * sources
    if len(values) != sources:
        raise ValueError(f"expected one {name}, or one for each of {sources} sources; got {value!r}")
    return values


def _sources(p: Any, q: Any, num_draws: Any, law: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The law and the draws of each source of a node with p [V] and q [V] or [S, V]."""
    if np.ndim(q) not in (1, 2) or 0 in np.shape(q):
        raise ValueError(f"expected q [V], or [S, V] for several sources; got shape {np.shape(q)}")
    if np.shape(p) != np.shape(q)[-1:]:
        raise ValueError(f"expected p [V] and q [V] or [S, V] over one vocabulary; got {np.shape(p)} and {np.shape(q)}")
    sources = 1 if np.ndim(q) == 1 else np.shape(q)[0]
    laws, counts = _per_source(law, sources, "law"), _per_source(num_draws, sources, "num_draws")
    return laws, _check_laws(laws, counts, np.shape(p)[0])


def _check_laws(laws: Sequence[str], counts: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """The draws of each source as plain numbers, if each law can make them."""
    for name, count in zip(laws, counts, strict=True):
        if not isinstance(name, str) or name not in LAWS:
            raise ValueError(f"unknown proposal law {name!r}; expected one of {', '.join(LAWS)}")
        if not isinstance(count, int | np.integer) or isinstance(count, bool):
            raise ValueError(f"expected whole numbers of draws; got {count!r}")
        most = LAWS[name].most_draws(vocab_size)
        if count < 0 or (most is not None and count > most):
            limit = "any number of" if most is None else most
            raise ValueError(f"{name} expected 0 to {limit} draws from {vocab_size} tokens; got {count}")
    return tuple(int(count) for count in counts)


def _check_size(vocab_size: int, counts: Sequence[int], *, sets_of: int = 0) -> None:
    """Refuse V^K outcomes, times 2^n sets of n things, that are too many."""
    digits = sum(counts) * math.log10(vocab_size) + sets_of * math.log10(2)
    if digits > math.log10(MOST_OUTCOMES):
        sets = f" and all sets of {sets_of}" if sets_of else ""
        raise ValueError(
            f"{vocab_size} tokens, {sum(counts)} draws{sets} are about 10^{digits:.1f} terms, more than "
            f"{MOST_OUTCOMES:.0e}; take fewer draws or a smaller vocabulary"
        )


def _check_probabilities(name: str, values: np.ndarray) -> None:
    """Values [..., V] must be distributions; single precision rounds their sums."""
    wrong = ~((values >= 0).all(-1) & (np.abs(values.sum(-1) - 1) < 1e-4))
    if wrong.any():
        row = values[wrong][0] if values.ndim > 1 else values
        raise ValueError(
            f"{name} must hold probabilities that sum to 1, such as the softmax of logits; got {row}, sum {row.sum()}"
        )


def _run(function: Callable[[jax.Array, jax.Array], Any], p: Any, q: Any) -> Any:
    """Call with p [V] and q [S, V]: traced as they are, or jitted in float64 giving NumPy arrays."""
    if isinstance(p, Tracer) or isinstance(q, Tracer):
        return function(jnp.asarray(p), jnp.atleast_2d(q))
    with jax.enable_x64(True):
        p, q = np.asarray(p, np.float64), np.atleast_2d(np.asarray(q, np.float64))
        _check_probabilities("p", p)
        _check_probabilities("q", q)
        return jax.tree.map(np.asarray, function(p, q))


def _expectation(rule: str | NodeRule, p: Any, q: Any, num_draws: Any, law: Any) -> measure.Expectation:
    _check_known("node rule", rule, RULES)
    laws, counts = _sources(p, q, num_draws, law)
    _check_size(np.shape(p)[0], counts)
    return _run(_summed(rule, laws, counts), p, q)


@functools.lru_cache(maxsize=256)
def _summed(rule: str | NodeRule, laws: tuple[str, ...], counts: tuple[int, ...]) -> Callable:
    function = measure.for_laws(rule, laws)

    def independent(p: jax.Array, q: jax.Array) -> measure.Expectation:
        outcomes, source = measure.node_outcomes(q, laws, counts)
        return measure.average(measure.laws_given(function, p, q, source, outcomes), outcomes)

    def coupled(p: jax.Array, q: jax.Array) -> measure.Expectation:
        outcomes, source = measure.node_outcomes(q, laws, counts)
        return measure.average_coupled(q[0], measure.laws_given(function, p, q, source, outcomes))

    def anticipated(p: jax.Array, q: jax.Array) -> measure.Expectation:
        return measure.Expectation(p, measure.shared_noise_acceptance(p, q[0], counts[0]))

    if "shared_gumbel" not in laws:
        return jax.jit(independent)
    if counts == (1,):
        return jax.jit(coupled)
    if len(laws) == 1 and function is naive_sampling:
        return jax.jit(anticipated)
    raise ValueError(
        "draws of shared_gumbel are not independent of the emission; they are summed for one draw, or naive_sampling "
        f"with one source; got laws {laws} with {counts} draws"
    )


def _forest(
    target: Table, drafts: Any, num_draws: Any, law: Any, merge: bool, *, bounded: bool = False
) -> tuple[trees.Forest, list[np.ndarray]]:
    """Every tree, if they are not too many; ``bounded``: nor the sets of paths that the bound goes through."""
    given: dict[str, Any] = {"target": target, "drafts": drafts, "num_draws": num_draws}
    for name, value in given.items():
        if not (np.iterable(value) and list(value)):
            raise ValueError(f"expected {name} with an entry for each depth, at least one; got {value!r}")
    target = [np.asarray(table, np.float64) for table in target]
    several = np.iterable(drafts[0]) and len(drafts[0]) and np.ndim(drafts[0][0])  # one model's first entry is [V]
    drafts = drafts if several else [drafts]
    drafts = [[np.asarray(table, np.float64) for table in draft] for draft in drafts]
    laws = _per_source(law, len(drafts), "law")
    schedule = [_per_source(draws, len(drafts), "number of draws at each depth") for draws in num_draws]
    depth, vocab_size = len(schedule), target[0].shape[-1] if target[0].ndim else 0
    for name, model, entries in [("target", target, depth + 1), *[("draft", draft, depth) for draft in drafts]]:
        shapes = [table.shape for table in model[:entries]]
        if shapes != [(vocab_size,) * (level + 1) for level in range(entries)]:
            raise ValueError(
                f"expected a tabular {name} of {entries} arrays of shapes [V], [V, V], .. for {depth} levels of draws "
                f"and V={vocab_size}; got shapes {shapes}"
            )
        for table in model[:entries]:
            _check_probabilities(name, table)
    schedule = [_check_laws(laws, draws, vocab_size) for draws in schedule]
    if "shared_gumbel" in laws:
        raise ValueError(
            "draws of shared_gumbel are not independent of the emission; whole trees of them are not summed"
        )
    nodes = [math.prod(sum(draws) for draws in schedule[:level]) for level in range(depth)]
    draws_in_all = [count * sum(draws) for count, draws in zip(nodes, schedule, strict=True)]
    _check_size(vocab_size, draws_in_all, sets_of=vocab_size**depth if bounded else 0)
    one_problem = lambda model: [table[None] for table in model]
    forest = trees.enumerate_trees([one_problem(draft) for draft in drafts], laws, schedule, merge=merge)
    return forest, one_problem(target[: depth + 1])


def _check_known(kind: str, value: Any, known: Iterable[str]) -> None:
    if isinstance(value, str) and value not in known:
        raise ValueError(f"unknown {kind} {value!r}; expected one of {', '.join(known)}")
    if not isinstance(value, str) and not callable(value):
        raise ValueError(f"expected the name of a {kind}, or a node rule; got {value!r}")


def _joint(verifier: str | NodeRule, target: Table, drafts: Any, num_draws: Any, law: Any, merge: bool) -> trees.Joint:
    _check_known("verifier", verifier, [*RULES, *PATH_RULES])
    forest, target = _forest(target, drafts, num_draws, law, merge)
    logits = trees.node_logits(forest, target)
    with jax.enable_x64(True):
        ends = trees.in_chunks(_ends(verifier, forest.trees.laws), forest.trees, logits)
    return trees.joint(ends, forest, target)


@functools.lru_cache(maxsize=256)
def _ends(verifier: str | NodeRule, laws: tuple[str, ...]) -> Callable:
    if isinstance(verifier, str) and verifier in PATH_RULES:
        return jax.jit(functools.partial(trees.path_law, PATH_RULES[verifier].rule))
    return jax.jit(functools.partial(trees.walk_law, measure.for_laws(verifier, laws)))
