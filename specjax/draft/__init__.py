"""Draft sources: one small model, several merged, or none."""

from specjax.draft.ensemble import ensemble, first_of, merge
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm
from specjax.draft.vocabulary import with_vocabulary

__all__ = [
    "NO_DRAFT",
    "ensemble",
    "first_of",
    "merge",
    "ssm",
    "with_vocabulary",
]
