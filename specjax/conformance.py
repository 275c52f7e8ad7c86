"""Proofs for contributed parts: a drafter keeps the promises exactness rests on, a verifier is exact for its laws."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, exact
from specjax.draft.none import NO_DRAFT
from specjax.laws import LAWS
from specjax.request import prepare
from specjax.sampling import Streams, Warp, fold_in
from specjax.tree import TokenTree, check_tree
from specjax.types import Drafter, Model, NodeRule, RoundKeys

ROWS = 16
_WARPS = (Warp(1.0), Warp(0.5), Warp(1.0, 3), Warp(0.8, 0, 0.9))  # draft warps, in turn
_BINS, _PAIR_BINS = 8, 4
_MOST_SIGMAS = 5.5  # a correct drafter exceeds it once in some 50 million statistics


def check_drafter(
    drafter: Drafter,
    target: Model,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    rounds: int = 3,
    samples: int = 4096,
    memoryless: bool = True,
    seed: int = 0,
) -> None:
    """Check that a drafter keeps its side of the contract (``specjax.types.Drafter``), on a target it fits.

    Checked, in this order: the state has a batch axis everywhere; trees are well-formed, of the declared laws,
    and every draw has its q; proposing is pure; a row depends on itself alone, also in a slot that another request has
    left; after some rounds, proposals are those of a fresh start from the same text; draws are distributed as their law
    says for the q that the tree gives, independently of the draws before them and above; and texts are those of
    incremental decoding, greedy and sampled.

    Draws are tested by transforming each into a number that is uniform iff the token has its declared law given q and
    the source's earlier draws at the node (Rosenblatt 1952). So this also catches a draw that exists or not depending
    on its own token. The noise that ``shared_gumbel`` shares with the emission is seen only in the texts' equality.

    Args:
      drafter: any; small and quick ones are checked in seconds.
      target: any model with the drafter's vocabulary, ``specjax.testing.context_model`` say.
      prompts: 16 lists of token ids; None makes random ones.
      rounds: decoded before proposals are looked at again.
      samples: draws per depth and source, at least.
      memoryless: proposals are a function of the row's text, seed and warp. False for drafters that learn from rounds.
      seed: of prompts and draws.

    Raises:
      ValueError: saying which promise is broken, where, and how.
    """
    rng = np.random.default_rng(seed)

    if prompts is not None and len(prompts) != ROWS:
        raise ValueError(f"check_drafter takes {ROWS} prompts; got {len(prompts)}")
    lengths = rng.integers(1, 12, ROWS) if prompts is None else list(map(len, prompts))
    some_prompts = lambda: [rng.integers(0, target.vocab_size, length).tolist() for length in lengths]
    prompts = some_prompts() if prompts is None else [list(prompt) for prompt in prompts]
    seeds = list(range(ROWS))
    budgets = [1, *[(drafter.max_depth + 1) * (rounds + 2)] * (ROWS - 1)]  # the first row is finished at once
    make = lambda prompts, seeds, budgets: _Run(drafter, target, prompts, seeds, budgets)
    run = make(prompts, seeds, budgets)
    _check_state(run.state.drafter)
    first = run.propose()
    for row in range(ROWS):
        _check_row(drafter, _row(first, row), prompts[row] + run.text(row), target.vocab_size, f"row {row}")

    again = run.propose()
    for row in range(ROWS):
        _same(_row(first, row), _row(again, row), f"propose is not pure: given the same once more, row {row}")
    if run.traced() != run.traced():
        raise ValueError("propose is not pure: traced twice, it is two programs; it must not depend on hidden state")

    other_prompts, other_seeds = some_prompts(), [seed + 1000 for seed in seeds]
    mixed = lambda mine, theirs: [one if row % 2 else other for row, (one, other) in enumerate(zip(mine, theirs))]
    beside = make(mixed(prompts, other_prompts), mixed(seeds, other_seeds), budgets)
    together = beside.propose()
    for row in range(1, ROWS, 2):
        _same(_row(first, row), _row(together, row), f"with other rows beside it, row {row} is drafted otherwise")

    for _ in range(rounds):
        run.advance()
    after = run.propose()
    texts = [prompt + run.text(row) for row, prompt in enumerate(prompts)]
    for row in range(1, ROWS):
        _check_row(drafter, _row(after, row), texts[row], target.vocab_size, f"row {row} after {rounds} rounds")
    moved = beside.propose(jax.tree.map(lambda new, old: old.at[2].set(new[3]), run.as_inputs(), beside.as_inputs()))
    _same(
        _row(after, 3), _row(moved, 2), "a request that was moved into the slot of another is drafted otherwise: row 3"
    )
    if memoryless:
        # The first token of a fresh start is the text's last: what is emitted at a position depends on the seed alone.
        fresh = make([text[:-1] for text in texts], seeds, [1, *budgets[1:]]).propose()
        for row in range(1, ROWS):
            what = f"after {rounds} rounds, row {row} is not drafted as from a fresh start with the same text"
            _same(_row(fresh, row), _row(after, row), f"{what} (memoryless=False if that is meant)")

    _check_laws(drafter, run, samples, rng)

    while np.any(run.state.running):
        run.advance()
    plain = _Run(NO_DRAFT, target, prompts, seeds, budgets)
    while np.any(plain.state.running):
        plain.advance()
    for row in range(ROWS):
        if run.text(row) != plain.text(row):
            raise ValueError(
                f"row {row}: the text differs from incremental decoding's: {run.text(row)}, expected {plain.text(row)}"
            )


def check_verifier(
    rule: NodeRule | str,
    law: str,
    *,
    num_draws: Sequence[int | Sequence[int]] = (1, 2, 3, (1, 1), (2, 1)),
    vocab_size: int = 4,
    problems: int = 40,
    seed: int = 0,
) -> float:
    """Sum a node rule over every draw: what it emits must have the target's law, in float64, to 1e-12.

    Problems are random p and q, dense and sparse, p = q, one-hot ones and such that share no token.

    Args:
      rule: a node rule (``specjax.types.NodeRule``), or a name in ``specjax.verify.RULES``.
      law: the proposal law it is said to be exact for.
      num_draws: draws at the node, each to be tried; a tuple is several sources. Leave out what the rule does not take.
      vocab_size: V; V ** draws outcomes are summed.
      problems: random ones.
      seed: of the problems.

    Returns:
      The largest total variation found.

    Raises:
      ValueError: for a law that is not exact, not finite or does not sum to 1, with the problem that shows it.
    """
    rng = np.random.default_rng(seed)
    identity = np.eye(vocab_size)
    half = np.arange(vocab_size) < vocab_size // 2
    sparse = lambda keep: (lambda mass: mass / mass.sum())(rng.dirichlet(np.ones(vocab_size)) * keep)
    flat = np.full(vocab_size, 1 / vocab_size)
    pairs = [(flat, flat), (identity[0], identity[0]), (identity[0], identity[1]), (sparse(half), sparse(~half))]
    pairs += [tuple(rng.dirichlet([0.4] * vocab_size, 2)) for _ in range(problems)]
    worst = 0.0
    for p, q in pairs:
        for draws in num_draws:
            count = 1 if isinstance(draws, int) else len(draws)
            qs = q if count == 1 else np.stack([q, *rng.dirichlet([0.4] * vocab_size, count - 1)])
            emitted = np.asarray(exact.emitted_law(rule, p, qs, num_draws=draws, law=law))
            variation = float(np.abs(emitted - p).sum() / 2)
            if not variation <= 1e-12:  # not finite is not exact
                raise ValueError(
                    f"not exact for {law} draws: with p={p.tolist()}, q={np.asarray(qs).tolist()} and {draws} draws it "
                    f"emits {emitted.tolist()}, a total variation of {variation:.3g} from p"
                )
            worst = max(worst, variation)
    return worst


class _Run:
    """A batch of requests, a round at a time. The tree is proposed outside of the round, where it can be looked at."""

    def __init__(self, drafter: Drafter, target: Model, prompts: list[list[int]], seeds: list[int], budgets: list[int]):
        self._prompts = prompts
        plan = prepare(
            target,
            prompts,
            drafts=[drafter],
            warp=[Warp(float(row % 2)) for row in range(ROWS)],
            draft_warp=[_WARPS[row % len(_WARPS)] for row in range(ROWS)],
            max_new_tokens=budgets,
            eos_ids=(),
            seeds=seeds,
        )
        self._propose, self._params = plan.spec.draft_propose, plan.params.drafter
        # The functions that start and finish a round are given the drafter's parameters first, then what it proposed.
        self._spec = plan.spec._replace(
            draft_init=_of_first(plan.spec.draft_init),
            draft_propose=_already,
            draft_commit=_of_first(plan.spec.draft_commit),
            draft_sizes=(),  # an adaptive drafter is checked at the size its ``propose`` makes
            draft_choose=None,
        )
        self._target = plan.params.target
        self.state = decode.run_start(self._spec, decode.Params(self._target, (self._params,)), *plan.inputs)

    def text(self, row: int) -> list[int]:
        """What was emitted."""
        return np.asarray(self.state.tokens[row, len(self._prompts[row]) : self.state.lengths[row]]).tolist()

    def advance(self) -> None:
        """One round."""
        proposed = _propose(self._propose, self._params, *self.as_inputs())
        kinds = lambda drafter: jax.tree.map(jax.typeof, drafter)
        before = kinds(self.state.drafter)
        self.state, _ = decode.run_round(self._spec, decode.Params(self._target, (self._params, *proposed)), self.state)
        if kinds(self.state.drafter) != before:
            raise ValueError(
                "a round changes the structure, shapes or dtypes of the state, so it cannot be looped over: from "
                f"{before} to {kinds(self.state.drafter)}"
            )

    def as_inputs(self) -> tuple:
        """What the next proposal depends on, besides parameters; a leading batch axis everywhere."""
        state = self.state
        roots = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]
        return state.streams, state.lengths, state.drafter, roots, state.draft_warp

    def propose(self, inputs: tuple | None = None) -> TokenTree:
        """Trees [B, ..] as NumPy arrays."""
        tree, _ = _propose(self._propose, self._params, *(inputs or self.as_inputs()))
        return jax.tree.map(np.asarray, tree)

    def propose_with(self, seeds: np.ndarray) -> TokenTree:
        """As ``propose``, with other randomness."""
        _, *rest = self.as_inputs()
        return self.propose((_streams(jnp.asarray(seeds, jnp.uint32)), *rest))

    def traced(self) -> tuple[str, list]:
        """What a new trace of ``propose`` computes: the program and its constants, addresses of functions left out."""
        program = jax.make_jaxpr(lambda *inputs: _trees(self._propose, *inputs))(self._params, *self.as_inputs())
        constants = [np.asarray(constant).tolist() for constant in program.consts]
        return re.sub("0x[0-9a-f]+", "", str(program.jaxpr)), constants


def _trees(propose: Callable, params: Any, streams: Streams, lengths: jax.Array, state: Any, roots, warp):
    keys = RoundKeys(fold_in(streams.draft, lengths), fold_in(streams.path, lengths), streams.emit, lengths)
    return propose(params, keys, state, roots, warp)


_propose = jax.jit(_trees, static_argnums=0)
_streams = jax.jit(Streams.from_seeds)


def _already(params: tuple, keys: RoundKeys, state: Any, roots: jax.Array, warp: Warp) -> tuple[TokenTree, Any]:
    """What was proposed before the round, which is given it among the parameters."""
    del keys, state, roots, warp
    _, tree, state = params
    return tree, state


@functools.cache
def _of_first(function: Callable) -> Callable:
    return lambda params, *rest: function(params[0], *rest)


def _row(tree: TokenTree, row: int) -> TokenTree:
    return jax.tree.map(lambda field: field[row], tree)


def _check_state(state: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not leaf.shape or leaf.shape[0] != ROWS:
            raise ValueError(
                f"the state's {jax.tree_util.keystr(path)} has shape {leaf.shape} in a batch of {ROWS}; expected a "
                "leading batch axis, so that a row can be replaced"
            )


def _check_row(drafter: Drafter, tree: TokenTree, text: list[int], vocab_size: int, where: str) -> None:
    """One row's tree: its invariants, and what it says of itself."""

    def expect(ok: Any, what: str) -> None:
        if not np.all(ok):
            raise ValueError(f"{where}: {what}")

    expect(tree.laws == drafter.laws, f"the tree has laws {tree.laws}, the drafter declares {drafter.laws}")
    expect(tree.max_depth == drafter.max_depth, f"max_depth is {tree.max_depth}, the drafter's {drafter.max_depth}")
    try:
        check_tree(tree)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    expect(tree.tokens[0] == text[-1], f"the tree's root is {tree.tokens[0]}, the text ends in {text[-1]}")
    valid = tree.draw_valid
    draws, tokens = tree.draw_tokens[valid], tree.tokens[tree.valid]
    expect((draws >= 0) & (draws < vocab_size), f"draws are token ids in [0, {vocab_size}); got {draws}")
    expect((tokens >= 0) & (tokens < vocab_size), f"nodes hold token ids in [0, {vocab_size}); got {tokens}")
    expect((tree.draw_source >= 0) & (tree.draw_source < len(tree.laws)), f"draw_source is {tree.draw_source}")
    expect(tree.valid[:, None] | ~valid, "there are draws at a slot that is not valid")
    nodes, places = np.nonzero(valid)
    rows = tree.q_rows[nodes, tree.draw_source[places]]
    expect((rows >= 0) & (rows < len(tree.q)), f"draws at slots {nodes[(rows < 0) | (rows >= len(tree.q))]} have no q")
    q = tree.q[rows]
    expect((q >= 0) & (abs(q.sum(-1, keepdims=True) - 1) < 1e-4), "a q that was drawn from is no distribution")
    mass = q[np.arange(len(rows)), draws]
    expect(mass > 0, f"a token was drawn that its q gives no mass: {draws[mass <= 0]} at slots {nodes[mass <= 0]}")


def _same(one: TokenTree, other: TokenTree, what: str) -> None:
    """Two rows' trees: what they hold where they are valid."""
    for field in ("valid", "draw_valid", "tokens", "parents", "depths", "draw_tokens"):
        mine, theirs = getattr(one, field), getattr(other, field)
        counts = one.valid if field in ("tokens", "parents", "depths") else one.draw_valid
        mask = counts if field in ("tokens", "parents", "depths", "draw_tokens") else True
        if not np.array_equal(np.where(mask, mine, 0), np.where(mask, theirs, 0)):
            raise ValueError(f"{what}: {field} is {np.where(mask, mine, 0)} and {np.where(mask, theirs, 0)}")
    nodes, places = np.nonzero(one.draw_valid)
    mine, theirs = (tree.q[tree.q_rows[nodes, tree.draw_source[places]]] for tree in (one, other))
    if not np.allclose(mine, theirs, atol=1e-4):
        raise ValueError(f"{what}: a q differs by {np.abs(mine - theirs).max():.2g}")


def _check_laws(drafter: Drafter, run: _Run, samples: int, rng: np.random.Generator) -> None:
    """Chi-square of the transformed draws, alone and given the draw before (at the node's parent, for the first)."""
    alone: dict[tuple, np.ndarray] = {}
    given: dict[tuple, np.ndarray] = {}
    for _ in range(-(-samples // ROWS)):
        trees = run.propose_with(rng.integers(0, 2**32, ROWS))
        for row in range(ROWS):
            tree = _row(trees, row)
            for source, law in enumerate(drafter.laws):
                above: tuple[int, float] | None = None
                for depth in range(drafter.max_depth):
                    columns = np.flatnonzero(tree.draw_source == source)
                    drawing = tree.valid & (tree.depths == depth) & tree.draw_valid[:, columns].any(1)
                    if not drawing.any():
                        break
                    node = int(np.argmax(drawing))
                    valid = columns[tree.draw_valid[node, columns]]
                    q = np.asarray(tree.q[tree.q_rows[node, source]], np.float64)
                    drawn = tree.draw_tokens[node, valid].tolist()
                    where = f"source {source} at depth {depth}, row {row}"
                    before = above[1] if above is not None and tree.parents[node] == above[0] else None
                    above = None
                    for place, numbers in enumerate(_uniforms(law, q, drawn, rng, where)):
                        if numbers is None:
                            continue
                        key, u = (source, depth, place), numbers[0]
                        for order, number in enumerate(numbers):
                            alone.setdefault((*key, order), np.zeros(_BINS))[int(number * _BINS)] += 1
                        if before is not None:
                            pair = given.setdefault(key, np.zeros((_PAIR_BINS, _PAIR_BINS)))
                            pair[int(before * _PAIR_BINS), int(u * _PAIR_BINS)] += 1
                        before = u
                        above = above or (node, u)
    for counts, what in ((alone, "its law for the q it gives"), (given, "independence of the draw before or above it")):
        for (source, depth, place, *_), table in counts.items():
            sigmas = _excess(np.atleast_2d(table))
            if sigmas > _MOST_SIGMAS:
                raise ValueError(
                    f"source {source} ({drafter.laws[source]}): draw {place} at depth {depth} is {sigmas:.0f} standard "
                    f"deviations away from {what}; of {int(table.sum())} draws, mapped to numbers that ought to be "
                    f"uniform, {table.astype(int).tolist()} fell into each bin"
                )


def _uniforms(
    law: str, q: np.ndarray, tokens: list[int], rng: np.random.Generator, where: str
) -> list[tuple[float, float] | None]:
    """Each draw as two numbers that are uniform on [0, 1) under the law; None where the law leaves no choice.

    In the first, tokens stand in the order of their ids, which shows noise that was used twice; in the second the
    likeliest come first, which shows a q that is too sharp or too flat whatever the text.
    """
    name = law.split()[-1]  # whether a tree grew by what was drawn does not change a draw's law
    if name not in LAWS:
        raise ValueError(f"law {law!r} is unknown, so nothing can be checked; expected one of {', '.join(LAWS)}")
    left, found = q.copy(), []
    hub = int(np.argmax(q))
    for place, token in enumerate(tokens):
        last = place == len(tokens) - 1
        certain = name == "deterministic" or (name == "top_k_plus_one" and not last)
        only = int(np.argmax(left)) if certain else hub
        if name == "hub" and place == 1:
            certain = tokens[0] != hub
            left[hub] = 0 if not certain else left[hub]
        if certain and token != only:
            raise ValueError(f"{where}: draw {place} is {token}; {law} draws {only} there, for the q given")
        mass = q if name == "iid" else left / left.sum() if left.sum() > 0 else left
        if not mass[token] > 0:
            raise ValueError(f"{where}: draw {place} is {token}, which has no mass left for a {law} draw")
        mass = mass / mass.sum()
        before = mass[:token].sum(), mass[mass > mass[token]].sum() + mass[:token][mass[:token] == mass[token]].sum()
        within = rng.random() * mass[token]
        found.append(None if certain else tuple(min(float(start + within), 1 - 1e-9) for start in before))
        if name != "hub":
            left[token] = 0
    return found


def _excess(table: np.ndarray) -> float:
    """How unlikely it is that each row of counts is uniform, in standard deviations (Wilson and Hilferty 1931)."""
    table = table[table.sum(1) >= 8 * table.shape[1]]
    if not len(table):
        return 0.0
    expected = table.sum(1, keepdims=True) / table.shape[1]
    chi_square, freedom = float(((table - expected) ** 2 / expected).sum()), len(table) * (table.shape[1] - 1)
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
