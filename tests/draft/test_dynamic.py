"""Trees whose shape is decided on the way, against trees made one draw at a time in plain Python."""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.draft import ensemble, expand_and_rerank, grow, prompt_lookup
from specjax.draft.dynamic import Size
from specjax.laws import grown
from specjax.sampling import stack_warps
from specjax.testing import table_model
from specjax.tree import check_tree
from specjax.types import Emission, Model
from specjax.verify import VERIFIERS
from specjax.verify.joint import path_law, walk_law
from specjax.verify.paths import PATH_RULES
from specjax.verify.rules import RULES
from tests.helpers import (
    VOCAB,
    chi_square_z,
    context,
    logits_after,
    prompts_of,
    round_keys,
    row_kinds,
    slot_paths,
    softmax,
)

SIZE = Size(width=3, depth=3, nodes=9)
WARPS = [sj.Warp(1.0), sj.Warp(0.5), sj.Warp(1.0, 3), sj.Warp(0.8, 0, 0.9)]
EXACT, BIASED = 1e-12, 1e-3

Path = tuple[int, ...]
Laws = Callable[[Path], np.ndarray]  # a path -> the law [V] of the next token


# References: one draw, or one level, at a time


class Growth(NamedTuple):
    """A tree in the making: each expanded node's draws in their order."""

    draws: dict[Path, tuple[int, ...]]

    @property
    def nodes(self) -> list[Path]:
        """In the order in which they were made, the root first."""
        return list(dict.fromkeys([(), *((*path, token) for path, drawn in self.draws.items() for token in drawn)]))

    def add(self, path: Path, token: int) -> "Growth":
        return Growth({**self.draws, path: (*self.draws.get(path, ()), token)})


def confidence(q: Laws, path: Path) -> float:
    return float(np.prod([q(path[:depth])[token] for depth, token in enumerate(path)]))


def next_draw(q: Laws, size: Size, tree: Growth, *, by_token: bool = False) -> Path | None:
    """The node whose next draw verification is likeliest to come to."""
    best, chosen = 0.0, None
    if len(tree.nodes) > size.nodes:
        return None
    for path in tree.nodes:
        drawn = tree.draws.get(path, ())
        expanded = sum(len(other) == len(path) for other in tree.draws)
        if len(path) == size.depth or len(drawn) == size.width or (not drawn and expanded == size.width):
            continue
        left = 1 - sum(q(path)[token] for token in set(drawn))
        chance = confidence(q, path) * left
        if left > 1e-6 and chance > best:
            best, chosen = chance, path
    return chosen


def unseen(q: np.ndarray, drawn: tuple[int, ...], law: str) -> np.ndarray:
    """The law of a node's next draw."""
    if law == "iid":
        return q
    rest = np.where(np.isin(np.arange(len(q)), drawn), 0, q)
    return rest / rest.sum()


def every_growth(q: Laws, size: Size, law: str, tree: Growth | None = None) -> Iterator[tuple[Growth, float]]:
    """Every tree that can grow, with its probability."""
    tree = Growth({}) if tree is None else tree
    path = next_draw(q, size, tree)
    if path is None:
        yield tree, 1.0
        return
    for token, chance in enumerate(unseen(q(path), tree.draws.get(path, ()), law)):
        if chance > 0:
            yield from ((whole, chance * rest) for whole, rest in every_growth(q, size, law, tree.add(path, token)))


def reranked(q: Laws, size: Size) -> dict[Path, list[int]]:
    """EAGLE-2's tree: the draws of each node that has any."""
    beam, seen = [()], []
    for _ in range(size.depth):
        children = [(*path, int(token)) for path in beam for token in np.argsort(-q(path), kind="stable")[: size.width]]
        children = [path for path in children if q(path[:-1])[path[-1]] > 0]
        children.sort(key=lambda path: -confidence(q, path))
        seen, beam = seen + children, children[: size.width]
    kept = sorted(seen, key=lambda path: -confidence(q, path))[: size.nodes]
    found: dict[Path, list[int]] = {}
    for path in kept:
        found.setdefault(path[:-1], []).append(path[-1])
    return found


# What is drafted


def row_of(trees: sj.TokenTree, row: int) -> sj.TokenTree:
    return jax.tree.map(lambda field: np.asarray(field)[row], trees)


def draws_of(tree: sj.TokenTree) -> dict[Path, tuple[int, ...]]:
    """The draws of each node that has any, in slot order; checks that distinct draws are the nodes."""
    check_tree(tree)
    slots = slot_paths(tree.parents, tree.valid)
    paths = {slot: tuple(int(tree.tokens[at]) for at in path) for slot, path in slots.items()}
    found = {paths[slot]: tuple(tree.draw_tokens[slot][tree.draw_valid[slot]].tolist()) for slot in paths}
    assert len(set(paths.values())) == len(paths)
    assert set(paths.values()) == {(), *((*path, token) for path, drawn in found.items() for token in drawn)}
    for slot, path in paths.items():
        assert (tree.q_rows[slot, 0] >= 0) == bool(found[path])
    assert not np.any(tree.draw_valid[~tree.valid])
    return {path: drawn for path, drawn in found.items() if drawn}


def check_shape(tree: sj.TokenTree, q: Laws, size: Size, law: str):
    """The tree of one row has exactly the draws that one-at-a-time growth, or reranking, would make."""
    found = draws_of(tree)
    if law == "deterministic":
        assert found == {path: tuple(tokens) for path, tokens in reranked(q, size).items()}
        return
    made = Growth({})
    while (path := next_draw(q, size, made)) is not None:
        place = len(made.draws.get(path, ()))
        assert place < len(found.get(path, ())), f"draw {place} behind {path} is missing"
        made = made.add(path, found[path][place])
    assert found == made.draws


def build(model: Model, law: str, size: Size = SIZE) -> sj.Drafter:
    return (expand_and_rerank if law == "deterministic" else grow)(*size)(model, law)


def warped(logits: np.ndarray, warp: sj.Warp) -> np.ndarray:
    q = softmax(logits / warp.temperature)
    order = np.argsort(-q, kind="stable")
    q[order[warp.top_k or len(q) :]] = 0
    q /= q.sum()
    q[order[np.cumsum(q[order]) - q[order] >= warp.top_p - 1e-6 * (warp.top_p == 1)]] = 0
    return q / q.sum()


@pytest.mark.parametrize("law", ["deterministic", "without_replacement", "iid"])
def test_trees_equal_those_made_one_draw_at_a_time_round_after_round(law):
    """B01, B03, B24: every q is that of a fresh pass without a cache, for three rounds of ragged commits."""
    model, batch = context(0), len(WARPS)
    texts = prompts_of([5, 9, 12, 1])
    drafter = build(model, law)
    tokens = np.zeros((batch, 128), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    init, propose = jax.jit(drafter.init), jax.jit(drafter.propose)
    state = init(drafter.params, tokens, jnp.array([len(text) for text in texts]), None)
    rng, width, sizes = np.random.default_rng(1), drafter.max_depth + 1, set()
    emitted = [[int(rng.integers(VOCAB))] for _ in range(batch)]
    for number in range(3):
        counts = np.array([len(own) for own in emitted])
        padded = jnp.asarray([own + [7] * (width - len(own)) for own in emitted])
        emission = Emission(padded, jnp.asarray(counts), jnp.zeros((batch, width), jnp.int32))
        state = drafter.commit(drafter.params, state, emission, None)
        texts = [text + own for text, own in zip(texts, emitted)]
        keys = round_keys(range(batch), [len(text) for text in texts])
        roots = jnp.array([text[-1] for text in texts])
        trees, state = propose(drafter.params, keys, state, roots, stack_warps(WARPS))
        emitted = []
        for row in range(batch):
            tree = row_of(trees, row)
            assert tree.tokens[0] == texts[row][-1]
            slots = slot_paths(tree.parents, tree.valid)
            if counts[row]:
                given = {}
                for slot, path in slots.items():
                    after = [int(tree.tokens[at]) for at in path]
                    given[tuple(after)] = tree.q[tree.q_rows[slot, 0]].astype(float)
                    if tree.q_rows[slot, 0] >= 0:
                        fresh = warped(logits_after(model, texts[row] + after), WARPS[row])
                        np.testing.assert_allclose(given[tuple(after)], fresh, atol=2e-5)
                    else:  # its draws, had it any, would be known
                        given[tuple(after)] = warped(logits_after(model, texts[row] + after), WARPS[row])
                check_shape(tree, with_fresh(given, model, texts[row], WARPS[row]), SIZE, law)
                sizes.add(len(slots) - 1)
            path = list(slots.values())[rng.integers(len(slots))]
            emitted.append([int(tree.tokens[at]) for at in path] + [int(rng.integers(VOCAB))])
        if number == 1:
            emitted[0] = []  # as a row that has finished
    assert max(sizes) == SIZE.nodes


def with_fresh(given: dict[Path, np.ndarray], model: Model, text: list[int], warp: sj.Warp) -> Laws:
    """The tree's own q where it has one, else that of a fresh pass (of nodes that were reranked away)."""

    def q(path: Path) -> np.ndarray:
        if path not in given:
            given[path] = warped(logits_after(model, text + list(path)), warp)
        return given[path]

    return q


SMALL = Size(width=2, depth=2, nodes=3)
PAIRS = {
    "without_replacement": {"naive_sampling", "naive_tree", "without_replacement", "traversal"},
    "iid": {"naive_sampling", "naive_tree", "without_replacement", "multi_step", "traversal"},
}


def chi_square(found: dict[Any, int], wanted: dict[Any, float]):
    """The counts are those of the probabilities, up to five standard deviations."""
    assert found.keys() <= wanted.keys() and len(wanted) > 11
    assert chi_square_z(np.array([found.get(key, 0) for key in wanted]), np.array([*wanted.values()])) < 5


@pytest.mark.parametrize("law", PAIRS)
def test_trees_and_texts_are_as_frequent_as_their_laws_say(law):
    """4096 seeds: trees follow the enumeration, and what each exact verifier makes of them follows the target."""
    p, q = np.random.default_rng(2).dirichlet([1.0] * 3, (2, 3))
    trees_wanted = {
        frozenset(tree.draws.items()): chance
        for tree, chance in every_growth(lambda path: q[path[-1] if path else 0], SMALL, law)
    }
    assert abs(sum(trees_wanted.values()) - 1) < 1e-12
    batch = 4096
    drafter = build(table_model(np.log(q)), law, SMALL)
    state = drafter.init(drafter.params, jnp.zeros((batch, 128), jnp.int32), jnp.ones(batch, jnp.int32), None)
    emission = Emission(jnp.zeros((batch, 3), jnp.int32), jnp.ones(batch, jnp.int32), jnp.zeros((batch, 3), jnp.int32))
    state = drafter.commit(drafter.params, state, emission, None)
    keys, warp = round_keys(range(batch), [2] * batch), stack_warps([sj.Warp()] * batch)
    trees, _ = jax.jit(drafter.propose)(drafter.params, keys, state, jnp.zeros(batch, jnp.int32), warp)
    rows = jax.tree.map(np.asarray, trees)
    chi_square(
        collections.Counter(frozenset(draws_of(row_of(rows, row)).items()) for row in range(batch)), trees_wanted
    )

    texts_wanted = {(a, b, c): p[0, a] * p[a, b] * p[b, c] for a, b, c in np.ndindex(3, 3, 3)}
    rng, logits = np.random.default_rng(4), jnp.log(jnp.asarray(p, jnp.float32))[trees.tokens]
    for name in sorted(PAIRS[law] & RULES.keys()):
        acceptance = jax.jit(VERIFIERS[name].verify)(keys, trees, logits, warp)
        counts, emitted = np.asarray(acceptance.num_accepted) + 1, np.asarray(acceptance.tokens)
        assert set(counts) == {1, 2, 3}
        texts = [emitted[row, : counts[row]].tolist() for row in range(batch)]
        for text in texts:  # the target goes on where a path ended early
            while len(text) < 3:
                text.append(int(rng.choice(3, p=p[text[-1]])))
        chi_square(collections.Counter(map(tuple, texts)), texts_wanted)


# Exactness, by summing every tree


class Problem(NamedTuple):
    """Random laws of a target and of drafts after every path, which share nothing."""

    target: Laws
    drafts: list[Laws]


def problem(seed: int, sources: int, vocab_size: int, depth: int) -> Problem:
    rng = np.random.default_rng(seed)

    def laws(levels: int) -> Laws:
        tables = [rng.dirichlet([0.6] * vocab_size, (vocab_size,) * level) for level in range(levels)]
        return lambda path: tables[len(path)][path]

    return Problem(laws(depth + 1), [laws(depth) for _ in range(sources)])


class Forest(NamedTuple):
    """Every tree of a problem, merged where there are several sources, as the library's arrays."""

    trees: sj.TokenTree
    logits: np.ndarray  # [T, N, V] the target's
    probs: np.ndarray  # [T]
    paths: list[list[Path]]  # of each tree's slots
    problem: Problem


def forest(given: Problem, options: list[list[tuple[Growth, float]]], size: Size, law: str) -> Forest:
    """Trees of the product of the sources' options."""
    sources, vocab_size = len(options), len(given.target(()))
    count = 1 + sources * size.nodes
    fields: dict[str, list] = {
        name: [] for name in ("tokens", "parents", "depths", "valid", "draws", "exist", "q", "p")
    }
    probs, paths = [], []
    for picks in np.ndindex(*map(len, options)):
        picked = [option[pick] for option, pick in zip(options, picks)]
        probs.append(np.prod([chance for _, chance in picked]))
        nodes = list(dict.fromkeys(path for tree, _ in picked for path in tree.nodes))
        nodes = sorted(nodes, key=lambda path: [nodes.index(path[: at + 1]) for at in range(len(path))])  # depth first
        paths.append(nodes)
        tokens, parents, depths = np.zeros(count, int), np.full(count, -1), np.zeros(count, int)
        draws, exist = np.zeros((count, sources * size.width), int), np.zeros((count, sources * size.width), bool)
        q, p = np.full((count, sources, vocab_size), 1 / vocab_size), np.full((count, vocab_size), 1 / vocab_size)
        for slot, path in enumerate(nodes):
            p[slot] = given.target(path)
            if path:
                tokens[slot], parents[slot], depths[slot] = path[-1], nodes.index(path[:-1]), len(path)
            for source, (tree, _) in enumerate(picked):
                drawn = tree.draws.get(path, ())
                where = slice(source * size.width, source * size.width + len(drawn))
                draws[slot, where], exist[slot, where] = drawn, True
                if drawn:
                    q[slot, source] = given.drafts[source](path)
        for name, value in zip(fields, (tokens, parents, depths, np.arange(count) < len(nodes), draws, exist, q, p)):
            fields[name].append(value)
    stacked = {name: np.stack(value) for name, value in fields.items()}
    stacked = {name: field.astype(np.int32) if field.dtype.kind == "i" else field for name, field in stacked.items()}
    total = len(probs)
    spread = lambda field: np.broadcast_to(np.asarray(field, np.int32), (total, *np.shape(field)))
    trees = sj.TokenTree(
        tokens=stacked["tokens"],
        parents=stacked["parents"],
        depths=stacked["depths"],
        valid=stacked["valid"],
        draw_tokens=stacked["draws"],
        draw_valid=stacked["exist"],
        draw_source=spread(np.repeat(np.arange(sources), size.width)),
        q=stacked["q"].reshape(total, count * sources, vocab_size),
        q_rows=spread(np.arange(count * sources).reshape(count, sources)),
        laws=(grown(law),) * sources,
        max_depth=size.depth,
    )
    return Forest(trees, np.log(stacked["p"]), np.array(probs), paths, given)


@functools.cache
def ends_of(name: str) -> Callable:
    if name in PATH_RULES:
        return jax.jit(functools.partial(path_law, PATH_RULES[name].rule))
    return jax.jit(functools.partial(walk_law, RULES[name].rule))


def bias(name: str, given: Forest) -> float:
    """Total variation between the text that a verifier makes of these trees and the target's, of depth + 1 tokens."""
    with jax.enable_x64(True):
        ends = np.asarray(ends_of(name)(given.trees, given.logits))
    target, depth, vocab_size = given.problem.target, given.trees.max_depth, given.logits.shape[-1]

    def rest(path: Path) -> np.ndarray:
        """The law of what the target adds to a path to make it depth + 1 tokens."""
        if len(path) == depth + 1:
            return np.ones(())
        return np.stack([target(path)[token] * rest((*path, token)) for token in range(vocab_size)])

    after = functools.cache(rest)
    text = np.zeros((vocab_size,) * (depth + 1))
    for tree, chance in enumerate(given.probs):
        for slot, path in enumerate(given.paths[tree]):
            for token in range(vocab_size):
                beyond = (*path, token)
                text[beyond] += chance * ends[tree, slot, token] * after(beyond)
    return float(np.abs(text - after(())).sum() / 2)


@functools.cache
def forests(law: str, sources: int) -> list[Forest]:
    size = SMALL if sources == 1 else Size(width=2, depth=2, nodes=2)
    problems = [problem(seed, sources, 3, size.depth) for seed in range(12 if sources == 1 else 2)]
    return [
        forest(given, [list(every_growth(draft, size, law)) for draft in given.drafts], size, law) for given in problems
    ]


@pytest.mark.parametrize("law", PAIRS)
@pytest.mark.parametrize("sources", [1, 2])
def test_verifiers_are_exact_for_grown_trees_where_they_say_so(law, sources):
    """Summed over every tree and outcome, float64: the law of the text is the target's."""
    key = grown(law) + " x sources" * (sources > 1)
    rules = {**RULES, **PATH_RULES}
    assert {name for name, rule in rules.items() if rule.exact_for is None or key in rule.exact_for} == PAIRS[law]
    for name in sorted(PAIRS[law]):
        assert max(bias(name, given) for given in forests(law, sources)) <= EXACT, name


@pytest.mark.parametrize(
    ("law", "name"),
    [
        ("iid", "spectr"),
        ("iid", "khisti"),
        ("iid", "multi_path_block"),
        ("without_replacement", "top_k_plus_one"),
        ("without_replacement", "hub"),
    ],
)
def test_verifiers_that_are_exact_for_a_fixed_number_of_draws_are_not_for_grown_trees(law, name):
    exact_for = {**RULES, **PATH_RULES}[name].exact_for
    assert exact_for is not None and law in exact_for and grown(law) not in exact_for
    assert max(bias(name, given) for given in forests(law, 1)) > BIASED


def test_keeping_draws_by_their_own_tokens_would_be_biased():
    """The sum can fail: the likeliest of two draws alone, instead of the first."""
    size = Size(width=2, depth=1, nodes=2)
    given = problem(0, 1, 3, 1)
    every = list(every_growth(given.drafts[0], size, "without_replacement"))
    q = given.drafts[0](())
    kept = [(Growth({(): (max(tree.draws[()], key=lambda token: q[token]),)}), chance) for tree, chance in every]
    assert bias("without_replacement", forest(given, [every], size, "without_replacement")) <= EXACT
    assert bias("without_replacement", forest(given, [kept], size, "without_replacement")) > 0.05


# Texts


METHODS = [
    ("expand_and_rerank", "top_k", "naive_sampling"),
    ("grow", "shared_gumbel", "naive_sampling"),
    ("grow", "without_replacement", "without_replacement"),
    ("grow", "iid", "multi_step"),
]


@pytest.mark.parametrize(("name", "mode", "verifier"), METHODS)
def test_text_is_that_of_incremental_decoding_and_compiles_once(name, mode, verifier):
    """B05, B24, B39: perfect, hostile and mixed rows; greedy for every verifier, sampled for naive sampling."""
    prompts, sampled = prompts_of([5, 9, 12, 1]), verifier == "naive_sampling"
    options = dict(warp=[sj.Warp(0.0), sj.Warp(0.0), sj.Warp(0.7 * sampled), sj.Warp()], seeds=[1, 2, 3, 4], eos_ids=())
    plain = sj.generate(context(0), prompts, max_new_tokens=40, **options)
    target, traced = counting(context(0))
    times: list[int] = []
    tree = {"expand_and_rerank": expand_and_rerank, "grow": grow}[name](*SIZE)
    for kinds in ([0, 1, 2, 2], [2, 0, 0, 0]):
        draft = row_kinds(context(0), kinds)
        result = sj.generate(
            target, prompts, drafts=[draft], tree=tree, draft_mode=mode, verifier=verifier, max_new_tokens=40, **options
        )
        same = 4 if sampled else 3
        assert result.tokens[:same] == plain.tokens[:same]
        for row, kind in enumerate(kinds[:same]):
            drafted = [item.drafted for item in result.rounds[row]]
            assert max(drafted) == SIZE.nodes if mode != "iid" else 1 < max(drafted) <= SIZE.nodes
            if kind == 1 and mode == "top_k":
                assert all(item.accepted == 0 for item in result.rounds[row])
        times.append(len(traced))
    assert times[0] == times[1] > 0
    assert result.stats.tokens_per_step > 1.5


def counting(model: Model) -> tuple[Model, list[int]]:
    """The model, and a list that grows by one with each tracing of its forward."""
    traced: list[int] = []

    def forward(*args, **options):
        traced.append(1)
        return model.forward(*args, **options)

    return model._replace(forward=forward), traced


def test_sources_of_all_kinds_merge():
    """An SSM's grown tree, another's that is reranked and a lookup, in one tree; greedy and sampled."""
    parts = [
        build(context(0), "without_replacement", SMALL),
        build(context(1), "deterministic", SMALL),
        prompt_lookup(VOCAB, branches=2, length=3, min_match=1),
    ]
    drafter = ensemble(parts)
    assert drafter.laws == ("grown without_replacement", "deterministic", "deterministic")
    assert (drafter.max_depth, drafter.vocab_size) == (3, VOCAB)
    prompts, warps = prompts_of([5, 9, 12, 1]), [sj.Warp(0.0), sj.Warp(0.0), sj.Warp(0.7), sj.Warp()]
    options = dict(warp=warps, seeds=[1, 2, 3, 4], eos_ids=(), max_new_tokens=40)
    plain, result = (sj.generate(context(0), prompts, drafts=drafts, **options) for drafts in ((), [drafter]))
    assert result.tokens == plain.tokens
    assert max(item.drafted for row in result.rounds for item in row) > SMALL.nodes + 3  # more than any has alone


# Refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grow(0, 2, 2), "grow: width is 0; expected an integer >= 1"),
        (lambda: grow(2, True, 2), "grow: depth is True"),
        (lambda: expand_and_rerank(2, 2, 0), "expand_and_rerank: nodes is 0"),
        (lambda: expand_and_rerank(2, 3, 11), "11 nodes are more than the 10 that a width of 2 and a depth of 3"),
        (lambda: grow(1000, 9, 4096), "4096 nodes and the root; trees have at most 4096"),
        (lambda: grow(17, 2, 2)(context(0), "iid"), "a width of 17 is more than the vocabulary's 16"),
        (
            lambda: grow(2, 2, 2)(context(0), "deterministic"),
            "grow does not take deterministic draws; expected draft_mode",
        ),
        (lambda: grow(2, 2, 2)(context(0), "hub"), "grow does not take hub draws"),
        (lambda: expand_and_rerank(2, 2, 2)(context(0), "iid"), "expand_and_rerank does not take iid draws"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_verifier_that_would_be_biased_is_refused_with_those_that_are_not():
    with pytest.raises(
        ValueError, match="for grown iid draws; exact for them: multi_step, naive_sampling, naive_tree, tr"
    ):
        sj.generate(context(0), [[1]], drafts=[context(0)], tree=grow(*SIZE), draft_mode="iid", verifier="spectr")
