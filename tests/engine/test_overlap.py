"""A step in flight while the next is planned: same results, nothing too much, nothing lost."""

import random
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain

import pytest
import torch

from hone.engine.detokenizer import StopStringWatcher
from hone.engine.engine import EmbeddedEngine
from hone.engine.requests import check_request
from hone.engine.scheduler import Scheduler
from hone.types import Request, SamplingParams, StopReason
from tests.engine.test_generation import PARAMS, assert_equal, make_requests, run

SETTINGS = [
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_seqs": 2},
    {"kv_cache_gib": 17.5 * 4 * 2 * 2 * 2 * 8 * 4 / 2**30},  # 17 blocks: preemptions
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_R20_a_step_in_flight_changes_no_result(models, fields):
    requests = make_requests(seed=3)
    stops = frozenset((5, 11, 17))  # met at random places
    expected = run(models.engine(eos_token_ids=stops), requests)
    assert {done.stop_reason for done in expected.values()} == {StopReason.EOS, StopReason.LENGTH}
    assert_equal(expected, run(models.engine(eos_token_ids=stops, in_flight=1, **fields), requests))


def test_R20_stop_strings_found_a_step_late_are_trimmed(models):
    requests = [
        replace(request, sampling=replace(request.sampling, stop=("a", "b", "k")))
        for request in make_requests(seed=4)
    ]
    expected = run(models.engine(with_tokenizer=True), requests)
    assert StopReason.STOP_STRING in {done.stop_reason for done in expected.values()}
    assert_equal(expected, run(models.engine(with_tokenizer=True, in_flight=1), requests))


def test_R20_planted_keeping_of_the_late_token_is_caught(models, monkeypatch):
    engine = models.engine(eos_token_ids=(5, 11, 17), in_flight=1)
    requests = make_requests(seed=3)
    expected = run(models.engine(eos_token_ids=(5, 11, 17)), requests)
    correct = type(engine)._append

    def keep(engine, sampled, version, ended):
        correct(engine, sampled, version, ended)
        for sequence in ended:
            sequence.append(sampled.token_id, sampled.logprob, version)

    monkeypatch.setattr(type(engine), "_append", keep)
    with pytest.raises(AssertionError):
        assert_equal(expected, run(engine, requests))


def test_an_abort_drops_the_token_in_flight_and_resuming_samples_it_again(models):
    requests = make_requests(params=PARAMS[:4])
    whole = run(models.engine(), requests)
    engine = models.engine(in_flight=1)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    parts = engine.abort([request.id for request in requests])
    assert [len(part.token_ids) for part in parts] == [4] * 4
    assert not engine.has_unfinished
    resumed = [
        replace(request, resumed=part) for request, part in zip(requests, parts, strict=True)
    ]
    assert_equal(whole, run(engine, resumed))  # beside the dropped step


def test_R9_tokens_in_flight_carry_the_version_that_sampled_them(models):
    engine = models.engine(in_flight=1)
    params = SamplingParams(max_tokens=6)
    engine.submit([Request(id="a", prompt_ids=(3, 4, 5), sampling=params)])
    for _ in range(3):
        engine.step()
    engine.begin_sync()  # three tokens were launched under version 0
    manifest = models.manifest(engine, version=7)
    engine.finish_sync(manifest)
    done = run(engine, [])
    assert done["a"].weight_versions == [0, 0, 0, 7, 7, 7]


def test_what_a_sync_finds_finished_is_returned_by_the_next_step(models):
    engine = models.engine(in_flight=1)
    engine.submit([Request(id="a", prompt_ids=(3,), sampling=SamplingParams(max_tokens=2))])
    engine.step()
    engine.step()
    engine.begin_sync()
    assert engine.has_unfinished
    engine.finish_sync(models.manifest(engine, version=1))
    assert [done.request_id for done in engine.step()] == ["a"]
    assert not engine.has_unfinished


def test_a_failed_step_forgets_what_is_in_flight(models, monkeypatch):
    requests = make_requests()
    expected = run(models.engine(), requests)
    engine = models.engine(in_flight=1)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    correct = engine._runner.launch

    def fail(*_):
        raise RuntimeError("out of memory")

    engine._runner.launch = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine._runner.launch = correct
    assert_equal(expected, run(engine, []))


@contextmanager
def interrupted(within, num_lines, places):
    """Ctrl-C after so many lines of the method `within` and what it calls, where it gets so far."""

    def line(frame, event, arg):
        nonlocal num_lines
        num_lines -= event == "line"
        if num_lines < 0:
            places.add((frame.f_code.co_name, frame.f_lineno))
            raise KeyboardInterrupt  # which ends the tracing
        return line

    def call(frame, event, arg):
        caller = frame
        while caller is not None and caller.f_code is not within.__code__:
            caller = caller.f_back
        return None if caller is None else line

    before = sys.gettrace()
    sys.settrace(call)
    with suppress(KeyboardInterrupt):
        yield
    sys.settrace(before)


@pytest.mark.parametrize(
    ("within", "num_lines"), [(Scheduler.schedule, 1000), (Scheduler._preempt, 60)]
)
@pytest.mark.parametrize("in_flight", [0, 1])
def test_R20_no_ctrl_c_while_a_step_is_planned_loses_or_changes_a_request(
    models, in_flight, within, num_lines
):
    requests = make_requests()
    expected = run(models.engine(), requests)
    rng, places = random.Random(in_flight), set()
    for _ in range(20):
        engine = models.engine(in_flight=in_flight, **SETTINGS[3])
        engine.submit(requests)
        done = {}
        for _ in range(500):
            with interrupted(within, rng.randrange(num_lines), places):
                done |= {completion.request_id: completion for completion in engine.step()}
            if not engine.has_unfinished:
                break
        assert_equal(expected, done)
        assert engine.stats().kv_cache_usage == 0
    assert len(places) > (20 if within is Scheduler.schedule else 10)


def until_uninterrupted(within):
    """Ctrl-C at every line of `within`, one after the other."""
    for num_lines in range(1000):
        places = set()
        yield interrupted(within, num_lines, places)
        if not places:
            return
    raise AssertionError(within)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("within", [EmbeddedEngine._collect, EmbeddedEngine._make_good])
def test_R20_no_ctrl_c_while_tokens_are_taken_loses_or_changes_a_request(models, in_flight, within):
    """Not in the repair of what another one has left either. The step ends one request by a stop
    string, one by an end-of-sequence id and one by its length; one goes on."""
    plain = SamplingParams(max_tokens=5, temperature=0)
    whole = run(models.engine(), [Request(id="w", prompt_ids=(3, 4), sampling=plain)])["w"]
    third = whole.token_ids[2]
    assert third not in whole.token_ids[:2]
    text = models.tokenizer.decode([third])
    endings = {"stop": (text,), "stop_token_ids": (third,), "max_tokens": 3, "seed": 0}
    requests = [
        Request(id=name, prompt_ids=(3, 4), sampling=replace(plain, **{name: value}))
        for name, value in endings.items()
    ]
    expected = run(models.engine(with_tokenizer=True), requests)
    assert [len(expected[name].token_ids) for name in endings] == [3, 3, 3, 5]
    for attempt in until_uninterrupted(within):
        engine = models.engine(with_tokenizer=True, in_flight=in_flight)
        engine.submit(requests)
        done = []
        for _ in range(2 + in_flight):
            done += engine.step()
        engine._is_torn = within is EmbeddedEngine._make_good
        with attempt:
            done += engine.step()
        while engine.has_unfinished:
            done += engine.step()
        assert len(done) == len(requests)
        assert_equal(expected, {completion.request_id: completion for completion in done})
        assert engine.stats().kv_cache_usage == 0


def test_R20_ctrl_c_in_submit_or_abort_leaves_all_or_none(models):
    requests = make_requests(params=PARAMS[:3])
    expected = run(models.engine(), requests)
    names = [request.id for request in requests]
    outcomes = set()
    early = interrupted(check_request, 1, set())
    for attempt in chain([early], until_uninterrupted(Scheduler.add)):
        engine = models.engine(in_flight=1)
        with attempt:
            engine.submit(requests)
        outcomes.add(("submit", tuple(engine._sequences)))
        if not engine.has_unfinished:
            engine.submit(requests)
        assert_equal(expected, run(engine, []))
    for attempt in until_uninterrupted(EmbeddedEngine.abort):
        engine = models.engine(in_flight=1)
        engine.submit(requests)
        engine.step()
        with attempt:
            engine.abort(names[:2])
        outcomes.add(("abort", tuple(engine._sequences)))
        kept = {name: expected[name] for name in engine._sequences}
        assert_equal(kept, run(engine, []))
        assert engine.stats().kv_cache_usage == 0
    everything = tuple(names)
    assert outcomes == {
        ("submit", ()),
        ("submit", everything),
        ("abort", everything),
        ("abort", everything[2:]),
    }


@pytest.mark.parametrize("in_flight", [0, 1])
def test_R20_a_tokenizer_that_raises_sends_nobody_back_who_has_ended(
    models, monkeypatch, in_flight
):
    """The first of two requests ends in the very step in which decoding the second raises."""
    params = SamplingParams(max_tokens=1)
    engine = models.engine(with_tokenizer=True, in_flight=in_flight)
    engine.submit(
        [
            Request(id="a", prompt_ids=(3,), sampling=params),
            Request(id="b", prompt_ids=(4,), sampling=replace(params, stop=("never",))),
        ]
    )
    correct = StopStringWatcher.push
    calls = []

    def push(watcher, token_id):
        calls.append(token_id)
        if len(calls) == 1:
            raise RuntimeError("bytes that are no text")
        return correct(watcher, token_id)

    monkeypatch.setattr(StopStringWatcher, "push", push)
    done = {}
    num_failures = 0
    while engine.has_unfinished:
        try:
            done |= {completion.request_id: completion for completion in engine.step()}
        except RuntimeError:
            num_failures += 1
    assert num_failures == 1
    assert [len(done[name].token_ids) for name in "ab"] == [1, 1]


def test_an_id_is_taken_until_its_completion_is_returned(models):
    engine = models.engine(in_flight=1)
    request = Request(id="a", prompt_ids=(3,), sampling=SamplingParams(max_tokens=1))
    engine.submit([request])
    engine.step()
    engine.begin_sync()
    with pytest.raises(ValueError, match="'a' is already in use"):
        engine.submit([request])


def test_a_prefill_uploads_what_it_samples_with_at_once(models, monkeypatch):
    uploads = []

    def upload(values, device):
        uploads.append(values)
        return torch.from_numpy(values)

    for module in ("model_runner", "slots", "sampling_table"):
        monkeypatch.setattr(f"hone.engine.{module}.upload", upload)
    engine = models.engine(max_num_batched_tokens=64)
    table = engine._runner._sampling
    monkeypatch.setattr(table, "flush", lambda: None)
    monkeypatch.setattr(table, "_device", torch.device("cuda"))  # whose parameters lie there
    params = SamplingParams(max_tokens=2)
    engine.submit([Request(id=f"{i}", prompt_ids=(3, 4 + i), sampling=params) for i in range(3)])
    engine.step()
    # Blocks; ids, tables, borders and lengths of the forward; last rows; slots with all counts.
    assert len(uploads) == 7
