"""How long `hone rl` takes from its last step to its end, what it leaves, and where it listens.

    python -m benchmarks.gpu.ending_check --shape qwen3-8b --folder /somewhere/with/room \
        --nproc 2 --checkpoint.every_n_steps 0 ...

Weights are random; further flags are settings of the run, of two short steps. The end is that of
the last process. The model is read back: names, shapes and bytes of every file. Addresses are those
of all listening TCP sockets of this host that were not there before the run, by polling.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import rl_step
from safetensors import safe_open

LISTENING = "0A"


def listening() -> set[str]:
    """Addresses and ports of the TCP sockets that listen in this network namespace."""
    found: set[str] = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state != LISTENING:
                continue
            plain, port = local.split(":")
            words = [plain[i : i + 8] for i in range(0, len(plain), 8)]
            packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
            found.add(f"{socket.inet_ntop(family, packed)} {int(port, 16)}")
    return found


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def measure(folder: Path, args: argparse.Namespace, settings: list[str]) -> dict[str, object]:
    rl_step.make_inputs(folder, args)
    before, opened = listening(), set[str]()
    metrics = folder / "run" / "metrics.jsonl"
    start = time.perf_counter()
    env = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%p")}
    # Random weights of these sizes are beyond the launch gate.
    words = rl_step.command(folder, args, ["--trainer.parity", "off", *settings])
    process = subprocess.Popen([sys.executable, "-m", "hone", *words], env=env)
    last_step = None
    while process.poll() is None:
        opened |= listening() - before
        if last_step is None and num_rows(metrics) == args.steps:
            last_step = time.perf_counter()
        time.sleep(0.05)
    end = time.perf_counter()
    model = folder / "run" / "model"
    num_tensors, num_bytes = 0, 0
    for path in sorted(model.glob("*.safetensors")):
        num_bytes += path.stat().st_size
        with safe_open(path, "pt") as file:
            num_tensors += len(file.keys())
    checkpoints = folder / "run" / "checkpoints"
    transport = {
        line.split("NCCL INFO ")[-1]
        for path in folder.glob("nccl.*")
        for line in path.read_text(errors="replace").splitlines()
        if "Bootstrap" in line or ("NET/" in line and "Using" in line)
    }
    return {
        "exit code": process.returncode,
        "run s": round(end - start, 1),
        "last step to end s": None if last_step is None else round(end - last_step, 1),
        "model GB": round(num_bytes / 1e9, 2),
        "model tensors": num_tensors,
        "checkpoints": sorted(path.name for path in checkpoints.glob("*")),
        "free GB after": round(shutil.disk_usage(folder).free / 1e9, 1),
        "addresses": sorted({where.split()[0] for where in opened}),
        "nccl": sorted(transport),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", help="a shape of models.tiny")
    parser.add_argument("--layers", type=int, default=0, help="so many; 0: all that it has")
    parser.add_argument("--folder", type=Path, required=True, help="emptied before and after")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="samples a prompt")
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args, settings = parser.parse_known_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    try:
        found = measure(args.folder, args, settings)
    finally:
        shutil.rmtree(args.folder)
    print(f"\n{args.shape}, {args.layers or 'all'} layers, {rl_step.device_name()}")
    for name, value in found.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
