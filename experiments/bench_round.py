"""The bare parts of a round, each in a loop inside one executable, as rounds are."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench_draft import draft_rounds
from experiments.recorded import Recording
from experiments.search import Candidate
from experiments.timing import timed
from specjax.cache import KVCache
from specjax.request import Plan
from specjax.types import Drafter, Model, PyTree, TreeMask

PASSES = 16
COLUMNS = 4096
READS = 2
BYTES = 2**31  # that ``bandwidth`` reads: four times the 480 MB of last-level cache that some processors have

type Call = Callable[[], float]


def bandwidth() -> Call:
    """Seconds of reading a float32 matrix of ``BYTES`` once, from memory: no cache holds much of it.

    NumPy's library multiplies it with a vector, with all cores and no slower than a program that only reads; twice in a
    row, since the first wakes the cores.
    """
    matrix = np.ones((BYTES // 4 // COLUMNS, COLUMNS), np.float32)
    vector = np.ones(COLUMNS, np.float32)
    return lambda: timed(lambda: [matrix @ vector for _ in range(READS)]) / READS


class Pass(NamedTuple):
    """One forward and nothing else, in steps that each wait for the one before."""

    step: Callable[[PyTree, KVCache, jax.Array], jax.Array]  # params, cache, token [] -> the same token
    params: PyTree
    cache: KVCache

    @classmethod
    def of(
        cls, model: Model, *, rows: int, tree_rows: int, prefix: int, capacity: int, last_only: bool = False
    ) -> "Pass":
        """A forward of ``rows`` rows, the last of ``tree_rows`` uncommitted ones, for their logits or the last's."""
        lengths = jnp.full((1,), prefix, jnp.int32)
        tree_mask = jnp.ones((1, rows, tree_rows), bool)
        cache = model.init_cache(1, capacity)
        earlier = lambda buffers: tuple(buffer[:, :, : tree_rows - rows] for buffer in buffers)
        cache = dataclasses.replace(cache, k_tree=earlier(cache.k), v_tree=earlier(cache.v), lengths=lengths)
        wanted = jnp.full((1, 1), rows - 1, jnp.int32) if last_only else None

        def step(params: PyTree, cache: KVCache, token: jax.Array) -> jax.Array:
            # Nothing but the cache is known beforehand: no pass is cheaper than a first.
            tokens, prefixes = jnp.full((1, rows), token), lengths + token - 1
            mask = TreeMask(prefixes, tree_mask)
            positions = jnp.broadcast_to(prefixes[:, None], (1, rows))
            logits = model.forward(params, tokens, positions, mask, cache, rows=wanted).logits
            return token + (logits[0, 0, 0] * 0).astype(jnp.int32)

        return cls(step, model.params, cache)


def in_loop(passes: Iterable[Pass]) -> Call:
    """Seconds of these one after the other, in a loop inside one executable."""
    steps, *arguments = zip(*passes)

    @jax.jit
    def loop(params, caches):
        def body(_, token):
            for step, own, cache in zip(steps, params, caches):
                token = step(own, cache, token)
            return token

        return lax.fori_loop(0, PASSES, body, jnp.int32(1))

    return lambda: timed(lambda: loop(*arguments)) / PASSES


def bare_forwards(target: Model, draft: Model, method: Candidate, *, prefix: int, capacity: int) -> dict[str, Pass]:
    """The forwards that a round of a method of at most one SSM cannot do without, in their order."""
    shape, nodes = method.tree.shape, method.nodes + 1
    forward = functools.partial(Pass.of, prefix=prefix, capacity=capacity)
    passes = {}
    if shape.depth:
        # The draft is fed what the last round emitted (up to depth + 1 tokens), then every level that has children.
        emitted = max(shape.depth, method.copied) + 1
        passes["draft, emitted tokens"] = forward(draft, rows=emitted, tree_rows=emitted, last_only=True)
    fed = 0
    for level, width in enumerate(shape.widths[1:], 1):
        fed += width
        passes[f"draft, level {level}"] = forward(draft, rows=width, tree_rows=fed)
    passes["target"] = forward(target, rows=nodes, tree_rows=nodes)
    return passes


def stages(plan: Plan, drafter: Drafter, nodes: int, recording: Recording) -> dict[str, Call]:
    """Drafting, verification and commit of a round of a tree of so many nodes at batch 1, each on its own."""
    spec, length = plan.spec, recording.keys.positions
    capacity = plan.inputs[0].shape[1]
    empty = spec.init_cache(1, capacity)
    fed = dataclasses.replace(spec.init_cache(1, nodes), lengths=length)
    path = jnp.arange(drafter.max_depth + 1, dtype=jnp.int32)[None]

    @jax.jit
    def verify(keys, tree, logits, warp):
        def body(_, emitted):
            # More tokens than none were emitted, but the compiler does not know: no pass is that of before.
            again = dataclasses.replace(tree, valid=tree.valid & (emitted >= 0)[:, None])
            acceptance = spec.verify(keys._replace(positions=keys.positions + emitted), again, logits, warp)
            return acceptance.num_accepted

        return lax.fori_loop(0, PASSES, body, jnp.zeros_like(length))

    @jax.jit
    def commit(cache, fed):
        def body(_, cache):
            return dataclasses.replace(cache, k_tree=fed.k, v_tree=fed.v, lengths=fed.lengths).commit(path, counts)

        counts = jnp.full_like(length, 2)
        return lax.fori_loop(0, PASSES, body, cache)

    prompt = plan.inputs[0][0, : int(plan.inputs[1][0])].tolist()
    return {
        "drafting": draft_rounds(drafter, prompt),
        "verification": lambda: timed(lambda: verify(*recording[:4])) / PASSES,
        "commit": lambda: timed(lambda: commit(empty, fed)) / PASSES,
    }
