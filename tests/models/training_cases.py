"""What the trainer's layers are tested with: a family, fields of its config, options of the decoder
and of the check."""

from __future__ import annotations

LENGTHS = (5, 1, 9)
CASES = {
    "qwen3": ("qwen3", {}, {"num_batches": 2}),
    "qwen3 selective": ("qwen3", {}, {"recompute": "selective"}),
    "qwen3 full": ("qwen3", {}, {"recompute": "full"}),
    "qwen3 every second": ("qwen3", {}, {"recompute": "full", "every": 2, "num_batches": 2}),
    "qwen3 offloaded": ("qwen3", {}, {"recompute": "full", "offload": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}, {}),
    "qwen2 selective": ("qwen2", {}, {"recompute": "selective"}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}, {}),
    "llama full": ("llama", {"num_key_value_heads": 1}, {"recompute": "full"}),
    "mistral": ("mistral", {"sliding_window": 4, "head_dim": 12}, {"num_batches": 2}),
    "mistral full": ("mistral", {"sliding_window": 4}, {"recompute": "full"}),
    "frozen mlp": ("qwen3", {}, {"frozen": "mlp"}),
    "frozen embedding": ("qwen3", {"tie_word_embeddings": False}, {"frozen": "embed"}),
    "frozen keys and norms": ("llama", {}, {"frozen": "k_proj", "recompute": "selective"}),
}
BUGS = {
    "residual's gradient left out": ("residual", "llama"),
    "a micro-batch overwrites": ("overwrite", "mistral"),
    "dropped heads not rotated again": ("stale", "qwen3 selective"),
    "norm of queries taken for keys": ("swapped", "qwen3"),
}
