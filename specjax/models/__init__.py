"""Decoders of the Llama family: configuration, forward, checkpoints and tokenizers."""

from specjax.models.checkpoint import load_model, save_model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import init_model
from specjax.models.tokenizer import load_tokenizer

__all__ = [
    "DecoderConfig",
    "init_model",
    "load_model",
    "load_tokenizer",
    "save_model",
]
