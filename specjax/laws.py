"""Proposal laws: how a node's draws are made from its draft distribution, as samplers and as finite sums.

A verifier is exact for a law, not for a tree: the same children drawn another way need another rule. Each law is
therefore a value with both sides in it, ``sample`` for drafting and ``enumerate`` for proving.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Outcomes(NamedTuple):
    """Everything a law can draw at one node. M depends on V and k only, never on q, so that problems stack."""

    tokens: Any  # [M, k] int32
    valid: Any  # [M, k] bool
    probs: Any  # [M] sums to 1


class Law(NamedTuple):
    """One way to draw k ordered tokens from q.

    ``sample(key, q [V], k, count=None) -> (tokens [k] int32, valid [k] bool)``: unbatched, jit-able. ``k`` is static;
    ``count`` is data, how many of them this node takes (None: all k), so that padding a topology changes no token:
    the draws beyond it are invalid. A draw without mass behind it is invalid too: without replacement once the
    support is used up, deterministic where it reaches a token of probability zero. Whether a draw is valid never
    depends on its own token, and how many are valid depends on q and count alone.

    ``enumerate(q [V], k) -> Outcomes``: for a NumPy q, NumPy float64; for a jax q, traceable and differentiable.
    """

    name: str
    sample: Callable[..., tuple[jax.Array, jax.Array]]
    enumerate: Callable[[Any, int], Outcomes]
    max_draws: int | None = None  # None: any number
    repeats: bool = False  # a node can draw one token twice, and so more often than there are tokens
    shares_emission: bool = False  # key is the EMIT key of the position whose token the draws anticipate

    def most_draws(self, vocab_size: int) -> int | None:
        """The most draws from a vocabulary; None is any number."""
        limits = [self.max_draws, None if self.repeats else vocab_size]
        return min((limit for limit in limits if limit is not None), default=None)


def law_key(laws: Sequence[str]) -> str:
    """The name under which exactness is looked up: ``iid``, ``iid x sources``, or ``hub + iid`` where laws differ."""
    if len(laws) == 1:
        return laws[0]
    return f"{laws[0]} x sources" if len(set(laws)) == 1 else " + ".join(laws)


def grown(law: str) -> str:
    """The law of a tree that grows by what was drawn: each draw is one of ``law``, but how many a node has is random.

    Whether a draw exists depends on draws made before it, here and elsewhere in the tree, and never on its own token.
    Then a verifier stays exact if the last draw of a node without anything below it, averaged over its token, changes
    nothing: so it is where draws are tested one by one, and not where their number, or which is the last, matters.
    """
    return f"grown {law}"


def drawn_by(law: str) -> str:
    """The law of each draw of a tree: ``law`` itself, or that by which it has grown."""
    return law.removeprefix("grown ")


def gumbel_noise(key: jax.Array, vocab_size: int, dtype: Any = jnp.float32) -> jax.Array:
    """[V] standard Gumbel noise. ``shared_gumbel`` drafting and the emission it anticipates both call this.

    Of twice as many random bits as usual: large values otherwise fall on a lattice (15.9, 15.2, 14.5, ..), and a tail
    of 150,000 unlikely tokens that should be drawn 0.100 of the time is drawn 0.092 of the time.
    """
    return jax.random.gumbel(key, (vocab_size,), dtype, mode="high")


def _check_draws(name: str, q: jax.Array, k: int, most: int | None) -> None:
    if q.ndim != 1:
        raise ValueError(f"{name} expected one distribution q [V]; got {q.shape=}. vmap over nodes.")
    if k < 1 or (most is not None and k > most):
        limit = "at least 1" if most is None else f"1 to {most}"
        raise ValueError(f"{name} expected {limit} draws from a vocabulary of {q.shape[0]}; got {k=}. Narrow the tree.")


def _taken(k: int, count: jax.Array | None) -> jax.Array:
    return jnp.arange(k) < (k if count is None else count)


def _invert(mass: jax.Array, u: jax.Array) -> jax.Array:
    """Index [...] of the entry of mass [..., n] in which the fraction u [...] of the total falls; never a zero one."""
    count = mass.shape[-1]
    # A product with ones, since a running sum takes a TPU's compiler three times as long.
    upto = jnp.matmul(mass, jnp.triu(jnp.ones((count, count), mass.dtype)), precision=jax.lax.Precision.HIGHEST)
    cdf = jnp.where(mass > 0, upto, -1)
    return jnp.argmax(cdf > u[..., None] * jnp.max(cdf, -1, keepdims=True), -1)


def _draw(key: jax.Array, q: jax.Array, k: int) -> jax.Array:
    """[k] independent draws from q in O(V + k sqrt V), without a [k, V] array of noise.

    Draws a block of about sqrt V tokens, then a token in it, each with its own uniform: one uniform of 23 bits for the
    whole vocabulary would round every probability to a multiple of 1e-7, which a flat tail of 150k tokens would feel.
    """
    vocab_size = q.shape[0]
    width = math.isqrt(vocab_size - 1) + 1
    blocks = -(-vocab_size // width)
    table = jnp.pad(q, (0, blocks * width - vocab_size)).reshape(blocks, width)
    # One key per draw, so that the first draws do not change when more are asked for.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(k))
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,), q.dtype))(keys)
    block = _invert(table.sum(1), u[:, 0])
    return (block * width + _invert(table[block], u[:, 1])).astype(jnp.int32)


def _namespace(q: Any) -> Any:
    return np if isinstance(q, np.ndarray | np.generic) else jnp


def _descending(q: Any) -> Any:
    return _namespace(q).argsort(-q, stable=True).astype(np.int32)


@jax.custom_jvp
def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    return a / b


@_quotient.defjvp
def _quotient_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    # The usual derivative by b is -a / b^2, which single precision overflows for b < 1e-19, though a / b is moderate.
    (a, b), (da, db) = primals, tangents
    ratio = _quotient(a, b)
    return ratio, (da - ratio * db) / b


def divide(a: Any, b: Any, empty: Any = 0) -> Any:
    """Return a / b, and ``empty`` where b is 0; its derivative is finite wherever those of a / b are of a float."""
    xp = _namespace(b)
    safe = xp.where(b > 0, b, 1)
    return xp.where(b > 0, a / safe if xp is np else _quotient(a, safe), empty)


# Deterministic top-k


def _top_k_sample(key: jax.Array, q: jax.Array, k: int, count: jax.Array | None = None):
    del key
    _check_draws("deterministic", q, k, q.shape[0])
    mass, tokens = jax.lax.top_k(q, k)
    return tokens.astype(jnp.int32), (mass > 0) & _taken(k, count)


def _top_k_enumerate(q: Any, k: int) -> Outcomes:
    tokens = _descending(q)[None, :k]
    return Outcomes(tokens, q[tokens] > 0, _namespace(q).ones((1,), q.dtype))


# Independent draws


def _iid_sample(key: jax.Array, q: jax.Array, k: int, count: jax.Array | None = None):
    _check_draws("iid", q, k, None)
    tokens = _draw(key, q, k)
    return tokens, (q[tokens] > 0) & _taken(k, count)


def _iid_enumerate(q: Any, k: int) -> Outcomes:
    vocab_size = q.shape[0]
    tokens = np.array(list(itertools.product(range(vocab_size), repeat=k)), np.int32).reshape(vocab_size**k, k)
    return Outcomes(tokens, np.ones(tokens.shape, bool), q[tokens].prod(-1))


# Without replacement


def _gumbel_top_k(name: str, key: jax.Array, q: jax.Array, k: int, count: jax.Array | None = None):
    _check_draws(name, q, k, q.shape[0])
    scores = jnp.where(q > 0, jnp.log(q) + gumbel_noise(key, q.shape[0], q.dtype), -jnp.inf)
    best, tokens = jax.lax.top_k(scores, k)
    return tokens.astype(jnp.int32), (best > -jnp.inf) & _taken(k, count)


@functools.cache
def _permutations(vocab_size: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ordered k-subsets [M, k]; what is unseen before each draw [M, k, V]; is the draw the lowest unseen [M, k]."""
    tokens = np.array(list(itertools.permutations(range(vocab_size), k)), np.int32).reshape(-1, k)
    earlier = np.tril(np.ones((k, k), bool), -1)
    hit = tokens[:, :, None] == np.arange(vocab_size)  # [M, k, V]
    unseen = ~(earlier[None, :, :, None] & hit[:, None]).any(2)
    return tokens, unseen, unseen.argmax(-1) == tokens


def _without_replacement_enumerate(q: Any, k: int) -> Outcomes:
    if k > q.shape[0]:
        raise ValueError(f"expected at most {q.shape[0]} draws without replacement; got {k=}")
    tokens, unseen, lowest = _permutations(q.shape[0], k)
    rest = (q * unseen).sum(-1)  # [M, k]
    exists = rest > 0
    # Where nothing is left, the draw is invalid and one fixed continuation carries the probability.
    steps = _namespace(q).where(exists, divide(q[tokens], rest), lowest)
    return Outcomes(tokens, exists, steps.prod(-1))


# Top k - 1, and one drawn from the rest


def _top_k_plus_one_sample(key: jax.Array, q: jax.Array, k: int, count: jax.Array | None = None):
    _check_draws("top_k_plus_one", q, k, q.shape[0])
    last = (k if count is None else count) - 1
    mass, top = jax.lax.top_k(q, k)
    rest = q.at[jnp.where(jnp.arange(k) < last, top, q.shape[0])].set(0, mode="drop")
    drawn = _draw(key, rest, 1)[0]
    slot = jnp.arange(k)
    tokens = jnp.where(slot == last, drawn, top).astype(jnp.int32)
    return tokens, jnp.where(slot == last, rest[drawn] > 0, mass > 0) & _taken(k, count)


def _top_k_plus_one_enumerate(q: Any, k: int) -> Outcomes:
    xp, vocab_size = _namespace(q), q.shape[0]
    top = _descending(q)[: k - 1]
    rest = xp.where((np.arange(vocab_size)[:, None] == top).any(-1), 0, q)
    exists = rest.sum() > 0
    last = np.arange(vocab_size, dtype=np.int32)
    tokens = xp.concatenate([xp.broadcast_to(top, (vocab_size, k - 1)), last[:, None]], -1)
    valid = xp.concatenate([q[tokens[:, :-1]] > 0, xp.broadcast_to(exists, (vocab_size, 1))], -1)
    return Outcomes(tokens, valid, xp.where(exists, divide(rest, rest.sum()), last == 0))


# SpecHub


def _hub_sample(key: jax.Array, q: jax.Array, k: int, count: jax.Array | None = None):
    _check_draws("hub", q, k, min(2, q.shape[0]))
    hub = jnp.argmax(q).astype(jnp.int32)
    first_key, second_key = jax.random.split(key)
    first = _draw(first_key, q, 1)[0]
    rest = q.at[hub].set(0)
    second = jnp.where(first == hub, _draw(second_key, rest, 1)[0], hub)
    # With all mass on the hub there is no second token; the first is then the hub, so this is known before the draw.
    tokens, valid = jnp.stack([first, second]), jnp.stack([q[hub] > 0, jnp.any(rest > 0)])
    return tokens[:k], valid[:k] & _taken(k, count)


def _hub_enumerate(q: Any, k: int) -> Outcomes:
    if k == 1:
        return _iid_enumerate(q, 1)  # the first draw of a pair has law q
    if k != 2:
        raise ValueError(f"hub expected 1 or 2 draws; got {k=}")
    xp = _namespace(q)
    token = np.arange(q.shape[0], dtype=np.int32)
    hub = xp.argmax(q).astype(np.int32)
    hubs = xp.broadcast_to(hub, token.shape)
    rest = xp.where(token == hub, 0, q)
    exists = rest.sum() > 0
    hub_first = xp.where(exists, q[hub] * divide(rest, rest.sum()), token == 0)
    tokens = xp.concatenate([xp.stack([token + 0 * hub, hubs], -1), xp.stack([hubs, token + 0 * hub], -1)])
    valid = xp.stack([xp.ones(tokens.shape[:1], bool), xp.broadcast_to(exists, tokens.shape[:1])], -1)
    return Outcomes(tokens, valid, xp.concatenate([rest, hub_first]))


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        # The k likeliest tokens, ties to the lowest index. Uses no randomness.
        Law("deterministic", _top_k_sample, _top_k_enumerate),
        # k independent draws; repeats are kept, since rules for this law count them.
        Law("iid", _iid_sample, _iid_enumerate, repeats=True),
        # Gumbel-top-k, in drawing order (Kool et al. 2019, "Stochastic beams and where to find them").
        Law(
            "without_replacement",
            functools.partial(_gumbel_top_k, "without_replacement"),
            _without_replacement_enumerate,
        ),
        # The k - 1 likeliest tokens, then one drawn from the renormalised rest (Hu et al. 2025, "Towards optimal
        # multi-draft speculative decoding").
        Law("top_k_plus_one", _top_k_plus_one_sample, _top_k_plus_one_enumerate),
        # With a = argmax q: (x, a) with probability q(x), (a, x) with q(a) q(x) / (1 - q(a)) (Sun et al. 2024,
        # "SpecHub"). Each draw alone, taken first, has law q.
        Law("hub", _hub_sample, _hub_enumerate, max_draws=2),
        # Gumbel-top-k with the noise of the token it anticipates: ``key`` must be the key with which that position's
        # token will be chosen by Gumbel-max, and both sides take ``gumbel_noise`` of it. The draws alone are draws
        # without replacement, which is what ``enumerate`` sums; but they are not independent of the emission, so a
        # rule whose law depends on them is biased, and only naive sampling is exact.
        Law(
            "shared_gumbel",
            functools.partial(_gumbel_top_k, "shared_gumbel"),
            _without_replacement_enumerate,
            shares_emission=True,
        ),
    )
}
