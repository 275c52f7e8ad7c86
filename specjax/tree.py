"""Token trees: static topologies as data, trees of drafted tokens, and a picture of them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray  # topologies are made on the host

MAX_NODES = 4096  # a mistyped schedule asks for millions, and would be built for minutes


class TreeShape(NamedTuple):
    """The static bounds of a family of trees; topologies padded to one shape share one executable."""

    num_nodes: int  # slots, the root's included
    widths: tuple[int, ...]  # expanded nodes at depth 0, 1, ..: what a draft model is fed at each level
    arities: tuple[int, ...]  # draws per expanded node at depth 0, 1, ..

    @property
    def depth(self) -> int:
        """Length of the longest path below the root."""
        return len(self.widths)

    @property
    def num_draws(self) -> int:
        """The most draws any node has."""
        return max(self.arities, default=0)

    @property
    def num_expanded(self) -> int:
        """Nodes that get children, the root's included."""
        return sum(self.widths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree without tokens: which rank of which node's draws becomes which slot.

    Slots are in depth-first order, the root is slot 0, and padding comes last. All fields but ``shape`` are data, so
    two topologies of one shape run through the same executable.
    """

    parents: Array  # [N] int32, -1 for the root and for padding
    ranks: Array  # [N] int32, the node's place among its parent's draws
    depths: Array  # [N] int32
    valid: Array  # [N] bool, False for padding
    num_draws: Array  # [N] int32, draws at the node: its highest child's rank + 1
    feed_rows: Array  # [N] int32, row among all expanded nodes in level order, -1 for leaves and padding
    levels: tuple[Array, ...]  # per depth [W_d] int32 slots of the expanded nodes, N for padding
    shape: TreeShape = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def from_schedule(cls, schedule: Sequence[int]) -> "Topology":
        """The tree of an expansion schedule <k1, .., km> (SpecInfer, section 3.1).

        Every node at depth i has k_(i+1) children: (3, 2, 1, 1) has 3 nodes at depth 1 and 6 at each depth below.

        Raises:
          ValueError: if the schedule is empty, has an entry that is not a positive integer, or more than ``MAX_NODES``
            nodes.
        """
        check_schedule(schedule)
        paths: list[tuple[int, ...]] = []
        level_paths: list[tuple[int, ...]] = [()]
        for width in schedule:
            level_paths = [(*path, rank) for path in level_paths for rank in range(width)]
            paths += level_paths
        return cls._from_valid_paths(paths)

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """A linear draft of ``length`` tokens; 0 is the lone root, that is incremental decoding.

        Raises:
          ValueError: if length is not an integer >= 0, or the chain has more than ``MAX_NODES`` nodes.
        """
        if not _is_int(length) or length < 0:
            raise ValueError(f"a chain's length is an integer >= 0; got {length!r}")
        _check_count(length + 1, f"a chain of {length}")
        return cls._from_valid_paths([(0,) * (depth + 1) for depth in range(length)])

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "Topology":
        """A tree given as paths of ranks, as Medusa does: [[0], [1], [0, 0]] is two children and one grandchild.

        Paths may come in any order. A rank may be skipped ([[0], [2]]): its draw is made and verified, but is no node.

        Raises:
          ValueError: naming the entry, if a path is empty, has a negative rank, is there twice or lacks its parent.
        """
        if not isinstance(paths, Iterable):
            raise ValueError(f"a tree is given as a list of paths, such as [[0], [1], [0, 0]]; got {paths!r}")
        entries = [tuple(path) if isinstance(path, Sequence | np.ndarray) else path for path in paths]
        if not entries:
            raise ValueError("a tree needs at least one path; Topology.chain(0) is the lone root")
        seen: set[tuple[int, ...]] = set()
        for index, path in enumerate(entries):
            if not isinstance(path, tuple) or not path or not all(_is_int(rank) and rank >= 0 for rank in path):
                raise ValueError(f"path {index} is {path!r}; expected a non-empty list of ranks >= 0, such as [0, 1]")
            if path in seen:
                raise ValueError(f"path {index}, {list(path)}, is there twice")
            seen.add(path)
        for index, path in enumerate(entries):
            if len(path) > 1 and path[:-1] not in seen:
                raise ValueError(f"path {index}, {list(path)}, lacks its parent {list(path[:-1])}")
        return cls._from_valid_paths(entries)

    @classmethod
    def _from_valid_paths(cls, paths: Sequence[tuple[int, ...]]) -> "Topology":
        ordered = [(), *sorted(paths)]  # lexicographic order of paths is depth-first order
        slots = {path: slot for slot, path in enumerate(ordered)}
        count, depth = len(ordered), max(map(len, ordered))
        parents = np.array([slots[path[:-1]] if path else -1 for path in ordered])
        ranks = np.array([path[-1] if path else 0 for path in ordered])
        depths = np.array([len(path) for path in ordered])
        num_draws = np.zeros(count, np.int64)
        np.maximum.at(num_draws, parents[1:], ranks[1:] + 1)
        levels = [np.flatnonzero((depths == level) & (num_draws > 0)) for level in range(depth)]
        shape = TreeShape(
            num_nodes=count,
            widths=tuple(len(level) for level in levels),
            arities=tuple(int(num_draws[level].max()) for level in levels),
        )
        return cls._build(shape, parents, ranks, depths, np.ones(count, bool), num_draws, levels)

    @classmethod
    def _build(cls, shape, parents, ranks, depths, valid, num_draws, levels) -> "Topology":
        feed_rows = np.full(shape.num_nodes + 1, -1)  # the last entry takes what padded levels write
        order = np.concatenate([*levels, np.zeros(0, np.int64)])
        feed_rows[order] = np.arange(len(order))
        as_int = lambda array: np.asarray(array, np.int32)
        return cls(
            parents=as_int(parents),
            ranks=as_int(ranks),
            depths=as_int(depths),
            valid=np.asarray(valid, bool),
            num_draws=as_int(num_draws),
            feed_rows=as_int(feed_rows[:-1]),
            levels=tuple(map(as_int, levels)),
            shape=shape,
        )

    def pad(self, shape: TreeShape) -> "Topology":
        """The same tree within larger static bounds.

        Raises:
          ValueError: if the tree does not fit.
        """
        own, extra = self.shape, shape.depth - self.shape.depth
        fits = extra >= 0 and own.num_nodes <= shape.num_nodes
        for mine, bound in zip((own.widths, own.arities), (shape.widths, shape.arities)):
            fits &= all(a <= b for a, b in zip(mine, bound))
        if not fits:
            raise ValueError(f"a tree of shape {own} does not fit into {shape}; see common_shape")

        def grow(array: Array, fill: int) -> np.ndarray:
            return np.pad(array, (0, shape.num_nodes - own.num_nodes), constant_values=fill)

        # Padding slots are named by the number of slots, which grows.
        own_levels = [
            np.where(level == own.num_nodes, shape.num_nodes, level) for level in map(np.asarray, self.levels)
        ]
        levels = [
            np.pad(level, (0, width - len(level)), constant_values=shape.num_nodes)
            for level, width in zip([*own_levels, *[np.zeros(0, np.int64)] * extra], shape.widths)
        ]
        return self._build(
            shape,
            grow(self.parents, -1),
            grow(self.ranks, 0),
            grow(self.depths, 0),
            grow(self.valid, False),
            grow(self.num_draws, 0),
            levels,
        )


def check_schedule(schedule: Sequence[int]) -> None:
    """Check an expansion schedule without building its tree.

    Raises:
      ValueError: as ``Topology.from_schedule``.
    """
    if isinstance(schedule, int | str) or not isinstance(schedule, Sequence):
        raise ValueError(f"an expansion schedule is a sequence such as (3, 2, 1, 1); got {schedule!r}")
    if not schedule:
        raise ValueError("an expansion schedule needs at least one entry; Topology.chain(0) is the lone root")
    width, count = 1, 1
    for level, arity in enumerate(schedule):
        if isinstance(arity, Sequence | np.ndarray) and not isinstance(arity, str):
            raise ValueError(
                f"expansion schedule {tuple(schedule)}: entry {level} is {arity!r}, expected an integer >= 1; a tree "
                "given as paths of ranks is Topology.from_paths(paths)"
            )
        if not _is_int(arity) or arity < 1:
            raise ValueError(
                f"expansion schedule {tuple(schedule)}: entry {level} is {arity!r}, expected an integer >= 1"
            )
        width *= int(arity)
        count += width
    _check_count(count, f"expansion schedule {tuple(schedule)}")


def common_shape(topologies: Iterable[Topology]) -> TreeShape:
    """The smallest bounds that all these topologies fit into, for ``Topology.pad``.

    Raises:
      ValueError: for no topology.
    """
    shapes = [topology.shape for topology in topologies]

    def widest(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        depth = max(map(len, rows))
        return tuple(max(row[level] for row in rows if level < len(row)) for level in range(depth))

    if not shapes:
        raise ValueError("common_shape needs at least one topology")
    return TreeShape(
        max(shape.num_nodes for shape in shapes),
        widest([shape.widths for shape in shapes]),
        widest([shape.arities for shape in shapes]),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A drafted tree: nodes for the target to score, and the draws that verification needs.

    Unbatched; a batch of trees has a leading axis everywhere. Nodes are what is fed to the target; parents come before
    children, and padding is anywhere ``valid`` is False. Draws are what a source drew at a node, in order and with
    multiplicity: two draws of one token may be one node. ``q`` has one row per expanded node and source, holding the
    distribution the draws came from.
    """

    tokens: jax.Array  # [N] int32, slot 0 is the root: the last committed token
    parents: jax.Array  # [N] int32, -1 for the root and for padding
    depths: jax.Array  # [N] int32
    valid: jax.Array  # [N] bool
    draw_tokens: jax.Array  # [N, K] int32, sources one after the other
    draw_valid: jax.Array  # [N, K] bool
    draw_source: jax.Array  # [K] int32, index into q_rows' sources
    q: jax.Array  # [R, V] draft probabilities
    q_rows: jax.Array  # [N, S] int32 row of q, -1 where the source drew nothing at the node
    laws: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))  # proposal law of each source
    max_depth: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_nodes(self) -> int:
        """Slots N, padding included."""
        return self.tokens.shape[-1]


def root_tree(roots: jax.Array) -> TokenTree:
    """Trees of a lone root [B]: incremental decoding."""
    (batch,) = roots.shape
    none = jnp.zeros((batch, 1, 0), jnp.int32)
    return TokenTree(
        tokens=roots[:, None],
        parents=jnp.full((batch, 1), -1, jnp.int32),
        depths=jnp.zeros((batch, 1), jnp.int32),
        valid=jnp.ones((batch, 1), bool),
        draw_tokens=none,
        draw_valid=none.astype(bool),
        draw_source=jnp.zeros((batch, 0), jnp.int32),
        q=jnp.zeros((batch, 0, 0)),
        q_rows=none,
        laws=(),
        max_depth=0,
    )


def check_tree(tree: TokenTree) -> None:
    """Check one unbatched tree's invariants, eagerly.

    Raises:
      ValueError: saying which slot breaks which invariant.
    """
    parents, depths, valid = map(np.asarray, (tree.parents, tree.depths, tree.valid))
    if not valid[0] or parents[0] != -1 or depths[0] != 0:
        raise ValueError(f"slot 0 must be a valid root of depth 0; got {parents[0]=}, {depths[0]=}, {valid[0]=}")
    for slot in np.flatnonzero(valid)[1:]:
        parent = parents[slot]
        if not 0 <= parent < slot or not valid[parent]:
            raise ValueError(f"slot {slot}: its parent is {parent}, expected a valid slot before it")
        if depths[slot] != depths[parent] + 1:
            raise ValueError(f"slot {slot}: depth {depths[slot]}, but its parent {parent} has depth {depths[parent]}")
    if depths[valid].max() > tree.max_depth:
        raise ValueError(f"the tree is {depths[valid].max()} deep, deeper than max_depth={tree.max_depth}")


def draw_picture(tree: TokenTree | Topology, labels: Sequence[str] | None = None) -> str:
    """One unbatched tree as text, a node a line, children below their parent.

    Args:
      tree: N slots; padding is left out.
      labels: [N] what to write for each slot; None writes the tokens (or ranks, for a topology).
    """
    parents, valid = np.asarray(tree.parents), np.asarray(tree.valid)
    if labels is None:
        named = isinstance(tree, TokenTree)
        labels = [str(value) for value in np.asarray(tree.tokens if named else tree.ranks)]
        labels[0] = labels[0] if named else "root"
    texts = labels

    def below(slot: int, indent: str) -> list[str]:
        children = [int(child) for child in np.flatnonzero(valid & (parents == slot))]
        lines = []
        for place, child in enumerate(children):
            last = place == len(children) - 1
            lines.append(f"{indent}{'└─' if last else '├─'} {texts[child]}")
            lines += below(child, indent + ("   " if last else "│  "))
        return lines

    return "\n".join([texts[0], *below(0, "")])


def _check_count(count: int, what: str) -> None:
    if count > MAX_NODES:
        raise ValueError(f"{what} has {count} nodes, the root included; trees have at most {MAX_NODES}")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
