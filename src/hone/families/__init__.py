"""What is known of a model before its weights are loaded. No torch.

A model family is a file with a `SPEC`: all that hone knows of it without its weights. The other
modules read the files of a model's folder and what follows from its shape.
"""
