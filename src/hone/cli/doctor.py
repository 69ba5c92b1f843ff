"""`hone doctor [--run.dir DIR] [--json]`: whether this machine is right for runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from signal import SIGHUP, SIGTERM

from rich.console import Console
from rich.text import Text

from hone.cli.command import take_word
from hone.cli.help import is_help
from hone.distributed.openmp import set_up_openmp
from hone.distributed.processes import processes
from hone.distributed.signals import raising
from hone.errors import UserError
from hone.observe.printable import printable
from hone.tools.doctor import gpus, host, speed
from hone.tools.doctor.links import links
from hone.tools.doctor.machine import Finding, Machine, ReadingError

__all__ = ["CHECKS", "run"]

_USAGE = """\
usage: hone doctor [--run.dir DIR] [--json]

Is this machine right? Measures versions, cores, memory, limits, /dev/shm and
the disk of DIR, where runs go (runs); the driver and torch; memory, rates under
load and clocks of each GPU, and the rate between every two through NCCL (without
a GPU between two processes through gloo); and a few steps of training and of
sampling. A line says what was measured and what is expected: ok, slow (a run
works, slower or nearer to a limit than it need be) or wrong, with what to do.
--json prints a list of the same. Give it once on each host.
Exit code: 1 where something is wrong, else 0.
"""

_DRIVER = (
    "Install NVIDIA's driver; reboot after an update of it. A container needs NVIDIA's runtime and "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility."
)
_TORCH = (
    "`python -c 'import torch; torch.cuda.init()'` shows it: reinstall torch if it cannot be "
    "loaded, and reboot if a driver hangs."
)
_GPU = (
    "`dmesg | grep -i xid` says whether it was lost; a reboot brings it back. Until then leave it "
    "out with CUDA_VISIBLE_DEVICES."
)
_WORK = "`hone bench train` and `hone bench engine` show the same failure whole."

CHECKS: dict[str, tuple[Callable[[Machine], Finding | None], str]] = {
    "versions": (host.versions, ""),
    "cores": (host.cores, ""),
    "memory": (host.memory, ""),
    "open files": (host.open_files, ""),
    "/dev/shm": (host.shared_memory, ""),
    "disk": (host.disk, ""),
    "programs": (host.programs, "`python -I -c 'print(1)'` must work with few rights."),
    "driver": (gpus.driver, _DRIVER),
    "torch": (gpus.torch_build, _TORCH),
    "GPU memory": (gpus.free_memory, _GPU),
    "GPU rates": (gpus.rates, _GPU),
    "GPU clocks": (gpus.clocks, _GPU),
    "links": (links, _GPU),
    "training": (speed.training, _WORK),
    "sampling": (speed.sampling, _WORK),
}
"""The checks, each with the remedy if its reading cannot be taken. A check returns None if it does
not apply. Checks after torch are skipped if that one is wrong."""
_COLOURS = {"ok": "green", "slow": "yellow", "wrong": "red"}


def run(argv: Sequence[str]) -> int:
    """Run the checks and print each result."""
    if is_help(argv):
        sys.stdout.write(_USAGE)
        return 0
    folder, words = take_word("--run.dir", argv)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    if words or folder == "":
        got = words[0] if words else "--run.dir without a folder"
        raise UserError(f"`hone doctor` takes --run.dir DIR and --json, got {got}")
    if processes().world_size > 1:
        raise UserError("`hone doctor` starts its own processes: give it once on each host")
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    findings: dict[str, Finding] = {}
    with Machine(Path(folder or "runs")) as machine, raising(_ended_by, SIGTERM, SIGHUP):
        console.print(_announcement(machine))
        with console.status("") as line:  # on terminals alone
            for name, finding in _examine(machine, line.update):
                findings[name] = finding
                console.print(_line(name, finding))
    if as_json:
        rows = [{"check": name, **asdict(finding)} for name, finding in findings.items()]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    levels = [finding.level for finding in findings.values()]
    console.print(", ".join(f"{levels.count(level)} {level}" for level in _COLOURS))
    return 1 if "wrong" in levels else 0


def _ended_by(number: int) -> SystemExit:
    return SystemExit(128 + number)


def _announcement(machine: Machine) -> str:
    what, takes = "this host and its GPUs", "one to three minutes"
    if machine.max_gpus == 0:
        what, takes = "this host, which has no GPU", "less than a minute"
    return (
        f"Checks of {what}: {takes}. They write temporary files alone, one of 128 "
        f"MiB on the disk of {machine.run_dir}. Ctrl-C ends them.\n"
    )


def _examine(machine: Machine, begun: Callable[[str], None]) -> Iterator[tuple[str, Finding]]:
    """The finding of each check that applies. `begun` is called with a check's name before it."""
    for name, (check, remedy) in CHECKS.items():
        begun(name)
        try:
            finding = check(machine)
        except ReadingError as error:
            finding = Finding("wrong", f"{error}", "an answer", remedy)
        if finding is not None:
            yield name, finding
            if name == "torch" and finding.level == "wrong":
                return
        # Before a process loads torch, and after the user's settings were checked.
        set_up_openmp("auto", None)


def _line(name: str, finding: Finding) -> Text:
    text = Text.assemble(
        (f"{finding.level:<5}", _COLOURS[finding.level]),
        (f"  {name}: ", "bold"),
        f"{printable(finding.measured)} (expected: {finding.expected})",
    )
    return text.append(f"\n       {finding.remedy}") if finding.level != "ok" else text
