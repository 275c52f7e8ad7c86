"""Draft models of another vocabulary: padded, smaller, or with other ids."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Forward, Model, PyTree, TreeMask


class VocabularyParams(NamedTuple):
    """A model's parameters, and what its tokens are called."""

    model: PyTree
    to_draft: jax.Array | None  # [V] int32 the draft's id of each target id, -1 where it has none; None: the same ids


def with_vocabulary(
    model: Model, vocab_size: int, *, to_target: Sequence[int] | np.ndarray | None = None, unknown: int = 0
) -> Model:
    """A draft model that speaks the target's ids: it is fed them, and gives logits for them.

    Ids that only the target has get a logit of -inf, so they are never proposed; ids that only the draft has, such as
    padding beyond the target's last, are left out.

    Args:
      model: the draft model.
      vocab_size: the target's.
      to_target: [V] the target's id of each of the draft's tokens, -1 where it has none; None: ids mean the same, and
        the sizes differ by padding, or by tokens that one of the two has in addition.
      unknown: the draft's id that stands for tokens it does not have, where such a token is in the text.

    Raises:
      ValueError: for a vocabulary without tokens, a map that is not one-to-one, or ids out of range.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int | np.integer) or vocab_size < 1:
        raise ValueError(f"vocab_size is the target's number of tokens, an integer >= 1; got {vocab_size!r}")
    if isinstance(unknown, bool) or not isinstance(unknown, int | np.integer) or not 0 <= unknown < model.vocab_size:
        raise ValueError(f"unknown is one of the draft's ids, in [0, {model.vocab_size}); got {unknown!r}")
    stops, to_draft = model.eos_ids, None
    if to_target is not None:
        ids = np.asarray(to_target)
        if ids.shape != (model.vocab_size,) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"to_target has a target id, or -1, for each of the draft's {model.vocab_size} tokens; got {ids.dtype} "
                f"{ids.shape}"
            )
        if ids.min() < -1 or ids.max() >= vocab_size:
            wrong = int(np.argmax((ids < -1) | (ids >= vocab_size)))
            raise ValueError(f"to_target[{wrong}] is {ids[wrong]}; expected -1 or an id in [0, {vocab_size})")
        known = np.flatnonzero(ids >= 0)
        values, counts = np.unique(ids[known], return_counts=True)
        if not len(known) or counts.max() > 1:
            twice = f"{values[np.argmax(counts)]} is the target id of several draft tokens" if len(known) else "all -1"
            raise ValueError(f"to_target must be one-to-one where it is not -1; {twice}")
        table = np.full(vocab_size, -1, np.int32)
        table[ids[known]] = known
        to_draft, stops = jnp.asarray(table), tuple(int(ids[stop]) for stop in stops)
    return model._replace(
        forward=_forward(model.forward, model.vocab_size, int(vocab_size), int(unknown)),
        params=VocabularyParams(model.params, to_draft),
        vocab_size=int(vocab_size),
        eos_ids=tuple(stop for stop in stops if 0 <= stop < vocab_size),
    )


@functools.cache
def _forward(forward: Forward, draft_size: int, target_size: int, unknown: int) -> Forward:
    def translated(
        params: VocabularyParams,
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: PyTree,
        *,
        rows: jax.Array | None = None,
        **hidden: jax.Array,  # of a draft model that reads the target's, see ``Model``
    ):
        own = tokens if params.to_draft is None else params.to_draft[tokens]
        own = jnp.where((own >= 0) & (own < draft_size), own, unknown)
        out = forward(params.model, own, positions, mask, cache, rows=rows, **hidden)
        if params.to_draft is not None:
            known = params.to_draft >= 0
            logits = jnp.where(known, jnp.take(out.logits, jnp.maximum(params.to_draft, 0), axis=-1), -jnp.inf)
        else:
            missing = max(target_size - draft_size, 0)
            spare = [(0, 0)] * (out.logits.ndim - 1) + [(0, missing)]
            logits = jnp.pad(out.logits[..., :target_size], spare, constant_values=-jnp.inf)
        return out._replace(logits=logits)

    return translated
