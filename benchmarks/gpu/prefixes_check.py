"""Rows of a group that share their prompt in a pass, on a GPU.

python -m benchmarks.gpu.prefixes_check [SECTION ...] [--seconds N]

gathered    keys that are copied and their gradients, each backend, against float64
passes      log-probabilities and gradients of a small model, shared and not
speed       forward and backward of whole models over groups of 8, shared and not
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.attention_check import attend
from benchmarks.gpu.models import build, compiled_policy
from benchmarks.gpu.sections import Run
from benchmarks.gpu.timing import device_ms
from torch import Tensor

from hone.attention import PackedContext, flash, flash4
from hone.attention.packed_keys import gather_keys
from hone.distributed.mesh import Mesh
from hone.families.shape import ModelShape
from hone.models.decoder import hidden_states
from hone.trainer.collating import collate
from hone.trainer.context import split
from hone.trainer.logprobs import token_logprobs
from hone.trainer.prefixes import shared_prefixes
from hone.types import MicroBatch, Row

SECTIONS = ("gathered", "passes", "speed")
DEVICE = torch.device("cuda")
GROUP = 8
WORKLOADS = (
    ("qwen3-0.6b", 256, 1024, 2),
    ("qwen3-0.6b", 128, 1024, 2),
    ("qwen3-0.6b", 512, 512, 4),
    ("qwen3-0.6b", 2048, 256, 4),
    ("qwen3-1.7b", 256, 1024, 2),
)
"""Shape, tokens of prompts and of completions, and groups in a pass."""
CLOSE = 1.5
"""Errors with copied keys over those of each row with keys of its own."""


def group_rows(groups: int, prompt: int, completions: list[int], *, vocab: int) -> list[Row]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(vocab, (n,), generator=draw).tolist()

    rows: list[Row] = []
    for group in range(groups):
        asked = tokens(prompt)
        for number, length in enumerate(completions):
            rows.append(
                Row(
                    id=f"{group}.{number}",
                    group_id=str(group),
                    token_ids=asked + tokens(length),
                    loss_mask=[False] * prompt + [True] * length,
                )
            )
    return rows


def batches(rows: list[Row]) -> dict[str, MicroBatch]:
    weights = [1.0] * len(rows)
    return {
        "plain": collate(rows, weights, DEVICE),
        "shared": collate(rows, weights, DEVICE, prefixes=shared_prefixes(rows)),
    }


def gathered(run: Run) -> None:
    rows = group_rows(2, 131, [70, 1, 300, 64], vocab=100)
    shared = split(batches(rows)["shared"], Mesh.alone(DEVICE)).context
    for heads, kv_heads, width, window in ((16, 8, 128, None), (14, 2, 64, 100), (32, 8, 128, 7)):
        shapes = [(shared.num_tokens, n, width) for n in (heads, kv_heads, kv_heads)]
        draw = torch.Generator("cuda").manual_seed(1)
        leaves = [torch.randn(s, generator=draw, device=DEVICE).bfloat16() for s in shapes]
        upstream = torch.randn(shapes[0], generator=draw, device=DEVICE).bfloat16()
        exact = differentiate(leaves, upstream, partial(in_float64, shared, window))
        for name, module in (("FA2", flash), ("FA4", flash4)):
            if module is flash4 and not flash4.is_usable(DEVICE, width):
                run.row(f"{name} is not installed")
                continue
            attend_packed: Any = partial(module.packed_attention, scale=width**-0.5, window=window)
            errors = [
                [
                    float((a.double() - b).norm() / b.norm())
                    for a, b in zip(found, exact, strict=True)
                ]
                for found in (
                    differentiate(leaves, upstream, partial(with_keys, attend_packed, shared)),
                    differentiate(leaves, upstream, partial(apart, attend_packed, shared)),
                )
            ]
            good = all(ours <= CLOSE * theirs + 1e-4 for ours, theirs in zip(*errors, strict=True))
            told = ", ".join(f"{a:.2e} ({b:.2e})" for a, b in zip(*errors, strict=True))
            run.check(f"{name} {heads}/{kv_heads} heads of {width}, window {window}: {told}", good)


def with_keys(attend: Any, context: PackedContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert context.keys is not None
    return attend(q, *gather_keys(k, v, context.keys), context)


def apart(attend: Any, context: PackedContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As if each sequence had packed all of its tokens."""
    keys = context.keys
    assert keys is not None
    every = (x.index_select(0, keys.index) for x in (q, k, v))
    whole = PackedContext.from_lengths(keys.lengths, device=DEVICE)
    return attend(*every, whole)[own_places(context)]


def own_places(context: PackedContext) -> Tensor:
    """Where the packed tokens lie among the keys: the last of each sequence."""
    assert context.keys is not None
    ends = torch.tensor(context.keys.lengths).cumsum(0).tolist()
    spans = zip(ends, context.lengths, strict=True)
    return torch.cat([torch.arange(end - n, end) for end, n in spans]).to(DEVICE)


def in_float64(
    context: PackedContext, window: int | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    keys = context.keys
    assert keys is not None
    every = [x.double().index_select(0, keys.index).split(list(keys.lengths)) for x in (q, k, v)]
    width = q.shape[-1]
    output = [attend(*own, scale=width**-0.5, window=window) for own in zip(*every, strict=True)]
    return torch.cat(output)[own_places(context)]


def differentiate(
    leaves: list[Tensor], upstream: Tensor, call: Callable[..., Tensor]
) -> list[Tensor]:
    own = [x.detach().requires_grad_() for x in leaves]
    output = call(*own)
    return [output.detach(), *torch.autograd.grad(output, own, upstream.to(output.dtype))]


class Pass:
    """Forward and backward over a micro-batch."""

    def __init__(self, model: Any, batch: MicroBatch) -> None:
        self.model, self.batch = model, batch
        self.share = split(batch, Mesh.alone(DEVICE))
        draw = torch.Generator("cuda").manual_seed(0)
        self.weights = torch.randn(len(batch.labels), generator=draw, device=DEVICE)

    def logprobs(self) -> Tensor:
        share = self.share
        hidden = hidden_states(self.model, share.input_ids, share.position_ids, share.context)
        return token_logprobs(
            self.model,
            hidden[share.predict_index],
            share.labels,
            temperature=1.0,
            chunk_tokens=1024,
            with_entropy=True,
        )[0]

    def __call__(self) -> None:
        (self.logprobs() * self.weights).sum().backward()


def passes(run: Run) -> None:
    rows = group_rows(3, 200, [70, 1, 300, 64], vocab=1000)
    found: dict[str, list[Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build("qwen3-0.6b", num_layers=4, dtype=dtype)
        for name, batch in batches(rows).items():
            work = Pass(model, batch)
            logprobs = work.logprobs()
            (logprobs * work.weights).sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            gradient = torch.cat([grad.double().flatten() for grad in gradients])
            found[f"{name} {dtype}"] = [logprobs.detach().double(), gradient]
            model.zero_grad()
    exact = found["plain torch.float32"]
    for number, kind in enumerate(("log-probabilities", "gradient")):
        errors = {
            name: float((own[number] - exact[number]).norm() / exact[number].norm())
            for name, own in found.items()
        }
        good = errors["shared torch.float32"] < 1e-4
        good &= errors["shared torch.bfloat16"] < CLOSE * errors["plain torch.bfloat16"]
        run.check(f"{kind}: {errors}", good)


def speed(run: Run) -> None:
    run.row("forward and backward", "plain ms", "shared ms", "times", "tokens", "predicted")
    policies: dict[str, Any] = {}
    for shape, prompt, completion, groups in WORKLOADS:
        name = f"{shape} {groups} groups of {GROUP} x ({prompt} + {completion})"
        if not run.has_time(name):
            return
        with run.attempt(name):
            if shape not in policies:
                policies.clear()
                policies[shape] = compiled_policy(build(shape))
            model = policies[shape].model
            rows = group_rows(groups, prompt, [completion] * GROUP, vocab=model.config.vocab_size)
            found = batches(rows)
            times = {n: device_ms(Pass(model, batch), 5) for n, batch in found.items()}
            sizes = ModelShape.from_config(model.config.to_dict())
            lengths, trained = [row.num_tokens for row in rows], sum(r.num_trained for r in rows)
            whole = sizes.forward_flops(lengths, num_head_tokens=trained)
            less = sizes.forward_flops([prompt] * groups * (GROUP - 1), num_head_tokens=0)
            run.row(
                name,
                times["plain"],
                times["shared"],
                times["plain"] / times["shared"],
                f"{found['plain'].num_tokens} to {found['shared'].num_tokens}",
                whole / (whole - less),
            )


def main() -> None:
    run = Run(__doc__, SECTIONS, seconds=240)
    work = (gathered, passes, speed)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)}))


if __name__ == "__main__":
    main()
