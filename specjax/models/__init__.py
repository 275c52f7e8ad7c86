"""Decoders of the LLaMA, Mistral, Qwen and OPT families: configuration, forward, checkpoints and tokenizers."""

from specjax.models.checkpoint import load_model, save_model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import init_model
from specjax.models.params import restore_params, save_params
from specjax.models.tokenizer import load_tokenizer

__all__ = [
    "DecoderConfig",
    "init_model",
    "load_model",
    "load_tokenizer",
    "restore_params",
    "save_model",
    "save_params",
]
