"""Every verifier in the real loop, with every draft mode it allows: laws of what it emits, and greedy rows beside."""

import functools

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.request import DRAFT_MODES, prepare
from specjax.sampling import Warp
from specjax.testing import table_model
from specjax.verify import PATH_RULES, VERIFIERS
from specjax.verify.joint import enumerate_trees, node_logits, path_law, walk_law
from specjax.verify.measure import for_laws
from tests.helpers import chi_square_z

V, ROWS, GREEDY, BUDGET = 3, 8000, 400, 7
P = np.array([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6], [0.25, 0.4, 0.35]])
Q = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.6, 0.3, 0.1]])
PAIRS = [
    (name, mode)
    for name, verifier in VERIFIERS.items()
    for mode, law in DRAFT_MODES.items()
    if verifier.exact_for is None or law in verifier.exact_for or (verifier.lossy and mode == "iid")
]
# Through the loop go all but these: block takes one draw a node, which all its modes draw alike, and the optimum is
# solved for each law by the same lines.
LOOPED = [pair for pair in PAIRS if pair[0] not in ("block", "optimal") or pair[1] in ("iid", "top_k")]
# A draft mode for each verifier whose emissions are tested against their law: the one it was made for.
OWN = dict.fromkeys(VERIFIERS, "iid") | {
    "naive_tree": "without_replacement",
    "without_replacement": "without_replacement",
    "top_k_plus_one": "top_k_plus_one",
    "hub": "hub",
    "optimal": "top_k",
    "traversal": "without_replacement",
}


def schedule(verifier: str) -> tuple[int, ...]:
    return (1, 1) if verifier == "block" else (2, 2)


def plan_of(verifier: str, **options):
    """Rows of one prompt, seeds 0, 1, ..; the last ones greedy."""
    return prepare(
        table_model(np.log(P)),
        [[0]] * ROWS,
        verifier=verifier,
        warp=[Warp(1.0)] * (ROWS - GREEDY) + [Warp(0.0)] * GREEDY,
        max_new_tokens=BUDGET,
        seeds=range(ROWS),
        allow_lossy=True,
        **options,
    )


def run(plan) -> tuple[np.ndarray, np.ndarray]:
    """The texts [ROWS, BUDGET] and how many drafted tokens their first round accepted [ROWS]."""
    state = decode.run_decode(plan.spec, plan.params, plan.start())
    return np.asarray(state.tokens)[:, 1 : 1 + BUDGET], np.asarray(state.rounds.accepted)[:, 1]


@functools.cache
def texts(verifier: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    draft = table_model(np.log(Q))
    return run(plan_of(verifier, drafts=[draft], tree=schedule(verifier), draft_mode=mode))


@functools.cache
def incremental() -> np.ndarray:
    return run(plan_of("naive_sampling"))[0]


@pytest.mark.parametrize(("verifier", "mode"), LOOPED)
def test_greedy_rows_emit_the_argmax(verifier, mode):
    """B05: temperature 0 beside temperature 1. Over every law and tree, test_rules and test_paths sum the same."""
    want = [int(np.argmax(P[0]))]
    while len(want) < BUDGET:
        want.append(int(np.argmax(P[want[-1]])))
    tokens, _ = texts(verifier, mode)
    np.testing.assert_array_equal(tokens[-GREEDY:], np.tile(want, (GREEDY, 1)))


def test_every_other_pair_is_refused_at_any_temperature():
    """Temperature is data, so a pair that would bias other rows is refused for greedy ones too."""
    others = [(name, mode) for name in VERIFIERS for mode in DRAFT_MODES if (name, mode) not in PAIRS]
    assert len(others) > len(VERIFIERS)
    for name, mode in others:
        options = dict(drafts=[table_model(np.log(Q))], tree=schedule(name), draft_mode=mode, warp=Warp(0.0))
        with pytest.raises(ValueError, match="pass allow_lossy=True|would bias the text .*naive_sampling"):
            prepare(table_model(np.log(P)), [[0]], verifier=name, max_new_tokens=BUDGET, **options)


@pytest.mark.parametrize("mode", DRAFT_MODES)
def test_naive_sampling_emits_the_incremental_text_in_every_draft_mode(mode):
    tokens, accepted = texts("naive_sampling", mode)
    np.testing.assert_array_equal(tokens, incremental())
    assert set(accepted) == {0, 1, 2}


def first_round_law(verifier: str, mode: str) -> list[np.ndarray]:
    """Entry n, [V] * (n + 2): the law of (root, n accepted tokens, next token), summed over every tree."""
    law, levels = DRAFT_MODES[mode], [[draws] for draws in schedule(verifier)]
    after = lambda table, count: [table, *[np.broadcast_to(table, (V,) * (n + 2)) for n in range(1, count)]]
    forest, target = enumerate_trees([after(Q, 2)], (law,), levels), after(P, 3)  # a problem for each root
    by_path = functools.partial(path_law, PATH_RULES[verifier].rule) if verifier in PATH_RULES else None
    ends = jax.jit(by_path or functools.partial(walk_law, for_laws(verifier, (law,))))
    mass = np.asarray(ends(forest.trees, node_logits(forest, target)))
    mass = mass * (P[0][forest.problems] * forest.probs)[:, None, None]
    laws = [np.zeros((V,) * (n + 2)) for n in range(3)]
    parents = forest.trees.parents[0]
    for node, depth in enumerate(np.asarray(forest.trees.depths[0]).tolist()):
        path, at = [], node
        while at:
            path.append(forest.trees.tokens[:, at])
            at = parents[at]
        np.add.at(laws[depth], (forest.problems, *path[::-1]), mass[:, node])
    return laws


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_accepted_tokens_corrections_and_bonus_tokens_follow_their_laws(verifier):
    """The first round of 7600 seeds against the sum over every tree, each class on its own."""
    law = first_round_law(verifier, OWN[verifier])
    tokens, accepted = (field[: ROWS - GREEDY] for field in texts(verifier, OWN[verifier]))
    assert abs(sum(part.sum() for part in law) - 1) < 1e-5
    seen = [np.zeros_like(part) for part in law]
    for n in range(3):
        np.add.at(seen[n], tuple(tokens[accepted == n, : n + 2].T), 1)
    flat = lambda parts: np.concatenate([part.ravel() for part in parts])
    classes = {
        "accepted": [(part[1].sum(-1), part[2].sum(-1)) for part in (seen, law)],
        "correction": [part[:2] for part in (seen, law)],
        "bonus": [part[2:] for part in (seen, law)],
        "how many": [[part.sum() for part in parts] for parts in (seen, law)],
    }
    for name, (counts, wanted) in classes.items():
        if VERIFIERS[verifier].lossy and not flat(wanted).any():
            assert not flat(counts).any()
            continue
        assert chi_square_z(flat(counts), flat(wanted)) < 5, name
        assert np.sum(flat(counts)) > 300, name
