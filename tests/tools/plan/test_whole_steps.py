"""The public table of whole steps: what it predicts is what the planner predicts now."""

from __future__ import annotations

import json
import re

from benchmarks import whole_steps

ROWS = json.loads((whole_steps.HERE / "whole_steps.json").read_text(encoding="utf-8"))


def test_the_page_has_the_predictions_of_the_planner() -> None:
    """`python benchmarks/whole_steps.py` writes it anew."""
    assert whole_steps.PAGE.read_text(encoding="utf-8") == whole_steps.page(ROWS)


def test_every_row_names_its_commit_and_has_figures() -> None:
    for row in ROWS:
        assert re.fullmatch(r"[0-9a-f]{7}", row["commit"]), row
        assert row["step_s"] > 0
        assert min(row["tokens"]) > 0


def test_the_figures_of_a_line() -> None:
    row = {"model": "Qwen/Qwen3-1.7B", "gpus": 2, "prompts": 10, "group": 8, "tokens": [200, 1000]}
    row |= {
        "flags": "",
        "placement": "colocated",
        "step_s": 16,
        "peak_gib": 50,
        "commit": "abc1234",
    }
    found = [*whole_steps.cells(row, 12.0, 60.0)]
    assert found[:4] == ["Qwen3-1.7B", "2", "10 x 8, 200 + 1,000", "colocated"]
    assert found[4:] == ["**16**", "12.00 (-25%)", "6,000", "50", "60.0 (+20%)", "-", *found[-2:]]
    assert found[-2:] == ["defaults", "`abc1234`"]
    assert whole_steps.off([-0.3, 0.01, 0.02]) == "2.0% off in the median and 30.0% at most"


def test_engines_over_several_gpus_rank_as_measured() -> None:
    """8B with engines over two before engines of one, 30B-A3B over two before over four."""
    steps = {row["placement"]: row for row in ROWS if row["gpus"] == 4}
    for better, worse in (
        ("colocated, engines over two", "colocated"),
        (
            "colocated, experts over four, engines over two",
            "colocated, experts over four, one engine over four",
        ),
    ):
        faster, slower = steps[better], steps[worse]
        gained = slower["step_s"] - faster["step_s"]
        found = whole_steps.predicted(slower)[0] - whole_steps.predicted(faster)[0]
        assert gained > 0
        assert 0.5 * gained < found < 1.5 * gained, better


def test_predictions_of_memory_are_near_what_was_measured() -> None:
    """They are of full micro-batches. Six of 0.8B had 45,056 of 49,152 tokens each, and seventeen
    15,902 of 16,384."""
    known = [row for row in ROWS if row.get("peak_gib")]
    assert known
    for row in known:
        _, peak_gib = whole_steps.predicted(row)
        most = 0.12 if "Qwen3.5" in row["model"] else 0.05
        assert -0.05 < peak_gib / row["peak_gib"] - 1 < most, row
