"""A step in flight while the next is planned: same results, nothing too much, nothing lost."""

from dataclasses import replace

import pytest
import torch

from hone.engine.detokenizer import StopStringWatcher
from hone.types import Request, SamplingParams, StopReason
from tests.engine.test_generation import PARAMS, assert_equal, make_requests, run
from tests.tables import table

SETTINGS = [
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_seqs": 2},
    {"kv_cache_gib": 17.5 * 4 * 2 * 2 * 2 * 8 * 4 / 2**30},  # 17 blocks: preemptions
]


@table("fields", SETTINGS)
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


def test_sequences_that_come_back_in_other_slots_sample_as_before(models):
    """A request that ends with its prefill takes the first slot, so the same batch decodes anew
    from slots that others had."""
    requests = make_requests()[:2]
    expected = run(models.engine(), requests)
    engine = models.engine(in_flight=0)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    assert [sequence.is_decoding for sequence in engine._scheduler.running] == [True, True]
    engine._requeue()
    first = Request(id="first", prompt_ids=(3,), sampling=SamplingParams(max_tokens=1), priority=-1)
    found = run(engine, [first])
    assert_equal(expected, {name: done for name, done in found.items() if name != "first"})


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
