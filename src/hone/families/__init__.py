"""Facts about a model that are known before its weights are loaded. Needs no torch.

A model family is a file with a `SPEC`: all that hone knows of it without its weights. The other
modules read the files of a model's folder, and derive costs from its shape.
"""
