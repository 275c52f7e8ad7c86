"""Trees whose size is chosen at run time: the text stays, sizes follow the batch and the acceptance, one compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
import specjax.decode
import specjax.request
from specjax.draft import NO_DRAFT, adaptive, ensemble, ssm
from tests.helpers import HOSTILE, MIXED, PERFECT, context, prompts_of, row_kinds

TREES = (sj.Topology.from_schedule((1, 1)), sj.Topology.from_schedule((3, 2, 1)))
DRAFTED = {0: 0, 2: 1, 15: 2}  # nodes below the root -> size
PROMPTS = prompts_of([5, 9, 12, 1])


def sizes_of(kinds, seconds=(1.0, 1.2, 1.5), expected=(1.0, 2.5, 3.5), law="deterministic", batches=(4,)):
    """An adaptive drafter of three sizes over a context model whose rows are perfect, hostile or mixed."""
    model = row_kinds(context(0), kinds)
    return adaptive(
        [NO_DRAFT, *(ssm(model, tree, law) for tree in TREES)], expected=expected, seconds=seconds, batches=batches
    )


def generate(drafter=None, prompts=PROMPTS, **options) -> sj.Generation:
    drafts = [] if drafter is None else [drafter]
    return sj.generate(context(0), prompts, drafts=drafts, **dict(max_new_tokens=60, eos_ids=(), seeds=7) | options)


def used(result: sj.Generation) -> set[int]:
    return {DRAFTED[item.drafted] for row in result.rounds for item in row}


@pytest.mark.parametrize(
    "kinds", [[PERFECT] * 4, [HOSTILE] * 4, [MIXED] * 4, [PERFECT, HOSTILE, MIXED, MIXED]], ids=str
)
def test_the_text_is_the_incremental_one(kinds):
    """Greedy and sampled rows; after rounds that rested, the draft catches up, many tokens behind or few."""
    warp = [sj.Warp(0.0), sj.Warp(0.0), sj.Warp(1.0), sj.Warp(0.7, 5)]
    result = generate(sizes_of(kinds), warp=warp)
    assert result.tokens == generate(warp=warp).tokens


def test_trees_follow_what_is_accepted():
    """A hopeless draft mostly rests, and is tried again when the record has faded; a perfect one drafts all it can."""
    result = generate(sizes_of([HOSTILE] * 4, seconds=(1.0, 2.0, 3.0)))
    assert used(result) == {0, 1}
    drafted = [item.drafted > 0 for item in result.rounds[0]]
    assert sum(drafted) < len(drafted) / 2
    assert any(drafted[len(drafted) // 2 :])
    assert used(generate(sizes_of([PERFECT] * 4))) == {2}


def test_a_draft_that_was_left_behind_is_as_good_as_one_that_was_not():
    """Rounds forced to rest by their cost, then drafting again: a perfect draft accepts all of its chain at once."""
    drafter = sizes_of([PERFECT] * 4, seconds=[[1.0, 9.0, 9.0]])
    plan = specjax.request.prepare(context(0), PROMPTS, drafts=[drafter], max_new_tokens=60, eos_ids=(), seeds=7)
    state = plan.start()
    for _ in range(23):
        state, info = specjax.decode.run_round(plan.spec, plan.params, state)
        assert np.all(info.drafted == 0)
    cheap = sizes_of([PERFECT] * 4, seconds=[[9.0, 1.0, 9.0]])
    params = plan.params._replace(drafter=cheap.params)
    state, info = specjax.decode.run_round(plan.spec, params, state)
    assert info.drafted.sum(1).tolist() == [2] * 4
    assert info.accepted.tolist() == [2] * 4
    assert np.all(state.drafter.told == state.drafter.lengths - 3)


def test_larger_batches_take_smaller_trees():
    """A round's time as rows cost it: the choice falls from the largest tree at batch 1 to none at 32."""
    batches = (1, 4, 16, 32)
    nodes = np.array([1, 3, 16])
    seconds = [1 + 0.03 * batch * nodes for batch in batches]
    drafter = sizes_of([0], seconds=seconds, batches=batches)
    chosen = []
    for batch in (1, 8, 32):
        state = jax.eval_shape(
            drafter.init, drafter.params, jnp.zeros((batch, 128), jnp.int32), jnp.ones(batch, jnp.int32), None
        )
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
        chosen.append(int(drafter.choose(drafter.params, state, jnp.ones(batch, bool))))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == 2
    assert chosen[-1] < 2


def test_nothing_is_compiled_after_warm_up():
    names = []

    def listen(event: str, duration: float, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    generate(sizes_of([MIXED] * 4))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        seen = set()
        for kinds, seconds in (
            ([HOSTILE] * 4, (1, 2, 3)),
            ([PERFECT] * 4, (1, 1.1, 9)),
            ([PERFECT] * 4, (1, 1, 1)),
        ):
            seen |= used(generate(sizes_of(kinds, seconds), prompts_of([3, 7, 2, 8], seed=3), seeds=3))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seen == {0, 1, 2}
    assert not names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(drafters=[NO_DRAFT]), "at least two sizes"),
        (dict(drafters=[ssm(context(0), TREES[0], "iid"), NO_DRAFT]), "only the first"),
        (
            dict(drafters=[ssm(context(0), TREES[0], law) for law in ("iid", "deterministic")]),
            "one model and proposal law",
        ),
        (dict(expected=[1.0]), "2 numbers of tokens"),
        (dict(seconds=[1.0, 0.0]), "above 0"),
        (dict(seconds=[1.0, 1e-50]), "above 0"),
        (dict(expected=[1.0, 3.5]), "at most"),
        (dict(expected=[1.5, 2.0]), "at most"),
        (dict(batches=(1, 2)), "2 rows"),
        (dict(batches=(), seconds=np.zeros((0, 2))), "one or more"),
        (dict(batches=(2, 1), seconds=np.ones((2, 2))), "ascend"),
        (dict(batches=(0,)), "from at least 1"),
        *((dict(expected=[1.0, value]), "finite") for value in (np.inf, np.nan)),
        *((dict(seconds=[1.0, value]), "finite") for value in (np.inf, np.nan)),
    ],
)
def test_nonsense_is_refused(change, message):
    arguments = dict(drafters=[NO_DRAFT, ssm(context(0), TREES[0], "iid")], expected=[1.0, 2.0], seconds=[1.0, 1.0])
    with pytest.raises(ValueError, match=message):
        adaptive(**arguments | change)
    with pytest.raises(ValueError, match="stands alone"):
        ensemble([adaptive(**arguments)])
