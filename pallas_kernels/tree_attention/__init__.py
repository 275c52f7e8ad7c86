"""Attention of tree nodes: the whole committed prefix by length, the uncommitted rows by mask."""

from pallas_kernels.tree_attention.api import IMPLEMENTATIONS, tree_attention

__all__ = [
    "IMPLEMENTATIONS",
    "tree_attention",
]
