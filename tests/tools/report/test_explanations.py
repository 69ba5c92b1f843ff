"""What a chart says of a course that surprises people: only where it is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from hone.observe.run_folder import RunFolder
from hone.tools.report.explanations import explanation, explanation_of_all
from hone.tools.report.write import write_report
from tests.tables import table
from tests.tools.report.test_report import Page, chart_data, charts_of

GRPO: dict[str, Any] = {
    "rollout": {},
    "trainer": {"optimizer": {"name": "adamw"}},
    "algorithm": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "entropy_coef": 0.0,
        "kl": {"coef": 0.0, "placement": "loss"},
        "correction": {"kind": "none"},
    },
    "teacher": {"path": None},
}
ONCE = {"train/num_optimizer_steps": 1.0, "train/loss": 1e-9, "reward/mean": 0.5}


def changed(**algorithm: Any) -> dict[str, Any]:
    return {**GRPO, "algorithm": {**GRPO["algorithm"], **algorithm}}


def run_of(folder: Path, config: dict[str, Any], rows: list[dict[str, float]]) -> RunFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    numbered = [{"step": step, **row} for step, row in enumerate(rows, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    return RunFolder.read(folder)


@table(
    "config, row, is_said",
    [
        (GRPO, ONCE, True),
        (changed(loss={"gspo": 1.0, "ppo_clip": 0.5}), ONCE, True),
        (changed(advantage="reinforce_pp"), ONCE, True),
        (GRPO, ONCE | {"train/num_optimizer_steps": 2.0}, False),
        (GRPO, {"train/loss": 0.0}, False),  # an older version, which did not count them
        (GRPO, ONCE | {"train/loss": -0.3}, False),  # rows of unequal length
        (changed(loss="cispo"), ONCE, False),  # its value is that of log-probabilities
        (changed(loss={"ppo_clip": 1.0, "sapo": 1.0}), ONCE, False),
        (changed(advantage="gae"), ONCE, False),
        (changed(entropy_coef=0.01), ONCE, False),
        (changed(kl={"coef": 0.1, "placement": "loss"}), ONCE, False),
        (changed(kl={"coef": 0.1, "placement": "reward"}), ONCE, True),
        (changed(correction={"kind": "truncate"}), ONCE, False),
        (GRPO | {"teacher": {"path": "m"}}, ONCE, False),
        ({"trainer": {}}, ONCE, False),  # demonstrations
    ],
)
def test_a_loss_of_zero_by_construction(
    tmp_path: Path, config: dict[str, Any], row: dict[str, float], is_said: bool
) -> None:
    said = explanation("train/loss", run_of(tmp_path / "run", config, [row] * 3))
    assert said.startswith("Near 0 by construction") == is_said
    assert bool(said) == is_said


def test_a_loss_of_zero_because_no_rewards_differ(tmp_path: Path) -> None:
    rows = [ONCE | {"rollout/zero_spread_share": 1.0}] * 2
    run = run_of(tmp_path / "run", GRPO, rows)
    assert "No group had samples of different rewards" in explanation("train/loss", run)
    run = run_of(tmp_path / "run", GRPO, [*rows, ONCE | {"rollout/zero_spread_share": 0.9}])
    assert "Near 0 by construction" in explanation("train/loss", run)


RISING = [0.1, 0.2, 0.3, 0.4]


@table(
    "metric, courses, is_said",
    [
        ("policy/entropy", {"policy/entropy": [4, 3, 2, 1], "reward/mean": RISING}, True),
        ("policy/entropy", {"policy/entropy": [4, 4, 4, 3], "reward/mean": RISING}, False),
        ("policy/entropy", {"policy/entropy": [4, 3, 2, 1], "reward/mean": RISING[::-1]}, False),
        ("policy/entropy", {"policy/entropy": [4, 3, 2, 1]}, False),
        ("policy/entropy", {"reward/mean": RISING}, False),
        ("off_policy/ratio/mean", {"off_policy/ratio/mean": [1.0, 0.9999]}, True),
        ("off_policy/ratio/mean", {"off_policy/ratio/mean": [1.0, 0.98]}, False),
        (
            "off_policy/ratio/mean",
            {"off_policy/ratio/mean": [1.0, 1.0], "off_policy/ratio/p95": [1.0, 1.2]},
            False,
        ),
        ("off_policy/mismatch_kl", {"off_policy/mismatch_kl": [1e-14, 1e-12]}, True),
        ("off_policy/mismatch_kl", {"off_policy/mismatch_kl": [1e-14, 1e-5]}, False),
        ("rollout/zero_spread_share", {"rollout/zero_spread_share": [0.1, 0.8]}, True),
        ("rollout/zero_spread_share", {"rollout/zero_spread_share": [0.8, 0.1]}, False),
        ("logps/chosen", {"logps/chosen": [-9, -10], "rewards/margins": [0, 1]}, True),
        ("logps/chosen", {"logps/chosen": [-10, -9], "rewards/margins": [0, 1]}, False),
        ("logps/chosen", {"logps/chosen": [-9, -10], "rewards/margins": [1, 0]}, False),
        ("logps/chosen", {"logps/chosen": [-9, -10]}, False),
        ("train/grad_norm", {"train/grad_norm": [1, 2]}, False),
    ],
)
def test_other_courses(
    tmp_path: Path, metric: str, courses: dict[str, list[float]], is_said: bool
) -> None:
    rows = [
        dict(zip(courses, values, strict=True)) for values in zip(*courses.values(), strict=True)
    ]
    assert bool(explanation(metric, run_of(tmp_path / "run", GRPO, rows))) == is_said


@table(
    "row, is_said",
    [
        ({"train/num_optimizer_steps": 1.0}, True),
        ({"train/num_optimizer_steps": 2.0}, False),
        ({"train/num_optimizer_steps": 1.0, "policy/approx_kl": 1e-3}, False),
    ],
)
def test_clipping_that_one_update_cannot_have(
    tmp_path: Path, row: dict[str, float], is_said: bool
) -> None:
    zeros = {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.0, "reward/mean": 1.0}
    run_of(tmp_path / "run", GRPO, [zeros | row] * 2)
    html = write_report(tmp_path / "run").read_text()
    assert "Clipped tokens" in chart_data(html)["zero"]
    assert len(chart_data(html)["why_zero"]) == is_said
    assert ("each batch is trained once" in Page(html).text) == is_said


def test_a_sentence_stands_at_its_chart(tmp_path: Path) -> None:
    run_of(tmp_path / "run", GRPO, [ONCE, ONCE | {"reward/mean": 0.6}])
    html = write_report(tmp_path / "run").read_text()
    (note,) = charts_of(html)["Loss"]["notes"]
    figure = html[html.index("<b>Loss</b>") :].partition("</figure>")[0]
    assert f'<p class="why">{note}</p>' in figure
    assert charts_of(html)["Reward"]["notes"] == []


def test_a_comparison_says_what_holds_for_all_of_its_runs(tmp_path: Path) -> None:
    once = run_of(tmp_path / "once", GRPO, [ONCE] * 2)
    twice = run_of(tmp_path / "twice", GRPO, [ONCE | {"train/num_optimizer_steps": 2.0}] * 2)
    other = run_of(tmp_path / "other", GRPO, [{"reward/mean": 1.0}])
    assert explanation_of_all("train/loss", [once, twice]) == ""
    assert explanation_of_all("train/loss", [once, other]) == explanation("train/loss", once) != ""
