"""What an asynchronous run costs its controller, the first training process: time and memory.

    python benchmarks/control_plane.py --engines 512 --in-flight 10000 --tokens 1024 --step-s 20

Engines are fakes in a few processes, of which each answers for many: what they sample is made up
and takes the time that it would, but all messages are real, as are collector, pool of engines,
and the pickling of a step's groups for the other trainers. Rewards are given at once:
workers compute them. Nothing is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any

import psutil

from hone.distributed.calls import Frames, Hub, frame
from hone.distributed.channel import packed
from hone.engine.worker import Polled
from hone.garbage import rare_garbage_collection
from hone.models.tiny import make_bpe_tokenizer
from hone.models.tokenizer import decoder
from hone.rewards.scorer import ScorerStats
from hone.rollout.collector import Collector
from hone.rollout.engine_pool import EnginePool
from hone.rollout.requests import Decode
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.types import (
    Completion,
    EngineStats,
    PerToken,
    Prompt,
    Request,
    Reward,
    Sample,
    StopReason,
)

GROUP = 8
"""Samples of a prompt."""
HOSTS = 2
"""Processes that the fake engines share."""


class FakeEngine:
    """An engine that knows when each request will have ended, by a clock alone."""

    def __init__(self, tokens: int, mean_s: float, vocabulary: int) -> None:
        self._rate = tokens / mean_s
        self._tokens = tokens
        self._ids = PerToken("i", random.choices(range(vocabulary), k=8 * tokens))
        self._logprobs = PerToken("d", [random.random() for _ in range(8 * tokens)])
        self._running: dict[str, tuple[float, int]] = {}
        self._has_more = asyncio.Event()
        self._beat = self._version = 0

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            draw = random.Random(request.sampling.seed)
            length = min(int(self._tokens * draw.lognormvariate(-0.32, 0.8)) + 1, 8 * self._tokens)
            self._running[request.id] = (time.time() + length / self._rate, length)
        self._has_more.set()

    async def poll(self, wait_s: float) -> Polled:
        until = time.time() + wait_s
        while not (ended := self._ended()) and (left_s := until - time.time()) > 0.0:
            first = min((end for end, _ in self._running.values()), default=until)
            self._has_more.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._has_more.wait(), max(min(first - time.time(), left_s), 0.001)
                )
        self._beat += 1
        completions = [self._completion(name, self._running.pop(name)[1]) for name in ended]
        return Polled(completions, EngineStats(num_running=len(self._running)), self._beat)

    def _ended(self) -> list[str]:
        now = time.time()
        return [name for name, (end, _) in self._running.items() if end <= now]

    def _completion(self, name: str, length: int) -> Completion:
        return Completion(
            request_id=name,
            token_ids=PerToken("i", self._ids[:length]),
            logprobs=PerToken("d", self._logprobs[:length]),
            weight_versions=PerToken("i", [self._version]) * length,
            stop_reason=StopReason.EOS,
            text="x" * (3 * length),
        )

    def weight_version(self) -> int:
        return self._version

    def receive(self, version: int, rank: int) -> None:
        del rank
        self._version = version

    async def serve(self, address: tuple[str, int], key: bytes) -> None:
        """As `hone.distributed.calls.serve`, many in one thread."""
        reader, writer = await asyncio.open_connection(*address)
        writer.write(key)
        frames, calls = Frames(), set[asyncio.Task[None]]()
        with suppress(ConnectionResetError):  # answers were not waited for
            while data := await reader.read(1 << 18):
                for number, method, args in frames.feed(data):
                    answer = asyncio.create_task(self._answer(writer, number, method, args))
                    calls.add(answer)
                    answer.add_done_callback(calls.discard)

    async def _answer(
        self, writer: asyncio.StreamWriter, number: int, method: str, args: tuple[Any, ...]
    ) -> None:
        result = getattr(self, method)(*args)
        value = await result if asyncio.iscoroutine(result) else result
        writer.write(frame((number, True, value)))


def host_engines(
    address: tuple[str, int], keys: list[bytes], tokens: int, mean_s: float, vocabulary: int
) -> None:
    async def host() -> None:
        engines = [(FakeEngine(tokens, mean_s, vocabulary), key) for key in keys]
        await asyncio.gather(*(engine.serve(address, key) for engine, key in engines))

    asyncio.run(host())


class LineWorker:
    """One of the engines of another process."""

    num_ranks = 1

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self.line = hub.line(name)
        self.num_calls = 0

    def call(self, method: str, /, *args: Any) -> Any:
        self.num_calls += 1
        return self.line.call(method, *args)

    def kill(self) -> None:
        pass


class Prompts:
    def __init__(self) -> None:
        self._number = 0

    def take(self, num: int) -> list[Prompt]:
        self._number += num
        return [
            Prompt(id=f"data:{number}", token_ids=tuple(range(200)), text="x" * 800)
            for number in range(self._number - num, self._number)
        ]


class InstantScorer:
    max_turns, takes_whole_groups = 1, False

    def __init__(self) -> None:
        self._done: list[Sample] = []

    def submit(self, *samples: Sample) -> None:
        for sample in samples:
            sample.reward = Reward(total=float(sample.index % 2))
        self._done += samples

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        del timeout_s
        done, self._done = self._done, []
        return done

    def cancel(self) -> None:
        self._done.clear()

    @property
    def pending(self) -> int:
        return len(self._done)

    def stats(self) -> ScorerStats:
        return ScorerStats(num_scored=0, num_failed={}, num_pending=0, num_kills=0, p99_s=0.0)


@contextmanager
def engines_of(args: argparse.Namespace, vocabulary: int) -> Generator[list[LineWorker]]:
    hub = Hub("127.0.0.1", num_lines=args.engines)
    workers = [LineWorker(hub, f"engine {number}") for number in range(args.engines)]
    keys = [worker.line.key for worker in workers]
    hosts = [
        get_context("spawn").Process(
            target=host_engines,
            args=(hub.address, keys[number::HOSTS], args.tokens, args.step_s, vocabulary),
        )
        for number in range(HOSTS)
    ]
    for host in hosts:
        host.start()
    try:
        yield workers
    finally:
        hub.close()
        for host in hosts:
            host.join()


def deliver(pool: EnginePool, version: int) -> None:
    """The messages of a delivery of weights, without weights."""
    pool.begin_sync()
    for call in pool.start_receive(version):
        call.result(600.0)
    pool.finish_sync(version)


def measure(args: argparse.Namespace) -> None:
    text = "the sum of seven and twelve is nineteen, so that 3.5 times it makes 66.5\n" * 9
    tokenizer = make_bpe_tokenizer([text], vocab_size=600)
    with engines_of(args, len(tokenizer)) as workers:
        pool = EnginePool(workers, restart=None, timeout_s=600.0, max_restarts=0)
        deliver(pool, 0)
        with rare_garbage_collection():
            measure_steps(args, pool, workers, decoder(tokenizer, ()))


def measure_steps(
    args: argparse.Namespace, pool: EnginePool, workers: list[LineWorker], decode: Decode
) -> None:
    staleness = args.staleness
    size = args.in_flight // GROUP // (1 + staleness)
    collector = Collector(
        engine=pool,
        scorer=InstantScorer(),
        prompts=Prompts(),
        rollout_cfg=RolloutConfig(
            prompts_per_step=size,
            n_samples_per_prompt=GROUP,
            max_completion_tokens=8 * args.tokens,
        ),
        pipeline_cfg=PipelineConfig(max_staleness=staleness),
        decode=decode,
        seed=7,
    )
    process, profile = psutil.Process(), cProfile.Profile() if args.profile else None
    before_mib = process.memory_info().rss / 2**20
    print(
        f"{args.engines} engines, {size * GROUP * (1 + staleness):,} samples in flight, "
        f"{size * GROUP:,} a step, {args.tokens} tokens a sample, {args.step_s:g} s a step; "
        f"{before_mib:.0f} MiB at the start"
    )
    print("step  wall s  cpu s  of which to trainers s  calls  MiB sent  MiB above the start")
    for step in range(1, args.steps + 1):
        start, used = time.monotonic(), time.process_time()
        if profile and step == 1:
            profile.enable()
        called = sum(worker.num_calls for worker in workers)
        groups = collector.collect(step, lambda _finished, _wanted: None)
        sending = time.process_time()
        sent = len(packed(groups)) / 2**20
        sending = time.process_time() - sending
        if profile:
            profile.disable()
        with collector.background():
            time.sleep(max(args.step_s - (time.monotonic() - start), 0.0))
        with collector.pause(step):
            deliver(pool, step)
        wall, used = time.monotonic() - start, time.process_time() - used
        mib = process.memory_info().rss / 2**20 - before_mib
        called = sum(worker.num_calls for worker in workers) - called
        print(
            f"{step:4}  {wall:6.1f}  {used:5.2f}  {sending:22.2f}  {called:5}  {sent:8.1f}"
            f"  {mib:.0f}",
            flush=True,
        )
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=512, help="default: half of 1,024 GPUs")
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sample, on average")
    parser.add_argument("--step-s", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="of the first `collect`")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
