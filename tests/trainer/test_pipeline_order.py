"""Stages whose device holds up everything until all messages that were begun have ended.

A GPU does so at the first launch of a kernel and when memory is released: any pass may have to wait
for all that its stage has sent and asked for. Threads stand for stages, and rendezvous for NCCL.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hone.distributed.mesh import Axis
from hone.distributed.settings import AxisSizes
from hone.families.stages import most_of_a_round, passes_in_flight, rounds
from hone.trainer import pipeline
from hone.trainer.pipeline import Pass, Pipeline, timetable
from tests.tables import table

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
    """`torch.distributed` between threads. What a rank sends and asks for in a group is a queue, as
    on the stream of a communicator: a message passes when it is the first of both its ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Any, deque[tuple[str, int, torch.Tensor, Work]]] = defaultdict(deque)
        self.own = threading.local()

    def isend(self, tensor, *, group, group_dst):
        return self._begin("sent", group, group_dst, tensor)

    def irecv(self, tensor, *, group, group_src):
        return self._begin("asked", group, group_src, tensor)

    def _begin(self, side, group, other, tensor):
        work = Work()
        self.own.begun.append(work)
        with self._lock:
            self._queues[group, self.own.ranks[group]].append((side, other, tensor, work))
            while any(self._pass_one(*end) for end in [*self._queues]):
                pass
        return work

    def _pass_one(self, group, rank):
        """Whether the first message of a rank has passed."""
        own = self._queues[group, rank]
        if not own or own[0][0] != "sent":
            return False
        theirs = self._queues.get((group, own[0][1]))
        if not theirs or theirs[0][:2] != ("asked", rank):
            return False
        (_, _, source, sent), (_, _, target, asked) = own.popleft(), theirs.popleft()
        target.copy_(source)
        sent.ended.set()
        asked.ended.set()
        return True

    def wait_for_device(self):
        for work in self.own.begun:
            work.wait()


def on_threads(num_stages, virtual_stages, work):
    """What `work(pipeline, run, wait_for_device)` returns in each stage, and the factors by which
    groups of layers multiply what enters them."""
    wires = Wires()
    weights = [torch.full((), 2.0, requires_grad=True) for _ in range(num_stages * virtual_stages)]

    def stage(rank: int) -> Any:
        last = num_stages - 1
        ranks = {"ahead": rank, "back": rank}
        if rank in {0, last}:
            ranks |= dict.fromkeys(("wrap", "wrap back"), int(rank == last))
        wires.own.ranks, wires.own.begun = ranks, []
        axes: dict[str, Any] = {
            name: Axis(rank, num_stages, name.replace("_", " "))  # type: ignore[arg-type]
            for name in ("ahead", "back", "wrap", "wrap_back")
        }
        mesh: Any = SimpleNamespace(
            pipeline=axes["ahead"],
            pipeline_back=axes["back"],
            pipeline_wrap=axes["wrap"],
            pipeline_wrap_back=axes["wrap_back"],
            sizes=AxisSizes(pipeline=num_stages, virtual_stages=virtual_stages),
            device=torch.device("cpu"),
        )
        model: Any = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(hidden_size=WIDTH))

        def run(batch, entered, group):
            wires.wait_for_device()
            first = torch.full((1, 1, WIDTH), float(batch.number))
            return (first if entered is None else entered) * weights[group * num_stages + rank]

        return work(Pipeline(model, mesh), run, wires.wait_for_device)

    with (
        patch.object(pipeline, "dist", wires),
        patch.object(pipeline, "share_of_layers", lambda batch, mesh: 1),
        ThreadPoolExecutor(num_stages) as threads,
    ):
        return list(threads.map(stage, range(num_stages))), weights


def numbered(num_batches):
    return [SimpleNamespace(number=number) for number in range(num_batches)]


def run_step(num_stages: int, num_batches: int, virtual_stages: int = 1) -> list[Any]:
    """An optimizer step of groups that each double what enters: the gradient of every factor."""
    is_last = [[False] * (num_batches - 1) + [True]] * virtual_stages

    def step(stage, run, wait_for_device):
        told = [[] for _ in range(virtual_stages)]

        def learn(left, batch):
            wait_for_device()
            left.sum().backward()

        def begin_backward(*, is_last, group):
            wait_for_device()
            told[group].append(is_last)

        batches = numbered(num_batches)
        assert stage.forward_backward(batches, run, learn, begin_backward) == num_batches
        return told

    told, weights = on_threads(num_stages, virtual_stages, step)
    assert told == [is_last] * num_stages
    return [weight.grad for weight in weights]


SIZES = [
    *((stages, 1) for stages in (1, 2, 3, 4, 5)),
    *((stages, groups) for stages in (2, 3, 4) for groups in (2, 3)),
]


@table("num_batches", range(1, 10))
@table("num_stages, virtual_stages", SIZES)
def test_no_stage_waits_for_what_waits_for_it(num_stages, virtual_stages, num_batches):
    inputs = sum(range(num_batches)) * WIDTH
    for gradient in run_step(num_stages, num_batches, virtual_stages):
        assert float(gradient) == inputs * 2.0 ** (num_stages * virtual_stages - 1)


@table("num_stages, virtual_stages", SIZES)
def test_scores_come_from_the_last_stage_in_order(num_stages, virtual_stages):
    def score(stage, run, _):
        found, batches = [], numbered(9)
        with torch.no_grad():
            for start in range(0, 9, stage.batches_together):
                found += stage.forward(batches[start : start + stage.batches_together], run)
        stage.finish()
        return found

    (*others, last), _ = on_threads(num_stages, virtual_stages, score)
    assert others == [[None] * 9] * (num_stages - 1)
    factor = 2.0 ** (num_stages * virtual_stages)
    assert [float(found[0, 0, 0]) for found in last] == [factor * number for number in range(9)]


@table("num_batches", [*range(1, 14), 40])
@table("num_stages, virtual_stages", SIZES)
def test_a_timetable_has_every_pass_after_what_it_needs(num_stages, virtual_stages, num_batches):
    """With as many micro-batches as stages no time is lost but that of the first and the last."""
    times = timetable(num_stages, virtual_stages, num_batches)
    when = {each: time for time, now in enumerate(times) for each in now if each is not None}
    last = num_stages * virtual_stages - 1
    assert when.keys() == {
        Pass(group, batch, is_backward)
        for group in range(last + 1)
        for batch in range(num_batches)
        for is_backward in (False, True)
    }
    for each, time in when.items():
        assert times[time][each.group % num_stages] == each
        assert each.before not in when or when[each.before] < time
        if each.is_backward:
            assert when[each._replace(is_backward=False)] < time
    if num_batches >= num_stages:
        assert len(times) == 2 * num_batches * virtual_stages + 2 * (num_stages - 1)
    for stage in range(num_stages):
        own = [now[stage] for now in times if now[stage] is not None]
        ahead = max(accumulate(-1 if each.is_backward else 1 for each in own if each is not None))
        sizes = stage, num_stages, virtual_stages
        assert ahead == passes_in_flight(*sizes, num_batches=num_batches)


def test_passes_of_S_micro_batches_are_in_flight_as_in_the_paper():
    assert passes_in_flight(0, 4, 1, num_batches=40) == 4
    assert passes_in_flight(0, 4, 2, num_batches=40) == 2 * 3 + 4 + 1
    assert passes_in_flight(3, 4, 2, num_batches=40) == 4 + 1
    assert passes_in_flight(0, 4, 2, num_batches=2) == 4
    assert [len(each) for each in rounds(9, 4)] == [5, 4]
    assert [len(each) for each in rounds(3, 4)] == [3]


def test_planted_gradients_that_are_asked_for_a_pass_ahead_are_seen(monkeypatch):
    exchange, num_batches = Pipeline._exchange, 3

    def exchange_ahead(self, now, leaving, batches):
        """What leaves now, and what comes at the next time."""
        times = self._timetable(num_batches, with_backward=True)
        number = self.__dict__.get("number", 0)
        self.number = number + 1
        exchange(
            self,
            [each if s == self._stage else None for s, each in enumerate(now)],
            leaving,
            batches,
        )
        for coming in times[number + bool(number) : number + 2]:
            others = [None if s == self._stage else each for s, each in enumerate(coming)]
            exchange(self, others, None, batches)

    monkeypatch.setattr(Pipeline, "_exchange", exchange_ahead)
    run_step(1, num_batches)
    monkeypatch.setattr("tests.trainer.test_pipeline_order.PATIENCE_S", STUCK_S)
    for virtual_stages in (1, 2):
        with pytest.raises(TimeoutError):
            run_step(2, num_batches, virtual_stages)


def test_planted_one_group_for_both_ways_round_is_seen(monkeypatch):
    """Of two processes that both send hidden states to each other."""
    link = Pipeline._link

    def one_group(self, done, other):
        group, _ = link(self, done, other)
        return str(group).replace("wrap back", "back").replace("wrap", "ahead"), other

    monkeypatch.setattr(Pipeline, "_link", one_group)
    run_step(2, 6)
    monkeypatch.setattr("tests.trainer.test_pipeline_order.PATIENCE_S", STUCK_S)
    with pytest.raises(TimeoutError):
        run_step(2, 6, 2)


def test_no_number_of_micro_batches_has_more_in_flight_than_is_planned():
    for stages, groups in product(range(1, 7), range(1, 4)):
        for stage in range(stages):
            flights = [
                passes_in_flight(stage, stages, groups, num_batches=number)
                for number in range(1, 60)
            ]
            planned = most_of_a_round(stages)
            found = passes_in_flight(stage, stages, groups, num_batches=planned)
            assert found == max(flights), (stages, groups, stage)
