"""Gradients and weights that wait on the host: the same bits, less device memory, how much time.

    python -m benchmarks.gpu.offload_check [eager] [compiled] [windows] [--shape qwen3-1.7b]
    torchrun --nproc-per-node 2 -m benchmarks.gpu.offload_check

Random Qwen3-1.7B takes steps of four micro-batches of 8,192 tokens with nothing on the host, the
same again (what attention's backward differs by from run to run), with the optimizer's states
there, with gradients, and with layers' weights, which come from host memory in the first place.
Several processes shard at stages 2 and 3. A row a case: memory after a step and its peak, in host
memory, milliseconds a step, and how far masters, log-probabilities and gradient norms are from
those of the first row. `windows` times other windows of device memory for gradients on their way.
Prints a table last; exits with 1 where numbers or memory are outside their bounds. `--dry` runs a
small shape on CPUs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.models import build
from benchmarks.gpu.parallel_check import make_rows, make_trainer
from benchmarks.gpu.sections import Run, release
from torch import Tensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import local_part
from hone.distributed.joined import JoinedMesh
from hone.distributed.processes import processes
from hone.distributed.settings import ParallelConfig
from hone.observe.metrics import to_scalars
from hone.trainer import host_gradients
from hone.trainer.host_gradients import HostGradients
from hone.trainer.trainer import Trainer

GIB = 1 << 30
LENGTH, NUM_ROWS, NUM_STEPS = 1024, 32, 3
OPTIMIZER = {"offload": "optimizer"}
GRADIENTS = {"offload": "gradients"}
PARAMETERS = {"offload": "parameters"}
ALONE = {
    "none": {},
    "none again": {},
    "optimizer": OPTIMIZER,
    "gradients": GRADIENTS,
}
SHARED = {
    "none": {"parallel": {"zero_stage": 3}},
    "none again": {"parallel": {"zero_stage": 3}},
    "stage 2, gradients": GRADIENTS | {"parallel": {"zero_stage": 2}},
    "stage 3, optimizer": OPTIMIZER | {"parallel": {"zero_stage": 3}},
    "stage 3, gradients": GRADIENTS | {"parallel": {"zero_stage": 3}},
    "stage 3, parameters": PARAMETERS | {"parallel": {"zero_stage": 3}},
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "intermediate_size": 128,
}


@dataclass
class Found:
    held: float
    """GiB on the device after a step."""
    peak: float
    host: float
    step_ms: float
    drift: float
    """GiB by which device memory after a step changes over the last steps."""
    norms: list[float]
    logprobs: Tensor
    masters: dict[str, Tensor]

    def apart(self, other: Found) -> float:
        """Largest relative difference of masters, gradient norms and log-probabilities."""
        return max(
            *(
                float((a - other.masters[n]).norm() / other.masters[n].norm().clamp(min=1e-12))
                for n, a in self.masters.items()
            ),
            *(abs(a / b - 1) for a, b in zip(self.norms, other.norms, strict=True)),
            float((self.logprobs - other.logprobs).norm() / other.logprobs.norm()),
        )


class Check:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.own = processes()
        self.is_dry: bool = run.args.dry
        self.device = torch.device("cpu" if self.is_dry else f"cuda:{self.own.local_rank}")
        if not self.is_dry:
            torch.cuda.set_device(self.device)
        shape: str = run.args.shape
        fields = SMALL if self.is_dry else {}
        self.model = build(shape, device="cpu", **fields)
        num_rows, length = (4, 160) if self.is_dry else (NUM_ROWS, LENGTH)
        self.rows = make_rows(num_rows, length, self.model.config.vocab_size)
        self.budget = max(num_rows * length // (4 * self.own.world_size), length)
        self.cases = ALONE if self.own.world_size == 1 else SHARED

    def allocated(self) -> float:
        return 0.0 if self.is_dry else torch.cuda.memory_allocated() / GIB

    def trainer(self, settings: dict[str, Any], *, compile: bool) -> Trainer:
        parallel = settings.get("parallel", {})
        mesh = JoinedMesh.join(ParallelConfig(**parallel, timeout_s=300), self.own, self.device)
        model: PreTrainedModel = copy.deepcopy(self.model)
        if self.own.world_size == 1:
            model.to(self.device)  # pyright: ignore[reportArgumentType]
        rest = {k: v for k, v in settings.items() if k != "parallel"}
        return make_trainer(
            model,
            mesh,
            parallel,
            compile=compile,
            recompute="full",
            max_tokens_per_microbatch=self.budget,
            **rest,
        )

    def measure(self, settings: dict[str, Any], *, compile: bool) -> Found:
        release()
        base = self.allocated()
        trainer = self.trainer(settings, compile=compile)
        norms = [to_scalars(trainer.update(self.rows))["train/grad_norm"] for _ in range(2)]
        logprobs = torch.cat(trainer.logprobs(self.rows))
        masters = {
            name: local_part(master.detach()).flatten()[::97].double().cpu()
            for name, master in trainer.policy.masters.items()
        }
        trainer.update(self.rows)
        release()
        held, times = self.allocated() - base, list[float]()
        for _ in range(NUM_STEPS):
            begun = perf_counter()
            trainer.update(self.rows)  # ends with numbers on the host
            times.append(1e3 * (perf_counter() - begun))
        peak = 0.0 if self.is_dry else torch.cuda.max_memory_allocated() / GIB - base
        drift = self.allocated() - base - held
        policy = trainer.policy
        state = [
            t for n, t in trainer.state_dict()[0].items() if not n.startswith("optimizer/step")
        ]
        away = [local_part(t.detach()) for t in state if t.device.type == "cpu"]
        host = (sum(t.nbytes for t in away) + policy.host_bytes) / GIB
        return Found(held, peak, host, sorted(times)[1], drift, norms, logprobs, masters)

    def steps(self, *, compile: bool) -> None:
        self.run.row(
            "compiled" if compile else "eager", "held GiB", "peak GiB", "host GiB", "ms", "apart"
        )
        found: dict[str, Found] = {}
        noise = 0.0
        for name, settings in self.cases.items():
            if not self.run.has_time(name):
                return
            with self.run.attempt(name):
                found[name] = one = self.measure(settings, compile=compile)
                apart = one.apart(found["none"])
                noise = apart if name == "none again" else noise
                # Compiled products of layers that visit may be other ones.
                good = apart <= max(3 * noise, 1e-3 if compile else 1e-6)
                good = good and abs(one.drift) < 0.02
                self.run.check(
                    name, good, one.held, one.peak, one.host, one.step_ms, f"{apart:.1e}"
                )
        for name, one in found.items():
            if "parameters" in name and not self.is_dry:
                self.run.check(
                    f"{name} saves of the peak", one.peak < 0.7 * found["none"].peak, one.peak
                )

    def windows(self) -> None:
        """Milliseconds a step by the window of gradients on their way, in layers each way."""
        settings = dict(self.cases[next(name for name in self.cases if "gradients" in name)])
        for layers in (0.25, 0.5, 1.0, 2.0, 4.0):
            if not self.run.has_time(f"window {layers}"):
                return

            def scaled(*args: Any, window_bytes: int, layers: float = layers) -> HostGradients:
                return HostGradients(*args, window_bytes=int(layers * window_bytes))

            with (
                patch.object(host_gradients, "HostGradients", scaled),
                patch.object(host_gradients, "BUCKET_BYTES", 16 << 20),
                self.run.attempt(f"window {layers}"),
            ):
                one = self.measure(settings, compile=False)
                self.run.row(
                    f"window of {layers} layers", one.held, one.peak, one.host, one.step_ms
                )


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shape", default="qwen3-1.7b")


def rss_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / (1 << 20)


def main() -> None:
    run = Run(
        __doc__,
        ("eager", "compiled", "windows"),
        on_request=("windows",),
        seconds=300,
        add_flags=flags,
    )
    check = Check(run)
    sections: dict[str, Callable[[], object]] = {
        "eager": lambda: check.steps(compile=False),
        "compiled": lambda: check.steps(compile=True),
        "windows": check.windows,
    }
    code = run.go(sections)
    run.note(f"host memory at the end {rss_gib():.1f} GiB")
    sys.exit(code)


if __name__ == "__main__":
    main()
