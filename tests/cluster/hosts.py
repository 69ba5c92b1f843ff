"""Hosts of one machine that are real as far as network, files and processes go.

    with hosts(tmp_path, "north", "south") as (north, south):
        (north.folder / "data.jsonl").write_text(...)  # `HERE/data.jsonl` on north alone
        trained = north.start("python", "-m", "hone", ...)
        assert trained.wait(60) == 0, trained.told

Each is a set of Linux namespaces (network, mounts, host name, processes, shared memory) that a
process of its own holds. The hosts' interfaces meet at a bridge, which lies in a namespace too, so
that nothing of the machine itself changes. A host ends when its holder does: the kernel then kills
its processes, and drops its mounts and interfaces. A holder ends when the test does, however that
ends, as it reads a pipe of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

__all__ = ["HERE", "PYTHON", "SCRATCH", "Command", "Host", "give_second_interface", "hosts"]

HERE = Path("/mnt")
"""Where each host has a folder of its own, which the test sees as `Host.folder`."""
SCRATCH = Path("/srv")
"""What each host has for itself alone, whoever shares `HERE`; it ends with the host."""
PYTHON = sys.executable
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_UNSHARED = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Command:
    """A command at work on a host."""

    entering: subprocess.Popen[bytes]
    """The process of the test that waits for it."""
    log: Path

    @property
    def told(self) -> str:
        """What it has written so far, on either stream."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Fails the test where it has not ended by then."""
        try:
            return self.entering.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended within {timeout_s:g} s:\n{self.told}", pytrace=False)

    def await_(self, what: Callable[[], bool], timeout_s: float) -> None:
        """Return once `what` holds. Fails the test where it does not by then, or the command has
        ended before."""
        until = time.monotonic() + timeout_s
        while not what():
            if self.entering.poll() is not None or time.monotonic() > until:
                pytest.fail(f"it ended too early, or took too long:\n{self.told}", pytrace=False)
            time.sleep(0.1)

    def send_signal(self, number: signal.Signals) -> None:
        """To the command itself, not to those that it has started."""
        for process in psutil.Process(self.entering.pid).children():
            process.send_signal(number)


@dataclass(frozen=True)
class Host:
    """One host; `name` is its host name, which its `/etc/hosts` has."""

    name: str
    address: str
    folder: Path
    """What it has at `HERE`."""
    holder: int
    """The process that is its first one."""
    logs: Path
    begun: list[Command]

    def start(self, *words: str | Path, **environment: str) -> Command:
        """Begin to run a command in `HERE`, with the test's environment and this."""
        log = self.logs / f"{self.name}.{len([*self.logs.iterdir()])}.log"
        with log.open("wb") as written:
            entering = subprocess.Popen(
                _inside(self.holder, ["sh", "-c", f'cd {HERE} && exec "$@"', "sh", *words]),
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        self.begun.append(Command(entering, log))
        return self.begun[-1]

    def run(self, *words: str | Path, timeout_s: float = 60.0, **environment: str) -> str:
        """Run a command to its end, which must be a good one; what it has written."""
        command = self.start(*words, **environment)
        assert command.wait(timeout_s) == 0, command.told
        return command.told

    def cut_off(self) -> None:
        """Take its link down: what is sent to it or by it is lost, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    @property
    def running(self) -> list[str]:
        """The command lines of all processes that are on it."""
        own = os.stat(f"/proc/{self.holder}/ns/pid").st_ino
        found = [process for process in psutil.process_iter() if process.pid != self.holder]
        lines: list[str] = []
        for process in found:
            try:
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own:
                    lines.append(" ".join(process.cmdline()))
            except (OSError, psutil.NoSuchProcess):
                continue  # ended meanwhile, or none of ours
        return [line for line in lines if line]  # without those that wait to be reaped


@contextmanager
def hosts(folder: Path, *names: str, shared: Path | None = None) -> Generator[tuple[Host, ...]]:
    """So many hosts on one network. With `shared` that folder is at `HERE` on all of them, as on a
    cluster with a file system for all. Skips the test where this machine has no namespaces for us.
    """
    _require_tools()
    logs = folder / "logs"
    logs.mkdir()
    begun: list[Command] = []
    with ExitStack() as stack:
        stack.callback(lambda: [command.entering.wait(10) for command in begun])
        switch = stack.enter_context(_held())
        _run(switch, "ip link add lan type bridge && ip link set lan up", entered=["--net"])
        made: list[Host] = []
        for index, name in enumerate(names):
            own = shared or folder / name
            own.mkdir(exist_ok=True)
            holder = stack.enter_context(_held())
            made.append(Host(name, f"10.77.0.{index + 1}", own, holder, logs, begun))
        table = "".join(f"{host.address} {host.name}\n" for host in made)
        for host in made:
            known = logs / f"{host.name}.hosts"
            known.write_text(f"127.0.0.1 localhost\n{table}")
            port = f"to_{host.name}"
            _run(
                switch,
                f"ip link add {port} type veth peer name eth0 netns {host.holder} "
                f"&& ip link set {port} master lan up",
                entered=["--net"],  # among the test's processes, where the number is the holder's
            )
            _run(
                host.holder,
                f"hostname {host.name} && mount --bind '{host.folder}' {HERE} "
                f"&& mount --bind '{known}' /etc/hosts && mount -t tmpfs tmpfs /dev/shm "
                f"&& mount -t tmpfs tmpfs {SCRATCH} "
                "&& ip link set lo up && ip link set eth0 up "
                f"&& ip address add {host.address}/24 dev eth0",
            )
        yield tuple(made)


def give_second_interface(host: Host, address: str) -> None:
    """Let it have one more, which its name stands for and over which its packets go by default,
    and nothing comes through: as that of a management network, or of containers. To connect over it
    is given up after seconds, not the two minutes of other systems."""
    known = host.logs / f"{host.name}.hosts"
    known.write_text(known.read_text().replace(f"{host.address} {host.name}\n", ""))
    with known.open("a") as table:
        table.write(f"{address} {host.name}\n")
    host.run(
        *("sh", "-c"),
        "ip link add mgmt0 type veth peer name nowhere && ip link set nowhere up "
        "&& ip link set mgmt0 arp off up "
        f"&& ip address add {address}/24 dev mgmt0 && ip route add default dev mgmt0 "
        "&& echo 2 > /proc/sys/net/ipv4/tcp_syn_retries",
    )


def _require_tools() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("hosts of this machine are made of namespaces, for which one must be root")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        pytest.skip(f"no {', '.join(missing)} here, for namespaces (apt-get install {packages})")


@contextmanager
def _held() -> Generator[int]:
    """A process in namespaces of its own, which is the first of them, until the block ends."""
    with subprocess.Popen(
        ["unshare", *_UNSHARED, "--mount-proc", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as unshare:
        try:
            assert unshare.stdout is not None
            if unshare.stdout.readline() != b"ready\n":
                _, told = unshare.communicate(timeout=200)
                pytest.skip(f"no namespaces for us here: {told.decode(errors='replace').strip()}")
            (first,) = psutil.Process(unshare.pid).children()
            yield first.pid
        finally:
            assert unshare.stdin is not None
            unshare.stdin.close()  # with its first process the kernel ends all that are in there
            try:
                unshare.wait(10)
            except subprocess.TimeoutExpired:
                unshare.kill()  # and with it, as asked for, that first one


_ALL = ("--mount", "--net", "--uts", "--ipc", "--pid")


def _inside(
    holder: int, words: Sequence[str | Path], *, entered: Sequence[str] = _ALL
) -> list[str]:
    return ["nsenter", "--target", str(holder), *entered, "--", *map(str, words)]


def _run(holder: int, script: str, *, entered: Sequence[str] = _ALL) -> None:
    """What sets a host up. Some kernels have the namespaces and not the devices."""
    words = _inside(holder, ["sh", "-ec", script], entered=entered)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no hosts here: {script!r} failed: {done.stderr.strip()}")
