"""The game of the recipe `guessing-rl` as a program that plays by itself, and what changes in the
recipe for it.

    python -S benchmarks/agent_harness.py        # as hone starts it, once for each episode

The game is that of `hone.recipes.guessing`, with the same tokens: the policy is asked for the text
that follows the game so far. It imports little, since a run plays thousands of games.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import sys
from pathlib import Path

NUMBERS = "1234567"


def harness(task: str, folder: Path) -> list[str]:
    """The flags of `hone rl` that differ from the recipe of `task`, which is `guessing`."""
    del folder
    if task != "guessing":
        raise ValueError(f"there is a program for guessing, and none for {task}")
    command = shlex.join([sys.executable, "-S", str(Path(__file__).resolve())])
    return ["--env.path=null", "--env.args={}", f"--env.harness.command={command}"]


def play(task: dict[str, object]) -> float:
    """Play a game, which begins with the prompt."""
    host, _, path = os.environ["OPENAI_BASE_URL"].partition("//")[2].partition("/")
    policy = http.client.HTTPConnection(host)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    number = NUMBERS[int(str(task["seed"])) % len(NUMBERS)]
    said = str(task["unrendered"])
    for _ in range(int(str(task["max_turns"]))):
        body = json.dumps({"model": os.environ["HONE_MODEL"], "prompt": said})
        policy.request("POST", f"/{path}/completions", body, headers)
        with policy.getresponse() as answer:
            found = json.load(answer)
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {found}")
        turn: str = found["choices"][0]["text"]
        guess = turn[-1:]
        if guess == number:
            return 1.0
        if guess not in [*NUMBERS]:
            break
        said += turn + (">" if number > guess else "<")
    return 0.0


if __name__ == "__main__":
    print(play(json.load(sys.stdin)))
