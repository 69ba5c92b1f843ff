"""Which steps are saved: on schedule, the last, and each evaluation better than all before."""

from __future__ import annotations

from typing import cast

import pytest

from hone.checkpoint.store import CheckpointStore
from hone.config.run import CheckpointConfig
from hone.loops.saving import Saver


class Store:
    """Notes what is saved; `best` is the best evaluation of earlier launches."""

    def __init__(self, best: float = float("-inf")) -> None:
        self.best, self.saved = best, dict[int, float | None]()

    def best_metric(self) -> float:
        return self.best

    def save(self, step: int, state: object, *, metric: float | None) -> None:
        self.saved[step] = metric

    save_in_background = save

    def is_written(self) -> bool:
        return False

    def wait(self) -> None:
        """As if it were being written until it is waited for."""


RANKS = [0.3, None, 0.5, 0.4, 0.5, 0.6, None, 0.1]
CASES: list[tuple[dict[str, bool | int], float, list[int]]] = [
    # settings, best of earlier launches, saved steps of 8
    ({"every_n_steps": 0, "keep_best": True}, float("-inf"), [1, 3, 6, 8]),
    ({"every_n_steps": 0, "keep_best": True}, 0.4, [3, 6, 8]),
    ({"every_n_steps": 0, "keep_best": True}, 0.6, [8]),
    ({"every_n_steps": 3, "keep_best": True}, 0.4, [3, 6, 8]),
    ({"every_n_steps": 3, "keep_best": False}, 0.0, [3, 6, 8]),
    ({"every_n_steps": 0, "keep_best": False}, 0.0, [8]),
]


@pytest.mark.parametrize(("settings", "best", "expected"), CASES)
def test_saved_steps(settings: dict[str, bool | int], best: float, expected: list[int]) -> None:
    store = Store(best)
    cfg = CheckpointConfig.model_validate(settings)
    published: list[tuple[int, float | None]] = []
    saver = Saver(
        cast(CheckpointStore, store),
        cfg,
        dict,
        published=lambda step, rank: published.append((step, rank)),
    )
    for step, rank in enumerate(RANKS[:-1], 1):
        saver.after(step, rank)
    saver.last(8, RANKS[-1])
    assert list(store.saved) == expected
    assert published == [(step, RANKS[step - 1]) for step in expected]
    assert store.saved == dict(published)
