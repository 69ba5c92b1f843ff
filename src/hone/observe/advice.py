"""Which setting a symptom asks for, to what value, and what it would bring this run.

    advisor = Advisor(plan)
    advisor.advise(more_sequences, history)     # Advice("Set engine.max_num_seqs to 64 ...", ...)

A function of candidates proposes changes; those that break a rule or fit no GPU are left out, the
planner prices the others, and the best is advised. Nothing is computed before a symptom is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, TypeAlias

from hone.address import names_code
from hone.config.engine import CPU_CACHE_GIB
from hone.config.plan import RunPlan
from hone.config.trainer import cap_key
from hone.config.tree import RLConfig
from hone.hardware import num_usable_cores
from hone.observe.symptoms import History
from hone.planner.fitting import (
    Change,
    changed,
    does_fit,
    errors,
    kept_logits,
    memory_changes,
)
from hone.planner.gain import Measured, Pricing
from hone.planner.search import peak_bytes

__all__ = [
    "TRAINED_OR_SCORED",
    "Advice",
    "Advisor",
    "Candidates",
    "Pick",
    "carry_over",
    "faster_generation",
    "faster_training",
    "fewer_engines",
    "fresher_samples",
    "further_ahead",
    "less_memory",
    "lowered_caps",
    "more_reward_workers",
    "more_room",
    "more_sequences",
    "wider_buffers",
]

_LEAST_GAIN = 0.02
"""Of a step; less is within the error of every prediction."""
_UNPLANNED = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, ValueError)
"""What planner and rules raise about a run that they were not made for."""
TRAINED_OR_SCORED = ("policy", "critic", "reference", "teacher")
"""Roles whose passes are computed again where memory ends."""
_KINDS: tuple[Literal["backward"], Literal["forward"]] = ("backward", "forward")
_NUM_KEPT = 8
"""Steps whose lengths are kept."""

Pick = Literal["fastest", "gain", "first"]
"""What is advised of several changes: the one that saves most time; the same, and nothing is said
where none saves any; the first."""
Metrics: TypeAlias = Mapping[str, float]
"""Of the newest step."""
Candidates: TypeAlias = Callable[[RunPlan, RLConfig, Metrics], Iterator[Change]]
"""Changes worth trying."""


class Advice(NamedTuple):
    """What to change."""

    text: str
    change: Change
    gain_s: float | None
    """What it takes off a step, negative where it adds; None: the planner cannot tell."""


class Advisor:
    """Of one run."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._lengths: deque[Sequence[Sequence[int]]] = deque(maxlen=_NUM_KEPT)
        self._pricing: Pricing | None = None

    def sampled(self, lengths: Sequence[Sequence[int]]) -> None:
        """Take in the completion tokens of a step's samples, by group."""
        self._pricing = None
        if lengths:
            self._lengths.append(lengths)

    def advise(self, candidates: Candidates, history: History, pick: Pick) -> Advice | None:
        """The change to make, in words. None: not worth saying. Never ends a run."""
        try:
            return self._advise(candidates, history, pick)
        except _UNPLANNED as error:
            return Advice(f"What to change is not known ({error}).", {}, None)

    def _advise(self, candidates: Candidates, history: History, pick: Pick) -> Advice | None:
        plan, known = self._plan, errors(self._plan)
        assert isinstance(plan.config, RLConfig)
        changes = [x for x in candidates(plan, plan.config, history.now) if self._differs(x)]
        plans = [changed(plan, change) for change in changes]
        served = [errors(after) <= known and does_fit(after) for after in plans]
        changes = [*compress(changes, served)]
        if not changes:
            return None if pick == "gain" else Advice("", {}, None)
        try:
            pricing = self._pricing = self._pricing or Pricing(plan, self._measured(history))
            gains = [pricing.gain_s(x) if pricing.knows(x) else None for x in changes]
            why = "the planner does not know this setting's part in the time"
        except _UNPLANNED as error:
            gains, why = [None] * len(changes), f"the planner cannot tell for this run ({error})"
        step_s = self._usual(history, "time/step_s")
        best = 0
        if pick != "first":
            best = max(range(len(changes)), key=lambda i: gains[i] or 0.0)
            if (gains[best] or 0.0) < _LEAST_GAIN * step_s:
                if None not in gains:
                    keys = dict.fromkeys(key for change in changes for key in change)
                    none = f"By the planner's estimate nothing is gained by {', '.join(keys)}."
                    return None if pick == "gain" else Advice(none, {}, None)
                best = gains.index(None)
        change, gain_s = changes[best], gains[best]
        return Advice(self._words(change, gain_s, step_s, why), change, gain_s)

    def _differs(self, change: Change) -> bool:
        return any(attrgetter(key)(self._plan.config) != value for key, value in change.items())

    def _words(self, change: Change, gain_s: float | None, step_s: float, why: str) -> str:
        told = " and ".join(
            f"{key} to {_word(value)} in place of {_word(attrgetter(key)(self._plan.config))}"
            for key, value in change.items()
        )
        if gain_s is None:
            return f"Set {told}; how much time that brings is not known: {why}."
        share = f"{abs(gain_s):.2g} s ({abs(gain_s) / max(step_s, 1e-9):.0%} of now)"
        verdict = f"takes {share} {'less' if gain_s > 0 else 'more'}"
        if abs(gain_s) < _LEAST_GAIN * step_s:
            verdict = "takes as long as now"
        return f"Set {told}: by the planner's estimate a step then {verdict}."

    def _measured(self, history: History) -> Measured:
        lengths = [group for step in self._lengths for group in step]
        return Measured.of(partial(self._usual, history), self._plan, lengths)

    def _usual(self, history: History, metric: str) -> float:
        """Of the newest steps; 0 where there are none."""
        values = history.values(metric)[-_NUM_KEPT:] or [0.0]
        assert isinstance(self._plan.config, RLConfig)
        # Ahead of the training a step depends on what those before it have left.
        return fmean(values) if self._plan.config.pipeline.samples_ahead else median(values)


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()


# -- candidates: of those that bring the same the first is preferred -------------------------------


def more_sequences(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """At once, in an engine with requests that wait, or more room for them."""
    num_batches = 1 + cfg.pipeline.max_staleness
    num_groups = cfg.rollout.prompts_per_step * num_batches + cfg.rollout.oversample_prompts
    most = -(-num_groups * cfg.rollout.n_samples_per_prompt // plan.roles["engine"].num_workers)
    present = cfg.engine.max_num_seqs
    for factor in (2, 4, 8, 16):
        if factor // 2 * present < most:
            yield {"engine.max_num_seqs": min(factor * present, most)}
    yield from _more_cache(plan, cfg)


def more_room(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """For keys and values of the sequences that run, or fewer of these."""
    yield from _more_cache(plan, cfg)
    for share in (0.75, 0.5):
        yield {"engine.max_num_seqs": max(int(share * cfg.engine.max_num_seqs), 1)}


def _more_cache(plan: RunPlan, cfg: RLConfig) -> Iterator[Change]:
    size = cfg.engine.kv_cache_gib or (CPU_CACHE_GIB if plan.is_on_cpu else None)
    if size is not None:
        yield from ({"engine.kv_cache_gib": factor * size} for factor in (1.5, 2.0, 4.0))
        return
    tenths = range(int(10 * cfg.engine.gpu_memory_utilization) + 1, 10)
    yield from ({"engine.gpu_memory_utilization": tenth / 10} for tenth in tenths)


def carry_over(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """What is unfinished when a step has enough; or sample ahead, where engines are apart."""
    is_corrected = cfg.algorithm.correction.kind != "none"
    correction = {} if is_corrected else {"algorithm.correction.kind": "tis"}
    for share in (4, 2):
        further = -(-cfg.rollout.prompts_per_step // share)
        if further > cfg.rollout.oversample_prompts:
            yield {"rollout.oversample_prompts": further, **correction}
    if cfg.cluster.num_engines:
        yield {"pipeline.max_staleness": 1, **correction}


def further_ahead(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Of trainers that wait: older samples, or devices of theirs to one engine more."""
    yield {"pipeline.max_staleness": cfg.pipeline.max_staleness + 1}
    yield from _moved_devices(cfg, 1)


def fewer_engines(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Of engines that wait: devices of one to trainers."""
    yield from _moved_devices(cfg, -1)


def _moved_devices(cfg: RLConfig, num_engines: int) -> Iterator[Change]:
    engines = cfg.cluster.num_engines + num_engines
    trainers = cfg.cluster.num_trainers - num_engines * cfg.engine.tensor_parallel_size
    if cfg.cluster.num_engines and engines > 0 and trainers > 0:
        yield {"cluster.num_engines": engines, "cluster.num_trainers": trainers}


def faster_generation(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Prompts read once, graphs, and many small engines in place of few large ones."""
    num_engines, size = cfg.cluster.num_engines, cfg.engine.tensor_parallel_size
    if not cfg.engine.enable_prefix_caching:
        yield {"engine.enable_prefix_caching": True}
    if size > 1:
        apart = {"cluster.num_engines": 2 * num_engines} if num_engines else {}
        yield {"engine.tensor_parallel_size": size // 2, **apart}
    if cfg.engine.enforce_eager:
        yield {"engine.enforce_eager": False}


def faster_training(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """What trades memory for time, as far as there is memory to spare."""
    yield {"trainer.recompute": "off"}
    yield {"trainer.offload": "none"}
    if chunk := kept_logits(plan):
        yield chunk
    yield from faster_generation(plan, cfg, now)
    if plan.max_accumulation > 1:
        size = "micro_batch_size" if cfg.trainer.micro_batch_size else "max_tokens_per_microbatch"
        yield {f"trainer.{size}": 2 * getattr(cfg.trainer, size)}


def less_memory(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """The cheapest first, of those that free a thirtieth of what is in use."""
    most = 29 / 30 * peak_bytes(plan)
    yield from (x for x in memory_changes(plan) if peak_bytes(changed(plan, x)) < most)


def lowered_caps(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """What the passes that ran out of memory have been cut down to."""
    change: dict[str, int] = {}
    for role in TRAINED_OR_SCORED:
        for kind in _KINDS:
            if (cap := now.get(f"mem/{role}_{kind}_cap")) is not None:
                has_own = kind == "forward" and cfg.trainer.max_tokens_per_forward is not None
                in_rows = cfg.trainer.micro_batch_size is not None and not has_own
                key = cap_key(role, kind, in_rows=in_rows)
                change[key] = min(int(cap), change.get(key, int(cap)))
    if change:
        yield change


def fresher_samples(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Divergence grows with the square of how far the policy moves until a sample is trained."""
    if cfg.pipeline.max_staleness > 1:
        yield {"pipeline.max_staleness": cfg.pipeline.max_staleness // 2}
    yield {"trainer.optimizer.lr": cfg.trainer.optimizer.lr / 2}


def more_reward_workers(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Calls at a time. Built-in functions compute, so that more workers than cores gain nothing;
    the user's own and services may wait."""
    present = cfg.reward.worker_limit
    waits = cfg.reward.waits_for_services or any(names_code(x.fn) for x in cfg.reward.functions)
    most = 4 * present if waits else num_usable_cores()
    numbers = dict.fromkeys(min(n * present, most) for n in (2, 4))
    yield from ({"reward.num_workers": number} for number in numbers if number > present)


def wider_buffers(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Of weights on their way."""
    if cfg.cluster.num_engines:
        yield {"cluster.update_weight_buffer_size": 2 * cfg.cluster.update_weight_buffer_size}
