"""R24, third part: planted symptoms raise an alarm within 3 steps, healthy runs raise none."""

import numpy as np
import pytest

from hone.observe.alarms import QUIET_STEPS, Alarm, Alarms
from tests.observe.fake_run import Scalars, Symptom, healthy_step, supervised_step

ONSET = 30
LEAKED = "mem/rss_without_caches_gib"


def run(symptom: Symptom | None, *, seed: int, num_steps: int) -> list[Alarm]:
    rng, alarms = np.random.default_rng(seed), Alarms()
    raised: list[Alarm] = []
    for step in range(1, num_steps + 1):
        scalars = healthy_step(step, rng)
        if symptom is not None and step >= ONSET:
            symptom(scalars, step - ONSET)
        raised += alarms.check(step, scalars)
    return raised


def set_to(**values: float) -> Symptom:
    """Overwrite metrics; `a__b` stands for `a/b`."""
    return lambda scalars, _: scalars.update(
        {name.replace("__", "/"): value for name, value in values.items()}
    )


def times(factor: float, *names: str) -> Symptom:
    return lambda scalars, _: scalars.update({name: factor * scalars[name] for name in names})


def add_delay(phase: str, seconds: float) -> Symptom:
    def symptom(scalars: Scalars, _: int) -> None:
        scalars[f"time/{phase}_s"] += seconds
        scalars["time/step_s"] += seconds

    return symptom


SYMPTOMS: dict[str, tuple[str, Symptom]] = {
    # name: metric that the alarm must point at, planted symptom
    "dropped tensor in the sync": ("off_policy/mismatch_kl", set_to(off_policy__mismatch_kl=3.0)),
    "rope scaling lost": ("off_policy/mismatch_kl", set_to(off_policy__mismatch_kl=0.03)),
    "gap grows 6-fold": ("off_policy/mismatch_kl", times(6, "off_policy/mismatch_kl")),
    "top-p sampling": ("off_policy/ratio/mean", set_to(off_policy__ratio__mean=0.896)),
    "engine holds base weights": ("off_policy/ratio/mean", set_to(off_policy__ratio__mean=0.029)),
    "sync never arrives": (
        "rollout/weight_version/max",
        set_to(rollout__weight_version__max=ONSET, rollout__weight_version__min=ONSET),
    ),
    "reward is constant": ("rollout/zero_spread_share", set_to(rollout__zero_spread_share=1.0)),
    "end of sequence missed": ("rollout/truncated_share", set_to(rollout__truncated_share=0.97)),
    "one seed for a group": ("rollout/duplicate_share", set_to(rollout__duplicate_share=0.875)),
    "scorers time out": (
        "rollout/failed/timeout",
        set_to(rollout__failed__timeout=60.0, rollout__valid=452.0),
    ),
    "entropy collapses": ("policy/entropy", times(0.02, "policy/entropy")),
    "entropy is gone": ("policy/entropy", set_to(policy__entropy=0.001)),
    "entropy explodes": ("policy/entropy", set_to(policy__entropy=9.0)),
    "gradient spikes": ("train/grad_norm", times(40, "train/grad_norm")),
    "everything masked": ("train/grad_norm", set_to(train__grad_norm=0.0)),
    "updates are lost": ("train/share_unchanged", set_to(train__share_unchanged=1.0)),
    "learning rate x 1e5": (
        "train/update_to_weight_ratio",
        times(1e5, "train/update_to_weight_ratio"),
    ),
    "update is clipped away": ("policy/clip_fraction", set_to(policy__clip_fraction=0.8)),
    "loss is NaN": ("train/loss", set_to(train__loss=float("nan"))),
    "reward is infinite": ("reward/mean", set_to(reward__mean=float("inf"))),
    "steps are skipped": ("train/num_skipped_steps", set_to(train__num_skipped_steps=1.0)),
    "host memory leaks": (
        LEAKED,
        lambda scalars, age: scalars.update({LEAKED: scalars[LEAKED] + 0.4 * age}),
    ),
    "time is lost between phases": ("time/unattributed_s", add_delay("unattributed", 2.0)),
    "sync hangs": ("time/sync_s", add_delay("sync", 20.0)),
    "generation stalls": ("time/generate_s", add_delay("generate", 25.0)),
}


def check_symptom(symptom: Symptom, metric: str, *, seed: int) -> None:
    raised = [a for a in run(symptom, seed=seed, num_steps=ONSET + 3) if a.step >= ONSET]
    assert metric in [alarm.metric for alarm in raised], raised
    alarm = next(alarm for alarm in raised if alarm.metric == metric)
    assert alarm.advice
    assert metric in str(alarm)


@pytest.mark.parametrize("name", SYMPTOMS)
def test_R24_a_planted_symptom_raises_its_alarm_within_three_steps(name: str) -> None:
    metric, symptom = SYMPTOMS[name]
    for seed in range(3):
        check_symptom(symptom, metric, seed=seed)


def test_R24_an_alarm_that_sleeps_is_caught() -> None:
    """The check itself turns red when the symptom is absent or another one."""
    with pytest.raises(AssertionError):
        check_symptom(lambda scalars, age: None, "train/grad_norm", seed=0)
    with pytest.raises(AssertionError):
        check_symptom(SYMPTOMS["gradient spikes"][1], "policy/entropy", seed=0)


@pytest.mark.parametrize("seed", range(5))
def test_R24_a_healthy_run_raises_nothing(seed: int) -> None:
    assert run(None, seed=seed, num_steps=250) == []


def test_R24_a_healthy_supervised_run_raises_nothing() -> None:
    rng, alarms = np.random.default_rng(0), Alarms()
    assert [
        a for step in range(1, 200) for a in alarms.check(step, supervised_step(step, rng))
    ] == []


AHEAD: dict[str, tuple[str, Scalars]] = {
    "training_waits": ("time/generate_s", {"time/generate_s": 5.0, "time/step_s": 12.0}),
    "engines_wait": (
        "perf/engine_busy_share",
        {"time/generate_s": 0.1, "time/step_s": 12.0, "perf/engine_busy_share": 0.3},
    ),
    "stale_samples": (
        "off_policy/kl",
        {"off_policy/kl": 0.03, "rollout/completion_tokens/mean": 240.0},
    ),
}
HEALTHY_AHEAD = {
    "time/generate_s": 1.0,
    "time/step_s": 12.0,
    "perf/engine_busy_share": 0.9,
    "off_policy/kl": 0.005,
}


def raised_by(metrics: Scalars, *, max_staleness: int, num_steps: int = 6) -> list[Alarm]:
    """On steps that are equal but for their versions."""
    alarms, raised = Alarms(max_staleness=max_staleness), list[Alarm]()
    for step in range(num_steps):
        raised += alarms.check(step, {"rollout/weight_version/max": float(step), **metrics})
    return raised


@pytest.mark.parametrize("name", AHEAD)
def test_a_pipeline_out_of_balance_is_named(name: str) -> None:
    metric, planted = AHEAD[name]
    assert raised_by(HEALTHY_AHEAD, max_staleness=2) == []
    (alarm,) = raised_by(HEALTHY_AHEAD | planted, max_staleness=2)
    assert (alarm.name, alarm.metric) == (name, metric)
    assert raised_by(HEALTHY_AHEAD | planted, max_staleness=0) == []
    assert raised_by(HEALTHY_AHEAD | {"off_policy/ratio/mean": 1.04}, max_staleness=2) == []
    few = AHEAD["stale_samples"][1] | {"rollout/completion_tokens/mean": 5.0}
    assert raised_by(HEALTHY_AHEAD | few, max_staleness=2) == []


def test_a_long_tail_is_named_where_it_is_waited_for() -> None:
    tail = {
        "time/generate_s": 9.0,
        "time/step_s": 12.0,
        "rollout/completion_tokens/mean": 500.0,
        "rollout/completion_tokens/max": 3072.0,
    }
    assert [alarm.name for alarm in raised_by(tail, max_staleness=0)] == ["long_tail"]
    for even in (
        {"rollout/completion_tokens/mean": 1200.0},
        {"rollout/completion_tokens/max": 190.0, "rollout/completion_tokens/mean": 20.0},
        {"time/generate_s": 6.0},
    ):
        assert raised_by(tail | even, max_staleness=0) == []


def test_a_slow_leak_is_found() -> None:
    """A quarter of a percent of the memory each step, hidden from the rule for fast leaks."""

    def symptom(scalars: Scalars, age: int) -> None:
        scalars[LEAKED] += 0.012 * age

    raised = run(symptom, seed=0, num_steps=ONSET + 110)
    assert [alarm.metric for alarm in raised] == [LEAKED]


def test_a_lasting_symptom_speaks_once_and_a_returning_one_again() -> None:
    lasting = [a.name for a in run(set_to(train__share_unchanged=1.0), seed=0, num_steps=120)]
    assert lasting == ["weights_unchanged"]

    def comes_back(scalars: Scalars, age: int) -> None:
        if age in {0, 50}:
            scalars["train/loss"] = float("nan")

    assert [a.step for a in run(comes_back, seed=0, num_steps=120)] == [ONSET, ONSET + 50]


BROKEN = {
    "policy/entropy": 9.0,
    "policy/clip_fraction": 0.8,
    "train/grad_norm": 90.0,
    "rollout/truncated_share": 0.97,
    "rollout/zero_spread_share": 1.0,
}
"""What a policy shows that too large a step has turned to noise."""


@pytest.mark.parametrize("delay", [0, 1, 15])
def test_steps_that_are_too_large_are_the_one_cause_that_is_named(delay: int) -> None:
    """Of all that they bring with them; not of what comes later, or stays."""

    def too_large(scalars: Scalars, age: int) -> None:
        if age < 3:
            scalars["train/update_to_weight_ratio"] = 0.4
        if delay <= age < delay + 5:
            scalars |= BROKEN

    def later(scalars: Scalars, age: int) -> None:
        if age == 0:
            scalars["train/update_to_weight_ratio"] = 0.4
        if age > QUIET_STEPS:
            scalars |= BROKEN

    raised = run(too_large, seed=0, num_steps=ONSET + 60)
    assert [alarm.name for alarm in raised] == ["large_update"]
    assert "learning rate" in raised[0].advice
    own = run(lambda scalars, _: scalars.update(BROKEN), seed=0, num_steps=ONSET + 5)
    assert len({alarm.name for alarm in own}) >= len(BROKEN) - 1
    mismatch = set_to(off_policy__mismatch_kl=0.4, train__update_to_weight_ratio=0.4)
    engine = {alarm.name for alarm in run(mismatch, seed=0, num_steps=ONSET + 5)}
    assert {"large_update", "mismatch_kl"} <= engine, "an engine may be wrong whatever else is"
    long_after = [alarm.name for alarm in run(later, seed=0, num_steps=ONSET + 40)]
    assert {"large_update", "truncated", "entropy_explosion"} <= {*long_after}


def test_what_a_step_that_is_too_large_has_silenced_is_said_where_it_stays() -> None:
    """Once, however long it stays; nothing that has been said before is said again."""

    def stays(scalars: Scalars, age: int) -> None:
        scalars["rollout/zero_spread_share"] = 1.0
        if age >= 5:
            scalars["rollout/truncated_share"] = 0.97
        if 5 <= age < 8:
            scalars["train/update_to_weight_ratio"] = 0.4

    said = [(alarm.name, alarm.step - ONSET) for alarm in run(stays, seed=0, num_steps=120)]
    assert said == [
        ("zero_spread", 1),
        ("large_update", 5),
        ("truncated", 7 + QUIET_STEPS),
    ]


@pytest.mark.parametrize(
    ("metrics", "named", "unnamed"),
    [
        ({}, "end-of-sequence", "env.max_turns"),
        ({"rollout/stop/length": 400.0}, "end-of-sequence", "env.max_turns"),
        (
            {"rollout/turns/mean": 3.0, "rollout/stop/length": 400.0},
            "which all turns of an episode share",
            "end-of-sequence",
        ),
        (
            {
                "rollout/turns/mean": 8.0,
                "rollout/stop/length": 20.0,
                "rollout/stop/max_turns": 400.0,
            },
            "no turn is left: raise env.max_turns",
            "rollout.max_completion_tokens",
        ),
    ],
)
def test_what_cut_samples_off_is_named(metrics: Scalars, named: str, unnamed: str) -> None:
    cut = {"rollout/truncated_share": 0.9, **metrics}
    (alarm,) = raised_by(cut, max_staleness=0)
    assert alarm.name == "truncated"
    assert named in alarm.advice
    assert unnamed not in alarm.advice


def test_samples_that_were_carried_over_may_have_another_ratio() -> None:
    """They began with other weights; those of one version must agree."""
    ratio = {"off_policy/ratio/mean": 1.05}

    def raised(oldest: float) -> list[str]:
        alarms = Alarms()
        versions = {"rollout/weight_version/min": oldest, "rollout/weight_version/max": 7.0}
        return [alarm.name for alarm in alarms.check(8, ratio | versions)]

    assert raised(6.0) == []
    assert raised(7.0) == ["ratio_mean"]


@pytest.mark.parametrize("lost_at", [1, 8])
def test_steps_that_lack_an_engine_are_no_reason_to_tune(lost_at: int) -> None:
    """Trainers wait for samples until another one has started; if they still do, it is said."""
    alarms, raised = Alarms(max_staleness=2), list[Alarm]()
    for step in range(1, lost_at + 30):
        waits = AHEAD["training_waits"][1] if step >= lost_at else {}
        lost = {"engine/lost": float(step == lost_at), "rollout/weight_version/max": float(step)}
        raised += alarms.check(step, HEALTHY_AHEAD | waits | lost)
    assert [(alarm.name, alarm.step) for alarm in raised] == [
        ("engine_lost", lost_at),
        ("training_waits", lost_at + QUIET_STEPS),
    ]


def test_time_in_no_phase_is_nothing_that_users_must_program() -> None:
    (alarm,) = run(add_delay("unattributed", 2.0), seed=0, num_steps=ONSET + 3)
    assert alarm.name == "unattributed_time"
    assert "span" not in alarm.advice
    assert "report it" in alarm.advice


def test_duplicates_of_short_answers_are_no_alarm() -> None:
    short = set_to(rollout__duplicate_share=0.9, rollout__completion_tokens__mean=2.0)
    assert run(short, seed=0, num_steps=60) == []


def test_solved_groups_may_have_no_gradient() -> None:
    alarms = Alarms()
    scalars = {"train/grad_norm": 0.0, "train/num_tokens": 9.0, "rollout/zero_spread_share": 1.0}
    assert [a.name for a in alarms.check(1, scalars)] == []


def test_the_kl_limit_follows_the_number_format() -> None:
    scalars = {"off_policy/mismatch_kl": 1e-3}
    assert Alarms().check(1, scalars) == []
    assert [a.limit for a in Alarms(max_mismatch_kl=1e-4).check(1, scalars)] == [1e-4]


@pytest.mark.parametrize(
    ("load_per_core", "cpu_share", "is_named"),
    [(4.0, 0.3, True), (4.0, 0.95, False), (0.9, 0.3, False)],
)
def test_a_slow_phase_on_a_crowded_machine_names_the_crowd(
    load_per_core: float, cpu_share: float, is_named: bool
) -> None:
    """Little CPU time alone may be waiting, and a high load need not be in the way."""

    def symptom(scalars: Scalars, age: int) -> None:
        add_delay("train", 20.0)(scalars, age)
        scalars |= {"perf/load_per_core": load_per_core, "perf/cpu_share": cpu_share}

    raised = [a for a in run(symptom, seed=3, num_steps=ONSET + 3) if a.name == "slow_phase"]
    assert len(raised) == 1, "one alarm, whatever the cause"
    assert raised[0].metric == "time/train_s"
    assert ("OMP_NUM_THREADS" in raised[0].advice) == is_named
