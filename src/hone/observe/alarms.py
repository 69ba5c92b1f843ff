"""Default alarms: the symptoms that cost others days, each with what to look at.

The costly bugs of this field do not crash; they give plausible curves. Every rule below watches a
metric that is always on. A rule raises its alarm when its symptom appears, and again
only after the symptom has been gone for `QUIET_STEPS` steps.

    for alarm in alarms.check(step, scalars):
        log.event("alarm", **alarm.fields())

A metric that a run does not have is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hone.observe.symptoms import (
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
    """What it means and where to look first."""

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g} (limit {self.limit:.4g}). {self.advice}"

    def fields(self) -> dict[str, Any]:
        """Everything, for `RunLog.event`."""
        return asdict(self)


class Rule(NamedTuple):
    """A symptom, how it is recognised, and what to advise the user. Rules of one name are one alarm
    with an advice for each cause."""

    name: str
    test: Test
    advice: str


class Alarms:
    """Checks every step against all rules.

    `max_mismatch_kl` is the largest healthy divergence of trainer and engine: about 1e-2 for
    bfloat16 (its floor is 1.5e-3), 1e-4 for float32. Samples may be `max_staleness` updates older
    than the policy that they train.
    """

    def __init__(self, *, max_mismatch_kl: float = 1e-2, max_staleness: int = 0) -> None:
        mismatch = _mismatch_rules(max_mismatch_kl, max_staleness)
        pace = _ahead_rules(max_staleness) if max_staleness else _IN_TURNS
        self._rules = mismatch + pace + _SAMPLING + _LEARNING + _MACHINE
        self._history = History()
        self._last_breach: dict[str, int] = {}

    def check(
        self, step: int, scalars: Mapping[str, float], *, why_untrained: str | None = None
    ) -> list[Alarm]:
        """Take in one step's metrics and return the symptoms that have newly appeared.

        `why_untrained` is the cause where no token of the step was trained, for its alarm to name.
        """
        self._history.append(scalars)
        raised: list[Alarm] = []
        rules = self._rules
        if why_untrained is not None:
            rules = (Rule("untrained", above("train/untrained_steps", 0), why_untrained), *rules)
        for rule in rules:
            breach = rule.test(self._history)
            if breach is None:
                continue
            last = self._last_breach.get(rule.name)
            self._last_breach[rule.name] = step
            if last is None or step - last > QUIET_STEPS:
                alarm = Alarm(name=rule.name, step=step, advice=rule.advice, **breach._asdict())
                raised.append(alarm)
        return raised


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
    if max_staleness:  # which moves the mean of few tokens, though not the divergence of fresh ones
        return rules
    ratio = "off_policy/ratio/mean"
    return (
        *rules,
        Rule(
            "ratio_mean",
            either(above(ratio, 1.03), below(ratio, 0.97)),
            "The mean ratio of trainer to engine must be 1: the engine samples from another "
            "distribution (truncation, penalties, temperature) or holds other weights.",
        ),
    )


def _ahead_rules(max_staleness: int) -> tuple[Rule, ...]:
    """Of a run that samples ahead of the training."""
    more = f"pipeline.max_staleness {max_staleness + 1}"
    return (
        Rule(
            "training_waits",
            share_above("time/generate_s", "time/step_s", 0.3, steps=5),
            f"The trainers wait for samples: {more} in place of {max_staleness} lets engines run "
            "further ahead (2 to 3 are usual), cluster.num_engines adds some; `hone plan` says "
            "what either brings.",
        ),
        Rule(
            "engines_wait",
            only_when(
                lambda now: now.get("time/generate_s", 0.0) < 0.05 * now.get("time/step_s", 0.0),
                below("perf/engine_busy_share", 0.5, steps=5),
            ),
            "Engines stand still, waiting for the trainers: fewer engines or more trainers; a "
            "smaller pipeline.max_staleness costs no time.",
        ),
        Rule(
            "stale_samples",
            # The most that number formats alone do, and nats of a whole answer. Of runs with long
            # answers all eight that lost their policy had gone beyond both, 1 to 16 steps before;
            # no other had (benchmarks/README.md).
            only_when(_answers_have_moved, above("off_policy/kl", 0.01, steps=3)),
            "The policy moves further between sampling and training than clipping or correction "
            "make up for, and may soon be lost: go back to a checkpoint and lower "
            "the learning rate; then algorithm.correction.kind tis, a smaller "
            "pipeline.max_staleness.",
        ),
    )


def _answers_have_moved(now: Mapping[str, float]) -> bool:
    """Whether a whole answer is of another distribution by now, not only some token of it."""
    kl, length = now.get("off_policy/kl", 0.0), now.get("rollout/completion_tokens/mean", 0.0)
    return kl * length > 2.0


def _has_trained_some(now: Mapping[str, float]) -> bool:
    """Whether any token was trained; where none was, another alarm names the cause."""
    return now.get("train/untrained_steps", 0.0) == 0


def _has_long_tail(now: Mapping[str, float]) -> bool:
    """Whether a few samples are far longer than most, and long enough to be waited for."""
    longest = now.get("rollout/completion_tokens/max", 0.0)
    return longest > max(4 * now.get("rollout/completion_tokens/mean", 0.0), 1000)


_IN_TURNS = (
    Rule(
        "long_tail",
        only_when(_has_long_tail, share_above("time/generate_s", "time/step_s", 0.6, steps=5)),
        "Most of a step waits for its longest samples: rollout.oversample_prompts starts more and "
        "carries the rest over, pipeline.max_staleness lets engines of their own sample ahead; "
        "`hone plan` says what either brings.",
    ),
)
"""Of a run in which sampling and training take turns."""


_SAMPLING = (
    Rule(
        "failed_samples",
        many_failures,
        "Samples fail instead of being scored: see `failure_detail` in samples.jsonl.",
    ),
    Rule(
        "zero_spread",
        above("rollout/zero_spread_share", 0.95, steps=2),
        "Nearly all groups earn one and the same reward, so there is nothing to learn from: the "
        "task is too hard, too easy, or the reward does not read the answers. A function that "
        "compares the completions of a prompt with each other sees one at a time here.",
    ),
    Rule(
        "truncated",
        above("rollout/truncated_share", 0.5, steps=2),
        "Most samples hit the length limit: raise rollout.max_completion_tokens, or check that "
        "the model's end-of-sequence ids and chat template are right.",
    ),
    Rule(
        "duplicates",
        unlikely_duplicates,
        "Answers within a group repeat each other far beyond chance: the samples of a group may "
        "share a seed, or the engine samples greedily.",
    ),
)


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
        "step; a lower learning rate or optimizer.max_grad_norm bounds the damage.",
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
        "large_update",
        above("train/update_to_weight_ratio", 0.1),
        "One step changed the weights by more than a tenth: the learning rate is too high.",
    ),
    Rule(
        "skipped_steps",
        only_when(_has_trained_some, above("train/num_skipped_steps", 0)),
        "Optimizer steps were skipped because no token was left to train on.",
    ),
)

_MACHINE = (
    Rule(
        "host_memory",
        leaks("mem/rss_gib"),
        "Host memory keeps growing: something holds on to samples, tensors or worker results.",
    ),
    Rule(
        "unattributed_time",
        share_above("time/unattributed_s", "time/step_s", 0.05, steps=2, floor=0.02),
        "Time goes to something that no phase names: wrap it in a span, or look for garbage "
        "collection and waiting workers.",
    ),
    Rule(
        "slow_phase",
        only_when(lacks_cores, slow_phase),
        "This phase suddenly takes far longer than before, and more threads want to run than the "
        "machine has cores (perf/load_per_core, perf/cpu_share): end other programs, or leave them "
        "cores with fewer threads (OMP_NUM_THREADS in the environment), reward.num_workers or "
        "processes.",
    ),
    Rule(
        "slow_phase",
        only_when(lambda now: not lacks_cores(now), slow_phase),
        "This phase suddenly takes far longer than before: look at trace.json of the step, an "
        "engine that was restarted, other load on the machine, and the scoring workers.",
    ),
)
