"""Decoders of the Llama family and draft heads on them: configuration, forward, checkpoints and tokenizers."""

from specjax.models.checkpoint import load_model, save_model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import init_model
from specjax.models.eagle import eagle_model, init_eagle
from specjax.models.heads import is_heads, load_heads, save_heads
from specjax.models.medusa import MedusaConfig, init_medusa, medusa_logits, medusa_model
from specjax.models.tokenizer import load_tokenizer

__all__ = [
    "DecoderConfig",
    "MedusaConfig",
    "eagle_model",
    "init_eagle",
    "init_medusa",
    "init_model",
    "is_heads",
    "load_heads",
    "load_model",
    "load_tokenizer",
    "medusa_logits",
    "medusa_model",
    "save_heads",
    "save_model",
]
