"""Short runs of `hone rl` in subprocesses, whose measurements are cached."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from hone.config.plan import RunPlan
from hone.config.recipe import to_yaml
from hone.config.tree import PlanConfig
from hone.distributed.openmp import set_up_openmp
from hone.errors import UserError
from hone.extras import installed_version
from hone.hardware import num_usable_cores
from hone.observe.run_folder import METRICS, RunFolder, is_locked
from hone.observe.whole_file import write_whole
from hone.paths import files_that_match, local_path
from hone.tools.plan.calibration import Measured
from hone.tools.plan.comparison import recipe_of
from hone.version import __version__

__all__ = ["OUT_OF_MEMORY", "Candidate", "Result", "ShortRuns", "failure"]

_LOGGED = 8
"""Number of groups of a step whose lengths are recorded; recording more would slow the step."""
_WARMUP_STEPS = 2
"""Steps that are not measured, since the first compiles and the second may."""
_POLL_S = 0.1
OUT_OF_MEMORY = "out of memory"
_MEMORY_ERRORS = ("OutOfMemoryError", "RestartError", "MemoryError")
_VERSIONED = ("torch", "transformers", "triton", "vllm", "ray")
_LEFT_OUT = {
    "eval.every_n_steps": 0,
    "eval.at_start": False,
    "checkpoint.every_n_steps": 0,
    "log.to": [],
    "log.metrics_port": 0,
    "run.resume": "never",
}
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to measure."""

    name: str
    cfg: PlanConfig
    nproc: int
    plan: RunPlan
    """Words of its `hone rl` command line."""


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement of a candidate."""

    step: Measured | None = None
    reason: str = ""
    """Why there is no measured step."""
    tokens_per_s: float = 0.0
    """Tokens a second of trained rows, prompts included."""
    peak_gib: float = 0.0
    """Memory of the fullest device; on a CPU that of the fullest process."""


class ShortRuns:
    """Runs of `num_steps` measured steps, cached in `folder` by a digest of everything that they
    depend on."""

    def __init__(
        self, folder: Path, num_steps: int, *, main: Callable[[list[str]], int], gpu: str | None
    ) -> None:
        """`main` is the function of a module that runs a command line of hone in the processes that
        measure; `gpu` names the GPU that they use."""
        self._folder, self._num_steps = folder, num_steps
        self._main, self._gpu = main, gpu
        # A process that has loaded all modules is forked for each run.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["hone.loops.reinforce"])

    def __call__(self, candidate: Candidate) -> Result:
        """The cached result, or a new measurement. Among failures only out-of-memory errors are
        cached."""
        held = self._folder / self._digest(candidate)
        kept = held / "result.json"
        if kept.is_file():
            read = json.loads(kept.read_text(encoding="utf-8"))
            step = read.pop("step")
            return Result(**read, step=None if step is None else Measured(**step))
        if is_locked(held / "run"):
            raise UserError(f"another `hone tune` measures in {held}: wait for its end")
        shutil.rmtree(held, ignore_errors=True)
        result = self._measure(candidate, held)
        shutil.rmtree(held / "run", ignore_errors=True)
        if result.reason in ("", OUT_OF_MEMORY):
            write_whole(kept, json.dumps(asdict(result)), "run.dir")
        return result

    def _measure(self, candidate: Candidate, held: Path) -> Result:
        cfg, needed = candidate.cfg, _WARMUP_STEPS + self._num_steps
        recipe, log, run_dir = held / "recipe.yaml", held / "log.txt", held / "run"
        write_whole(recipe, to_yaml(recipe_of(cfg)), "run.dir")
        logged = min(cfg.rollout.prompts_per_step, _LOGGED) * cfg.rollout.n_samples_per_prompt
        # One step more than is needed: the run is killed before it saves.
        flags = {"run.dir": run_dir, "run.steps": needed + 1, "log.samples_per_step": logged}
        words = ["rl", str(recipe)] + ["--nproc", f"{candidate.nproc}"] * (candidate.nproc > 1)
        words += [f"--{key}={value}" for key, value in {**_LEFT_OUT, **flags}.items()]
        set_up_openmp(cfg.run.device, candidate.plan.shape, num_processes=candidate.nproc)
        process = self._processes.Process(target=_run, args=(self._main, words, log))
        process.start()
        try:
            while process.is_alive() and len(_rows(run_dir / METRICS)) < needed:
                process.join(_POLL_S)
        finally:
            _kill(process.pid)
            process.join()
        run = RunFolder.read(run_dir) if run_dir.is_dir() else None
        if run is None or len(run.rows) < needed:
            return Result(reason=failure(run, process.exitcode, log))
        if any(any(run.values(name)) for name in run.metric_names if name.endswith("_replays")):
            return Result(reason=OUT_OF_MEMORY)  # in a step, which was retried with a reduction
        return _result(candidate, run.rows[_WARMUP_STEPS:needed], _rows(run_dir / "samples.jsonl"))

    def _digest(self, candidate: Candidate) -> str:
        cfg = candidate.cfg
        paths = [
            local_path(x) for x in (cfg.model.path, *(source.path for source in cfg.data.train))
        ]
        files = [file for path in paths for file in _files(path)]
        meant = {
            "recipe": recipe_of(cfg),
            "nproc": candidate.nproc,
            "steps": self._num_steps,
            "result": [field.name for field in fields(Measured)],
            "files": [
                (str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in files if x.is_file()
            ],
            "versions": {"hone": __version__}
            | {name: installed_version(name) for name in _VERSIONED},
            "device": self._gpu,
            "cores": num_usable_cores(),
        }
        return blake2b(json.dumps(meant, sort_keys=True).encode(), digest_size=8).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.iterdir())
    return [path] if path.exists() else files_that_match(str(path))


def _run(main: Callable[[list[str]], int], words: list[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(main(words))


def _kill(pid: int | None) -> None:
    """Kill a run and all its subprocesses."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=10)


def _result(candidate: Candidate, rows: Sequence[_Row], samples: Sequence[_Row]) -> Result:
    cfg, plan = candidate.cfg, candidate.plan
    # With carry-over, a step depends on the steps before it.
    carries_over = cfg.pipeline.samples_ahead or cfg.rollout.oversample_prompts > 0
    average = fmean if carries_over else median

    def usual(metric: str) -> float:
        return average([row.get(metric, 0.0) for row in rows])

    size, lengths = cfg.rollout.n_samples_per_prompt, [len(row["token_ids"]) for row in samples]
    groups = [lengths[i : i + size] for i in range(0, len(lengths) - size + 1, size)]
    peak = "mem/rss_gib" if plan.is_on_cpu else "mem/gpu_peak_gib"
    return Result(
        step=Measured.of(usual, plan, groups),
        tokens_per_s=usual("perf/tokens_per_s"),
        peak_gib=max(row[peak] for row in rows),
    )


def failure(run: RunFolder | None, code: int | None, log: Path) -> str:
    """The reason why a run has too few steps."""
    error = None if run is None else run.error
    if code == -signal.SIGKILL or (error is not None and error["error"] in _MEMORY_ERRORS):
        return OUT_OF_MEMORY
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if line.startswith("error: ")] or lines or [f"code {code}"]
    return f"{told[-1].removeprefix('error: ')} ({log})"


def _rows(file: Path) -> list[_Row]:
    """The complete lines of a JSONL file."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
