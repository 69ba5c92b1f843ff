"""Default alarms: symptoms that are known to cost days, each with what to look at.

The costly bugs of this field do not crash; they give plausible curves. Every rule below watches a
metric that is always on. A rule raises its alarm when its symptom appears, and again only after
the symptom has been gone for `QUIET_STEPS` steps.

    for alarm in alarms.check(step, scalars):
        log.event("alarm", **alarm.fields())

Alarms of correctness (sampling, learning, weight delivery) come first. Steps that are too large
bring many metrics out of their ranges: within `QUIET_STEPS` steps of that alarm, alarms that would
name another cause are held back, and reported afterwards if they still hold. Advice on speed and
memory is for healthy runs: there is none within `QUIET_STEPS` steps of an alarm of correctness or
of a lost engine. It names a setting and a value (`hone.observe.advice`). Alarms without any other
remedy are silent if no setting both keeps the rules and fits the GPU.

A metric that a run does not have is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hone.config.plan import RunPlan
from hone.observe import advice
from hone.observe.advice import LEAST_R_GEN, Advice, Advisor, Candidates, reads_prompts_again
from hone.observe.symptoms import (
    STALE_KL,
    History,
    Test,
    above,
    below,
    either,
    falls,
    has_trained,
    jumps,
    lacks_cores,
    leaks,
    many_failures,
    mean_share_above,
    not_finite,
    only_when,
    share_above,
    slow_phase,
    stuck,
    unlikely_duplicates,
)

__all__ = ["Alarm", "Alarms"]

QUIET_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A metric that left its healthy range."""

    name: str
    step: int
    metric: str
    value: float
    limit: float
    advice: str
    """Meaning of the symptom, where to look first, and what to change."""
    is_tuning: bool = False
    """Whether it concerns speed or memory, not correctness."""
    change: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Advised settings, by key."""

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g} (limit {self.limit:.4g}). {self.advice}"

    def fields(self) -> dict[str, Any]:
        """All fields, for `RunLog.event`."""
        return asdict(self)


class Rule(NamedTuple):
    """A symptom, its test, and the advice. Rules with the same name are one alarm with an advice
    for each cause."""

    name: str
    test: Test
    advice: str
    candidates: Candidates | None = None
    """Settings that could be changed."""
    needs_change: bool = False
    """Whether the alarm is silent if no setting can be changed."""


class Alarms:
    """Checks every step against all rules.

    `max_mismatch_kl` is the largest healthy divergence of trainer and engine: about 1e-2 for
    bfloat16 (its floor is 1.5e-3), 1e-4 for float32. Samples may be `max_staleness` updates older
    than the policy that is trained on them. A run without engines (`has_engines`) trains on rows
    of a data set.
    """

    def __init__(
        self,
        *,
        max_mismatch_kl: float = 1e-2,
        max_staleness: int = 0,
        has_engines: bool = True,
        plan: RunPlan | None = None,
    ) -> None:
        """Without a `plan` alarms name no settings."""
        mismatch = _mismatch_rules(max_mismatch_kl, max_staleness)
        self._numbers = mismatch + (_STALE if max_staleness else ()) + _SAMPLING + _LEARNING
        in_time = _ahead_rules(max_staleness) if max_staleness else _IN_TURNS
        idle = _IDLE_TRAINERS if has_engines else _IDLE_WITHOUT_ENGINES
        self._tuning = (*in_time, *_ENGINE, idle, *_memory_rules(plan))
        self._advisor = None if plan is None else Advisor(plan)
        self._history = History()
        self._last_breach: dict[str, int] = {}
        self._unreported = set[str]()
        """Names of symptoms that have appeared and are not reported yet."""

    def check(
        self,
        step: int,
        scalars: Mapping[str, float],
        *,
        why_untrained: str | None = None,
        why_failed: str | None = None,
    ) -> list[Alarm]:
        """Add one step's metrics and return the symptoms that have newly appeared. Their alarms
        quote `why_untrained`, the reason if no token of the step was trained, and `why_failed`, the
        causes if samples failed."""
        self._history.append(scalars)
        numbers = self._numbers
        if why_failed is not None:
            numbers = tuple(
                rule._replace(advice=f"{rule.advice} {why_failed}") if rule is _FAILED else rule
                for rule in numbers
            )
        if why_untrained is not None:
            untrained = Rule("untrained", above("train/untrained_steps", 0), why_untrained)
            numbers = (untrained, *numbers)
        raised = [*self._raise(_TOO_LARGE, step)]
        is_caused = step - self._last_breach_of(_TOO_LARGE) < QUIET_STEPS
        names = _NAME_OTHER_CAUSES if is_caused else frozenset[str]()
        raised += self._raise(numbers, step, silent=names)
        raised += self._raise(_MACHINE, step)
        last_sick = self._last_breach_of((*_TOO_LARGE, *numbers, _LOST_ENGINE))
        if step - last_sick >= QUIET_STEPS:
            raised += self._raise(self._tuning, step, is_tuning=True)
        return raised

    def _last_breach_of(self, rules: Sequence[Rule]) -> float:
        """The latest step with a symptom of one of the rules."""
        return max(self._last_breach.get(rule.name, -math.inf) for rule in rules)

    def _raise(
        self,
        rules: Sequence[Rule],
        step: int,
        *,
        is_tuning: bool = False,
        silent: Collection[str] = (),
    ) -> Iterator[Alarm]:
        """Iterate over the alarms to report. Those named in `silent` are held back."""
        for rule in rules:
            breach = rule.test(self._history)
            if breach is None:
                continue
            last = self._last_breach.get(rule.name)
            self._last_breach[rule.name] = step
            if last is None or step - last > QUIET_STEPS:
                self._unreported.add(rule.name)
            if rule.name in silent or rule.name not in self._unreported:
                continue
            self._unreported.remove(rule.name)
            suggested = None
            if rule.candidates is not None and self._advisor is not None:
                suggested = self._advisor.advise(rule.candidates, self._history.now)
                if suggested is None and rule.needs_change:
                    continue
            text, change = suggested or Advice("", {})
            yield Alarm(
                name=rule.name,
                step=step,
                advice=f"{rule.advice} {text}".rstrip(),
                is_tuning=is_tuning,
                change=change,
                **breach._asdict(),
            )


# -- Rules: what is watched by default -----------------------------------------------------------


def _mismatch_rules(max_kl: float, max_staleness: int) -> tuple[Rule, ...]:
    kl = "off_policy/mismatch_kl"
    rules = (
        Rule(
            "mismatch_kl",
            above(kl, max_kl),
            "Engine and trainer disagree on the same tokens: check the weight sync, rope and "
            "scaling settings, temperature, and number formats before any correction.",
        ),
        Rule(
            "mismatch_kl_growing",
            jumps(kl, 5.0, floor=max_kl / 10, before=3),
            "The gap between engine and trainer jumped: a sync may have left out or damaged a "
            "tensor since, or stale keys and values are being read.",
        ),
        Rule(
            "stuck_version",
            stuck("rollout/weight_version/max", steps=3 + max_staleness),
            "The policy is trained, but samples still come from the same weight version: weights "
            "do not reach the engine.",
        ),
    )
    # Staleness moves the mean over few tokens, though not the divergence of fresh ones.
    if max_staleness:
        return rules
    ratio = "off_policy/ratio/mean"
    return (
        *rules,
        Rule(
            "ratio_mean",
            # Samples that were carried over from an older policy have another ratio by design.
            only_when(_is_of_one_version, either(above(ratio, 1.03), below(ratio, 0.97))),
            "The mean ratio of trainer to engine must be 1: the engine samples from another "
            "distribution (truncation, penalties, temperature) or holds other weights.",
        ),
    )


def _is_of_one_version(now: Mapping[str, float]) -> bool:
    """Whether all tokens of the step were sampled with the same weights."""
    oldest, newest = (now.get(f"rollout/weight_version/{which}") for which in ("min", "max"))
    return oldest == newest


def _has_episodes(now: Mapping[str, float]) -> bool:
    """Whether samples have several turns."""
    return "rollout/turns/mean" in now


def _runs_out_of_turns(now: Mapping[str, float]) -> bool:
    """Whether more samples end at the limit of turns than at that of tokens."""
    return now.get("rollout/stop/max_turns", 0.0) > now.get("rollout/stop/length", 0.0)


def _runs_out_of_tokens(now: Mapping[str, float]) -> bool:
    return _has_episodes(now) and not _runs_out_of_turns(now)


def _is_one_answer(now: Mapping[str, float]) -> bool:
    return not _has_episodes(now) and not _runs_out_of_turns(now)


def _has_its_engines(now: Mapping[str, float]) -> bool:
    """Whether no engine was lost; that has its own alarm."""
    return now.get("engine/lost", 0.0) == 0


def _answers_have_moved(now: Mapping[str, float]) -> bool:
    """Whether the distribution of whole answers has moved, not only that of single tokens."""
    kl, length = now.get("off_policy/kl", 0.0), now.get("rollout/completion_tokens/mean", 0.0)
    return kl * length > 2.0


def _has_trained_some(now: Mapping[str, float]) -> bool:
    """Whether any token was trained. If not, another alarm names the cause."""
    return now.get("train/untrained_steps", 0.0) == 0


def _has_long_tail(now: Mapping[str, float]) -> bool:
    """Whether a few samples are far longer than most, and long enough to wait for."""
    longest = now.get("rollout/completion_tokens/max", 0.0)
    return longest > max(4 * now.get("rollout/completion_tokens/mean", 0.0), 200)


def _has_no_wait_for_samples(now: Mapping[str, float]) -> bool:
    return now.get("time/generate_s", 0.0) < 0.05 * now.get("time/step_s", 0.0)


def _has_no_queue(now: Mapping[str, float]) -> bool:
    """Whether all samples run at the same time. Otherwise the queue takes the time."""
    return now.get("engine/waiting/mean", 0.0) <= 1


def _waits_for_its_longest(now: Mapping[str, float]) -> bool:
    return _has_long_tail(now) and _has_no_queue(now)


def _has_no_preemptions(now: Mapping[str, float]) -> bool:
    """Whether there were no preemptions, which have their own alarm."""
    return now.get("engine/preemptions", 0.0) == 0


def _memory_rules(plan: RunPlan | None) -> tuple[Rule, ...]:
    gpu = None if plan is None else plan.devices.gpu
    if gpu is None or gpu.memory_gib is None:
        return ()
    rule = Rule(
        "little_memory",
        above("mem/gpu_peak_gib", 0.96 * gpu.memory_gib, steps=3),
        "The device is all but full: one longer batch, and the step runs out of memory.",
        advice.less_memory,
    )
    return (rule,)


_STALE = (
    Rule(
        "stale_samples",
        # STALE_KL: the largest divergence that number formats alone cause; _answers_have_moved:
        # nats of a whole answer. All eight runs with long answers that lost their policy had
        # exceeded both, 1 to 16 steps before; no other run had (benchmarks/README.md).
        only_when(_answers_have_moved, above("off_policy/kl", STALE_KL, steps=3)),
        "The policy moves further between sampling and training than clipping or correction make "
        "up for, and may soon be lost: go back to a checkpoint, with samples that are less stale "
        "or a lower learning rate; then algorithm.correction.kind tis. Divergence grows with "
        "the square of either: half of one leaves a quarter.",
        advice.fresher_samples,
    ),
)


def _ahead_rules(max_staleness: int) -> tuple[Rule, ...]:
    """Rules for a run in which engines sample while the trainer trains."""
    idle_advice = "Engines stand still, waiting for the trainers"
    if max_staleness > 1:  # with less, sampling and training take turns
        idle_advice += "; a smaller pipeline.max_staleness costs no time"
    return (
        Rule(
            "training_waits",
            # Over several steps: a step with a long wait often leaves samples for the next one.
            mean_share_above("time/generate_s", "time/step_s", 0.3, steps=6),
            "The trainers wait for samples; where engines are the limit, more of them help "
            "(cluster.num_engines).",
            advice.further_ahead,
        ),
        Rule(
            "engines_wait",
            only_when(_has_no_wait_for_samples, below("perf/engine_busy_share", 0.5, steps=5)),
            f"{idle_advice}.",
            advice.fewer_engines,
        ),
    )


_IN_TURNS = (
    Rule(
        "long_tail",
        only_when(
            _waits_for_its_longest, share_above("time/generate_s", "time/step_s", 0.6, steps=5)
        ),
        "Most of a step waits for its longest samples; `hone plan` says what engines of their own, "
        "which sample ahead, would bring.",
        advice.carry_over,
        needs_change=True,
    ),
    Rule(
        "slow_rewards",
        above("perf/wait_for_rewards_share", 0.2, steps=3),
        "Sampling has ended, and the step waits for reward functions.",
        advice.more_reward_workers,
        needs_change=True,
    ),
)
"""Rules for a synchronous run."""

_ENGINE = (
    Rule(
        "preemptions",
        # Limit: a twentieth of the samples. Each preempted one computes its keys and values again.
        share_above("engine/preemptions", "rollout/samples", 0.05, steps=3),
        "The cache is too small for the sequences that run: some are put back and computed again.",
        advice.more_room,
        needs_change=True,
    ),
    Rule(
        "engine_queue",
        only_when(_has_no_preemptions, above("engine/waiting/mean", 1.0, steps=3)),
        "Requests wait for a place in the engine: with more sequences at once, or where its cache "
        "is full (engine/kv_cache_usage/max) with a larger one, steps would do more.",
        advice.more_sequences,
        needs_change=True,
    ),
    Rule(
        "slow_generation",
        either(
            below("perf/R_gen", LEAST_R_GEN, steps=5),
            only_when(reads_prompts_again, below("rollout/cached_token_share", 0.1, steps=3)),
        ),
        "Generation is far from what the device can do, or computes the prompt of a group again "
        "for each of its samples: `hone trace` shows what a step of the engine does.",
        advice.faster_generation,
        needs_change=True,
    ),
    Rule(
        "slow_sync",
        share_above("time/sync_s", "time/step_s", 0.1, steps=5, floor=0.5),
        "The delivery of weights takes more than a tenth of a step (perf/sync_bytes_per_s): look "
        "at the network between trainers and engines with `hone doctor`.",
        advice.wider_buffers,
    ),
)

_IDLE_GPU = below("perf/gpu_utilization", 0.8, steps=5)
_IDLE_TRAINERS = Rule(
    "low_gpu_utilization",
    _IDLE_GPU,
    "The trainers' GPUs stand still for part of a step; `hone plan` compares other modes.",
    advice.faster_training,
)
_IDLE_WITHOUT_ENGINES = Rule(
    "low_gpu_utilization",
    _IDLE_GPU,
    "The GPUs stand still for part of a step. If time/data_s is large, rows come too late; if not, "
    "a pass computes so little that the host takes longer to start it: put more tokens in each "
    "(trainer.max_tokens_per_microbatch, and data.examples_per_step where all rows of a step are "
    "in one).",
)


_TRUNCATED = above("rollout/truncated_share", 0.5, steps=2)

_FAILED = Rule(
    "failed_samples",
    many_failures,
    "Samples fail instead of being scored: see `failure_detail` in samples.jsonl.",
)
_SAMPLING = (
    _FAILED,
    Rule(
        "zero_spread",
        above("rollout/zero_spread_share", 0.95, steps=2),
        "Nearly all groups earn one and the same reward, so there is nothing to learn from: the "
        "task is too hard, too easy, or the reward does not read the answers. A function that "
        "compares the completions of a prompt needs `whole_groups: true`.",
    ),
    Rule(
        "truncated",
        only_when(_is_one_answer, _TRUNCATED),
        "Most samples hit the length limit: raise rollout.max_completion_tokens (with an "
        "environment also env.max_turn_tokens, and what a program asks for as max_tokens), or "
        "check that the model's end-of-sequence ids and chat template are right.",
    ),
    Rule(
        "truncated",
        only_when(_runs_out_of_tokens, _TRUNCATED),
        "Most episodes use up rollout.max_completion_tokens, which all turns of an episode share "
        "with what the environment says (rollout/observation_tokens/mean): raise it, let the "
        "environment say less or limit a turn (Observation.max_tokens), or allow fewer turns "
        "(env.max_turns). Or their last turn is cut by a limit of its own: raise that "
        "(env.max_turn_tokens, Observation.max_tokens, max_tokens of a program).",
    ),
    Rule(
        "truncated",
        only_when(_runs_out_of_turns, _TRUNCATED),
        "Most episodes end because no turn is left: raise env.max_turns, or look in samples.jsonl "
        "at why the environment does not end them.",
    ),
    Rule(
        "duplicates",
        unlikely_duplicates,
        "Answers within a group repeat each other far beyond chance: the samples of a group may "
        "share a seed, or the engine samples greedily.",
    ),
)


_TOO_LARGE = (
    Rule(
        "large_update",
        above("train/update_to_weight_ratio", 0.1),
        "One step changed the weights by more than a tenth: the learning rate is too high. Go back "
        "to a checkpoint of before, with a lower one.",
    ),
)

_NAME_OTHER_CAUSES = frozenset(
    {
        *("stale_samples", "zero_spread"),
        *("truncated", "duplicates", "entropy_collapse", "entropy_explosion", "clip_fraction"),
        *("grad_norm_spike", "grad_norm_zero", "untrained", "skipped_steps"),
    }
)
"""Symptoms that also follow from steps that are too large, once these have damaged the policy. A
mismatch of the engine is not among them: it may be a fault of its own, which must not be missed."""

_LEARNING = (
    Rule(
        "not_finite",
        not_finite,
        "A number is not finite: look at the rewards, the learning rate and the log-probabilities "
        "of this step in samples.jsonl.",
    ),
    Rule(
        "entropy_collapse",
        either(below("policy/entropy", 0.005, steps=2), falls("policy/entropy", 0.1)),
        "The policy has all but stopped exploring: lower the learning rate, raise "
        "algorithm.clip_high, or check for an answer the reward is fooled by.",
    ),
    Rule(
        "entropy_explosion",
        jumps("policy/entropy", 3.0, floor=1.0),
        "The policy is turning to noise: the learning rate is too high or the gradient is wrong.",
    ),
    Rule(
        "clip_fraction",
        above("policy/clip_fraction", 0.4, steps=2),
        "Most of the update is clipped away: fewer epochs or optimizer steps per rollout, or a "
        "lower learning rate.",
    ),
    Rule(
        "grad_norm_spike",
        jumps("train/grad_norm", 10.0),
        "The gradient is ten times its usual size: look at the samples and advantages of this "
        "step; a lower trainer.optimizer.lr or trainer.optimizer.max_grad_norm bounds the damage.",
    ),
    Rule(
        "grad_norm_zero",
        only_when(has_trained, below("train/grad_norm", 1e-12)),
        "Tokens were trained and rewards differ, but the gradient is zero: check loss masks, "
        "advantages and frozen parameters.",
    ),
    Rule(
        "weights_unchanged",
        only_when(has_trained, above("train/share_unchanged", 0.9999, steps=2)),
        "The optimizer steps, but the weights keep their values: the learning rate is too small "
        "for the number format, or updates are not written back.",
    ),
    Rule(
        "skipped_steps",
        only_when(_has_trained_some, above("train/num_skipped_steps", 0)),
        "Optimizer steps were skipped because no token was left to train on.",
    ),
)

_LOST_ENGINE = Rule(
    "engine_lost",
    above("engine/lost", 0),
    "An engine was lost, and steps take longer until another one has started in its place: the log "
    "says why it ended.",
)

_MACHINE = (
    _LOST_ENGINE,
    Rule(
        "out_of_memory",
        either(*(above(f"mem/{role}_replays", 0) for role in advice.TRAINED_OR_SCORED)),
        "A pass ran out of memory, and the step was computed again with less, which takes up to "
        "twice as long: keep in the recipe what the warnings in the log name.",
        advice.lowered_caps,
    ),
    Rule(
        "host_memory",
        leaks("mem/rss_without_caches_gib"),
        "Host memory keeps growing, and not for caches that have a bound: something holds on to "
        "samples, tensors or worker results.",
    ),
    Rule(
        "unattributed_time",
        share_above("time/unattributed_s", "time/step_s", 0.05, steps=2, floor=0.02),
        "Part of a step belongs to none of its phases (the other metrics time/..._s): look for a "
        "disk or tracker (log.to) that is slow, and for other programs on the machine. Where there "
        "are none it is a fault of hone: please report it with the run folder's trace.json.",
    ),
    Rule(
        "slow_phase",
        only_when(_has_its_engines, only_when(lacks_cores, slow_phase)),
        "This phase suddenly takes far longer than before, and more threads want to run than the "
        "machine has cores (perf/load_per_core, perf/cpu_share): end other programs, or leave them "
        "cores with fewer threads (OMP_NUM_THREADS in the environment), reward.num_workers or "
        "processes.",
    ),
    Rule(
        "slow_phase",
        only_when(_has_its_engines, only_when(lambda now: not lacks_cores(now), slow_phase)),
        "This phase suddenly takes far longer than before: look at trace.json of the step, other "
        "load on the machine, and the scoring workers.",
    ),
)
