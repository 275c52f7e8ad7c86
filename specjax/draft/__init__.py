"""Draft sources: one small model, several merged, or none."""

from specjax.draft.ensemble import ensemble, merge
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm

__all__ = [
    "NO_DRAFT",
    "ensemble",
    "merge",
    "ssm",
]
