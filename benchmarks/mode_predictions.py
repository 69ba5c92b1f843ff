"""What the simulator says of the runs of `mode_runs.py`, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mode_runs import MODES, completion_length, flags_of

if TYPE_CHECKING:
    from hone.config.tree import PlanConfig
    from hone.hardware import Peaks
    from hone.tools.plan.simulator import SimulatedStep

BETWEEN = ("experience", "record", "checkpoint", "unattributed")
"""Phases in which the trainer neither waits nor trains."""


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


def between_s(row: dict[str, float]) -> float:
    return sum(row.get(f"time/{name}_s", 0.0) for name in BETWEEN)


def with_warmup(
    train_s: Callable[[Sequence[int], int], float], rows: Sequence[dict[str, float]]
) -> Callable[[Sequence[int], int], float]:
    """The first calls take at least what these rows took: what is compiled on the way gives the
    engine time to run ahead."""
    measured = iter([row["time/train_s"] + between_s(row) for row in rows])

    def slow_at_first(lengths: Sequence[int], num_trained: int) -> float:
        return max(train_s(lengths, num_trained), next(measured, 0.0))

    return slow_at_first


def predict(name: str, result: dict[str, Any], saved: dict[str, Any]) -> dict[str, float]:
    """The prediction for the counted steps of a mode."""
    from dataclasses import replace

    from hone.config.load import load_config
    from hone.config.tree import PlanConfig
    from hone.families.shape import ModelShape
    from hone.hardware import GPUS
    from hone.tools.plan.comparison import placement_rates
    from hone.tools.plan.simulator import Placement, simulate

    mode, work, rows = MODES[name], saved["work"], result["rows"]
    flags = flags_of(Path("modes"), name, len(rows), work)
    cfg: PlanConfig = load_config(PlanConfig, None, flags)
    shape = ModelShape.from_config(saved["config"])
    gpu: Peaks = next(x for x in GPUS if x.name == saved["gpu"])
    placement = Placement(num_trainers=mode.nproc, num_engines=mode.nproc, colocated=mode.colocated)
    rates = placement_rates(cfg, shape, gpu, placement)
    num_ahead = mode.staleness + 2
    lengths = lengths_of(result, work, work["prompts"] * (len(rows) + num_ahead))
    run = simulate(
        placement,
        replace(rates, train_s=with_warmup(rates.train_s, rows[: result["num_warmup"]])),
        lengths,
        num_prompt_tokens=round(rows[0]["rollout/prompt_tokens/mean"]),
        num_steps=len(rows),
        rollout=cfg.rollout,
        pipeline=cfg.pipeline,
        engine=cfg.engine,
    )
    return summary_of_steps(run.steps[result["num_warmup"] :], lengths)


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
    """Seconds of a step, then tokens/s, each beside its prediction."""
    counted = {
        name: result
        for name, result in saved["results"].items()
        if len(result["rows"]) > result["num_warmup"]
    }
    seconds = [
        "| mode | who says | s/step | wait s | train s | sync s | staleness |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    speeds = [
        "| mode | trainers, engines | steps | tokens/s | x colocated | hone plan | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = {
        name: {
            "measured": summary_of_rows(result["rows"][result["num_warmup"] :]),
            "hone plan": predict(name, result, saved),
        }
        for name, result in counted.items()
    }
    saved["summary"] = found
    plain = found.get("sync-colocated", {}).get("measured", {}).get("tokens_per_s")
    for name, said in found.items():
        for who, x in said.items():
            keys = ("step_s", "wait_s", "train_s", "sync_s", "staleness")
            numbers = " | ".join(f"{x[key]:.3f}" if key in x else "-" for key in keys)
            seconds.append(f"| {name} | {who} | {numbers} |")
        measured, predicted = (said[who]["tokens_per_s"] for who in ("measured", "hone plan"))
        cells = [name, MODES[name].split]
        cells += [str(len(counted[name]["rows"]) - counted[name]["num_warmup"])]
        cells += [f"{measured:,.0f}", f"{measured / plain:.2f}" if plain else "-"]
        cells += [f"{predicted:,.0f}", f"{predicted / measured - 1:+.1%}"]
        speeds.append(f"| {' | '.join(cells)} |")
    return "\n".join([*seconds, "", *speeds])
