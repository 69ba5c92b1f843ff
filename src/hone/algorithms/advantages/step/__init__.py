"""Baselines over all samples of a step."""
