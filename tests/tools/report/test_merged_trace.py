"""A step of several processes as one trace, and what in it takes longest."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hone.cli.main import main
from hone.config.load import dump_config
from hone.errors import UserError
from hone.tools.report.merged_trace import read_step
from tests.tiny_runs import tiny_config, write_inputs
from tests.tools.report.perfetto import HAS_PERFETTO, needs_perfetto, what_is_shown
from tests.tools.report.trace_rules import broken_rules


def span(name: str, begin: float, end: float, cat: str = "kernel", **more: Any) -> dict[str, Any]:
    own = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin}
    return own | {"pid": 0, "tid": 7} | more


def phase(name: str, begin: float, end: float) -> dict[str, Any]:
    return span(f"hone/{name}", begin, end, "user_annotation", pid=99, tid=1)


def write(path: Path, step: int, process: str, events: list[Any], *, base_us: int = 0) -> None:
    labels = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0}
    trace = {
        "hone": {"step": step, "process": process},
        "baseTimeNanoseconds": base_us * 1000,
        "traceEvents": [labels | {"args": {"labels": "GPU 0"}}, *events],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two trainers and an engine, whose clocks have different bases."""
    trainer = [
        phase("experience", 0, 100),
        phase("train", 100, 1100),
        phase("update policy", 110, 1000),
        span("gemm", 120, 520),
        span("gemm", 520, 620),
        span("copy", 500, 700, tid=8),  # beside, on another stream
        span("adam", 900, 1000),
        *(
            {"ph": ph, "id": 4, "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": 120}
            for ph in "sf"
        ),
    ]
    folder = tmp_path / "run" / "traces"
    for rank in (0, 1):
        path = folder / "train_trace" / f"train_overall_rank{rank}.1.pt.trace.json.gz"
        write(path, 3, f"rank{rank}", trainer, base_us=5000)
    path = folder / "rollout_trace" / "rollout_2" / "engine0-1-TP-0.trace.json.gz"
    decode = [phase("decode", 0, 50), span("void at::attention<(int)4>(float*)", 10, 40)]
    write(path, 3, "engine0 TP-0", decode, base_us=3000)
    path = folder / "rollout_trace" / "rollout_0" / "engine0-1-TP-0.trace.json.gz"
    write(path, 1, "engine0 TP-0", [phase("decode", 0, 50), span("attention", 10, 40)])
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    return folder


def test_processes_of_a_step_lie_side_by_side(traces: Path, tmp_path: Path) -> None:
    found = read_step(traces)
    assert (found.step, len(found.files)) == (3, 3)
    names = {
        event["pid"]: event["args"]["name"]
        for event in found.events
        if event["name"] == "process_name"
    }
    assert sorted(names.values()) == sorted(
        f"{process}: {track}"
        for process in ("engine0 TP-0", "trainer rank0", "trainer rank1")
        for track in ("GPU 0", "99")
    )
    begins = {
        names[event["pid"]]: event["ts"] for event in found.events if "attention" in event["name"]
    }
    assert begins == {"engine0 TP-0: GPU 0": 10.0}  # microseconds from the first event
    assert sorted(event["ts"] for event in found.events if event["name"] == "adam") == [2900.0] * 2
    arrows = {event["id"] for event in found.events if "id" in event}
    assert len(arrows) == 2  # not from one process to the other
    found.write(tmp_path / "all.json.gz")
    with gzip.open(tmp_path / "all.json.gz") as file:
        assert len(json.load(file)["traceEvents"]) == len(found.events)


def test_a_viewer_drops_nothing_and_finds_a_name_for_each_track(tmp_path: Path) -> None:
    """Slices that touch, at the times that torch writes since 1970; ten engines."""
    base_us = 1_795_652_098_121_000
    start = 7_800_000_000.0
    nested = [
        span("outer", start + 0.3, start + 0.7),
        span("first", start + 0.3, start + 0.5),
        span("second", start + 0.5, start + 0.7),
        span("next", start + 0.7, start + 0.9),
        phase("decode", start, start + 1),
        span("aten::mm", start + 0.1, start + 0.2, "cpu_op", pid=99, tid=0),
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": start},
        *(
            {"ph": "M", "name": "thread_name", "pid": 99, "tid": 0, "ts": 0, "args": {"name": name}}
            for name in ("thread 0 (gloo)", "thread 0 (p)")
        ),
    ]
    for number in range(12):
        path = tmp_path / "rollout_trace" / f"engine{number}.trace.json.gz"
        write(path, 1, f"engine{number} TP-0", nested, base_us=base_us + number)
    events = read_step(tmp_path).events
    tracks: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
    for spans in tracks.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin + 1e-4:
                around.pop()
            assert not around or end <= around[-1] + 1e-4, (spans, "overlap")
            around.append(end)
    told = {
        kind: {
            (event["pid"], event.get("tid")): next(iter(event["args"].values()))
            for event in events
            if event["name"] == kind
        }
        for kind in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
    }
    assert {pid for pid, _ in tracks} == {pid for pid, _ in told["process_name"]}  # none is empty
    order = sorted(told["process_name"], key=lambda track: told["process_sort_index"][track])
    names = [told["process_name"][track].split(":")[0] for track in order]
    assert list(dict.fromkeys(names)) == [f"engine{number} TP-0" for number in range(12)]
    assert set(told["thread_name"].values()) == {"thread 0 (gloo)"}
    phases = {(e["pid"], e["tid"]) for e in events if e["name"] == "hone/decode"}
    assert {told["thread_sort_index"][track] for track in phases} <= {0, 1}
    for pid, tid in phases:
        assert told["thread_sort_index"][pid, tid] < told["thread_sort_index"][pid, 0]


def test_what_is_around_comes_before_what_is_inside(tmp_path: Path) -> None:
    """Of slices that begin together a viewer takes the first for the outer one."""
    inner, outer = span("inner", 5, 7), span("outer", 5, 9)
    for rank in (0, 1):
        path = tmp_path / "train_trace" / f"{rank}.trace.json.gz"
        write(path, 1, f"rank{rank}", [span("late", 20, 21), inner, outer], base_us=rank)
    events = read_step(tmp_path).events
    assert broken_rules(events) == []
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names == ["outer", "inner"] * 2 + ["late"] * 2


def with_an_arrow(number: int) -> list[dict[str, Any]]:
    """A trainer's launch and kernel, and an arrow between them."""
    arrow = {"name": "ac2g", "cat": "ac2g", "id": number}
    return [
        phase("train", 0, 100),
        span("cudaLaunchKernel", 10, 12, "cuda_runtime", pid=99, tid=1),
        span("gemm", 20, 60),
        arrow | {"ph": "s", "pid": 99, "tid": 1, "ts": 10},
        arrow | {"ph": "f", "pid": 0, "tid": 7, "ts": 20, "bp": "e"},
    ]


@needs_perfetto
def test_perfetto_shows_each_slice_and_arrow(tmp_path: Path) -> None:
    for rank in (0, 1):  # each numbers its arrows from the same on
        path = tmp_path / "train_trace" / f"{rank}.trace.json.gz"
        write(path, 1, f"rank{rank}", with_an_arrow(4), base_us=rank)
    read_step(tmp_path).write(tmp_path / "all.json.gz")
    shown = what_is_shown(tmp_path / "all.json.gz")
    assert shown["complaints"] == shown["misplaced"] == []
    assert shown["flows"] == [{"number": 2}]
    slices = {track["process"]: track["slices"] for track in shown["tracks"]}
    assert slices == {
        f"trainer rank{rank}: {track}": number
        for rank in (0, 1)
        for track, number in (("99", 2), ("GPU 0", 1))
    }


@needs_perfetto
def test_kernels_that_begin_before_the_one_ahead_has_ended_are_all_shown(tmp_path: Path) -> None:
    """As programmatic launches do, three at once; with a range around them and their arrows."""
    kernels = [("norm", 20, 30), ("product", 28, 50), ("rotate", 29, 52), ("decode", 50, 90)]
    events = [phase("decode", 0, 100), span("hone/decode", 20, 90, "gpu_user_annotation")]
    for number, (name, begin, end) in enumerate(kernels):
        arrow = {"name": "ac2g", "cat": "ac2g", "id": number}
        events += [
            span(name, begin, end),
            span("cuLaunchKernelEx", number, number + 1, "cuda_driver", pid=99, tid=1),
            arrow | {"ph": "s", "pid": 99, "tid": 1, "ts": number},
            arrow | {"ph": "f", "pid": 0, "tid": 7, "ts": begin, "bp": "e"},
        ]
    lonely = {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 9, "pid": 0, "tid": 7, "ts": 50}
    recording = span("Activity Buffer Request", 5, 6, "overhead", pid=-1, tid=0)
    path = tmp_path / "rollout_trace" / "0.trace.json.gz"
    write(path, 1, "engine0", [*events, lonely, recording])
    found = read_step(tmp_path)
    assert broken_rules(found.events) == []
    found.write(tmp_path / "all.json.gz")
    shown = what_is_shown(tmp_path / "all.json.gz")
    assert shown["complaints"] == shown["misplaced"] == []
    assert shown["flows"] == [{"number": 4}]
    tracks = [(track["thread"] or "", track["slices"]) for track in shown["tracks"]]
    assert sum(number for _, number in tracks) == 1 + 1 + 4 + 4
    assert [n for name, n in tracks if name == "stream 7, overlapping"] == [1, 1]
    (gaps,) = found.gaps.values()
    assert sum(gap.total_us for gap in gaps) == pytest.approx(30)


@pytest.mark.slow
def test_a_step_of_two_trainers_and_two_engines_breaks_no_rule_of_the_format(
    tmp_path: Path,
) -> None:
    write_inputs(tmp_path)
    cfg = tiny_config(
        tmp_path,
        tmp_path / "run",
        run={"steps": 2},
        data={"max_prompt_tokens": 16},
        rollout={"max_completion_tokens": 12},
        profile={"train": {"steps": [1]}, "rollout": {"steps": [1]}},
    )
    (tmp_path / "recipe.yaml").write_text(dump_config(cfg))
    command = [sys.executable, "-m", "hone", "rl", str(tmp_path / "recipe.yaml"), "--nproc", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    found = read_step(tmp_path / "run" / "traces")
    assert broken_rules(found.events) == []
    processes = {
        event["args"]["name"].partition(":")[0]
        for event in found.events
        if event["name"] == "process_name"
    }
    trainers = {f"trainer rank{rank}_dp{rank}_tp0_pp0" for rank in (0, 1)}
    assert processes == trainers | {f"engine{number} TP-0" for number in (0, 1)}
    if HAS_PERFETTO:
        found.write(tmp_path / "all.json.gz")
        shown = what_is_shown(tmp_path / "all.json.gz")
        assert shown["complaints"] == shown["misplaced"] == []
        kinds = Counter(event["ph"] for event in found.events)
        assert sum(track["slices"] for track in shown["tracks"]) == kinds["X"]
        assert shown["flows"] == [{"number": kinds["f"]}]
        assert {track["process"].partition(":")[0] for track in shown["tracks"]} == processes
        assert all(track["thread"] for track in shown["tracks"])


def test_kernels_and_gaps_are_those_of_the_innermost_phases(traces: Path) -> None:
    found = read_step(traces, 3)
    assert list(found.kernels) == ["decode", "update policy"]  # others have no work, or one inside
    of_update = [(one.name, one.num_calls, one.total_us) for one in found.kernels["update policy"]]
    assert of_update == [("gemm", 4, 1000.0), ("copy", 2, 400.0), ("adam", 2, 200.0)]
    assert found.kernels["update policy"][0].share == pytest.approx(1000 / 1780)
    gaps = [(one.name, one.total_us) for one in found.gaps["update policy"]]
    assert gaps[:2] == [(f"rank{rank}: copy .. adam", 200.0) for rank in (0, 1)]
    assert gaps[2:] == [(f"rank{rank}: the beginning .. gemm", 10.0) for rank in (0, 1)]
    gaps = [(one.name, one.total_us) for one in found.gaps["decode"]]
    short = "engine0 TP-0: the beginning .. attention"
    assert gaps == [(short, 10.0), ("engine0 TP-0: attention .. the end", 10.0)]


def test_operators_of_a_host_count_without_what_they_call(tmp_path: Path) -> None:
    events = [
        phase("train", 0, 100),
        span("linear", 0, 50, "cpu_op"),
        span("mm", 10, 40, "cpu_op"),
        span("mm", 0, 20, "cpu_op", tid=8),
    ]
    write(tmp_path / "train_trace" / "a.trace.json.gz", 1, "rank0", events)
    kernels = read_step(tmp_path).kernels["train"]
    assert [(one.name, one.total_us) for one in kernels] == [("mm", 50.0), ("linear", 20.0)]


def test_the_command_writes_beside_the_traces(traces: Path, capsys: Any) -> None:
    assert main(["trace", f"{traces.parent}", "--step", "1"]) == 0
    assert (traces / "step_1.trace.json.gz").is_file()
    assert (
        "decode: longest kernels\n       0.030 ms  60.0%      1 x  attention"
        in capsys.readouterr().out
    )
    assert main(["trace", f"{traces.parent}"]) == 0  # what it has written is no trace of a step
    assert main(["trace", f"{traces.parent}", "--step", "2"]) == 2
    assert "no trace of step 2" in capsys.readouterr().err


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile\.train\.steps"):
        read_step(tmp_path)
    path = tmp_path / "train_trace" / "a.trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(b"half")
    with pytest.raises(UserError, match=r"a\.trace\.json\.gz is no trace of hone, or damaged"):
        read_step(tmp_path)
