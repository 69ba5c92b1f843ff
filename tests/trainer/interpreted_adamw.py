"""Runs the kernel of AdamW with bfloat16 moments in Triton's interpreter, beside the step in torch,
and prints their differences as JSON. A process of its own, as the interpreter is chosen by an
environment variable that must be set before triton is first imported."""

from __future__ import annotations

import json
import sys

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from hone.trainer.adamw_kernel import adamw_bfloat16
from hone.trainer.narrow_moments import FlatLayout, adamw_bfloat16_
from hone.trainer.settings import OptimizerConfig

SIZE, FIRST, SEED, NUM_STEPS, LR, DECAY = 2500, 1_000_000, 2**31 - 5, 3, 0.02, 0.1
CFG = OptimizerConfig(eps=1e-6)
LAYOUTS = {
    "whole": FlatLayout(),
    "rows": FlatLayout(offset=3 * 2**31 + 5),
    "columns": FlatLayout(offset=77, row=300, stride=900),
    "many columns": FlatLayout(offset=77, row=2000, stride=7000),
}


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, g = torch.randn(2, SIZE, generator=generator)
    m = torch.randn(SIZE, generator=generator).bfloat16()
    v = torch.rand(SIZE, generator=generator).bfloat16()
    return [w, g, m, v]


def by_kernel(layout: FlatLayout, *, seed: int = SEED) -> list[Tensor]:
    w, g, m, v = start()
    beta1, beta2 = CFG.betas
    adamw_bfloat16(
        w,
        g,
        m.view(torch.int16),
        v.view(torch.int16),
        first_index=FIRST,
        offset=layout.offset,
        row=layout.row,
        stride=layout.stride,
        seed=seed,
        lr=LR,
        decay=DECAY,
        beta1=beta1,
        beta2=beta2,
        eps=CFG.eps,
        correction1=1 - beta1**NUM_STEPS,
        correction2=1 - beta2**NUM_STEPS,
    )
    return [w, m, v]


def share(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([x != y for x, y in zip(a[1:], b[1:], strict=True)]).float().mean())


def in_torch(layout: FlatLayout) -> list[Tensor]:
    w, g, m, v = start()
    adamw_bfloat16_(
        w,
        g,
        m,
        v,
        first_index=FIRST,
        layout=layout,
        seed=SEED,
        num_steps=NUM_STEPS,
        cfg=CFG,
        lr=LR,
        decay=DECAY,
    )
    return [w, m, v]


def compare(layout: FlatLayout) -> dict[str, float]:
    expected, got = in_torch(layout), by_kernel(layout)
    bits = [
        (a.view(torch.int16).int(), b.view(torch.int16).int())
        for a, b in zip(got[1:], expected[1:], strict=True)
    ]
    return {
        "master": float((got[0] - expected[0]).abs().max()),
        "share_of_moments_that_differ": share(got, expected),
        "largest_difference_in_steps": max(int((a - b).abs().max()) for a, b in bits),
    }


def main() -> None:
    found = {name: compare(layout) for name, layout in LAYOUTS.items()}
    whole = in_torch(LAYOUTS["whole"])
    planted = {
        "seed": share(by_kernel(LAYOUTS["whole"], seed=SEED - 1), whole),
        **{n: share(by_kernel(LAYOUTS[n]), whole) for n in LAYOUTS if n != "whole"},
    }
    sys.stdout.write(json.dumps({"found": found, "planted": planted}))


if __name__ == "__main__":
    main()
