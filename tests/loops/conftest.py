"""Tiny runs in the test's folder."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.tiny_runs import tiny_config, write_inputs

from hone.config.tree import RLConfig, SFTConfig
from hone.data.arithmetic import generate, write_jsonl
from hone.loops.launch import launch
from hone.loops.parts import RLParts, assemble
from hone.loops.workers import thread_pools

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
            "log": {"tensorboard": False, "report": False},
        }
    )


@contextmanager
def assembled(cfg: RLConfig) -> Generator[RLParts]:
    """The parts of a run that has been launched."""
    with (
        launch(cfg.run, cfg.checkpoint, cfg.trainer.parallel, cfg) as begin,
        assemble(cfg, begin, thread_pools) as parts,
    ):
        yield parts


def has_a_row(file: Path) -> bool:
    """Whether `metrics.jsonl` has a whole line: the last may be half written."""
    return file.exists() and "\n" in file.read_text()
