"""Generation: the embedded engine, with continuous batching over a paged KV cache in the trainer's
process, and other engines with the same protocol, each in its own folder
(`hone.engine.backends`)."""
