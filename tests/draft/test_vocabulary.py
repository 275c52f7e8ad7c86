"""Draft models of another vocabulary."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.draft import ensemble, ssm, with_vocabulary
from specjax.testing import check_drafter, context_model, table_model
from specjax.types import Model, TreeMask
from tests.helpers import VOCAB, context, prompts_of, tight_topology

TREE = tight_topology((2, 1))
PERMUTATION = np.random.default_rng(0).permutation(VOCAB)  # the target's id of each draft id


@functools.cache
def _renamed(forward):
    def renamed(params, tokens, positions, mask, cache, *, rows=None):
        out = forward(params, jnp.asarray(PERMUTATION)[tokens], positions, mask, cache, rows=rows)
        return out._replace(logits=out.logits[..., PERMUTATION])

    return renamed


def renamed(model: Model) -> Model:
    """The same model with its tokens numbered otherwise: draft id i is what was PERMUTATION[i]."""
    return model._replace(forward=_renamed(model.forward))


def logits_after(model: Model, token: int) -> np.ndarray:
    mask = TreeMask(jnp.zeros(1, jnp.int32), jnp.ones((1, 1, 1), bool))
    cache = model.init_cache(1, 0)
    return np.asarray(
        model.forward(model.params, jnp.array([[token]]), jnp.zeros((1, 1), int), mask, cache).logits[0, 0]
    )


def test_a_smaller_vocabulary_is_fed_a_stand_in_and_gives_no_mass_to_what_it_lacks():
    table = np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)
    model = with_vocabulary(table_model(table), 8, unknown=3)
    assert model.vocab_size == 8
    for token in range(8):
        want = [*table[token if token < 5 else 3], *[-np.inf] * 3]
        np.testing.assert_array_equal(logits_after(model, token), np.float32(want))


def test_padding_beyond_the_target_is_left_out():
    table = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    model = with_vocabulary(table_model(table, eos_ids=(2, 7)), 5)
    assert (model.vocab_size, model.eos_ids) == (5, (2,))
    np.testing.assert_array_equal(logits_after(model, 4), table[4, :5])


def test_ids_are_translated_both_ways():
    table = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    model = with_vocabulary(table_model(table, eos_ids=(0, 1)), 6, to_target=[5, -1, 0, 2], unknown=1)
    assert model.eos_ids == (5,)
    for token, own in enumerate([2, 1, 3, 1, 1, 0]):  # the draft's id of each target id, 1 for unknown ones
        want = np.full(6, -np.inf, np.float32)
        want[[5, 0, 2]] = table[own, [0, 2, 3]]
        np.testing.assert_array_equal(logits_after(model, token), want)


def test_a_renamed_target_drafts_perfectly():
    target = context(0)
    draft = with_vocabulary(renamed(target), VOCAB, to_target=PERMUTATION)
    call = functools.partial(sj.generate, target, prompts_of([3, 5]), tree=TREE, max_new_tokens=12, eos_ids=())
    want = call(drafts=[target])
    assert call(drafts=[draft]).tokens == want.tokens
    assert call(drafts=[draft]).stats.verify_steps == want.stats.verify_steps
    assert call(drafts=[renamed(target)]).stats.verify_steps > want.stats.verify_steps


def test_a_drafter_of_another_size_keeps_its_promises():
    """Its draws have their law, and no id is one that the draft does not have (checked with every draw)."""
    drafter = ssm(with_vocabulary(context_model(4, 11), VOCAB), tight_topology((2,)), "without_replacement")
    check_drafter(drafter, context(0), samples=1024)


def test_models_of_one_architecture_stay_one_ensemble():
    drafts = [ssm(with_vocabulary(context_model(seed, 11), VOCAB), TREE, "iid") for seed in (1, 2)]
    assert drafts[0][:3] == drafts[1][:3]
    assert len(ensemble(drafts).params) == 1


def test_other_sizes_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"draft with specjax.draft.with_vocabulary\(draft, 16\)"):
        sj.generate(context(0), [[1]], drafts=[context_model(0, 20)], tree=TREE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(vocab_size=0), "number of tokens, an integer >= 1; got 0"),
        (dict(vocab_size=8, unknown=4), r"unknown is one of the draft's ids, in \[0, 4\); got 4"),
        (dict(vocab_size=8, to_target=[0, 1]), "each of the draft's 4 tokens"),
        (dict(vocab_size=8, to_target=[0, 1, 2, 8]), r"to_target\[3\] is 8"),
        (dict(vocab_size=8, to_target=[0, 1, 1, 2]), "1 is the target id of several draft tokens"),
        (dict(vocab_size=8, to_target=[-1] * 4), "all -1"),
        (dict(vocab_size=8, to_target=[0.0, 1.0, 2.0, 3.0]), "each of the draft's 4 tokens; got float64"),
    ],
)
def test_bad_maps_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        with_vocabulary(table_model(np.zeros(4)), **arguments)
