"""The plans in the comments of large recipes in `examples/`: what the planner says of them.

`python -m tests.cli.planned_figures` writes them anew, after a change of the planner or a recipe.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from statistics import fmean

import numpy as np

from hone.config.plan import RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.planner.run_memory import RunMemory
from hone.tools.plan.comparison import plan_rates
from hone.tools.plan.lengths import draw_lengths
from hone.tools.plan.simulator import Placement, SimulatedRun, simulate

PLAN = re.compile(r"^# Plan for .*\n(?:#   .*\n)+", re.MULTILINE)
_STEPS = 4
_WIDTH = 100


def planned_comment(plan: RunPlan) -> str:
    """Memory of each phase on the fullest device, and seconds of each phase of a step."""
    gpu, assumed = plan.devices.gpu, PlanningConfig()
    assert gpu is not None
    run = simulated(plan, assumed)
    assert isinstance(plan.config, RLConfig)
    num_gpus = run.placement.num_gpus + plan.config.cluster.num_critics
    head = f"# Plan for {num_gpus} x {gpu.name} of {gpu.memory_gib} GiB:"
    lines = [f"{phase.title}: {phase.in_words()}" for phase in RunMemory(plan).phases()]
    parts = {
        "waiting for samples" if plan.config.pipeline.samples_ahead else "sampling": "wait_s",
        "training": "train_s",
        "halting engines": "halt_s",
        "weights": "sync_s",
    }
    seconds = {name: fmean(getattr(s, key) for s in run.steady) for name, key in parts.items()}
    told = " + ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
    lengths = assumed.lengths
    lines.append(
        f"step: {run.step_s:.1f} s ({told}), for prompts of {assumed.prompt_tokens} tokens and "
        f"completions of {lengths.median:g} in the median"
    )
    body = [
        textwrap.fill(each, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
        for each in lines
    ]
    return "\n".join([head, *body]) + "\n"


def simulated(plan: RunPlan, assumed: PlanningConfig) -> SimulatedRun:
    """The recipe's own mode on its own devices."""
    cfg = plan.config
    assert isinstance(cfg, RLConfig)
    size, world = cfg.engine.tensor_parallel_size, plan.policy.axes.world
    is_apart = cfg.cluster.num_engines > 0
    placement = Placement(
        num_trainers=world,
        num_engines=cfg.cluster.num_engines if is_apart else world // size,
        tensor_parallel_size=size,
        colocated=not is_apart,
    )
    rollout = cfg.rollout
    number = rollout.prompts_per_step * (_STEPS + 2)
    drawn = draw_lengths(
        assumed.lengths,
        number * rollout.n_samples_per_prompt,
        most=rollout.max_completion_tokens,
        rng=np.random.default_rng(0),
    )
    return simulate(
        placement,
        plan_rates(assumed, placement, plan),
        np.reshape(drawn, (number, rollout.n_samples_per_prompt)).tolist(),
        num_prompt_tokens=assumed.prompt_tokens,
        num_steps=_STEPS,
        rollout=rollout,
        pipeline=cfg.pipeline,
        engine=cfg.engine,
    )


def write(path: Path, plan: RunPlan) -> None:
    """Put the plan where the last one was."""
    text = path.read_text()
    assert PLAN.search(text), f"{path} has no comment `# Plan for ...:` with lines below it"
    path.write_text(PLAN.sub(lambda _: planned_comment(plan), text, count=1))


def main() -> None:
    from tests.cli import test_examples as examples

    for recipe in examples.RECIPES:
        if PLAN.search((examples.EXAMPLES / recipe).read_text()):
            write(examples.EXAMPLES / recipe, examples.plan_of(recipe))


if __name__ == "__main__":
    main()
