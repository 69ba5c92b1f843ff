"""`hone bench`: speed and memory of the engine and the trainer, measured."""
