"""Verification: rules that give the law of an emitted token, and the walks that sample them."""

from specjax.laws import law_key
from specjax.types import Verifier
from specjax.verify.paths import ONE_DRAW, PATH_RULES, beyond_chains, stop_at
from specjax.verify.rules import RULES
from specjax.verify.table import format_table, table
from specjax.verify.transport import beyond_optimum
from specjax.verify.traverse import traverse

__all__ = [
    "PATH_RULES",
    "RULES",
    "VERIFIERS",
    "check_laws",
    "format_table",
    "stop_at",
    "table",
    "traverse",
]

_REFUSES = {"block": lambda num_draws, vocab_size: beyond_chains(num_draws), "optimal": beyond_optimum}
VERIFIERS = {
    name: Verifier(name, traverse(rule.rule, takes_laws=rule.takes_laws), rule.exact_for, refuses=_REFUSES.get(name))
    for name, rule in RULES.items()
} | {
    name: Verifier(name, stop_at(rule.rule), rule.exact_for, rule.lossy, _REFUSES.get(name))
    for name, rule in PATH_RULES.items()
}


def check_laws(
    verifier: Verifier, laws: tuple[str, ...], *, max_draws: int | None = None, vocab_size: int | None = None
) -> None:
    """Refuse a verifier that is not exact for draws of these laws, or cannot take so many of them.

    Args:
      laws: the law of each source.
      max_draws: room for draws at a node, of all sources; None where it is not known, and then not checked.
      vocab_size: V; None is as for ``max_draws``.

    Raises:
      ValueError: naming the verifiers that are exact for these laws and take such trees.
    """
    if not laws:
        return
    key = law_key(laws)
    same = ONE_DRAW if max_draws == 1 and key in ONE_DRAW else {key}  # laws that such draws cannot be told from
    exact = [other for other in (verifier, *VERIFIERS.values()) if other.exact_for is None or other.exact_for & same]

    def refusal(other: Verifier, unknown: str | None) -> str | None:
        """Why the other cannot take the tree; ``unknown`` where it depends on the tree and that is not known."""
        if other.refuses is None:
            return None
        return unknown if max_draws is None or vocab_size is None else other.refuses(max_draws, vocab_size)

    if verifier not in exact:
        alone = [law in (verifier.exact_for or ()) for law in laws]
        # Of several sources those of one law are measured; others are only known to be biased where one of them is.
        verdict = "is not shown to be exact" if len(set(laws)) > 1 and all(alone) else "would bias the text"
        problem = f"{verdict} for {key} draws"
        others = "exact for them"
    elif reason := refusal(verifier, None):
        problem = f"cannot verify this tree: {reason}"
        others = f"exact for {key} draws in such trees"
    else:
        return
    names = sorted({other.name for other in exact if not refusal(other, "the tree is not known")})
    raise ValueError(f"verifier {verifier.name!r} {problem}; {others}: {', '.join(names)}")
