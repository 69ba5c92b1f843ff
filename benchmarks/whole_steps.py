"""Write a table of whole RL steps that were measured, beside what the planner predicts of each.

    python benchmarks/whole_steps.py            # writes docs/whole-steps.md
    python benchmarks/whole_steps.py --check    # exits with 1 where the page is out of date

`whole_steps.json` has what was measured, on H200s with `benchmarks/rl_step.py` or
`benchmarks/predictions.py`; predictions come from the planner as it is now, with the constants that
are shipped. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.cli.command import load_arguments, plan_here
from hone.config.tree import PlanConfig
from hone.hardware import GIB, known_gpu
from hone.planner.fitting import rl_config
from hone.planner.run_memory import peak_bytes
from hone.tools.plan.calibration import simulated

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/whole-steps.md"
HEAD = """# Whole steps, measured and predicted

Published times of whole steps of reinforcement learning on few GPUs are rare. These are steps of
GRPO that were measured with hone on NVIDIA H200s, and what `hone plan` predicts for the same
settings. A step samples, scores, trains once on all samples, and brings the new weights to the
engines. Weights are random, so that every completion has its full length: completions that end
early make a step shorter.

With one update a step, as here, hone needs no forward pass of its own for old log-probabilities:
they are those of the training pass. Frameworks that run another pass for them spend more on a step.

"""
FOOT = """
Seconds are medians over the steps after the first one, which compiles kernels. "Pause" is how long
sampling stands still while new weights are brought. A dash is a figure that was not recorded. Peaks
are those of one GPU, which has 140 GiB; where more is predicted, the run fitted all the same.
Predicted peaks are of full micro-batches, where those of a step are of equal size and may be less
than full. Tokens are those of prompts and completions. A commit names the code that was measured.
Steps that were measured before rows of a group shared their prompt in training (2026-11-27) take
longer and are not in the table. How long the host needs to start recurrent layers was taken from
the rows of Qwen3.5.

A row is measured again with

    python benchmarks/rl_step.py --shape SHAPE --nproc GPUS --prompts P --group G \\
        --prompt-tokens A --completion-tokens B FLAGS

and `python benchmarks/whole_steps.py` writes this page from
[what was measured](../benchmarks/whole_steps.json). [Benchmarks](../benchmarks/README.md) say more
about each.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args()
    rows = json.loads((HERE / "whole_steps.json").read_text(encoding="utf-8"))
    text = page(rows)
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is out of date: run `python benchmarks/whole_steps.py`")


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page, in Markdown."""
    columns = ["model", "GPUs", "samples, tokens", "placement", "s a step", "predicted", "tokens/s"]
    columns += ["peak GiB", "predicted", "pause", "flags", "commit"]
    times: list[float] = []
    peaks: list[float] = []
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        step_s, peak_gib = predicted(row)
        times.append(step_s / row["step_s"] - 1)
        if row.get("peak_gib"):
            peaks.append(peak_gib / row["peak_gib"] - 1)
        lines.append(list(cells(row, step_s, peak_gib)))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    errors = (
        f"Predictions of time are {off(times)}, of memory {off(peaks)}: of all {len(times)} times "
        f"and {len(peaks)} measured peaks of the table.\n"
    )
    return f"{HEAD}{table}\n\n{errors}{FOOT}"


def off(errors: Sequence[float]) -> str:
    """Relative errors in words."""
    sizes = [abs(one) for one in errors]
    return f"{statistics.median(sizes):.1%} off in the median and {max(sizes):.1%} at most"


def cells(row: Mapping[str, Any], step_s: float, peak_gib: float) -> Iterator[str]:
    """One line of the table."""
    samples, (prompt, completion) = row["prompts"] * row["group"], row["tokens"]
    peak, pause = row.get("peak_gib"), row.get("sync_s")
    yield row["model"].partition("/")[2]
    yield str(row["gpus"])
    yield f"{row['prompts']} x {row['group']}, {prompt:,} + {completion:,}"
    yield row["placement"]
    yield f"**{row['step_s']:g}**"
    yield f"{step_s:.2f} ({step_s / row['step_s'] - 1:+.0%})"
    yield f"{samples * (prompt + completion) / row['step_s']:,.0f}"
    yield "-" if peak is None else f"{peak:g}"
    yield f"{peak_gib:.1f}" + ("" if peak is None else f" ({peak_gib / peak - 1:+.0%})")
    yield "-" if pause is None else f"{pause:g} s"
    yield f"`{row['flags']}`" if row["flags"] else "defaults"
    yield f"`{row['commit']}`"


def predicted(row: Mapping[str, Any]) -> tuple[float, float]:
    """Predict the seconds of a step and the peak of a GPU in GiB, for samples of full length."""
    prompt, completion = row["tokens"]
    words = [
        f"--model.path={row['model']}",
        "--model.init=random",
        "--data.train.0.path=prompts.jsonl",
        f"--data.max_prompt_tokens={prompt + 8}",
        f"--rollout.prompts_per_step={row['prompts']}",
        f"--rollout.n_samples_per_prompt={row['group']}",
        f"--rollout.max_completion_tokens={completion}",
        f"--engine.max_num_seqs={row['prompts'] * row['group']}",
        *shlex.split(row["flags"]),
    ]
    cfg, _ = load_arguments(PlanConfig, words)
    plain = rl_config(cfg)
    processes = plain.cluster.num_processes if plain.cluster.is_used else row["gpus"]
    plan = plan_here(plain, processes, gpu=known_gpu("h200"))
    lengths = [[completion] * row["group"]] * row["prompts"]
    return simulated(cfg.plan, plan, lengths, prompt).step_s, peak_bytes(plan) / GIB


if __name__ == "__main__":
    main()
