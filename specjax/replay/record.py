"""The recorded pass: decode a text once, then feed it to all models and look at what each thought of every token."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import decode, prefill
from specjax.request import Plan, prepare
from specjax.sampling import Streams, Warp
from specjax.types import Model, PyTree, TreeMask

WINDOW = 32  # tokens of the text that one pass takes


class Window(NamedTuple):
    """Some tokens of a batch of texts, and what each model said behind the token before."""

    logits: list[jax.Array]  # per model [B, W, V]; the target first
    tokens: jax.Array  # [B, W] int32
    positions: jax.Array  # [B, W] int32
    emit: jax.Array  # [B] keys of the emission's noise
    warp: Warp  # [B, 1] fields
    draft_warp: Warp  # [B, 1] fields


Score = Callable[[Window], dict[str, jax.Array]]  # facts [B, W, ..], which make one jitted function each


class Record(NamedTuple):
    """Texts and the facts found along them. Token 0 is the one that prefill emits; facts about it mean nothing."""

    tokens: np.ndarray  # [P, T] int32 emitted tokens, right-padded
    lengths: np.ndarray  # [P] int32
    facts: dict[str, np.ndarray]  # [P, T, ..]


def record(
    target: Model,
    drafts: Sequence[Model],
    prompts: Sequence[Sequence[int]],
    score: Score,
    *,
    draft_mode: str,
    seeds: int | None | Sequence[int | None],
    batch_size: int,
    **options: Any,
) -> Record:
    """Decode prompts incrementally and score the text in one teacher-forced pass.

    Args:
      target, drafts, prompts, draft_mode, seeds: as in ``generate``.
      score: what to keep of each window. The same object for the same work, since it is compiled.
      batch_size: prompts decoded together.
      options: warp, draft_warp, max_new_tokens and eos_ids, as in ``generate``.

    Raises:
      ValueError: as ``generate``, and for drafts that are no models, or heads.
    """
    if isinstance(drafts, Model) or not isinstance(drafts, Sequence) or not drafts:
        raise ValueError("a trace needs drafts=[model, ..], the models whose trees are to be replayed")
    for index, draft in enumerate(drafts):
        if not isinstance(draft, Model):
            raise ValueError(f"drafts[{index}] is a {type(draft).__name__}; only the trees of models can be replayed")
        if draft.reads_hidden is not None:
            raise ValueError(
                f"drafts[{index}] reads the target's hidden states, which depend on where a round begins; only the "
                "trees of models that read tokens alone can be replayed"
            )
    if batch_size < 1:
        raise ValueError(f"batch_size is an integer >= 1; got {batch_size!r}")
    checked = prepare(target, prompts, drafts=drafts, tree=(1,), draft_mode=draft_mode, seeds=seeds, **options)
    plan = prepare(target, prompts, seeds=checked.seeds, **options)
    models = (target, *drafts)
    functions = tuple((model.forward, model.init_cache, model.max_positions) for model in models)
    params = tuple(model.params for model in models)
    width = WINDOW * max(1, -(-int(np.max(plan.inputs[2])) // WINDOW))
    parts = []
    for first in range(0, len(prompts), batch_size):
        inputs = jax.tree.map(operator.itemgetter(slice(first, first + batch_size)), plan.inputs)
        text, lengths = _text(plan, inputs, width)
        facts = _feed(functions, score, params, inputs, text)
        parts.append(Record(text[:, :width], lengths, jax.tree.map(np.asarray, facts)))
    return jax.tree.map(lambda *fields: np.concatenate(fields), *parts)


def _text(plan: Plan, inputs: tuple, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Emitted tokens [B, width + 1], right-padded, and their numbers [B]."""
    state = decode.run_decode(plan.spec, plan.params, decode.run_start(plan.spec, plan.params, *inputs))
    tokens, ends, begins = map(np.asarray, (state.tokens, state.lengths, inputs[1]))
    at = begins[:, None] + np.arange(width + 1)
    text = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1), axis=1)
    return np.where(at < ends[:, None], text, 0), (ends - begins).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _feed(functions, score: Score, params: tuple, inputs: tuple, text: jax.Array) -> dict[str, jax.Array]:
    """Facts [B, T, ..] about text [B, T + 1]: those about its last token are left out, those about its first are 0."""
    prompts, lengths, _, _, seeds, warp, draft_warp = inputs
    batch, width = text.shape[0], text.shape[1] - 1
    emit = Streams.from_seeds(seeds).emit
    warps = [Warp(*(field[:, None] for field in (w.temperature, w.top_k, w.top_p))) for w in (warp, draft_warp)]
    rows = jnp.broadcast_to(jnp.arange(WINDOW, dtype=jnp.int32), (batch, WINDOW))
    chain = jnp.broadcast_to(jnp.tril(jnp.ones((WINDOW, WINDOW), bool)), (batch, WINDOW, WINDOW))
    caches = []
    for (forward, init_cache, _), own in zip(functions, params):
        empty = init_cache(batch, prompts.shape[1] + WINDOW)
        caches.append(prefill.prefill(forward, own, empty, prompts, lengths)[2])

    def window(caches: list[PyTree], start: jax.Array) -> tuple[list[PyTree], dict[str, jax.Array]]:
        fed, following = (lax.dynamic_slice_in_dim(text, start + shift, WINDOW, axis=1) for shift in (0, 1))
        positions = lengths[:, None] + start + rows
        logits, after = [], []
        for (forward, _, most), own, cache in zip(functions, params, caches):
            out = forward(own, fed, jnp.minimum(positions, most - 1), TreeMask(cache.lengths, chain), cache)
            logits.append(out.logits)
            after.append(out.cache.commit(rows, jnp.full((batch,), WINDOW, jnp.int32)))
        return after, score(Window(logits, following, positions + 1, emit, *warps))

    _, facts = lax.scan(window, caches, jnp.arange(0, width, WINDOW))

    def along_the_text(fact: jax.Array) -> jax.Array:
        fact = jnp.moveaxis(fact, 0, 1).reshape(batch, width, *fact.shape[3:])
        return jnp.pad(fact, [(0, 0), (1, 0), *[(0, 0)] * (fact.ndim - 2)])[:, :-1]

    return jax.tree.map(along_the_text, facts)
