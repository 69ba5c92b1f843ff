"""Turns a step into one row of metrics, one console line, alarms and a few samples on disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import psutil
import torch

from hone.config.plan import RunPlan
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.mesh import Mesh
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.hardware import GIB, Peaks, installed_gpu, num_usable_cores
from hone.loops.launch import Launch
from hone.models.load import compute_dtype
from hone.observe.alarms import Alarms
from hone.observe.console import Console
from hone.observe.device_memory import DeviceMemory
from hone.observe.disk import DiskError
from hone.observe.gpu_use import GPUUse
from hone.observe.loggers import ENTROPY, POLICY_LOGPROBS, RunLog, chosen
from hone.observe.metrics import Max, Mean, Metrics, merge, to_scalars
from hone.observe.metrics_server import MetricsServer
from hone.observe.spans import Spans
from hone.planner.roofline import generation_time_s, training_time_s
from hone.rewards.scorer import FailureRateError
from hone.trainer.prefixes import left_out, shared_prefixes
from hone.types import Group, Row, Sample

__all__ = ["Limits", "Recorder", "max_mismatch_kl", "recording"]

_log = logging.getLogger(__name__)

_OF_POLICY = {POLICY_LOGPROBS: "logprobs/policy", ENTROPY: "entropy/policy"}
"""What is written of a sample's tokens, by the column that has it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The roofline of this model on the devices of the run, which share the work evenly."""

    shape: ModelShape
    peaks: Peaks | None
    """None on a CPU, whose rates are those that other work on the machine leaves."""
    num_devices: int
    """Of the trainer."""
    num_engines: int
    devices_per_engine: int
    overlaps: bool
    """Engines sample while the trainer trains."""
    bytes_per_value: int
    kv_bytes_per_value: int
    packs_rows: bool
    """Whether engines keep matrices of layers as 8-bit codes."""
    shares_prefixes: bool
    """Whether rows of a group are trained with their prompt once."""
    max_num_seqs: int
    passes: float
    """Forward passes' worth of FLOPs in a training step: 3 an epoch (2 where only adapters are
    trained), 1 for each scoring pass."""

    def ratios(
        self, groups: Sequence[Group], rows: Sequence[Row], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """`R_gen`, `R_train`, `R_step`: limit over measured time, from the actual lengths.
        Empty without peaks."""
        if self.peaks is None:
            return {}
        share = groups[:: self.num_engines]  # as the first engine has it
        turns = [turn for group in share for sample in group.samples for turn in _turns(sample)]
        if not turns or not rows:
            return {}
        read_once = [len(group.prompt.token_ids) for group in share]
        of_one_engine_s = generation_time_s(
            self.shape,
            self.peaks,
            [turn.num_before for turn in turns],
            [turn.num_sampled for turn in turns],
            max_num_seqs=self.max_num_seqs,
            prefill_lengths=read_once + [turn.num_observed for turn in turns if turn.num_observed],
            bytes_per_value=self.bytes_per_value,
            kv_bytes_per_value=self.kv_bytes_per_value,
            packs_rows=self.packs_rows,
        )
        generate_s = of_one_engine_s / self.devices_per_engine
        of_one_device_s = training_time_s(
            self.shape,
            self.peaks,
            [row.num_tokens for row in rows],
            passes=self.passes,
            num_head_tokens=sum(row.num_trained for row in rows),
        )
        if self.shares_prefixes:
            of_one_device_s -= training_time_s(
                self.shape,
                self.peaks,
                left_out(rows, shared_prefixes(rows)),
                passes=self.passes,
                num_head_tokens=0,
            )
        train_s = of_one_device_s / self.num_devices
        measured_train_s = seconds.get("train", 0.0) + seconds.get("experience", 0.0)
        ratios = {"perf/R_train": train_s / max(measured_train_s, 1e-9)}
        if self.overlaps:  # the time that engines took for these samples is not known
            limit_s = max(generate_s, train_s)
        else:
            ratios["perf/R_gen"] = generate_s / max(seconds.get("generate", 0.0), 1e-9)
            limit_s = generate_s + train_s
        return ratios | {"perf/R_step": limit_s / max(seconds["step"], 1e-9)}


class _TurnTokens(NamedTuple):
    """Tokens of a turn of a sample."""

    num_before: int
    """The prompt's, and those of turns and observations so far."""
    num_observed: int
    """Of those, the environment's answer to the turn before."""
    num_sampled: int


def _turns(sample: Sample) -> Iterator[_TurnTokens]:
    """Those in which the policy sampled anything."""
    end = 0
    for turn in sample.turns:
        if turn.end > turn.start:
            before = len(sample.prompt.token_ids) + turn.start
            yield _TurnTokens(before, turn.start - end, turn.end - turn.start)
        end = turn.end


@dataclass(slots=True)
class CPUUse:
    """What this process gets of the CPU, since it was asked last."""

    _wall_s: float = field(default_factory=time.perf_counter)
    _cpu_s: float = field(default_factory=time.process_time)

    def take(self) -> dict[str, float]:
        """CPU time as a share of wall time x torch's threads, and the threads of all programs that
        want to run (the load average of a minute) over the cores of this process."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent = (cpu_s - self._cpu_s) / max(wall_s - self._wall_s, 1e-9)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return {
            "perf/cpu_share": spent / torch.get_num_threads(),
            "perf/load_per_core": os.getloadavg()[0] / num_usable_cores(),
        }


@dataclass(slots=True)
class Recorder:
    """Everything a person sees of a run goes through here.

    Every process has one; that of the first alone has a log and a console.
    """

    mesh: Mesh
    spans: Spans
    alarms: Alarms
    log: RunLog | None = None
    console: Console | None = None
    limits: Limits | None = None
    metrics_server: MetricsServer | None = None
    cpu_use: CPUUse = field(default_factory=CPUUse)
    gpu_use: GPUUse | None = None
    """Of this process's device."""
    memory: DeviceMemory = field(init=False)
    """Likewise."""
    lane: str = "trainer 0"
    """What this process is called where lanes of all are drawn."""
    engine_lanes: Callable[[], Mapping[str, Sequence[tuple[float, float]]]] = dict[
        str, Sequence[tuple[float, float]]
    ]
    """When engines apart were at work since the last call, by name."""
    num_shown: int = 0
    """Samples of a step that are written."""
    shown_ids: frozenset[str] = frozenset()
    """Those of the step in progress."""
    before_failure: Callable[[], None] = lambda: None
    """Called where an error ends the run, as long as events can be written."""
    _unrecorded: tuple[int, Sequence[Group], str] | None = None
    """Step, groups and split of samples that are in no file yet."""

    def __post_init__(self) -> None:
        self.memory = DeviceMemory(self.mesh.device)

    def progress(self, finished: int, wanted: int) -> None:
        """Show how many samples of the current step are done."""
        if self.console is not None:
            self.console.progress(finished, wanted)

    def waiting(self, text: str) -> None:
        """Show what keeps the run waiting."""
        if self.console is not None:
            self.console.waiting(text)

    def event(self, kind: str, **fields: Any) -> None:
        """Record something that happened."""
        if self.log is not None:
            self.log.event(kind, **fields)

    def sampled(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the groups of the step in progress until `record`; where the step fails, they are
        what a person wants to see."""
        self._unrecorded = step, groups, "train"
        shown = chosen(groups, self.num_shown)
        self.shown_ids = frozenset(sample.id for group in shown for sample in group.samples)

    def evaluated(self, step: int, samples: Sequence[Sample]) -> None:
        """Write some of the samples of an evaluation, which come prompt by prompt."""
        if self.log is not None:
            by_group = groupby(samples, key=lambda sample: sample.id.rpartition("/")[0])
            groups = [(name, list(held)) for name, held in by_group]
            self.log.samples(
                step,
                [Group(id=name, prompt=held[0].prompt, samples=held) for name, held in groups],
                split="eval",
            )

    def unscored(self, step: int, samples: Sequence[Sample], *, split: str) -> None:
        """Keep samples of which too many have no reward, in place of the groups of the step."""
        groups = [Group(id=s.id, prompt=s.prompt, samples=[s]) for s in samples]
        self._unrecorded = step, groups, split

    def write_unrecorded(self) -> None:
        """Write samples of a step that has failed."""
        if self.log is not None and self._unrecorded is not None:
            step, groups, split = self._unrecorded
            self.log.samples(step, groups, split=split, failed_first=True)

    def output_lost(self, message: str) -> None:
        """Record that nobody sees the console any more."""
        self.event("output_lost", message=message)
        _log.warning("warning: %s", message)

    def saved(self, step: int, rank: float | None) -> None:
        """Record a checkpoint that is on disk."""
        self.event("checkpoint", step=step, metric=rank)

    def record(
        self,
        step: int,
        metrics: Metrics,
        *,
        groups: Sequence[Group] = (),
        rows: Sequence[Row] = (),
        why_untrained: str | None = None,
    ) -> None:
        """Write the row of `step`, the number of updates done. Collective; times are those of the
        first process. `why_untrained` is the cause where no token of it was trained."""
        seconds = self.spans.take()
        rss = psutil.Process().memory_info().rss
        own: Metrics = {"mem/rss_gib": Max(rss / GIB), **self.memory.take()}
        if self.gpu_use is not None:
            own["perf/gpu_utilization"] = Mean.of(self.gpu_use.take())
        own_lane = self.lane, self.spans.take_ended()
        of_all, trainer_lanes = zip(*self.mesh.gather((own, own_lane)), strict=True)
        machine = merge(*of_all)
        if self.log is None or self.console is None:
            return
        engine_lanes = {
            name: [("generate", *span) for span in spans]
            for name, spans in self.engine_lanes().items()
        }
        self.log.lanes(step, dict(trainer_lanes) | engine_lanes)
        scalars = to_scalars(metrics | machine)
        scalars |= {f"time/{name}_s": value for name, value in seconds.items()}
        if self.mesh.device.type == "cpu":
            scalars |= self.cpu_use.take()
        num_tokens = sum(row.num_tokens for row in rows)
        scalars["perf/tokens_per_s"] = num_tokens / max(seconds["step"], 1e-9)
        num_samples = sum(row.num_trained > 0 for row in rows)
        scalars["perf/samples_per_s"] = num_samples / max(seconds["step"], 1e-9)
        if groups:
            sampled = sum(s.num_sampled for group in groups for s in group.samples)
            overlaps = self.limits is not None and self.limits.overlaps
            generating_s = seconds["step" if overlaps else "generate"]
            scalars["perf/generated_tokens_per_s"] = sampled / max(generating_s, 1e-9)
        if self.limits is not None and groups:
            scalars |= self.limits.ratios(groups, rows, seconds)
            # Engines that run ahead are counted from batch to batch, which is not from row to row.
            # What they report may be one of their steps old.
            counted_s = scalars.get("perf/engine_counted_s", seconds["step"])
            there_s = self.limits.num_engines * max(counted_s, 1e-9)
            scalars["perf/engine_busy_share"] = min(scalars["perf/engine_busy_s"] / there_s, 1.0)
            scalars |= self._waits(scalars, seconds)
        self.log.log(step, scalars)
        if groups:
            advantages = {
                row.id: float(row.column("advantages").double().mean())
                for row in rows
                if "advantages" in row.columns and row.num_trained
            }
            policy = {
                row.id: {
                    name: row.column(column)
                    for name, column in _OF_POLICY.items()
                    if column in row.columns
                }
                for row in rows
            }
            self.log.samples(step, groups, advantages=advantages, policy=policy)
            self._unrecorded = None
        alarms = self.alarms.check(step, scalars, why_untrained=why_untrained)
        for alarm in alarms:
            self.log.event("alarm", message=str(alarm), **alarm.fields())
            self.console.warn(str(alarm))
        if self.metrics_server is not None:
            self.metrics_server.publish(step, scalars, num_alarms=len(alarms))
        self.console.step(step, scalars)

    def _waits(
        self, scalars: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Shares of the time in which trainers wait for samples, engines for weights, and in turns
        all of them for reward functions."""
        assert self.limits is not None
        step_s, generate_s = max(seconds["step"], 1e-9), seconds.get("generate", 0.0)
        waits = {"perf/wait_for_samples_share": generate_s / step_s}
        if self.limits.overlaps:  # engines stop where they are `max_staleness` ahead, and in a push
            return waits | {"perf/wait_for_weights_share": 1 - scalars["perf/engine_busy_share"]}
        others = ("time/generate/wait_s", "time/generate/reward_model_s")
        at_work_s = scalars["perf/engine_busy_s"] / self.limits.num_engines
        at_work_s += sum(scalars.get(name, 0.0) for name in others)
        return waits | {
            "perf/wait_for_weights_share": 1 - generate_s / step_s,
            "perf/wait_for_rewards_share": max(generate_s - at_work_s, 0.0) / step_s,
        }


def _as_loaded(plan: RunPlan, limits: Limits) -> RunPlan:
    """The plan with the model's shape, whatever named it, and the GPU of this host."""
    facts = plan.model or ModelFacts.of_shape(limits.shape)
    gpu = None if plan.is_on_cpu else installed_gpu()
    return replace(plan, model=facts, devices=replace(plan.devices, gpu=gpu))


def max_mismatch_kl(cfg: RLConfig | SFTConfig, device: torch.device) -> float:
    """The largest healthy divergence of engines and trainer, which is larger in a coarser number
    format: that in which models compute, whatever a trainer keeps of them."""
    is_rounded = compute_dtype(cfg.model, device).itemsize == 2
    if isinstance(cfg, RLConfig):
        is_rounded |= cfg.engine.packs_rows or cfg.engine.kv_cache_dtype == "fp8"
    return 1e-2 if is_rounded else 1e-4


@contextmanager
def recording(
    launch: Launch, limits: Limits | None = None, plan: RunPlan | None = None
) -> Generator[Recorder]:
    """The recorder of this process; the first one's writes into the run folder, also the samples
    of a step that fails. What alarms advise is for `plan`."""
    cfg, everyone = launch.cfg, launch.everyone
    is_rl = isinstance(cfg, RLConfig)
    runs_ahead = is_rl and cfg.pipeline.samples_ahead
    alarms = Alarms(
        max_mismatch_kl=max_mismatch_kl(cfg, everyone.device),
        max_staleness=cfg.pipeline.max_staleness if is_rl and runs_ahead else 0,
        plan=None if plan is None or limits is None else _as_loaded(plan, limits),
    )

    def begin(path: str) -> None:
        launch.watch.enter(path)
        launch.tracing.begin(path)

    def end(path: str) -> None:
        launch.tracing.end(path)
        if launch.tracing.has_trace:
            with spans.span("trace"):
                launch.tracing.write()

    spans = Spans(on_begin=begin, on_end=end)
    recorder = Recorder(
        everyone,
        spans,
        alarms,
        limits=limits,
        metrics_server=launch.metrics_server,
        lane=f"{'trainer' if launch.roles.own == 'policy' else 'critic'} {launch.mesh.world.rank}",
        num_shown=cfg.log.samples_per_step,
    )
    with ExitStack() as stack:
        recorder.gpu_use = GPUUse.of(everyone.device)
        if recorder.gpu_use is not None:
            stack.callback(recorder.gpu_use.close)
        if everyone.is_first:
            resume_step = launch.steps_done + 1 if launch.checkpoint is not None else None
            config = cfg.model_dump(mode="json")
            recorder.log = stack.enter_context(
                RunLog(launch.dir, cfg.log, resume_step=resume_step, config=config)
            )
            recorder.console = stack.enter_context(
                Console(
                    cfg.run.steps,
                    done=launch.steps_done,
                    runs_ahead=runs_ahead,
                    has_reference=is_rl and cfg.algorithm.kl.coef > 0,
                    has_limit=limits is not None and limits.peaks is not None,
                    on_lost=recorder.output_lost,
                )
            )
        try:
            yield recorder
        except BaseException as failure:
            if isinstance(failure, FailureRateError):
                split = "eval" if launch.watch.phase == "eval" else "train"
                recorder.unscored(launch.watch.step, failure.samples, split=split)
            try:
                recorder.before_failure()
                recorder.write_unrecorded()
            except DiskError as error:  # the error that ends the run is the one to report
                _log.warning("warning: %s", error)
            raise
