"""What an asynchronous run costs its controller, the first training process: time and memory.

    python benchmarks/control_plane.py --engines 512 --in-flight 10000 --tokens 1024 --step-s 20

Engines are fakes in a few Ray actors, of which each answers for many: what they sample is made up
and takes the time that it would, but all messages are real, as are collector, pool of engines,
tokenizer, and the pickling of a step's groups for the other trainers. Rewards are given at once:
workers compute them. Nothing is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pickle
import pstats
import random
import time
from typing import Any

import psutil
import ray

from hone.config.pipeline import PipelineConfig
from hone.config.rollout import RolloutConfig
from hone.distributed.ray import RayPending
from hone.engine.worker import Polled
from hone.loops.inputs import decoder
from hone.models.tiny import make_bpe_tokenizer
from hone.rewards.scorer import ScorerStats
from hone.rollout.collector import Collector
from hone.rollout.engine_pool import EnginePool
from hone.types import Completion, EngineStats, Prompt, Request, Reward, Sample, StopReason

GROUP = 8
"""Samples of a prompt."""
HOSTS = 2
"""Actors that the fake engines share."""


class FakeEngines:
    """Engines that know when each request will have ended, by a clock alone."""

    def __init__(self, number: int, tokens: int, mean_s: float, vocabulary: int) -> None:
        self._rate = tokens / mean_s
        self._tokens = tokens
        self._ids = random.choices(range(vocabulary), k=8 * tokens)
        self._logprobs = [random.random() for _ in range(8 * tokens)]
        self._running: list[dict[str, tuple[float, int]]] = [{} for _ in range(number)]
        self._beat = self._version = 0

    def submit(self, engine: int, requests: list[Request]) -> None:
        for request in requests:
            draw = random.Random(request.sampling.seed)
            length = min(int(self._tokens * draw.lognormvariate(-0.32, 0.8)) + 1, 8 * self._tokens)
            self._running[engine][request.id] = (time.time() + length / self._rate, length)

    async def poll(self, engine: int, wait_s: float) -> Polled:
        running, until = self._running[engine], time.time() + wait_s
        first = min((end for end, _ in running.values()), default=until)
        await asyncio.sleep(max(min(first, until) - time.time(), 0.0))
        now = time.time()
        ended = [name for name, (end, _) in running.items() if end <= now]
        self._beat += 1
        completions = [self._completion(name, running.pop(name)[1]) for name in ended]
        return Polled(completions, EngineStats(num_running=len(running)), self._beat)

    def _completion(self, name: str, length: int) -> Completion:
        return Completion(
            request_id=name,
            token_ids=self._ids[:length],
            logprobs=self._logprobs[:length],
            weight_versions=[self._version] * length,
            stop_reason=StopReason.EOS,
            text="x" * (3 * length),
        )

    def weight_version(self, engine: int) -> int:
        del engine
        return self._version

    def receive(self, engine: int, version: int, rank: int) -> None:
        del engine, rank
        self._version = version

    async def call(self, engine: int, method: str, args: tuple[Any, ...]) -> Any:
        result = getattr(self, method)(engine, *args)
        return await result if asyncio.iscoroutine(result) else result


class ActorWorker:
    """One of `FakeEngines` in a Ray actor."""

    num_ranks = 1

    def __init__(self, name: str, actor: Any, index: int) -> None:
        self.name, self._actor, self._index = name, actor, index

    def call(self, method: str, /, *args: Any) -> Any:
        return RayPending(self.name, self._actor.call.remote(self._index, method, args), ())

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


def workers_of(args: argparse.Namespace, vocabulary: int) -> list[Any]:
    ray.init(num_cpus=HOSTS, include_dashboard=False, log_to_driver=False)
    each = -(-args.engines // HOSTS)
    hosts = [
        ray.remote(FakeEngines)
        .options(max_concurrency=4 * each)
        .remote(each, args.tokens, args.step_s, vocabulary)
        for _ in range(HOSTS)
    ]
    return [ActorWorker(f"engine {i}", hosts[i % HOSTS], i // HOSTS) for i in range(args.engines)]


def deliver(pool: EnginePool, version: int) -> None:
    """The messages of a delivery of weights, without weights."""
    pool.begin_sync()
    for call in pool.start_receive(version):
        call.result(600.0)
    pool.finish_sync(version)


def measure(args: argparse.Namespace) -> None:
    text = "the sum of seven and twelve is nineteen, so that 3.5 times it makes 66.5\n" * 9
    tokenizer = make_bpe_tokenizer([text], vocab_size=600)
    pool = EnginePool(
        workers_of(args, len(tokenizer)), restart=None, timeout_s=600.0, max_restarts=0
    )
    deliver(pool, 0)
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
        decode=decoder(tokenizer),
        seed=7,
    )
    process, profile = psutil.Process(), cProfile.Profile() if args.profile else None
    before_mib = process.memory_info().rss / 2**20
    print(
        f"{args.engines} engines, {size * GROUP * (1 + staleness):,} samples in flight, "
        f"{size * GROUP:,} a step, {args.tokens} tokens a sample, {args.step_s:g} s a step; "
        f"{before_mib:.0f} MiB at the start"
    )
    print("step  wall s  cpu s  of a core  of which to trainers s  MiB sent  MiB above the start")
    for step in range(1, args.steps + 1):
        start, used = time.monotonic(), time.process_time()
        if profile and step == 1:
            profile.enable()
        groups = collector.collect(step)
        sending = time.process_time()
        sent = len(pickle.dumps(groups)) / 2**20
        sending = time.process_time() - sending
        if profile:
            profile.disable()
        with collector.background():
            time.sleep(max(args.step_s - (time.monotonic() - start), 0.0))
        with collector.pause(step):
            deliver(pool, step)
        wall, used = time.monotonic() - start, time.process_time() - used
        mib = process.memory_info().rss / 2**20 - before_mib
        print(
            f"{step:4}  {wall:6.1f}  {used:5.2f}  {used / wall:9.1%}  {sending:22.2f}  {sent:8.1f}"
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
