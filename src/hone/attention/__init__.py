"""The one attention function that training and generation share, and its kernels."""

from hone.attention.context import (
    AttentionContext,
    ContextParallel,
    PackedContext,
    PagedContext,
    SharedPrefix,
)
from hone.attention.interface import ATTENTION_NAME

__all__ = [
    "ATTENTION_NAME",
    "AttentionContext",
    "ContextParallel",
    "PackedContext",
    "PagedContext",
    "SharedPrefix",
]
