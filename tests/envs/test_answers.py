"""What an environment may answer, checked before it is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hone.rewards.play import Player
from hone.rewards.score import InvalidScoreError
from hone.types import Observation
from hone.user_code.resolve import resolve
from tests.tables import table

GIVEN: dict[str, Any] = {
    "turns": ("a",),
    "stop_reason": "eos",
    "must_end": False,
    "state": None,
    "seed": 0,
    "prompt": "1+1",
    "answer": "2",
    "task": "sums",
    "metadata": {},
}


@table(
    "content, is_text",
    [
        ("no", True),
        (None, False),
        ({"sum": 2}, False),
        ([{"type": "text", "text": "no"}], True),
        ([{"type": "text", "text": None}], False),
        ([{"type": "audio", "audio": "no"}], False),
        ([], False),
    ],
)
def test_the_content_of_a_message_is_text(content: Any, is_text: bool, tmp_path: Path) -> None:
    """A template would write Python's spelling of anything else to the policy."""
    file = tmp_path / "envs.py"
    message = {"role": "user", "content": content}
    file.write_text(f"class Says:\n    def step(self, episode):\n        return [{message!r}]\n")
    path = f"{file}:Says"
    player = Player(resolve(path, "environment"), path, {})
    if is_text:
        assert player(GIVEN) == Observation(({"role": "user", "content": "no"},))
    else:
        with pytest.raises(InvalidScoreError, match=r"a message whose content is .*must be text"):
            player(GIVEN)
