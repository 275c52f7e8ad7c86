"""Verification: rules that give the law of an emitted token, and the walks that sample them."""

from specjax.laws import law_key
from specjax.types import Verifier
from specjax.verify.paths import PATH_RULES, stop_at
from specjax.verify.rules import RULES
from specjax.verify.table import format_table, table
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

VERIFIERS = {
    name: Verifier(name, traverse(rule.rule, takes_laws=rule.takes_laws), rule.exact_for)
    for name, rule in RULES.items()
} | {name: Verifier(name, stop_at(rule.rule), rule.exact_for, rule.lossy) for name, rule in PATH_RULES.items()}


def check_laws(verifier: Verifier, laws: tuple[str, ...]) -> None:
    """Refuse a verifier that would be biased for draws of these laws, one per source.

    Raises:
      ValueError: naming the verifiers that are exact for them.
    """
    key = law_key(laws)
    if not laws or verifier.exact_for is None or key in verifier.exact_for:
        return
    exact = [other.name for other in VERIFIERS.values() if other.exact_for is None or key in other.exact_for]
    raise ValueError(
        f"verifier {verifier.name!r} would bias the text for {key} draws; exact for them: {', '.join(sorted(exact))}"
    )
