"""`hone bench engine [RECIPE] [flags]`: how fast the engine is, and how fast it could be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from hone.cli.command import load_checked, quiet_transformers
from hone.cli.help import print_help
from hone.config import UserError
from hone.config.checks.bench import check_bench_engine
from hone.config.tree import BenchEngineConfig
from hone.distributed.processes import processes

__all__ = ["run"]

_USAGE = """\
usage: hone bench engine [RECIPE] [--section.key VALUE ...]

Measures the engine on a workload: tokens/s, step and first-token times, and the
share of what the device allows for the actual lengths. A first run with other
prompts warms up. Writes a table, bench.json and bench.svg.
`hone bench engine --help` explains every key.

examples:
  hone bench engine --model.shape qwen3-0.6b
  hone bench engine --model.shape qwen3-8b --workload decode --decode.batch 64
  hone bench engine --model.path Qwen/Qwen3-0.6B --workload requests.jsonl
  hone bench engine --model.shape qwen3-0.6b --workload groups --against vllm
  torchrun --nproc-per-node 2 -m hone bench engine --model.shape qwen3-8b \\
    --engine.tensor_parallel_size 2
"""

_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Check, measure, write; print the numbers as a table."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if argv[0] != "engine":
        raise UserError(f"there is no benchmark '{argv[0]}'; there is `hone bench engine`")
    arguments = argv[1:]
    if any(word in ("-h", "--help") for word in arguments):
        return print_help("bench engine", [x for x in arguments if not x.startswith("-")])
    cfg = load_checked(BenchEngineConfig, arguments, check_bench_engine)
    from hone.bench.bench import bench_engine
    from hone.bench.report import print_table, write_files

    quiet_transformers()
    result = bench_engine(cfg)
    if processes().rank > 0:
        return 0
    plot = write_files(result)
    print_table(result, Console(highlight=False))
    _log.info("numbers in %s, plot in %s", cfg.output, plot)
    return 0
