"""What drafting with several SSMs costs beside drafting with one."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax as sj
from experiments.timing import interleaved, timed
from specjax.draft import ensemble, ssm
from specjax.prefill import CHUNK
from specjax.sampling import Streams, fold_in, stack_warps
from specjax.types import Drafter, Emission, Model, RoundKeys

ROUNDS = 16  # in a loop inside one executable, as decoding runs them


def draft_rounds(drafter: Drafter, prompt: Sequence[int]) -> Callable[[], float]:
    """Seconds of one round's drafting at batch 1: propose a tree (an ensemble merges its own) and commit two tokens."""
    length, width = len(prompt), drafter.max_depth + 1
    tokens = np.zeros((1, -(-(length + 2 * ROUNDS) // CHUNK) * CHUNK), np.int32)
    tokens[0, :length] = prompt
    nothing = jnp.zeros((1, width), jnp.int32)

    @jax.jit
    def start(params):
        # Emissions are as wide as the whole tree is deep, which a member of an ensemble learns from the first.
        state = drafter.init(params, tokens, jnp.array([length]), None)
        return drafter.commit(params, state, Emission(nothing, jnp.zeros(1, jnp.int32), nothing), None)

    state = start(drafter.params)
    streams, warp = Streams.from_seeds(jnp.zeros(1, jnp.uint32)), stack_warps([sj.Warp(1.0)])

    @jax.jit
    def loop(params, state):
        def draft(index, state, emitted):
            lengths = length + 2 * jnp.full(1, index)
            keys = RoundKeys(fold_in(streams.draft, lengths), fold_in(streams.path, lengths), streams.emit, lengths)
            state = drafter.commit(params, state, Emission(emitted, jnp.full(1, 2), jnp.zeros_like(emitted)), None)
            return drafter.propose(params, keys, state, emitted[:, 1], warp)

        def body(index, carry):
            tree, state = draft(index, *carry[:2])
            return state, carry[1].at[:, :2].set(tree.tokens[:, 1:3]), tree  # all of which is wanted, as by a verifier

        first = state, jnp.ones((1, width), jnp.int32)
        tree = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(draft, 0, *first)[0])
        return lax.fori_loop(0, ROUNDS, body, (*first, tree))[2]

    return lambda: timed(lambda: loop(drafter.params, state)) / ROUNDS


def drafting_ratios(
    models: Sequence[Model], schedule: Sequence[int], *, prompt: Sequence[int], repeats: int = 9
) -> dict[str, float]:
    """Drafting time of all models of one architecture over that of the first, measured in turns.

    ``mapped`` is how an ensemble runs them: in one pass over stacked parameters. ``one by one`` is how it runs models
    of different architectures, which these are made to look like.
    """
    topology = sj.Topology.from_schedule(schedule)
    members = [ssm(model, topology, "deterministic") for model in models]
    unalike = [member._replace(propose=functools.partial(member.propose)) for member in members]
    ways = {"one": members[0], "mapped": ensemble(members), "one by one": ensemble(unalike)}
    seconds = interleaved({name: draft_rounds(drafter, prompt) for name, drafter in ways.items()}, repeats)
    return {f"{len(models)} SSMs {name} / 1": seconds[name] / seconds["one"] for name in ("mapped", "one by one")}
