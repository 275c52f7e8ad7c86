"""Attention of tree nodes: the whole committed prefix by length, the uncommitted rows by mask."""

from pallas_kernels.tree_attention.api import IMPLEMENTATIONS, TreeAttention, pick, tree_attention
from pallas_kernels.tree_attention.plan import Choice
from pallas_kernels.tree_attention.problem import Config, Device

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "Config",
    "Device",
    "TreeAttention",
    "pick",
    "tree_attention",
]
