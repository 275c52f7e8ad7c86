"""Tree attention for Hopper GPUs: TMA feeds wgmma, the prefix is split over programs, partial softmaxes are merged."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.tree_attention.fold import (
    GPU_ROWS,
    clean_tree,
    fold,
    never_empty,
    pack,
    power_of_two,
    round_up,
    unfold,
    within_window,
)
from pallas_kernels.tree_attention.problem import Config, Problem

TREE_KEYS = 64  # tree rows of one step
LOWEST = -1e30  # finite, so that a difference of two of them is 0 and not NaN
LOG2_E = math.log2(math.e)


def swizzle_bytes(head_dim: int) -> int:
    """Bytes of the widest swizzle that a row of 16-bit elements is a multiple of."""
    return next(width for width in (128, 64, 32) if head_dim * 2 % width == 0)


def _add_product(accumulator, a, b):
    """accumulator + a @ b, in the accumulator's own registers."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(accumulator))


def _add_product_interpreted(accumulator, a, b):
    """The same for the interpreter, which knows no accumulator that starts with a value."""

    def product(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    rows, columns = accumulator.shape
    return accumulator + pl.run_scoped(product, plgpu.ACC((rows, columns), jnp.float32))


def _body(
    plan_ref,  # [3, B] int32: first block, number of blocks, length
    q_ref,  # [B, Hkv, rows, D]
    k_ref,  # [B, Hkv, S, D]
    v_ref,  # [B, Hkv, S, D]
    k_tree_ref,  # [B, Hkv, tree rows, D]
    v_tree_ref,  # [B, Hkv, tree rows, D]
    seen_ref,  # [B, words + 1, nodes] int32
    out_ref,  # [splits, B, Hkv, rows, D]
    norm_ref,  # [splits, B, Hkv, rows] float32: log2 of the sum of exp2 of the scores
    q_smem,  # [warpgroups, GPU_ROWS, D]; the output leaves through it too
    weights_smem,  # [warpgroups, GPU_ROWS, keys]
    k_smem,  # [stages, keys, D]
    v_smem,  # [stages, keys, D]
    norm_smem,  # [warpgroups, GPU_ROWS] float32
    q_ready,
    k_ready,  # [stages]
    v_ready,  # [stages]
    v_clean,
    consumed,  # [stages]
    *,
    splits: int,
    windowed: bool,
    add_product: Callable[..., Any],
):
    warpgroups, _, head_dim = q_smem.shape
    stages, keys, _ = k_smem.shape
    words, nodes = seen_ref.shape[1] - 1, seen_ref.shape[2]
    tree_steps = k_tree_ref.shape[2] // TREE_KEYS
    scale = head_dim**-0.5 * LOG2_E
    columns = min(head_dim, 128)  # of one product with values
    cleaned = head_dim if head_dim % 64 else 64  # columns that one pass of cleaning values holds in registers
    dtype = q_smem.dtype

    batch, head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
    split, warpgroup = jax.lax.axis_index("split"), jax.lax.axis_index("warpgroup")
    first, blocks, length = plan_ref[0, batch], plan_ref[1, batch], plan_ref[2, batch]
    share = pl.cdiv(blocks, splits)
    begin = jnp.minimum(split * share, blocks)
    steps = jnp.minimum(begin + share, blocks) - begin  # blocks of the prefix that are this program's
    begin = first + begin
    # The tree belongs to the last split, whose share of the prefix is the smallest.
    extra = jnp.where(split == splits - 1, tree_steps, 0)

    @pl.when(warpgroup == warpgroups)
    def _():
        if warpgroups == 2:
            plgpu.set_max_registers(40, action="decrease")

        def into(step, k, v, rows):
            slot = jax.lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(consumed.at[slot])

            plgpu.copy_gmem_to_smem(k, k_smem.at[slot, pl.ds(0, rows)], k_ready.at[slot])
            plgpu.copy_gmem_to_smem(v, v_smem.at[slot, pl.ds(0, rows)], v_ready.at[slot])

        @pl.loop(0, steps)
        def _(step):
            block = batch, head, pl.ds((begin + step) * keys, keys)
            into(step, k_ref.at[block], v_ref.at[block], keys)

        @pl.loop(0, extra)
        def _(step):
            block = batch, head, pl.ds(step * TREE_KEYS, TREE_KEYS)
            into(steps + step, k_tree_ref.at[block], v_tree_ref.at[block], TREE_KEYS)

        # Every arrival has to be seen before the barriers go.
        @pl.loop(jnp.maximum(steps + extra - stages, 0), steps + extra)
        def _(step):
            plgpu.barrier_wait(consumed.at[jax.lax.rem(step, stages)])

    @pl.when(warpgroup < warpgroups)
    def _():
        if warpgroups == 2:
            plgpu.set_max_registers(232, action="increase")
        tile = jax.lax.axis_index("tile") * warpgroups + warpgroup
        rows = pl.ds(tile * GPU_ROWS, GPU_ROWS)
        q_own = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, head, rows], q_own, q_ready.at[warpgroup])
        plgpu.barrier_wait(q_ready.at[warpgroup])
        # Rows go head by head and their nodes are a power of two, so a tile's nodes start at a multiple of GPU_ROWS.
        own_nodes = pl.ds(jax.lax.rem(tile * GPU_ROWS, nodes), GPU_ROWS)

        def attend(step, carry, width, visible):
            """One block of ``width`` keys; ``visible(column)`` is None for all."""
            mixed, maximum, total = carry
            slot = jax.lax.rem(step, stages)
            k, v = k_smem.at[slot, pl.ds(0, width)], v_smem.at[slot, pl.ds(0, width)]
            plgpu.barrier_wait(k_ready.at[slot])

            def score(accumulator):
                plgpu.wgmma(accumulator, q_own, k.transpose((1, 0)))
                return accumulator[...]

            scores = pl.run_scoped(score, plgpu.ACC((GPU_ROWS, width), jnp.float32)) * scale
            shape, shown = (GPU_ROWS, width), None
            if visible is not None:
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                shown = visible(column)
                scores = jnp.where(shown, scores, LOWEST)
            before = maximum
            maximum = jnp.maximum(maximum, scores.max(axis=1))
            weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(maximum, shape, [0]))
            if shown is not None:
                # In a row that has seen nothing yet the maximum is LOWEST itself, and exp2(0) is not 0.
                weights = jnp.where(shown, weights, 0.0)
            decay = jnp.exp2(before - maximum)
            total = total * decay + weights.sum(axis=1)
            own_weights = weights_smem.at[warpgroup, :, pl.ds(0, width)]
            own_weights[...] = weights.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_ready.at[slot])
            return own_weights, v, slot, mixed, decay, maximum, total

        def mix(own_weights, v, slot, mixed, decay, maximum, total):
            parts = []
            for index, part in enumerate(mixed):
                part = part * jax.lax.broadcast_in_dim(decay, part.shape, [0])
                parts.append(add_product(part, own_weights, v.at[:, pl.ds(index * columns, columns)]))
            plgpu.barrier_arrive(consumed.at[slot])
            return tuple(parts), maximum, total

        def whole_block(step, carry):
            return mix(*attend(step, carry, keys, None))

        def cut_block(step, carry):
            start = (begin + step) * keys
            first_row = None
            if windowed:
                first_row = plgpu.load(
                    seen_ref.at[batch, words, own_nodes], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )

            def visible(column):
                shown = column < length - start
                if first_row is not None:
                    shown &= column >= jax.lax.broadcast_in_dim(first_row - start, column.shape, [0])
                return shown

            own_weights, v, slot, *rest = attend(step, carry, keys, visible)

            # A weight of 0 times NaN is NaN, and rows past the length may hold it.
            @pl.when(start + keys > length)
            def _():
                @pl.when(warpgroup == 0)
                def _():
                    for row in range(0, keys, GPU_ROWS):
                        for column in range(0, head_dim, cleaned):
                            chunk = v.at[pl.ds(row, GPU_ROWS), pl.ds(column, cleaned)]
                            values = plgpu.load(chunk, layout=plgpu.Layout.WGMMA, optimized=False)
                            index = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                            chunk[...] = jnp.where(index < length - start - row, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                plgpu.barrier_arrive(v_clean)
                plgpu.barrier_wait(v_clean)

            return mix(own_weights, v, slot, *rest)

        def tree_block(step, carry):
            lower, upper = (
                plgpu.load(
                    seen_ref.at[batch, 2 * step + half, own_nodes],
                    layout=plgpu.Layout.WGMMA.reduce(1),
                    optimized=False,
                )
                for half in range(2)
            )

            def visible(column):
                word = jnp.where(
                    column < 32,
                    jax.lax.broadcast_in_dim(lower, column.shape, [0]),
                    jax.lax.broadcast_in_dim(upper, column.shape, [0]),
                )
                return (jax.lax.shift_right_logical(word, column & 31) & 1) != 0

            return mix(*attend(steps + step, carry, TREE_KEYS, visible))

        def constant(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        per_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            tuple(constant(0, (GPU_ROWS, columns), plgpu.Layout.WGMMA) for _ in range(head_dim // columns)),
            constant(LOWEST, (GPU_ROWS,), per_row),
            constant(0, (GPU_ROWS,), per_row),
        )
        whole = 0 if windowed else jnp.clip(length // keys - begin, 0, steps)
        if not windowed:
            carry = jax.lax.fori_loop(0, whole, whole_block, carry)
        carry = jax.lax.fori_loop(whole, steps, cut_block, carry)
        mixed, maximum, total = jax.lax.fori_loop(0, extra, tree_block, carry)

        empty = total == 0.0
        inverse = 1.0 / jnp.where(empty, 1.0, total)
        for index, values in enumerate(mixed):
            q_own.at[:, pl.ds(index * columns, columns)][...] = (
                values * jax.lax.broadcast_in_dim(inverse, values.shape, [0])
            ).astype(dtype)
        norm_smem.at[warpgroup][...] = jnp.where(empty, LOWEST, maximum + jnp.log2(jnp.where(empty, 1.0, total)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_own, out_ref.at[split, batch, head, rows])
        plgpu.copy_smem_to_gmem(norm_smem.at[warpgroup], norm_ref.at[split, batch, head, rows])
        plgpu.wait_smem_to_gmem(0)


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
    """See ``api.tree_attention``; ``config`` is complete."""
    problem = Problem.of(q, k_cache, k_tree)
    batch, kv_heads, head_dim = problem.batch, problem.kv_heads, problem.head_dim
    nodes = power_of_two(problem.nodes)
    keys, stages, splits, warpgroups = config.keys, config.stages, config.splits, config.rows // GPU_ROWS
    rows = round_up(problem.group * nodes, config.rows)
    tree_rows = round_up(problem.tree_rows, TREE_KEYS)
    lengths = prefix_lengths.astype(jnp.int32)
    shown, first_row = within_window(tree_mask, lengths, window)

    first = jnp.zeros_like(lengths) if window is None else first_row.min(axis=1) // keys
    plan = jnp.stack([first, jnp.maximum(pl.cdiv(lengths, keys) - first, 0), lengths])
    seen = pack(shown, first_row, nodes=nodes, words=tree_rows // 32).swapaxes(1, 2)
    seen = jnp.tile(seen, (1, 1, max(GPU_ROWS // nodes, 1)))

    width = swizzle_bytes(head_dim)
    transforms = (  # jax registers the methods that the type checker misses
        plgpu.TilingTransform((8, width // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width),  # pyright: ignore[reportAbstractUsage]
    )

    def smem(*shape: int):
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    # jax 0.11 takes no estimate of this kernel's cost.
    takes_estimate = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
    estimate: dict[str, Any] = {"cost_estimate": problem.cost()} if takes_estimate else {}
    out, norm = plgpu.kernel(
        functools.partial(
            _body,
            splits=splits,
            windowed=window is not None,
            add_product=_add_product_interpreted if config.interpret else _add_product,
        ),
        out_type=(
            jax.ShapeDtypeStruct((splits, batch, kv_heads, rows, head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, rows), jnp.float32),
        ),
        scratch_types=[
            smem(warpgroups, GPU_ROWS, head_dim),
            smem(warpgroups, GPU_ROWS, keys),
            smem(stages, keys, head_dim),
            smem(stages, keys, head_dim),
            plgpu.SMEM((warpgroups, GPU_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ],
        # The last axis runs fastest: programs that read the same keys start together and meet in the L2 cache.
        grid=(batch, kv_heads, splits, rows // config.rows),
        grid_names=("batch", "head", "split", "tile"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **estimate,
        interpret=config.interpreter(plgpu.InterpretGPUParams),
        kernel_name="tree_attention",
    )(
        plan,
        fold(q, kv_heads, nodes=nodes, rows=rows),
        never_empty(k_cache),
        never_empty(v_cache),
        clean_tree(k_tree, tree_mask, tree_rows),
        clean_tree(v_tree, tree_mask, tree_rows),
        seen,
    )
    out = merge(out, norm) if splits > 1 else out[0]
    return unfold(out, fed=problem.nodes, q_heads=problem.q_heads, nodes=nodes)


def merge(out: jax.Array, norm: jax.Array) -> jax.Array:
    """Join softmaxes over parts of the keys: out [P, .., D], norm [P, ..] log2 of each part's sum -> [.., D]."""
    weights = jnp.exp2(norm - norm.max(axis=0))
    weights = weights / weights.sum(axis=0)
    return (out.astype(jnp.float32) * weights[..., None]).sum(axis=0).astype(out.dtype)
