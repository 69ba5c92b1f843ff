"""Tensor parallelism of training on GPUs, four layers split over all ranks and whole on each.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.tensor_check [SECTION ...] [--shape qwen3-1.7b]

Sections:

    float32   log-probabilities and gradients of packed rows against the whole model
    bfloat16  errors against float32, over those of the whole model in bfloat16
    compiled  the same with compiled layers
    times     forward and backward, compiled
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from functools import cache, partial
from time import perf_counter

import torch
import torch.distributed as dist
from benchmarks.gpu.models import build
from benchmarks.gpu.rounding import KIND, WHOLE, errors, split_noise, worst_ratio
from benchmarks.gpu.sections import Run
from benchmarks.gpu.timing import wall_ms
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Axis, Mesh
from hone.distributed.settings import AxisSizes
from hone.models.decoder import hidden_states
from hone.models.tiny import SHAPES
from hone.trainer.logprobs import token_logprobs
from hone.trainer.tensor import parallelize

NUM_LAYERS, LENGTH = 4, 1024
SIZES = (2 * LENGTH + 37, 2 * LENGTH)
"""Tokens of a pass: one that ranks do not share equally, and one that they do."""
MAX_LOGPROB, MAX_GRADIENT = 2e-4, 2e-3
"""In float32: largest difference, and relative one."""

Result = tuple[Tensor, dict[str, Tensor]]
"""Log-probabilities and whole gradients by name."""


class Models:
    """The model whole and split, each made once; all have the same weights."""

    def __init__(self, run: Run, mesh: Mesh) -> None:
        self.run, self.mesh = run, mesh

    @cache  # noqa: B019  # lives as long as the process
    def pair(self, dtype: torch.dtype, *, compiled: bool) -> tuple[PreTrainedModel, ...]:
        whole = build(self.run.args.shape, num_layers=NUM_LAYERS, dtype=dtype)
        split = copy.deepcopy(whole)
        parallelize(split, self.mesh)
        for model in (whole, split) if compiled else ():
            for layer in model.base_model.layers:
                layer.compile(dynamic=True)
        return whole, split

    @cache  # noqa: B019
    def wide(self, num_tokens: int) -> Result:
        whole, _ = self.pair(torch.float32, compiled=False)
        return result(whole, num_tokens, None)

    def both(self, dtype: torch.dtype, num_tokens: int, *, compiled: bool) -> tuple[Result, Result]:
        """Of the whole model and of the split one."""
        whole, split = self.pair(dtype, compiled=compiled)
        alone = self.timed("whole", compiled, partial(result, whole, num_tokens, None))
        return alone, self.timed(
            "split", compiled, partial(result, split, num_tokens, self.mesh.tensor)
        )

    def timed(self, name: str, compiled: bool, work: partial[Result]) -> Result:
        """What it returns; says how long a first pass took, and how many graphs it compiled."""
        begun, before = perf_counter(), counters["stats"]["unique_graphs"]
        found = work()
        torch.cuda.synchronize()
        if compiled:
            graphs = counters["stats"]["unique_graphs"] - before
            self.run.note(f"{name}: {graphs} graphs compiled", f"{perf_counter() - begun:.1f} s")
        return found


def forward_backward(model: PreTrainedModel, num_tokens: int, ranks: Axis | None) -> Tensor:
    """Log-probabilities of packed rows, the last of which may be short; gradients in the model."""
    draw = torch.Generator().manual_seed(num_tokens)
    ids, labels = torch.randint(model.config.vocab_size, (2, num_tokens), generator=draw).cuda()
    lengths = [LENGTH] * (num_tokens // LENGTH)
    lengths += [num_tokens % LENGTH] if num_tokens % LENGTH else []
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    context = PackedContext.from_lengths(lengths, device="cuda")
    logprobs, entropy = token_logprobs(
        model,
        hidden_states(model, ids, positions, context),
        labels,
        temperature=1.0,
        chunk_tokens=1024,
        with_entropy=True,
        tensor=ranks,
    )
    assert entropy is not None
    model.zero_grad()
    (logprobs + 0.1 * entropy).sum().backward()
    return logprobs.detach()


def result(model: PreTrainedModel, num_tokens: int, ranks: Axis | None) -> Result:
    logprobs = forward_backward(model, num_tokens, ranks)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logprobs, {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in gradients.items()
    }


def check_float32(run: Run, models: Models) -> None:
    run.row("float32, split against whole", "log-prob", "gradient", "worst kind", "")
    for num_tokens in SIZES:
        (alone, wanted), (logprobs, found) = models.both(torch.float32, num_tokens, compiled=False)
        gap = float((logprobs - alone).abs().max())
        off = errors(found, wanted)
        worst = max(off.values())
        good = gap <= MAX_LOGPROB and all(e <= MAX_GRADIENT for e in off.values())
        run.check(f"{num_tokens} tokens", good, gap, off["all"], worst)


def check_bfloat16(run: Run, models: Models, *, compiled: bool) -> None:
    noise = split_noise(models.mesh.tensor.size)
    run.row(
        f"bfloat16{', compiled' * compiled}, error split / whole",
        *("log-prob", "ratio", "gradient", "ratio", "worst kind", "its ratio"),
    )
    for num_tokens in SIZES:
        if not run.has_time(f"{num_tokens} tokens, {compiled=}"):
            return
        exact, wanted = models.wide(num_tokens)
        whole, split = models.both(torch.bfloat16, num_tokens, compiled=compiled)
        gaps = [float((logprobs - exact).abs().mean()) for logprobs, _ in (whole, split)]
        plain, found = errors(whole[1], wanted), errors(split[1], wanted)
        ratios = gaps[1] / gaps[0], found["all"] / plain["all"]
        worst, kind = worst_ratio(found, plain)
        good = all(r <= WHOLE * noise for r in ratios) and worst <= KIND * noise
        cells = (gaps[1], ratios[0], found["all"], ratios[1], kind, worst)
        run.check(f"{num_tokens} tokens", good, *cells)


def time_passes(run: Run, models: Models) -> None:
    num_tokens = 8 * LENGTH
    run.row(f"{num_tokens} tokens, forward and backward", "one GPU ms", "split ms", "speed-up")
    for compiled in (False, True):
        whole, split = models.pair(torch.bfloat16, compiled=compiled)
        alone = wall_ms(partial(forward_backward, whole, num_tokens, None), 6)
        shared = wall_ms(partial(forward_backward, split, num_tokens, models.mesh.tensor), 6)
        run.row(f"{compiled=}", alone, shared, alone / shared)


def main() -> None:
    run = Run(
        __doc__,
        ("float32", "bfloat16", "compiled", "times"),
        seconds=150,
        add_flags=lambda p: p.add_argument("--shape", default="qwen3-1.7b", choices=SHAPES),
    )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    size = dist.get_world_size()
    mesh = JoinedMesh.of_group(AxisSizes(tensor=size), device, timeout=timedelta(seconds=120))
    run.row(f"{size} x {torch.cuda.get_device_name()}, {run.args.shape}, torch {torch.__version__}")
    models = Models(run, mesh)
    sys.exit(
        run.go(
            {
                "float32": partial(check_float32, run, models),
                "bfloat16": partial(check_bfloat16, run, models, compiled=False),
                "compiled": partial(check_bfloat16, run, models, compiled=True),
                "times": partial(time_passes, run, models),
            }
        )
    )


if __name__ == "__main__":
    main()
