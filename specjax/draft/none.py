"""No draft: trees of a lone root, that is incremental decoding."""

import jax

from specjax.sampling import Warp
from specjax.tree import TokenTree, root_tree
from specjax.types import Drafter, Emission, RoundKeys


def _init(params: None, tokens: jax.Array, lengths: jax.Array, hidden: jax.Array | None) -> None:
    del params, tokens, lengths, hidden


def _propose(params: None, keys: RoundKeys, state: None, roots: jax.Array, warp: Warp) -> tuple[TokenTree, None]:
    del params, keys, state, warp
    return root_tree(roots), None


def _commit(params: None, state: None, emission: Emission, hidden: jax.Array | None) -> None:
    del params, state, emission, hidden


NO_DRAFT = Drafter(_init, _propose, _commit, params=None, max_depth=0, laws=(), max_draws=0)
