"""From parents to masks: who is whose ancestor, and depth-first order."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def ancestor_mask(parents: jax.Array) -> jax.Array:
    """Which nodes each node may attend to: itself and its ancestors.

    Args:
      parents: [N] int32, the parent's slot, -1 for a root or padding (which then sees only itself). Any order of
        slots will do; there must be no cycle.

    Returns:
      [N, N] bool, row = the node that looks. SpecInfer's topology-aware causal mask (section 4.2).

    Raises:
      ValueError: for parents that are no [N] slots, or that go round in a circle; values are not checked under ``jit``.
    """
    if not isinstance(parents, Tracer):
        _check_parents(np.asarray(parents))
    parents = jnp.asarray(parents, jnp.int32)
    count = parents.shape[0]
    # Pointer doubling: after step s a row knows its 2^s nearest ancestors. The extra last row stands for "no parent".
    mask = jnp.eye(count + 1, count, dtype=bool)
    jump = jnp.append(jnp.where(parents < 0, count, parents), count)
    for _ in range(max(count - 1, 0).bit_length()):
        mask |= mask[jump]
        jump = jump[jump]
    return mask[:count]


def depth_first_positions(parents: jax.Array, depths: jax.Array, counted: jax.Array) -> jax.Array:
    """Each node's place in depth-first order, siblings in slot order.

    Args:
      parents: [N] int32; depths: [N] int32; counted: [N] bool, the nodes that take a place (ancestors of a counted
        node are counted).

    Returns:
      [N] int32, meaningful for counted nodes.
    """
    count = parents.shape[0]
    ancestors = ancestor_mask(parents)
    sizes = jnp.sum(ancestors & counted[:, None], axis=0)  # counted nodes at and below each node
    earlier = jnp.arange(count)[None, :] < jnp.arange(count)[:, None]
    older_siblings = earlier & (parents[None, :] == parents[:, None]) & counted[None, :]
    # Before a node come its proper ancestors, and everything under an older sibling of it or of an ancestor.
    skipped = jnp.sum(jnp.where(older_siblings, sizes[None, :], 0), axis=1)
    return depths + jnp.sum(jnp.where(ancestors, skipped[None, :], 0), axis=1)


def _check_parents(parents: np.ndarray) -> None:
    count = len(parents) if parents.ndim == 1 else 0
    if not count or parents.dtype.kind not in "iu" or parents.min() < -1 or parents.max() >= count:
        raise ValueError(f"parents must be integers in [-1, N), one per slot; got {parents!r}")
    above = parents
    for _ in range(count):  # after N steps up, every slot is past its root
        above = np.where(above < 0, -1, parents[above])
    if np.any(above >= 0):
        raise ValueError(f"parents go round in a circle at slots {np.flatnonzero(above >= 0).tolist()}: {parents!r}")
