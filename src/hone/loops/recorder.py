"""Records a step: one row of metrics, one console line, alarms and a few samples on disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hone.algorithms.rows import episodes_of
from hone.config.plan import RunPlan
from hone.config.roles import Role
from hone.config.tree import RLConfig
from hone.distributed.mesh import Mesh
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.hardware import Peaks, installed_gpu, num_usable_cores
from hone.images.thumbnails import Thumbnails
from hone.loops.launch import Launch
from hone.model_input import ModelInput
from hone.models.settings import LoraConfig, TrainedModelConfig
from hone.observe.alarms import Alarms
from hone.observe.console import Console
from hone.observe.device_memory import DeviceMemory
from hone.observe.disk import DiskError
from hone.observe.gpu_use import GPUUse
from hone.observe.host_memory import host_memory
from hone.observe.loggers import ENTROPY, POLICY_LOGPROBS, RunLog, groups_to_write
from hone.observe.metrics import Max, Mean, Metrics, merge, to_scalars
from hone.observe.metrics_server import MetricsServer
from hone.observe.network import NetworkUse
from hone.observe.spans import Spans
from hone.planner.roofline import RowPasses, encoding_time_s, generation_time_s
from hone.rewards.scorer import FailureRateError, describe_failures
from hone.trainer.prefixes import left_out, shared_prefixes
from hone.types import Group, Row, Sample

__all__ = ["Limits", "Recorder", "max_mismatch_kl", "recording"]

_log = logging.getLogger(__name__)

_OF_POLICY = {POLICY_LOGPROBS: "logprobs/policy", ENTROPY: "entropy/policy"}
"""Names under which token columns are written into sample files, by column."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The roofline of this model on the devices of the run, which share the work evenly."""

    shape: ModelShape
    peaks: Peaks | None
    """None on a CPU, whose speed depends on what else the machine does."""
    num_devices: int
    """Devices of the trainer."""
    num_engines: int
    devices_per_engine: int
    overlaps: bool
    """Whether engines sample while the trainer trains."""
    bytes_per_value: int
    kv_bytes_per_value: int
    packs_rows: bool
    """Whether engines store the layers' matrices as int8."""
    shares_prefixes: bool
    """Whether the trainer computes the shared prompt of a group only once."""
    max_num_seqs: int
    passes: Sequence[RowPasses]
    """Those of each model on the trainers' devices. Adapters that a reference is without are no
    part of it."""
    encodes_again: bool
    """Whether the trainer encodes images that the engines have encoded with weights of their
    own."""

    @classmethod
    def of(cls, plan: RunPlan, shape: ModelShape, peaks: Peaks | None) -> Self:
        """Limits of a plan with a model of this shape."""
        policy, engine = plan.policy, plan.roles["engine"]
        colocated = (x for x in plan.roles.values() if x.shares_devices_of == "policy")
        # A model of unknown size counts as the policy, but for a teacher, which may have any.
        known = (role for role in colocated if role.name != "teacher" or _own_shape(role))
        return cls(
            shape=shape,
            peaks=peaks,
            num_devices=policy.axes.world,
            num_engines=engine.num_workers,
            devices_per_engine=engine.axes.world,
            overlaps=plan.samples_ahead,
            bytes_per_value=plan.num_bytes,
            kv_bytes_per_value={"float32": 4, "bfloat16": 2, "fp8": 1}[plan.kv_dtype],
            packs_rows=plan.packs_rows,
            shares_prefixes=policy.axes.context == 1 and not policy.is_exact,
            max_num_seqs=engine.engine.max_num_seqs,
            passes=[_row_passes(role, shape) for role in (policy, *known)],
            encodes_again=engine.aliases_weights_of is None,
        )

    def ratios(
        self, groups: Sequence[Group], rows: Sequence[Row], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return `R_gen`, `R_train` and `R_step`, the limit over the measured time from the actual
        lengths, and `mfu`, which is `R_train` with the rate on the data sheet. Empty without
        peaks."""
        if self.peaks is None:
            return {}
        share = groups[:: self.num_engines]  # the groups of the first engine
        turns = [turn for group in share for sample in group.samples for turn in _turns(sample)]
        if not turns or not rows:
            return {}
        openings = ({sample.opening_ids for sample in group.samples} for group in share)
        read_once = [len(token_ids) for own in openings for token_ids in own]
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
        images = _images(
            path.model_input
            for group in share
            for sample in group.samples
            for path in sample.paths.values()
        )
        generate_s = of_one_engine_s / self.devices_per_engine
        if images and self.shape.tower is not None:  # every device of an engine encodes them
            generate_s += encoding_time_s(self.shape, self.peaks, images.values())
        train_s = self._training_s(rows)
        measured_train_s = seconds.get("train", 0.0) + seconds.get("experience", 0.0)
        share = train_s / max(measured_train_s, 1e-9)
        ratios = {"perf/R_train": share}
        if (promised := self.peaks.datasheet_flops_per_s) is not None:
            ratios["perf/mfu"] = share * self.peaks.flops_per_s / promised
        if self.overlaps:  # the time that engines took for these samples is not known
            limit_s = max(generate_s, train_s)
        else:
            ratios["perf/R_gen"] = generate_s / max(seconds.get("generate", 0.0), 1e-9)
            limit_s = generate_s + train_s
        return ratios | {"perf/R_step": limit_s / max(seconds["step"], 1e-9)}

    def _training_s(self, rows: Sequence[Row]) -> float:
        """The least seconds of the trainers for the rows of a step."""
        assert self.peaks is not None
        lengths = [row.num_tokens for row in rows]
        num_trained = sum(row.num_trained for row in rows)
        repeated = left_out(rows, shared_prefixes(rows)) if self.shares_prefixes else []
        flops = sum(
            passes.flops(lengths, num_head_tokens=num_trained)
            - passes.flops(repeated, num_head_tokens=0)
            for passes in self.passes
        )
        seconds = flops / self.peaks.flops_per_s
        if self.encodes_again and self.shape.tower is not None:
            images = _images(row.model_input for row in rows)
            seconds += encoding_time_s(self.shape, self.peaks, images.values())
        return seconds / self.num_devices


def _row_passes(role: Role, shape: ModelShape) -> RowPasses:
    """The passes of a role, whose model is taken for one of `shape`, the policy's, where its own is
    not known."""
    model, is_policy = role.model, role.name == "policy"
    return RowPasses(
        shape if is_policy else _own_shape(role) or shape,
        lora=model.lora if is_policy and isinstance(model, TrainedModelConfig) else LoraConfig(),
        num_scorings=role.num_scorings,
        num_epochs=role.num_epochs,
        has_head=role.name != "critic",
    )


def _own_shape(role: Role) -> ModelShape | None:
    return None if role.facts is None else role.facts.shape


def _images(inputs: Iterable[ModelInput]) -> dict[str, int]:
    """The number of tokens of each image, by its hash."""
    return {content.hash: content.num_tokens for one in inputs for content in one.contents}


class _TurnTokens(NamedTuple):
    """Token counts of one turn of a sample."""

    num_before: int
    """Tokens before the turn: the prompt, earlier turns and observations."""
    num_observed: int
    """Those of `num_before` that are the environment's answer to the turn before."""
    num_sampled: int


def _turns(sample: Sample) -> Iterator[_TurnTokens]:
    """Iterate over the turns in which the policy sampled tokens. Of the context of a rewritten
    history only what differs from the path before it is read."""
    read: Sequence[int] = sample.opening_ids
    for path in sample.paths.values():
        end = _num_equal(read, path.prompt_ids) - len(path.prompt_ids)
        for turn in path.turns:
            if turn.end > turn.start:
                before = len(path.prompt_ids) + turn.start
                yield _TurnTokens(before, turn.start - end, turn.end - turn.start)
            end = turn.end
        if sample.branches:
            read = (*path.prompt_ids, *path.token_ids)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _advantages(episode: Sequence[Row]) -> Tensor | None:
    """The advantages of all trained tokens of an episode; None where there are none."""
    values = [row.column("advantages") for row in episode if "advantages" in row.columns]
    return torch.cat(values) if sum(map(len, values)) else None


@dataclass(slots=True)
class CPUUse:
    """CPU use of this process since the last `take`."""

    _wall_s: float = field(default_factory=time.perf_counter)
    _cpu_s: float = field(default_factory=time.process_time)

    def take(self) -> dict[str, float]:
        """CPU time over wall time and torch's threads, and the load average of the last minute (of
        all programs) over the cores of this process."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent = (cpu_s - self._cpu_s) / max(wall_s - self._wall_s, 1e-9)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return {
            "perf/cpu_share": spent / torch.get_num_threads(),
            "perf/load_per_core": os.getloadavg()[0] / num_usable_cores(),
        }


@dataclass(slots=True)
class Recorder:
    """Writes everything that a person sees of a run: log, console, alarms.

    Every process has a recorder. Only the first one's has a log and a console.
    """

    mesh: Mesh
    spans: Spans
    alarms: Alarms
    log: RunLog | None = None
    console: Console | None = None
    limits: Limits | None = None
    metrics_server: MetricsServer | None = None
    cpu_use: CPUUse = field(default_factory=CPUUse)
    network_use: NetworkUse = field(default_factory=NetworkUse)
    gpu_use: GPUUse | None = None
    """Utilization of this process's device."""
    memory: DeviceMemory = field(init=False)
    """Memory of this process's device."""
    lane: str = "trainer 0"
    """Name of this process's lane in the timeline."""
    engine_lanes: Callable[[], Mapping[str, Sequence[tuple[float, float]]]] = dict[
        str, Sequence[tuple[float, float]]
    ]
    """Returns the busy times of remote engines since the last call, as (begin, end) by name."""
    num_shown: int = 0
    """Number of samples written per step."""
    shown_ids: frozenset[str] = frozenset()
    """Ids of the rows of the samples that will be written of the step in progress."""
    before_failure: Callable[[], None] = lambda: None
    """Called when an error ends the run, while events can still be written."""
    _unrecorded: tuple[int, Sequence[Group], str] | None = None
    """Step, groups and split of samples that are not written yet."""

    def __post_init__(self) -> None:
        self.memory = DeviceMemory(self.mesh.device)

    def progress(self, finished: int, wanted: int) -> None:
        """Show how many samples of the current step are finished."""
        if self.console is not None:
            self.console.progress(finished, wanted)

    def waiting(self, text: str) -> None:
        """Show what keeps the run waiting."""
        if self.console is not None:
            self.console.waiting(text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the log."""
        if self.log is not None:
            self.log.event(kind, **fields)

    def sampled(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the groups of the step in progress until `record`. If the step fails, they are
        written: a person wants to see them."""
        self._unrecorded = step, groups, "train"
        shown = groups_to_write(groups, self.num_shown)
        samples = [sample for group in shown for sample in group.samples]
        self.shown_ids = frozenset(row_id for sample in samples for row_id in sample.paths)

    def evaluated(self, step: int, samples: Sequence[Sample]) -> None:
        """Write some samples of an evaluation. `samples` must be ordered by prompt."""
        if self.log is not None:
            by_group = groupby(samples, key=lambda sample: sample.id.rpartition("/")[0])
            groups = [(name, list(members)) for name, members in by_group]
            self.log.samples(
                step,
                [
                    Group(id=name, prompt=members[0].prompt, samples=members)
                    for name, members in groups
                ],
                split="eval",
            )

    def unscored(self, step: int, samples: Sequence[Sample], *, split: str) -> None:
        """Replace the groups of the step by samples of which too many have no reward, to be written
        when the run fails."""
        groups = [Group(id=s.id, prompt=s.prompt, samples=[s]) for s in samples]
        self._unrecorded = step, groups, split

    def write_unrecorded(self) -> None:
        """Write the samples of a step that failed."""
        if self.log is not None and self._unrecorded is not None:
            step, groups, split = self._unrecorded
            self.log.samples(step, groups, split=split, failed_first=True)

    def output_lost(self, message: str) -> None:
        """Record that the console's output is lost."""
        self.event("output_lost", message=message)
        _log.warning("warning: %s", message)

    def saved(self, step: int, metric: float | None) -> None:
        """Record that a checkpoint is on disk."""
        self.event("checkpoint", step=step, metric=metric)

    def record(
        self,
        step: int,
        metrics: Metrics,
        *,
        groups: Sequence[Group] = (),
        rows: Sequence[Row] = (),
        why_untrained: str | None = None,
    ) -> None:
        """Write the metrics row of `step`, the number of updates done. Collective. Times are those
        of the first process. `why_untrained` is the reason if no token of the step was trained."""
        seconds = self.spans.take()
        of_host = host_memory() | self.network_use.take()
        own: Metrics = {name: Max(value) for name, value in of_host.items()}
        own |= self.memory.take()
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
        episodes = [[rows[i] for i in indices] for indices in episodes_of(rows)]
        num_samples = sum(any(row.num_trained for row in episode) for episode in episodes)
        scalars["perf/samples_per_s"] = num_samples / max(seconds["step"], 1e-9)
        if groups:
            sampled = sum(s.num_sampled for group in groups for s in group.samples)
            overlaps = self.limits is not None and self.limits.overlaps
            generating_s = seconds["step" if overlaps else "generate"]
            scalars["perf/generated_tokens_per_s"] = sampled / max(generating_s, 1e-9)
        if self.limits is not None and groups:
            scalars |= self.limits.ratios(groups, rows, seconds)
            # The counters of remote engines cover the time from batch to batch, which is not the
            # time from row to row, and may miss the latest engine step.
            counted_s = scalars.get("perf/engine_counted_s", seconds["step"])
            available_s = self.limits.num_engines * max(counted_s, 1e-9)
            busy_s = scalars["perf/engine_busy_s"]
            scalars["perf/engine_busy_share"] = min(busy_s / available_s, 1.0)
            scalars |= self._waits(scalars, seconds)
        self.log.log(step, scalars)
        if groups:
            advantages = {
                episode[0].episode or episode[0].id: float(values.double().mean())
                for episode in episodes
                if (values := _advantages(episode)) is not None
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
        failed = [s for group in groups for s in group.samples if s.failure is not None]
        why_failed = describe_failures(failed) if failed else None
        alarms = self.alarms.check(
            step, scalars, why_untrained=why_untrained, why_failed=why_failed
        )
        for alarm in alarms:
            self.log.event("alarm", message=str(alarm), **alarm.fields())
            self.console.warn(str(alarm))
        if self.metrics_server is not None:
            self.metrics_server.publish(step, scalars, num_alarms=len(alarms))
        self.console.step(step, scalars)

    def _waits(
        self, scalars: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Shares of the step in which trainers wait for samples, engines wait for weights, and, in
        a synchronous run, both wait for reward functions."""
        assert self.limits is not None
        step_s, generate_s = max(seconds["step"], 1e-9), seconds.get("generate", 0.0)
        waits = {"perf/wait_for_samples_share": generate_s / step_s}
        if self.limits.overlaps:  # engines pause at `max_staleness` and during a push
            return waits | {"perf/wait_for_weights_share": 1 - scalars["perf/engine_busy_share"]}
        others = ("time/generate/wait_s", "time/generate/reward_model_s")
        at_work_s = scalars["perf/engine_busy_s"] / self.limits.num_engines
        at_work_s += sum(scalars.get(name, 0.0) for name in others)
        return waits | {
            "perf/wait_for_weights_share": 1 - generate_s / step_s,
            "perf/wait_for_rewards_share": max(generate_s - at_work_s, 0.0) / step_s,
        }


def _as_loaded(plan: RunPlan, limits: Limits) -> RunPlan:
    """The plan with the shape of the loaded model and the GPU of this host."""
    facts = plan.model or ModelFacts.of_shape(limits.shape)
    gpu = None if plan.is_on_cpu else installed_gpu()
    return replace(plan, model=facts, devices=replace(plan.devices, gpu=gpu))


def max_mismatch_kl(plan: RunPlan) -> float:
    """Largest healthy KL divergence between engine and trainer. It is larger in a coarser number
    format; the format in which models compute counts, not that of the trainer's master weights."""
    is_rounded = plan.packs_rows or plan.kv_dtype != "float32"
    return 1e-2 if is_rounded else 1e-4


@contextmanager
def recording(launch: Launch, limits: Limits | None = None) -> Generator[Recorder]:
    """Open the recorder of this process. The first process's recorder writes into the run folder,
    including the samples of a step that fails. With `limits`, alarms advise settings for the run's
    plan."""
    cfg, plan, everyone = launch.cfg, launch.plan, launch.everyone
    is_rl = isinstance(cfg, RLConfig)
    runs_ahead = is_rl and cfg.pipeline.samples_ahead
    alarms = Alarms(
        max_mismatch_kl=max_mismatch_kl(plan),
        max_staleness=cfg.pipeline.max_staleness if is_rl and runs_ahead else 0,
        has_engines=is_rl,
        plan=None if limits is None else _as_loaded(plan, limits),
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
            thumbnails = stack.enter_context(Thumbnails(launch.dir))
            recorder.log = stack.enter_context(
                RunLog(
                    launch.dir,
                    cfg.log,
                    resume_step=resume_step,
                    config=config,
                    images=thumbnails.rows,
                )
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
