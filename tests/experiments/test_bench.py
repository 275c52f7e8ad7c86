"""The benchmark's arithmetic, on times that are given and methods that are small."""

import numpy as np
import pytest

import specjax as sj
from experiments.bench import Bar, Measured, minus, over
from experiments.bench_pair import Method, Pair
from experiments.timing import Spread, samples
from specjax.request import prepare
from specjax.testing import context_model


def test_ratios_are_of_samples_of_one_turn():
    """A busy turn slows both sides, and says nothing."""
    assert over([2, 20, 2], [1, 10, 1]) == Spread(2, 2, 2)
    assert minus([3, 30], [1, 10]) == [2, 20]
    assert Spread.of([4, 1, 2, 3, 5]) == Spread(3, 2, 4)
    assert Spread(1, 0.5, 2).text() == "1.00 (0.50-2.00)"


def test_calls_take_turns_and_the_first_does_not_count():
    order = []

    def call(name):
        order.append(name)
        return len(order)

    assert samples({name: lambda name=name: call(name) for name in "ab"}, 2) == {"a": [3, 5], "b": [4, 6]}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("bar", "met", "bound"),
    [
        (Bar("x", 1.0, most=1.05), True, "<= 1.05"),
        (Bar("x", 1.06, most=1.05), False, "<= 1.05"),
        (Bar("x", 1.2, least=1.2), True, ">= 1.2"),
        (Bar("x", float("nan"), least=1.2), False, ">= 1.2"),
        (Bar("x", 1, most=0), False, "<= 0"),
    ],
)
def test_bars_say_what_they_ask_and_whether_it_is_met(bar, met, bound):
    assert bar.met == met
    assert bar.text().startswith("bar met" if met else "bar MISSED")
    assert bar.text().endswith(bound)


def test_a_methods_tokens_and_rounds_are_those_of_its_texts():
    target = context_model(3, 16)
    prompts = [[1, 2], [3]]

    def method(**options):
        return Method(
            "m", "", [prepare(target, [prompt], max_new_tokens=9, eos_ids=(), **options) for prompt in prompts]
        )

    plain, tree = method(), method(drafts=[target], tree=(1, 1, 1))
    texts, emitted, rounds = plain.outcome
    assert texts == sj.generate(target, prompts, max_new_tokens=9, eos_ids=()).tokens
    assert (emitted, rounds) == (16, 16)  # the first of each text is prefill's
    assert tree.outcome == (texts, 16, 4)  # a perfect draft: four tokens a round
    pair = Pair.__new__(Pair)
    pair.methods = {"plain": plain, "tree": tree}
    measured = Measured(pair, {("method", "plain"): [1.6, 3.2], ("method", "tree"): [0.8, 1.6]})
    np.testing.assert_allclose(measured.token("plain"), [0.1, 0.2])
    np.testing.assert_allclose(measured.round("tree"), [0.2, 0.4])
    assert over(measured.token("plain"), measured.token("tree")).median == 2
    assert tree.seconds() > 0
