"""Trees whose shape is decided while they are drafted, on the device: by the SSM's confidence, or by what was drawn."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.draft.ssm import bound, draw_level, feed_level, model_drafter
from specjax.laws import LAWS, Law, grown
from specjax.tree import MAX_NODES, TokenTree
from specjax.types import Drafter, Model

GROWING = ("without_replacement", "iid", "shared_gumbel")  # laws whose draws can be made one after the other


class Size(NamedTuple):
    """The static bounds of a dynamic tree."""

    width: int  # nodes expanded at each depth, and draws at each of them
    depth: int
    nodes: int  # below the root


def expand_and_rerank(width: int, depth: int, nodes: int) -> Callable[[Model, str], Drafter]:
    """A builder of trees by the SSM's confidence: pass it to ``generate`` as ``tree``.

    EAGLE-2 (Li et al. 2024, "EAGLE-2: faster inference of language models with dynamic draft trees", section 4). At
    each depth the ``width`` nodes whose paths the SSM gives the highest probability are expanded, by its ``width``
    likeliest tokens each; then all tokens seen are ranked by their paths' probabilities and the best ``nodes`` are
    kept. They form a tree, since no path is likelier than its beginning. The shape differs from row to row and from
    round to round, and is decided on the device: one executable serves all.

    Draws are deterministic (``draft_mode="top_k"``), so naive sampling is exact. Cost: ``depth`` passes of the SSM, of
    one row and then of ``width`` rows each, and ``nodes`` + 1 rows of the target.

    Raises:
      ValueError: for a number below 1, or more nodes than the expansion can see; from the builder, for another draft
        mode or a width beyond the vocabulary.
    """
    return _builder("expand_and_rerank", Size(width, depth, nodes), ("deterministic",), "top_k")


def grow(width: int, depth: int, nodes: int) -> Callable[[Model, str], Drafter]:
    """A builder of sampled trees that grow where verification is likeliest to come: ``generate`` takes it as ``tree``.

    DySpec (Xiong et al. 2024, "DySpec: faster speculative decoding with dynamic token tree structure") takes the draft
    probability of a token for the chance that it is accepted, and makes draws one at a time, that one first which
    verification is likeliest to reach: the chance of a node's next draw is the probability of the node's path times the
    mass of q that the node has not drawn yet. Done so, it takes a pass of the SSM for every node. But no draw makes
    another likelier than itself, so draws are made in the order of their chances, and which come first can be told
    after more were made than are wanted. Here each of ``depth`` passes expands the ``width`` likeliest nodes of its
    depth by ``width`` draws each, and draws are kept from the highest chance down until they make ``nodes`` nodes. That
    is the tree that DySpec grows with at most ``width`` expansions a depth and as many draws a node.

    The law holds: all that a draw's token decides (the chances of its younger siblings and of what is below it, and
    which less likely nodes are expanded beside those) comes after it in that order; ties go to the lesser depth, then
    to the older draw. So whether a draw is kept depends on draws before it, and never on its own token. That is enough
    for verifiers that take draws one by one (``naive_tree``, ``without_replacement``, ``traversal``, and where draws
    are i.i.d. ``multi_step``) and not for others; see ``specjax.laws.grown``.

    Draws are without replacement, i.i.d. (of which repeats are draws, but no nodes), or of shared noise, by
    ``draft_mode``. Cost as ``expand_and_rerank``.

    Raises:
      ValueError: for a number below 1, or more nodes than the expansion can see; from the builder, for another draft
        mode or a width beyond the vocabulary.
    """
    return _builder("grow", Size(width, depth, nodes), GROWING, GROWING[0])


def _builder(name: str, size: Size, laws: tuple[str, ...], mode: str) -> Callable[[Model, str], Drafter]:
    for field, value in size._asdict().items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {field} is {value!r}; expected an integer >= 1")
    most = size.width + (size.depth - 1) * size.width**2
    if size.nodes > most:
        raise ValueError(
            f"{name}: {size.nodes} nodes are more than the {most} that a width of {size.width} and a depth of "
            f"{size.depth} can give; widen the expansion or take fewer nodes"
        )
    if size.nodes >= MAX_NODES:
        raise ValueError(f"{name}: {size.nodes} nodes and the root; trees have at most {MAX_NODES}")

    def build(model: Model, law: str) -> Drafter:
        if law not in laws:
            raise ValueError(f"{name} does not take {law} draws; expected draft_mode {mode!r}, for {', '.join(laws)}")
        if size.width > model.vocab_size:
            raise ValueError(
                f"{name}: a width of {size.width} is more than the vocabulary's {model.vocab_size} tokens; narrow it"
            )
        sampled = law != "deterministic"
        expand = bound(_expand, model.forward, model.max_positions, LAWS[law], size)
        return model_drafter(model, None, expand, size.depth, grown(law) if sampled else law, size.width)

    return build


class _Level(NamedTuple):
    """The draws of the nodes that are expanded at one depth."""

    q: jax.Array  # [B, W, V]
    tokens: jax.Array  # [B, W, K]
    valid: jax.Array  # [B, W, K]
    new: jax.Array  # [B, W, K] not a repeat, so a node if it is kept
    chance: jax.Array  # [B, W, K] by which draws are kept; no draw raises that of another
    confidence: jax.Array  # [B, W, K] the SSM's probability of the path to the token


def _expand(forward, max_positions, law, size, params, keys, cache, root_logits, roots, warp) -> TokenTree:
    """Draft trees [B, ..]. Expanded nodes are rows in feed order; a draw's index is row * width + its place there."""
    width, batch = size.width, roots.shape[0]
    flat = lambda field: field.reshape(batch, -1)
    join = functools.partial(jnp.concatenate, axis=1)
    row = jnp.arange(batch)[:, None]

    # Of the nodes of a depth: the probability of their paths, whether they are there (a draft distribution of few
    # tokens gives fewer than ``width``), the rows of the tree buffer they see, and the draws they come from.
    paths, alive, seen = jnp.ones((batch, 1)), jnp.ones((batch, 1), bool), jnp.zeros((batch, 1, 0), bool)
    logits, start = root_logits[:, None], 0
    levels, all_alive, origins = [], [alive], [jnp.full((batch, 1), -1)]
    for depth in range(size.depth):
        count = logits.shape[1]
        marks, takes = start + jnp.arange(count), jnp.full(count, width)
        q, tokens, valid = draw_level(law, keys, warp, logits, depth, marks, width, takes)
        level = _level(q, tokens, valid & alive[:, :, None], paths, sampled=law.name != "deterministic")
        levels.append(level)
        if depth + 1 == size.depth:
            break
        paths, chosen = jax.lax.top_k(flat(jnp.where(level.new, level.confidence, -1)), width)
        alive, paths = paths >= 0, jnp.maximum(paths, 0)
        itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        seen = jnp.concatenate([seen[row, chosen // width], itself], axis=2)
        logits, cache = feed_level(
            forward, params.model, max_positions, cache, flat(tokens)[row, chosen], seen, depth + 1
        )
        all_alive.append(alive)
        origins.append(start * width + chosen)
        start += count

    q, tokens, valid, new, chance, _ = map(join, zip(*levels))
    return _keep(q, tokens, valid, new, chance, join(all_alive), join(origins), roots, law, size)


def _level(q: jax.Array, tokens: jax.Array, valid: jax.Array, paths: jax.Array, *, sampled: bool) -> _Level:
    mass = jnp.take_along_axis(q, tokens, axis=2)
    older = jnp.tril(jnp.ones((tokens.shape[2],) * 2, bool), -1)
    repeats = jnp.any(older & (tokens[..., :, None] == tokens[..., None, :]) & valid[:, :, None], axis=-1)
    new = valid & ~repeats
    # What each draw finds undrawn. Rounding may neither raise it from draw to draw, nor put a token's mass above it.
    before = jnp.pad(jnp.where(new, mass, 0)[..., :-1], ((0, 0), (0, 0), (1, 0)))
    left = jax.lax.cummin(jnp.maximum(1 - jnp.cumsum(before, axis=2), 0), axis=2)
    confidence = paths[:, :, None] * jnp.minimum(mass, left)
    return _Level(q, tokens, valid, new, paths[:, :, None] * left if sampled else confidence, confidence)


def _keep(q, tokens, valid, new, chance, alive, origins, roots, law: Law, size: Size) -> TokenTree:
    """Keep draws in the order of their chances, ties by index, until they make ``size.nodes`` nodes.

    A node's parent comes before it in that order: so the draws kept are a tree, and slots in that order are valid ones.
    """
    batch, rows, width = tokens.shape
    row = jnp.arange(batch)[:, None]
    flat = lambda field: field.reshape(batch, -1)
    order = jnp.argsort(-flat(jnp.where(valid, chance, -1)), axis=1, stable=True)
    is_node = flat(new)[row, order]
    before = jnp.cumsum(is_node, axis=1) - is_node
    is_kept = flat(valid)[row, order] & (before < size.nodes)
    nowhere = size.nodes + 1
    unsort = lambda values: jnp.zeros_like(values).at[row, order].set(values)
    slots = unsort(jnp.where(is_kept & is_node, before + 1, nowhere))
    kept = unsort(is_kept).reshape(tokens.shape)
    row_slots = jnp.where(origins < 0, 0, slots[row, origins])  # the node that each row is
    row_slots = jnp.where(alive, row_slots, nowhere)

    def put(fill: int, values: jax.Array, where: jax.Array) -> jax.Array:
        shape = (batch, size.nodes + 1, *values.shape[2:])
        return jnp.full(shape, fill, values.dtype).at[row, where].set(values, mode="drop")

    level_of_row = jnp.asarray([0, *(depth for depth in range(1, size.depth) for _ in range(width))])
    depths = jnp.broadcast_to(jnp.repeat(level_of_row + 1, width), slots.shape)
    drew = jnp.where(jnp.any(kept, axis=2), jnp.arange(rows), -1)
    return TokenTree(
        tokens=put(0, flat(tokens), slots).at[:, 0].set(roots),
        parents=put(-1, jnp.repeat(row_slots, width, axis=1), slots),
        depths=put(0, depths, slots),
        valid=put(False, jnp.ones_like(slots, bool), slots).at[:, 0].set(True),
        draw_tokens=put(0, tokens, row_slots),
        draw_valid=put(False, kept, row_slots),
        draw_source=jnp.zeros((batch, width), jnp.int32),
        q=q,
        q_rows=put(-1, drew[:, :, None], row_slots),
        laws=(law.name if law.name == "deterministic" else grown(law.name),),
        max_depth=size.depth,
    )
