"""vLLM on the same requests, in a process of its own that is gone before ours needs the GPU.

    python -m hone.tools.bench.vllm_runner job.json result.json

Written for vLLM 0.24. Its `LLM.generate` runs as it always does; only the object that receives the
statistics of each step is replaced, which spares vLLM its Prometheus counters.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import UserError
from hone.tools.bench.measure import EngineRun, Measurement, Step
from hone.types import Request

__all__ = ["main", "run_vllm"]

_TIMEOUT_S = 1800.0
_PROGRESS_S = 10.0
"""Seconds between two lines of progress in the log."""
_EXIT_S = 10.0
"""Longest wait until the processes of a killed group have released the GPU."""

_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
"""Defaults if the caller has not set them: FlashInfer may be absent, and the model is local."""


def run_vllm(
    options: Mapping[str, Any],
    *,
    warmup: Sequence[Request],
    requests: Sequence[Request],
    log: Path,
    command: Sequence[str] = (sys.executable, "-m", "hone.tools.bench.vllm_runner"),
) -> EngineRun:
    """Run both lists one after the other, and return the measurements of the second.

    `options` are arguments of `vllm.LLM`. vLLM's output goes to `log`. Raises UserError with the
    end of the log if vLLM fails or takes more than half an hour.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        lists = {"warmup": list(map(asdict, warmup)), "requests": list(map(asdict, requests))}
        job.write_text(json.dumps({"options": dict(options), **lists}))
        process = subprocess.Popen(
            [*command, str(job), str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_ENVIRONMENT | os.environ,
            start_new_session=True,
        )
        try:
            code = process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"vLLM was not done after {_TIMEOUT_S:.0f} s; see {log}") from error
        finally:
            _end_group(process)
        if code != 0 or not result.exists():
            lines = log.read_text(errors="replace").splitlines()[-15:]
            raise UserError("\n".join([f"vLLM failed (exit code {code}); {log} ends:", *lines]))
        run = _read(json.loads(result.read_text()))
    run.measured.check_complete(requests)
    return run


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill vLLM and the engine process that it has started, and wait until both are gone."""
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.poll()
        time.sleep(0.05)


def _read(result: dict[str, Any]) -> EngineRun:
    measured = result.pop("measured")
    steps = [Step(**step) for step in measured.pop("steps")]
    return EngineRun(**result, measured=Measurement(steps=steps, **measured))


def main(argv: Sequence[str]) -> None:
    """Read a job, run it, write the result. Called in vLLM's process only."""
    job = json.loads(Path(argv[0]).read_text())
    vllm: Any = importlib.import_module("vllm")
    start_s = time.perf_counter()
    llm = vllm.LLM(**job["options"], disable_log_stats=False)
    started_s = time.perf_counter()
    _note(f"started after {started_s - start_s:.1f} s")
    _generate(vllm, llm, job["warmup"])
    warm_s = time.perf_counter()
    _note(f"warm-up took {warm_s - started_s:.1f} s")
    run = EngineRun(
        name="vllm",
        version=str(vllm.__version__),
        start_s=started_s - start_s,
        warmup_s=warm_s - started_s,
        measured=_generate(vllm, llm, job["requests"]),
    )
    Path(argv[1]).write_text(json.dumps(asdict(run)))


def _note(line: str) -> None:
    """Write a line to the log, among those of vLLM."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class _Recorder:
    """Replaces vLLM's loggers: `LLMEngine.step` calls `record` after each step."""

    start_s: float
    steps: list[Step] = field(default_factory=list[Step])
    num_preemptions: int = 0
    next_line_s: float = _PROGRESS_S

    def record(self, *, scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
        finished = iteration_stats.finished_requests
        self.num_preemptions += iteration_stats.num_preempted_reqs
        self.steps.append(
            Step(
                end_s=time.perf_counter() - self.start_s,
                num_seqs=scheduler_stats.num_running_reqs + len(finished),
                num_tokens=iteration_stats.num_generation_tokens,
                num_first_tokens=len(iteration_stats.time_to_first_tokens_iter),
                num_finished=len(finished),
                finished_tokens=sum(
                    x.num_prompt_tokens + x.num_generation_tokens for x in finished
                ),
                kv_cache_usage=scheduler_stats.kv_cache_usage,
            )
        )
        end_s = self.steps[-1].end_s
        if end_s >= self.next_line_s:
            done = sum(step.num_tokens for step in self.steps)
            _note(f"{end_s:.0f} s: {len(self.steps)} steps, {done:,} tokens")
            self.next_line_s = end_s + _PROGRESS_S

    def log(self) -> None:
        """Do nothing. vLLM calls this every ten seconds."""


def _generate(vllm: Any, llm: Any, requests: Sequence[dict[str, Any]]) -> Measurement:
    """Run all requests at once, as `LLM.generate` does. They have no seeds: vLLM samples faster
    without."""
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    params = [_sampling_params(vllm, request["sampling"]) for request in requests]
    recorder = _Recorder(time.perf_counter())
    llm.llm_engine.logger_manager = recorder
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Measurement(
        recorder.steps,
        num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        num_preemptions=recorder.num_preemptions,
    )


def _sampling_params(vllm: Any, sampling: Mapping[str, Any]) -> Any:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
    chosen = {name: sampling[name] for name in names}
    return vllm.SamplingParams(**chosen, logprobs=0, detokenize=False)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine process can block a normal exit forever
