"""hone: post-training of language models by reinforcement learning."""

__version__ = "0.1.0"
