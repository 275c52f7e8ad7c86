"""The one entry point: shape checks, then the implementation asked for by name or picked for the device."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import plan, reference, xla
from pallas_kernels.tree_attention.plan import Choice
from pallas_kernels.tree_attention.problem import ArrayLike, Config, Device, Problem, target_device


class TreeAttention(Protocol):
    """What a model asks of attention: ``tree_attention``, a ``functools.partial`` of it, or a function like it."""

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
        window: int | None,
    ) -> jax.Array: ...


IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")


def _check_shapes(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_tree: ArrayLike,
    v_tree: ArrayLike,
    prefix_lengths: ArrayLike,
    tree_mask: ArrayLike,
) -> None:
    if len(q.shape) != 4 or len(k_cache.shape) != 4 or len(k_tree.shape) != 4:
        raise ValueError(
            "expected q [B, N, Hq, D], k_cache [B, Hkv, S, D] and k_tree [B, Hkv, M, D], "
            f"got {q.shape=}, {k_cache.shape=}, {k_tree.shape=}"
        )
    batch, rows, q_heads, head_dim = q.shape
    kv_heads, tree_rows = k_tree.shape[1], k_tree.shape[2]
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"expected query heads to be a multiple of KV heads, at least one, got {q_heads} query and {kv_heads} KV "
            "heads"
        )
    if k_tree.shape != (batch, kv_heads, tree_rows, head_dim) or v_tree.shape != k_tree.shape:
        raise ValueError(
            f"expected k_tree and v_tree of one shape [{batch}, Hkv, M, {head_dim}] to match {q.shape=}, "
            f"got {k_tree.shape=}, {v_tree.shape=}"
        )
    if tree_rows < rows:
        raise ValueError(
            f"expected at least the {rows} fed rows in the tree buffer, got {k_tree.shape=} for {q.shape=}"
        )
    if k_cache.shape != (batch, kv_heads, k_cache.shape[2], head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"expected k_cache and v_cache of one shape [{batch}, {kv_heads}, S, {head_dim}], "
            f"got {k_cache.shape=}, {v_cache.shape=}"
        )
    if v_cache.dtype != k_cache.dtype or v_tree.dtype != k_tree.dtype:
        raise ValueError(
            f"expected values in the dtype of their keys, got {k_cache.dtype} keys and {v_cache.dtype} values in the "
            f"cache, {k_tree.dtype} and {v_tree.dtype} in the tree"
        )
    if prefix_lengths.shape != (batch,) or tree_mask.shape != (batch, rows, tree_rows):
        raise ValueError(
            f"expected prefix_lengths [{batch}] and tree_mask [{batch}, {rows}, {tree_rows}], "
            f"got {prefix_lengths.shape=}, {tree_mask.shape=}"
        )
    if tree_mask.dtype != jnp.bool_:
        raise ValueError(f"expected a boolean tree_mask, got {tree_mask.dtype=}")
    if not jnp.issubdtype(prefix_lengths.dtype, jnp.integer):
        raise ValueError(f"expected whole numbers of committed rows, got {prefix_lengths.dtype=}")
    for name, array in (("q", q), ("keys of the cache", k_cache), ("keys of the tree", k_tree)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"expected {name} of a floating dtype, got {array.dtype}")


def pick(q: ArrayLike, k_cache: ArrayLike, k_tree: ArrayLike, *, device: Device | None = None) -> Choice:
    """What ``tree_attention`` runs for ``implementation=None``, and why.

    Args:
      q: [B, N, Hq, D], an array or a ``jax.ShapeDtypeStruct``; so are k_cache [B, Hkv, S, D] and k_tree
        [B, Hkv, M, D].
      device: None is the device that computations are traced for now.
    """
    return plan.choose(Problem.of(q, k_cache, k_tree), device or target_device())


def tree_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_tree: jax.Array,
    v_tree: jax.Array,
    *,
    prefix_lengths: jax.Array,
    tree_mask: jax.Array,
    window: int | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Attend from N tree nodes to the committed prefix and to the nodes the mask shows them.

    Query head h reads KV head h // (Hq // Hkv). Scores are scaled by D ** -0.5. A slot past the prefix, or a tree row
    that the mask shows to nobody, can hold anything, NaN included; what a window has left behind must be finite. A row
    that may see nothing comes out as zeros.

    Args:
      q: [B, N, Hq, D] queries.
      k_cache: [B, Hkv, S, D] committed keys; S may be 0.
      v_cache: [B, Hkv, S, D] committed values.
      k_tree: [B, Hkv, M, D] keys of uncommitted rows, the fed ones last; M >= N.
      v_tree: [B, Hkv, M, D] values of uncommitted rows.
      prefix_lengths: [B] int32, how many cache rows are committed.
      tree_mask: [B, N, M] bool, which uncommitted rows each node sees.
      window: each node sees the last ``window`` positions, its own included (Mistral's sliding window); None is all.
        Positions follow from the mask: what a node sees of the tree is its path, in slot order.
      implementation: a name in ``IMPLEMENTATIONS``; None takes the platform's kernel where it can run the call, else
        "xla", and ``pick`` says which. A named one runs or raises.
      config: block sizes of a kernel; None chooses them.

    Returns:
      [B, N, Hq, D] in the dtype of q.

    Raises:
      ValueError: shapes that do not fit together, values not in the dtype of their keys, a mask that is not boolean,
        lengths that are not integers, queries or keys that are not floats, a window that is not a whole number from 1,
        an unknown implementation, or a named one that cannot run (the message says why), or a config
        that does not fit it.
    """
    _check_shapes(q, k_cache, v_cache, k_tree, v_tree, prefix_lengths, tree_mask)
    if window is not None and (type(window) is bool or not isinstance(window, int | np.integer)):
        raise ValueError(f"expected a window of a whole number of positions, or None, got {window=}")
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"expected a window of at least 1 position, within int32, or None, got {window=}")
    if config is not None and not isinstance(config, Config):
        raise ValueError(f"expected config of type Config, or None, got {config!r}")
    problem, device = Problem.of(q, k_cache, k_tree), target_device()
    if implementation is None:
        implementation = plan.choose(problem, device).implementation
    else:
        interpreted = config is not None and bool(config.interpret)
        why_not = plan.refusal(implementation, problem, device, interpreted=interpreted)
        if why_not:
            raise ValueError(f"attention implementation {implementation!r} cannot run this call: {why_not}")
    config = plan.complete(implementation, problem, device, config)
    arrays = q, k_cache, v_cache, k_tree, v_tree
    if implementation == "reference":
        return reference.tree_attention(*arrays, prefix_lengths=prefix_lengths, tree_mask=tree_mask, window=window)
    if implementation == "xla":
        return xla.tree_attention(*arrays, prefix_lengths=prefix_lengths, tree_mask=tree_mask, window=window)
    return _kernel(implementation, window, config, arrays, prefix_lengths, tree_mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kernel(name, window, config, arrays, prefix_lengths, tree_mask) -> jax.Array:
    return _launch(name, window, config)(arrays, prefix_lengths, tree_mask)


@functools.cache
def _launch(name, window, config):
    @jax.custom_batching.custom_vmap
    def run(arrays, prefix_lengths, tree_mask):
        # Imported where they are needed: Mosaic takes a second that a CPU has no use for.
        if name == "mosaic_gpu":
            from pallas_kernels.tree_attention import mosaic_gpu as kernel
        else:
            from pallas_kernels.tree_attention import mosaic_tpu as kernel
        return kernel.tree_attention(
            *arrays, prefix_lengths=prefix_lengths, tree_mask=tree_mask, window=window, config=config
        )

    @run.def_vmap
    def more_batch(size, mapped, *inputs):
        # Kernels have no rule for vmap: a mapped axis becomes part of the batch, so that one launch serves all.
        def fold(x: jax.Array, is_mapped: bool) -> jax.Array:
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = run(*jax.tree.map(fold, inputs, tuple(mapped)))
        return out.reshape(size, -1, *out.shape[1:]), True

    return run


def _forward(name, window, config, arrays, prefix_lengths, tree_mask):
    return _kernel(name, window, config, arrays, prefix_lengths, tree_mask), (arrays, prefix_lengths, tree_mask)


def _backward(name, window, config, inputs, cotangent):
    """Gradients are XLA's: the kernels serve decoding, and training through them only has to be right."""
    arrays, prefix_lengths, tree_mask = inputs
    attend = functools.partial(xla.tree_attention, prefix_lengths=prefix_lengths, tree_mask=tree_mask, window=window)
    return jax.vjp(attend, *arrays)[1](cotangent), None, None


_kernel.defvjp(_forward, _backward)
