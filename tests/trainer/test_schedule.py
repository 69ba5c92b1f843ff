from __future__ import annotations

import pytest

from hone.trainer.schedule import lr_scale
from hone.trainer.settings import OptimizerConfig
from tests.tables import table


@table(
    "schedule, expected",
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_golden_course(schedule: str, expected: list[float]):
    cfg = OptimizerConfig.model_validate(
        {"schedule": schedule, "warmup_steps": 2, "min_lr_ratio": 0.1}
    )
    assert [lr_scale(step, cfg, total_steps=6) for step in range(8)] == pytest.approx(expected)


def test_no_warmup_starts_at_the_peak():
    assert lr_scale(0, OptimizerConfig(schedule="cosine"), total_steps=10) == 1.0
