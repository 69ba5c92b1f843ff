"""Models and tokenizers from transformers: loading, the backbone and head split, tiny ones."""
