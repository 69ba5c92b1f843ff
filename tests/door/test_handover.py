"""Between the event loop and the thread that owns the runner: what is kept of a request."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from hone.door.handover import Handover
from hone.door.refusal import Refusal
from hone.rollout.runner import Ended
from hone.types import Prompt, SamplingParams
from tests.door.served import PATIENCE_S


class Metadata(dict[str, Any]):
    """Of a prompt, so that a test can see when it is gone."""


class Runner:
    """Takes requests, and never answers one."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, prompt: Prompt, sampling: SamplingParams, *, number: int) -> str:
        self.opened.append(f"{prompt.id}/{number}")
        return self.opened[-1]

    def close(self, episode_id: str) -> None:
        self.closed.append(episode_id)

    @property
    def has_requests(self) -> bool:
        return len(self.opened) > len(self.closed)

    def step(self) -> Ended:
        return Ended([], [])


def asked(handover: Handover, number: int, metadata: Metadata) -> asyncio.Task[Any]:
    prompt = Prompt(id="p", token_ids=(1,), text="", metadata=metadata)
    return asyncio.create_task(handover.sample(prompt, SamplingParams(max_tokens=1), number=number))


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_request_that_is_cancelled_before_the_runner_has_it_leaves_nothing() -> None:
    handover, runner = Handover(max_requests=2), Runner()

    async def ask_and_leave() -> weakref.ref[Metadata]:
        metadata = Metadata()
        task = asked(handover, 0, metadata)
        await asyncio.sleep(0)  # the request is in the queue
        await cancel(task)
        return weakref.ref(metadata)

    async def run() -> None:
        for _ in range(3):  # more than may be open at once
            gone = await ask_and_leave()
            await asyncio.sleep(0)  # the loop lets go of the task
            gc.collect()
            assert gone() is None, "nobody steps the runner, and the prompt is kept"
        kept = asked(handover, 7, Metadata())
        await asyncio.sleep(0)
        handover.take(runner)  # type: ignore[arg-type]
        await cancel(kept)

    asyncio.run(run())
    assert runner.opened == ["p/7"]
    handover.take(runner)  # type: ignore[arg-type]
    assert runner.closed == ["p/7"], "the runner had it, and closes it"


def test_a_thread_that_waits_for_requests_gets_them_in_their_order() -> None:
    handover, runner = Handover(max_requests=8), Runner()
    taken = threading.Event()

    def take() -> None:
        while len(runner.opened) < 3:
            handover.take(runner, waits=True)  # type: ignore[arg-type]
        taken.set()

    async def run() -> None:
        thread = threading.Thread(target=take)
        thread.start()
        tasks = [asked(handover, number, Metadata()) for number in range(3)]
        await asyncio.to_thread(taken.wait, PATIENCE_S)
        thread.join(PATIENCE_S)
        for task in tasks:
            await cancel(task)

    asyncio.run(run())
    assert runner.opened == ["p/0", "p/1", "p/2"]
    handover.close()
    handover.take(runner, waits=True)  # type: ignore[arg-type]
    handover.take(runner, waits=True)  # type: ignore[arg-type]
    assert runner.closed == ["p/0", "p/1", "p/2"]


def test_a_handover_that_closes_aborts_what_is_sampled_and_what_was_cancelled_just_now() -> None:
    handover = Handover(max_requests=8)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        left, kept = (asked(handover, number, Metadata()) for number in range(2))
        await asyncio.sleep(0)  # both are in the queue

        class Stepped(Runner):
            def step(self) -> Ended:
                asyncio.run_coroutine_threadsafe(cancel(left), loop).result(PATIENCE_S)
                handover.close()
                return Ended([], [])

        runner = Stepped()
        await asyncio.to_thread(handover.serve, runner)  # type: ignore[arg-type]
        assert runner.closed == runner.opened == ["p/0", "p/1"]
        with pytest.raises(Refusal, match="the server ends"):
            await kept

    asyncio.run(run())


def test_a_handover_that_closes_refuses_what_nobody_takes_any_more() -> None:
    handover = Handover(max_requests=8)

    async def run() -> None:
        early = asked(handover, 0, Metadata())
        await asyncio.sleep(0)  # it is in the queue
        handover.close()
        for task in (early, asked(handover, 1, Metadata())):
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Refusal, match="the server ends"):
                    await task

    asyncio.run(run())


def test_an_engine_that_is_lost_as_it_gets_requests_leaves_none_without_an_answer() -> None:
    handover = Handover(max_requests=8)

    class Lost(Runner):
        def open(self, prompt: Prompt, sampling: SamplingParams, *, number: int) -> str:
            if self.opened:
                raise RuntimeError("the device is gone")
            return super().open(prompt, sampling, number=number)

    async def run() -> None:
        tasks = [asked(handover, number, Metadata()) for number in range(3)]
        await asyncio.sleep(0)  # all are in the queue
        with pytest.raises(RuntimeError, match="the device is gone"):
            handover.serve(Lost())  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE_S):
            for task in tasks:
                with pytest.raises(Refusal, match="the engine is lost"):
                    await task

    asyncio.run(run())
