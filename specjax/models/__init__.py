"""Decoders of the LLaMA, Mistral, Qwen and OPT families: configuration, forward, checkpoints and tokenizers."""

from specjax.models.chat import ChatTemplate, load_chat_template
from specjax.models.checkpoint import load_model, save_model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import init_model
from specjax.models.hub import find_model
from specjax.models.pair import check_pair
from specjax.models.params import restore_params, save_params
from specjax.models.rope import Dynamic, Linear, Llama3, Rope, Yarn
from specjax.models.tokenizer import load_tokenizer

__all__ = [
    "ChatTemplate",
    "DecoderConfig",
    "Dynamic",
    "Linear",
    "Llama3",
    "Rope",
    "Yarn",
    "check_pair",
    "find_model",
    "init_model",
    "load_chat_template",
    "load_model",
    "load_tokenizer",
    "restore_params",
    "save_model",
    "save_params",
]
