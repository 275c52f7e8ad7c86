"""A tree whose size follows the batch and the measured acceptance: several drafters of one source, one a round."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from specjax.sampling import Warp
from specjax.tree import TokenTree, root_tree
from specjax.types import Drafter, Emission, PyTree, RoundKeys

MEMORY = 0.99  # of a round's weight that each later one leaves it
# Accepted tokens that the expectation is worth. Rounds differ more than texts do: with five times less, a bad start
# ended drafting for good where it paid (docs/tuning.md).
PRIOR = 20.0


class AdaptiveParams(NamedTuple):
    """Data of an adaptive drafter of I sizes."""

    members: tuple[PyTree, ...]  # of the sizes that draft
    expected: jax.Array  # [I] tokens per step expected with each size
    most: jax.Array  # [I] the most a step can emit
    batches: jax.Array  # [N] ascending
    seconds: jax.Array  # [N, I] of a round, at those batch sizes


class AdaptiveState(NamedTuple):
    """The members' common state, and what it has not been told yet."""

    member: PyTree
    text: jax.Array  # [B, T] int32
    lengths: jax.Array  # [B] int32
    told: jax.Array  # [B] int32 tokens the member knows; a round without a draft leaves it behind
    size: jax.Array  # [B] int32 of the last round, -1 before the first
    accepted: jax.Array  # [B] accepted tokens, fading
    hoped: jax.Array  # [B] what the expectation of the sizes used was


def adaptive(
    drafters: Sequence[Drafter],
    *,
    expected: npt.ArrayLike,
    seconds: npt.ArrayLike,
    batches: Sequence[int] = (1,),
) -> Drafter:
    """One drafter from several sizes of one source; each round takes the one that promises most tokens per second.

    A batch of B slots takes a round as long as ``seconds`` says for B, finished rows or not, so large trees pay in
    small batches. What a row still running gains is expected[i] - 1 times how its accepted tokens compare with what was
    expected of the sizes it used, so trees shrink where drafts go on failing (the expectation is worth twenty accepted
    tokens); the record fades, so they are tried again. All sizes are compiled at once, and one runs: fewer nodes in one
    static size would cost the same.

    Args:
      drafters: of ascending size, equal but for their topology, such as ``ssm(model, topology, law)``; the first may be
        ``NO_DRAFT``.
      expected: [I] tokens per step of each, such as ``replay.tokens_per_step`` or an estimate gives.
      seconds: [N, I] of a round with each, such as ``replay.RoundCost`` gives; a row for each of ``batches``.
      batches: ascending batch sizes that ``seconds`` was measured at; linear between them.

    Raises:
      ValueError: for drafters that are not sizes of one source, or numbers that do not fit them.
    """
    drafting = [drafter for drafter in drafters if drafter.max_depth]
    if len(drafters) < 2 or not drafting:
        raise ValueError("an adaptive drafter needs at least two sizes, one of which drafts")
    if any(not drafter.max_depth for drafter in list(drafters)[1:]):
        raise ValueError("only the first size may be NO_DRAFT")
    first = drafting[0]
    source = lambda drafter: (drafter.laws, drafter.vocab_size, drafter.max_positions, drafter.choose)
    if any(source(other) != (*source(first)[:3], None) for other in drafting):
        raise ValueError("the sizes must be of one model and proposal law, and none of them adaptive")
    if first.reads_hidden is not None:
        raise ValueError("the sizes are told of several rounds at once, so they cannot read the target's hidden states")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        gains, costs = np.asarray(expected, np.float32), np.atleast_2d(np.asarray(seconds, np.float32))
    if gains.shape != (len(drafters),) or costs.shape != (len(batches), len(drafters)):
        raise ValueError(
            f"expected {len(drafters)} numbers of tokens, and {len(batches)} rows of as many seconds; got shapes "
            f"{gains.shape} and {costs.shape}"
        )
    if not (np.all((gains >= 1) & np.isfinite(gains)) and np.all((costs > 0) & np.isfinite(costs))):
        raise ValueError("tokens per step are at least 1, and seconds above 0; both are finite")
    most = np.array([drafter.max_depth + 1 for drafter in drafters], np.float32)
    if np.any(gains > most):
        raise ValueError(f"a step emits at most a tree's depth and one; expected {gains} tokens with at most {most}")
    if not len(batches) or not batches[0] >= 1 or not np.all(np.diff(batches) > 0):
        raise ValueError(f"batches ascend from at least 1, and there is one or more; got {tuple(batches)}")
    depth = max(drafter.max_depth for drafter in drafters)
    draws = [drafter.max_draws for drafter in drafting if drafter.max_draws is not None]
    functions = tuple((member.init, member.propose, member.commit) for member in drafting)
    init, sizes, commit, choose = _functions(functions, len(drafting) < len(drafters), depth)
    return first._replace(
        init=init,
        propose=sizes[-1],
        commit=commit,
        params=AdaptiveParams(
            tuple(member.params for member in drafting),
            jnp.asarray(gains),
            jnp.asarray(most),
            jnp.asarray(batches, jnp.float32),
            jnp.asarray(costs),
        ),
        max_depth=depth,
        sizes=sizes,
        choose=choose,
        max_draws=max(draws) if len(draws) == len(drafting) else None,
    )


@functools.cache
def _functions(members, may_rest: bool, depth: int):
    width = depth + 1

    def init(params: AdaptiveParams, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> AdaptiveState:
        del hidden
        member = members[0][0](params.members[0], tokens, lengths, None)
        nothing = jnp.zeros(lengths.shape)
        state = AdaptiveState(member, tokens, lengths, lengths, jnp.full_like(lengths, -1), nothing, nothing)
        return state._replace(member=tell(params, state, jnp.zeros_like(lengths)).member)  # of the widest emission

    def tell(params: AdaptiveParams, state: AdaptiveState, counts: jax.Array) -> AdaptiveState:
        """Commit the next counts [B] <= width tokens of the text to the member."""
        at = state.told[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(state.text, jnp.minimum(at, state.text.shape[1] - 1), axis=1)
        emission = Emission(tokens, counts, jnp.zeros_like(tokens))
        return state._replace(
            member=members[0][2](params.members[0], state.member, emission, None), told=state.told + counts
        )

    def drafts(index: int):
        def propose(
            params: AdaptiveParams, keys: RoundKeys, state: AdaptiveState, roots: jax.Array, warp: Warp
        ) -> tuple[TokenTree, AdaptiveState]:
            def behind(state: AdaptiveState) -> jax.Array:
                return state.lengths - state.told - width

            def catch_up(state: AdaptiveState) -> AdaptiveState:
                # What the smallest size drafts on the way is thrown away.
                state = tell(params, state, jnp.clip(behind(state), 0, width))
                _, member = members[0][1](params.members[0], keys, state.member, roots, warp)
                return state._replace(member=member)

            state = lax.while_loop(lambda state: jnp.any(behind(state) > 0), catch_up, state)
            state = tell(params, state, state.lengths - state.told)
            tree, member = members[index][1](params.members[index], keys, state.member, roots, warp)
            size = jnp.full_like(state.size, index + may_rest)
            return tree, state._replace(member=member, size=size)

        return propose

    def rest(
        params: AdaptiveParams, keys: RoundKeys, state: AdaptiveState, roots: jax.Array, warp: Warp
    ) -> tuple[TokenTree, AdaptiveState]:
        del params, keys, warp
        return root_tree(roots), state._replace(size=jnp.zeros_like(state.size))

    def commit(
        params: AdaptiveParams, state: AdaptiveState, emission: Emission, hidden: jax.Array | None
    ) -> AdaptiveState:
        del hidden
        at = jnp.where(
            jnp.arange(emission.tokens.shape[1]) < emission.counts[:, None],
            state.lengths[:, None] + jnp.arange(emission.tokens.shape[1]),
            state.text.shape[1],
        )
        rows = jnp.arange(len(state.lengths))[:, None]
        hoped = jnp.where(state.size >= 0, params.expected[state.size] - 1, 0)
        ran = emission.counts > 0
        return state._replace(
            text=state.text.at[rows, at].set(emission.tokens, mode="drop"),
            lengths=state.lengths + emission.counts,
            accepted=jnp.where(ran, MEMORY * state.accepted + emission.counts - 1, state.accepted),
            hoped=jnp.where(ran, MEMORY * state.hoped + hoped, state.hoped),
        )

    def choose(params: AdaptiveParams, state: AdaptiveState, running: jax.Array) -> jax.Array:
        level = (PRIOR + state.accepted) / (PRIOR + state.hoped)  # [B], 1 as expected
        gain = jnp.minimum(1 + level[:, None] * (params.expected - 1), params.most)  # [B, I]
        batch = jnp.full((), len(running), jnp.float32)
        seconds = jax.vmap(lambda column: jnp.interp(batch, params.batches, column), 1)(params.seconds)
        return jnp.argmax(jnp.sum(jnp.where(running[:, None], gain, 0), axis=0) / seconds)

    return jax.jit(init), (*([rest] if may_rest else []), *map(drafts, range(len(members)))), commit, choose
