"""Stages whose device holds up everything until all messages that were begun have ended.

A GPU does so at the first launch of a kernel and when memory is released: any pass may have to wait
for all that its stage has sent and asked for. Threads stand for stages, and rendezvous for NCCL.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hone.distributed.mesh import Axis
from hone.trainer import pipeline
from hone.trainer.pipeline import Pipeline

WIDTH = 2
PATIENCE_S = 60.0
STUCK_S = 0.5


@dataclass
class Work:
    """Ends when the other side has begun the same message."""

    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        if not self.ended.wait(PATIENCE_S):
            raise TimeoutError


class Wires:
    """`torch.distributed` between threads: messages of a group between two ranks, in order, and
    those of a rank in a group one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[Any, list[tuple[torch.Tensor, Work]]] = {}
        self.own = threading.local()

    def isend(self, tensor, *, group, group_dst):
        return self._begin("sent", "asked", (group, self.own.rank, group_dst), tensor)

    def irecv(self, tensor, *, group, group_src):
        return self._begin("asked", "sent", (group, group_src, self.own.rank), tensor)

    def _begin(self, side, other, wire, tensor):
        work = Work()
        self.own.begun.append(work)
        with self._lock:
            if waiting := self._begun.get((other, wire)):
                theirs, their_work = waiting.pop(0)
                source, target = (tensor, theirs) if side == "sent" else (theirs, tensor)
                target.copy_(source)
                their_work.ended.set()
                work.ended.set()
            else:
                self._begun.setdefault((side, wire), []).append((tensor, work))
        return work

    def wait_for_device(self):
        for work in self.own.begun:
            work.wait()


def run_step(num_stages: int, num_batches: int) -> list[Any]:
    """An optimizer step of stages that each double what enters: the gradient of every factor."""
    wires = Wires()
    batches = [SimpleNamespace(number=number) for number in range(num_batches)]
    weights = [torch.full((), 2.0, requires_grad=True) for _ in range(num_stages)]

    def stage(rank: int) -> int:
        wires.own.rank, wires.own.begun = rank, []
        mesh: Any = SimpleNamespace(
            pipeline=Axis(rank, num_stages, "ahead"),  # type: ignore[arg-type]
            pipeline_back=Axis(rank, num_stages, "back"),  # type: ignore[arg-type]
            pipeline_ends=Axis(),
            device=torch.device("cpu"),
        )
        model: Any = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(hidden_size=WIDTH))

        def run(batch, entered):
            wires.wait_for_device()
            first = torch.full((1, 1, WIDTH), float(batch.number))
            return (first if entered is None else entered) * weights[rank]

        def learn(left, batch):
            wires.wait_for_device()
            left.sum().backward()

        def begin_backward(*, is_last):
            wires.wait_for_device()

        return Pipeline(model, mesh).forward_backward(batches, run, learn, begin_backward)

    with (
        patch.object(pipeline, "dist", wires),
        patch.object(pipeline, "share_of_layers", lambda batch, mesh: 1),
        ThreadPoolExecutor(num_stages) as threads,
    ):
        counts = list(threads.map(stage, range(num_stages)))
    assert counts == [num_batches] * num_stages
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("num_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_no_stage_waits_for_what_waits_for_it(num_stages, num_batches):
    inputs = sum(range(num_batches)) * WIDTH
    for gradient in run_step(num_stages, num_batches):
        assert float(gradient) == inputs * 2.0 ** (num_stages - 1)


def test_planted_gradients_that_are_asked_for_a_pass_ahead_are_seen(monkeypatch):
    monkeypatch.setattr("tests.trainer.test_pipeline_order.PATIENCE_S", STUCK_S)
    expect, num_batches = Pipeline._expect_gradient, 3

    def expect_ahead(self, batch):
        asked = self.__dict__.setdefault("asked", [])
        while len(asked) < min(num_batches, self.__dict__.get("given", 0) + 2):
            asked.append(expect(self, batch))
        self.given = self.__dict__.get("given", 0) + 1
        return asked[self.given - 1]

    monkeypatch.setattr(Pipeline, "_expect_gradient", expect_ahead)
    run_step(1, num_batches)
    with pytest.raises(TimeoutError):
        run_step(2, num_batches)
