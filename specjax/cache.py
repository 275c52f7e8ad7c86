"""The key-value cache: committed rows by position, uncommitted rows of the current tree beside them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of sequences.

    Rows past ``lengths`` are never read and may hold anything. A forward pass appends its rows to the tree buffer;
    ``commit`` moves the accepted ones behind the committed prefix and empties the buffer. The buffer's size M is
    static: a draft level of N rows makes it N larger, and it is empty between rounds.
    """

    k: tuple[jax.Array, ...]  # per layer [B, Hkv, S, D]
    v: tuple[jax.Array, ...]  # per layer [B, Hkv, S, D]
    k_tree: tuple[jax.Array, ...]  # per layer [B, Hkv, M, D]
    v_tree: tuple[jax.Array, ...]  # per layer [B, Hkv, M, D]
    lengths: jax.Array  # [B] int32 committed rows

    @classmethod
    def create(
        cls, *, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype: Any = jnp.float32
    ) -> "KVCache":
        """An empty cache for ``capacity`` committed rows per sequence."""

        def buffers(rows: int) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros((batch, num_kv_heads, rows, head_dim), dtype) for _ in range(num_layers))

        return cls(buffers(capacity), buffers(capacity), buffers(0), buffers(0), jnp.zeros((batch,), jnp.int32))

    def append(self, layer: int, k: jax.Array, v: jax.Array) -> "KVCache":
        """Add the fed rows' keys and values [B, Hkv, N, D] of one layer to the tree buffer."""

        def put(buffers: tuple[jax.Array, ...], rows: jax.Array) -> tuple[jax.Array, ...]:
            joined = jnp.concatenate([buffers[layer], rows.astype(buffers[layer].dtype)], axis=2)
            return (*buffers[:layer], joined, *buffers[layer + 1 :])

        return dataclasses.replace(self, k_tree=put(self.k_tree, k), v_tree=put(self.v_tree, v))

    def commit(self, rows: jax.Array, counts: jax.Array) -> "KVCache":
        """Move accepted rows of the tree buffer behind the prefix, in order, and empty the buffer.

        Args:
          rows: [B, R] int32 tree-buffer rows; they need not be contiguous, since an accepted path is not.
          counts: [B] int32, how many of them to keep (the rest are ignored); lengths grow by this much.
        """
        if not self.k:  # of a model without layers: there is nothing but the lengths
            return dataclasses.replace(self, lengths=self.lengths + counts)
        batch, capacity = len(rows), self.k[0].shape[2]
        width = min(rows.shape[1], capacity)  # more are never kept
        # The kept rows land side by side, in one window per sequence; near the end of the cache it starts early.
        starts = jnp.clip(self.lengths, 0, capacity - width)
        places = jnp.arange(width) - (self.lengths - starts)[:, None]
        kept = (places >= 0) & (places < counts[:, None])
        rows = jnp.take_along_axis(rows, jnp.clip(places, 0, width - 1), axis=1)

        # One sequence after the other, slices only: a gather or scatter over the batch makes a TPU turn the whole cache
        # around first, and back afterwards. The accepted rows are gathered from the small tree buffer before.
        accepted = [jnp.take_along_axis(tree, rows[:, None, :, None], axis=2) for tree in (*self.k_tree, *self.v_tree)]

        def one(sequence: jax.Array, buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def move(cache: jax.Array, accepted: jax.Array) -> jax.Array:
                where = (sequence, 0, starts[sequence], 0)
                window = jax.lax.dynamic_slice(cache, where, (1, cache.shape[1], width, cache.shape[3]))
                own = jax.lax.dynamic_index_in_dim(accepted, sequence)
                window = jnp.where(kept[sequence][:, None], own, window)
                return jax.lax.dynamic_update_slice(cache, window, where)

            return tuple(map(move, buffers, accepted))

        buffers = jax.lax.fori_loop(0, batch, one, (*self.k, *self.v))
        return dataclasses.replace(
            self.discard(), k=buffers[: len(self.k)], v=buffers[len(self.k) :], lengths=self.lengths + counts
        )

    def discard(self) -> "KVCache":
        """Empty the tree buffer without committing anything."""
        empty = tuple(tree[:, :, :0] for tree in self.k_tree)
        return dataclasses.replace(self, k_tree=empty, v_tree=empty)
