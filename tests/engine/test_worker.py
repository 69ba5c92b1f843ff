"""An engine that drives itself: what it samples, and how it is commanded."""

import copy
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from hone.engine.worker import EngineWorker
from hone.types import EngineLostError, Request, SamplingParams, StopReason
from tests.engine.test_generation import assert_equal, make_requests, run
from tests.engine.test_sync import PROMPT, change_weights, push
from tests.ranks import run_ranks

DEADLINE_S = 20.0


class Slow:
    """An engine whose steps are let through one by one, and which notes who calls it."""

    def __init__(self, engine, *, is_gated=False):
        self.engine = engine
        self.threads = set()
        self.steps = threading.Semaphore(0 if is_gated else 1_000_000)
        self.asked = threading.Semaphore(0)
        self.fails = None

    def step(self):
        self.threads.add(threading.get_ident())
        self.asked.release()
        self.steps.acquire()
        if self.fails is not None:
            raise self.fails
        return self.engine.step()

    def __getattr__(self, name):
        value = getattr(self.engine, name)
        if callable(value):
            self.threads.add(threading.get_ident())
        return value


@pytest.fixture
def host_of():
    made = []

    def make(engine, receive=None, **options):
        made.append(EngineWorker(engine, receive, **options))
        return made[-1]

    yield make
    for host in made:
        host.kill()


@pytest.fixture
def own(make_models):
    models = make_models("qwen3")
    return replace(models, hone=copy.deepcopy(models.hone))


def drive(host, count):
    """The next `count` completions, by id."""
    done, deadline = {}, time.monotonic() + DEADLINE_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"{len(done)} of {count}"
        for completion in host.poll(1.0).completions:
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


def wait_for_steps(engine, count):
    for _ in range(count):
        assert engine.asked.acquire(timeout=DEADLINE_S)


def test_samples_what_the_engine_alone_samples(models, host_of):
    host = host_of(models.engine())
    for _ in range(2):
        host.submit(make_requests())
        assert_equal(drive(host, 6), run(models.engine(), make_requests()))
    assert host.poll().stats.num_running == 0


def test_completions_are_decoded_where_they_are_made(models, host_of):
    host = host_of(models.engine(), decode=str)
    host.submit(make_requests())
    for completion in drive(host, 6).values():
        assert completion.text == str(completion.token_ids)


def test_all_calls_of_the_engine_are_made_in_one_thread(models, host_of):
    engine = Slow(models.engine())
    host = host_of(engine, lambda spec, rank: engine.begin_sync() or push(engine, spec))
    engine.threads.clear()
    callers = [threading.Thread(target=host.submit, args=([r],)) for r in make_requests()]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    drive(host, 6)
    host.abort(["0"])
    host.receive(3)
    assert host.weight_version() == 3
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_request_that_cannot_be_served_fails_by_itself(models, host_of):
    host = host_of(models.engine())
    requests = make_requests()
    poisoned = [
        replace(requests[0], id="long", sampling=SamplingParams(max_tokens=1000)),
        replace(requests[0], id="alien", prompt_ids=(1, 10**6)),
        replace(requests[0], id="empty", prompt_ids=()),
    ]
    host.submit([poisoned[0], *requests[:3], poisoned[1], *requests[3:], poisoned[2]])
    done = drive(host, 9)
    failed = {name: done.pop(name) for name in ("long", "alien", "empty")}
    assert "exceed max_model_len=64" in failed["long"].error
    assert "outside the model's vocabulary" in failed["alien"].error
    assert all(completion.error and not completion.token_ids for completion in failed.values())
    assert not any(completion.error for completion in done.values())
    assert_equal(done, run(models.engine(), requests))


def test_abort_returns_what_was_sampled_and_the_rest_goes_on(models, host_of):
    engine = Slow(models.engine(), is_gated=True)
    host = host_of(engine)
    host.submit([PROMPT, replace(PROMPT, id="b")])
    engine.steps.release(5)
    wait_for_steps(engine, 6)
    abort = host.call("abort", ["a", "unknown"])
    engine.steps.release(1_000)
    (aborted,) = abort.result(DEADLINE_S)
    rest = drive(host, 1)["b"]
    assert aborted.stop_reason is StopReason.ABORT
    assert len(aborted.token_ids) == 6
    assert aborted.token_ids == rest.token_ids[:6]
    host.submit([replace(PROMPT, resumed=aborted)])
    assert drive(host, 1)["a"].token_ids == rest.token_ids
    assert host.abort(["a", "b"]) == []


def test_R9_weights_change_between_steps(own, host_of):
    """As if the engine had been stopped by hand at the same token."""
    engine = Slow(own.engine(), is_gated=True)

    def receive(spec, rank):
        change_weights(own.hone)
        push(engine, spec)
        return rank

    before = copy.deepcopy(own.hone.state_dict())
    host = host_of(engine, receive)
    host.submit([PROMPT])
    engine.steps.release(4)
    wait_for_steps(engine, 5)
    received = host.call("receive", 7, 5)
    engine.steps.release(1_000)
    assert received.result(DEADLINE_S) == 5
    done = drive(host, 1)
    assert done["a"].weight_versions == [0] * 5 + [7] * 7

    own.hone.load_state_dict(before)
    alone = own.engine()
    alone.submit([PROMPT])
    for _ in range(5):
        alone.step()
    change_weights(own.hone)
    push(alone, 7)
    assert_equal(done, run(alone, []))


def test_R2_no_step_is_made_after_a_delivery_that_failed(models, host_of):
    engine = models.engine()

    def receive(spec, rank):
        engine.begin_sync()
        if spec == "broken":
            raise RuntimeError("incomplete: lm_head.weight")
        push(engine, spec)

    host = host_of(engine, receive)
    with pytest.raises(RuntimeError, match=r"incomplete: lm_head.weight"):
        host.receive("broken")
    host.submit([PROMPT])
    assert host.poll(0.1).completions == []
    assert host.poll().stats.num_steps == 0
    host.receive(4)
    assert drive(host, 1)["a"].weight_versions == [4] * 12


def test_R11_a_failure_of_the_engine_ends_the_host_and_is_told_to_all(models, host_of):
    engine = Slow(models.engine(), is_gated=True)
    host = host_of(engine, name="engine 3")
    host.submit([replace(PROMPT, id="short", sampling=SamplingParams(max_tokens=1)), PROMPT])
    engine.steps.release(1)
    wait_for_steps(engine, 2)
    waiting = host.call("weight_version")
    engine.fails = ZeroDivisionError("a planted one")
    engine.steps.release(1)
    calls = [
        lambda: waiting.result(DEADLINE_S),
        host.weight_version,
        lambda: host.submit([PROMPT]),
        lambda: (host.poll(0.0), host.poll(0.0)),
        host.poll,
    ]
    for call in calls:
        with pytest.raises(EngineLostError) as error:
            call()
        assert str(error.value).startswith(
            "engine 3 is lost: ZeroDivisionError: a planted one\nTraceback"
        )
        assert "in step" in error.value.cause
    host.close()


def test_what_had_finished_is_returned_before_the_failure(models, host_of):
    engine = Slow(models.engine(), is_gated=True)
    host = host_of(engine)
    host.submit([replace(PROMPT, id="short", sampling=SamplingParams(max_tokens=1)), PROMPT])
    engine.steps.release(1)
    wait_for_steps(engine, 2)
    engine.fails = ZeroDivisionError()
    waiting = host.call("weight_version")
    engine.steps.release(1)
    with pytest.raises(EngineLostError):
        waiting.result(DEADLINE_S)
    assert [done.request_id for done in host.poll(1.0).completions] == ["short"]
    with pytest.raises(EngineLostError):
        host.poll(DEADLINE_S)


def test_a_beat_tells_a_hung_engine_from_one_at_work_and_an_idle_one_does_nothing(models, host_of):
    engine = Slow(models.engine(), is_gated=True)
    host = host_of(engine)
    host.submit([PROMPT])
    beats = []
    for _ in range(3):
        wait_for_steps(engine, 1)
        beats.append(host.poll().beat)
        engine.steps.release(1)
    assert all(a < b for a, b in pairwise(beats))
    wait_for_steps(engine, 1)
    hung = host.poll().beat
    assert host.poll(0.1).beat == hung
    engine.steps.release(1_000)
    drive(host, 1)
    idle, cpu_s = host.poll().beat, time.process_time()
    assert host.poll(0.3).beat == idle
    assert time.process_time() - cpu_s < 0.1


def test_close_ends_the_thread_and_abandon_does_not_wait_for_it(models, host_of):
    host = host_of(models.engine())
    host.close()
    host.close()
    assert not host._thread.is_alive()
    with pytest.raises(EngineLostError, match="it was closed"):
        host.submit([PROMPT])

    engine = Slow(models.engine(), is_gated=True)
    host = host_of(engine)
    host.submit([PROMPT])
    wait_for_steps(engine, 1)
    waiting = host.call("weight_version")
    host.kill()
    for call in (lambda: waiting.result(DEADLINE_S), host.poll):
        with pytest.raises(EngineLostError, match="it was killed"):
            call()
    engine.steps.release(1)
    host._thread.join(DEADLINE_S)
    assert not host._thread.is_alive()


def test_R16_a_host_keeps_nothing_of_what_it_has_returned(models, host_of):
    engine = models.engine()
    host = host_of(engine)
    short = SamplingParams(max_tokens=1, seed=1)
    for number in range(300):
        host.submit([Request(id=f"{number}", prompt_ids=(5, 6), sampling=short)])
        drive(host, 1)
        host.poll()
        host.abort([f"{number}"])
    sizes = [len(kept) for kept in (host._queue, host._finished, host._taken)]
    assert max(sizes) <= 1


# ---------------------------------------------------------------- ranks of one engine


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("tests.engine.worker_ranks", 2)


def test_ranks_in_lock_step_sample_what_one_rank_samples(ranks):
    assert ranks["tokens"] == ranks["tokens of one rank"]
    assert ranks["versions"] == [[0] * 14, [5] * 14]


def test_ranks_agree_on_aborts_and_poisoned_requests(ranks):
    assert ranks["errors"] == {"good": "", "poisoned": True}
    assert ranks["aborted is a prefix"]
    assert ranks["other rank"] == ranks["first rank"]


def test_ranks_receive_by_their_place(ranks):
    assert ranks["places"] == [3, 4]


def test_an_error_of_another_rank_is_raised_by_the_first(ranks):
    assert ranks["error of rank 1"].startswith(
        "on rank 1 of engine 2: RuntimeError: the last one failed"
    )


def test_a_first_rank_without_work_keeps_the_others_waiting(ranks):
    assert ranks["idle"]["cpu seconds"] < 0.5
    assert ranks["idle"]["waits"]
    assert ranks["alive after idling"]


def test_R11_ranks_end_when_the_first_is_gone_and_the_first_when_another_is(ranks):
    assert ranks["leader closed"] == "followed to the end"
    assert ranks["leader died"].startswith("engine 2 is lost: a rank of it is gone: another rank")
    assert "another rank is gone" in ranks["follower died"]
