"""Several engines as one: the same samples, and none lost or returned twice, whatever fails."""

from __future__ import annotations

import copy
import logging
import queue
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hone.config.run import EvaluationConfig
from hone.distributed import pool
from hone.distributed.mesh import Mesh
from hone.distributed.pool import WorkersLostError
from hone.engine.worker import EngineWorker, Polled
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout import engine_pool
from hone.rollout.engine_pool import EnginePool
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.types import (
    Completion,
    EngineLostError,
    EngineStats,
    FailureKind,
    Request,
    SamplingParams,
    StopReason,
)
from hone.weights.broadcast import BroadcastSync
from hone.weights.receiver import WeightReceiver
from tests.engine.conftest import make_models  # noqa: F401  a fixture
from tests.engine.test_generation import assert_equal, make_requests, run
from tests.engine.test_sync import change_weights, push
from tests.rollout.fakes import FakeEngine, draw, prompt

DEADLINE_S = 60.0
"""For what should have happened long before, were the machine not busy."""


class Toy(FakeEngine):
    """Token t of a request is a function of its seed and t; one a step."""

    def __init__(self, *, step_s=0.0):
        super().__init__(length=length)
        self.step_s = step_s
        self.is_held = False

    def submit(self, requests):
        for request in requests:
            if request.sampling.max_tokens > 99:
                raise ValueError(f"request {request.id!r} can never fit")
        super().submit(requests)

    def step(self):
        time.sleep(self.step_s)
        if self.is_held:
            time.sleep(0.002)
            return []
        return super().step()

    def abort(self, names):
        return super().abort([name for name in names if name in self._running])

    def receive(self, spec, rank):
        del rank
        self.weight_version = spec


def token(request, position):
    return draw(request.sampling.seed, position) % 50


def length(request):
    return 1 + draw("length", request.sampling.seed) % request.sampling.max_tokens


def expected(request):
    return [token(request, position) for position in range(length(request))]


def make_group(number, *, size=3, max_tokens=8):
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        Request(
            id=f"step-{number}/{index}",
            prompt_ids=(1,) * (1 + number % 5),
            sampling=replace(sampling, seed=draw(number, index)),
        )
        for index in range(size)
    ]


def sync(group, version, *, timeout_s=DEADLINE_S):
    """What a `BroadcastSync` and its loop do: repeat a delivery in which an engine was lost."""
    errors = []
    while len(errors) < 20:
        group.begin_sync()
        calls = group.start_receive(version)
        assert len(calls) == len(group.engine_ranks)
        try:
            for call in calls:
                call.result(timeout_s)
        except (RuntimeError, TimeoutError) as error:
            errors.append(error)
        else:
            group.finish_sync(version)
            return errors
    raise AssertionError(errors)


def drain(group, *, version=0):
    """Step to the end: completions by id. Weights are delivered where they must be."""
    done, deadline = {}, time.monotonic() + DEADLINE_S
    while group.has_unfinished:
        assert time.monotonic() < deadline, f"{len(done)} done"
        if group.needs_weights:
            sync(group, version)
        for completion in group.step():
            assert completion.request_id not in done, "returned twice"
            done[completion.request_id] = completion
    return done


def check(done, requests):
    assert done.keys() == {request.id for request in requests}
    for request in requests:
        assert done[request.id].token_ids == expected(request)


def wait_for_starts(group):
    """Else those that are still starting are left out of a delivery."""
    for member in group._members:
        if member.starting is not None:
            member.starting.result(DEADLINE_S)


@pytest.fixture
def local():
    """Makes groups of hosts in threads, and ends them."""
    hosts = []

    def handle(engine, index, receive):
        hosts.append(EngineWorker(engine, receive, name=f"engine {index}"))
        return hosts[-1]

    def make(engines, *, spare=Toy, wrap=lambda handle, index: handle, **options):
        options = {"timeout_s": DEADLINE_S, "max_restarts": 3, **options}
        handles = [
            wrap(handle(engine, index, engine.receive), index)
            for index, engine in enumerate(engines)
        ]

        def restart(index):
            engine = spare()
            return handle(engine, index, engine.receive)

        return EnginePool(handles, restart=restart, **options)

    yield make
    for host in hosts:
        host.kill()


# ---------------------------------------------------------------- engines that load their weights


class Starting:
    """Hands calls on to `handle`, and answers the first one once it may."""

    def __init__(self, handle):
        self._handle, self.name, self.num_ranks = handle, handle.name, 1
        self.may_start = threading.Event()
        self.kill = handle.kill

    def call(self, method, *args):
        if method != "weight_version":
            return self._handle.call(method, *args)
        return self

    def result(self, timeout_s):
        if not self.may_start.wait(timeout_s):
            raise TimeoutError
        return 0


def held_starts():
    """Workers that have not started, and what makes one of each handle."""
    started = []

    def starting(handle, index):
        del index
        started.append(Starting(handle))
        return started[-1]

    return started, starting


def test_an_engine_that_loads_its_weights_works_once_it_has_started(local):
    """Without a delivery; a replacement too, with what the lost one had."""
    started, starting = held_starts()
    engines = [Toy(), Toy()]
    engines[1].is_held = True
    group = local(engines, wrap=starting, load_weights=True)
    requests = [request for number in range(4) for request in make_group(number)]
    group.submit(requests)
    assert group.needs_weights
    assert not group.step()
    assert not any(engine.submitted for engine in engines)
    for one in started:
        one.may_start.set()
    done = {completion.request_id: completion for completion in group.step()}
    assert group._members[1].tasks
    started[1].kill()  # the one that holds its requests
    check(done | drain_loaded(group), requests)
    assert group.stats().num_lost == 1


def test_an_engine_that_comes_late_finds_work_that_the_others_had_no_room_for(local):
    """Else a replacement would be idle to the end where all requests are there from the start."""
    started, starting = held_starts()
    engines = [Toy(), Toy()]
    engines[0].is_held = True
    group = local(engines, wrap=starting, load_weights=True, max_requests=2)
    requests = [request for number in range(4) for request in make_group(number)]
    group.submit(requests)
    started[0].may_start.set()
    while not group._members[0].tasks:
        assert not group.step()
    assert len(group._members[0].tasks) < len(requests)
    started[1].may_start.set()
    done = {}
    while not engines[1].submitted:  # a step may give it work and return what came of it
        done |= {completion.request_id: completion for completion in group.step()}
    engines[0].is_held = False
    check(done | drain_loaded(group), requests)
    assert all(engine.submitted for engine in engines)


def drain_loaded(group):
    """Step to the end, where no weights are delivered: completions by id."""
    done, deadline = {}, time.monotonic() + DEADLINE_S
    while group.has_unfinished:
        assert time.monotonic() < deadline, f"{len(done)} done"
        done |= {completion.request_id: completion for completion in group.step()}
    return done


# ---------------------------------------------------------------- when engines are at work


class Timed(Toy):
    """Says how long it has been inside `step`."""

    busy_s = 0.0

    def step(self):
        start = time.perf_counter()
        done = super().step()
        self.busy_s += time.perf_counter() - start
        return done

    def stats(self):
        return replace(super().stats(), busy_s=self.busy_s)


def test_the_pool_knows_when_each_engine_was_at_work(local):
    """Two pieces of work with a pause between, of one engine; the other has none."""
    engines = [Timed(step_s=0.02), Timed(step_s=0.02)]
    group = local(engines)
    sync(group, 1)
    begin = time.time()
    for number in range(2):
        group.submit(make_group(number, size=1))
        drain(group, version=1)
        if not number:
            time.sleep(0.3)
    end = time.time()
    busy = group.take_busy()
    assert busy.keys() == {"engine 0", "engine 1"}
    spans = sorted(span for spans in busy.values() for span in spans)
    total, worked = sum(stop - start for start, stop in spans), sum(x.busy_s for x in engines)
    assert 0.95 * worked <= total < end - begin - 0.25, "neither less, nor the pause with it"
    assert begin <= spans[0][0]
    assert spans[-1][1] <= end
    pauses = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    assert max(pauses) >= 0.25, "work lies where it was, not spread over the pause"
    assert not any(group.take_busy().values()), "each is told once"


# ---------------------------------------------------------------- the same samples


class Real:
    """An embedded engine over weights of its own, whose delivery is a change that all make."""

    def __init__(self, models):
        self.model = copy.deepcopy(models.hone)
        self.engine = replace(models, hone=self.model).engine()
        self.max_steps = 10**6

    def step(self):
        if self.engine.stats().num_steps < self.max_steps:
            return self.engine.step()
        time.sleep(0.002)
        return []

    def receive(self, spec, rank):
        del rank
        if spec:
            change_weights(self.model, seed=spec)
        push(self.engine, spec)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def in_groups(requests):
    return [replace(r, id=f"{int(r.id) // 2}/{int(r.id) % 2}") for r in requests]


@pytest.fixture
def models(make_models):  # noqa: F811
    return make_models("qwen3")


@pytest.mark.parametrize("num_engines", [1, 3])
def test_samples_what_one_engine_samples(models, local, num_engines):
    requests = in_groups(make_requests())
    group = local([Real(models) for _ in range(num_engines)])
    assert sync(group, 0) == []
    for _ in range(2):
        group.submit(requests)
        assert_equal(drain(group), run(models.engine(), requests))
    group.close()


def test_R9_weights_change_under_requests_in_flight(models, local):
    """Each request goes on as it would alone, from the token at which weights have changed."""
    requests = in_groups(make_requests())
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=40)) for r in requests]
    engines = [Real(models) for _ in range(3)]
    for engine in engines:
        engine.max_steps = 5
    group = local(engines)
    sync(group, 0)
    group.submit(requests)
    while not all(engine.stats().num_steps == 5 for engine in engines):
        assert group.step() == []
    assert sync(group, 3) == []
    assert group.weight_version == 3
    for engine in engines:
        engine.max_steps = 10**6
    done = drain(group)
    for request in requests:
        versions = done[request.id].weight_versions
        num_old = versions.count(0)
        assert versions == [0] * num_old + [3] * (40 - num_old)
        alone = Real(models)
        alone.submit([request])
        for _ in range(num_old):
            alone.step()
        alone.receive(3, 0)
        assert_equal({request.id: done[request.id]}, run(alone, []))
        assert num_old == 5


class Apart:
    """An embedded engine whose weights a `BroadcastSync` brings."""

    def __init__(self, models):
        self.model = copy.deepcopy(models.hone)
        self.engine = replace(models, hone=self.model).engine()
        receiver = WeightReceiver(self.engine, torch.device("cpu"))
        self.receive, self.close = receiver.receive, receiver.close

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_R2_takes_weights_from_a_trainer_and_again_after_a_loss(models, local, caplog):
    trainer = Real(models)
    change_weights(trainer.model, seed=9)
    engines = [Apart(models) for _ in range(2)]

    def spare():
        engines.append(Apart(models))
        return engines[-1]

    group = local(engines[:2], spare=spare)
    weights = BroadcastSync(
        trainer, Mesh.alone(torch.device("cpu")), group, bucket_bytes=1 << 12, timeout_s=DEADLINE_S
    )
    requests = in_groups(make_requests())
    for version in range(1, 4):
        if version == 2:
            group._members[0].worker.kill()
            with pytest.raises(EngineLostError, match="engine 0"):
                weights.push(version)
            assert len(group.engine_ranks) == 2
        weights.push(version)
        assert group.weight_version == version
        assert not group.needs_weights
        group.submit(requests)
        done = drain(group)
        assert all(set(c.weight_versions) == {version} for c in done.values())
        expected_engine = replace(models, hone=trainer.model).engine()
        push(expected_engine, version)
        assert_equal(done, run(expected_engine, requests))
        change_weights(trainer.model, seed=version)
    assert len(engines) == 3
    weights.close()
    for engine in engines:
        engine.close()


# ---------------------------------------------------------------- dealing


def test_a_group_goes_to_one_engine_and_the_least_busy_gets_the_next(local):
    engines = [Toy() for _ in range(2)]
    group = local(engines)
    sync(group, 1)
    for engine in engines:
        engine.is_held = True
    sizes = [9, 1, 1, 30, 2]
    for number, max_tokens in enumerate(sizes):
        group.submit(make_group(number, max_tokens=max_tokens))
    given = [{r.partition("/")[0] for r in member.tasks} for member in group._members]
    # Tokens of a group are 3 x (1 + number + max_tokens): 30; 9; 12 -> 21; 102 -> 123; 21 -> 51.
    assert given == [{"step-0", "step-4"}, {"step-1", "step-2", "step-3"}]
    assert [member.load for member in group._members] == [51, 123]
    for engine in engines:
        engine.is_held = False
    check(drain(group), [r for n, size in enumerate(sizes) for r in make_group(n, max_tokens=size)])
    assert [member.load for member in group._members] == [0, 0]


def test_R12_a_poisoned_prompt_fails_alone(local):
    """It reaches the caller as a failed sample, which nobody scores."""
    group = local([Toy(), Toy()])
    sync(group, 1)
    good, bad = make_group(0), make_group(1, max_tokens=100)
    group.submit(good)
    group.submit(bad)
    done = drain(group)
    assert all("can never fit" in done.pop(request.id).error for request in bad)
    check(done, good)

    cfg = EvaluationConfig(n_samples_per_prompt=2, max_completion_tokens=100)
    with Scorer(RewardConfig(), max_completion_tokens=100) as scorer:
        samples = evaluate(
            [prompt(1)],
            engine=group,
            scorer=scorer,
            cfg=cfg,
            episodes=Episodes(decode=str, run_seed=0, purpose="eval"),
        )
        assert scorer.stats().num_failed == {FailureKind.ENGINE: 2}
    assert [(s.failure, s.valid, s.reward) for s in samples] == [
        (FailureKind.ENGINE, False, None)
    ] * 2
    assert "can never fit" in samples[0].failure_detail


class Poisoned(Toy):
    """Dies in the first step of a certain request."""

    def step(self):
        if "step-1/0" in self._running:
            raise ZeroDivisionError("poison")
        return super().step()


def test_R12_a_prompt_that_kills_engines_fails_in_the_end(local):
    """Its group is sampled together, so the samples beside it fail with it."""
    group = local([Poisoned(), Poisoned()], spare=Poisoned)
    sync(group, 1)
    good, bad = make_group(0), make_group(1)
    group.submit(good)
    done = drain(group)
    group.submit(bad)
    while group.has_unfinished:
        if group.needs_weights:
            wait_for_starts(group)
            sync(group, 1)
        done |= {c.request_id: c for c in group.step()}
    failed = [done.pop(request.id) for request in bad]
    assert all(c.stop_reason is StopReason.ERROR and "poison" in c.error for c in failed)
    check(done, good)


def test_abort_returns_partial_rollouts_that_go_on_elsewhere(local):
    group = local([Toy(step_s=0.002) for _ in range(2)])
    sync(group, 1)
    requests = [r for number in range(4) for r in make_group(number, max_tokens=60)]
    group.submit(requests)
    done = {}
    while len(done) < 4:
        done |= {c.request_id: c for c in group.step()}
    aborted = {c.request_id: c for c in group.abort([r.id for r in requests])}
    assert all(c.stop_reason is StopReason.ABORT for c in aborted.values())
    done |= drain(group)  # what had just finished
    assert not done.keys() & aborted.keys()
    assert any(c.token_ids for c in aborted.values())
    group.submit([replace(r, resumed=aborted[r.id]) for r in requests if r.id in aborted])
    check(done | drain(group), requests)


def test_requests_wait_for_weights_and_can_be_withdrawn_meanwhile(local, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(engine_pool, "monotonic", clock.monotonic)
    group = local([Toy()])
    first = make_group(0)
    partial = Completion(
        request_id="step-1/0",
        token_ids=expected(make_group(1)[0])[:0],
        logprobs=[],
        weight_versions=[],
        stop_reason=StopReason.ABORT,
    )
    group.submit([*first, replace(make_group(1)[0], resumed=partial)])
    assert group.needs_weights
    assert group.has_unfinished
    assert group.step() == []
    assert group.abort([first[0].id, "step-1/0", "unknown"]) == [
        replace(partial, request_id=first[0].id),
        partial,
    ]
    for _ in range(10):  # who could deliver may be about other things for long
        clock.sleep(DEADLINE_S)
        assert group.step() == []
    sync(group, 1)
    check(drain(group), first[1:])


def test_no_step_between_begin_and_finish_of_a_sync(local):
    group = local([Toy()])
    group.begin_sync()
    with pytest.raises(RuntimeError, match="repeat a failed delivery"):
        group.step()
    sync(group, 1)
    assert group.step() == []


# ---------------------------------------------------------------- faults


class Hung:
    """Never answers."""

    waited_s = 0.0

    def result(self, timeout_s):
        self.waited_s += timeout_s
        time.sleep(timeout_s)
        raise TimeoutError

    def add_done_callback(self, fn):
        """Never calls either."""


@dataclass
class Faulty:
    """A handle to an engine in which one thing goes wrong once `is_armed`."""

    handle: EngineWorker
    phase: str
    kind: str
    engine: Toy
    is_armed: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    is_dead: bool = False

    def __post_init__(self):
        self.name, self.num_ranks = self.handle.name, 1
        if self.kind == "kill":
            return
        name = "stats" if self.phase == "poll" else self.phase
        right = getattr(self.engine, name)

        def wrong(*args):
            if self.is_armed.is_set():
                if self.kind == "raise":
                    self.is_armed.clear()
                    raise RuntimeError("planted")
                self.let_go.wait(DEADLINE_S)
            return right(*args)

        setattr(self.engine, name, wrong)
        if name == "receive":
            self.handle._receive_weights = wrong
        if name == "abort":
            self.handle._commands[name] = wrong

    def call(self, method, *args):
        if self.kind == "kill" and self.phase == method and self.is_armed.is_set():
            self.is_dead = True
            self.handle.kill()
        if self.is_dead:
            raise EngineLostError(self.name, "killed by a planted signal 9")
        if self.kind == "hang" and self.phase == method == "poll" and self.is_armed.is_set():
            return Hung()
        return self.handle.call(method, *args)

    def kill(self):
        self.is_dead = True
        self.handle.kill()


CAUSES = {
    "raise": "RuntimeError: planted",
    "kill": "killed by a planted signal 9",
    "hang": "no progress for|no answer to|hangs in a delivery",
}


FAULTS = [
    (phase, kind)
    for phase in ("submit", "poll", "abort", "receive")
    for kind in ("raise", "kill", "hang")
]
FAULTS += [("step", "raise"), ("step", "hang")]


@pytest.mark.parametrize(("phase", "kind"), FAULTS)
def test_R11_an_engine_fails_in_a_phase(local, caplog, phase, kind):
    faulty = []

    def wrap(handle, index):
        if index:
            return handle
        faulty.append(Faulty(handle, phase, kind, engines[0]))
        return faulty[0]

    engines = [Toy(step_s=0.001) for _ in range(3)]
    timeout_s = 2.0 if kind == "hang" else DEADLINE_S
    group = local(engines, wrap=wrap, timeout_s=timeout_s, max_restarts=9)
    (fault,) = faulty
    started = time.monotonic()
    refusals = []
    with caplog.at_level(logging.WARNING):
        sync(group, 1)
        requests = [r for number in range(9) for r in make_group(number, max_tokens=20)]
        if phase == "submit":
            fault.is_armed.set()
        group.submit(requests)
        done = {}
        while len(done) < 3:
            done |= {c.request_id: c for c in group.step()}
        fault.is_armed.set()
        if phase == "receive":
            refusals += sync(group, 2, timeout_s=timeout_s)
        aborted = {}
        if phase == "abort":
            left = [r for r in requests if r.id not in done]
            aborted = {c.request_id: c for c in group.abort([r.id for r in left])}
            resumed = {n: c if c.token_ids else None for n, c in aborted.items()}
            group.submit([replace(r, resumed=resumed[r.id]) for r in left if r.id in resumed])
        done |= drain(group, version=2)
        check(done, requests)
    assert time.monotonic() - started < DEADLINE_S
    fault.let_go.set()
    check_told(caplog, phase, kind, refusals)
    # All engines work again once weights have come.
    fault.is_armed.clear()
    wait_for_starts(group)
    sync(group, 3)
    assert all(member.is_ready for member in group._members)
    group.submit(requests)
    check(drain(group), requests)


def check_told(caplog, phase, kind, refusals):
    """A refusal is raised; everything else is a loss, which a warning names."""
    lost = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    if kind == "raise" and phase == "receive":
        assert lost == []
        assert all(str(error) == "planted" for error in refusals)
        return
    assert len(lost) == 1 or kind == "hang"  # on a busy machine others may seem to
    assert lost[0].startswith("engine 0 is lost and replaced (restart 1 of at most 9)")
    assert any(cause in lost[0] for cause in CAUSES[kind].split("|"))


def test_a_loss_that_is_heard_of_twice_costs_one_restart(local):
    group = local([Toy(), Toy()], max_restarts=1)
    sync(group, 1)
    requests = [r for number in range(2) for r in make_group(number)]
    group.submit(requests)
    group.begin_sync()
    group._members[0].worker.kill()
    group.start_receive(2)
    group.abort([])
    group.begin_sync()
    fresh = group._members[0]
    wait_for_starts(group)
    sync(group, 2)
    assert group._members[0] is fresh
    check(drain(group), requests)


def test_R11_too_many_losses_end_the_run_and_name_engine_and_cause(local):
    class Fragile(Toy):
        def step(self):
            raise ZeroDivisionError("worn out")

    group = local([Fragile()], spare=Fragile, max_restarts=2)
    events = []
    group.report_to(lambda kind, **fields: events.append((kind, fields)))
    group.submit(make_group(0))
    with pytest.raises(WorkersLostError, match=r"engine 0 is lost, and 2 restarts.*worn out"):
        drain(group)
    assert group.has_unfinished
    assert [(kind, told["name"], told["restart"]) for kind, told in events] == [
        ("engine_lost", "engine 0", restart) for restart in (1, 2, None)
    ]
    assert all("worn out" in told["cause"] for _, told in events)
    with pytest.raises(WorkersLostError):
        drain(group)


def test_R11_where_nothing_can_be_started_anew_the_run_ends(local):
    """At the restart, and where the start is waited for: `Gone` is what Ray's calls do then."""

    class Gone:
        name, num_ranks = "engine 0", 1

        def call(self, method, *args):
            return self

        def result(self, timeout_s):
            raise WorkersLostError("the node is gone")

        def kill(self):
            pass

    def refuse(index):
        raise WorkersLostError("the node is gone")

    for restart in (lambda index: Gone(), refuse):
        group = local([Toy()])
        sync(group, 1)
        group._restart = restart
        group.submit(make_group(0))
        group._members[0].worker.kill()
        with pytest.raises(WorkersLostError, match="the node is gone"):
            drain(group)
        group.close()


def test_a_restarted_engine_gets_nothing_before_the_next_delivery(local):
    engines = [Toy(step_s=0.001), Toy(step_s=0.001)]
    group = local(engines)
    sync(group, 1)
    requests = [r for number in range(6) for r in make_group(number)]
    group.submit(requests)
    group._members[0].worker.kill()
    check(drain(group), requests)
    assert not group.needs_weights
    assert [member.is_ready for member in group._members] == [False, True]
    group.submit(requests)
    assert not group._members[0].tasks
    check(drain(group), requests)
    wait_for_starts(group)
    sync(group, 2)
    group.submit(requests)
    assert group._members[0].tasks
    assert all(2 in c.weight_versions for c in drain(group).values())


def test_one_that_is_slow_to_start_does_not_hold_a_delivery_up(local):
    """Unless nobody else has weights."""
    group = local([Toy(), Toy()])
    wait_for_starts(group)
    group._members[0].starting = hung = Hung()
    group._members[1].is_ready = True
    sync(group, 1)
    assert hung.waited_s < 1.0
    assert group.engine_ranks == {"engine 1": 1}


def test_counters_go_on_over_a_loss(local):
    group = local([Toy(), Toy()])
    sync(group, 1)
    totals = []
    for number in range(6):
        group.submit([r for n in range(4) for r in make_group(10 * number + n)])
        drain(group)
        totals.append(group.stats().num_steps)
        if number == 2:
            group._members[0].worker.kill()
    assert totals == sorted(totals)
    assert group.stats().num_running == 0
    assert group.stats().num_lost == 1


def test_statistics_are_those_of_all_engines(local):
    """However they rise and fall, beside sums over all of them."""
    draw, group = random.Random(3), local([Toy() for _ in range(5)])
    sync(group, 1)
    for _ in range(300):
        member = draw.choice(group._members)
        counts = {name: draw.randrange(100) for name in engine_pool._COUNTED}
        usage = draw.choice([0.0, 0.25, 0.5, 0.5, 1.0])
        group._count(member, EngineStats(kv_cache_usage=usage, **counts))
        stats, each = group.stats(), [member.stats for member in group._members]
        for name in engine_pool._COUNTED:
            assert getattr(stats, name) == sum(getattr(one, name) for one in each)
        assert stats.kv_cache_usage == max(one.kv_cache_usage for one in each)


def test_an_engine_that_makes_progress_is_not_lost(local, monkeypatch):
    """A step takes 0.15 s of a clock that goes on with the engine's steps."""
    clock, engine = Clock(), Toy(step_s=0.05)
    for module in (engine_pool, pool):
        monkeypatch.setattr(module, "monotonic", clock.monotonic)
    group = local([engine], timeout_s=0.6, max_restarts=0)
    sync(group, 1)
    requests = [r for r in make_group(0, size=50, max_tokens=12) if length(r) > 9][:3]
    group.submit(requests)
    done, num_steps, deadline = {}, 0, time.monotonic() + DEADLINE_S
    while group.has_unfinished:
        assert time.monotonic() < deadline
        if engine.num_steps > num_steps:
            num_steps = engine.num_steps
            clock.sleep(0.15)
        done |= {completion.request_id: completion for completion in group.step()}
    assert clock.now > 1.0
    check(done, requests)


def test_silence_while_nobody_looks_does_not_count(local, monkeypatch):
    group = local([Toy(step_s=0.002)], timeout_s=5.0, max_restarts=0)
    sync(group, 1)
    group.submit(make_group(0, max_tokens=90))
    done = {c.request_id: c for c in group.step()}
    later = time.monotonic() + 1000
    for module in (engine_pool, pool):
        monkeypatch.setattr(module, "monotonic", lambda: later)
    group._members[0].poll = Hung()  # unanswered as yet
    group.step()
    monkeypatch.undo()
    group._members[0].poll = None
    group._to_ask.add(group._members[0])
    check(done | drain(group), make_group(0, max_tokens=90))


def test_an_engine_is_asked_once_for_what_it_finishes_next(local):
    """However often the pool is stepped meanwhile: with a thousand engines each question counts."""
    asked = []

    class Counting:
        def __init__(self, handle, index):
            self.handle = handle
            self.name, self.num_ranks = handle.name, 1

        def call(self, method, *args):
            asked.append(method)
            return self.handle.call(method, *args)

        def __getattr__(self, name):
            return getattr(self.handle, name)

    engine = Toy()
    group = local([engine], wrap=Counting, timeout_s=1000.0)
    sync(group, 1)
    engine.is_held = True
    requests = make_group(0)
    group.submit(requests)
    for _ in range(10):
        assert group.step() == []
    assert asked.count("poll") == 1
    engine.is_held = False
    check(drain(group), requests)
    assert asked.count("poll") <= 1 + len(requests)


def test_R16_two_thousand_polls_keep_nothing(local):
    group = local([Toy(), Toy()])
    sync(group, 1)
    for number in range(2000):
        requests = make_group(number, size=1, max_tokens=1)
        group.submit(requests)
        if number % 3 == 0:
            group.abort([requests[0].id])
        group.step()
    drain(group)
    for member in group._members:
        assert len(member.sent) <= 2
        assert not member.tasks
        assert member.load == 0
        host = member.worker
        assert not host._finished
    assert not group._owners
    assert not group._waiting


# ---------------------------------------------------------------- any interleaving


class Clock:
    """Time that passes where somebody waits."""

    def __init__(self):
        self.now = 0.0
        self.waiting = []
        """Answers that somebody waits for, with what is to be called."""

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class ClockedQueue(deque):
    """The queue of a pool under a clock."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.put = clock, self.append

    def get(self, timeout):
        ready = [pair for pair in self.clock.waiting if pair[0].comes]
        self.clock.waiting = [pair for pair in self.clock.waiting if pair not in ready]
        for answer, fn in ready:
            fn(answer)
        if not self:
            self.clock.sleep(timeout)
        return self.get_nowait()

    def get_nowait(self):
        if not self:
            raise queue.Empty
        return self.popleft()


@dataclass
class Answer:
    """A call of a fake host, answered after it has been asked for `late` times.

    A submit is done only then, so that later calls overtake it, all others at once.
    """

    host: FakeHost
    method: str
    args: tuple
    late: int
    value: object = None
    is_done: bool = False

    def __post_init__(self):
        if self.method != "submit":
            self.do()

    def add_done_callback(self, fn):
        self.host.clock.waiting.append((self, fn))

    @property
    def comes(self):
        """Whether it is there now that it is waited for once more."""
        self.late -= self.late > 0 and not self.host.is_hung
        return self.host.is_dead or not (self.late or self.host.is_hung)

    def do(self):
        if self.is_done or self.host.is_hung or self.host.is_dead:
            return
        self.is_done = True
        try:
            self.value = getattr(self.host, self.method)(*self.args)
        except RuntimeError as error:
            self.value = error

    def result(self, timeout_s):
        if self.late or self.host.is_hung:
            self.late -= not self.host.is_hung
            self.host.clock.sleep(timeout_s)
            raise TimeoutError
        if self.host.is_dead:
            raise EngineLostError(self.host.name, "it is dead")
        self.do()
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class FakeHost:
    """What an `EngineWorker` does, without threads; how fast is drawn."""

    num_ranks = 1

    def __init__(self, index, clock, random):
        self.name = f"engine {index}"
        self.clock, self.random = clock, random
        self.engine = Toy()
        self.finished = []
        self.submits = []
        self.beat = 0
        self.is_dead = self.is_hung = self.was_killed = False

    def call(self, method, *args):
        if self.is_dead:
            raise EngineLostError(self.name, "it is dead")
        late = self.random.choice([0, 0, 1, 3]) if method in ("poll", "submit") else 0
        answer = Answer(self, method, args, late)
        self.submits += [answer] if method == "submit" else []
        return answer

    def is_working_on(self, names):
        """Or will be, once a call has reached it."""
        if self.is_dead or self.is_hung:
            return False
        coming = {r.id for answer in self.submits if not answer.is_done for r in answer.args[0]}
        return bool((coming | self.engine._running.keys()) & set(names))

    def kill(self):
        self.is_dead = self.was_killed = True

    def poll(self, wait_s):
        del wait_s
        for _ in range(self.random.randrange(1, 4)):
            if self.engine.has_unfinished:
                self.finished += self.engine.step()
                self.beat += 1
        finished, self.finished = self.finished, []
        return Polled(finished, self.engine.stats(), self.beat)

    def receive(self, spec, rank):
        self.engine.receive(spec, rank)

    def weight_version(self):
        return self.engine.weight_version

    def __getattr__(self, name):
        return getattr(self.engine, name)


OPERATIONS = ["submit", "step", "step", "step", "abort", "die", "hang", "sync"]


def interleave(seed, operations, num_engines):
    """Do all of it in this order: every request is answered once, with its own tokens."""
    clock, chance = Clock(), random.Random(seed)
    hosts = [FakeHost(index, clock, chance) for index in range(num_engines)]

    def restart(index):
        assert hosts[index].was_killed
        hosts[index] = FakeHost(index, clock, chance)
        return hosts[index]

    with pytest.MonkeyPatch.context() as patch:
        for module in (engine_pool, pool):
            patch.setattr(module, "monotonic", clock.monotonic)
        patch.setattr(engine_pool, "sleep", clock.sleep)
        patch.setattr(engine_pool, "SimpleQueue", lambda: ClockedQueue(clock))
        patch.setattr(engine_pool, "MAX_REQUEST_RETRIES", 10**6)  # many die
        group = EnginePool(list(hosts), restart=restart, timeout_s=3.0, max_restarts=10**6)
        sync(group, 1, timeout_s=3.0)
        wanted, done, open_, version = {}, {}, deque(), 1

        def step():
            if group.needs_weights:
                sync(group, version, timeout_s=3.0)
            for completion in group.step():
                assert completion.request_id not in done, "returned twice"
                done[completion.request_id] = completion.token_ids
            for member in group._members:
                assert member.load == sum(map(group._cost, member.tasks.values()))

        for operation in operations:
            if operation == "submit":
                requests = make_group(len(wanted), size=chance.randrange(1, 4))
                wanted |= {request.id: request for request in requests}
                open_.extend(requests)
                group.submit(requests)
            elif operation == "step":
                step()
            elif operation == "abort":
                names = [n for n in wanted if n not in done and chance.random() < 0.5]
                aborted = group.abort(names)
                assert not any(host.is_working_on(names) for host in hosts)
                assert not {n for waiting in group._waiting.values() for n in waiting} & set(names)
                for completion in aborted:
                    assert completion.request_id in names
                    request = wanted[completion.request_id]
                    resumed = completion if completion.token_ids else None
                    assert completion.token_ids == expected(request)[: len(completion.token_ids)]
                    group.submit([replace(request, resumed=resumed)])
            elif operation in ("die", "hang"):
                host = chance.choice(hosts)
                host.is_dead, host.is_hung = operation == "die", operation == "hang"
            else:
                version += 1
                sync(group, version, timeout_s=3.0)
        for _ in range(3000):
            if not group.has_unfinished:
                break
            step()
        assert done == {name: expected(request) for name, request in wanted.items()}
        assert not group._owners
        assert not group._waiting


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60),
    st.integers(1, 4),
)
@example(0, ["submit"] * 4 + ["step", "die", "step", "hang", "abort", "sync"] * 3, 2)
def test_R11_no_request_is_lost_or_answered_twice(seed, operations, num_engines):
    interleave(seed, operations, num_engines)


def any_interleaving_fails():
    chance = random.Random(3)
    for seed in range(60):
        operations = chance.choices(OPERATIONS, k=40)
        try:
            interleave(seed, operations, 3)
        except (AssertionError, KeyError, RuntimeError):
            return True
    return False


def test_planted_bugs_are_caught(monkeypatch):
    assert not any_interleaving_fails()
    right = EnginePool._lose

    def loses(self, member, cause):
        member.tasks = dict(list(member.tasks.items())[1:])
        right(self, member, cause)

    def keeps(self, member, cause):
        requests = dict(member.tasks)
        right(self, member, cause)
        self._members[member.index].tasks |= requests

    for bug in (loses, keeps):
        with monkeypatch.context() as patch:
            patch.setattr(EnginePool, "_lose", bug)
            assert any_interleaving_fails(), bug.__name__
