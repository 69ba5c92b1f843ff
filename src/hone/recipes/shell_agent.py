"""The agent of the recipe `shell-rl`: a program that plays an episode. It gives the policy a task,
runs the commands that it writes in a sandboxed shell, and prints the score of what they have made.

Copy the file, change it, and write `env.harness.command: python my_agent.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.request
from typing import Any

from hone.rewards.shell import Ran, Shell

DONE = "done"
LIMITS = ("max_turns", "context_length_exceeded")
MAX_SHOWN_CHARS = 40


def ask(messages: list[dict[str, str]]) -> str | None:
    """The next turn of the policy; None where the episode has no turn or no token left."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["HONE_MODEL"], "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        if json.load(error)["error"]["code"] not in LIMITS:
            raise
        return None


def shown(ran: Ran) -> str:
    """What the policy is shown of a command, in characters that its tokenizer has."""
    if ran.exit_code is None:
        return "too long"
    output = re.sub(r"[^\n -~]", "?", ran.output.strip())[:MAX_SHOWN_CHARS]
    return output or ("ok" if ran.exit_code == 0 else f"exit {ran.exit_code}")


def play(task: dict[str, Any]) -> float:
    """Play an episode, and run its test on the files that are left."""
    messages = [*task["messages"]]
    with Shell(timeout_s=5.0) as shell:
        while (said := ask(messages)) is not None and said != DONE:
            answer = {"role": "user", "content": shown(shell.run(said))}
            messages += [{"role": "assistant", "content": said}, answer]
        return float(shell.run(task["columns"]["test"]).output.strip() == task["answer"])


if __name__ == "__main__":
    sys.stdout.write(f"{play(json.load(sys.stdin))}\n")
