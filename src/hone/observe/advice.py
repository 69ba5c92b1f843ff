"""Advice on symptoms of a run: the setting to change, and its new value.

    advisor = Advisor(plan)
    advisor.advise(more_sequences, history.now)    # Advice("Set engine.max_num_seqs to ...", {...})

A function of candidates proposes changes, the cheapest or most likely to help first. The first one
that keeps the rules and fits the GPU is advised. How much time it saves is not predicted: `hone
tune` measures that. Nothing is computed before a symptom is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from hone.address import names_code
from hone.config.plan import RunPlan
from hone.config.tree import RLConfig
from hone.distributed.settings import ROW_SCORERS
from hone.engine.settings import BLOCK_SIZE
from hone.hardware import num_usable_cores
from hone.planner.fitting import changed, does_fit, errors, memory_changes
from hone.planner.knobs import BUDGETS, CACHE, ENGINE_SIZE, SEQUENCES, Change, knobs
from hone.planner.run_memory import peak_bytes
from hone.trainer.settings import cap_key

__all__ = [
    "LEAST_R_GEN",
    "TRAINED_OR_SCORED",
    "Advice",
    "Advisor",
    "Candidates",
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
    "reads_prompts_again",
    "wider_buffers",
]

LEAST_R_GEN = 0.3
"""Share of a device's limit below which generation counts as slow."""
_UNPLANNED = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, ValueError)
"""Errors of planner and rules about a run that they do not support."""
TRAINED_OR_SCORED = ("policy", "critic", *ROW_SCORERS)
"""Roles whose passes are retried after an out-of-memory error."""
_MOST_PASSING = 2.0
"""Wait for rewards over the time of all calls above which it is not the calls that take long."""
_KINDS: tuple[Literal["backward"], Literal["forward"]] = ("backward", "forward")

Metrics: TypeAlias = Mapping[str, float]
"""Metrics of the newest step."""
Candidates: TypeAlias = Callable[[RunPlan, RLConfig, Metrics], Iterator[Change]]
"""Changes worth trying, the cheapest or most likely to help first."""


class Advice(NamedTuple):
    """Settings to change."""

    text: str
    change: Change


class Advisor:
    """Advises on settings of one run."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def advise(self, candidates: Candidates, now: Metrics) -> Advice | None:
        """Advice with the first change that fits and that the rules allow; None where there is
        none. An error never ends the run."""
        plan = self._plan
        assert isinstance(plan.config, RLConfig)
        try:
            known = errors(plan)
            for change in filter(self._differs, candidates(plan, plan.config, now)):
                after = changed(plan, change)
                if errors(after) <= known and does_fit(after):
                    return Advice(self._words(change), change)
        except _UNPLANNED as error:
            return Advice(f"What to change is not known ({error}).", {})
        return None

    def _differs(self, change: Change) -> bool:
        return any(attrgetter(key)(self._plan.config) != value for key, value in change.items())

    def _words(self, change: Change) -> str:
        settings = " and ".join(self._setting(key, value) for key, value in change.items())
        return f"Set {settings}."

    def _setting(self, key: str, value: Any) -> str:
        present = attrgetter(key)(self._plan.config)
        if present is None:
            return f"{key} to {_word(value)} (it is unset)"
        return f"{key} to {_word(value)} in place of {_word(present)}"


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()


# -- candidates ------------------------------------------------------------------------------------


def more_sequences(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Raise the number of concurrent sequences to what the cache had room for at its peak; a larger
    cache where it was full."""
    num_batches = 1 + cfg.pipeline.max_staleness
    num_groups = cfg.rollout.prompts_per_step * num_batches + cfg.rollout.oversample_prompts
    most = -(-num_groups * cfg.rollout.n_samples_per_prompt // plan.roles["engine"].num_workers)
    present = cfg.engine.max_num_seqs
    # An engine that does not report the use of its cache is assumed to have room for one doubling.
    usage = now.get("engine/kv_cache_usage/max", 0.5)
    numbers = dict.fromkeys(min(int(factor * present), most) for factor in (8, 4, 2, 1.25))
    for number in numbers:
        if number > present and number * usage <= present:
            yield {"engine.max_num_seqs": number}
    if usage > 0.8:
        yield from CACHE.time(plan)


def more_room(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """A larger cache for the running sequences, or fewer of them."""
    yield from CACHE.time(plan)
    yield from SEQUENCES.gpu(plan)


def carry_over(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Carry over unfinished samples when a step has enough groups; with remote engines, sample
    ahead."""
    is_corrected = cfg.algorithm.correction.kind != "none"
    correction = {} if is_corrected else {"algorithm.correction.kind": "tis"}
    for share in (4, 2):
        further = -(-cfg.rollout.prompts_per_step // share)
        if further > cfg.rollout.oversample_prompts:
            yield {"rollout.oversample_prompts": further, **correction}
    if cfg.cluster.num_engines:
        yield {"pipeline.max_staleness": 1, **correction}


def further_ahead(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """For trainers that wait: larger staleness. Where the engines are hardly ever idle, staleness
    does not help, so first move devices of the trainers to one more engine."""
    if now.get("perf/engine_busy_share", 0.0) > 0.9:
        yield from _moved_devices(cfg, 1)
    yield {"pipeline.max_staleness": cfg.pipeline.max_staleness + 1}
    yield from _moved_devices(cfg, 1)


def fewer_engines(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """For engines that wait: move the devices of one to the trainers."""
    yield from _moved_devices(cfg, -1)


def _moved_devices(cfg: RLConfig, num_engines: int) -> Iterator[Change]:
    engines = cfg.cluster.num_engines + num_engines
    trainers = cfg.cluster.num_trainers - num_engines * cfg.engine.tensor_parallel_size
    if cfg.cluster.num_engines and engines > 0 and trainers > 0:
        yield {"cluster.num_engines": engines, "cluster.num_trainers": trainers}


def reads_prompts_again(now: Metrics) -> bool:
    """Whether groups have prompts of several cache blocks that are not reused from the prefix
    cache."""
    is_group = now.get("rollout/group_size/min", 0.0) > 1
    is_long = now.get("rollout/prompt_tokens/mean", 0.0) >= 4 * BLOCK_SIZE
    return is_group and is_long and now.get("rollout/cached_token_share", 0.0) < 0.1


def faster_generation(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Prefix caching, CUDA graphs, and many small engines in place of few large ones."""
    if reads_prompts_again(now):
        yield {"engine.enable_prefix_caching": True}
    if not plan.is_on_cpu:
        yield {"engine.enforce_eager": False}
    if now.get("perf/R_gen", 1.0) < LEAST_R_GEN:
        yield from ENGINE_SIZE.time(plan)


def faster_training(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Settings of the trainer that spend memory to save time: first those that remove idle time of
    a GPU, then those that remove recomputation, and last larger micro-batches."""
    dearest_first = reversed([x for x in knobs(plan) if x.part == "policy" and x is not BUDGETS])
    for knob in sorted(dearest_first, key=lambda knob: not knob.lets_gpus_wait):
        yield from knob.time(plan)
    yield from faster_generation(plan, cfg, now)
    yield from BUDGETS.time(plan)


def less_memory(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Changes that free at least a thirtieth of the memory in use, the cheapest first; none where
    the sizes of the model are not known."""
    if plan.shape is None:
        return
    most = 29 / 30 * peak_bytes(plan)
    yield from (x for x in memory_changes(plan) if peak_bytes(changed(plan, x)) < most)


def lowered_caps(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Set the caps to which passes were reduced after out-of-memory errors."""
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
    """Fresher samples: divergence grows with the square of the policy's change between sampling and
    training."""
    if cfg.pipeline.max_staleness > 1:
        yield {"pipeline.max_staleness": cfg.pipeline.max_staleness // 2}
    yield {"trainer.optimizer.lr": cfg.trainer.optimizer.lr / 2}


def more_reward_workers(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """More concurrent reward calls, where the wait is longer than a single call, and not much
    longer than all calls by the present workers: the rest is the passing of samples, which takes as
    long with any number of workers. Built-in functions only compute, so more workers than cores do
    not help; the user's own functions and services may wait."""
    wait_s = now.get("perf/wait_for_rewards_share", 0.0) * now.get("time/step_s", 0.0)
    call_s, present = now.get("time/reward/p99_s", 0.0), cfg.reward.worker_limit
    num_calls = now.get("rollout/samples", 0.0)
    if not call_s < wait_s < _MOST_PASSING * num_calls * call_s / present:
        return
    waits = cfg.reward.waits_for_services or any(names_code(x.fn) for x in cfg.reward.functions)
    number = 4 * present if waits else min(4 * present, num_usable_cores())
    if number > present:
        yield {"reward.num_workers": number}


def wider_buffers(plan: RunPlan, cfg: RLConfig, now: Metrics) -> Iterator[Change]:
    """Larger buffers for weights in transfer."""
    if cfg.cluster.num_engines:
        yield {"cluster.update_weight_buffer_size": 2 * cfg.cluster.update_weight_buffer_size}
