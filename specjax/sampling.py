"""From logits to distributions and tokens: one warp for target, draft and baseline, one source of noise per request."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.laws import gumbel_noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Warp:
    """Temperature, then top-k, then top-p, as data: rows of one batch may differ.

    Temperature 0 gives the one-hot distribution of the most likely token (of several, the one with the lowest id).
    """

    temperature: jax.Array | float = 1.0  # [...] >= 0
    top_k: jax.Array | int = 0  # [...] int32, keep this many tokens; 0 keeps all
    top_p: jax.Array | float = 1.0  # [...] in (0, 1], keep the fewest most likely tokens with at least this mass

    def __call__(self, logits: jax.Array) -> jax.Array:
        """Probabilities [..., V] from logits [..., V]; the warp's fields broadcast against the leading axes.

        Work that no row asks for (the filters, the argmax of greedy rows) is skipped at run time. Under ``vmap`` it
        would not be, so the library calls this on whole batches.
        """
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        temperature, top_k, top_p = (
            jnp.asarray(field)[..., None] for field in (self.temperature, self.top_k, self.top_p)
        )
        # Relative to the largest logit, so that a tiny temperature cannot overflow.
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        mass = jnp.exp(shifted / jnp.where(temperature > 0, temperature, 1))
        probs = mass / jnp.sum(mass, axis=-1, keepdims=True)

        def keep_top_k(probs: jax.Array) -> jax.Array:
            kept = _likeliest(probs, jnp.ones_like(probs, jnp.int32), top_k)
            probs = jnp.where((top_k <= 0) | kept, probs, 0)
            return probs / jnp.sum(probs, axis=-1, keepdims=True)

        def keep_top_p(probs: jax.Array) -> jax.Array:
            # Some token is always kept, so the mass that is asked for may not vanish.
            mass = jnp.maximum(top_p * jnp.sum(probs, axis=-1, keepdims=True), jnp.finfo(probs.dtype).tiny)
            probs = jnp.where((top_p >= 1) | _likeliest(probs, probs, mass), probs, 0)
            return probs / jnp.sum(probs, axis=-1, keepdims=True)

        probs = lax.cond(jnp.any(top_k > 0), keep_top_k, lambda probs: probs, probs)
        probs = lax.cond(jnp.any(top_p < 1), keep_top_p, lambda probs: probs, probs)

        def greedy_rows(probs: jax.Array) -> jax.Array:
            one_hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=probs.dtype)
            return jnp.where(temperature > 0, probs, one_hot)

        return lax.cond(jnp.any(temperature <= 0), greedy_rows, lambda probs: probs, probs)


def argmax(values: jax.Array) -> jax.Array:
    """The index [..] int32 of the largest of values [.., V], of several the lowest.

    As ``jnp.argmax``, but two plain reductions: XLA does not vectorise the one over pairs on a CPU, where a row of
    32,000 takes 0.12 ms with it and 0.04 ms so.
    """
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(values == jnp.max(values, axis=-1, keepdims=True), ids, values.shape[-1] - 1), axis=-1)


def _likeliest(probs: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """The fewest most likely tokens whose weights add up to ``enough``; of equally likely ones, the lower ids first.

    By two bisections, over the bits of the probability of the last token kept (bits order nonnegative floats as they
    order integers) and over its id: sums over the vocabulary are fast everywhere, sorts and running sums are not, and
    filters made of them took a TPU's compiler half a minute at V = 32,000.

    Args:
      probs: [..., V] >= 0.
      weights: [..., V] >= 0, equal where probs are equal.
      enough: [..., 1] > 0.

    Returns:
      [..., V] bool.
    """
    width = jnp.finfo(probs.dtype).bits
    bits = lax.bitcast_convert_type(probs, jnp.dtype(f"int{width}"))
    ids = jnp.broadcast_to(jnp.arange(probs.shape[-1], dtype=bits.dtype), bits.shape)

    def add(which: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(which, weights, 0), axis=-1, keepdims=True)

    cut = _largest(bits, width - 1, lambda cut: add(bits >= cut) >= enough)
    last = _largest(
        ids, probs.shape[-1].bit_length(), lambda last: add((bits > cut) | ((bits == cut) & (ids < last))) < enough
    )
    return (bits > cut) | ((bits == cut) & (ids <= last))


def _largest(like: jax.Array, num_bits: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest integers [..., 1] below 2^num_bits for which ``holds``, which is true up to some point from 0 on."""

    def try_bit(step: jax.Array, value: jax.Array) -> jax.Array:
        higher = value | (jnp.ones((), value.dtype) << (num_bits - 1 - step))
        return jnp.where(holds(higher), higher, value)

    return lax.fori_loop(0, num_bits, try_bit, jnp.zeros_like(like[..., :1]))


def check_warp(warp: Warp) -> None:
    """Check the values of one row's warp, eagerly.

    Raises:
      ValueError: naming the field, the value and the range it must lie in.
    """
    for name, ok, want in (
        # Within float32 and int32, which they are kept in: nothing may turn into infinity, or into greedy.
        ("temperature", lambda x: (x == 0) | ((x >= 1e-30) & (x <= 1e30)), "0 (greedy) or a number in [1e-30, 1e30]"),
        (
            "top_k",
            lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31),
            "an integer in [0, 2^31) (0 keeps all tokens)",
        ),
        ("top_p", lambda x: (x > 0) & (x <= 1), "a number in (0, 1] (1 keeps all tokens)"),
    ):
        value = getattr(warp, name)
        if np.ndim(value) or isinstance(value, str) or not ok(np.asarray(value, float)):
            raise ValueError(f"Warp.{name} must be {want}; got {value!r}")


def stack_warps(warps: Sequence[Warp]) -> Warp:
    """One warp with [B] fields from B warps of scalars."""
    return Warp(
        jnp.asarray([warp.temperature for warp in warps], jnp.float32),
        jnp.asarray([warp.top_k for warp in warps], jnp.int32),
        jnp.asarray([warp.top_p for warp in warps], jnp.float32),
    )


fold_in = jax.vmap(jax.random.fold_in)  # keys [B], data [B] -> keys [B]


class Streams(NamedTuple):
    """A request's three streams of randomness, which never mix.

    DRAFT and PATH are folded with the sequence's length at the round's start, EMIT with the position of the token to be
    emitted. So a row never depends on its batch-mates, and naive sampling emits the same text whatever was drafted.
    """

    draft: jax.Array  # [B] keys
    path: jax.Array  # [B] keys
    emit: jax.Array  # [B] keys

    @classmethod
    def from_seeds(cls, seeds: jax.Array) -> "Streams":
        """Streams of requests with seeds [B] uint32."""
        keys = jax.vmap(jax.random.key)(seeds)
        return cls(*(fold_in(keys, jnp.full(seeds.shape, stream)) for stream in range(3)))


def sample_at(emit_keys: jax.Array, positions: jax.Array, probs: jax.Array) -> jax.Array:
    """Draw tokens [B] from probs [B, V] with the EMIT noise of the positions [B] they are emitted at (Gumbel-max)."""
    noise = jax.vmap(lambda key: gumbel_noise(key, probs.shape[-1], probs.dtype))(fold_in(emit_keys, positions))
    # Behind the barrier, since XLA would compute the noise again inside the argmax, several times over.
    return argmax(lax.optimization_barrier(jnp.log(probs) + noise))
