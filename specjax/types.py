"""The seams: what a model, a drafter, a node rule and a verifier look like to the rest of the library."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

PyTree = Any


class TreeMask(NamedTuple):
    """What each fed row may attend to: the committed prefix by length, the uncommitted rows by mask.

    Every pass of a model is a tree pass. A prompt is a chain of tokens, incremental decoding a tree of one node; so
    this is the only kind of mask there is, and its memory does not grow with heads, head size or cache capacity.
    """

    prefix_lengths: jax.Array  # [B] int32, committed cache rows visible to every fed row
    tree_mask: (
        jax.Array
    )  # [B, N, M] bool, row n attends uncommitted row m; the last N of the M columns are the fed rows


class ForwardOut(NamedTuple):
    """Result of one model pass."""

    logits: jax.Array  # [B, R, V] for the R requested rows
    hidden: jax.Array | None  # [B, N, D] last hidden states, or None where the model does not give them
    cache: PyTree  # the cache with the N fed rows appended, uncommitted


class Forward(Protocol):
    """One pass over N rows per sequence, on top of a cache."""

    def __call__(
        self,
        params: PyTree,
        tokens: jax.Array,
        positions: jax.Array,
        mask: TreeMask,
        cache: PyTree,
        *,
        rows: jax.Array | None = None,
    ) -> ForwardOut:
        """Score ``tokens``.

        Args:
          params: the model's parameters.
          tokens: [B, N] int32 token ids.
          positions: [B, N] int32 positions in the sequence (prefix length + depth, never the slot index).
          mask: what each row sees.
          cache: keys and values so far; M - N of its rows are uncommitted.
          rows: [B, R] int32, the rows whose logits are wanted; None means all N. Prefill asks for one of them, since
            [B, N, V] logits would be most of its memory.
        """
        ...


class Model(NamedTuple):
    """A language model as data and pure functions; any framework can supply one.

    ``forward`` and ``init_cache`` are compared by identity when deciding whether compiled code can be reused, so make
    them once per architecture and not once per call.

    A draft model may read the target's last hidden states, as Medusa's and EAGLE's do. Its ``forward`` then takes one
    more argument, ``before`` [B, N, H]: for each fed token the target's hidden state that chose it (zeros for a text's
    first token). It is given whenever committed tokens are fed; for drafted ones, which the target has not seen, it is
    None, and the model makes do with what it predicted itself. Rows fed without it never descend from each other.
    """

    forward: Forward
    params: PyTree
    init_cache: Callable[[int, int], PyTree]  # (batch, capacity) -> empty cache with .lengths, .commit and .discard
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...] = ()
    directory: str | None = None  # where it was loaded from
    hidden_size: int | None = None  # D of ForwardOut.hidden; None: it gives none
    embed: Callable[[PyTree, jax.Array], jax.Array] | None = None  # (params, tokens [..]) -> [.., D], the first layer's
    head: Callable[[PyTree, jax.Array], jax.Array] | None = None  # (params, hidden [.., D]) -> logits [.., V]
    reads_hidden: int | None = None  # a draft model's H, the target's D that it reads; None: it reads none
    max_depth: int | None = None  # a draft model's limit: how many tokens behind the last committed one it can draft


class Draws(NamedTuple):
    """The ordered draws at one node, unbatched; a verifier takes them in this order."""

    tokens: jax.Array  # [K] int32
    source: jax.Array  # [K] int32, row of q each was drawn from
    valid: jax.Array  # [K] bool


class Acceptance(NamedTuple):
    """What verification decided for a batch of trees."""

    path: jax.Array  # [B, D + 1] int32 slots of the accepted path, root first; meaningless after num_accepted
    num_accepted: jax.Array  # [B] int32, accepted drafted tokens: 0..D
    tokens: jax.Array  # [B, D + 1] int32: the accepted tokens, then the next token (bonus or correction), then zeros

    @property
    def next_token(self) -> jax.Array:
        """[B] int32: the bonus token after a full path, or the correction where the path ended."""
        return jax.numpy.take_along_axis(self.tokens, self.num_accepted[:, None], axis=1)[:, 0]


class Emission(NamedTuple):
    """What a round really emitted: an acceptance cut at a stop token and at the row's budget."""

    tokens: jax.Array  # [B, D + 1] int32
    counts: jax.Array  # [B] int32, how many of them were emitted; 0 for a finished row
    path: jax.Array  # [B, D + 1] int32 slots whose rows are committed: the root and the accepted nodes


class NodeRule(Protocol):
    """The law of the token emitted at a node."""

    def __call__(self, p: jax.Array, q: jax.Array, draws: Draws) -> jax.Array:
        """Return the emitted token's law given the draws: [V], sums to 1, unbatched.

        Args:
          p: [V] target probabilities after the row's warp.
          q: [S, V] the draft probabilities each source drew from, after its warp.
          draws: the K ordered draws.
        """
        ...


class RoundKeys(NamedTuple):
    """Randomness of one round of a batch."""

    draft: jax.Array  # [B] keys, already folded with the sequence's length
    path: jax.Array  # [B] keys, already folded with the sequence's length
    emit: jax.Array  # [B] keys, to be folded with the position of the token they emit
    positions: jax.Array  # [B] int32, position of the first token to be emitted


class Verifier(NamedTuple):
    """A verification method: a function over a batch, and the laws of draws it is exact for."""

    name: str
    verify: Callable[..., Acceptance]  # (keys: RoundKeys, tree, target_logits [B, N, V], warp) -> Acceptance
    exact_for: frozenset[str] | None  # keys of proposal laws (see specjax.laws.law_key); None is every law
    lossy: bool = False
    refuses: Callable[[int, int], str | None] | None = None  # (draws at a node, V) -> why not; None: it takes any tree


class Drafter(NamedTuple):
    """A draft source as pure functions over a batch, with the data they work on.

    ``init(params, tokens [B, T], lengths [B], hidden) -> state`` reads right-padded prompts; it is called outside
    ``jit``, so that what it compiles can serve other drafters. ``propose(params, keys,
    state, roots [B], warp) -> (TokenTree, state)`` drafts one tree per row; row i's tree depends on row i alone.
    ``commit(params, state, emission, hidden) -> state`` learns which tokens were emitted. It is called once before the
    first ``propose``, for the token that prefill emitted, and then after every round. Every array of the state has a
    leading batch axis.

    ``hidden`` are the target's last hidden states where ``reads_hidden`` asks for them, else None: [B, T, D] of the
    prompts in ``init``, [B, N, D] of the tree that ``emission.path`` points into in ``commit`` (after prefill, a tree
    of the prompt's last token alone). So the one that chose ``emission.tokens[:, j]`` is in row ``path[:, j]``.

    A drafter of several sizes has a function like ``propose`` for each in ``sizes``, which may differ in all static
    shapes of their trees, and ``choose(params, state, running [B]) -> index``, which says at run time whose turn it is.

    Compiled code is reused when the functions are the same objects, so make them once per configuration.
    """

    init: Callable[..., PyTree]
    propose: Callable[..., tuple[Any, PyTree]]
    commit: Callable[..., PyTree]
    params: PyTree
    max_depth: int  # D of the trees it proposes
    laws: tuple[str, ...]  # proposal law of each source
    vocab_size: int | None = None  # None: proposes only ids it has seen, so any target's
    max_positions: int | None = None  # None: no limit
    reads_hidden: int | None = None  # size D of the target's hidden states it reads; None: it reads none
    sizes: tuple[Callable[..., tuple[Any, PyTree]], ...] = ()
    choose: Callable[..., jax.Array] | None = None  # None: there is one size
    max_draws: int | None = None  # room for draws at a node of its trees, of all sources; None: only its trees say
