"""Tree attention for TPU: one pass over the prefix per KV head, then the tree under its mask, in online softmax."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.tree_attention.fold import (
    clean_tree,
    fold,
    never_empty,
    pack,
    round_up,
    tpu_nodes,
    unfold,
    within_window,
)
from pallas_kernels.tree_attention.problem import Config, Problem

LANES = 128
WORDS = LANES // 32
LOWEST = -1e30  # finite, so that a difference of two of them is 0 and not NaN


def _body(
    plan_ref,  # [3, B] int32 in SMEM: first block, number of blocks, length
    q_ref,  # [rows, D]
    k_ref,  # [keys, D], or [D, keys] with key_axis 1, as are the next three
    v_ref,  # [keys, D]
    k_tree_ref,  # [LANES, D]
    v_tree_ref,  # [LANES, D]
    seen_ref,  # [nodes, WORDS + 1] int32
    out_ref,  # [rows, D]
    maximum_ref,  # [rows, LANES] float32, every lane the same
    total_ref,  # [rows, LANES] float32, every lane the same
    mixed_ref,  # [rows, D] float32
    *,
    key_axis: int,
    scale: float,
    windowed: bool,
    precision: jax.lax.Precision,
):
    batch, step = pl.program_id(0), pl.program_id(3)
    first, blocks, length = plan_ref[0, batch], plan_ref[1, batch], plan_ref[2, batch]
    rows, keys = q_ref.shape[0], k_ref.shape[key_axis]

    def per_row(columns: jax.Array) -> jax.Array:
        """[nodes, C] for each node -> [rows, C] for each folded row."""
        nodes, width = columns.shape
        return jnp.broadcast_to(columns[None], (rows // nodes, nodes, width)).reshape(rows, width)

    def attend(k: jax.Array, v: jax.Array, visible: jax.Array | None) -> None:
        scores = jax.lax.dot_general(
            q_ref[...],
            k,
            (((1,), (1 - key_axis,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores = scores * scale
        if visible is not None:
            scores = jnp.where(visible, scores, LOWEST)
        before = maximum_ref[:, :1]
        maximum = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - maximum)
        if visible is not None:
            # In a row that has seen nothing yet the maximum is LOWEST itself, and exp(0) is not 0.
            weights = jnp.where(visible, weights, 0)
        decay = jnp.exp(before - maximum)
        total = decay * total_ref[:, :1] + weights.sum(axis=1, keepdims=True)
        maximum_ref[...] = jnp.broadcast_to(maximum, maximum_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        mixed_ref[...] = decay * mixed_ref[...] + jax.lax.dot_general(
            weights.astype(v.dtype),
            v,
            (((1,), (key_axis,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    @pl.when(step == 0)
    def _():
        maximum_ref[...] = jnp.full(maximum_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)

    start = (first + step) * keys
    whole = start + keys <= length
    unmasked = jnp.logical_and(whole, not windowed)

    @pl.when(jnp.logical_and(step < blocks, unmasked))
    def _():
        attend(k_ref[...], v_ref[...], None)

    @pl.when(jnp.logical_and(step < blocks, jnp.logical_not(unmasked)))
    def _():
        columns = start + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        visible = columns < length
        if windowed:
            visible = jnp.logical_and(visible, columns >= per_row(seen_ref[:, WORDS:]))
        # A weight of 0 times NaN is NaN, and rows past the length may hold it.
        in_prefix = start + jax.lax.broadcasted_iota(jnp.int32, v_ref.shape, key_axis) < length
        attend(k_ref[...], jnp.where(in_prefix, v_ref[...], 0), visible)

    @pl.when(step == blocks)
    def _():
        column = jax.lax.broadcasted_iota(jnp.int32, (seen_ref.shape[0], LANES), 1)
        word = jnp.zeros(column.shape, jnp.int32)
        for index in range(WORDS):
            word = jnp.where(column // 32 == index, seen_ref[:, index : index + 1], word)
        bit = jax.lax.shift_right_logical(word, column % 32) & 1
        attend(k_tree_ref[...], v_tree_ref[...], per_row(bit) != 0)
        total = total_ref[:, :1]
        out_ref[...] = (mixed_ref[...] / jnp.where(total == 0, 1, total)).astype(out_ref.dtype)


def tree_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_tree: jax.Array,
    v_tree: jax.Array,
    *,
    prefix_lengths: jax.Array,
    tree_mask: jax.Array,
    window: int | None,
    config: Config,
) -> jax.Array:
    """See ``api.tree_attention``; ``config`` is complete.

    The grid is (sequence, KV head, row tile, step): a step per block of the prefix, as many as the longest sequence of
    the batch has, and one for the tree. A shorter sequence's spare steps ask for the block they have, which moves
    nothing.
    """
    problem = Problem.of(q, k_cache, k_tree)
    nodes = tpu_nodes(problem.nodes)
    tile, keys = config.rows, config.keys
    rows = round_up(problem.group * nodes, tile)
    lengths = prefix_lengths.astype(jnp.int32)
    shown, first_row = within_window(tree_mask, lengths, window)

    first = jnp.zeros_like(lengths) if window is None else first_row.min(axis=1) // keys
    blocks = jnp.maximum(pl.cdiv(lengths, keys) - first, 0)
    plan = jnp.stack([first, blocks, lengths])

    # Heads narrower than a register would fill a part of each, in memory too. XLA keeps such a cache with its rows
    # along the registers, and so it is read: seen with the axes swapped it is where it was, and nothing is copied.
    key_axis = int(problem.head_dim < LANES)

    def per_tile(b, h, r, j, plan_ref):
        return b, h, r, 0

    def per_head(b, h, r, j, plan_ref):
        return b, h, 0, 0

    def per_block(b, h, r, j, plan_ref):
        step = plan_ref[0, b] + jnp.minimum(j, jnp.maximum(plan_ref[1, b] - 1, 0))
        return (b, h, 0, step) if key_axis else (b, h, step, 0)

    def key_block(count: int, index_map) -> pl.BlockSpec:
        shape = (problem.head_dim, count) if key_axis else (count, problem.head_dim)
        return pl.BlockSpec((None, None, *shape), index_map)

    queries = pl.BlockSpec((None, None, tile, problem.head_dim), per_tile)
    keys_and_values = [
        never_empty(k_cache),
        never_empty(v_cache),
        clean_tree(k_tree, tree_mask, LANES),
        clean_tree(v_tree, tree_mask, LANES),
    ]
    if key_axis:
        keys_and_values = [rows.swapaxes(2, 3) for rows in keys_and_values]
    out = pl.pallas_call(
        functools.partial(
            _body,
            key_axis=key_axis,
            scale=problem.head_dim**-0.5,
            windowed=window is not None,
            precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(problem.batch, problem.kv_heads, rows // tile, blocks.max() + 1),
            in_specs=[
                queries,
                key_block(keys, per_block),
                key_block(keys, per_block),
                key_block(LANES, per_head),
                key_block(LANES, per_head),
                pl.BlockSpec((None, nodes, WORDS + 1), lambda b, h, r, j, plan_ref: (b, 0, 0)),
            ],
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((tile, LANES), jnp.float32),
                pltpu.VMEM((tile, LANES), jnp.float32),
                pltpu.VMEM((tile, problem.head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((problem.batch, problem.kv_heads, rows, problem.head_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=problem.cost(),
        interpret=config.interpreter(pltpu.InterpretParams),
        name="tree_attention",
    )(
        plan,
        fold(q, problem.kv_heads, nodes=nodes, rows=rows),
        *keys_and_values,
        pack(shown, first_row, nodes=nodes, words=WORDS),
    )
    return unfold(out, fed=problem.nodes, q_heads=problem.q_heads, nodes=nodes)
