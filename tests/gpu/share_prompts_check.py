"""Shared prompts on one GPU: parity with ordinary packing, and what they save.

    python -m tests.gpu.share_prompts_check [SECTION ...] [--prompts 32] [--seconds N]

Sections; in the first and third, shared prompts and ordinary packing in bfloat16 are both compared
with ordinary packing in float32:

    attention        output and gradients of one attention
    attention-times  forward and backward of one
    step             log-probabilities and gradients of the trainer, 0.6B
    step-times       forward and backward of `prompts` x 8 samples, scaled to 64 prompts

Tokens count as in ordinary packing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.attention.backends import choose_packed_backend
from hone.attention.interface import attend_packed
from hone.config.algorithm import AlgorithmConfig
from hone.config.trainer import TrainerConfig
from hone.trainer.packing import collate
from hone.trainer.trainer import PolicyTrainer
from hone.types import Trajectory
from tests.gpu.models import build
from tests.gpu.rounding import KIND, WHOLE, errors, split_noise, worst_ratio
from tests.gpu.sections import Run
from tests.gpu.timing import device_ms

HEADS, KEY_HEADS, HEAD_DIM, SCALE = 16, 8, 128, 128**-0.5
SAMPLES, STEP_PROMPTS, BUDGET = 8, 64, 16384
SHAPES = ((512, 512), (128, 1024))
PARITY_LENGTHS = ((40, 3), (700, 1, 90, 300), (1, 500, 20), (513, 64, 65, 1, 200))
"""A prompt and its completions each."""
ATTENTION_NOISE = 2.0
"""Error of one attention over that of ordinary packing: outputs and gradients of its blocks are
rounded on their own, and a gradient of a shared prompt is a sum of many."""
GIB = 1 << 30


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# ---------------------------------------------------------------- attention


class Row:
    """q, k, v and the output's gradient, of shared prompts and of the same rows one by one."""

    def __init__(self, groups: Sequence[Sequence[int]], dtype: torch.dtype = torch.bfloat16):
        prompts = [lengths[0] for lengths in groups]
        completions = [n for lengths in groups for n in lengths[1:]]
        pieces = (*prompts, *completions)
        counts = [len(lengths) - 1 for lengths in groups]
        self.shared = PackedContext.from_lengths(pieces, shared_prompts=counts, device="cuda")
        starts = torch.tensor([0, *pieces]).cumsum(0).tolist()
        owners = [g for g, count in enumerate(counts) for _ in range(count)]
        rows: list[Tensor] = []
        for c, g in enumerate(owners, start=len(prompts)):
            prompt = torch.arange(starts[g], starts[g + 1])
            rows.append(torch.cat([prompt, torch.arange(starts[c], starts[c + 1])]))
        self.alone = PackedContext.from_lengths([len(row) for row in rows], device="cuda")
        self.places = torch.cat(rows).cuda()  # where each token of `alone` lies in `shared`
        self.is_own = self.places >= starts[len(prompts)]
        # One of each prompt's copies hands on its gradient, as its only one does when shared.
        is_first = torch.zeros_like(self.is_own)
        begin = 0
        for row, (g, before) in zip(rows, zip(owners, [-1, *owners], strict=False), strict=True):
            is_first[begin : begin + prompts[g]] = g != before
            begin += len(row)
        self.handed_on = self.is_own | is_first
        draw = torch.Generator("cuda").manual_seed(0)
        widths = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
        self.tensors = [
            torch.randn(sum(pieces), width, HEAD_DIM, generator=draw, device="cuda")
            .bfloat16()
            .to(dtype)
            for width in widths
        ]

    def results(self, *, is_shared: bool, **options: int) -> list[Tensor]:
        """Output and gradients of q, k and v, in the layout of shared prompts."""
        inputs = [x.detach().requires_grad_() for x in self.tensors[:3]]
        grad = self.tensors[3]
        if is_shared:
            output = attend_packed(*inputs, self.shared, scale=SCALE, **options)
            output.backward(grad)
        else:
            copies = [x.float()[self.places].to(x.dtype) for x in inputs]
            copied = attend_packed(*copies, self.alone, scale=SCALE, **options)
            copied.backward(grad[self.places] * self.handed_on[:, None, None])
            output = torch.empty_like(inputs[0]).index_copy_(0, self.places, copied.detach())
        return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def check_attention(run: Run) -> None:
    run.row("attention, error of shared/ordinary", "output", "dq", "dk", "dv")
    for options in ({}, {"window": 200}, {"window": 7}):
        expected = Row(PARITY_LENGTHS, torch.float32).results(is_shared=False, **options)
        row = Row(PARITY_LENGTHS)
        found = row.results(is_shared=True, **options)
        ordinary = row.results(is_shared=False, **options)
        off = [distance(a, b) for a, b in zip(found, expected, strict=True)]
        noise = [distance(a, b) for a, b in zip(ordinary, expected, strict=True)]
        good = all(e <= ATTENTION_NOISE * n for e, n in zip(off, noise, strict=True))
        cells = [f"{e:.0e}/{n:.0e}" for e, n in zip(off, noise, strict=True)]
        run.check(f"attention, {options or 'full'}", good, *cells)


def time_attention(run: Run) -> None:
    backend = choose_packed_backend(
        torch.device("cuda"), torch.bfloat16, head_dim=HEAD_DIM, softcap=None
    )
    run.row(f"attention, ms ({backend})", "forward", "shared", "backward", "shared")
    for prompt, completion in SHAPES:
        row = Row([(prompt, *[completion] * SAMPLES)] * 2)
        cells: list[float] = []
        for context, places in ((row.alone, row.places), (row.shared, None)):
            q, k, v, grad = (x if places is None else x[places] for x in row.tensors)
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]

            def forward() -> Tensor:
                return attend_packed(*inputs, context, scale=SCALE)  # noqa: B023

            output = forward()

            def backward() -> object:
                return torch.autograd.grad(output, inputs, grad, retain_graph=True)  # noqa: B023

            cells += [device_ms(forward), device_ms(backward)]
        run.row(f"2 x 8 x ({prompt} + {completion})", cells[0], cells[2], cells[1], cells[3])


# ---------------------------------------------------------------- a step


def rows_of(num_prompts: int, prompt: int, completion: int, vocab: int) -> list[Trajectory]:
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(vocab, (count,), generator=draw).tolist()

    rows: list[Trajectory] = []
    for g in range(num_prompts):
        shared = ids(prompt)
        rows += [
            Trajectory(
                id=f"{g}/{i}",
                group_id=str(g),
                token_ids=shared + ids(completion),
                loss_mask=[False] * prompt + [True] * completion,
                advantages=torch.full((completion,), (-1.0) ** i),
            )
            for i in range(SAMPLES)
        ]
    return rows


def trainer_of(model: PreTrainedModel, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(
        model,
        # The layers that train with shared prompts, in the ordinary rows too.
        TrainerConfig(max_tokens_per_microbatch=BUDGET, **settings),
        AlgorithmConfig(),
        temperature=1.0,
        max_completion_tokens=1024,
        total_steps=10,
    )


def configure(trainer: PolicyTrainer, *, share_prompts: bool) -> None:
    """Of one trainer, since a second one would compile its layers again."""
    trainer._share_prompts = share_prompts


def gradient(trainer: PolicyTrainer, rows: Sequence[Trajectory]) -> dict[str, Tensor]:
    trainer.forward_backward(rows)
    found = {name: g.float().clone() for name, g in trainer.policy.gradients.items()}
    trainer.policy.drop_gradient()
    return found


@cache
def trainer_of_all() -> PolicyTrainer:
    return trainer_of(build("qwen3-0.6b"))


def check_step(run: Run) -> None:
    """Log-probs and gradients of three groups of uneven completions."""
    trainer = trainer_of_all()
    rows = rows_of(3, 300, 200, trainer.policy.model.config.vocab_size)
    for i, row in enumerate(rows):
        num_trained = 1 + 25 * (i % SAMPLES)
        row.token_ids = row.token_ids[: 300 + num_trained]
        row.loss_mask = row.loss_mask[: 300 + num_trained]
        row.advantages = torch.full((num_trained,), (-1.0) ** i)
    wide = build("qwen3-0.6b", dtype=torch.float32)
    precise = trainer_of(wide, compile=False, recompute="full")
    expected = torch.cat(precise.logprobs(rows)), gradient(precise, rows)
    del precise, wide
    run.row("step, errors against float32", "log-prob", "largest", "gradient")
    gaps: list[float] = []
    off: list[dict[str, float]] = []
    for name, share_prompts in (("ordinary", False), ("shared", True)):
        configure(trainer, share_prompts=share_prompts)
        gap = (torch.cat(trainer.logprobs(rows)) - expected[0]).abs()
        gaps.append(gap.mean().item())
        off.append(errors(gradient(trainer, rows), expected[1]))
        run.row(f"step, {name}", gaps[-1], gap.max().item(), off[-1]["all"])
    worst, kind = worst_ratio(off[1], off[0])
    ratios = gaps[1] / gaps[0], off[1]["all"] / off[0]["all"]
    noise = split_noise()
    good = all(r <= WHOLE * noise for r in ratios) and worst <= KIND * noise
    run.check("step, shared / ordinary", good, ratios[0], "", ratios[1], kind, worst)


def time_steps(run: Run) -> None:
    trainer, num_prompts = trainer_of_all(), run.args.prompts
    columns = ("s", "tokens/s", "laid out", "passes", "peak GiB")
    run.row(f"forward and backward, {STEP_PROMPTS} x 8", *columns)
    vocab = trainer.policy.model.config.vocab_size
    for prompt, completion in SHAPES:
        rows = rows_of(num_prompts, prompt, completion, vocab)
        seconds: list[float] = []
        for share in (False, True):
            configure(trainer, share_prompts=share)
            gradient(trainer, rows[: 2 * SAMPLES])
            batches = trainer._plan(rows, BUDGET, trainer._mesh)[0]
            laid_out = sum(
                collate([rows[i] for i in b], [1.0] * len(b), "cpu", share_prompts=share).num_tokens
                for b in batches
            )
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            trainer.forward_backward(rows)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            trainer.policy.drop_gradient()
            scale = STEP_PROMPTS / num_prompts
            run.row(
                f"{prompt} + {completion} {'shared' if share else 'ordinary'}",
                seconds[-1] * scale,
                sum(row.num_tokens for row in rows) / seconds[-1],
                int(laid_out * scale),
                int(len(batches) * scale),
                torch.cuda.max_memory_allocated() / GIB,
            )
        run.row("  ordinary over shared", seconds[0] / seconds[1])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=32, help="of the timed step")


def main() -> None:
    names = ("attention", "attention-times", "step", "step-times")
    run = Run(__doc__, names, seconds=200, add_flags=add_flags)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    work = (check_attention, time_attention, check_step, time_steps)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(names, work, strict=True)}))


if __name__ == "__main__":
    main()
