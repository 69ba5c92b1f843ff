"""Generation: continuous batching over a paged KV cache, in the trainer's process."""

from hone.engine.engine import EmbeddedEngine, EngineState

__all__ = ["EmbeddedEngine", "EngineState"]
