"""Acceptance of the rules that no trace fixes: estimates of tokens per step, and calibration by depth and rank."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from specjax.laws import LAWS, gumbel_noise
from specjax.replay.ranks import RankTrace
from specjax.replay.record import Window, record
from specjax.replay.walk import Tree, pack, transitions
from specjax.request import DRAFT_MODES
from specjax.sampling import Warp, fold_in
from specjax.types import Draws, Model, NodeRule
from specjax.verify import VERIFIERS, check_laws
from specjax.verify.measure import for_laws
from specjax.verify.rules import RULES


class RateTrace(NamedTuple):
    """A text of the target, and how probably each of its tokens was drafted and accepted behind the text before it.

    Every exact rule's text has the target's law, so a text of naive sampling stands for all of them.
    """

    tokens: np.ndarray  # [P, T] int32 emitted tokens, right-padded; the first is prefill's and means nothing
    lengths: np.ndarray  # [P] int32
    accepted: np.ndarray  # [P, T, K, K] P(the r-th of k draws, and accepted | this token is emitted) at [k - 1, r]
    mass: np.ndarray  # [P, T, K] P(the r-th of K draws is accepted), whatever is emitted

    @property
    def drafted(self) -> np.ndarray:
        """[P, T] bool, the tokens that rounds emitted: all but each text's first."""
        at = np.arange(self.tokens.shape[1])
        return (at > 0) & (at < self.lengths[:, None])


class Estimate(NamedTuple):
    """Estimates, not replays: expectations over the drafts, from the text of some prompts."""

    tokens_per_step: np.ndarray  # [I]
    standard_error: np.ndarray  # [I] over prompts; nan for a single one


def rate_trace(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    *,
    verifier: str,
    draft_mode: str,
    most_draws: int,
    warp: Warp | Sequence[Warp],
    draft_warp: Warp | Sequence[Warp] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    eos_ids: Sequence[int] | None = None,
    seeds: int | None | Sequence[int | None] = None,
    samples: int = 2,
    batch_size: int = 4,
) -> RateTrace:
    """Sample a text, and sum a node rule's law of the emitted token over draws at each of its tokens.

    Nothing is accepted or refused by chance: what is averaged is the rule's own law (its closed form) given draws, and
    a draw of the emitted token stands with its probability. Only the other draws are sampled.

    Args:
      target, prompts, warp, draft_warp, max_new_tokens, eos_ids, seeds: as in ``generate``.
      draft: one model.
      verifier: the name of a node rule, a key of ``specjax.verify.RULES``.
      draft_mode: "top_k", "iid" or "without_replacement".
      most_draws: K, the most draws at a node of the trees to be estimated.
      samples: sets of draws per token and number of draws.
      batch_size: prompts decoded together.

    Raises:
      ValueError: for a rule that would be biased or is none, draws that cannot be summed, and as ``generate``.
    """
    if verifier not in RULES:
        raise ValueError(f"unknown node rule {verifier!r}; estimates are for {', '.join(sorted(RULES))}")
    if DRAFT_MODES.get(draft_mode) not in CONTAINING:
        known = ", ".join(mode for mode, law in DRAFT_MODES.items() if law in CONTAINING)
        raise ValueError(f"draft_mode {draft_mode!r} cannot be estimated; expected one of {known}")
    law = DRAFT_MODES[draft_mode]
    check_laws(VERIFIERS[verifier], (law,))
    for name, value in (("most_draws", most_draws), ("samples", samples)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is an integer >= 1; got {value!r}")
    found = record(
        target,
        [draft],
        prompts,
        _score(verifier, law, most_draws, samples),
        draft_mode=draft_mode,
        seeds=seeds,
        batch_size=batch_size,
        warp=warp,
        draft_warp=draft_warp,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
    )
    return RateTrace(found.tokens, found.lengths, found.facts["accepted"], found.facts["mass"])


# Sets of k draws that contain a token: one for each place at which it can first occur, with its probability.


class Containing(NamedTuple):
    """Draws with a token put first at place 0, 1, .., k - 1; each is weighted by the probability of that."""

    tokens: jax.Array  # [k, k] int32
    weights: jax.Array  # [k]


def _in_top_k(key: jax.Array, q: jax.Array, token: jax.Array, k: int) -> Containing:
    del key
    mass, top = lax.top_k(q, k)
    return Containing(jnp.broadcast_to(top, (k, k)), (top == token) & (mass > 0))


def _in_iid(key: jax.Array, q: jax.Array, token: jax.Array, k: int) -> Containing:
    others, _ = LAWS["iid"].sample(key, q, k)
    earlier = jnp.tril(jnp.ones((k, k), bool), -1)
    absent = jnp.all(~earlier | (others != token), axis=1)
    return Containing(jnp.where(jnp.eye(k, dtype=bool), token, others), absent * q[token])


def _in_gumbel_top_k(key: jax.Array, q: jax.Array, token: jax.Array, k: int) -> Containing:
    scores = jnp.where(q > 0, jnp.log(q) + gumbel_noise(key, q.shape[0], q.dtype), -jnp.inf).at[token].set(-jnp.inf)
    best, others = lax.top_k(scores, k)
    # The token's own score is below s with probability exp(-q exp(-s)), independently of the others'.
    below = jnp.concatenate([jnp.ones(1), jnp.exp(-q[token] * jnp.exp(-best))])
    place, slot = jnp.arange(k)[:, None], jnp.arange(k)
    tokens = jnp.where(slot == place, token, others[jnp.where(slot < place, slot, slot - 1)])
    return Containing(tokens.astype(jnp.int32), jnp.where(q[token] > 0, below[:-1] - below[1:], 0))


CONTAINING: dict[str, Callable[..., Containing]] = {
    "deterministic": _in_top_k,
    "iid": _in_iid,
    "without_replacement": _in_gumbel_top_k,
}


@functools.cache
def _score(verifier: str, law: str, most: int, samples: int) -> Callable[[Window], dict[str, jax.Array]]:
    rule = for_laws(verifier, (law,))

    def at_token(key: jax.Array, p: jax.Array, q: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """accepted [K, K] and mass [K] from one set of draws of each size."""
        accepted = []
        for k in range(1, most + 1):
            tokens, weights = CONTAINING[law](jax.random.fold_in(key, k), q, token, k)
            emitted = jax.vmap(lambda drawn: _law(rule, p, q, drawn)[token])(tokens)
            share = jnp.where(p[token] > 0, weights * emitted / jnp.where(p[token] > 0, p[token], 1), 0)
            accepted.append(jnp.pad(share, (0, most - k)))
        drawn, valid = LAWS[law].sample(jax.random.fold_in(key, 0), q, most)
        repeated = jnp.any(jnp.tril(drawn[:, None] == drawn, -1), axis=1)
        return jnp.stack(accepted), jnp.where(valid & ~repeated, _law(rule, p, q, drawn)[drawn], 0)

    def score(window: Window) -> dict[str, jax.Array]:
        target, draft = window.logits
        p, q = window.warp(target), window.draft_warp(draft)
        # Its own stream: draws of a round are keyed by where it begins, which is not known here.
        stream = fold_in(window.emit, jnp.full(len(window.emit), 2**31 - 1))

        def average(key: jax.Array, position: jax.Array, *at: jax.Array) -> Any:
            keys = jax.random.split(jax.random.fold_in(key, position), samples)
            return jax.tree.map(lambda found: jnp.mean(found, 0), jax.vmap(lambda key: at_token(key, *at))(keys))

        # A prompt at a time: sets of draws times vocabulary is the largest array there is.
        row = lambda args: jax.vmap(functools.partial(average, args[0]))(*args[1:])
        accepted, mass = lax.map(row, (stream, window.positions, p, q, window.tokens))
        return {"accepted": accepted, "mass": mass}

    return score


def _law(rule: NodeRule, p: jax.Array, q: jax.Array, drawn: jax.Array) -> jax.Array:
    source = jnp.zeros(len(drawn), jnp.int32)
    return rule(p, q[None], Draws(drawn, source, q[drawn] > 0))


def estimate_tokens_per_step(trace: RateTrace, trees: Iterable[Tree]) -> Estimate:
    """Estimated tokens per verify step of each tree with the trace's rule and draws.

    Given the text, the draws at different nodes are independent, so where rounds begin is a Markov chain along it; its
    expected number of rounds is summed, not sampled.

    Args:
      trace: from ``rate_trace``.
      trees: expansion schedules, lists of paths, or Topologies, of at most the trace's K draws at a node.

    Raises:
      ValueError: for what is no tree, or one with more draws.
    """
    tables, most = pack([transitions(tree) for tree in trees]), trace.mass.shape[-1]
    draws = np.max(np.where(tables < tables.shape[1] - 1, np.arange(1, tables.shape[2] + 1), 0), axis=2)
    if draws.max(initial=0) > most:
        raise ValueError(f"a tree has {draws.max()} draws at a node; the trace was made with most_draws={most}")
    tables = np.pad(tables, ((0, 0), (0, 0), (0, most)), constant_values=tables.shape[1] - 1)[:, :, :most]
    counts = np.maximum(trace.lengths - 1, 0)
    steps = np.asarray(_expected_steps(tables, draws, trace.accepted.swapaxes(0, 1)[1:], counts), float)  # [I, P]
    total, prompts = steps.sum(1), len(counts)
    ratio = counts.sum() / np.where(total > 0, total, np.nan)
    # Of a ratio of totals over prompts, each one draw of a pair.
    residual = counts - ratio[:, None] * steps
    spread = np.sqrt(prompts / (prompts - 1) * np.sum(residual**2, 1)) if prompts > 1 else np.full(len(total), np.nan)
    return Estimate(ratio, spread / np.where(total > 0, total, np.nan))


@jax.jit
def _expected_steps(tables: jax.Array, draws: jax.Array, accepted: jax.Array, counts: jax.Array) -> jax.Array:
    """[I, P] expected rounds: accepted [T - 1, P, K, K] along texts of counts [P] tokens."""
    end = tables.shape[1] - 1

    def one(table: jax.Array, draws: jax.Array) -> jax.Array:
        def read(carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, jax.Array]):
            (at_state, steps), (at, accepted) = carry, token  # [P, N], [P]
            reached = at_state[:, :, None] * accepted[:, jnp.maximum(draws - 1, 0)]  # [P, N, K]
            reached = jnp.where(table < end, reached, 0)
            after = jnp.zeros_like(at_state).at[:, table].add(reached)
            ends = jnp.sum(at_state, 1) - jnp.sum(reached, (1, 2))
            steps += jnp.where(at < counts - 1, ends, at == counts - 1)
            return (after.at[:, 0].add(ends), steps), None

        prompts = accepted.shape[1]
        start = jnp.zeros((prompts, end + 1)).at[:, 0].set(1.0), jnp.zeros(prompts)
        return lax.scan(read, start, (jnp.arange(len(accepted)), accepted))[0][1]

    return lax.map(lambda args: one(*args), (tables, draws))


# Calibration


class Acceptance(NamedTuple):
    """How often the draw of each rank is accepted, by depth: Sequoia's acceptance vector, a row for each depth."""

    rates: np.ndarray  # [D, K] given that the d tokens before were accepted out of K draws each
    low: np.ndarray  # [D, K] ends of 95% intervals
    high: np.ndarray  # [D, K]
    tried: np.ndarray  # [D] how many tokens of the texts each row rests on


def calibrate(trace: RankTrace | RateTrace, *, depth: int, most_draws: int) -> Acceptance:
    """Acceptance by depth and rank, along the texts of a trace.

    A token counts at depth d + 1 with the probability that the d before it were all accepted. Intervals are Wilson's,
    with as many trials as give the spread between prompts, since tokens of one prompt are alike.

    Args:
      trace: of one draft; for an ensemble, choose one by ``trace.select``.
      depth: D.
      most_draws: K.

    Raises:
      ValueError: for a trace of several drafts, or made with fewer draws.
    """
    if depth < 1 or most_draws < 1:
        raise ValueError(f"expected depth and most_draws >= 1; got {depth} and {most_draws}")
    if isinstance(trace, RankTrace):
        if len(trace.ranks) > 1:
            raise ValueError(f"a calibration is of one draft; the trace has {len(trace.ranks)}: use trace.select([0])")
        placed = (trace.ranks[0][..., None] == np.arange(most_draws)).astype(float)  # [P, T, K]
        mass = placed
    else:
        if most_draws != trace.mass.shape[-1]:
            raise ValueError(f"the trace was made with most_draws={trace.mass.shape[-1]}; got {most_draws}")
        placed, mass = trace.accepted[:, :, -1], trace.mass
    goes_on = placed.sum(-1)
    weight = trace.drafted.astype(float)
    rows = []
    for _ in range(depth):
        hits, tries = (weight[..., None] * mass).sum(1), weight.sum(1)  # [P, K], [P]
        rows.append((*_interval(hits, tries), tries.sum()))
        # The next depth is a token later, where the text goes on.
        reached = np.clip(weight * goes_on, 0, None)
        weight = np.pad(reached, ((0, 0), (1, 0)))[:, :-1] * trace.drafted
    return Acceptance(*map(np.array, zip(*rows)))


def _interval(hits: np.ndarray, tries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rates [K] and 95% intervals of totals over prompts: hits [P, K] of tries [P]."""
    total, prompts = tries.sum(), len(tries)
    if not total:
        return np.zeros(hits.shape[1]), np.zeros(hits.shape[1]), np.ones(hits.shape[1])
    rates = hits.sum(0) / total
    plain = rates * (1 - rates) / total
    between = np.sum((hits - rates * tries[:, None]) ** 2, 0) * prompts / max(prompts - 1, 1) / total**2
    worse = np.maximum(1, np.divide(between, plain, out=np.ones_like(plain), where=plain > 0))
    # What is known of the spread rests on as many prompts, hence Student's quantile; of one prompt nothing is known.
    trials, z = total / worse, float(special.stdtrit(prompts - 1, 0.975)) if prompts > 1 else 1.96
    middle = (rates + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(np.maximum(rates * (1 - rates), 0) / trials + z**2 / (4 * trials**2))
    # Rounding must not push an end past the rate itself, where that is 0 or 1.
    return rates, np.minimum(np.maximum(middle - half, 0), rates), np.maximum(np.minimum(middle + half, 1), rates)
