"""What the tests of this folder share: samples, configurations, a look at the process table."""

import os
import time
import uuid
from pathlib import Path

import psutil

from hone.rewards import pool
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig, RewardFunctionConfig
from hone.types import Prompt, Sample, StopReason

MISBEHAVING = str(Path(__file__).with_name("misbehaving.py"))
LIMIT_S = 1.0
PATIENCE_S = 60.0
"""For what should have happened long before; a test that passes does not use it up."""


def make_sample(text="", *, answer=None, num_tokens=3, stop="eos", index=0, **metadata):
    prompt = Prompt(
        id=f"p:{index}", token_ids=(1, 2), text="Q: ?", answer=answer, task="t", metadata=metadata
    )
    return Sample(
        id=f"p:{index}/{index}",
        prompt=prompt,
        index=index,
        token_ids=list(range(num_tokens)),
        logprobs=[-1.0] * num_tokens,
        weight_versions=[0] * num_tokens,
        loss_mask=[True] * num_tokens,
        stop_reason=StopReason(stop),
        text=text,
    )


def config(*functions, **settings):
    """A configuration from names, or (name, weight, args)."""
    entries = [entry if isinstance(entry, tuple) else (entry, 1.0, {}) for entry in functions]
    return RewardConfig(
        functions=tuple(RewardFunctionConfig(fn=f, weight=w, args=a) for f, w, a in entries),
        **{"timeout_s": LIMIT_S, "memory_limit_gib": 1.0, "num_workers": 2} | settings,
    )


def misbehaving_scorer(function="score", **settings):
    settings = {"memory_limit_gib": 0.25} | settings
    return Scorer(config(f"{MISBEHAVING}:{function}", **settings), max_completion_tokens=64)


class Processes:
    """All processes that carry a mark in their environment, wherever in the tree they are."""

    def __init__(self, monkeypatch):
        self.mark = uuid.uuid4().hex
        self.patience_s = PATIENCE_S
        monkeypatch.setenv("HONE_TEST_MARK", self.mark)

    def commands(self):
        """Process id and command of each that runs now."""
        found = {}
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("HONE_TEST_MARK") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:
                continue
        found.pop(os.getpid(), None)
        return found

    def wait_until(self, condition):
        """Wait until `condition` is true of what runs, and return that; on a busy machine it takes
        a while to start or end a process. What runs at the deadline is returned in any case."""
        end = time.monotonic() + self.patience_s
        while not condition(found := self.commands()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def kill(self):
        for pid in self.commands():
            os.kill(pid, 9)


def plant(monkeypatch, mutant):
    """Make scorers from here on run the mutant fork server."""
    monkeypatch.setattr(pool, "FORK_SERVER", "tests.rewards.mutant_fork_server")
    monkeypatch.setenv("MUTANT", mutant)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'src'}")
