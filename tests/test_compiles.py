"""How often anything is compiled: once per documented bucket, and never for other data."""

import jax
import numpy as np
import pytest

import specjax as sj
from specjax.request import prepare
from specjax.testing import context_model
from specjax.types import Model
from tests.helpers import BOUNDS, context, prompts_of, row_kinds, tight_topology

# Everything the quickstart drafts.
SCHEDULES = [(1, 1, 1, 1), (1, 1, 3, 1, 1, 1, 1, 1), (2, 1, 1, 1), (3, 2, 1, 1)]


@pytest.fixture
def compiled():
    """Names of what the backend compiled since the list was last cleared; eager operations are in it too."""
    names = []

    def listen(event: str, duration: float, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def counting(model: Model) -> tuple[Model, list[int]]:
    """The model, and a list that grows by one with each tracing of its forward."""
    traced = []

    def forward(*args, **options):
        traced.append(1)
        return model.forward(*args, **options)

    return model._replace(forward=forward), traced


def test_other_prompts_counts_seeds_stops_warps_and_budgets_compile_nothing(compiled):
    """B39: 16 prompts of 5..20 tokens with mixed accept counts, after one warm-up call."""
    target, traced = counting(context_model(7, 16))
    prompts = prompts_of(range(5, 21))
    rng = np.random.default_rng(0)

    def call(batch, seed, **options):
        draft = row_kinds(target, rng.integers(0, 3, 4))
        topology = tight_topology((3, 2, 1, 1)).pad(BOUNDS)
        return sj.generate(target, batch, drafts=[draft], tree=topology, seeds=seed, **options)

    call(prompts[:4], None, max_new_tokens=5)
    assert traced
    assert compiled
    traced.clear()
    compiled.clear()
    accepted = set()
    for at in range(0, 16, 4):
        batch = prompts[at : at + 4]
        for seed, options in [
            (None, dict()),
            (3, dict(eos_ids=[5])),
            ([1, None, 2, 3], dict(eos_ids=(), max_new_tokens=[1, 7, 30, 0])),
            (None, dict(eos_ids=[1, 2, 3], warp=sj.Warp(0.7, 5, 0.9), max_new_tokens=20)),
            (
                1,
                dict(warp=[sj.Warp(0.0), sj.Warp(1.0), sj.Warp(0.3, 2), sj.Warp(1.0, 0, 0.5)], draft_warp=sj.Warp(2.0)),
            ),
        ]:
            result = call(batch, seed, **options)
            accepted |= {item.accepted for row in result.rounds for item in row}
    assert accepted == {0, 1, 2, 3, 4}
    assert not traced
    assert not compiled


def test_a_sweep_over_schedules_compiles_the_round_once(compiled):
    """B39: topologies are data: the quickstart's schedules padded to common bounds, and the lone root among them."""
    target, traced = counting(context_model(8, 16))
    topologies = [sj.Topology.from_schedule(schedule) for schedule in SCHEDULES]
    shape = sj.common_shape(topologies)
    texts = []
    for topology in (*topologies, sj.Topology.chain(0)):
        if len(texts) == 1:
            traced.clear()
            compiled.clear()
        result = sj.generate(target, [[1, 2]], drafts=[target], tree=topology.pad(shape), max_new_tokens=30, eos_ids=())
        texts.append(result.tokens)
        assert max(item.accepted for item in result.rounds[0]) == topology.shape.depth
    assert not traced
    assert not compiled
    assert all(text == texts[0] for text in texts)


def test_capacities_come_in_the_documented_buckets(compiled):
    """B39: prompt + budget up to 128 is one bucket, up to 256 the next, then 512; another batch size compiles, too."""
    target, traced = counting(context_model(9, 16))
    for prompt, budget, news in [
        (5, 10, True),
        (100, 28, False),
        (1, 127, False),
        (100, 29, True),
        (200, 56, False),
        (200, 57, True),
        (5, 500, False),
        (300, 1, False),
        (127, 1, False),
    ]:
        traced.clear()
        compiled.clear()
        sj.generate(target, prompts_of([prompt]), max_new_tokens=budget)
        assert bool(traced) == news, (prompt, budget)
        assert bool(compiled) == news, (prompt, budget)
    traced.clear()
    sj.generate(target, prompts_of([5, 6]), max_new_tokens=10)
    assert traced


def test_one_prefill_of_a_target_serves_all_trees_and_verifiers():
    """What comes after the prompt does not change how it is read."""
    target, traced = counting(context_model(13, 16))
    ways = [
        dict(),
        dict(drafts=[context(1)], tree=(2, 1)),
        dict(drafts=[context(1)], tree=(3, 2, 1), draft_mode="iid", verifier="multi_step"),
    ]
    for way in ways:
        prepare(target, prompts_of([3]), max_new_tokens=4, **way).start()
        assert bool(traced) == (way == {}), way
        traced.clear()


def test_models_of_one_architecture_share_compiled_code(compiled):
    target, traced = counting(context_model(10, 16))
    prompts = prompts_of([3])
    first = sj.generate(target, prompts, max_new_tokens=8)
    traced.clear()
    compiled.clear()
    second = sj.generate(target._replace(params=context(5).params), prompts, max_new_tokens=8)
    assert not traced
    assert not compiled
    assert first.tokens != second.tokens
