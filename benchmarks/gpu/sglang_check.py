"""SGLang behind the Engine protocol: parity, syncs, also under requests, sleep, speed.

    HONE_SGLANG_PYTHON=sglang/bin/python python -m benchmarks.gpu.sglang_check --shape qwen3-0.6b

Weights are random. The server is the one that `engine.backend=sglang` starts. Exits with 1 where a
check fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.gpu.sections import Run
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.engine.settings import EngineConfig
from hone.engine.sglang.engine import SGLangEngine
from hone.models.decoder import head_logits, hidden_states
from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny import make_model_folder
from hone.types import Completion, Request, SamplingParams
from hone.weights.sync import WeightSync

GIB = 2**30
MAX_K3 = 2e-3
DEVICE = torch.device("cuda", 0)


class Source:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)


class Checks:
    """The sections, over one model and one server."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        make_model_folder(folder, run.args.shape)
        cfg = ModelConfig(path=str(folder), init="random")
        self.model = load_model(cfg, device=DEVICE, seed=0)
        self.version = 0

    @cached_property
    def engine(self) -> SGLangEngine:
        start = perf_counter()
        cfg = EngineConfig(backend="sglang", max_num_seqs=256, enable_sleep=True)
        engine = SGLangEngine(self.model, cfg, eos_token_ids=(), max_model_len=2048)
        self.run.row("server started and filled, s", perf_counter() - start)
        return engine

    def requests(self, count: int, num_prompt: int, max_tokens: int) -> list[Request]:
        prompts = torch.randint(self.model.config.vocab_size, (count, num_prompt)).tolist()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return [
            Request(id=str(i), prompt_ids=tuple(prompt), sampling=params)
            for i, prompt in enumerate(prompts)
        ]

    def finish(self) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        while self.engine.has_unfinished:
            done |= {completion.request_id: completion for completion in self.engine.step()}
        return done

    def sample(self, requests: list[Request]) -> dict[str, Completion]:
        self.engine.submit(requests)
        return self.finish()

    @torch.inference_mode()
    def k3(self, requests: list[Request], done: dict[str, Completion]) -> float:
        """Mean k3 divergence of the model from what the engine reports."""
        total, count = 0.0, 0
        for request in requests:
            sampled = list(done[request.id].token_ids)
            ids = torch.tensor([*request.prompt_ids, *sampled], device=DEVICE)
            context = PackedContext.from_lengths([len(ids)], device=DEVICE)
            positions = torch.arange(len(ids), device=DEVICE)
            hidden = hidden_states(self.model, ids, positions, context)
            logits = head_logits(self.model, hidden[len(request.prompt_ids) - 1 : -1]).float()
            found = torch.log_softmax(logits, -1).gather(1, ids[-len(sampled) :, None])[:, 0]
            ratio = found - torch.tensor(list(done[request.id].logprobs), device=DEVICE)
            total += float((ratio.exp() - 1 - ratio).sum())
            count += len(sampled)
        return total / count

    @torch.no_grad()
    def push(self) -> None:
        """Change all weights and deliver them."""
        for parameter in self.model.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
        self.version += 1
        trainer: Any = Source(self.model)
        report = WeightSync(trainer, self.engine).push(self.version)
        self.run.row("sync, s", report.seconds)
        self.run.row("sync, GB/s", report.bytes / report.seconds / 1e9)

    def parity(self) -> None:
        requests = self.requests(64, 128, 128)
        for _ in range(3):
            k3 = self.k3(requests, self.sample(requests))
            self.run.check("k3", k3 < MAX_K3, f"{k3:.2e}")
            self.push()

    def change(self) -> None:
        """Weights change under requests: each token is of the version that it says."""
        requests = self.requests(64, 128, 512)
        self.engine.submit(requests)
        for _ in range(20):
            self.engine.step()
        self.push()
        done = self.finish()
        versions = [set(c.weight_versions) for c in done.values()]
        self.run.check("versions", {self.version - 1, self.version} in versions, f"{versions[:3]}")

    def sleep(self) -> None:
        self.engine.step()
        before = torch.cuda.mem_get_info(DEVICE)[0]
        start = perf_counter()
        self.engine.sleep()
        self.run.row("sleep, s", perf_counter() - start)
        freed = torch.cuda.mem_get_info(DEVICE)[0] - before
        is_freed = freed > self.engine.stats().weight_bytes
        self.run.check("sleep frees memory", is_freed, f"{freed / GIB:.1f} GiB")
        start = perf_counter()
        self.engine.wake()
        self.run.row("wake, s", perf_counter() - start)
        self.push()
        requests = self.requests(64, 128, 64)
        k3 = self.k3(requests, self.sample(requests))
        self.run.check("k3 after sleep", k3 < MAX_K3, f"{k3:.2e}")

    def speed(self) -> None:
        for count in (8, 64, 256):
            requests = self.requests(count, 128, 512)
            start = perf_counter()
            self.sample(requests)
            self.run.row(f"{count} sequences, tokens/s", count * 512 / (perf_counter() - start))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-0.6b")


if __name__ == "__main__":
    started = Run(__doc__, ("parity", "change", "sleep", "speed"), seconds=500, add_flags=add_flags)
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(started, Path(name))
        sections = ("parity", "change", "sleep", "speed")
        sys.exit(started.go({name: getattr(checks, name) for name in sections}))
