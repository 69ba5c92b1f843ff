"""What the simulator says of the runs of `mode_runs.py`, beside what was measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mode_runs import MODES, completion_length, flags_of

if TYPE_CHECKING:
    from hone.config.hardware import Peaks
    from hone.config.tree import SimulateConfig
    from hone.families.shape import ModelShape
    from hone.planner.simulator import Placement, Rates, SimulatedRun, SimulatedStep

FITTED_ON = "sync-separate"
BETWEEN = ("experience", "record", "checkpoint", "unattributed")
"""Phases in which the trainer neither waits nor trains."""


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

    from hone.config.hardware import GPUS
    from hone.config.load import load_config
    from hone.config.tree import SimulateConfig
    from hone.families.shape import ModelShape
    from hone.planner.comparison import placement_rates
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


def tables(saved: dict[str, Any]) -> str:
    """Seconds of a step, then tokens/s, each beside its predictions."""
    from hone.families.shape import ModelShape

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
