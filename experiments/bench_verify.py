"""What verification costs beside one softmax over all logits of the tree."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from experiments.timing import interleaved, timed
from specjax.laws import LAWS
from specjax.sampling import Streams, stack_warps
from specjax.types import RoundKeys
from specjax.verify import VERIFIERS

NODES = 64
FILTERED = "without_replacement"  # the verifier that is timed with a top-p filter as well
REFUSING, AGREEING = 3.0, 0.0  # standard deviation of the target's logits around the draft's


def scored_tree(topology: sj.Topology, law: str, vocab_size: int, apart: float) -> tuple[sj.TokenTree, jax.Array]:
    """A batch of one tree drafted by a law from random distributions, and logits of a target that lies ``apart``."""
    shape, rng = topology.shape, np.random.default_rng(0)
    draft = jnp.asarray(3 * rng.normal(size=(shape.num_expanded, vocab_size)), jnp.float32)
    q, keys = jax.nn.softmax(draft), jax.random.split(jax.random.key(0), shape.num_expanded)
    sample = functools.partial(LAWS[law].sample, k=shape.num_draws)
    counts = topology.num_draws[np.concatenate(topology.levels)]
    tokens, valid = jax.vmap(lambda key, q, count: sample(key, q, count=count))(keys, q, counts)
    expanded, parents = topology.feed_rows >= 0, topology.feed_rows[topology.parents]
    is_root = jnp.arange(shape.num_nodes) == 0
    exists = jnp.where(is_root, True, valid[parents, topology.ranks] & topology.valid)
    tree = sj.TokenTree(
        tokens=jnp.where(is_root, 0, tokens[parents, topology.ranks]),
        parents=jnp.asarray(topology.parents),
        depths=jnp.asarray(topology.depths),
        valid=exists,
        draw_tokens=tokens[topology.feed_rows],
        draw_valid=valid[topology.feed_rows] & expanded[:, None],
        draw_source=jnp.zeros(shape.num_draws, jnp.int32),
        q=q,
        q_rows=jnp.asarray(topology.feed_rows)[:, None],
        laws=(law,),
        max_depth=shape.depth,
    )
    logits = draft[topology.feed_rows] + apart * jnp.asarray(
        rng.normal(size=(shape.num_nodes, vocab_size)), jnp.float32
    )
    return jax.tree.map(lambda field: field[None], tree), logits[None]


def verify_ratios(*, vocab_size: int = 32_000, repeats: int = 7) -> dict[str, float]:
    """Time of each verifier on a tree of 64 nodes, two draws a node, over that of a softmax of its [64, V] logits.

    The slower of two trees counts: a bushy one with a target that refuses much, and one of depth 31 whose first draws
    are all accepted, so that a walk comes to 32 nodes. Block verification takes chains of 64. ``optimal`` is for small
    vocabularies and has no place here.
    """
    names = [name for name in VERIFIERS if name != "optimal"]
    bushy = sj.Topology.from_schedule((2, 2, 2, 2, 2))
    deep = sj.Topology.from_paths([[*[0] * depth, rank] for depth in range(NODES // 2 - 1) for rank in (0, 1)])
    padded = lambda topology: topology.pad(topology.shape._replace(num_nodes=NODES))
    streams = Streams.from_seeds(jnp.zeros(1, jnp.uint32))
    keys, warp = (
        RoundKeys(streams.draft, streams.path, streams.emit, jnp.zeros(1, jnp.int32)),
        stack_warps([sj.Warp(1.0)]),
    )
    calls: dict[tuple[str, float], Callable[[], float]] = {}
    for tree, apart in ((padded(bushy), REFUSING), (padded(deep), AGREEING)):
        drafted = functools.cache(functools.partial(scored_tree, tree, vocab_size=vocab_size, apart=apart))
        chain = functools.partial(scored_tree, sj.Topology.chain(NODES - 1), vocab_size=vocab_size, apart=apart)
        for name in names:
            exact_for = VERIFIERS[name].exact_for
            law = "iid" if not exact_for or "iid" in exact_for else min(exact_for)
            scored = chain(law) if name == "block" else drafted(law)
            calls[name, apart] = functools.partial(
                timed, functools.partial(jax.jit(VERIFIERS[name].verify), keys, *scored, warp)
            )
            if name == FILTERED:
                filtered = stack_warps([sj.Warp(1.0, top_p=0.95)])
                calls[f"{name}, top-p 0.95", apart] = functools.partial(
                    timed, functools.partial(jax.jit(VERIFIERS[name].verify), keys, *scored, filtered)
                )
        logits = drafted("iid")[1][0]
        calls["softmax", apart] = functools.partial(timed, functools.partial(jax.jit(jax.nn.softmax), logits))
    seconds = interleaved(calls, repeats)
    softmax = min(seconds.pop(("softmax", apart)) for apart in (REFUSING, AGREEING))
    slower = {name: max(seconds[name, REFUSING], seconds[name, AGREEING]) for name, _ in seconds}
    return {f"{name} / softmax": value / softmax for name, value in slower.items()}
