"""vLLM behind the Engine protocol: parity, syncs, sleep, and its steps beside ours.

    python -m benchmarks.gpu.vllm_check
    python -m benchmarks.gpu.vllm_check speed --shape qwen3-0.6b
    torchrun --nproc-per-node 2 -m benchmarks.gpu.vllm_check tensor --shape qwen3-8b
    python -m benchmarks.gpu.vllm_check --device cpu     # a tiny model: whether the script is sound

Under torchrun all processes are ranks of one engine, ours as well as vLLM's, in every section;
`tensor` is what matters there: that ranks agree, parity, syncs, and tokens a second beside ours.

Weights are random; all requests carry seeds. vLLM runs as `engine.backend=vllm` runs it: in this
process, without a step in flight. Exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton
from benchmarks.gpu.sections import Run, release
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.vllm.engine import VLLMEngine
from hone.models.decoder import head_logits, hidden_states
from hone.models.load import load_model
from hone.models.manifest import build_manifest, compare, export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel, shard_model
from hone.models.tiny import SHAPES, make_model_folder, make_tiny_model
from hone.tools.bench.measure import decode_steps, measure
from hone.types import Completion, Engine, Request, SamplingParams
from hone.weights.sync import WeightSync

GIB = 2**30
MAX_K3 = {"cuda": 2e-3, "cpu": 1e-9}
SPEEDS = {"cuda": ((8, 1024), (64, 1024), (256, 1024)), "cpu": ((1, 32), (8, 32), (32, 32))}
"""Sequences and prompt tokens of a decode measurement."""
DECODE_STEPS = {"cuda": 128, "cpu": 48}


class Source:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, model: PreTrainedModel, forgets: str = "") -> None:
        self.model, self.forgets = model, forgets

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, t) for n, t in export_weights(self.model) if n != self.forgets)


class Checks:
    """The sections, over one model and one vLLM engine that sleeps on request.

    Of several ranks each holds the whole model as well, to score with.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.device: str = run.args.device
        own = processes()
        device = torch.device("cuda", own.local_rank) if self.device == "cuda" else "cpu"
        self.tp = TensorParallel.from_environment(own.world_size, torch.device(device))
        if self.device == "cuda":
            make_model_folder(folder, run.args.shape)
            if run.args.layers:
                file = folder / "config.json"
                config = json.loads(file.read_text(encoding="utf-8"))
                file.write_text(json.dumps(config | {"num_hidden_layers": run.args.layers}))
        else:
            make_tiny_model(folder, weights=False, max_position_embeddings=512)
        cfg = ModelConfig(path=str(folder), init="random")
        self.model = load_model(cfg, device=device, seed=0)
        self.version = 0
        torch.manual_seed(1)  # ranks must ask the same, and change weights alike

    def config(self, **fields: object) -> EngineConfig:
        size = 16 if self.device == "cuda" else 0.25
        fields = {"tensor_parallel_size": self.tp.size, "kv_cache_gib": size, **fields}
        return EngineConfig.model_validate({"max_num_seqs": 256, **fields})

    @property
    def max_model_len(self) -> int:
        return 2048 if self.device == "cuda" else 384

    @cached_property
    def engine(self) -> VLLMEngine:
        start = perf_counter()
        cfg = self.config(backend="vllm", enable_sleep=True)
        engine = VLLMEngine(
            self.model,
            cfg,
            eos_token_ids=(),
            max_model_len=self.max_model_len,
            tensor_parallel=self.tp,
        )
        self.run.row("vLLM made and filled, s", perf_counter() - start)
        return engine

    def requests(self, count: int, *, group: int, num_prompt: int, **params: int) -> list[Request]:
        """Groups of equal random prompts."""
        vocab_size = self.model.config.vocab_size
        prompts = torch.randint(vocab_size, (-(-count // group), num_prompt)).tolist()
        return [
            Request(
                id=str(i),
                prompt_ids=tuple(prompts[i // group]),
                sampling=SamplingParams(seed=i, ignore_eos=True, **params),
            )
            for i in range(count)
        ]

    @torch.inference_mode()
    def k3(self, requests: list[Request], done: dict[str, Completion]) -> float:
        """Mean k3 estimate of the trainer's divergence from the engine, by one packed forward a
        sequence."""
        gaps: list[Tensor] = []
        for request in requests:
            completion = done[request.id]
            tokens = torch.tensor(
                [*request.prompt_ids, *completion.token_ids], device=self.model.device
            )
            positions = torch.arange(len(tokens), device=tokens.device)
            context = PackedContext.from_lengths([len(tokens)], device=tokens.device)
            hidden = hidden_states(self.model, tokens, positions, context)
            first = len(request.prompt_ids)
            logits = head_logits(self.model, hidden[first - 1 : -1]).float()
            logprobs = logits.log_softmax(-1).gather(-1, tokens[first:].unsqueeze(-1)).squeeze(-1)
            sampled = torch.tensor(completion.logprobs, dtype=torch.float64)
            gaps.append(logprobs.double().cpu() - sampled)
        gap = torch.cat(gaps)
        return float((gap.exp() - 1 - gap).mean())

    def check_parity(self, name: str) -> None:
        requests = self.requests(32, group=8, num_prompt=150, max_tokens=64)
        k3 = self.k3(requests, finish(self.engine, requests))
        self.run.check(f"{name}: k3", k3 < MAX_K3[self.device], k3)

    def push(self) -> float:
        """Deliver the model's weights as the next version; milliseconds."""
        self.version += 1
        return WeightSync(Source(self.model), self.engine).push(self.version).seconds * 1e3

    @torch.no_grad()
    def perturb(self) -> None:
        """Change every weight and keep its size: larger logits would lose more to rounding."""
        for parameter in self.model.parameters():
            size, mean = parameter.std(), parameter.mean()
            parameter.add_(torch.randn_like(parameter) * (size + 0.1 * mean.abs()))
            if parameter.ndim > 1:
                parameter.mul_(0.5**0.5)

    def parity(self) -> None:
        """R4: the first weights, and what is drawn again with the same seeds."""
        self.check_parity("first weights")
        requests = self.requests(16, group=4, num_prompt=100, max_tokens=32)
        once, again = finish(self.engine, requests), finish(self.engine, requests)
        same = sum(once[name].token_ids == again[name].token_ids for name in once)
        self.run.row("same seeds, same tokens", f"{same} of {len(once)}")

    def sync(self) -> None:
        """R2, R3, and weights that change under running requests."""
        _ = self.engine
        self.perturb()
        requests = self.requests(32, group=8, num_prompt=150, max_tokens=64)
        k3 = self.k3(requests, finish(self.engine, requests))
        self.run.check("planted: not synced, k3", k3 > 2 * MAX_K3["cuda"], k3)
        mlp = "model.layers.1.mlp"
        names = dict(export_weights(self.model))
        victims = (f"{mlp}.up_proj.weight", f"{mlp}.experts.gate_up_proj")
        (victim,) = (name for name in victims if name in names)
        try:
            WeightSync(Source(self.model, victim), self.engine).push(99)
            self.run.check("planted: one tensor is never sent", False)
        except RuntimeError as error:
            self.run.check("planted: one tensor is never sent", victim in str(error))
        times = [self.push() for _ in range(5)]
        self.run.row("sync and proof, ms", median(times))
        self.check_parity("every weight changed")
        running = self.requests(16, group=8, num_prompt=300, max_tokens=40)
        self.engine.submit(running)
        for _ in range(10):
            self.engine.step()
        self.perturb()
        self.push()
        fresh = self.requests(32, group=8, num_prompt=300, max_tokens=20)
        late = [
            Request(id=f"late {r.id}", prompt_ids=running[0].prompt_ids, sampling=r.sampling)
            for r in fresh
        ]
        done = finish(self.engine, late)
        versions = {tuple(sorted(set(done[r.id].weight_versions))) for r in running}
        self.run.check(
            "running requests go on under the new version",
            versions == {(self.version - 1, self.version)},
        )
        k3 = self.k3(late, done)
        self.run.check("no keys of older weights, k3", k3 < MAX_K3[self.device], k3)

    def sleep(self) -> None:
        """What it frees, and what is sampled afterwards."""
        engine = self.engine
        release()
        awake = self.free_gib()
        start = perf_counter()
        engine.sleep()
        asleep_s, asleep = perf_counter() - start, self.free_gib()
        start = perf_counter()
        engine.wake()
        awake_s = perf_counter() - start
        self.run.row(
            "sleep: GiB freed, ms down, ms up", asleep - awake, asleep_s * 1e3, awake_s * 1e3
        )
        self.check_parity("after sleep")

    def tensor(self) -> None:
        """R2 to R4 of the ranks of one engine, and its speed beside ours."""
        if self.tp.size == 1:
            raise RuntimeError("start it with torchrun --nproc-per-node 2")
        self.check_ranks("weights that ranks have drawn")
        self.parity()
        self.check_samples("ranks sample the same")
        self.sync()
        self.check_ranks("weights that ranks have changed")
        self.check_samples("ranks sample the same after syncs")
        self.speed()

    def check_ranks(self, name: str) -> None:
        manifest = build_manifest(export_weights(self.model), 0)
        self.run.check(name, not any(compare(manifest, other) for other in everywhere(manifest)))

    def check_samples(self, name: str) -> None:
        done = finish(self.engine, self.requests(64, group=4, num_prompt=100, max_tokens=64))
        found = {key: (one.token_ids, one.logprobs) for key, one in done.items()}
        self.run.check(name, all(other == found for other in everywhere(found)))

    def free_gib(self) -> float:
        return torch.cuda.mem_get_info()[0] / GIB if self.device == "cuda" else 0.0

    def speed(self) -> None:
        """Decode steps of the same requests, embedded and vLLM."""

        def embedded() -> Engine:
            own = shard_model(self.model, self.tp)
            return EmbeddedEngine(
                own,
                self.config(),
                eos_token_ids=(),
                max_model_len=self.max_model_len,
                tensor_parallel=self.tp,
            )

        # vLLM lets triton report what it compiles, as JSON, which the constants of ours are not.
        with patch.object(triton.knobs.runtime, "jit_post_compile_hook", None):
            times = self.step_ms(embedded)
        release()
        self.run.row(f"decode, TP {self.tp.size}: ms a step", "ours", "vLLM", "ratio", "tokens/s")
        for (batch, num_prompt), ours in times.items():
            theirs = self.step_ms(lambda: self.engine, (batch, num_prompt))[batch, num_prompt]
            rates = " ".join(f"{1e3 * batch / ms:.0f}" for ms in (ours, theirs))
            name = f"{batch} sequences of {num_prompt}"
            self.run.row(name, ours, theirs, theirs / ours, rates)

    def step_ms(
        self, make: Callable[[], Engine], only: tuple[int, int] | None = None
    ) -> dict[tuple[int, int], float]:
        engine, found = make(), dict[tuple[int, int], float]()
        for shape in SPEEDS[self.device]:
            if only not in (None, shape):
                continue
            requests = self.requests(
                shape[0], group=1, num_prompt=shape[1], max_tokens=DECODE_STEPS[self.device]
            )
            measure(engine, requests)
            steps = decode_steps(measure(engine, requests), requests)
            found[shape] = median(step.duration_s for step in steps) * 1e3
        return found


def everywhere(value: object) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def finish(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-1.7b", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=0, help="so many of the model's")


if __name__ == "__main__":
    sections = ("parity", "sync", "sleep", "speed", "tensor")
    run = Run(__doc__, sections, on_request=("tensor",), seconds=400, add_flags=add_flags)
    if run.args.device == "cuda":
        torch.cuda.set_device(processes().local_rank)
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(run, Path(folder))
        code = run.go({name: getattr(checks, name) for name in sections})
    sys.exit(code)
