"""Draft sources: one small model, several merged, one in several sizes, or none."""

from specjax.draft.adaptive import adaptive
from specjax.draft.ensemble import ensemble, merge
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm

__all__ = [
    "NO_DRAFT",
    "adaptive",
    "ensemble",
    "merge",
    "ssm",
]
