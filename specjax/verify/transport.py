"""The optimal node rule: a maximum flow from drawn sets to tokens, solved on the host for small vocabularies."""

import functools
import itertools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from specjax.laws import LAWS
from specjax.types import Draws

MOST_OUTCOMES = 200_000
MOST_TOKENS = 62  # sets of tokens are the bits of a signed word


def beyond_optimum(num_draws: int, vocab_size: int) -> str | None:
    """Why the optimum cannot be solved for so many draws at a node; None if it can."""
    if vocab_size > MOST_TOKENS:
        return f"it takes vocabularies of at most {MOST_TOKENS} tokens; this one has {vocab_size}"
    if vocab_size**num_draws > MOST_OUTCOMES:
        return (
            f"it sums every draw, at most {MOST_OUTCOMES} outcomes; {num_draws} draws at a node from {vocab_size} "
            f"tokens have {vocab_size}^{num_draws}"
        )
    return None


def drawn_sets(q: np.ndarray, laws: tuple[str, ...], counts: tuple[int, ...]) -> dict[int, float]:
    """The probability of each set of drawn tokens, as a bit mask, when source s takes counts[s] draws from q[s] [V]."""
    sets = {0: 1.0}
    for row, law, count in zip(q, laws, counts, strict=True):
        if count == 0:
            continue
        tokens, valid, probs = LAWS[law].enumerate(row, count)
        masks = np.bitwise_or.reduce(np.where(valid, 1 << tokens.astype(np.int64), 0), axis=1)
        one: dict[int, float] = {}
        for mask, prob in zip(masks.tolist(), probs.tolist(), strict=True):
            if prob > 0:
                one[mask] = one.get(mask, 0.0) + prob
        both: dict[int, float] = {}
        for (a, x), (b, y) in itertools.product(sets.items(), one.items()):
            both[a | b] = both.get(a | b, 0.0) + x * y
        sets = both
    return sets


def maximum_flow(sets: dict[int, float], p: np.ndarray) -> dict[int, np.ndarray]:
    """How much of each drawn set's mass goes to which of its tokens [V], the sum over all being the largest possible.

    Shortest augmenting paths (Edmonds and Karp 1972), which end after a number of steps that does not depend on the
    capacities, so real-valued ones are solved up to rounding.
    """
    masks = list(sets)
    supply, room = np.array([sets[mask] for mask in masks]), p.astype(np.float64).copy()
    flow = np.zeros((len(masks), len(p)))
    linked = (np.array(masks)[:, None] >> np.arange(len(p))) & 1 == 1
    while True:
        # Nodes: sets are ("set", i), tokens are ("token", y). A token gives back to a set what that set sent it.
        queue = deque(int(i) for i in np.flatnonzero(supply > 0))
        came_to_set: dict[int, int | None] = dict.fromkeys(queue)
        came_to_token: dict[int, int] = {}
        end = None
        while queue and end is None:
            i = queue.popleft()
            for y in np.flatnonzero(linked[i]).tolist():
                if y in came_to_token:
                    continue
                came_to_token[y] = i
                if room[y] > 0:
                    end = y
                    break
                for j in np.flatnonzero(flow[:, y] > 0).tolist():
                    if j not in came_to_set:
                        came_to_set[j] = y
                        queue.append(j)
        if end is None:
            return dict(zip(masks, flow, strict=True))
        path, y = [], end
        while True:
            i = came_to_token[y]
            back = came_to_set[i]
            path.append((i, y, back))
            if back is None:
                break
            y = back
        amount = min(supply[i], room[end], *(flow[i, back] for i, _, back in path if back is not None))
        supply[i] -= amount
        room[end] -= amount
        for i, y, back in path:
            flow[i, y] += amount
            if back is not None:
                flow[i, back] -= amount


@functools.lru_cache(maxsize=4096)
def _plan(p: bytes, q: bytes, laws: tuple[str, ...], counts: tuple[int, ...]) -> dict[int, np.ndarray]:
    """The emitted law for each drawn set that has mass."""
    target, drafts = np.frombuffer(p), np.frombuffer(q).reshape(len(laws), -1)
    sets = drawn_sets(drafts, laws, counts)
    flow = maximum_flow(sets, target)
    left = np.maximum(target - sum(flow.values()), 0)
    left = left / left.sum() if left.sum() > 0 else target
    return {mask: sent / sets[mask] + max(0.0, 1 - sent.sum() / sets[mask]) * left for mask, sent in flow.items()}


def _emitted(
    laws: tuple[str, ...], p: np.ndarray, q: np.ndarray, tokens: np.ndarray, source: np.ndarray, valid: np.ndarray
) -> np.ndarray:
    """Host side: the emitted laws [n, V] in float64 for p [n, V], q [n, S, V] and tokens, source, valid [n, K]."""
    p, q = p.astype(np.float64), q.astype(np.float64)
    p /= p.sum(-1, keepdims=True)
    q /= np.maximum(q.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    rows = np.arange(len(p))[:, None]
    usable = valid & (q[rows, source, tokens] > 0)
    drawn = np.bitwise_or.reduce(np.where(usable, 1 << tokens.astype(np.int64), 0), axis=1)
    counts = (usable[:, :, None] & (source[:, :, None] == np.arange(len(laws)))).sum(1)
    emitted = np.empty_like(p)
    for node, (mask, count) in enumerate(zip(drawn.tolist(), counts.tolist(), strict=True)):
        plan = _plan(p[node].tobytes(), q[node].tobytes(), laws, tuple(count))
        emitted[node] = plan.get(mask, p[node])  # a set that cannot be drawn decides nothing
    return emitted


def optimal(p: jax.Array, q: jax.Array, draws: Draws, *, laws: tuple[str, ...]) -> jax.Array:
    """The rule that emits a drawn token as often as any exact rule can, for a vocabulary of a few tokens.

    The optimal transport with membership cost of SpecTr (Sun et al. 2023), in the form of a maximum flow from drawn
    sets (with their probability) to their tokens y (at most p(y)); what no set filled is the residual. Exact for every
    law that can be enumerated. Cost: a callback to the host and a sum over all draws, V^K of them, once per (p, q) and
    number of draws. Not differentiable: ``specjax.exact.optimal_acceptance`` is.

    Args:
      laws: the law of each source (row of q).

    Raises:
      ValueError: laws and q disagree, a law cannot be enumerated, or there are too many outcomes to sum.
    """
    vocab_size, most = p.shape[0], draws.tokens.shape[0]
    if most == 0:
        return p
    if len(laws) != q.shape[0]:
        raise ValueError(f"expected one law for each of {q.shape[0]} sources; got {laws}")
    if "shared_gumbel" in laws:
        raise ValueError("shared_gumbel draws depend on the emission's noise; verify them with naive_sampling")
    if reason := beyond_optimum(most, vocab_size):
        raise ValueError(f"optimal cannot be solved: {reason}")

    # The callback's thread does not share this thread's x64 setting, and a float64 would be cut to float32 on its way:
    # so it travels as 32-bit words.
    words_of = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)

    def host(*arguments: jax.Array) -> np.ndarray:
        p_words, q_words, tokens, source, valid = (np.ascontiguousarray(argument) for argument in arguments)
        drawn = (field.reshape(-1, most) for field in (tokens, source, valid))
        p, q = p_words.view(dtype).reshape(-1, vocab_size), q_words.view(dtype).reshape(-1, len(laws), vocab_size)
        emitted = _emitted(laws, p, q, *drawn).astype(dtype)
        return emitted.view(np.uint32).reshape(p_words.shape)

    # As words, p and q would have a derivative of zero.
    @jax.custom_jvp
    def solve(p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
        words = words_of(p)
        result = jax.ShapeDtypeStruct(words.shape, words.dtype)
        emitted = jax.pure_callback(host, result, words, words_of(q), *draws, vmap_method="broadcast_all")
        return jax.lax.bitcast_convert_type(emitted, dtype)

    @solve.defjvp
    def refuse(primals: tuple, tangents: tuple) -> tuple:
        raise ValueError(
            "the rule optimal is solved on the host and has no derivative; specjax.exact.optimal_acceptance gives its "
            "acceptance differentiably"
        )

    dtype = p.dtype
    return solve(p, q.astype(dtype), draws)
