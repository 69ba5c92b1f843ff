"""Tokens/s of every mode of `hone rl` on two GPUs, beside what the simulator predicts.

    python benchmarks/modes.py --output modes.json
    python benchmarks/modes.py --dry                        # a tiny model on a CPU: does it run?
    python benchmarks/modes.py --again modes.json           # the tables of former runs

Trainer and engine take turns on both GPUs (colocated), or have one each (separate), in turns or
with the engine ahead of the training (async). Weights are random, so that no completion ends by
itself: each request is given a length of its own, log-normal with a long tail, the same in every
mode. Further flags are settings, `--algorithm.kl.coef 0.001`.

Two predictions, both by `hone.planner.simulator` with the lengths that were drawn: `hone simulate`
has the rates that it assumes of the GPU, `fitted` those that the mode `sync-separate` has shown
(time of a decode step over batch and keys, training FLOPs/s, seconds of a sync and between steps),
so that its row there is a fit and the other rows are predictions. Tokens are those of completions
that are trained, over wall time. The first steps compile kernels; they are not counted, and the
simulator is told how long the trainer took for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import psutil

    from hone.config.tree import SimulateConfig
    from hone.planner.hardware import Peaks
    from hone.planner.model_shape import ModelShape
    from hone.planner.simulator import Placement, Rates, SimulatedRun, SimulatedStep

SEED = 0
LEAST_S = 40.0
"""A mode for which less is left is not started."""
GRACE_S = 15.0
"""What a mode has to end after its deadline."""
FITTED_ON = "sync-separate"
BETWEEN = ("experience", "record", "checkpoint", "unattributed")
"""Phases in which the trainer neither waits nor trains."""


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
            flags += ["--pipeline.enabled=true", f"--pipeline.max_staleness={self.staleness}"]
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


# -- the run of one mode, in processes of its own -------------------------------------------------


def completion_length(number: int, index: int, work: dict[str, Any]) -> int:
    """Tokens of a sample of the group `number`: the same whoever samples it, and when."""
    draw = random.Random(f"{SEED}/{number}/{index}")
    drawn = draw.lognormvariate(math.log(work["median"]), work["sigma"])
    return min(max(round(drawn), 1), work["longest"])


@contextmanager
def given_lengths(work: dict[str, Any], record: Path) -> Generator[None]:
    """Inside, requests have lengths of their own; when groups begin and samples end is written to
    `record`. Nothing is saved at the end of a run."""
    from hone.loops.step import Saver
    from hone.rollout import open_groups

    make_requests, make_sample = open_groups.requests_for, open_groups.sample_of
    with record.open("w", encoding="utf-8", buffering=1) as file:

        def requests_for(*args: Any, number: int, **kwargs: Any) -> Any:
            file.write(json.dumps(["begin", time.perf_counter(), number, 0, 0]) + "\n")
            requests = make_requests(*args, number=number, **kwargs)
            return [_cut(x, completion_length(number, i, work)) for i, x in enumerate(requests)]

        def sample_of(prompt: Any, index: int, completion: Any, decode: Any) -> Any:
            number = int(completion.request_id.rpartition("/")[0].rpartition("-")[2])
            row = ["end", time.perf_counter(), number, index, len(completion.token_ids)]
            file.write(json.dumps(row) + "\n")
            return make_sample(prompt, index, completion, decode)

        with (
            mock.patch.object(open_groups, "requests_for", requests_for),
            mock.patch.object(open_groups, "sample_of", sample_of),
            mock.patch.object(Saver, "after", return_value=False),
            mock.patch("hone.loops.reinforce.export", return_value=None),
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
        return spawn([sys.executable, __file__, "run", str(path)], asked["nproc"])
    record = path.with_name(f"{path.stem}.{processes().rank}.events")
    with given_lengths(asked["work"], record):
        return hone(["rl", *asked["flags"]])


# -- all modes ------------------------------------------------------------------------------------


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
        "engine.max_model_len": longest + work["longest"],
        "reward.functions": json.dumps(
            [{"fn": f"{Path(__file__).resolve().with_name('rl_step.py')}:reward"}]
        ),
        "algorithm.correction.kind": "tis",
        "checkpoint.every_n_steps": 0,
        "log.tensorboard": "false",
        "log.report": "false",
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
        code = ended_within(seconds, [sys.executable, __file__, "run", str(path)], output)
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


# -- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What the mode `sync-separate` says about the parts of a run."""

    overhead_s: float
    """Of a decode step."""
    seq_s: float
    key_s: float
    prompts_s: float
    """Of the engine in a step, besides decode steps."""
    calls_s: float
    """Of a step while it generates, in which the engine does nothing: requests and completions on
    their way, and the last rewards. What a sum of the others leaves of the measured time."""
    flops_per_s: float
    """Of the training."""
    between_s: float
    sync_s: float
    error: float
    """Root mean square of what decoding took against the fit, over the mean."""


def lengths_of(result: dict[str, Any], work: dict[str, Any], num_groups: int) -> list[list[int]]:
    """Completion lengths by group, as they were drawn, or where an end of sequence was sampled, as
    they came out."""
    groups = [
        [completion_length(number, index, work) for index in range(work["group"])]
        for number in range(num_groups)
    ]
    for kind, _, number, index, num_tokens in result["events"]:
        if kind == "end" and number < num_groups:
            assert num_tokens <= groups[number][index], f"{number}/{index} has {num_tokens} tokens"
            groups[number][index] = num_tokens
    return groups


def fit_rates(result: dict[str, Any], work: dict[str, Any], shape: ModelShape) -> Fit:
    """The rates of a run in turns with one engine apart."""
    import numpy as np

    from hone.planner.roofline import training_flops

    rows, size = result["rows"], work["prompts"]
    lengths = lengths_of(result, work, size * len(rows))
    ended = {(e[2], e[3]): e[1] for e in result["events"] if e[0] == "end"}
    work_of, took, whole = [], [], []
    for step in range(1, len(rows)):  # the first one compiles
        num_prompt = rows[step]["rollout/prompt_tokens/mean"]
        numbers = range(step * size, (step + 1) * size)
        drawn = np.array([lengths[n] for n in numbers]).ravel()
        ends = np.array([ended[n, i] for n in numbers for i in range(work["group"])])
        positions = np.arange(2, drawn.max() + 1)  # the first token comes with the prompt
        active = (drawn[:, None] >= positions).sum(0)
        # [tokens + 1, 3]: steps, sequences and keys of all steps up to that of token n
        keys = active * (num_prompt + positions - 1)
        parts = np.stack([np.ones_like(active), active, keys], 1)
        done = np.concatenate([np.zeros((2, 3)), parts.cumsum(0)])
        marks: list[tuple[int, float]] = []
        for length in np.unique(drawn):
            if not marks or length - marks[-1][0] >= work["longest"] // 64:
                marks.append((int(length), float(ends[drawn == length].max())))
        for (low, low_s), (high, high_s) in itertools.pairwise(marks):
            work_of.append(done[high] - done[low])
            took.append(high_s - low_s)
        whole.append(done[-1])
    rates, error = nonnegative_fit(np.array(work_of), np.array(took))
    decoding_s = [float(done @ rates) for done in whole]
    prompts_s = statistics.median(
        row["perf/engine_busy_s"] - seconds
        for row, seconds in zip(rows[1:], decoding_s, strict=True)
    )
    prompts_s = max(prompts_s, 0.0)
    calls_s = statistics.median(
        row["time/generate_s"] - seconds - prompts_s
        for row, seconds in zip(rows[1:], decoding_s, strict=True)
    )
    later = rows[result["num_warmup"] :]
    trained = [
        [int(row["rollout/prompt_tokens/mean"]) + x for n in groups for x in lengths[n]]
        for row in later
        for groups in [range((row["step"] - 1) * size, row["step"] * size)]
    ]
    flops = sum(
        training_flops(shape, x, num_head_tokens=int(row["rollout/num_tokens"]))
        for x, row in zip(trained, later, strict=True)
    )
    return Fit(
        overhead_s=float(rates[0]),
        seq_s=float(rates[1]),
        key_s=float(rates[2]),
        prompts_s=prompts_s,
        flops_per_s=flops / sum(row["time/train_s"] for row in later),
        between_s=statistics.fmean(map(between_s, later)),
        calls_s=max(calls_s, 0.0),
        sync_s=statistics.fmean(row["time/sync_s"] for row in later),
        error=error,
    )


def nonnegative_fit(work_of: Any, took: Any) -> tuple[Any, float]:
    """Least squares with coefficients of at least 0, by trying which are not 0; and its error."""
    import numpy as np

    num_columns = work_of.shape[1]
    best, least = np.zeros(num_columns), math.inf
    scale = work_of.max(0)
    for size in range(1, num_columns + 1):
        for chosen in map(list, itertools.combinations(range(num_columns), size)):
            found = np.linalg.lstsq(work_of[:, chosen] / scale[chosen], took, rcond=None)[0]
            rates = np.zeros(num_columns)
            rates[chosen] = found / scale[chosen]
            error = float(np.sqrt(np.mean((work_of @ rates - took) ** 2)))
            if (rates >= 0).all() and error < least:
                best, least = rates, error
    return best, least / float(np.mean(took))


def between_s(row: dict[str, float]) -> float:
    return sum(row.get(f"time/{name}_s", 0.0) for name in BETWEEN)


def fitted_rates(
    fit: Fit,
    assumed: Rates,
    placement: Placement,
    *,
    work: dict[str, Any],
    shape: ModelShape,
    scaling: float,
    overlaps: bool,
) -> Rates:
    """Rates of a placement from those of the fit. What it cannot tell stays as `hone simulate` has
    it: the scaling of several trainers, the switch of colocated ones, the prompts' FLOPs. Where
    sampling `overlaps` training, calls are taken to hold up nobody."""
    from dataclasses import replace

    from hone.planner.roofline import training_flops

    engine, num_prompt = assumed.engine, work["prompt_tokens"]
    of_prompts_s = work["prompts"] * num_prompt * engine.prefill_token_s
    num_samples = work["prompts"] * work["group"]
    engine = replace(
        engine,
        weights_s=0.0,
        seq_s=fit.seq_s,
        key_s=fit.key_s,
        overhead_s=fit.overhead_s,
        prefill_seq_s=max(fit.prompts_s - of_prompts_s, 0.0) / num_samples,
    )
    num_trainers = placement.num_trainers
    flops_per_s = fit.flops_per_s * num_trainers * (scaling if num_trainers > 1 else 1.0)
    still_s = fit.between_s if overlaps else fit.between_s + fit.calls_s

    def train_s(rows: Sequence[int], num_trained: int) -> float:
        flops = training_flops(shape, rows, num_head_tokens=num_trained)
        return flops / flops_per_s + still_s

    sync_s = assumed.sync_s if placement.colocated else fit.sync_s
    return replace(assumed, engine=engine, train_s=train_s, sync_s=sync_s)


def with_warmup(
    train_s: Callable[[Sequence[int], int], float], rows: Sequence[dict[str, float]]
) -> Callable[[Sequence[int], int], float]:
    """The first calls take at least what these rows took: what is compiled on the way gives the
    engine time to run ahead."""
    measured = iter([row["time/train_s"] + between_s(row) for row in rows])

    def slow_at_first(lengths: Sequence[int], num_trained: int) -> float:
        return max(train_s(lengths, num_trained), next(measured, 0.0))

    return slow_at_first


def predict(
    name: str,
    result: dict[str, Any],
    saved: dict[str, Any],
    fit: Fit | None,
) -> dict[str, Any]:
    """Both predictions for the counted steps of a mode."""
    from dataclasses import replace

    from hone.config.load import load_config
    from hone.config.tree import SimulateConfig
    from hone.planner.comparison import placement_rates
    from hone.planner.hardware import GPUS
    from hone.planner.model_shape import ModelShape
    from hone.planner.simulator import Placement, simulate

    mode, work, rows = MODES[name], saved["work"], result["rows"]
    flags = flags_of(Path("modes"), name, len(rows), work)
    cfg: SimulateConfig = load_config(SimulateConfig, None, flags)
    shape = ModelShape.from_config(saved["config"])
    gpu: Peaks = next(x for x in GPUS if x.name == saved["gpu"])
    placement = Placement(num_trainers=mode.nproc, num_engines=mode.nproc, colocated=mode.colocated)
    assumed = placement_rates(cfg, shape, gpu, placement)
    all_rates = {"hone simulate": assumed}
    if fit is not None:
        all_rates["fitted"] = fitted_rates(
            fit,
            assumed,
            placement,
            work=work,
            shape=shape,
            scaling=cfg.simulate.training_scaling,
            overlaps=mode.staleness > 0,
        )
    num_ahead = mode.staleness + 2
    lengths = lengths_of(result, work, work["prompts"] * (len(rows) + num_ahead))
    warmup = rows[: result["num_warmup"]]

    def simulated(rates: Rates) -> SimulatedRun:
        return simulate(
            placement,
            replace(rates, train_s=with_warmup(rates.train_s, warmup)),
            lengths,
            num_prompt_tokens=round(rows[0]["rollout/prompt_tokens/mean"]),
            num_steps=len(rows),
            rollout=cfg.rollout,
            pipeline=cfg.pipeline,
            engine=cfg.engine,
        )

    return {
        key: summary_of_steps(simulated(rates).steps[result["num_warmup"] :], lengths)
        for key, rates in all_rates.items()
    }


def summary_of_steps(
    steps: Sequence[SimulatedStep], lengths: Sequence[Sequence[int]]
) -> dict[str, float]:
    seconds = steps[-1].end_s - steps[0].start_s
    num_tokens = sum(sum(lengths[number]) for step in steps for number in step.groups)
    staleness = [float(x) for step in steps for x in step.staleness]
    return {
        "tokens_per_s": num_tokens / seconds,
        "step_s": seconds / len(steps),
        "wait_s": statistics.fmean(step.wait_s for step in steps),
        "train_s": statistics.fmean(step.train_s for step in steps),
        "sync_s": statistics.fmean(step.halt_s + step.sync_s for step in steps),
        "staleness": statistics.fmean(staleness),
    }


def summary_of_rows(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The same as measured. Training includes what is between the phases."""

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in rows)

    found = {
        "tokens_per_s": mean("rollout/num_tokens") / mean("time/step_s"),
        "step_s": mean("time/step_s"),
        "wait_s": mean("time/generate_s"),
        "train_s": mean("time/train_s") + statistics.fmean(map(between_s, rows)),
        "sync_s": mean("time/sync_s"),
    }
    if "rollout/staleness/mean" in rows[0]:  # turns leave it out, also where samples are carried
        found["staleness"] = mean("rollout/staleness/mean")
    return found


# -- tables ---------------------------------------------------------------------------------------


def tables(saved: dict[str, Any]) -> str:
    """Seconds of a step, then tokens/s, each beside its predictions."""
    from hone.planner.model_shape import ModelShape

    counted = {
        name: result
        for name, result in saved["results"].items()
        if len(result["rows"]) > result["num_warmup"]
    }
    fit = None
    if FITTED_ON in counted:
        shape = ModelShape.from_config(saved["config"])
        fit = fit_rates(counted[FITTED_ON], saved["work"], shape)
        saved["fit"] = vars(fit)
    seconds = [
        "| mode | who says | s/step | wait s | train s | sync s | staleness |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    speeds = [
        "| mode | trainers, engines | steps | tokens/s | x colocated | hone simulate | error | "
        "fitted | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = {
        name: {"measured": summary_of_rows(result["rows"][result["num_warmup"] :])}
        | predict(name, result, saved, fit)
        for name, result in counted.items()
    }
    saved["summary"] = found
    plain = found.get("sync-colocated", {}).get("measured", {}).get("tokens_per_s")
    for name, said in found.items():
        for who, x in said.items():
            keys = ("step_s", "wait_s", "train_s", "sync_s", "staleness")
            numbers = " | ".join(f"{x[key]:.3f}" if key in x else "-" for key in keys)
            seconds.append(f"| {name} | {who} | {numbers} |")
        measured = said["measured"]["tokens_per_s"]
        cells = [name, MODES[name].split]
        cells += [str(len(counted[name]["rows"]) - counted[name]["num_warmup"])]
        cells += [f"{measured:,.0f}", f"{measured / plain:.2f}" if plain else "-"]
        for who in ("hone simulate", "fitted"):
            if who not in said:
                cells += ["-", "-"]
                continue
            error = said[who]["tokens_per_s"] / measured - 1
            cells += [f"{said[who]['tokens_per_s']:,.0f}", f"{error:+.1%}"]
        speeds.append(f"| {' | '.join(cells)} |")
    if fit is not None:
        seconds += ["", fit_in_words(fit)]
    return "\n".join([*seconds, "", *speeds])


def fit_in_words(fit: Fit) -> str:
    return (
        f"fitted: a decode step takes {1e3 * fit.overhead_s:.3f} ms + {1e6 * fit.seq_s:.2f} us a "
        f"sequence + {1e9 * fit.key_s:.2f} ns a key (error {fit.error:.1%}), prompts "
        f"{fit.prompts_s:.3f} s a step, training {fit.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{fit.between_s:.3f} s between phases, calls {fit.calls_s:.3f} s, sync {fit.sync_s:.3f} s"
    )


def told(name: str, result: dict[str, Any], work: dict[str, Any]) -> str:
    """A mode in a line, as soon as it is done."""
    rows = result["rows"]
    counted = rows[result["num_warmup"] :]
    if not counted:
        return f"{name}: {len(rows)} steps, too few to count, in {result['seconds']:.0f} s"
    drawn = [e for e in result["events"] if e[0] == "end"]
    num_early = sum(e[4] < completion_length(e[2], e[3], work) for e in drawn)
    measured = summary_of_rows(counted)
    return (
        f"{name}: {measured['tokens_per_s']:,.0f} tokens/s, {measured['step_s']:.2f} s a step over "
        f"{len(counted)} steps; start-up {result['start_up_s']:.0f} s, "
        f"{result['seconds']:.0f} s in all; {num_early} of {len(drawn)} samples ended early"
    )


def save(saved: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(saved))


def run_modes(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Run the modes one after the other, as far as the time goes."""
    from rl_step import interrupt, make_inputs

    signal.signal(signal.SIGTERM, interrupt)  # so that nothing is left running
    work, begun_s = saved["work"], time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        inputs = {"prompts": 4 * args.prompts, "prompt_tokens": args.prompt_tokens}
        make_inputs(folder, argparse.Namespace(shape=args.shape, **inputs))
        saved["config"] = json.loads((folder / "model" / "config.json").read_text())
        for name in args.modes:
            left_s = args.seconds - (time.monotonic() - begun_s)
            if left_s < LEAST_S:
                print(f"{name}: left out, {max(left_s, 0):.0f} of {args.seconds} s are left")
                continue
            limit_s = min(left_s - GRACE_S, args.mode_seconds)
            saved["results"][name] = measure(folder, name, work, limit_s)
            print(told(name, saved["results"][name], work), flush=True)
            save(saved, args.output)


def main() -> None:
    from hone.planner.hardware import GPUS

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--shape", default="qwen3-1.7b", help="a shape of models.tiny, or tiny")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a mode")
    parser.add_argument("--warmup", type=int, default=2, help="not counted, beside max_staleness")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--median", type=float, default=300.0, help="of the completion lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=3072, help="where they are cut")
    parser.add_argument("--gpu", default="H200", choices=[x.name for x in GPUS])
    parser.add_argument("--seconds", type=float, default=420, help="for all modes together")
    parser.add_argument("--mode-seconds", type=float, default=180, help="for one mode at most")
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--again", type=Path, nargs="+", help="such files, in place of runs")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU, two steps")
    args, settings = parser.parse_known_args()
    if args.again:
        former = [json.loads(path.read_text()) for path in args.again]
        results = {name: result for each in former for name, result in each["results"].items()}
        print(tables(former[0] | {"results": results}))
        return
    if args.dry:
        args.shape, args.steps, args.warmup, args.prompts, args.group = "tiny", 2, 1, 4, 4
        args.prompt_tokens, args.median, args.longest = 16, 16.0, 96
        settings = ["--engine.max_num_seqs=64", *settings]
    names = "steps warmup prompts group prompt_tokens median sigma longest shape"
    work = {name: getattr(args, name) for name in names.split()}
    work |= {"device": "cpu" if args.dry else "cuda", "settings": settings}
    saved: dict[str, Any] = {"work": work, "gpu": args.gpu, "results": {}}
    run_modes(args, saved)
    print(f"\n{args.shape}, {args.prompts} x {args.group} samples a step, 2 x {saved['gpu']}")
    print(f"settings: {' '.join(settings) or 'defaults'}\n")
    print(tables(saved))
    save(saved, args.output)
    failed = [name for name in args.modes if name not in saved.get("summary", {})]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:  # how this file starts itself
        sys.exit(run(Path(sys.argv[2])))
    main()
