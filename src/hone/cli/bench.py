"""`hone bench engine|train|data [RECIPE] [flags]`: how fast each is, and how fast it could be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rich.console import Console

from hone.cli.command import load_checked, plan_here, quiet_transformers, say_loading, split
from hone.cli.help import print_help
from hone.config.bench_data import BenchDataConfig
from hone.config.load import load_noted
from hone.config.plan import RunPlan
from hone.config.rules.finding import Finding
from hone.config.tree import TREES, BenchEngineConfig, BenchTrainConfig
from hone.distributed.openmp import set_up_openmp
from hone.distributed.processes import processes
from hone.errors import UserError
from hone.planner.host_memory import host_roles, shortage, trainer_role
from hone.rules import findings

__all__ = ["run"]

_USAGE = """\
usage: hone bench engine [RECIPE] [--section.key VALUE ...]
       hone bench train [RECIPE] [--section.key VALUE ...]
       hone bench data [RECIPE] [--section.key VALUE ...]

`engine` measures the engine on a workload: tokens/s, step and first-token times, and the
share of what the device allows for the actual lengths. A first run with other
prompts warms up. Writes a table and bench.json.

`train` measures optimizer steps as a run takes them: tokens/s, time of forward
and backward and of the optimizer, model FLOPs utilisation, and peak memory by
kind beside what was planned. Writes a table and bench-train.json.

`data` measures how fast threads and processes make images ready (data.image_workers),
alone and while a small model is trained, and how much slower that trains: the images
of RECIPE, else drawn ones (--drawn.number, --drawn.height, --drawn.width). Further
keys: --workers, the most of each; --data.max_image_tokens; --seconds, of each
measurement; --output. Writes a table and bench-data.json, within a minute.

`hone bench engine --help` and `hone bench train --help` explain every key.

examples:
  hone bench engine --model.shape qwen3-0.6b
  hone bench engine --model.shape qwen3-8b --workload decode --decode.batch 64
  hone bench engine --model.path Qwen/Qwen3-0.6B --workload requests.jsonl
  hone bench engine --model.shape qwen3-0.6b --workload groups --against vllm
  torchrun --nproc-per-node 2 -m hone bench engine --model.shape qwen3-8b \\
    --engine.tensor_parallel_size 2
  hone bench train --model.shape qwen3-0.6b
  hone bench train --model.shape qwen3-8b --trainer.recompute full \\
    --trainer.optimizer.state_dtype bfloat16 --rows.tokens 8192 --rows.per_step 16
  torchrun --nproc-per-node 8 -m hone bench train --model.shape qwen3-8b \\
    --trainer.parallel.zero_stage 3
  hone bench data
"""

_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Run a benchmark: check, measure, write the file and print a table."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if argv[0] not in _BENCHMARKS:
        raise UserError(
            f"there is no benchmark '{argv[0]}'; there is `hone bench engine`, `hone bench train` "
            "and `hone bench data`"
        )
    arguments = argv[1:]
    if any(word in ("-h", "--help") for word in arguments):
        if f"bench {argv[0]}" not in TREES:
            sys.stdout.write(_USAGE)
            return 0
        return print_help(f"bench {argv[0]}", arguments)
    if any(word.partition("=")[0] == "--nproc" for word in arguments):
        raise UserError(
            "--nproc is not served by `hone bench`; torchrun starts several processes: "
            f"`torchrun --nproc-per-node N -m hone bench {argv[0]} ...`"
        )
    return _BENCHMARKS[argv[0]](arguments)


def _engine(arguments: Sequence[str]) -> int:
    def check(cfg: BenchEngineConfig, world_size: int) -> list[Finding]:
        plan = plan_here(cfg, world_size, starts=True)
        found = findings(plan)
        if any(finding.level == "error" for finding in found):
            return found
        return [*found, *_lack_of_host_memory(plan)]

    cfg = load_checked(BenchEngineConfig, arguments, check)
    say_loading()
    from hone.tools.bench import report
    from hone.tools.bench.bench import bench_engine

    quiet_transformers()
    return _report(bench_engine(cfg), report)


def _train(arguments: Sequence[str]) -> int:
    def check(cfg: BenchTrainConfig, world_size: int | None) -> list[Finding]:
        plan = plan_here(cfg, world_size, starts=True)
        found = findings(plan)
        if any(finding.level == "error" for finding in found) or not plan.is_on_cpu:
            return found
        say_loading()
        from hone.tools.bench.train import planned_on_cpu

        step, num_local = planned_on_cpu(plan), processes().local_world_size
        lack = shortage(
            [] if step is None else [trainer_role(step, num_local)],
            available=plan.devices.host_bytes or 0,
            takes="the step takes at least",
            advice="Lower trainer.max_tokens_per_microbatch, set trainer.recompute to full, take a "
            "smaller model, or a host with more memory or a GPU.",
            keys=("trainer.max_tokens_per_microbatch", "trainer.recompute"),
        )
        return [*found, *([lack] if lack else [])]

    cfg = load_checked(BenchTrainConfig, arguments, check)
    say_loading()
    from hone.tools.bench import train_report
    from hone.tools.bench.train import bench_train

    quiet_transformers()
    return _report(bench_train(cfg), train_report)


def _data(arguments: Sequence[str]) -> int:
    recipe, flags = split(arguments)
    cfg = load_noted(BenchDataConfig, recipe, flags)[0]
    set_up_openmp(cfg.run.device, None)
    say_loading()
    from hone.tools.bench import data_report
    from hone.tools.bench.data import bench_data

    quiet_transformers()
    return _report(bench_data(cfg), data_report)


def _report(result: Any, report: ModuleType) -> int:
    """Write the file and print the table of a result, in the first process."""
    if processes().rank == 0:
        report.write_file(result)
        report.print_table(result, Console(highlight=False))
        _log.info("numbers in %s", result.cfg.output)
    return 0


def _lack_of_host_memory(plan: RunPlan) -> list[Finding]:
    """Error if this host's memory is too small for the engine's weights on a CPU."""
    if plan.shape is None or not plan.is_on_cpu:
        return []
    lack = shortage(
        host_roles(plan, num_local=1, at_least=True),
        available=plan.devices.host_bytes or 0,
        takes="the engine takes at least",
        advice="Take a smaller model (model.shape, model.path), model.dtype bfloat16, or a host "
        "with more memory or a GPU.",
        keys=("model.shape", "model.path", "model.dtype"),
    )
    return [lack] if lack else []


_BENCHMARKS: dict[str, Callable[[Sequence[str]], int]] = {
    "engine": _engine,
    "train": _train,
    "data": _data,
}
