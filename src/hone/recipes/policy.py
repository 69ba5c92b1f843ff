"""The tiny policy of the recipes in which agents imitate teachers first."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hone.models.tiny import make_tiny_model

__all__ = ["make_policy"]


def make_policy(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write a model of random weights, about 0.1 M of them, with 128 tokens of context."""
    make_tiny_model(
        folder,
        tokenizer=tokenizer,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=128,
        seed=seed,
    )
