"""From what a caller writes to what runs: everything is checked here, on the host, before anything is compiled."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.draft.ensemble import ensemble
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm
from specjax.laws import LAWS
from specjax.prefill import CHUNK
from specjax.sampling import Warp, check_warp, stack_warps
from specjax.tree import Topology
from specjax.types import Drafter, Model, Verifier
from specjax.verify import VERIFIERS, check_laws

DRAFT_MODES = {"top_k": "deterministic", **{name: name for name in LAWS if name != "deterministic"}}  # to laws
Builder = Callable[[Model, str], Drafter]  # a model and the name of a proposal law -> a drafter


class Plan(NamedTuple):
    """A checked request: what ``specjax.decode`` needs to run it."""

    spec: decode.Spec
    params: decode.Params
    inputs: tuple  # of decode.run_start
    seeds: list[int]

    def start(self) -> decode.DecodeState:
        """Prefill, and emit the first tokens."""
        return decode.run_start(self.spec, self.params, *self.inputs)


def prepare(
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    drafts: Sequence[Model | Drafter] = (),
    tree: Sequence[int] | Topology | Builder | None = None,
    draft_mode: str = "top_k",
    draft_warp: Warp | Sequence[Warp] | None = None,
    verifier: str | Verifier = "naive_sampling",
    warp: Warp | Sequence[Warp] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    eos_ids: Sequence[int] | None = None,
    seeds: int | None | Sequence[int | None] = None,
    allow_lossy: bool = False,
) -> Plan:
    """Check a request and resolve its names; arguments and errors are those of ``generate``. Nothing is compiled."""
    if not isinstance(target, Model):
        raise ValueError(f"target is a {type(target).__name__}; expected a Model, as load_model returns")
    if target.reads_hidden is not None:
        raise ValueError("target is a draft model that reads another model's hidden states; pass it as one of drafts")
    drafter = make_drafter(drafts, tree, draft_mode)
    verifier = _verifier(verifier, drafter, target.vocab_size, allow_lossy)
    tokens, lengths = _prompts(prompts, target)
    budgets = _per_prompt("max_new_tokens", max_new_tokens, len(prompts))
    if any(isinstance(budget, bool) or not 0 <= budget < 2**31 for budget in budgets):
        raise ValueError(f"max_new_tokens must be an integer >= 0, or one per prompt; got {max_new_tokens!r}")
    budgets = np.array(budgets)
    _check_room(target, drafter, lengths, budgets)
    capacity = CHUNK
    while capacity < np.max(lengths + budgets):
        capacity *= 2
    warps = _per_prompt("warp", Warp(0.0) if warp is None else warp, len(prompts), Warp)
    for row in warps:
        check_warp(row)
    if draft_warp is None:
        draft_warp = [Warp(row.temperature or 1.0) for row in warps]
    draft_warps = _per_prompt("draft_warp", draft_warp, len(prompts), Warp)
    for row in draft_warps:
        check_warp(row)
    stops = target.eos_ids if eos_ids is None else eos_ids
    if not isinstance(stops, Iterable):
        raise ValueError(f"eos_ids must be a list of token ids; got {eos_ids!r}")
    stops = list(stops)
    is_token = lambda stop: isinstance(stop, int | np.integer) and not isinstance(stop, bool)
    if not all(is_token(stop) and 0 <= stop < target.vocab_size for stop in stops):
        raise ValueError(f"eos_ids must be token ids in [0, {target.vocab_size}); got {stops!r}")
    padded_stops = [*stops, *[-1] * (-len(stops) % 8 if stops else 8)]  # a handful of sizes, not one per list
    all_seeds = _seeds(seeds, len(prompts))
    spec = decode.Spec(
        target.forward,
        target.init_cache,
        target.max_positions,
        drafter.init,
        drafter.propose,
        drafter.commit,
        verifier.verify,
        drafter.max_depth,
        drafter.reads_hidden is not None,
        draft_sizes=drafter.sizes,
        draft_choose=drafter.choose,
    )
    inputs = (
        jnp.asarray(np.pad(tokens, ((0, 0), (0, capacity - tokens.shape[1])))),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(budgets, jnp.int32),
        jnp.broadcast_to(jnp.asarray(padded_stops, jnp.int32), (len(prompts), len(padded_stops))),
        jnp.asarray(all_seeds, jnp.uint32),
        stack_warps(warps),
        stack_warps(draft_warps),
    )
    return Plan(spec, decode.Params(target.params, drafter.params), inputs, all_seeds)


def make_drafter(
    drafts: Sequence[Model | Drafter], tree: Sequence[int] | Topology | Builder | None, draft_mode: str
) -> Drafter:
    """One drafter from what ``generate`` takes as ``drafts``, ``tree`` and ``draft_mode``.

    Raises:
      ValueError: for a tree without a draft, an SSM without a tree, an unknown mode, or a tree that cannot be drafted.
    """
    if isinstance(drafts, Model | Drafter):
        raise ValueError("drafts is a sequence of models or Drafters; for one, write drafts=[draft]")
    if not isinstance(drafts, Sequence):
        raise ValueError(f"drafts is {drafts!r}; expected a sequence of models or Drafters, () for none")
    for index, draft in enumerate(drafts):
        if not isinstance(draft, Model | Drafter):
            raise ValueError(f"drafts[{index}] is a {type(draft).__name__}; expected a Model or a Drafter")
    if not isinstance(draft_mode, str) or draft_mode not in DRAFT_MODES:
        raise ValueError(f"unknown draft_mode {draft_mode!r}{_nearest(draft_mode, DRAFT_MODES)}")
    if not (tree is None or callable(tree) or isinstance(tree, Topology)):
        tree = Topology.from_schedule(tree)
    lone_root = isinstance(tree, Topology) and tree.shape.depth == 0
    if tree is not None and not drafts and not lone_root:
        raise ValueError("a tree was given, but nothing that drafts it; pass drafts=[model]")
    if tree is not None and drafts and all(isinstance(draft, Drafter) for draft in drafts):
        raise ValueError("every draft is a Drafter, which brings its own tree; leave out tree")
    parts: list[Drafter] = []
    for draft in drafts:
        if isinstance(draft, Drafter):
            parts.append(draft)
        elif tree is None:
            raise ValueError("an SSM needs a tree to draft; pass tree=(3, 2, 1, 1), say, or a Topology")
        elif isinstance(tree, Topology):
            parts += [] if lone_root else [ssm(draft, tree, DRAFT_MODES[draft_mode])]
        else:
            built = tree(draft, DRAFT_MODES[draft_mode])
            if not isinstance(built, Drafter):
                raise ValueError(f"the builder given as tree returned a {type(built).__name__}; expected a Drafter")
            if built.reads_hidden != draft.reads_hidden:
                raise ValueError(
                    f"the builder given as tree returned a Drafter with reads_hidden={built.reads_hidden} for a draft "
                    f"model with reads_hidden={draft.reads_hidden}; it must pass them on, as specjax.draft.ssm does"
                )
            parts.append(built)
    if not parts:
        return NO_DRAFT
    return parts[0] if len(parts) == 1 else ensemble(parts)


def _verifier(verifier: str | Verifier, drafter: Drafter, vocab_size: int, allow_lossy: bool) -> Verifier:
    if isinstance(verifier, str):
        if verifier not in VERIFIERS:
            raise ValueError(f"unknown verifier {verifier!r}{_nearest(verifier, VERIFIERS)}")
        verifier = VERIFIERS[verifier]
    if not isinstance(verifier, Verifier):
        raise ValueError(f"verifier is a {type(verifier).__name__}; expected a name or a Verifier")
    if verifier.lossy:
        if not allow_lossy:
            raise ValueError(f"{verifier.name} changes the target's distribution; pass allow_lossy=True to use it")
    else:
        check_laws(verifier, drafter.laws, max_draws=drafter.max_draws, vocab_size=vocab_size)
    return verifier


def _prompts(prompts: Sequence[Sequence[int]], target: Model) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded prompts [B, longest] and their lengths [B]."""
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, str) or not len(prompts):
        raise ValueError("prompts must be a non-empty list of token-id lists")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"prompts[{index}] is {prompt!r}; expected a list of token ids (see load_tokenizer)")
        if not len(prompt):
            raise ValueError(f"prompts[{index}] is empty; a prompt needs at least one token")
        try:
            ids = np.asarray(prompt)
        except ValueError:  # rows of unequal length
            ids = np.asarray(prompt, object)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"prompts[{index}] must be a flat list of integer token ids; got {ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= target.vocab_size:
            wrong = ids[(ids < 0) | (ids >= target.vocab_size)][0]
            raise ValueError(f"prompts[{index}] has token id {wrong}, outside the target's [0, {target.vocab_size})")
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


def _check_room(target: Model, drafter: Drafter, lengths: np.ndarray, budgets: np.ndarray) -> None:
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"the drafts' vocabulary has {drafter.vocab_size} tokens and the target's {target.vocab_size}; they must "
            "share one vocabulary. If one tokenizer serves both and only padding differs, or ids can be translated, "
            f"draft with specjax.draft.with_vocabulary(draft, {target.vocab_size})"
        )
    if drafter.reads_hidden is not None and drafter.reads_hidden != target.hidden_size:
        given = "gives none" if target.hidden_size is None else f"gives {target.hidden_size}"
        raise ValueError(
            f"the drafts read hidden states of {drafter.reads_hidden} numbers, and the target {given}; they need the "
            "target they were trained for"
        )
    for name, limit in (("target", target.max_positions), ("draft", drafter.max_positions)):
        if limit is None:
            continue
        for index, (length, budget) in enumerate(zip(lengths, budgets)):
            if length + budget > limit:
                raise ValueError(
                    f"prompts[{index}] has {length} tokens and may grow by max_new_tokens={budget}, beyond the {name} "
                    f"model's context of {limit}"
                )
            if length + drafter.max_depth > limit:
                raise ValueError(
                    f"prompts[{index}] has {length} tokens, and a tree of depth {drafter.max_depth} behind it would "
                    f"reach beyond the {name} model's context of {limit}"
                )


def _per_prompt(name: str, value, count: int, scalar: type | tuple = (int, np.integer)) -> list:
    if isinstance(value, scalar):
        return [value] * count
    if isinstance(value, str) or not hasattr(value, "__len__") or not np.ndim(value):
        raise ValueError(f"{name} is {value!r}; expected one value or one per prompt")
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    for index, entry in enumerate(values):
        if not isinstance(entry, scalar):
            raise ValueError(f"{name}[{index}] is {entry!r}; expected {getattr(scalar, '__name__', 'an integer')}")
    return values


def _seeds(seeds: int | None | Sequence[int | None], count: int) -> list[int]:
    values = _per_prompt("seeds", seeds, count, (int, np.integer, type(None)))
    entropy = np.random.SeedSequence().generate_state(count)
    for index, seed in enumerate(values):
        if seed is not None and (isinstance(seed, bool) or not 0 <= seed < 2**32):
            raise ValueError(f"seed {index} is {seed!r}; expected an integer in [0, 2^32)")
    return [int(fresh if seed is None else seed) for seed, fresh in zip(values, entropy)]


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {sorted(known)}"
