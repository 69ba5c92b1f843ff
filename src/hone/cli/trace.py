"""`hone trace RUN [--step N] [--output FILE]`: merges the traces of a step, and lists what takes
longest."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.observe.run_folder import RunFolder
from hone.tools.report.merged_trace import Longest, read_step

__all__ = ["run"]

_DESCRIPTION = """Merge what trainers and engines have traced of a step (keys `profile.train.steps`
and `profile.rollout.steps`) into one file for https://ui.perfetto.dev, and list the longest kernels
and gaps of each phase."""
_NAME_WIDTH = 70


def run(argv: Sequence[str]) -> int:
    """Write the merged trace, print its tables and its path."""
    parser = ArgumentParser(prog="hone trace", description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder that run.dir named")
    parser.add_argument(
        "--step", metavar="N", type=int, help="step of the run, counted from 1 (the newest traced)"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="file to write (step_N.trace.json.gz there)"
    )
    arguments = parser.parse_args(argv)
    folder = RunFolder.read(arguments.run).setting("profile.dir")
    traces = Path(folder) if folder else arguments.run / "traces"
    trace = read_step(traces, arguments.step)
    output = arguments.output or traces / f"step_{trace.step}.trace.json.gz"
    trace.write(output)
    for title, longest in (("kernels", trace.kernels), ("gaps without a kernel", trace.gaps)):
        sys.stdout.write(_tables(title, longest))
    sys.stdout.write(
        f"step {trace.step}, of {len(trace.files)} traces: {output}\n"
        "Open it at https://ui.perfetto.dev.\n"
    )
    return 0


def _tables(title: str, longest_by_phase: Mapping[str, Sequence[Longest]]) -> str:
    lines: list[str] = []
    for phase, longest in longest_by_phase.items():
        lines.append(f"{phase}: longest {title}")
        lines += [
            f"  {item.total_us / 1000:10.3f} ms {item.share:6.1%} {item.num_calls:6d} x  "
            f"{item.name[:_NAME_WIDTH]}"
            for item in longest
        ]
        lines.append("")
    return "\n".join(lines) + "\n" if lines else ""
