"""What each memory knob of the trainer saves and costs on one GPU, and that numbers stay the same.

`python -m benchmarks.gpu.memory_knobs [table.md [shape ...]]`. Randomly initialised Qwen3 shapes in
bfloat16 take steps of one micro-batch of 16,384 tokens in rows of 2,048, layers compiled. Prints a
line a measurement and a markdown table last: memory by kind, what the knob saves of the peak, and
what it adds to the time of a step with `STEP_TOKENS` tokens, as so many micro-batches and one
optimizer step take. Before it: the kernel of bfloat16 moments, the rates of bus and cores, and the
hand-over of memory to an engine.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.models import build, compiled_policy
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.models.decoder import hidden_states
from hone.trainer.logprobs import token_logprobs
from hone.trainer.narrow_moments import adamw_bfloat16_
from hone.trainer.offload import StateOffload, host_tensors
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer

LENGTH, TOKENS, STEP_TOKENS = 2048, 16384, 262144
GIB = 1 << 30
DEVICE = torch.device("cuda")
CYCLES = 100
TIME_LIMIT_S = 200
COMBINATIONS = ("offload_optimizer + bfloat16", "recompute full, every 2nd layer")
"""Measured with the first shape only."""

GRADIENTS = {"offload": "gradients"}
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "recompute full, every 2nd layer": {"recompute": "full", "recompute_every_n_layers": 2},
    "recompute full + offload_activations": {"recompute": "full", "offload_activations": True},
    "offload_optimizer": {"offload": "optimizer"},
    "offload_gradients": GRADIENTS,
    "state_dtype bfloat16": {"state_dtype": "bfloat16"},
    "offload_optimizer + bfloat16": {"offload": "optimizer", "state_dtype": "bfloat16"},
    "all (full, all offloads, bfloat16)": GRADIENTS
    | {"recompute": "full", "offload_activations": True, "state_dtype": "bfloat16"},
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def allocated() -> float:
    return torch.cuda.memory_allocated() / GIB


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def median_s(function: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


class Trained:
    """A policy, its optimizer and one micro-batch."""

    def __init__(self, model: PreTrainedModel, *, state_dtype: str = "float32", **knobs: Any):
        self.policy = compiled_policy(model, **knobs)
        offload = "offload_optimizer" in knobs
        self.optimizer = ParameterOptimizer(
            self.policy.masters,
            OptimizerConfig.model_validate({"lr": 1e-4, "state_dtype": state_dtype}),
            self.policy.embedding_names,
            offload=offload,
            device=self.policy.device,
            gradients_on_host=self.policy.gradients_on_host,
            write_back=self.policy.write_back if self.policy.masters_on_host else None,
        )
        lengths = (LENGTH,) * (TOKENS // LENGTH)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (TOKENS,), generator=generator)
        self.ids = ids.to(DEVICE)
        self.positions = torch.arange(LENGTH, device=DEVICE).repeat(len(lengths))
        self.context = PackedContext.from_lengths(lengths, device=DEVICE)

    def micro_batch(self) -> Tensor:
        model = self.policy.model
        hidden_TD = hidden_states(model, self.ids, self.positions, self.context)
        logprobs, _ = token_logprobs(
            model,
            hidden_TD[:-1],
            self.ids[1:],
            temperature=1.0,
            chunk_tokens=1024,
        )
        loss = -logprobs.mean()
        loss.backward()
        return loss.detach()

    def apply(self) -> None:
        clip = (1.0 / (self.policy.gradient_norm() + 1e-6)).clamp(max=1.0)
        self.policy.apply(lambda: self.optimizer.step(self.policy.gradients, 1.0, clip))
        self.policy.drop_gradient()

    def fingerprint(self) -> list[Tensor]:
        names = list(self.policy.masters)
        chosen = (names[0], names[len(names) // 2], names[-1])
        # A copy: masters on the host move on with the steps that are timed afterwards.
        return [self.policy.masters[n].detach().flatten()[:1000000].cpu().clone() for n in chosen]


@dataclass
class Row:
    knob: str
    peak: float
    weights: float
    masters_moments: float
    gradients: float
    activations: float
    micro_batch_s: float
    apply_s: float
    losses: list[float]
    masters: list[Tensor]

    @property
    def step_s(self) -> float:
        return STEP_TOKENS / TOKENS * self.micro_batch_s + self.apply_s


def measure(shape: str, knob: str) -> Row:
    clean()
    model = build(shape)
    trained = Trained(model, **KNOBS[knob])
    # Layers whose weights lie on the host have empty storages.
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters()) / GIB
    losses = [float(trained.micro_batch())]
    trained.apply()
    losses.append(float(trained.micro_batch()))
    trained.apply()
    masters = trained.fingerprint()
    clean()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    trained.micro_batch()
    gradients = allocated() - before
    trained.micro_batch()  # from here on gradients exist beside activations
    peak = torch.cuda.max_memory_allocated() / GIB
    activations = peak - before - gradients
    torch.cuda.reset_peak_memory_stats()
    apply_s = median_s(trained.apply, 1)
    peak = max(peak, torch.cuda.max_memory_allocated() / GIB)
    assert abs(allocated() - before) < 0.06, f"{knob}: a step leaves {allocated() - before:.2f} GiB"
    micro_batch_s = median_s(trained.micro_batch, 2)
    apply_s = min(apply_s, median_s(trained.apply, 1))
    row = Row(
        knob, peak, weights, before - weights, gradients, activations, micro_batch_s, apply_s,
        losses, masters,
    )  # fmt: skip
    say(
        f"{shape} | {knob}: peak {peak:.2f} GiB = weights {weights:.2f}, masters and moments "
        f"{row.masters_moments:.2f}, gradients {gradients:.2f}, activations {activations:.2f}; "
        f"micro-batch {1e3 * micro_batch_s:.1f} ms, apply {1e3 * apply_s:.1f} ms, losses {losses}"
    )
    return row


def compare(row: Row, base: Row) -> str:
    """Relative change of masters; compiled reductions and atomics may differ in their last bit."""
    pairs = zip(row.masters, base.masters, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    worst = max(
        float((a - b).norm() / b.norm()) for a, b in zip(row.masters, base.masters, strict=True)
    )
    off = max(abs(a - b) for a, b in zip(row.losses, base.losses, strict=True))
    assert worst < 2e-3, f"{row.knob}: masters differ by {worst}"
    assert off < 0.02, f"{row.knob}: losses differ by {off}"
    return "same bits" if same else f"{worst:.0e}"


def table(shape: str, *, combinations: bool, until: float) -> list[str]:
    rows: list[Row] = []
    for knob in KNOBS:
        if knob in COMBINATIONS and not combinations:
            continue
        if time.perf_counter() > until:
            say(f"no time left for {shape} | {knob}")
            continue
        rows.append(measure(shape, knob))
    base = rows[0]
    lines = [
        "",
        f"### {shape}: {TOKENS:,} tokens a micro-batch, {STEP_TOKENS:,} a step",
        "",
        "| knob | peak GiB | peak GiB saved | time cost % | masters + moments | gradients | "
        "activations | micro-batch ms | optimizer ms | masters after 2 steps |",
        "| --- | " + "--- | " * 9,
    ]
    for row in rows:
        cost = 100 * (row.step_s / base.step_s - 1)
        lines.append(
            f"| {row.knob} | {row.peak:.1f} | {base.peak - row.peak:.1f} | {cost:+.1f} | "
            f"{row.masters_moments:.1f} | {row.gradients:.1f} | {row.activations:.1f} | "
            f"{1e3 * row.micro_batch_s:.0f} | {1e3 * row.apply_s:.0f} | {compare(row, base)} |"
        )
    return lines


def rss() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def hand_over(shape: str) -> list[str]:
    """R14 and R16: sleep and wake of the trainer's state."""
    clean()
    trained = Trained(build(shape))
    trained.micro_batch()
    trained.apply()
    before = trained.fingerprint()
    clean()
    free, full = torch.cuda.mem_get_info()[0] / GIB, allocated()

    def sleep() -> None:
        trained.policy.sleep(trained.optimizer.device_tensors())

    first_s = median_s(sleep, 1)
    asleep, freed = allocated(), torch.cuda.mem_get_info()[0] / GIB - free
    trained.policy.wake()
    sleeps, wakes = [], []
    for _ in range(6):
        sleeps.append(median_s(sleep, 1))
        wakes.append(median_s(trained.policy.wake, 1))
    assert all(torch.equal(a, b) for a, b in zip(trained.fingerprint(), before, strict=True))
    drift, growth = cycles()
    return [
        f"sleep {shape}: {full:.2f} -> {asleep:.2f} GiB ({freed:.2f} GiB to the driver), first "
        f"{first_s:.2f} s, then sleep {1e3 * sorted(sleeps)[3]:.0f} ms, wake "
        f"{1e3 * sorted(wakes)[3]:.0f} ms (300 asked); over {CYCLES} cycles the driver's free "
        f"memory moved by {drift:.3f} GiB, host memory by {growth:.4f} GiB"
    ]


def cycles() -> tuple[float, float]:
    """Largest change of the driver's free memory, and growth of host memory over the second half
    of many cycles with half a GiB."""
    tensors = [torch.randn(1 << 21, device=DEVICE) for _ in range(64)]
    before = [t[::1001].clone() for t in tensors]
    clean()
    free = torch.cuda.mem_get_info()[0] / GIB
    parking, drift, host = StateOffload(), 0.0, 0.0
    for cycle in range(CYCLES):
        parking.offload(tensors)
        parking.restore()
        drift = max(drift, abs(free - torch.cuda.mem_get_info()[0] / GIB))
        host = rss() if cycle == CYCLES // 2 else host
    growth = rss() - host
    assert all(torch.equal(t[::1001], b) for t, b in zip(tensors, before, strict=True))
    assert drift < 0.25, f"the driver's free memory moved by {drift:.2f} GiB"
    assert growth < 0.01, f"host memory grew by {growth:.3f} GiB"
    return drift, growth


def rates() -> list[str]:
    """The two ways to step over host memory: bus against cores."""
    size = 2 * GIB
    start = time.perf_counter()
    (buffer,) = host_tensors([(torch.Size([size]), torch.uint8)], DEVICE, purpose="rates")
    lock_s = time.perf_counter() - start
    there, back = torch.cuda.Stream(), torch.cuda.Stream()
    on_device = [torch.empty(size // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    up, down = buffer.split(size // 2)

    def both() -> None:
        with torch.cuda.stream(there):
            on_device[0].copy_(up, non_blocking=True)
        with torch.cuda.stream(back):
            down.copy_(on_device[1], non_blocking=True)

    one_s = median_s(lambda: on_device[0].copy_(up, non_blocking=True), 5)
    both_s = median_s(both, 5)
    num = 1 << 27
    parameter = torch.nn.Parameter(torch.randn(num))
    parameter.grad = torch.randn(num)
    cpu_adamw = torch.optim.AdamW([parameter], fused=True)
    cpu_adamw.step()
    cpu_s = median_s(cpu_adamw.step, 3)
    return [
        f"bus: {size / 2 / one_s / 1e9:.1f} GB/s one way, {size / 2 / both_s / 1e9:.1f} GB/s each "
        f"way at once; locking {lock_s / 2:.2f} s a GiB",
        f"a step of 1e9 parameters with float32 moments: streamed {12e9 * both_s / (size / 2):.2f} "
        f"s, fused AdamW on {torch.get_num_threads()} threads {1e9 * cpu_s / num:.2f} s and copies",
    ]


def check_kernel() -> list[str]:
    """AdamW with bfloat16 moments against the step in torch, and its rate."""
    cfg, size = OptimizerConfig(eps=1e-8), 10_000_019
    generator = torch.Generator().manual_seed(1)
    w, g = torch.randn(2, size, generator=generator)
    g *= 1e-3
    m = (1e-3 * torch.randn(size, generator=generator)).bfloat16()
    v = (1e-6 * torch.rand(size, generator=generator)).bfloat16()
    device = [t.to(DEVICE) for t in (w, g, m, v)]
    step = partial(
        adamw_bfloat16_, first_index=7, seed=12345, num_steps=3, cfg=cfg, lr=1e-3, decay=0.1
    )
    step(w, g, m, v)
    step(*device)
    error = float((device[0].cpu() - w).abs().max())
    flips = [
        float((a.cpu().view(torch.int16) != b.view(torch.int16)).float().mean())
        for a, b in zip(device[2:], (m, v), strict=True)
    ]
    assert error < 1e-6, error
    assert max(flips) < 2e-3, flips
    seconds = median_s(lambda: step(*device), 10)
    return [
        f"bfloat16 AdamW: largest error {error:.1e}, moments that round differently "
        f"{max(flips):.1e}, {20 * size / seconds / 1e12:.2f} TB/s"
    ]


def main() -> None:
    arguments = sys.argv[1:]
    path = Path(arguments[0]) if arguments else Path(os.environ.get("OUT", ".")) / "memory.md"
    shapes = arguments[1:] or ["qwen3-1.7b", "qwen3-4b"]
    start = time.perf_counter()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    lines = [*check_kernel(), *rates(), *hand_over("qwen3-0.6b")]
    for line in lines:
        say(line)
    for shape in shapes:
        lines += table(shape, combinations=shape == shapes[0], until=start + TIME_LIMIT_S)
        path.write_text("\n".join(lines) + "\n")
        say(f"[{time.perf_counter() - start:.0f} s]")
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    say("\n".join([*lines, f"host peak {peak_rss:.1f} GiB"]))


if __name__ == "__main__":
    main()
