"""What it costs when one process tells the others each thing that they do, instead of running the
loop itself.

    torchrun --nproc-per-node 2 -m benchmarks.driver_calls

Measured over the channel that the processes of a run have (gloo, signed pickles): a call without
arguments, as each step of an engine would be; the rows of a whole step of 64 x 8 samples of 1,024
tokens to all processes, as a driver would send them for scores and updates; and to each process its
share of the rows alone. Median and largest of the repeats, in milliseconds.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hone.distributed.channel import GroupChannel
from hone.distributed.team import Team
from hone.types import Column, Row

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 64, 8, 200, 1024
CALLS, REPEATS = 2000, 7


def make_rows() -> list[Row]:
    """Of one step, with what a driver would send: ids, masks, four columns."""
    draw = random.Random(0)
    rows: list[Row] = []
    for number in range(PROMPTS * SAMPLES):
        columns = ("logprobs/engine", "advantages", "logprobs/reference", "logprobs/policy")
        rows.append(
            Row(
                id=f"{number // SAMPLES}/{number % SAMPLES}",
                group_id=str(number // SAMPLES),
                token_ids=[draw.randrange(150_000) for _ in range(PROMPT_TOKENS + TOKENS)],
                loss_mask=[False] * PROMPT_TOKENS + [True] * TOKENS,
                columns={name: Column(torch.randn(TOKENS)) for name in columns},
            )
        )
    return rows


def milliseconds(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """All processes do the same work at the same time."""
    seconds: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return {
        "median": round(1e3 * statistics.median(seconds), 4),
        "largest": round(1e3 * max(seconds), 4),
    }


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    channel = GroupChannel(group)
    is_first = channel.rank == 0
    team = Team(channel, is_first=is_first, calls={"step": lambda: None})

    def calls() -> None:
        def work() -> None:
            for _ in range(CALLS):
                team.call("step")

        team.run(work)

    rows = make_rows() if is_first else []
    shares = [rows[own :: channel.size] for own in range(channel.size)]

    def share() -> None:
        for own in range(1, channel.size):  # nobody is sent another's
            if channel.rank in (0, own):
                pair[own].broadcast(shares[own] if is_first else None)

    pair = {
        own: GroupChannel(new)
        for own in range(1, channel.size)
        if isinstance(new := dist.new_group([0, own], backend="gloo"), dist.ProcessGroup)
    }
    found = {
        "one call": {key: value / CALLS for key, value in milliseconds(calls, REPEATS).items()},
        "rows to all": milliseconds(lambda: channel.broadcast(rows), REPEATS),
        "own rows alone": milliseconds(share, REPEATS),
    }
    if is_first:
        print(json.dumps({"processes": channel.size} | found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
