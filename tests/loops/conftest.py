"""Tiny runs in the test's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.loops.forked_hone import Copy
from tests.tiny_runs import tiny_config, write_inputs

from hone.config.load import dump_config
from hone.config.tree import RLConfig, SFTConfig
from hone.data.arithmetic import generate, write_jsonl
from hone.loops.launch import launch
from hone.loops.reinforce import RLRun, build_run
from hone.loops.workers import thread_pools
from hone.tools.report.pages import PAGES

MakeConfig = Callable[..., RLConfig]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `write_inputs` writes."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def make_config(inputs: Path, tmp_path: Path) -> MakeConfig:
    """Builds the configuration of a run in `tmp_path`; keyword arguments override sections."""

    return partial(tiny_config, inputs, tmp_path / "run")


@pytest.fixture
def sft_config(inputs: Path, tmp_path: Path) -> SFTConfig:
    demonstrations = tmp_path / "demonstrations.jsonl"
    problems = generate(40, seed=0, low=0, high=9)
    write_jsonl(demonstrations, [row | {"completion": row["answer"]} for row in problems])
    return SFTConfig.model_validate(
        {
            "run": {"dir": tmp_path / "one", "steps": 3, "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "train": [{"path": str(demonstrations)}],
                "eval_fraction": 0.25,
                "chat": "never",
                "max_tokens": 16,
                "examples_per_step": 5,
            },
            "trainer": {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64},
            "eval": {"every_n_steps": 1},
            "log": {"to": []},
        }
    )


@contextmanager
def built_run(cfg: RLConfig) -> Generator[RLRun]:
    """A run that has been launched and built."""
    with launch(cfg, PAGES) as start, build_run(cfg, start, thread_pools) as run:
        yield run


def start_hone(cfg: RLConfig, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`hone rl` in a session of its own."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(cfg))
    return subprocess.Popen(
        [sys.executable, "-m", "hone", "rl", str(recipe), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_row(process: subprocess.Popen[bytes] | Copy, cfg: RLConfig, number: int = 1) -> None:
    """Until so many rows are whole: the last may be half written."""
    file, deadline = cfg.run.dir / "metrics.jsonl", time.monotonic() + 600
    while not file.exists() or file.read_text().count("\n") < number:
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline, "no step in time"
        time.sleep(0.005)
