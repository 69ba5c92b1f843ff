"""Gated linear attention: layers that keep a state in place of keys and values.

delta_rule.py     the recurrence over packed segments: in chunks, in plain torch
convolution.py    the short causal convolution in front of it
kernels.py        the choice between plain torch and the kernels of `fla-core` on CUDA
fla_rule.py, fla_convolution.py, chunk_gradients.py
                  these kernels, and the part of their gradients that is computed here
launches.py       launch parameters of these kernels
mixing.py         both over a whole pass: training, prefill and decode, by its context
layer.py          a layer of transformers that computes in this way
delta_net.py      the same layer between its two matrix products, in generation
decode_kernel.py  one token through it, in one kernel
"""
