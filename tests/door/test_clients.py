"""Published clients drive sessions: what they got is what the engine sampled and what is handed
over, in every id and log-probability.

`HONE_CLIENT_PYTHONS` names Pythons, separated by colons, in whose environments `openai` (2 and 3)
and `anthropic` (1 and 2) are installed; the packages pin others than hone needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.door.served import Served, SessionClient, serving

pytestmark = pytest.mark.slow

CALLS = 'I add. <call>add {"a": 1}</call>'
PYTHONS = list(filter(None, os.environ.get("HONE_CLIENT_PYTHONS", "").split(":")))
needs_pythons = pytest.mark.skipif(not PYTHONS, reason="HONE_CLIENT_PYTHONS names no Python")


def with_package(package: str) -> list[str]:
    """The Pythons that have a package."""
    found = [
        python
        for python in PYTHONS
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0
    ]
    assert found, f"none of {PYTHONS} has {package}"
    return found


def run(python: str, program: str, client: SessionClient, *, root: str) -> Any:
    base_url = f"{client.served.url}/sessions/{client.session}{root}"
    done = subprocess.run(
        [python, str(Path(__file__).with_name(program)), base_url, client.key],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def paths_of(served: Served, client: SessionClient) -> Any:
    ended = client.end()
    assert not served.errors
    return ended


@needs_pythons
def test_openai_drives_a_session() -> None:
    for python in with_package("openai"):
        with serving(lambda _: CALLS) as served:
            client = served.open()
            seen = run(python, "client_openai.py", client, root="/v1")
            ended = paths_of(served, client)
            requests = served.engine.submitted
        path = ended["paths"][0]
        ids = [*path["prompt_token_ids"], *path["token_ids"]]
        for got, turn, request in zip(seen["turns"], path["turns"], requests, strict=False):
            start = len(path["prompt_token_ids"])
            assert got["prompt_ids"] == ids[: start + turn["start"]] == list(request.prompt_ids)
            assert got["ids"] == path["token_ids"][turn["start"] : turn["end"]]
            assert got["logprobs"] == path["logprobs"][turn["start"] : turn["end"]]
        assert (seen["calls"], seen["problem"], ended["bridged"]) == (1, "n", 1)
        assert seen["response"] == seen["streamed_response"] == CALLS
        assert seen["events"][-1] == "response.completed"


@needs_pythons
def test_anthropic_drives_a_session() -> None:
    for python in with_package("anthropic"):
        with serving(lambda _: CALLS) as served:
            client = served.open(history="linear")
            seen = run(python, "client_anthropic.py", client, root="")
            ended = paths_of(served, client)
        [path] = ended["paths"]
        assert seen["first"][1]["input"] == {"a": 1}
        assert [block["type"] for block in seen["second"]] == ["text", "tool_use"]
        assert seen["stop_reason"] == "tool_use"
        assert [turn["end"] - turn["start"] for turn in path["turns"]] == seen["num_sampled"]
        assert "messages" in seen["problem"]
        assert ended["bridged"] == 1
