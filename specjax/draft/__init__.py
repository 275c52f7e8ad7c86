"""Draft sources: one small model, several merged, the text itself, or none; and what decides the shape of a tree."""

from specjax.draft.adaptive import adaptive
from specjax.draft.dynamic import expand_and_rerank, grow
from specjax.draft.ensemble import ensemble, first_of, merge
from specjax.draft.lookup import prompt_lookup
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm
from specjax.draft.vocabulary import with_vocabulary

__all__ = [
    "NO_DRAFT",
    "adaptive",
    "ensemble",
    "expand_and_rerank",
    "first_of",
    "grow",
    "merge",
    "prompt_lookup",
    "ssm",
    "with_vocabulary",
]
