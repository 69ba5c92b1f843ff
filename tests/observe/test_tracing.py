"""Traces: which steps, which files, what is in them, and that a full disk ends them alone."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.observe import tracing
from hone.observe.settings import MemoryProfileConfig, ProfileConfig, RolloutProfileConfig
from hone.observe.tracing import EngineTracer, MemoryRecorder, Tracing

CPU = torch.device("cpu")
PLACE = "rank3_dp1_tp1_pp0"


def steps_of(folder: Path, cfg: ProfileConfig, num_steps: int, *, steps_done: int = 0) -> None:
    """The spans of some steps, with work in each."""
    traced = Tracing(cfg, folder, place=PLACE, device=CPU, steps_done=steps_done)
    for _ in range(num_steps):
        for path in ("generate", "experience", "experience/inner", "train"):
            traced.begin(path)
            torch.ones(2) @ torch.ones(2)
            if path != "experience":
                traced.end(path)
            if path == "experience/inner":
                traced.end("experience")
        traced.write()
    traced.close()


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        return json.load(file)


def ranges(trace: dict[str, Any]) -> list[str]:
    found = [event for event in trace["traceEvents"] if event["name"].startswith("hone/")]
    return [event["name"][5:] for event in sorted(found, key=lambda event: event["ts"])]


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("train_overall", ["experience", "experience/inner", "train"]),
        ("train_actor", ["train"]),
        ("train_log_probs", ["experience", "experience/inner"]),
    ],
)
def test_training_is_traced_in_steps_of_this_launch(
    tmp_path: Path, target: str, inside: list[str]
) -> None:
    cfg = ProfileConfig.model_validate({"train": {"steps": [1, 3], "target": target}})
    steps_of(tmp_path, cfg, 4, steps_done=10)
    files = sorted((tmp_path / "train_trace").iterdir())
    pattern = rf"{target}_{PLACE}\.\d+\.pt\.trace\.json\.gz"
    assert all(re.fullmatch(pattern, file.name) for file in files)
    traces = [read(file) for file in files]
    assert [trace["hone"] for trace in traces] == [
        {"step": step, "process": PLACE} for step in (12, 14)
    ]
    assert [ranges(trace) for trace in traces] == [inside] * 2


def test_nothing_is_traced_unless_asked_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracing, "profile", None)
    monkeypatch.setattr(tracing, "record_function", None)
    steps_of(tmp_path, ProfileConfig(), 2)
    assert not any(tmp_path.iterdir())


def forwards(tracer: EngineTracer, rollout: int, kinds: str, *, is_last: bool = True) -> None:
    """Passes, `p` of prompts and `d` of decoding."""
    for number, kind in enumerate(kinds):
        tracer.begin(rollout, is_prefill=kind == "p")
        torch.ones(2) @ torch.ones(2)
        tracer.end(is_idle=is_last and number == len(kinds) - 1)


def engine_traces(folder: Path) -> dict[str, list[str]]:
    files = sorted((folder / "rollout_trace").rglob("*.gz"))
    return {
        re.sub(r"-\d{9,}-", "-T-", f"{file.relative_to(folder / 'rollout_trace')}"): ranges(
            read(file)
        )
        for file in files
    }


def test_an_engine_is_traced_by_rollout_for_some_passes(tmp_path: Path) -> None:
    cfg = RolloutProfileConfig(steps=(2, 5))
    tracer = EngineTracer(cfg, tmp_path, name="engine 1", tp_rank=1)
    for rollout in (1, 2, 3, 5):
        forwards(tracer, rollout, "pddddd")
    name = "engine1-T-TP-1.trace.json.gz"
    expected = ["prefill", "decode", "decode"]
    assert engine_traces(tmp_path) == {f"rollout_{n}/{name}": expected for n in (2, 5)}


def test_all_passes_end_with_the_rollout(tmp_path: Path) -> None:
    """Nothing of this process may keep the profile that training wants next."""
    cfg = RolloutProfileConfig(steps=(0,), num_forwards=-1)
    tracer = EngineTracer(cfg, tmp_path, name="engine 0", tp_rank=0)
    forwards(tracer, 0, "pddpd")
    assert not tracing._profiling.locked()
    (found,) = engine_traces(tmp_path).values()
    assert found == ["prefill", "decode", "decode", "prefill", "decode"]


def test_stages_have_files_of_their_own(tmp_path: Path) -> None:
    cfg = RolloutProfileConfig(steps=(0,), num_forwards=2, by_stage=True)
    tracer = EngineTracer(cfg, tmp_path, name="engine 0", tp_rank=0)
    forwards(tracer, 0, "ppppdddd")
    assert engine_traces(tmp_path) == {
        f"rollout_0/engine0-T-TP-0-{stage}.trace.json.gz": [stage] * 2
        for stage in ("prefill", "decode")
    }


def test_a_process_has_one_profile_at_a_time(tmp_path: Path) -> None:
    cfg = ProfileConfig.model_validate({"train": {"steps": [0]}})
    tracer = EngineTracer(RolloutProfileConfig(steps=(0,)), tmp_path, name="engine 0", tp_rank=0)
    training = Tracing(cfg, tmp_path, place=PLACE, device=CPU, steps_done=0)
    training.begin("experience")
    forwards(tracer, 0, "pd", is_last=False)
    training.end("experience")
    training.begin("train")
    training.end("train")
    training.write()
    forwards(tracer, 0, "dddd")
    assert list(engine_traces(tmp_path).values()) == [["decode"] * 3]
    (file,) = (tmp_path / "train_trace").iterdir()
    assert ranges(read(file)) == ["experience", "train"]


def test_a_full_disk_ends_tracing_alone(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "rollout_trace").write_text("in the way of the folder")
    cfg = RolloutProfileConfig(steps=(0, 1))
    tracer = EngineTracer(cfg, tmp_path, name="engine 0", tp_rank=0)
    for rollout in (0, 1):
        forwards(tracer, rollout, "pdd")
    (said,) = [record.message for record in caplog.records]
    assert "could not be written" in said
    assert "the run goes on" in said


def test_what_a_launch_may_write_is_bounded(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(tracing, "_MAX_BYTES", 10)
    steps_of(tmp_path, ProfileConfig.model_validate({"train": {"steps": [0, 1]}}), 2)
    assert len(list((tmp_path / "train_trace").iterdir())) == 1
    assert "GiB of traces: nothing more is traced" in caplog.text


class _Cuda:
    """In the place of torch's recorder, which needs a GPU."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.written: list[str] = []

    def _record_memory_history(self, enabled: Any = "all", **_: Any) -> None:
        self.recorded.append(enabled)

    def _dump_snapshot(self, path: str) -> None:
        self.written.append(Path(path).name)


@pytest.mark.parametrize("after_steps", [None, 3])
def test_allocations_are_written_when_memory_runs_out_and_after_steps(
    tmp_path: Path, monkeypatch: Any, after_steps: int | None
) -> None:
    cuda, observers = _Cuda(), list[Any]()
    monkeypatch.setattr(torch.cuda, "memory", cuda)
    name = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, name, observers.append, raising=False)
    cfg = MemoryProfileConfig(recorder="torch", after_steps=after_steps)
    recorder = MemoryRecorder(cfg, tmp_path / "memory_snapshot", PLACE, CPU)
    observers[0](0, 1, 2, 3)
    assert len(cuda.written) == 1
    for number in range(1, 6):
        recorder.after(number)
    observers[0](0, 1, 2, 3)
    assert len(cuda.written) == 2
    assert cuda.recorded == (["all"] if after_steps is None else ["all", None])
    pattern = rf"memory_snapshot_time\d+_{PLACE}_snapshot\.pickle"
    assert all(re.fullmatch(pattern, name) for name in cuda.written)
