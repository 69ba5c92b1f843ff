"""The programs of docs/environments.md."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hone.types import Request, Sample
from tests.door.served import tokenizer_of
from tests.door.test_clients import needs_pythons, with_package
from tests.harness.played import group_of, played

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def block(start: str) -> str:
    """The example that starts with a line."""
    (found,) = [text for text in BLOCKS if text.startswith(start)]
    return found


def second_thoughts(request: Request) -> str:
    """A policy that corrects itself, unless its seed is odd."""
    asked = str(tokenizer_of().decode([*request.prompt_ids]))
    return " world " if "Check it" in asked and request.sampling.seed % 2 == 0 else "no idea"


def play(folder: Path, name: str, python: str) -> list[Sample]:
    """Eight episodes by a program of the page."""
    (folder / name).write_text(block(f"# {name}\n"))
    command = {"command": f"{shlex.quote(python)} {shlex.quote(str(folder / name))}"}
    with played(folder, "", second_thoughts, harness=command) as game:
        return game.play(group_of(game.episodes, indices=range(8)))


def require_scored(samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.failure is None, sample.failure_detail
        assert len(sample.turns) == 2
        assert sample.turns[1].text.strip() in ("world", "no idea")
        assert sample.reward is not None
        assert sample.reward.parts["env"] == float(sample.turns[1].text == " world ")
    assert len({sample.turns[1].text for sample in samples}) == 2


def test_the_program_plays_by_urllib(tmp_path: Path) -> None:
    require_scored(play(tmp_path, "agent.py", sys.executable))


@pytest.mark.slow
@needs_pythons
def test_the_program_plays_by_openais_client(tmp_path: Path) -> None:
    for python in with_package("openai"):
        samples = play(tmp_path, "agent_openai.py", python)
        require_scored(samples)
        for sample in samples:
            assert sample.reward is not None
            assert sample.reward.parts["env/chars"] == len(sample.turns[1].text)


def test_the_shell_of_the_page_runs_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("from hone.rewards.shell")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["42", "0"]
