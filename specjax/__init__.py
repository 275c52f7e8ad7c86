"""specjax: tree speculation for language models, in JAX."""

from specjax import draft, models, replay, testing, verify
from specjax.generate import (
    Generation,
    Round,
    Stats,
    StreamStep,
    generate,
    stream,
)
from specjax.mask import ancestor_mask
from specjax.models import check_pair, is_heads, load_chat_template, load_heads, load_model, load_tokenizer
from specjax.sampling import Warp
from specjax.tree import (
    TokenTree,
    Topology,
    TreeShape,
    common_shape,
    draw_picture,
)
from specjax.types import Drafter, Model, Verifier

__all__ = [
    "Drafter",
    "Generation",
    "Model",
    "Round",
    "Stats",
    "StreamStep",
    "TokenTree",
    "Topology",
    "TreeShape",
    "Verifier",
    "Warp",
    "ancestor_mask",
    "check_pair",
    "common_shape",
    "draft",
    "draw_picture",
    "generate",
    "is_heads",
    "load_chat_template",
    "load_heads",
    "load_model",
    "load_tokenizer",
    "models",
    "replay",
    "stream",
    "testing",
    "verify",
]
