"""Losses, advantages and targets: tensors in, tensors out. No I/O, no collectives, no state.

Each choice of `AlgorithmConfig` is a function in a registry, with its equation and source in its
docstring. Shapes: G samples of a group, S sequences, N trained tokens.
"""
