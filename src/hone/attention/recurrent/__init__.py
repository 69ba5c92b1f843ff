"""Gated linear attention: layers that keep a state in place of keys and values.

delta_rule.py     the recurrence over packed segments: in chunks, in plain torch
convolution.py    the short causal convolution in front of it
kernels.py        the choice between plain torch and the kernels of `fla-core` on CUDA
mixing.py         both over a whole pass: training, prefill and decode, by its context
layer.py          a layer of transformers that computes in this way
"""
