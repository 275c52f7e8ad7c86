"""The one entry point: shape checks, then the implementation asked for by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.tree_attention import reference, xla


class TreeAttention(Protocol):
    """Every implementation has the signature of ``tree_attention`` without ``implementation``."""

    def __call__(
        self,
        q: jax.Array,
        k_cache: jax.Array,
        v_cache: jax.Array,
        k_tree: jax.Array,
        v_tree: jax.Array,
        *,
        prefix_lengths: jax.Array,
        tree_mask: jax.Array,
    ) -> jax.Array: ...


IMPLEMENTATIONS: Mapping[str, TreeAttention] = MappingProxyType(
    {"reference": reference.tree_attention, "xla": xla.tree_attention}
)
DEFAULT = "xla"


def resolve(implementation: str | None) -> str:
    """The implementation's name, ``None`` being the default one.

    Raises:
      ValueError: no implementation has this name.
    """
    name = DEFAULT if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {name!r}; known are {', '.join(sorted(IMPLEMENTATIONS))}")
    return name


def _check_shapes(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_tree: jax.Array,
    v_tree: jax.Array,
    prefix_lengths: jax.Array,
    tree_mask: jax.Array,
) -> None:
    if q.ndim != 4 or k_cache.ndim != 4 or k_tree.ndim != 4:
        raise ValueError(
            "expected q [B, N, Hq, D], k_cache [B, Hkv, S, D] and k_tree [B, Hkv, M, D], "
            f"got {q.shape=}, {k_cache.shape=}, {k_tree.shape=}"
        )
    batch, rows, q_heads, head_dim = q.shape
    kv_heads, tree_rows = k_tree.shape[1], k_tree.shape[2]
    if q_heads % kv_heads:
        raise ValueError(
            f"expected query heads to be a multiple of KV heads, got {q_heads} query and {kv_heads} KV heads"
        )
    if k_tree.shape != (batch, kv_heads, tree_rows, head_dim) or v_tree.shape != k_tree.shape:
        raise ValueError(
            f"expected k_tree and v_tree of one shape [{batch}, Hkv, M, {head_dim}] to match {q.shape=}, "
            f"got {k_tree.shape=}, {v_tree.shape=}"
        )
    if k_cache.shape != (batch, kv_heads, k_cache.shape[2], head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"expected k_cache and v_cache of one shape [{batch}, {kv_heads}, S, {head_dim}], "
            f"got {k_cache.shape=}, {v_cache.shape=}"
        )
    if prefix_lengths.shape != (batch,) or tree_mask.shape != (batch, rows, tree_rows):
        raise ValueError(
            f"expected prefix_lengths [{batch}] and tree_mask [{batch}, {rows}, {tree_rows}], "
            f"got {prefix_lengths.shape=}, {tree_mask.shape=}"
        )
    if tree_mask.dtype != jnp.bool_:
        raise ValueError(f"expected a boolean tree_mask, got {tree_mask.dtype=}")


def tree_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_tree: jax.Array,
    v_tree: jax.Array,
    *,
    prefix_lengths: jax.Array,
    tree_mask: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """Attend from N tree nodes to the committed prefix and to the nodes the mask shows them.

    Query head h reads KV head h // (Hq // Hkv). Scores are scaled by D ** -0.5. A slot nobody may see can hold
    anything, NaN included. A row that may see nothing comes out as zeros.

    Args:
      q: [B, N, Hq, D] queries.
      k_cache: [B, Hkv, S, D] committed keys; S may be 0.
      v_cache: [B, Hkv, S, D] committed values.
      k_tree: [B, Hkv, M, D] keys of uncommitted rows, the fed ones last; M >= N.
      v_tree: [B, Hkv, M, D] values of uncommitted rows.
      prefix_lengths: [B] int32, how many cache rows are committed.
      tree_mask: [B, N, M] bool, which uncommitted rows each node sees.
      implementation: a name in ``IMPLEMENTATIONS``; None takes the default. It runs that one or raises.

    Returns:
      [B, N, Hq, D] in the dtype of q.

    Raises:
      ValueError: shapes that do not fit together, a mask that is not boolean, or an unknown implementation.
    """
    name = resolve(implementation)
    _check_shapes(q, k_cache, v_cache, k_tree, v_tree, prefix_lengths, tree_mask)
    return IMPLEMENTATIONS[name](
        q, k_cache, v_cache, k_tree, v_tree, prefix_lengths=prefix_lengths, tree_mask=tree_mask
    )
