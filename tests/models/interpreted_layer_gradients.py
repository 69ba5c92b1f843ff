"""Runs the gradients of the layer kernels in Triton's interpreter; prints errors as JSON.

A process of its own, as the interpreter is chosen before triton is first imported.
"""

from __future__ import annotations

import json
import sys

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch

from hone.models import layer_gradients
from hone.models.layer_ops import TorchKernels

EPS = 1e-5


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors(name, *args, **options):
    """Relative error of the values, then of the gradient of every tensor that has one."""
    found = []
    args = (*args, *options.values())
    for ops, dtype in ((layer_gradients, torch.float32), (TorchKernels(), torch.float64)):
        leaves = [
            arg.detach().to(dtype).requires_grad_()
            if isinstance(arg, torch.Tensor) and arg.requires_grad
            else arg
            for arg in args
        ]
        split = len(leaves) - len(options)
        by_name = dict(zip(options, leaves[split:], strict=True))
        outputs = getattr(ops, name)(*leaves[:split], **by_name)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        cotangents = [normal(*y.shape, seed=90 + i).to(y.dtype) for i, y in enumerate(outputs)]
        found.append([*outputs, *torch.autograd.grad(outputs, wanted, cotangents)])
    return [
        float((ours.double() - theirs).detach().norm() / theirs.detach().norm())
        for ours, theirs in zip(*found, strict=True)
    ]


def heads(num_heads, num_kv_heads, head_dim, *, has_norm, num_tokens=37):
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=1).requires_grad_()
    angles = normal(50, head_dim // 2, seed=2)
    rotary = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(3))
    norms = [normal(head_dim, seed=4 + i).requires_grad_() if has_norm else None for i in range(2)]
    names = {"q_norm": norms[0], "k_norm": norms[1], "eps": EPS, "num_heads": num_heads}
    return errors("rotate_heads", qkv, positions, rotary, **names)


def main() -> None:
    layer_gradients.PROGRAMS = 2  # each takes several tiles
    layer_gradients.NORM_TILE = 256
    results = {
        "rms_norm": errors(
            "rms_norm",
            normal(7, 96, seed=5).requires_grad_(),
            normal(96, seed=6).requires_grad_(),
            EPS,
        ),
        "silu_mul": errors("silu_mul", normal(5, 2400, seed=7).requires_grad_()),
        "norm and rotate": heads(4, 2, 16, has_norm=True),
        "norm and rotate odd heads": heads(3, 1, 24, has_norm=True),
        "rotate": heads(6, 2, 32, has_norm=False),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
