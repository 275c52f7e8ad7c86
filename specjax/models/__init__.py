"""Decoders of the LLaMA, Mistral, Qwen and OPT families, and draft heads on them: forward, checkpoints, tokenizers."""

from specjax.models.chat import ChatTemplate, load_chat_template
from specjax.models.checkpoint import load_model, save_model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import init_model
from specjax.models.eagle import EagleConfig, eagle_model, init_eagle
from specjax.models.heads import is_heads, load_heads, save_heads
from specjax.models.hub import find_model
from specjax.models.medusa import MedusaConfig, init_medusa, medusa_logits, medusa_model
from specjax.models.pair import check_pair
from specjax.models.params import restore_params, save_params
from specjax.models.rope import Dynamic, Linear, Llama3, Rope, Yarn
from specjax.models.tokenizer import load_tokenizer

__all__ = [
    "ChatTemplate",
    "DecoderConfig",
    "Dynamic",
    "EagleConfig",
    "Linear",
    "Llama3",
    "MedusaConfig",
    "Rope",
    "Yarn",
    "check_pair",
    "eagle_model",
    "find_model",
    "init_eagle",
    "init_medusa",
    "init_model",
    "is_heads",
    "load_chat_template",
    "load_heads",
    "load_model",
    "load_tokenizer",
    "medusa_logits",
    "medusa_model",
    "restore_params",
    "save_heads",
    "save_model",
    "save_params",
]
