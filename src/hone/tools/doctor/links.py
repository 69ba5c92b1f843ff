"""Check of the rate between every two GPUs through NCCL; on a CPU between two processes through
gloo."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import combinations

from hone.hardware import gpu_peaks
from hone.tools.doctor.machine import START_S, Finding, Machine, ReadingError, judge

__all__ = ["broadcast", "links", "measure_pairs"]

PAIR_S = 20.0
"""Time for a pair to connect and send; NCCL takes about one second."""
MAX_FAILED = 2
"""Failed pairs of a GPU after which its other pairs are skipped."""
_LEAST_SHARE = 0.5
"""Lowest healthy share of the link's rate in hone's table; two H200 reach three quarters."""
Pair = tuple[int, int]


def links(machine: Machine) -> Finding | None:
    """Check every pair, one after the other. Pairs that hang are named."""
    num_gpus = machine.torch.num_gpus
    if num_gpus == 1:
        return None
    kind = "GPU" if num_gpus else "process"
    send = partial(broadcast, "cuda" if num_gpus else "cpu")
    rates, failed = measure_pairs(machine, num_gpus or 2, send)
    least = 0.0
    if num_gpus:
        known = gpu_peaks(machine.devices[0].name)
        typical = statistics.median(rates.values() or [0.0])
        least = _LEAST_SHARE * (typical if known is None else known.link_bytes_per_s / 1e9)
    slow = {pair: f"{rate:,.1f} GB/s" for pair, rate in rates.items() if rate < least}
    ends = [f"{rate:,.1f}" for rate in (sorted(rates.values()) or [0.0])]
    return judge(
        _listed(kind, failed or slow) or f"{' to '.join(dict.fromkeys([ends[0], ends[-1]]))} GB/s",
        f"{least:,.0f} GB/s or more between all" if num_gpus else "an answer, through gloo",
        (
            failed,
            "wrong",
            "NCCL_DEBUG=INFO in the environment says where it stops. NCCL_P2P_DISABLE=1 goes "
            "around direct access, which IOMMU or ACS may break (`nvidia-smi topo -p2p r`)."
            if num_gpus
            else "Name the network interface in the environment: GLOO_SOCKET_IFNAME=lo.",
        ),
        (
            slow,
            "slow",
            "`nvidia-smi topo -m` shows how GPUs are linked, `nvidia-smi nvlink -s` which links "
            "are down.",
        ),
    )


def _listed(kind: str, pairs: Mapping[Pair, str]) -> str:
    return "; ".join(f"{kind} {first} and {second}: {x}" for (first, second), x in pairs.items())


def measure_pairs(
    machine: Machine, number: int, send: Callable[[str, Pair, int], float]
) -> tuple[dict[Pair, float], dict[Pair, str]]:
    """Measure GB/s of each pair, or the reason why there is none. Both processes of a pair call
    `send` with a file of the pair, the pair, and their own index."""
    rates: dict[Pair, float] = {}
    failed: dict[Pair, str] = {}
    num_failed = Counter[int]()
    for pair in combinations(range(number), 2):
        if max(num_failed[index] for index in pair) >= MAX_FAILED:
            failed[pair] = "not tried"
            continue
        meeting = f"{machine.folder}/{pair[0]}-{pair[1]}"
        try:
            machine.ask(pair, _load_torch, START_S)
            rates[pair] = min(machine.ask(pair, partial(send, meeting, pair), PAIR_S)) / 1e9
        except ReadingError as error:
            failed[pair] = f"{error}"
            num_failed.update(pair)
    return rates, failed


def _load_torch(index: int) -> None:
    import_module("torch.distributed")


def broadcast(kind: str, meeting: str, pair: Pair, index: int) -> float:
    """Bytes per second from the first of two processes to the second, which meet at a file. `kind`
    is cuda or cpu. Raises RuntimeError if other bytes arrive than were sent."""
    import torch
    import torch.distributed as dist

    on_gpu, rank = kind == "cuda", pair.index(index)
    own = torch.device(kind, index) if on_gpu else torch.device(kind)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PAIR_S),
        device_id=own if on_gpu else None,
    )
    data = torch.full((2**28 if on_gpu else 2**24,), 7 - 7 * rank, dtype=torch.uint8, device=own)
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        dist.broadcast(data, src=0)
        int(data[-1])  # waits for the device
        times.append(time.perf_counter() - start)
    is_right = bool((data == 7).all())
    dist.destroy_process_group()
    if not is_right:
        raise RuntimeError("other bytes arrived than were sent")
    return len(data) / statistics.median(times[1:])
