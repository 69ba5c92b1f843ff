"""A mode of `hone rl` on two GPUs, run in processes of its own, with completions of given lengths.

What `modes.py` measures and `mode_predictions.py` predicts; started as a script it is one of these
processes.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import psutil

SEED = 0
GRACE_S = 15.0
"""What a mode has to end after its deadline."""


@dataclass(frozen=True)
class Mode:
    """A way to use two GPUs."""

    colocated: bool = False
    staleness: int = 0
    oversample: bool = False

    @property
    def split(self) -> str:
        return "2 = 2" if self.colocated else "1 + 1"

    @property
    def nproc(self) -> int:
        return 2 if self.colocated else 1

    def flags(self, prompts: int) -> list[str]:
        flags: list[str] = []
        if not self.colocated:
            flags += ["--cluster.num_engines=1"]
        if self.staleness:
            flags += [f"--pipeline.max_staleness={self.staleness}"]
        if self.oversample:
            flags += [f"--rollout.oversample_prompts={-(-prompts // 4)}"]
        return flags


MODES = {
    "sync-separate": Mode(),
    "async-1": Mode(staleness=1),
    "sync-colocated": Mode(colocated=True),
    "async-2": Mode(staleness=2),
    "partial-colocated": Mode(colocated=True, oversample=True),
    "async-4": Mode(staleness=4),
}


def completion_length(number: int, index: int, work: dict[str, Any]) -> int:
    """Tokens of a sample of the group `number`: the same whoever samples it, and when."""
    draw = random.Random(f"{SEED}/{number}/{index}")
    drawn = draw.lognormvariate(math.log(work["median"]), work["sigma"])
    return min(max(round(drawn), 1), work["longest"])


@contextmanager
def given_lengths(work: dict[str, Any], record: Path) -> Generator[None]:
    """Inside, requests have lengths of their own; when groups begin and samples end is written to
    `record`. Nothing is saved at the end of a run."""
    from hone.loops.saving import Saver
    from hone.rollout.episodes import Episodes

    first_request, take_turn = Episodes.first_request, Episodes.take
    with record.open("w", encoding="utf-8", buffering=1) as file:

        def cut_request(self: Any, request_id: str, *args: Any, number: int) -> Any:
            index = int(request_id.rpartition("/")[2])
            if index == 0:
                file.write(json.dumps(["begin", time.perf_counter(), number, 0, 0]) + "\n")
            request = first_request(self, request_id, *args, number=number)
            return _cut(request, completion_length(number, index, work))

        def take(self: Any, sample: Any, completion: Any, **kwargs: Any) -> None:
            number = int(completion.request_id.rpartition("/")[0].rpartition("-")[2])
            num_tokens = len(completion.token_ids)
            row = ["end", time.perf_counter(), number, sample.index, num_tokens]
            file.write(json.dumps(row) + "\n")
            take_turn(self, sample, completion, **kwargs)

        with (
            mock.patch.object(Episodes, "first_request", cut_request),
            mock.patch.object(Episodes, "take", take),
            mock.patch.object(Saver, "after", return_value=False),
            mock.patch("hone.loops.run.export", return_value=None),
        ):
            yield


def _cut(request: Any, length: int) -> Any:
    from dataclasses import replace

    return replace(request, sampling=replace(request.sampling, max_tokens=length))


def run(path: Path) -> int:
    """What `path` asks for; the exit code of `hone rl`."""
    from hone.cli.main import main as hone
    from hone.distributed.processes import processes
    from hone.distributed.spawn import spawn

    asked = json.loads(path.read_text())
    if asked["nproc"] > 1 and processes().world_size == 1:
        return spawn([sys.executable, __file__, str(path)], asked["nproc"])
    record = path.with_name(f"{path.stem}.{processes().rank}.events")
    with given_lengths(asked["work"], record):
        return hone(["rl", *asked["flags"]])


def flags_of(folder: Path, name: str, num_steps: int, work: dict[str, Any]) -> list[str]:
    """Flags of `hone rl` for a mode."""
    longest = work["prompt_tokens"] + 8  # cutting a text may split its last word anew
    flags: dict[str, Any] = {
        "run.dir": folder / name,
        "run.steps": num_steps,
        "run.seed": SEED,
        "run.device": work["device"],
        "model.path": folder / "model",
        "model.init": "random",
        "data.train": json.dumps([{"path": str(folder / "prompts.jsonl")}]),
        "data.chat": "never",
        "data.max_prompt_tokens": longest,
        "rollout.prompts_per_step": work["prompts"],
        "rollout.n_samples_per_prompt": work["group"],
        "rollout.max_completion_tokens": work["longest"],
        "reward.functions": json.dumps(
            [{"fn": f"{Path(__file__).resolve().with_name('rl_step.py')}:reward"}]
        ),
        "algorithm.correction.kind": "tis",
        "checkpoint.every_n_steps": 0,
        "log.to": "[]",
        "log.samples_per_step": 0,
    }
    words = [f"--{key}={value}" for key, value in flags.items()]
    return words + MODES[name].flags(work["prompts"]) + work["settings"]


def environment() -> dict[str, str]:
    import hone

    paths = [str(Path(hone.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def measure(folder: Path, name: str, work: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a mode for `seconds` at most; its rows, and what its processes wrote down."""
    num_warmup = work["warmup"] + MODES[name].staleness
    flags = flags_of(folder, name, num_warmup + work["steps"], work)
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.write_text(json.dumps({"nproc": MODES[name].nproc, "flags": flags, "work": work}))
    started_s = time.time()
    with log.open("w", encoding="utf-8") as output:
        code = ended_within(seconds, [sys.executable, __file__, str(path)], output)
    metrics = folder / name / "metrics.jsonl"
    # A run that was ended may have left half a line.
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    events = [
        json.loads(line)
        for file in sorted(folder.glob(f"{name}.*.events"))
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    start_up_s = rows[0]["timestamp_s"] - rows[0]["time/step_s"] - started_s if rows else None
    if code != 0:
        how = "was ended at its deadline" if code is None else f"ended with exit code {code}"
        print(f"{name} {how} after {len(rows)} steps; its last lines:", flush=True)
        print("\n".join(f"    {x}" for x in log.read_text(errors="replace").splitlines()[-30:]))
    return {
        "code": code,
        "seconds": time.time() - started_s,
        "start_up_s": start_up_s,
        "num_warmup": num_warmup,
        "rows": rows,
        "events": events,
    }


def ended_within(seconds: float, command: Sequence[str], output: Any) -> int | None:
    """Exit code of a command; None where it took too long. None of its processes is left."""
    import psutil

    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment(),
        start_new_session=True,
    )
    own, seen = psutil.Process(process.pid), set[psutil.Process]()
    deadline, is_late = time.monotonic() + seconds, False
    try:
        while process.poll() is None:
            seen |= descendants(own)
            if time.monotonic() > deadline:
                if is_late:
                    break
                is_late, deadline = True, time.monotonic() + GRACE_S
                process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
    finally:
        seen |= descendants(own)
        if process.poll() is None:
            process.kill()
        process.wait()
        end(seen)
    return None if is_late else process.returncode


def descendants(process: psutil.Process) -> set[psutil.Process]:
    import psutil

    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill what is left; a process is known by its number and its start, so that nobody who has the
    number by now is hit."""
    import psutil

    _, left = psutil.wait_procs(processes, timeout=5.0)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5.0)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
