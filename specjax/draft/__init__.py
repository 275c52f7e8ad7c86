"""Draft sources: one small model, several merged, the text itself, or none; and what decides the shape of a tree."""

from specjax.draft.dynamic import expand_and_rerank, grow
from specjax.draft.ensemble import ensemble, merge
from specjax.draft.lookup import prompt_lookup
from specjax.draft.none import NO_DRAFT
from specjax.draft.ssm import ssm

__all__ = [
    "NO_DRAFT",
    "ensemble",
    "expand_and_rerank",
    "grow",
    "merge",
    "prompt_lookup",
    "ssm",
]
