"""vLLM as the engine, in the trainer's process or in one of its own ranks."""
