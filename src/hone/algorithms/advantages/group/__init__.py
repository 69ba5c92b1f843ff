"""Baselines over the samples of a prompt, of which at least two are needed."""
