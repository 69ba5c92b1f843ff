"""What a run chooses for `trainer.recompute auto`: in its folder, when it is resumed, and among
several processes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.loops.conftest import MakeConfig, built_run
from tests.planner.test_recompute import Case, shape_of

from hone.cli.command import plan_here
from hone.config.plan import RunPlan
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.hardware import GIB, gpu_peaks
from hone.loops import choices, reinforce, supervised
from hone.loops.choices import settle
from hone.observe.resumed_run import kept_choices
from hone.observe.run_folder import read_config
from hone.planner.recompute import chosen_values, settled
from hone.trainer.out_of_memory import NOTES

KEY = "trainer.recompute"
AUTO = {"recompute": "auto", "optimizer": {"lr": 3e-3}}
FILE = "chosen.json"


def test_a_run_says_and_records_what_it_has_chosen(
    sft_config: SFTConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_config.trainer.model_copy(update={"recompute": "auto"})
    cfg = sft_config.model_copy(update={"trainer": trainer})
    with caplog.at_level(logging.INFO, "hone"):
        supervised.run(cfg)
    said = [line for line in caplog.messages if KEY in line]
    assert said == [f"{KEY} auto is off: a run on a CPU has no GPU's memory to fit"]
    assert json.loads((cfg.run.dir / FILE).read_text()) == {KEY: "off"}
    _, saved = read_config(cfg.run.dir)
    assert saved["trainer"]["recompute"] == "auto"


def test_a_resumed_run_keeps_its_choice_and_what_ran_out_of_memory_with_it(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where a new run would recompute nothing."""

    def asked(steps: int, trainer: Any = AUTO) -> RLConfig:
        checkpoint = {"every_n_steps": 1}
        return make_config(run={"steps": steps}, trainer=trainer, checkpoint=checkpoint)

    cfg = asked(1)
    folder = cfg.run.dir
    folder.mkdir()
    (folder / FILE).write_text(json.dumps({KEY: "block:1"}))  # of a run that never saved
    reinforce.run(cfg)
    assert json.loads((folder / FILE).read_text()) == {KEY: "off"}

    (folder / FILE).write_text(json.dumps({KEY: "block:1"}))
    assert plan_here(asked(2), 1).policy.trainer.recompute == "block:1", "for hone check"
    with built_run(asked(2)) as run:
        assert run.launch.plan.policy.trainer.recompute == "block:1"
        layers: Any = run.trainer.model.module.base_model.layers
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    reinforce.run(asked(2))
    assert json.loads((folder / FILE).read_text()) == {KEY: "block:1"}

    (folder / NOTES).write_text(
        json.dumps({"policy/recompute": {"configured": "block:1", "now": "full"}})
    )
    caplog.clear()
    with built_run(asked(3)) as run:
        assert run.trainer.repair.cfg.recompute == "full"
    assert "recompute of the policy is full in place of block:1" in caplog.text

    reinforce.run(asked(3, AUTO | {"recompute": "selective"}))
    assert not (folder / FILE).exists(), "what is named is not chosen"


def test_a_damaged_record_is_refused_before_the_run(make_config: MakeConfig) -> None:
    cfg = make_config(trainer=AUTO)
    (cfg.run.dir / "checkpoints" / "step_1").mkdir(parents=True)
    for damaged in ("{", "[]", '{"trainer.recompute": 3}'):
        (cfg.run.dir / FILE).write_text(damaged)
        with pytest.raises(UserError, match=r"is damaged\. Remove it to choose again"):
            kept_choices(cfg)
        with pytest.raises(UserError, match=FILE):
            plan_here(cfg, 1)


@dataclass
class Together:
    """Two processes, as threads that wait for each other in every collective."""

    barrier: Barrier = field(default_factory=lambda: Barrier(2, timeout=600))
    values: list[Any] = field(default_factory=lambda: [None, None])

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        everyone = [*self.values]
        self.barrier.wait()
        return everyone

    def mesh(self, rank: int) -> Mesh:
        """That of one of them; the device's number is its rank."""
        mesh: Any = SimpleNamespace(device=torch.device("cuda", rank), is_first=rank == 0)
        mesh.gather = lambda value: self.gather(rank, value)
        mesh.broadcast = lambda value: self.gather(rank, value)[0]
        mesh.agree = lambda what, value: agreed(what, self.gather(rank, value))
        return mesh

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            return [*threads.map(work, range(2))]


def agreed(what: str, values: list[Any]) -> None:
    assert values[0] == values[1], what


def two_plans(
    monkeypatch: pytest.MonkeyPatch, gib: tuple[int, int], kept: tuple[dict[str, str], ...]
) -> tuple[RunPlan, RunPlan, list[RunPlan]]:
    """Plans by the memory of each of two GPUs, and those that both processes agree on."""
    case = Case(command="sft", shape=shape_of("qwen3-8b"), world=2)
    monkeypatch.setattr(
        choices, "_gpu_of", lambda device: Case(gib=gib[device.index]).plan("off").devices.gpu
    )
    plan = Case(command="sft", shape=case.shape, world=2, gib=None).plan("auto")
    together = Together()
    got = together.run(lambda rank: settle(plan, together.mesh(rank), kept[rank]))
    of = [settled(Case(command="sft", shape=case.shape, world=2, gib=n).plan("auto")) for n in gib]
    return of[0], of[1], got


def test_processes_agree_on_what_fits_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib, smallest in (((160, 120), 1), ((120, 160), 0)):
        *of_each, got = two_plans(monkeypatch, gib, ({}, {}))
        assert chosen_values(of_each[0]) != chosen_values(of_each[1])
        for plan in got:
            assert chosen_values(plan) == chosen_values(of_each[smallest])
            assert plan.devices.gpu is None, "the plan's own"


def test_processes_keep_what_the_first_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, got = two_plans(monkeypatch, (160, 160), ({KEY: "block:2"}, {}))
    assert [chosen_values(plan) for plan in got] == [{KEY: "block:2"}] * 2


def test_a_model_of_unknown_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Case(command="sft", gib=None).plan("auto")
    monkeypatch.setattr(choices, "_gpu_of", lambda device: gpu_peaks("NVIDIA H200"))
    settle(plan, Mesh.alone("cuda"), {})
    with pytest.raises(UserError, match=r"sizes of model\.path 'public/model' are not known"):
        settle(replace(plan, model=None), Mesh.alone("cuda"), {})


def test_the_memory_of_a_gpu_is_that_of_the_table_or_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, total, gib in (
        ("NVIDIA H200", 139.8, 140),
        ("NVIDIA H100 80GB HBM3", 79.6, 79),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.75, 10),
        ("Unknown X1", 47.6, 48),
    ):
        properties = SimpleNamespace(name=name, total_memory=int(total * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        found = choices._gpu_of(torch.device("cuda", 0))  # pyright: ignore[reportPrivateUsage]
        assert found is not None
        assert found.memory_gib == gib
        assert math.isnan(found.flops_per_s) == name.startswith("Unknown")
    assert choices._gpu_of(torch.device("cpu")) is None  # pyright: ignore[reportPrivateUsage]
