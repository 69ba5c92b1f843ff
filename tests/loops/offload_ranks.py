"""Reinforcement runs whose shards, moments and gradients lie on the host, in several processes that
each have an engine. Prints, by case, what differs: see `main`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.loops.conftest import built_run
from tests.tiny_runs import tiny_config, write_inputs
from torch import Tensor
from torch.distributed.tensor import DTensor

from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.loops import loop

ON_HOST = {"offload": "gradients"}

CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "zero 2": (None, {"parallel": {"zero_stage": 2}}),
    "zero 2, optimizer": ("zero 2", {"parallel": {"zero_stage": 2}, "offload": "optimizer"}),
    "zero 2, gradients": ("zero 2", {"parallel": {"zero_stage": 2}, **ON_HOST}),
    "zero 3": (None, {"parallel": {"zero_stage": 3}}),
    "zero 3, optimizer": ("zero 3", {"parallel": {"zero_stage": 3}, "offload": "optimizer"}),
    "zero 3, parameters": (
        "zero 3",
        {"parallel": {"zero_stage": 3}, "offload": "parameters"},
    ),
}
"""The run without offload whose bits a run must have, and the section `trainer`."""


def train(inputs: Path, folder: Path, trainer: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The engine's weights after two updates, and what is wrong with them."""
    cfg = tiny_config(
        inputs,
        folder,
        run={"dir": folder, "steps": 2},
        model={"path": str(inputs / "model"), "dtype": "bfloat16"},
        reward={"functions": [{"fn": "length", "args": {"target_tokens": 4}}]},
        trainer={"optimizer": {"lr": 3e-2}, "logits_chunk_tokens": 64, **trainer},
        algorithm={"correction": {"kind": "tis"}},
        eval={"max_completion_tokens": 8},
    )
    with built_run(cfg) as run:
        engine, policy = run.sampling.engine, run.trainer.policy
        assert isinstance(engine, EmbeddedEngine)
        run.sampling.weights.push(version=0)
        before = {name: tensor.clone() for name, tensor in engine.named_weights()}
        loop.train(run)
        sampled = {name: tensor.clone() for name, tensor in engine.named_weights()}
        masters = {n: whole(master) for n, master in policy.masters.items()}
        wrong = {
            "stale": [n for n, m in masters.items() if not torch.equal(sampled[n], m.bfloat16())],
            "still": [n for n in masters if torch.equal(sampled[n], before[n])],
        }
    return sampled, wrong


def whole(master: Tensor) -> Tensor:
    """Of a parameter in shards, wherever they lie."""
    return master.detach().full_tensor() if isinstance(master, DTensor) else master.detach()


def main(folder: str) -> None:
    """For each case the names of weights that engines do not sample with as their masters round,
    of those that did not move, and of those that are not as in the run without offload."""
    # Processes that part cannot meet again at the same port.
    dist.destroy_process_group = lambda *_: None
    inputs = Path(folder) / f"inputs-{processes().rank}"
    write_inputs(inputs)
    sampled: dict[str, dict[str, Tensor]] = {}
    found: dict[str, Any] = {}
    for index, (case, (plain, trainer)) in enumerate(CASES.items()):
        with redirect_stdout(sys.stderr):
            sampled[case], found[case] = train(inputs, Path(folder) / f"run-{index}", trainer)
        expected = sampled[plain or case]
        found[case]["other bits"] = [
            name for name, t in sampled[case].items() if not torch.equal(t, expected[name])
        ]
    if processes().rank == 0:
        sys.stdout.write(json.dumps(found))
