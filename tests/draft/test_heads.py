"""Drafting with heads on the target's hidden states: that the right states arrive, and that texts stay exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import decode
from specjax.cache import KVCache
from specjax.draft import ensemble, expand_and_rerank, prompt_lookup, ssm, with_vocabulary
from specjax.models import EagleConfig, MedusaConfig, eagle_model, init_eagle, medusa_logits, medusa_model
from specjax.models.eagle import EagleCache
from specjax.models.medusa import abstract_medusa
from specjax.request import prepare
from specjax.sampling import stack_warps
from specjax.testing import context_model, fresh_logits, mixed, reference_text, table_model
from specjax.train import causal_pass
from specjax.types import ForwardOut, Model
from tests.helpers import TINY, VOCAB, context, prompts_of, round_keys, slot_paths, softmax, tight_topology, tiny

RAGGED = [[0], [1], [3], [0, 0], [1, 0], [3, 2], [0, 0, 0], [3, 2, 1], [3, 2, 1, 1]]
PATHS = [[0], [1], [2], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]  # as Medusa's: ragged, a rank skipped
EAGLE = EagleConfig(TINY.hidden_size, TINY.vocab_size, 64, 4, 2, 8, TINY.max_positions)
MEDUSA = MedusaConfig(TINY.hidden_size, TINY.vocab_size, num_heads=4, num_blocks=2, tied_projection=True)


def oracle(target: Model) -> Model:
    """A draft that knows all of a context model but its text, which it can only have from the hidden states.

    It adds a token's mark to the state before it, as the target does; one state amiss and its logits are unrelated.
    """
    return target._replace(forward=_oracle_forward, init_cache=_oracle_cache, reads_hidden=1)


def _oracle_forward(params, tokens, positions, mask, cache, *, rows=None, before=None):
    marks, logits = params
    before = cache.before(mask) if before is None else before
    total = before[..., 0] + marks[positions, tokens]
    cache = dataclasses.replace(cache, predicted=jnp.concatenate([cache.predicted, total[..., None]], axis=1))
    wanted = total if rows is None else jnp.take_along_axis(total, rows, axis=1)
    return ForwardOut(logits[wanted.astype(jnp.int32) % 1024], total[..., None], cache)


def _oracle_cache(batch: int, capacity: int) -> EagleCache:
    kv = KVCache.create(num_layers=0, batch=batch, num_kv_heads=0, capacity=capacity, head_dim=0)
    return EagleCache(kv, jnp.zeros((batch, 1, 1)))


def medusa() -> Model:
    """Heads with random weights on the tiny target."""
    leaves, structure = jax.tree.flatten(abstract_medusa(MEDUSA)[1])
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = structure.unflatten([0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)])
    return medusa_model(MEDUSA, params, tiny(0))


def eagle() -> Model:
    """A random layer on the tiny target."""
    return eagle_model(EAGLE, init_eagle(EAGLE, jax.random.key(0)), tiny(0))


def test_the_states_that_arrive_are_those_of_every_token():
    """A model that has its text from hidden states drafts, round for round, what one that sees the text does.

    Prompts of one token, of a chunk's length and around it; rounds in which rows accept 0 to 4 tokens of branches.
    """
    target = context(0)
    prompts = prompts_of([1, 127, 128, 129, 140, 9])
    options = dict(tree=tight_topology(RAGGED), max_new_tokens=[40, 25, 40, 40, 3, 40], eos_ids=())
    seen = sj.generate(target, prompts, drafts=[mixed(target)], **options)
    told = sj.generate(target, prompts, drafts=[mixed(oracle(target))], **options)
    assert told.rounds == seen.rounds
    # Logits that have nothing to do with the text would be accepted a seventh as often.
    accepted = [item.accepted for row in told.rounds for item in row]
    assert {0, 1, 2} < set(accepted)
    assert np.mean(accepted) > 1


def test_sources_with_and_without_hidden_states_draft_together():
    """Beside an SSM that is of no use, the merged tree holds all that the telling one drafts."""
    target, prompts = context(0), prompts_of([3, 8])
    result = sj.generate(
        target, prompts, drafts=[context(1), oracle(target)], tree=(2, 1), max_new_tokens=30, eos_ids=()
    )
    assert result.tokens == [reference_text(target, prompt, 30) for prompt in prompts]
    assert {item.accepted for row in result.rounds for item in row[:-1]} == {2}


def test_sources_of_every_kind_draft_together():
    """An SSM, one of fewer tokens, one that reads hidden states, the text itself: each proposes what is taken."""
    target, prompts = context(0), prompts_of([3, 20, 8])
    prompts[1] = [1, 2, 3, 4] * 5
    small = with_vocabulary(context_model(0, VOCAB - 2), VOCAB)
    drafts = [mixed(target), small, oracle(target), prompt_lookup(VOCAB, branches=2, length=2, min_match=1)]
    options = dict(warp=[sj.Warp(0.0), sj.Warp(0.0), sj.Warp(0.7)], seeds=[1, 2, 3], max_new_tokens=60, eos_ids=())
    result = sj.generate(target, prompts, drafts=drafts, tree=expand_and_rerank(2, 2, 4), **options)
    assert result.tokens == sj.generate(target, prompts, **options).tokens
    credit = {source for row in result.rounds for item in row for found in item.proposers for source in found}
    assert credit == {0, 1, 2, 3}


def test_a_stochastic_pair_has_the_targets_law():
    """Drafts of hidden states, i.i.d., and multi-step verification: two tokens have their exact joint law."""
    target, rows, prompt = context_model(3, 4, scale=1.0), 3000, [2, 0]
    result = sj.generate(
        target,
        [prompt] * rows,
        drafts=[mixed(oracle(target))],
        tree=(2, 2),
        draft_mode="iid",
        verifier="multi_step",
        warp=sj.Warp(1.0),
        max_new_tokens=3,
        eos_ids=(),
        seeds=list(range(rows)),
    )
    texts = np.array(result.tokens)
    accepted = [item.accepted for row in result.rounds for item in row]
    assert {0, 1, 2} == set(accepted)
    counts = np.zeros((4, 4, 4))
    np.add.at(counts, tuple(texts.T), 1)
    p = np.zeros((4, 4, 4))
    for first in range(4):
        logits = fresh_logits(target, [*prompt, first])
        for second in range(4):
            third = softmax(fresh_logits(target, [*prompt, first, second])[-1])
            p[first, second] = softmax(logits[1])[first] * softmax(logits[2])[second] * third
    statistic = np.sum((counts - rows * p) ** 2 / (rows * p))
    assert statistic < 120  # 63 degrees of freedom: 120 is one in 50,000


HEADS = {"medusa": lambda: medusa(), "eagle": lambda: eagle()}


def by_paths(model: Model, law: str) -> sj.Drafter:
    return ssm(model, tight_topology(PATHS), law)


@pytest.mark.parametrize(
    ("name", "builder"),
    [("medusa", by_paths), ("eagle", by_paths), ("medusa", expand_and_rerank(3, 3, 12))],
    ids=["medusa", "eagle", "medusa reranked"],
)
def test_trees_equal_those_of_whole_passes_and_greedy_text_incremental(name, builder):
    """Random heads on a real decoder, ragged rows: q of every expanded node, round after round; then the whole text."""
    target, model, prompts = tiny(0), HEADS[name](), prompts_of([5, 1, 9], 64)
    drafter = builder(model, "deterministic")
    plan = prepare(target, prompts, drafts=[drafter], max_new_tokens=24, eos_ids=())
    state, propose = plan.start(), jax.jit(drafter.propose)
    warp = stack_warps([sj.Warp(1.0)] * 3)
    for number in range(24):
        if not np.any(state.running):
            break
        tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
        roots = jnp.asarray(tokens[np.arange(3), lengths - 1])
        tree, _ = propose(drafter.params, round_keys(range(3), lengths), state.drafter, roots, warp)
        state, info = decode.run_round(plan.spec, plan.params, state)
        for row in range(3):
            if number in (0, 5) and info.emission.counts[row]:
                drafted = jax.tree.map(lambda field, row=row: np.asarray(field)[row], tree)
                check_tree_of(name, model, drafted, tokens[row, : lengths[row]])
    texts = [row[len(prompt) : len(prompt) + 24].tolist() for row, prompt in zip(np.asarray(state.tokens), prompts)]
    assert texts == [reference_text(target, prompt, 24) for prompt in prompts]


def check_tree_of(name: str, model: Model, tree: sj.TokenTree, text: np.ndarray):
    """One row's tree against heads on states of whole passes over the text."""
    target = tiny(0)
    hidden = np.asarray(_hidden(target.forward, target.init_cache, target.params, _padded(text))[0, : len(text) - 1])
    paths = slot_paths(tree.parents, tree.valid)
    expanded = np.flatnonzero(np.any(tree.draw_valid, axis=1))
    assert len(expanded) > 3 and max(map(len, paths.values())) > 1
    for slot in expanded:
        path = [int(tree.tokens[at]) for at in paths[slot]]
        if name != "eagle":
            logits = medusa_logits(MEDUSA, target, model.params[0], jnp.asarray(hidden[-1]))[len(path)]
        else:
            before, whole = np.concatenate([np.zeros((1, TINY.hidden_size)), hidden]), [*text, *path]
            for end in range(len(text), len(whole) + 1):
                states = np.zeros((1, 32, TINY.hidden_size), np.float32)
                states[0, :end] = before
                out = _hidden(
                    model.forward,
                    model.init_cache,
                    model.params,
                    _padded(np.array(whole[:end])),
                    before=jnp.asarray(states),
                )
                before = np.concatenate([before, np.asarray(out[0, end - 1 : end])])
            logits = target.head(target.params, jnp.asarray(before[-1]))
        np.testing.assert_allclose(tree.q[tree.q_rows[slot, 0]], softmax(logits), atol=1e-4)


def _padded(tokens: np.ndarray) -> jax.Array:
    return jnp.asarray(np.pad(tokens, (0, 32 - len(tokens)))[None], jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hidden(forward, init_cache, params, tokens, **known):
    return causal_pass(Model(forward, params, init_cache, 0, 0), params, tokens, **known).hidden


def test_every_array_of_a_state_leads_with_the_batch():
    """So that a row can be replaced while the others go on."""
    for model in (medusa(), eagle(), oracle(context(0))):
        target = context(0) if model.vocab_size == VOCAB else tiny(0)
        plan = prepare(target, [[1, 2], [3]], drafts=[model], tree=(2, 1), max_new_tokens=4)
        shapes = jax.eval_shape(plan.start).drafter
        assert {leaf.shape[0] for leaf in jax.tree.leaves(shapes)} == {2}


def test_only_those_who_read_hidden_states_pay_for_them():
    """An array of all prompts' states is in the program of prefill where a source reads them, and nowhere else."""
    of_prompts = f"tensor<2x128x{TINY.hidden_size}xf32>"
    for model in (tiny(1), eagle()):
        plan = prepare(tiny(0), [[1, 2], [3]], drafts=[model], tree=(2, 1), max_new_tokens=4)
        program = jax.jit(decode.run_start, static_argnums=0).lower(plan.spec, plan.params, *plan.inputs).as_text()
        loops = [line for line in program.splitlines() if "stablehlo.while" in line]
        assert loops
        assert any(of_prompts in line for line in loops) == (model.reads_hidden is not None)


def test_trees_deeper_than_the_heads_are_refused():
    with pytest.raises(ValueError, match="5 levels deep, and the draft model drafts 4 tokens ahead"):
        ssm(medusa(), sj.Topology.chain(5), "deterministic")


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (lambda: table_model(np.zeros(64)), medusa, "hidden states of 32 numbers, and the target gives none"),
        (lambda: context_model(0, 64), eagle, "hidden states of 32 numbers, and the target gives 1"),
        (medusa, lambda: tiny(0), "target is a draft model that reads another model's hidden states"),
    ],
)
def test_heads_without_their_target_are_refused(target, draft, message):
    with pytest.raises(ValueError, match=message):
        prepare(target(), [[1]], drafts=[draft()], tree=(2, 1))


def test_a_builder_that_drops_hidden_states_is_refused():
    builder = lambda model, law: ssm(model, sj.Topology.chain(2), law)._replace(reads_hidden=None)
    with pytest.raises(ValueError, match="returned a Drafter with reads_hidden=None"):
        prepare(tiny(0), [[1]], drafts=[eagle()], tree=builder)


def test_an_ensemble_has_one_target():
    parts = [ssm(model, sj.Topology.chain(2), "iid") for model in (eagle(), oracle(context_model(0, 64)))]
    with pytest.raises(ValueError, match=r"hidden states of sizes \[1, 32\]"):
        ensemble(parts)
