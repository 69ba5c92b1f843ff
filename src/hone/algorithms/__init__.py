"""The learning rules: tensors in, tensors out. No I/O, no collectives, no state.

Each choice of `AlgorithmConfig` is one function in one registry, with its equation and source
beside it. Symbols used throughout: G samples of a group, S sequences, N trained tokens.
"""
