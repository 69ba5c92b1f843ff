"""`hone bench train`: times optimizer steps of the real trainer, and measures their memory by kind.

The trainers are those of a run. The only addition are marks at the begin and end of passes, which
wait for the device; a step waits there anyway, for its loss.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Objective, Outputs
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig, Output
from hone.algorithms.sft import CrossEntropy
from hone.config.bench import RowsConfig
from hone.config.plan import RunPlan
from hone.config.tree import BenchTrainConfig
from hone.distributed.mesh import Mesh
from hone.families.shape import ModelShape
from hone.hardware import gpu_peaks
from hone.loops.launch import join, load_for_training
from hone.models.adapters import adapt
from hone.models.load import compute_dtype, load_config, require_attention
from hone.observe.metrics import Metrics
from hone.observe.peaks import measure_peaks
from hone.planner.roofline import training_flops
from hone.tools.bench.bench import model_folder
from hone.tools.bench.train_memory import MemoryProbe, MemoryUse, existing_tensors
from hone.trainer.cost import (
    TrainingMemory,
    layer_code,
    planned_step,
    training_memory,
)
from hone.trainer.shown_tokens import ShownTokens
from hone.trainer.trainer import Trainer
from hone.types import Column, MicroBatch, Row

__all__ = ["Rates", "StepTime", "TrainResult", "bench_train", "draw_rows", "planned_on_cpu"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    step_s: float
    """The whole step, including packing and comparing rows."""
    forward_backward_s: float
    """All forward and backward passes."""
    optimizer_s: float
    """From the last pass to the updated weights: norm, clipping, update, statistics."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of all devices together."""

    device: str
    num_devices: int
    measured_flops_per_s: float
    """Rate of a large matrix product in the compute format, measured on these devices just
    before."""
    datasheet_flops_per_s: float | None
    """Dense bfloat16. None for other formats and for devices that are not in the table."""
    memory_bytes: int | None
    """Memory of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of `hone bench train`, of the slowest or fullest process."""

    cfg: BenchTrainConfig
    rates: Rates
    flops: float
    """Model FLOPs of one step: forward and backward, without recomputation."""
    num_params: int
    num_trained_params: int
    start_s: float
    """Seconds to load the model and build the trainer."""
    first_step_s: float
    """Seconds of the first step, which compiles."""
    steps: tuple[StepTime, ...]
    """The measured steps."""
    num_micro_batches: int
    """Micro-batches of each process in a step."""
    memory: MemoryUse
    allocator_peak: int | None
    """Peak of the bytes allocated by torch in the measured steps. None on a CPU."""
    allocator_reserved: int | None
    """Peak of the bytes reserved by torch, including gaps between blocks."""
    plan: TrainingMemory

    @property
    def model_name(self) -> str:
        return self.cfg.model.shape or str(self.cfg.model.path)

    @property
    def peak(self) -> int:
        """Peak bytes on a device."""
        return self.memory.peak if self.allocator_peak is None else self.allocator_peak

    @property
    def typical(self) -> StepTime:
        """The median of each time."""
        return StepTime(*map(statistics.median, zip(*map(astuple, self.steps), strict=True)))

    @property
    def tokens_per_s(self) -> float:
        """Row tokens per second over all devices."""
        return self.cfg.rows.per_step * self.cfg.rows.tokens / self.typical.step_s

    def utilisation(self, seconds: float, flops_per_s: float | None) -> float | None:
        """Model FLOPs over the FLOPs that the devices could have done in `seconds`."""
        return None if flops_per_s is None else self.flops / (seconds * flops_per_s)


def planned_on_cpu(plan: RunPlan) -> TrainingMemory | None:
    """Planned memory of a step on a CPU. None for a model of unknown shape."""
    cfg = plan.config
    assert isinstance(cfg, BenchTrainConfig)
    if plan.shape is None or plan.problem is not None:
        return None
    trainer, sizes, length = cfg.trainer, plan.policy.axes, cfg.rows.tokens
    num_rows = -(-cfg.rows.per_step // sizes.data)
    fitting = trainer.max_tokens_per_microbatch * sizes.context // length
    most = min(num_rows, trainer.micro_batch_size or fitting)
    return planned_step(
        plan,
        num_tokens=-(-most * length // sizes.context),
        num_micro_batches=1 if num_rows <= most else 2,
    )


def draw_rows(cfg: RowsConfig, *, vocab_size: int, seed: int, objective: str) -> list[Row]:
    """Rows of a step with random ids, each in its own group. Every step has the same rows. For `rl`
    they carry advantages and the log-probabilities of a uniform distribution."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for index in range(cfg.per_step):
        row = Row(
            id=str(index),
            token_ids=torch.randint(vocab_size, (cfg.tokens,), generator=generator).tolist(),
            loss_mask=[False] + [True] * (cfg.tokens - 1),
        )
        if objective == "rl":
            advantage = torch.randn(1, generator=generator)
            even = -torch.full((cfg.tokens - 1,), float(vocab_size)).log()
            row.columns["advantages"] = Column(advantage.expand(cfg.tokens - 1).clone())
            row.columns["logprobs/engine"] = Column(even)
        rows.append(row)
    return rows


def bench_train(cfg: BenchTrainConfig) -> TrainResult:
    """Run and measure the steps. Collective over the processes that torchrun has started; all get
    the same result. Raises UserError if the model cannot be trained with these settings."""
    with model_folder(cfg.model) as folder, join(cfg.run, cfg.trainer.parallel) as (mesh, watch):
        model_cfg = cfg.model.as_trained(folder)
        config = load_config(model_cfg)
        require_attention(model_cfg, mesh.device)
        dtype = compute_dtype(model_cfg, mesh.device)
        rates = _rates(mesh, dtype)
        torch.manual_seed(cfg.run.seed)
        start_s = time.perf_counter()
        model = load_for_training(model_cfg, mesh, seed=cfg.run.seed)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        if cfg.model.lora.rank:
            adapt(model, cfg.model.lora, seed=cfg.run.seed)
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows = draw_rows(
            cfg.rows, vocab_size=config.vocab_size, seed=cfg.run.seed, objective=cfg.objective
        )
        probe = _Probe(mesh.device)
        trainer = _trainer(cfg, model, mesh)
        probe.watch(trainer)
        start_s = time.perf_counter() - start_s

        def take(number: int) -> StepTime:
            watch.begin_step(number)
            return probe.step(lambda: trainer.update(rows))

        _log.info("warming up; the first step may compile")
        warmup = [take(number) for number in range(cfg.warmup_steps)]
        _log.info("measuring")
        gc.collect()
        on_gpu = mesh.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(mesh.device)
        steps = [take(cfg.warmup_steps + number) for number in range(cfg.steps)]
        allocated = torch.cuda.max_memory_allocated(mesh.device) if on_gpu else None
        reserved = torch.cuda.max_memory_reserved(mesh.device) if on_gpu else None
        storages = existing_tensors(
            weights=model.state_dict(keep_vars=True).values(),
            masters=trainer.policy.masters.values(),
            moments=_moments(trainer),
            host_bytes=trainer.policy.host_bytes,
            dtype=dtype,
            device=mesh.device,
        )
        memory = probe.memory.measure(lambda: take(cfg.warmup_steps + cfg.steps), storages)
        shape = ModelShape.from_config(config.to_dict())
        result = TrainResult(
            cfg=cfg,
            rates=rates,
            flops=training_flops(
                shape,
                [cfg.rows.tokens] * cfg.rows.per_step,
                num_head_tokens=cfg.rows.per_step * (cfg.rows.tokens - 1),
                lora=cfg.model.lora,
            ),
            num_params=num_params,
            num_trained_params=num_trained,
            start_s=start_s,
            first_step_s=warmup[0].step_s,
            steps=tuple(steps),
            num_micro_batches=probe.num_passes,
            memory=memory,
            allocator_peak=allocated,
            allocator_reserved=reserved,
            plan=_plan(cfg, shape, probe, mesh, dtype),
        )
        return _of_all(result, mesh)


class _Probe:
    """Measures the times and sizes of the passes of a step."""

    def __init__(self, device: torch.device) -> None:
        self.memory = MemoryProbe(device)
        self.num_passes = self.most_tokens = self.most_trained = 0
        self._device = device
        self._passes: tuple[float, float] = (0.0, 0.0)

    def step(self, update: Callable[[], object]) -> StepTime:
        self.num_passes = 0
        start = self._now()
        update()
        end = self._now()
        first, last = self._passes
        return StepTime(end - start, last - first, end - last)

    def watch(self, trainer: Trainer) -> None:
        """Record the passes of `trainer`."""
        model = trainer.model
        forward, forward_backward = model.forward, model.forward_backward

        def one(batch: MicroBatch, outputs: frozenset[Output]) -> Outputs:
            self.num_passes += 1
            self.most_tokens = max(self.most_tokens, batch.num_tokens)
            self.most_trained = max(self.most_trained, len(batch.labels))
            with self.memory.forward(model.module.parameters):
                return forward(batch, outputs)

        def every(
            batches: Iterable[MicroBatch], objective: Objective, shown: ShownTokens | None = None
        ) -> tuple[Tensor, Metrics]:
            first = self._now()
            with self.memory.passes(lambda: trainer.policy.gradients.values()):
                result = forward_backward(batches, objective, shown)
            self._passes = (first, self._now())
            return result

        model.forward, model.forward_backward = one, every

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _trainer(cfg: BenchTrainConfig, model: PreTrainedModel, mesh: Mesh) -> Trainer:
    is_sft = cfg.objective == "sft"
    return Trainer(
        model,
        cfg.trainer.model_copy(update={"prompts_per_minibatch": None, "num_epochs": 1}),
        CrossEntropy()
        if is_sft
        else PolicyObjective(AlgorithmConfig(), max_completion_tokens=cfg.rows.tokens),
        total_steps=cfg.warmup_steps + cfg.steps + 1,
        seed=cfg.run.seed,
        exact=cfg.model.exact and not is_sft,
        mesh=mesh,
    )


def _moments(trainer: Trainer) -> list[Tensor]:
    """Tensors of the optimizer's state, on device or host."""
    tensors, _ = trainer.state_dict()
    return [
        tensor
        for name, tensor in tensors.items()
        if name.startswith("optimizer/") and not name.startswith("optimizer/step/")
    ]


def _rates(mesh: Mesh, dtype: torch.dtype) -> Rates:
    """Rates of all devices, measured at the same time, as training uses them."""
    device = mesh.device
    peaks = measure_peaks(device, dtype)
    measured = sum(mesh.gather(peaks.flops_per_s))
    known = memory = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        memory = torch.cuda.get_device_properties(device).total_memory
        gpu = gpu_peaks(torch.cuda.get_device_name(device))
        if gpu is not None and dtype == torch.bfloat16:
            known = gpu.datasheet_flops_per_s
    size = mesh.world.size
    return Rates(peaks.name, size, measured, None if known is None else size * known, memory)


def _plan(
    cfg: BenchTrainConfig, shape: ModelShape, probe: _Probe, mesh: Mesh, dtype: torch.dtype
) -> TrainingMemory:
    """Planned memory of the fullest micro-batch of all devices."""
    fullest = mesh.gather((probe.most_tokens, probe.most_trained))
    num_tokens, num_trained = (
        -(-max(sizes) // mesh.context.size) for sizes in zip(*fullest, strict=True)
    )
    return training_memory(
        shape,
        cfg.trainer,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        num_tokens=num_tokens,
        num_trained=num_trained,
        num_micro_batches=probe.num_passes,
        layers=layer_code(cfg.trainer, mesh.device.type),
        lora=cfg.model.lora,
        sizes=mesh.sizes,
    )


def _of_all(result: TrainResult, mesh: Mesh) -> TrainResult:
    """Merge the results of all processes: the slowest times, and the memory of the fullest
    device."""
    everyone = mesh.gather(result)
    steps = zip(*(other.steps for other in everyone), strict=True)
    return replace(
        result,
        start_s=max(other.start_s for other in everyone),
        first_step_s=max(other.first_step_s for other in everyone),
        steps=tuple(_slowest(times) for times in steps),
        memory=max((other.memory for other in everyone), key=lambda memory: memory.peak),
        allocator_peak=_largest(other.allocator_peak for other in everyone),
        allocator_reserved=_largest(other.allocator_reserved for other in everyone),
    )


def _slowest(steps: Iterable[StepTime]) -> StepTime:
    return StepTime(*map(max, zip(*map(astuple, steps), strict=True)))


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
