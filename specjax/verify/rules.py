"""Node rules: the law of the token emitted at a node, given p, q and the node's ordered draws.

Every rule is a plain unbatched function ``rule(p [V], q [S, V], draws) -> emitted [V]`` in the dtype of p. All but
``optimal`` are differentiable, with O(V) work per draw and no [K, V] array. In all of them ``draws.valid`` may be False
anywhere, a draw with q(x) = 0 is skipped, remaining mass is summed afresh rather than subtracted, and normalising
nothing gives back what was there before. Without draws the law is p.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.laws import divide, grown
from specjax.types import Draws
from specjax.verify.transport import optimal


def _without_draws_p(rule: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A tree of a lone root has K = 0 draws, and then there is nothing to index."""

    @functools.wraps(rule)
    def wrapped(p: jax.Array, q: jax.Array, draws: Draws, **keywords) -> jax.Array:
        return rule(p, q, draws, **keywords) if draws.tokens.shape[0] else p

    return wrapped


class Rule(NamedTuple):
    """A node rule and the laws it is exact for."""

    name: str
    rule: Callable[..., jax.Array]
    exact_for: frozenset[str] | None  # keys of proposal laws (see specjax.laws.law_key); None is every law
    takes_laws: bool = False  # the rule needs the keyword laws: the law of each source


def normalise(mass: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Mass [..., V] made to sum to 1 along its last axis; where it is zero, the other."""
    total = mass.sum(-1, keepdims=True)
    return divide(mass, total, otherwise)


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """min(1, a / b), and 0 where b is 0."""
    below = (b > 0) & (a <= b)  # chosen before dividing: beyond it a / b may overflow, and with it the derivative
    return jnp.where(below, jnp.minimum(1, divide(a, jnp.where(below, b, 1))), (b > 0).astype(a.dtype))


def _excess(p: jax.Array, q: jax.Array) -> jax.Array:
    """N((p - q)+), the law left when a draw from q was refused as p's."""
    return normalise(jnp.maximum(p - q, 0), p)


def _usable(q: jax.Array, draws: Draws) -> jax.Array:
    """[K] bool: valid draws whose source gives them mass."""
    return draws.valid & (q[draws.source, draws.tokens] > 0)


def _only(law: jax.Array, token: jax.Array, accept: jax.Array) -> jax.Array:
    """The mixture of ``token`` with weight ``accept`` and ``law`` with the rest."""
    return ((1 - accept) * law).at[token].add(accept)


def naive_sampling(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """The target's own law: a token is sampled from p, and the path goes on where it happens to be a child.

    SpecInfer (Miao et al. 2024), section 4.3, "naive sampling". Exact for every law, including draws that depend on the
    noise of the emission. Cost: none.
    """
    del q, draws
    return p


@_without_draws_p
def naive_tree(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """Speculative sampling with the first draw; the other draws count only where its residual hits them.

    Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", Algorithm 1, at each node; the
    later siblings are the naive tree of Weng et al. 2025, "Traversal verification". Exact wherever the first draw has
    law q: i.i.d., without replacement, hub, several sources. Cost: O(V).
    """
    usable = _usable(q, draws)
    first = jnp.argmax(usable)
    token, law = draws.tokens[first], q[draws.source[first]]
    return jnp.where(usable.any(), _only(_excess(p, law), token, _ratio(p[token], law[token])), p)


@_without_draws_p
def multi_step(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """Multi-step speculative sampling (MSS): each draw is tested against what the ones before it left of p.

    SpecInfer (Miao et al. 2024), section 4.3, Algorithm 2. Exact for i.i.d. draws with their multiplicity, from one
    source or several, in an order that does not depend on the tokens. Cost: O(V) per draw.
    """

    def step(carry: tuple[jax.Array, jax.Array], draw: tuple[jax.Array, jax.Array, jax.Array]):
        left, reach = carry
        token, source, usable = draw
        accept = jnp.where(usable, _ratio(left[token], q[source, token]), 0)
        left = jnp.where(usable, _excess(left, q[source]), left)
        return (left, reach * (1 - accept)), reach * accept

    start = (p, jnp.ones((), p.dtype))
    (left, reach), accepted = jax.lax.scan(step, start, (draws.tokens, draws.source, _usable(q, draws)))
    return (reach * left).at[draws.tokens].add(accepted)


@_without_draws_p
def without_replacement(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """MSS in which a refused token leaves q as well as p, and repeats are skipped.

    Sequoia (Chen et al. 2024), section 3.2, Algorithm 2, and the recursive rejection sampling of RSD (Jeon et al.
    2024), section 3.1. Exact for draws without replacement verified in drawing order; also for i.i.d. draws, since a
    draw that is not a repeat has the law q restricted to the unseen, and for several sources of either. Cost: O(V) per
    draw.
    """

    def step(carry: tuple[jax.Array, jax.Array, jax.Array], draw: tuple[jax.Array, jax.Array, jax.Array]):
        left, seen, reach = carry
        token, source, valid = draw
        law = jnp.where(seen, 0, q[source])
        law = normalise(law, law)
        usable = valid & (law[token] > 0)
        accept = jnp.where(usable, _ratio(left[token], law[token]), 0)
        left = jnp.where(usable, _excess(left, law), left)
        seen = seen.at[token].set(seen[token] | usable)
        return (left, seen, reach * (1 - accept)), reach * accept

    start = (p, jnp.zeros(p.shape, bool), jnp.ones((), p.dtype))
    (left, _, reach), accepted = jax.lax.scan(step, start, (draws.tokens, draws.source, draws.valid))
    return (reach * left).at[draws.tokens].add(accepted)


def _tries(overlap: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return gamma = sum over i < count of (1 - overlap)^i, and its derivative by overlap."""
    refuse, power = 1 - overlap, jnp.ones_like(overlap)
    gamma, slope = jnp.zeros_like(overlap), jnp.zeros_like(overlap)
    for i in range(most):
        gamma = gamma + jnp.where(i < count, power, 0)
        # Horner by hand: power is refuse^i, and slope gathers -(i + 1) refuse^i for the exponent i + 1.
        slope = slope - jnp.where(i + 1 < count, (i + 1) * power, 0)
        power = power * refuse
    return gamma, slope


def _k_seq_gap(rho: jax.Array, p: jax.Array, q: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """rho - gamma(beta(rho)), not negative from the root on, and its derivative by rho."""
    scaled = p / rho
    gamma, by_overlap = _tries(jnp.minimum(scaled, q).sum(), count, most)
    return rho - gamma, 1 + by_overlap * jnp.where(scaled < q, scaled, 0).sum() / rho


def _k_seq_scale(p: jax.Array, q: jax.Array, count: jax.Array, most: int) -> jax.Array:
    """The root rho in [1, count] of rho = gamma(beta(rho)), from above, with its implicit derivative.

    Any rho above the root is exact and accepts a little less; one below it makes the residual negative. So the upper
    end of the bracket is returned. Newton steps, each a hair too far so that the upper end follows, and halving where
    they leave the bracket.
    """
    frozen_p, frozen_q = jax.lax.stop_gradient((p, q))
    eps = jnp.finfo(p.dtype).eps

    def search(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, rho, _, steps = state
        gap, slope = _k_seq_gap(rho, frozen_p, frozen_q, count, most)
        above = gap >= 0
        low, high = jnp.where(above, low, rho), jnp.where(above, rho, high)
        root = rho - gap / jnp.where(slope > 0, slope, 1)
        found = (above & (slope > 0) & (high - root <= 8 * eps * high)) | (high - low <= 4 * eps * high)
        beyond = root * (1 + 4 * eps)
        inside = (slope > 0) & (beyond > low) & (beyond < high)
        return low, high, jnp.where(inside, beyond, (low + high) / 2), found, steps + 1

    one = jnp.ones((), p.dtype)
    start = (one, jnp.maximum(count, 1).astype(p.dtype), one, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    most_steps = 2 * jnp.finfo(p.dtype).nmant
    rho = jax.lax.while_loop(lambda state: ~state[3] & (state[4] < most_steps), search, start)[1]
    # One Newton step whose value is zero and whose derivative is the root's.
    gap, _ = _k_seq_gap(rho, p, q, count, most)
    _, slope = _k_seq_gap(rho, frozen_p, frozen_q, count, most)
    flat = jnp.abs(slope) < eps**0.5  # p = q: the root sits at a kink and is left alone
    return rho - jnp.where(flat, 0, (gap - jax.lax.stop_gradient(gap)) / jnp.where(flat, 1, slope))


@_without_draws_p
def spectr(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """K-SEQ: every draw is tested against the same p / (rho q), with rho chosen so that the residual is just positive.

    SpecTr (Sun et al. 2023), Algorithm 2, k-sequential selection; of rho, Theorem 1 and appendix C.1. Exact for i.i.d.
    draws from one source, their number known before they are drawn. Cost: O(V) per step towards rho, about ten of them.
    """
    most = draws.tokens.shape[0]
    usable = _usable(q, draws)
    count = usable.sum()
    law = q[draws.source[jnp.argmax(usable)]]
    rho = _k_seq_scale(p, law, count, most)
    kept = jnp.minimum(p / rho, law)
    gamma, _ = _tries(kept.sum(), count, most)
    accept = jnp.where(usable, _ratio(p[draws.tokens] / rho, law[draws.tokens]), 0)
    reach = jnp.cumprod(1 - accept)
    before = jnp.concatenate([jnp.ones((1,), p.dtype), reach[:-1]])
    residual = normalise(jnp.maximum(p - gamma * kept, 0), p)
    return jnp.where(count > 0, (reach[-1] * residual).at[draws.tokens].add(before * accept), p)


@_without_draws_p
def top_k_plus_one(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """Speculative sampling with the last draw, against q without the earlier ones, which its residual usually hits.

    After the greedy draft construction of Hu et al. 2025, "Towards optimal multi-draft speculative decoding" (neither
    the paper's own form nor its section was at hand; this one is enumerated). Exact for top-(k-1) plus one drawn from
    the rest, where it reaches the optimum, and for draws without replacement; not for i.i.d. draws, whose last may
    repeat an earlier one. Cost: O(V).
    """
    usable = _usable(q, draws)
    count = usable.sum()
    slots = jnp.arange(usable.shape[0])
    last = jnp.max(jnp.where(usable, slots, 0))
    token = draws.tokens[last]
    earlier = jnp.where(usable & (slots < last), draws.tokens, p.shape[0])
    law = q[draws.source[last]].at[earlier].set(0, mode="drop")
    law = normalise(law, law)
    return jnp.where(count > 0, _only(_excess(p, law), token, _ratio(p[token], law[token])), p)


@_without_draws_p
def hub(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """SpecHub: of a pair that always holds a = argmax q, the other token is served first and a takes what is left.

    SpecHub (Sun et al. 2024, "Provable acceleration to multi-draft speculative decoding"), the solution of its linear
    program over pairs with the hub (no section of the paper was at hand; this is enumerated). Exact for the hub law's
    pairs and a single draw from q; also for draws without replacement, since it looks at the second draw only where the
    first is a, and there the two laws agree. Cost: O(V).
    """
    usable = _usable(q, draws)
    slots = jnp.arange(usable.shape[0])
    first = jnp.argmax(usable)
    second = jnp.argmax(usable & (slots > first))
    law = q[draws.source[first]]
    centre = jnp.argmax(law)
    rest = law.at[centre].set(0)
    # The pair (x, a) has probability q(x); the pair (a, x) this much:
    reversed_pair = law[centre] * normalise(rest, rest)
    by_first = jnp.minimum(p, rest)
    by_second = jnp.minimum(p - by_first, reversed_pair)
    unused = ((rest - by_first) + (reversed_pair - by_second)).sum()
    by_centre = jnp.minimum(p[centre], unused)
    residual = normalise(jnp.maximum((p - by_first - by_second).at[centre].add(-by_centre), 0), p)
    centre_first = draws.tokens[first] == centre
    token = jnp.where(centre_first, draws.tokens[second], draws.tokens[first])
    accept = jnp.where(
        centre_first, _ratio(by_second[token], reversed_pair[token]), _ratio(by_first[token], rest[token])
    )
    pair = _only(_only(residual, centre, _ratio(by_centre, unused)), token, accept)
    return jnp.where(usable.sum() > 1, pair, naive_tree(p, q, draws))


@_without_draws_p
def khisti(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
    """Keep the draw with the largest p / q, whose exact law is r, and test it against r as a single draw.

    The two-step decomposition of Khisti et al. 2025, "Multi-draft speculative sampling: canonical decomposition and
    theoretical limits", Theorem 1, with fixed weights where the paper solves a linear program: any way of keeping a
    draw is exact, weights only optimise. Exact for i.i.d. draws from one source, their number known before they are
    drawn. Cost: O(V), since ratios are only told apart to 3%.
    """
    usable = _usable(q, draws)
    # Classes of all sources first, since they do not depend on the draws: averages over draws then share them.
    ranked = jax.tree.map(lambda field: field[draws.source[jnp.argmax(usable)]], jax.vmap(rank, (None, 0))(p, q))
    token, kept_law = best_of_draws(ranked, draws.tokens, usable)
    emitted = _only(_excess(p, kept_law), token, _ratio(p[token], kept_law[token]))
    return jnp.where(usable.any(), emitted, p)


class Ranked(NamedTuple):
    """Tokens in classes of nearly equal p / q."""

    kind: jax.Array  # [V] int32 class, the larger the larger p / q
    q: jax.Array  # [V]
    upto: jax.Array  # [V] mass of q in the token's class and those below
    below: jax.Array  # [V] mass of q in the classes below


def rank(p: jax.Array, q: jax.Array) -> Ranked:
    """Rank tokens by p / q without a sort: ratios between 2^-12 and 2^12 are told apart to 3%."""
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1), 0).astype(jnp.float32)
    # A float's exponent and the first 5 bits behind it are in order, since no ratio is negative.
    kind = jnp.clip((jax.lax.bitcast_convert_type(ratio, jnp.int32) >> 18) - (127 - 12) * 2**5, 0, 24 * 2**5 - 1)
    upto = jnp.cumsum(jnp.zeros(24 * 2**5, q.dtype).at[kind].add(q))
    upto = upto / jnp.where(upto[-1] > 0, upto[-1], 1)
    below = jnp.concatenate([jnp.zeros((1,), q.dtype), upto[:-1]])
    return Ranked(kind, q, upto[kind], below[kind])


def best_of_draws(ranked: Ranked, tokens: jax.Array, usable: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The draw of the highest class, the first of several, and the law [V] of that choice over the i.i.d. draws.

    With F(b) the mass of q up to class b, the highest class among k draws is b with probability F(b)^k - F(b-)^k, and
    then the first draw in it is x with probability q(x) / q(b). As a product that does not cancel, the law is
    r(x) = q(x) * sum over i < k of F(b)^i F(b-)^(k-1-i).
    """
    total, power = jnp.zeros_like(ranked.q), jnp.ones_like(ranked.q)
    for i in range(tokens.shape[0]):  # total <- total * F + F-^i, as long as there are draws
        total = jnp.where(i < usable.sum(), total * ranked.upto + power, total)
        power = power * ranked.below
    return tokens[jnp.argmax(jnp.where(usable, ranked.kind[tokens], -1))], ranked.q * total


def _sources(*laws: str) -> frozenset[str]:
    return frozenset(law + suffix for law in laws for suffix in ("", " x sources"))


_GROWN = grown("iid"), grown("without_replacement")

# What each is exact for is measured, and tests compare: by specjax.verify.table for laws of a node, and for trees that
# grow by summing every tree.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("naive_sampling", naive_sampling, None),
        Rule("naive_tree", naive_tree, _sources("iid", "without_replacement", "hub", *_GROWN)),
        Rule("multi_step", multi_step, _sources("iid", grown("iid"))),
        Rule("without_replacement", without_replacement, _sources("iid", "without_replacement", *_GROWN)),
        Rule("spectr", spectr, frozenset({"iid"})),
        Rule("top_k_plus_one", top_k_plus_one, frozenset({"top_k_plus_one", "without_replacement"})),
        Rule("hub", hub, frozenset({"hub", "without_replacement"})),
        Rule("khisti", khisti, frozenset({"iid"})),
        Rule(
            "optimal",
            optimal,
            _sources("deterministic", "iid", "without_replacement", "top_k_plus_one", "hub"),
            takes_laws=True,
        ),
    )
}
