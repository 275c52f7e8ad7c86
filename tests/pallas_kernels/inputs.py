"""Inputs of the kernels' tests, where every unread slot is NaN, and what has to come out, by NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def tree_mask(rng: np.random.Generator, batch: int, nodes: int, tree_rows: int) -> np.ndarray:
    """Random trees: a node sees itself, its parent and what that sees; its root sees any of the earlier rows.

    Where there is room, the last node is padding that sees nothing.
    """
    mask = np.zeros((batch, nodes, tree_rows), bool)
    for row in mask:
        row[0, : tree_rows - nodes] = rng.random(tree_rows - nodes) < 0.5
        for node in range(nodes):
            if node:
                row[node] = row[rng.integers(max(node - 5, 0), node)]
            row[node, tree_rows - nodes + node] = True
        if 2 < nodes < 128:
            row[-1] = False
    return mask


def make_inputs(
    *, nodes: int, tree_rows: int, q_heads: int, kv_heads: int, capacity: int, head_dim: int, dtype: str, lengths
) -> dict[str, Any]:
    """KV head 0 counts: equal scores, one-hot values. The others are random. What nobody may read is NaN."""
    rng = np.random.default_rng(nodes * 1000 + capacity)
    lengths = np.asarray(lengths)
    batch, group = len(lengths), q_heads // kv_heads

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape)

    q = random(batch, nodes, q_heads, head_dim)
    cache = [random(batch, kv_heads, capacity, head_dim) for _ in range(2)]
    tree = [random(batch, kv_heads, tree_rows, head_dim) for _ in range(2)]
    q[:, :, :group] = 0
    one_hot = np.eye(head_dim)[np.arange(capacity + tree_rows) % head_dim]
    cache[1][:, 0], tree[1][:, 0] = one_hot[:capacity], one_hot[capacity:]
    mask = tree_mask(rng, batch, nodes, tree_rows)
    dead = np.arange(capacity) >= lengths[:, None]
    unseen = ~mask.any(axis=1)
    for rows, hidden in ((cache, dead), (tree, unseen)):
        for array in rows:
            array[np.broadcast_to(hidden[:, None], array.shape[:3])] = np.nan
    arrays = dict(q=q, k_cache=cache[0], v_cache=cache[1], k_tree=tree[0], v_tree=tree[1])
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()} | {
        "prefix_lengths": jnp.asarray(lengths, jnp.int32),
        "tree_mask": jnp.asarray(mask),
    }


def seen_keys(inputs: dict[str, Any], window: int | None) -> np.ndarray:
    """What each node sees, [B, N, S + M]: the last ``window`` of its visible keys."""
    lengths, mask = np.asarray(inputs["prefix_lengths"]), np.asarray(inputs["tree_mask"])
    capacity = inputs["k_cache"].shape[2]
    seen = np.zeros((*mask.shape[:2], capacity + mask.shape[2]), bool)
    for b, n in np.ndindex(mask.shape[:2]):
        visible = [*range(lengths[b]), *(capacity + np.flatnonzero(mask[b, n]))]
        seen[b, n, visible if window is None else visible[-window:]] = True
    return seen


def expected(inputs: dict[str, Any], window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(what attention gives [B, N, Hq, D], how many keys of each class mod D each node sees [B, N, D])."""
    wide = {name: np.asarray(array.astype(jnp.float32), np.float64) for name, array in inputs.items()}
    seen = seen_keys(inputs, window)
    q = wide["q"]
    group = q.shape[2] // wide["k_tree"].shape[1]
    keys = np.nan_to_num(np.concatenate([wide["k_cache"], wide["k_tree"]], axis=2)).repeat(group, axis=1)
    values = np.nan_to_num(np.concatenate([wide["v_cache"], wide["v_tree"]], axis=2)).repeat(group, axis=1)
    scores = np.einsum("bnhd,bhsd->bhns", q, keys) / np.sqrt(q.shape[3])
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhns,bhsd->bnhd", weights / np.where(total == 0, 1, total), values)
    classes = np.eye(q.shape[3])[np.arange(seen.shape[2]) % q.shape[3]]
    return out, seen.astype(float) @ classes


def assert_attends(out: jax.Array, inputs: dict[str, Any], window: int | None) -> None:
    """``out`` is what attention gives, and the counting heads counted: one wrong bit moves a count by 1."""
    found = np.asarray(out.astype(jnp.float32), np.float64)
    right, counts = expected(inputs, window)
    group = found.shape[2] // inputs["k_tree"].shape[1]
    counted = found[:, :, :group] * counts.sum(axis=-1)[:, :, None, None]
    np.testing.assert_allclose(counted, np.broadcast_to(counts[:, :, None], counted.shape), atol=0.25)
    np.testing.assert_allclose(found, right, atol=TOLERANCE[str(inputs["q"].dtype)])
