"""Drafting with a small language model (SSM): expand a topology level by level, drawing from the proposal law."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import prefill
from specjax.laws import LAWS, Law
from specjax.mask import ancestor_mask
from specjax.sampling import Warp, fold_in
from specjax.tree import TokenTree, Topology
from specjax.types import Drafter, Emission, Forward, Model, PyTree, RoundKeys, TreeMask


class SsmParams(NamedTuple):
    """Data of an SSM drafter."""

    model: PyTree
    topology: Topology | None  # None where the tree's shape is decided while it is drafted


class SsmState(NamedTuple):
    """What an SSM knows of its sequences.

    Only emitted tokens are committed to its cache: each round first feeds those it has not seen, the root last. So it
    does not matter which of them it had drafted itself, nor that the deepest level is never fed.
    """

    cache: PyTree
    pending: jax.Array  # [B, D + 1] int32 tokens emitted last round
    counts: jax.Array  # [B] int32
    before: jax.Array | None = None  # [B, D + 1, H] the hidden states that chose them, for a model that reads those


def ssm(model: Model, topology: Topology, law: str) -> Drafter:
    """A drafter that expands ``topology`` with draws from ``model`` (SpecInfer, section 3.1, one SSM).

    Args:
      model: the SSM, or heads on the target's hidden states (``specjax.load_heads``).
      topology: which draws become nodes; at least one level deep.
      law: name of the proposal law, a key of ``specjax.laws.LAWS``.

    Raises:
      ValueError: for an unknown law, a lone root, more distinct draws at a node than the vocabulary has tokens, or a
        tree deeper than the model can draft.
    """
    if law not in LAWS:
        raise ValueError(f"unknown proposal law {law!r}; expected one of {sorted(LAWS)}")
    most = LAWS[law].max_draws
    if most is not None and topology.shape.num_draws > most:
        raise ValueError(f"{law} makes at most {most} draws at a node; the tree has {topology.shape.num_draws}")
    if topology.shape.depth == 0:
        raise ValueError("an SSM needs a tree of at least one level; incremental decoding takes no drafts")
    if not LAWS[law].repeats and topology.shape.num_draws > model.vocab_size:
        raise ValueError(
            f"the tree has {topology.shape.num_draws} draws at a node, more than the vocabulary's {model.vocab_size} "
            f"tokens, and {law} draws are distinct; narrow the tree"
        )
    expand = bound(_expand, model.forward, model.max_positions, LAWS[law], topology.shape)
    return model_drafter(model, topology, expand, topology.shape.depth, law, topology.shape.num_draws)


def model_drafter(
    model: Model, topology: Topology | None, expand: Callable[..., TokenTree], max_depth: int, law: str, max_draws: int
) -> Drafter:
    """The drafter of a model whose trees are made by ``expand``, be their shape given or decided on the way.

    ``expand(params: SsmParams, keys, cache, logits [B, V], roots [B], warp) -> TokenTree`` drafts behind caches that
    hold everything up to and including the roots, ``logits`` being those after them.

    Raises:
      ValueError: for a tree deeper than the model can draft.
    """
    if model.max_depth is not None and max_depth > model.max_depth:
        raise ValueError(
            f"the tree is {max_depth} levels deep, and the draft model drafts {model.max_depth} tokens ahead at most "
            "(Medusa has a head for each); flatten the tree"
        )
    return Drafter(
        *_functions(model.forward, model.init_cache, expand, max_depth, model.reads_hidden is not None),
        params=SsmParams(model.params, topology),
        max_depth=max_depth,
        laws=(law,),
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        reads_hidden=model.reads_hidden,
        max_draws=max_draws,
    )


# Compiled code is reused when these functions are the same objects: hence one set per architecture, law and shape.
@functools.cache
def _functions(forward, init_cache, expand: Callable[..., TokenTree], max_depth: int, reads_hidden: bool):
    def init(params: SsmParams, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> SsmState:
        batch = len(lengths)
        known = hidden if reads_hidden else None
        before = None if known is None else jnp.pad(known, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        *_, cache = prefill.run_prefill(forward, init_cache, params.model, tokens, lengths, before=before)
        return SsmState(cache, jnp.zeros((batch, max_depth + 1), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def propose(
        params: SsmParams, keys: RoundKeys, state: SsmState, roots: jax.Array, warp: Warp
    ) -> tuple[TokenTree, SsmState]:
        cache, pending, counts, before = state
        logits, cache = prefill.extend(forward, params.model, cache, pending, counts, before=before)
        return expand(params, keys, cache, logits, roots, warp), state._replace(cache=cache)

    def commit(params: SsmParams, state: SsmState, emission: Emission, hidden: jax.Array | None) -> SsmState:
        del params
        known = hidden if reads_hidden else None
        # The path means nothing behind the accepted tokens, but what it picks there is not committed either.
        picked = emission.path[..., None]
        before = None if known is None else jnp.take_along_axis(known, picked, axis=1, mode="clip")
        return SsmState(state.cache, emission.tokens, emission.counts, before)

    return init, propose, commit


def draw_level(
    law: Law,
    keys: RoundKeys,
    warp: Warp,
    logits: jax.Array,
    depth: int,
    marks: jax.Array,
    arity: int,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the nodes of one depth draw: q [B, W, V], tokens [B, W, arity] and which of them are valid.

    Args:
      law: how they draw.
      keys, warp: of the batch.
      logits: [B, W, V] after each node.
      depth: of the nodes.
      marks: [W] int32, by which the noise of the tree's nodes is told apart.
      arity: room for draws.
      counts: [W] int32 draws that each node takes.
    """
    fields = (warp.temperature, warp.top_k, warp.top_p)
    q = Warp(*(jnp.asarray(field)[:, None] for field in fields))(logits)
    if law.shares_emission:
        node_keys = jnp.broadcast_to(fold_in(keys.emit, keys.positions + depth)[:, None], logits.shape[:2])
    else:
        node_keys = jax.vmap(lambda key: jax.vmap(lambda mark: jax.random.fold_in(key, mark))(marks))(keys.draft)
    sample = jax.vmap(lambda key, q, count: law.sample(key, q, arity, count))
    return q, *jax.vmap(sample, in_axes=(0, 0, None))(node_keys, q, counts)


def feed_level(
    forward: Forward, params: PyTree, max_positions: int, cache: PyTree, tokens: jax.Array, seen: jax.Array, depth: int
) -> tuple[jax.Array, PyTree]:
    """Feed the nodes [B, W] of one depth, each seeing the committed prefix and its rows of the tree buffer [B, W, M].

    Returns:
      The logits [B, W, V] after them, and the cache with their rows behind those of the depths above.
    """
    positions = jnp.minimum(cache.lengths + depth - 1, max_positions - 1)
    positions = jnp.broadcast_to(positions[:, None], tokens.shape)
    out = forward(params, tokens, positions, TreeMask(cache.lengths, seen), cache)
    return out.logits, out.cache


@functools.cache
def bound(expand: Callable[..., TokenTree], *static: Any) -> Callable[..., TokenTree]:
    """``expand`` with its first, static arguments; the same object for the same arguments, as ``_functions`` needs."""
    return functools.partial(expand, *static)


def _expand(forward, max_positions, law, shape, params, keys, cache, root_logits, roots, warp) -> TokenTree:
    """Draft trees [B, ..] of a given topology."""
    topology, batch = params.topology, roots.shape[0]
    ancestors = ancestor_mask(topology.parents)

    def draw(level: int, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One level's draws, with room for the tree's largest arity."""
        slots, arity = topology.levels[level], shape.arities[level]
        counts = jnp.take(topology.num_draws, slots, mode="fill", fill_value=0)
        q, tokens, valid = draw_level(law, keys, warp, logits, level, slots, arity, counts)
        spare = ((0, 0), (0, 0), (0, shape.num_draws - arity))
        return q, jnp.pad(tokens, spare), jnp.pad(valid, spare)

    # Level 0 is the root, whose logits came with the pending tokens. Every later level feeds its own nodes only and
    # sees the levels before it through the tree buffer, whose rows are in feed order.
    qs, draw_tokens, draw_valid = ([part] for part in draw(0, root_logits[:, None]))
    alive = [jnp.ones((batch, 1), bool)]  # expanded nodes that exist, in feed order
    fed = jnp.concatenate([*topology.levels[1:], jnp.zeros((0,), jnp.int32)])
    seen = jnp.take(jnp.take(ancestors, fed, axis=0, mode="clip"), fed, axis=1, mode="clip")
    start = 0
    for level in range(1, shape.depth):
        slots, width = topology.levels[level], shape.widths[level]
        first = sum(shape.widths[: level - 1])  # where the parents' level begins in feed order
        parents = jnp.take(topology.feed_rows, jnp.take(topology.parents, slots, mode="clip"), mode="clip") - first
        ranks = jnp.take(topology.ranks, slots, mode="clip")
        parents = jnp.clip(parents, 0, shape.widths[level - 1] - 1)
        tokens = draw_tokens[-1][:, parents, ranks]
        alive.append(alive[-1][:, parents] & draw_valid[-1][:, parents, ranks] & (slots < shape.num_nodes))
        end = start + width
        sees = jnp.broadcast_to(seen[start:end, :end], (batch, width, end))
        logits, cache = feed_level(forward, params.model, max_positions, cache, tokens, sees, level)
        start = end
        for into, part in zip((qs, draw_tokens, draw_valid), draw(level, logits)):
            into.append(part)

    join = functools.partial(jnp.concatenate, axis=1)
    q, draw_tokens, draw_valid, alive = join(qs), join(draw_tokens), join(draw_valid), join(alive)
    draw_valid &= alive[:, :, None]

    # From feed order to slots.
    source = jnp.take(topology.feed_rows, topology.parents, mode="clip")  # the parent's row; the root's is a dummy
    is_root = jnp.arange(shape.num_nodes) == 0
    drawn = draw_tokens[:, source, topology.ranks]
    exists = draw_valid[:, source, topology.ranks] & topology.valid
    expanded = topology.feed_rows >= 0
    spread = lambda field: jnp.broadcast_to(field, (batch, *field.shape))
    return TokenTree(
        tokens=jnp.where(is_root, roots[:, None], drawn),
        parents=spread(topology.parents),
        depths=spread(topology.depths),
        valid=exists | is_root,
        draw_tokens=draw_tokens[:, topology.feed_rows],
        draw_valid=draw_valid[:, topology.feed_rows] & expanded[:, None],
        draw_source=jnp.zeros((batch, shape.num_draws), jnp.int32),
        q=q,
        q_rows=spread(topology.feed_rows)[:, :, None],
        laws=(law.name,),
        max_depth=shape.depth,
    )
