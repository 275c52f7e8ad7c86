"""Path rules: the law of where a path through the tree ends and of the token after it, and the sampler they share.

Unlike a node rule they look at a whole path before they decide, which lets a good token below make up for a doubtful
one above. They are written for a batch of trees at once, and ask for the target's distribution a node at a time: all
nodes' distributions together would be [B, N, V].
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.laws import divide, drawn_by, grown
from specjax.sampling import Warp, sample_at
from specjax.tree import TokenTree
from specjax.types import Acceptance, RoundKeys
from specjax.verify.rules import best_of_draws, normalise, rank

Rows = Callable[[jax.Array], jax.Array]  # nodes [B] -> the target's distributions there [B, V]


class PathDecision(NamedTuple):
    """The law of a path verification, given the trees."""

    stop: jax.Array  # [B, N] probability that the path ends at each node; sums to 1
    residual: Rows  # nodes [B] -> law [B, V] of the next token when it ends there


class PathRule(NamedTuple):
    """A path rule and the laws it is exact for."""

    name: str
    rule: Callable[[TokenTree, Rows], PathDecision]
    exact_for: frozenset[str]  # keys of proposal laws (see specjax.laws.law_key)
    lossy: bool = False


def _at(array: jax.Array, *index: jax.Array) -> jax.Array:
    """array[b, index[0][b], ..] for each b."""
    return array[(jnp.arange(array.shape[0]), *index)]


def _put(array: jax.Array, index: jax.Array, value: jax.Array, where: jax.Array) -> jax.Array:
    """Array [B, N, ..] with value [B, ..] at index [B] of the rows [B] where it is asked for."""
    rows = jnp.arange(array.shape[0])
    return array.at[rows, jnp.where(where, index, array.shape[1])].set(value, mode="drop")


def _child(tree: TokenTree, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first child of node [B] with token [B], and whether there is one."""
    matches = tree.valid & (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
    return jnp.argmax(matches, 1).astype(jnp.int32), matches.any(1)


def multi_path_block(tree: TokenTree, target: Rows) -> PathDecision:
    """Choose a path of the tree, work out the law of that choice, and verify it as one block.

    At each node the path follows the draw with the largest p / q, whose law r is known exactly (as in ``khisti``); then
    block verification runs with r in the place of q. Any way of choosing is exact, this one is greedy. After the idea
    of Thomas and Pal 2026, "Greedy multi-path block verification" (the paper's own form was not at hand; this one is
    enumerated). Exact for i.i.d. draws from one source, their number known before they are drawn. It can fall below
    ``block`` on the first path alone. Cost: per depth one warp and O(V).
    """
    batch, depths = tree.tokens.shape[0], jnp.arange(tree.max_depth + 1)
    most = tree.draw_tokens.shape[-1]
    rows = jnp.arange(batch)

    def choose(node: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The chosen draw's token [B], its law [B, V], and whether the node has draws [B]."""
        if most == 0:
            return jnp.zeros(batch, jnp.int32), p, jnp.zeros(batch, bool)
        tokens, valid, source = _at(tree.draw_tokens, node), _at(tree.draw_valid, node), tree.draw_source
        first_source = _at(source, jnp.argmax(valid, 1))
        q = _at(tree.q, _at(tree.q_rows, node, first_source)).astype(p.dtype)
        usable = valid & (jnp.take_along_axis(q, tokens, 1) > 0)
        if most == 1:  # the only draw is the best, and its law is q
            return tokens[:, 0], q, usable[:, 0]
        token, law = jax.vmap(lambda p, q, tokens, usable: best_of_draws(rank(p, q), tokens, usable))(
            p, q, tokens, usable
        )
        return token, law, usable.any(1)

    # Down the chosen path. A draw may have no node (a rank left out of the topology): then the path can end with it,
    # but there is nothing to go on from.
    def down(carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array], _: None):
        node, weight, here, pinned = carry
        p = target(node)
        token, law, has_draws = choose(node, p)
        inner = here & ~pinned & has_draws
        room = jnp.maximum(weight[:, None] * p - law, 0).sum(1)
        # 0 / 0 where the draft is the target so far: then everything is accepted further down. The brackets keep the
        # quotient from rounding to more than 1, and with it what is left from falling below 0.
        accept = jnp.where(inner, divide(room, room + (1 - weight), 1), weight)
        ratio = divide(_at(p, token), _at(law, token), 0)
        child, exists = _child(tree, node, token)
        visited = (node, jnp.where(here, accept, 0), jnp.where(inner, weight, 0), token, pinned & here, inner)
        below = jnp.where(inner & exists, child, node)
        next_weight = jnp.where(inner, jnp.minimum(1, weight * ratio), weight)
        return (below, next_weight, inner, inner & ~exists), visited

    dtype = jax.eval_shape(target, jnp.zeros(batch, jnp.int32)).dtype
    start = (jnp.zeros(batch, jnp.int32), jnp.ones(batch, dtype), jnp.ones(batch, bool), jnp.zeros(batch, bool))
    _, (node, accept, weight, token, pinned, inner) = lax.scan(down, start, None, length=len(depths))
    # From the deepest up: the path ends at the first that is accepted.
    refused = jnp.cumprod((1 - accept)[::-1], 0)[::-1]
    stop_here = accept * jnp.concatenate([refused[1:], jnp.ones((1, batch), dtype)])
    spread = lambda mass: jnp.zeros(tree.tokens.shape, dtype).at[rows, node].add(mass)
    stop = spread(stop_here)
    pinned_stop = spread(jnp.where(pinned, stop_here, 0))
    weights, has_draws = spread(weight), spread(inner) > 0
    tokens = jnp.zeros(tree.tokens.shape, jnp.int32).at[rows, node].max(jnp.where(inner, token, 0).astype(jnp.int32))

    def residual(nodes: jax.Array) -> jax.Array:
        p = target(nodes)
        _, law, _ = choose(nodes, p)
        left = normalise(jnp.maximum(_at(weights, nodes)[:, None] * p - law, 0), p)
        left = jnp.where(_at(has_draws, nodes)[:, None], left, p)
        share = divide(_at(pinned_stop, nodes), _at(stop, nodes), 0)
        return ((1 - share)[:, None] * left).at[rows, _at(tokens, nodes)].add(share)

    return PathDecision(stop, residual)


def beyond_chains(num_draws: int) -> str | None:
    """Why ``block`` cannot verify trees with room for so many draws at a node; None if it can."""
    return f"it takes chains, one draw a node; the tree has room for {num_draws}" if num_draws > 1 else None


def block(tree: TokenTree, target: Rows) -> PathDecision:
    """Block verification: the longest prefix of a chain whose joint probability is still covered, decided backwards.

    Sun et al. 2024, "Block verification accelerates speculative decoding", Algorithm 2: with w_0 = 1 and
    w_i = min(1, w_(i-1) p / q), the prefix of length i is accepted with probability S / (S + 1 - w_i), where S is the
    sum of (w_i p - q)+ at the next position, and the whole chain with w_L. Exact for one draw from q a node, optimal on
    a chain. Cost: per depth one warp and O(V).

    Raises:
      ValueError: if the tree has room for more than one draw at a node.
    """
    if reason := beyond_chains(tree.draw_tokens.shape[-1]):
        raise ValueError(f"block cannot verify this tree: {reason}")
    return multi_path_block(tree, target)


class _Walk(NamedTuple):
    node: jax.Array  # [B] int32, where the next draw is looked at; it has one
    child: jax.Array  # [B] int32, the node to enter next, for rows that are entering one
    entering: jax.Array  # [B] bool
    done: jax.Array  # [B] bool
    live: jax.Array  # [B] probability that nothing has been accepted so far
    pointer: jax.Array  # [B, N] int32, draws before it are dealt with
    entered: jax.Array  # [B, N] bool
    left: jax.Array  # [B, V] what is left of the target at node, up to a factor
    stack: jax.Array  # [B, D + 1, V] and at the nodes above it
    scale: jax.Array  # [B, N] that makes it alpha p
    alpha: jax.Array  # [B, N] acceptance of each node at present
    first_alpha: jax.Array  # [B, N] and when it was entered
    late: jax.Array  # [B, N] mass that stopped at a node after its draws were refused
    fresh: jax.Array  # [B, N] mass that stopped at a node without draws
    nodeless: jax.Array  # [B, N, K] mass that stopped with a draw that is no node


def traversal(tree: TokenTree, target: Rows) -> PathDecision:
    """Traversal verification: leaves first, so that a branch is given up only when all that hangs on it was refused.

    Weng et al. 2025, "Traversal verification for speculative tree decoding", section 3; exact by Theorem 3.3, as good
    as block verification on a chain by Theorem 3.4. The acceptance alpha of a node is the least of 1 and its parent's
    alpha p / q. The first leaf in depth-first order is accepted with probability alpha. When it is refused, its parent
    gets p <- N((alpha p - q)+) and alpha <- S / (S + 1 - alpha), where S is the sum of (alpha p - q)+; draws without
    replacement leave q too. Exact for draws that are i.i.d. or without replacement, from one source or several; equal
    to ``block`` on a chain. Once a token was refused nothing of it is left, so its repeats need no node of their own.
    Cost: one warp for each expanded node, O(V) per draw of the tree, and [B, D + 1, V] memory.
    """
    batch, num_nodes, most = tree.draw_tokens.shape
    rows = jnp.arange(batch)
    if most == 0:
        return PathDecision(jnp.ones(tree.tokens.shape, target(jnp.zeros(batch, jnp.int32)).dtype), target)
    laws = [drawn_by(law) for law in tree.laws]
    distinct = jnp.array([law == "without_replacement" for law in laws])[tree.draw_source]  # [B, K]
    slots = jnp.arange(most)
    row_of_draw = jnp.take_along_axis(
        tree.q_rows, jnp.broadcast_to(tree.draw_source[:, None], tree.draw_tokens.shape), 2
    )
    usable = tree.draw_valid & (tree.q[rows[:, None, None], row_of_draw, tree.draw_tokens] > 0)  # [B, N, K]
    expanded = usable.any(2)

    def draw_law(node: jax.Array, draw: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The law [B, V] of a draw given its source's earlier ones."""
        law = _at(tree.q, _at(row_of_draw, node, draw)).astype(dtype)
        if "without_replacement" not in laws:
            return law
        same_source = tree.draw_source == _at(tree.draw_source, draw)[:, None]
        gone = _at(usable, node) & same_source & distinct & (slots < draw[:, None])
        tokens = jnp.where(gone, _at(tree.draw_tokens, node), law.shape[-1])
        law = law.at[rows[:, None], tokens].set(0, mode="drop")
        return normalise(law, law)

    def refuse(left: jax.Array, scale: jax.Array, alpha: jax.Array, law: jax.Array) -> tuple[jax.Array, ...]:
        """What a refused draw leaves of its node: left is not normalised, only alpha p = scale * left is needed."""
        left = jnp.maximum(scale[:, None] * left - law, 0)
        total = left.sum(1)
        room = total + (1 - alpha)  # in brackets, so that alpha cannot round to more than 1
        return left, divide(jnp.ones_like(room), room, 1), divide(total, room, 1)

    def enter(walk: _Walk) -> _Walk:
        """Go down to the children that wait to be entered. Only here a row of the target is asked for."""
        node = jnp.where(walk.entering, walk.child, walk.node)
        alpha = _at(walk.alpha, node)
        return walk._replace(
            node=node,
            entering=jnp.zeros(batch, bool),
            entered=_put(walk.entered, node, jnp.ones(batch, bool), walk.entering),
            left=jnp.where(walk.entering[:, None], target(node), walk.left),
            stack=_put(walk.stack, _at(tree.depths, walk.node), walk.left, walk.entering),
            scale=_put(walk.scale, node, alpha, walk.entering),
            first_alpha=_put(walk.first_alpha, node, alpha, walk.entering),
        )

    def settle(walk: _Walk) -> _Walk:
        """Deal with one draw of each row that is not entering a node."""
        node, left = walk.node, walk.left
        scale, alpha = _at(walk.scale, node), _at(walk.alpha, node)
        waiting = _at(usable, node) & (slots >= _at(walk.pointer, node)[:, None])
        draw = jnp.argmax(waiting, 1).astype(jnp.int32)
        law = draw_law(node, draw, left.dtype)
        token = _at(tree.draw_tokens, node, draw)
        accept = jnp.minimum(1, divide(scale * _at(left, token), _at(law, token), 0))
        child, exists = _child(tree, node, token)
        has_subtree = exists & _at(expanded, child)
        back = has_subtree & _at(walk.entered, child)
        active = ~walk.done & ~walk.entering
        descend = active & has_subtree & ~back
        settled = active & ~descend

        # A draw without a subtree is accepted or refused at once; one with a subtree was refused in all of it.
        mass = jnp.where(settled & ~back, walk.live * accept, 0)
        live = walk.live - mass
        fresh = walk.fresh.at[rows, child].add(jnp.where(exists, mass, 0))
        nodeless = walk.nodeless.at[rows, node, draw].add(jnp.where(exists, 0, mass))
        after, next_scale, next_alpha = refuse(left, scale, alpha, law)

        # With the last draw gone, the node itself is accepted or refused, and its parent goes on.
        last = settled & ~(waiting & (slots > draw[:, None])).any(1)
        mass = jnp.where(last, live * next_alpha, 0)
        parent = jnp.maximum(_at(tree.parents, node), 0)
        above = _at(walk.stack, _at(tree.depths, parent))
        after = jnp.where(settled[:, None], after, left)
        return walk._replace(
            node=jnp.where(last, parent, node),
            child=jnp.where(descend, child, walk.child),
            entering=walk.entering | descend,
            done=walk.done | (last & (node == 0)),
            live=live - mass,
            pointer=_put(walk.pointer, node, draw + 1, settled),
            left=jnp.where(last[:, None], above, after),
            scale=_put(walk.scale, node, next_scale, settled),
            alpha=_put(_put(walk.alpha, node, next_alpha, settled), child, accept, descend),
            late=walk.late.at[rows, node].add(mass),
            fresh=fresh,
            nodeless=nodeless,
        )

    def next_nodes(walk: _Walk) -> _Walk:
        return lax.while_loop(lambda walk: (~walk.done & ~walk.entering).any(), settle, enter(walk))

    # The root is entered first.
    shape = jax.eval_shape(target, jnp.zeros(batch, jnp.int32))
    empty = ~expanded[:, 0]
    zeros = jnp.zeros((batch, num_nodes), shape.dtype)
    start = _Walk(
        node=jnp.zeros(batch, jnp.int32),
        child=jnp.zeros(batch, jnp.int32),
        entering=~empty,
        done=empty,
        live=jnp.ones(batch, shape.dtype),
        pointer=jnp.zeros((batch, num_nodes), jnp.int32),
        entered=jnp.zeros((batch, num_nodes), bool),
        left=jnp.zeros(shape.shape, shape.dtype),
        stack=jnp.zeros((batch, tree.max_depth + 1, shape.shape[1]), shape.dtype),
        scale=zeros + 1,
        alpha=zeros + 1,
        first_alpha=zeros + 1,
        late=zeros,
        fresh=zeros.at[:, 0].set(empty),
        nodeless=jnp.zeros(tree.draw_tokens.shape, shape.dtype),
    )
    walk = lax.while_loop(lambda walk: ~walk.done.all(), next_nodes, start)
    stop = walk.late + walk.fresh + walk.nodeless.sum(2)

    def residual(nodes: jax.Array) -> jax.Array:
        p = target(nodes)

        alpha = _at(walk.first_alpha, nodes)

        def refuse_draw(draw: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = jnp.full(batch, draw)
            after = refuse(state[0], state[1], state[2], draw_law(nodes, at, p.dtype))
            takes_part = _at(usable, nodes, at)
            return tuple(
                jnp.where(jnp.expand_dims(takes_part, range(1, new.ndim)), new, old)
                for new, old in zip(after, state, strict=True)
            )

        left, _, _ = lax.fori_loop(0, most, refuse_draw, (p, alpha, alpha))
        left = normalise(left, p)
        law = _at(walk.late, nodes)[:, None] * left + _at(walk.fresh, nodes)[:, None] * p
        law = law.at[rows[:, None], _at(tree.draw_tokens, nodes)].add(_at(walk.nodeless, nodes))
        return normalise(law, p)

    return PathDecision(stop, residual)


def typical(tree: TokenTree, target: Rows, *, epsilon: float = 0.09, delta: float = 0.3) -> PathDecision:
    """Typical acceptance: follow the longest path of tokens that the target finds plausible enough. Lossy.

    Medusa (Cai et al. 2024), section 2.3.1: a token passes where p(x) > min(epsilon, delta exp(-entropy of p)). The
    next token is sampled from the target. Biased for every law; at temperature 0 it emits the argmax. Cost: one warp
    for each expanded node.
    """
    batch, num_nodes = tree.tokens.shape
    rows = jnp.arange(batch)
    has_children = (tree.parents[:, None] == jnp.arange(num_nodes)[:, None]).any(2)  # [B, N]

    def look(node: jax.Array, passes: jax.Array) -> jax.Array:
        p = target(jnp.full(batch, node))
        entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(1)
        plausible = p[rows[:, None], tree.tokens] > jnp.minimum(epsilon, delta * jnp.exp(-entropy))[:, None]
        child = (tree.parents == node) & tree.valid
        return jnp.where(child, plausible & passes[:, node, None], passes)

    root = jnp.broadcast_to(jnp.arange(num_nodes) == 0, tree.tokens.shape)
    # Parents come before children, so one pass in slot order follows every path.
    visit = lambda node, passes: lax.cond(has_children[:, node].any(), look, lambda _, passes: passes, node, passes)
    passes = lax.fori_loop(0, num_nodes, visit, root)
    deepest = jnp.argmax(jnp.where(passes, tree.depths, -1), 1)
    dtype = jax.eval_shape(target, deepest).dtype
    return PathDecision(jax.nn.one_hot(deepest, num_nodes, dtype=dtype), target)


@functools.cache
def stop_at(rule: Callable[[TokenTree, Rows], PathDecision]) -> Callable[..., Acceptance]:
    """A verifier's function from a path rule: draw where the path ends, then the token after it.

    Both come from the PATH stream. EMIT noise belongs to a position, and where a path ended may have been decided at a
    later position than that: the noise would be used twice.

    Args:
      rule: ``(tree, rows) -> PathDecision`` over a batch; ``rows(nodes [B]) -> [B, V]`` is the target's distribution at
        one node of each tree.
    """

    def verify(keys: RoundKeys, tree: TokenTree, logits: jax.Array, warp: Warp) -> Acceptance:
        batch, width = logits.shape[0], tree.max_depth + 1
        rows, steps = jnp.arange(batch), jnp.arange(width)
        decision = rule(tree, lambda nodes: warp(logits[rows, nodes]))
        stop = sample_at(keys.path, jnp.zeros(batch, jnp.int32), decision.stop)
        token = sample_at(keys.path, jnp.ones(batch, jnp.int32), decision.residual(stop))
        length = _at(tree.depths, stop)

        def climb(node: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
            here = depth <= length
            return jnp.where(here & (depth > 0), _at(tree.parents, node), node), jnp.where(here, node, 0)

        _, path = lax.scan(climb, stop, steps[::-1])
        path = path[::-1].T.astype(jnp.int32)
        drafted = jnp.roll(tree.tokens[rows[:, None], path], -1, axis=1)
        tokens = jnp.where(steps < length[:, None], drafted, jnp.where(steps == length[:, None], token[:, None], 0))
        return Acceptance(path=path, num_accepted=length, tokens=tokens)

    return verify


ONE_DRAW = frozenset({"iid", "without_replacement", "top_k_plus_one", "hub"})  # each is a single draw from q at K = 1
_SEQUENTIAL = frozenset(
    law + suffix
    for law in ("iid", "without_replacement", grown("iid"), grown("without_replacement"))
    for suffix in ("", " x sources")
)

PATH_RULES: dict[str, PathRule] = {
    rule.name: rule
    for rule in (
        PathRule("block", block, ONE_DRAW),
        PathRule("traversal", traversal, _SEQUENTIAL),
        PathRule("multi_path_block", multi_path_block, frozenset({"iid"})),
        PathRule("typical", typical, frozenset(), lossy=True),
    )
}
