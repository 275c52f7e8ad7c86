"""Node rules summed over every draw: what they emit, how often it was drawn, and how often it could be."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.laws import LAWS, Outcomes, divide
from specjax.types import Draws, NodeRule
from specjax.verify.rules import RULES


class Expectation(NamedTuple):
    """A node rule averaged over the draws."""

    emitted: Any  # [V] law of the emitted token
    acceptance: Any  # [] probability that it is one of the drawn tokens


def join_sources(outcomes: Sequence[Outcomes]) -> tuple[Outcomes, np.ndarray]:
    """Independent sources' outcomes as one, source after source, and the source [K] of each draw."""
    sizes = [len(part.probs) for part in outcomes]
    picks = np.indices(sizes).reshape(len(sizes), -1)
    xp = np if all(isinstance(part.probs, np.ndarray) for part in outcomes) else jnp
    tokens = xp.concatenate([part.tokens[pick] for part, pick in zip(outcomes, picks, strict=True)], -1)
    valid = xp.concatenate([part.valid[pick] for part, pick in zip(outcomes, picks, strict=True)], -1)
    probs = functools.reduce(lambda a, b: a * b, [part.probs[pick] for part, pick in zip(outcomes, picks, strict=True)])
    source = np.repeat(np.arange(len(sizes)), [part.tokens.shape[1] for part in outcomes])
    return Outcomes(tokens, valid, probs), source.astype(np.int32)


def node_outcomes(q: Any, laws: Sequence[str], counts: Sequence[int]) -> tuple[Outcomes, np.ndarray]:
    """Every outcome at a node where source s takes counts[s] draws from q[s] [V], and the source [K] of each draw."""
    none = Outcomes(np.zeros((1, 0), np.int32), np.zeros((1, 0), bool), np.ones(1))
    parts = [
        LAWS[law].enumerate(row, count) if count else none for row, law, count in zip(q, laws, counts, strict=True)
    ]
    return join_sources(parts)


def for_laws(rule: NodeRule | str, laws: Sequence[str]) -> NodeRule:
    """A rule as a function of (p, q, draws), by name or value; one that depends on the laws is given them.

    Raises:
      ValueError: for a name that is no node rule.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"unknown node rule {rule!r}; expected one of {', '.join(RULES)}")
        record = RULES[rule]
        return functools.partial(record.rule, laws=tuple(laws)) if record.takes_laws else record.rule
    return rule


def laws_given(rule: NodeRule, p: jax.Array, q: jax.Array, source: Any, outcomes: Outcomes) -> jax.Array:
    """[M, V] the emitted token's law given each outcome at one node: p [V], q [S, V], source [K]."""
    one = lambda tokens, valid: rule(p, q, Draws(tokens, jnp.asarray(source), valid))
    return jax.vmap(one)(jnp.asarray(outcomes.tokens), jnp.asarray(outcomes.valid))


def average(laws: jax.Array, outcomes: Outcomes) -> Expectation:
    """Average the laws [M, V] given each outcome."""
    at = jnp.asarray(outcomes.tokens)[:, :, None] == jnp.arange(laws.shape[-1])
    drawn = (jnp.asarray(outcomes.valid)[:, :, None] & at).any(1)
    return Expectation(outcomes.probs @ laws, outcomes.probs @ jnp.where(drawn, laws, 0).sum(1))


def average_coupled(q: jax.Array, laws: jax.Array) -> Expectation:
    """A rule averaged over one draw from q [V] whose Gumbel noise is also the emission's; laws [V drawn, V emitted].

    In exponential races: with independent E_i of rate 1, the draw is x = argmin E_i / q_i and the emitted token
    argmin E_i / e_i with e the rule's law given x. With A(r) = sum over i of max(r q_i, e_i) and b_i = e_i / q_i,

      P(x, then y) = q_x e_y * integral over [b_x, b_y] of dr / A(r)^2 for b_x < b_y,    P(x, then x) = e_x / A(b_x),

    and A is linear between the b_i, where the integral from r to s is (s - r) / (A(r) A(s)).
    """
    tokens, drawable = jnp.arange(q.shape[0]), q > 0

    def given(x: jax.Array, emitted: jax.Array) -> jax.Array:
        at = divide(emitted, q, jnp.inf)
        knots = jnp.sort(at)
        finite = jnp.where(knots < jnp.inf, knots, 0)
        height = jnp.maximum(finite[:, None] * q, emitted).sum(1)  # A at each finite knot
        # Beyond the last finite knot A grows with slope sum(q), so the rest of the integral is 1 / (sum(q) A).
        last = knots[1:] == jnp.inf
        piece = jnp.where(last, 1 / (q.sum() * height[:-1]), (finite[1:] - finite[:-1]) / (height[:-1] * height[1:]))
        piece = jnp.where(knots[:-1] < jnp.inf, piece, 0)
        inside = (knots[:-1] >= at[x]) & (knots[:-1] < at[:, None])  # [V, V - 1] pieces between b_x and b_y
        other = q[x] * emitted * jnp.where(inside, piece, 0).sum(1)
        here = jnp.where(drawable[x], at[x], 0)
        same = emitted[x] / jnp.maximum(here * q, emitted).sum()
        return jnp.where(drawable[x], jnp.where(tokens == x, same, other), 0)

    joint = jax.vmap(given)(tokens, laws)
    return Expectation(joint.sum(0), jnp.trace(joint))


def shared_noise_acceptance(p: jax.Array, q: jax.Array, count: int) -> jax.Array:
    """How often the Gumbel-max of p [V] is among the Gumbel-top-``count`` of q [V] under the same noise.

    In exponential races (as in ``average_coupled``): given the emitted y and its arrival, every other token i arrives
    in q's race before y or not, independently. Summing over the sets of fewer than ``count`` early tokens by inclusion
    and exclusion leaves one rate per set T, p_i inside and max(p_i, q_i p_y / q_y) outside. For one draw that is
    sum over y of 1 / sum over i of max(p_i / p_y, q_i / q_y).
    """
    vocab_size = p.shape[0]
    small = [tokens for size in range(count) for tokens in itertools.combinations(range(vocab_size), size)]
    sets = np.zeros((len(small), vocab_size), bool)
    for row, tokens in zip(sets, small, strict=True):
        row[list(tokens)] = True
    weight = np.array(
        [
            sum((-1) ** j * math.comb(vocab_size - 1 - size, j) for j in range(count - size))
            for size in sets.sum(1).tolist()
        ]
    )

    def emits(y: jax.Array) -> jax.Array:
        outside = jnp.maximum(p, divide(q * p[y], q[y], q * p[y]))
        rate = jnp.where(sets, p, outside).sum(1)
        return jnp.where((q[y] > 0) & ~jnp.asarray(sets)[:, y], weight * p[y] / rate, 0).sum()

    return jax.lax.map(emits, jnp.arange(vocab_size)).sum()


def subsets(vocab_size: int) -> np.ndarray:
    """[2^V, V] bool: every set of tokens."""
    return (np.arange(2**vocab_size)[:, None] >> np.arange(vocab_size)) & 1 == 1


def bound(p: jax.Array, outcomes: Outcomes) -> jax.Array:
    """The most any exact rule can accept: 1 + min over sets H of p(H) - Pr(all draws in H), p [V].

    SpecTr (Sun et al. 2023), by the duality of maximum flow and minimum cut; all 2^V sets are tried.
    """
    sets = subsets(p.shape[0])
    inside = (jnp.asarray(sets)[:, outcomes.tokens] | ~outcomes.valid).all(-1)  # [2^V, M]
    return 1 + (sets @ p - inside @ outcomes.probs).min()
