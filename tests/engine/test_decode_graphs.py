"""Replayed decode steps, with a recorder that a CPU can run in the place of CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from hone.engine.decode_graphs import DecodeGraphs
from hone.engine.slots import Slots
from hone.types import Request, SamplingParams
from tests.engine.test_generation import check_against_recomputation, run


class CPUGraphs(DecodeGraphs):
    """Like graphs: a replay computes from the memory it was recorded with, into the same memory."""

    def __init__(self):
        self._recorded = {}

    def record(self, key, compute):
        self._recorded[key] = compute, compute()

    def replay(self, key):
        compute, output = self._recorded[key]
        return output.copy_(compute()).clone()  # a copy to the host comes before the next replay


def make_requests(count):
    """Prompts and completions of many lengths: the batch shrinks one by one, the first lasts."""
    return [
        Request(
            id=str(i),
            prompt_ids=tuple((5 * i + 3 * j) % 36 + 3 for j in range(1 + i % 7)),
            sampling=SamplingParams(max_tokens=28 - 2 * i, seed=i, temperature=0.9),
        )
        for i in range(count)
    ]


def check_replays(models, in_flight=0):
    # Without prefix caching the blocks of a finished sequence are at once those of others.
    engine = models.engine(max_num_seqs=11, enable_prefix_caching=False, in_flight=in_flight)
    graphs = engine._runner._decode._graphs = CPUGraphs()
    requests = make_requests(11)
    check_against_recomputation(models, requests, run(engine, requests))
    sizes = {key[0] for key in graphs._recorded}
    assert sizes == {1, 2, 4, 8, 11}
    again = [replace(request, id=f"{request.id} again") for request in requests]
    check_against_recomputation(models, again, run(engine, again))


@pytest.mark.parametrize("in_flight", [0, 1])
def test_R4_padded_and_replayed_decode_equals_full_recomputation(models, in_flight):
    check_replays(models, in_flight)


def _padding_is_a_sequence(monkeypatch):
    correct = Slots.__init__

    def init(self, num_slots, **fields):
        correct(self, num_slots, **fields)
        self.padding = 0

    monkeypatch.setattr(Slots, "__init__", init)


def _rows_move(monkeypatch):
    correct = torch.Tensor.index_copy_

    def index_copy_(self, dim, index, source):
        return correct(self.clone() if self.dtype == torch.int64 else self, dim, index, source)

    monkeypatch.setattr(torch.Tensor, "index_copy_", index_copy_)


def _recording_advances(monkeypatch):
    def record(self, key, compute):
        compute()
        self._recorded[key] = compute, compute()
        rows = compute.args[0]
        compute.func.__self__.slots.num_tokens[:rows] += 1

    monkeypatch.setattr(CPUGraphs, "record", record)


@pytest.mark.parametrize("plant", [_padding_is_a_sequence, _rows_move, _recording_advances])
def test_R4_planted_bugs_are_caught(models, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_replays(models)


def test_sizes_grow_in_steps_of_at_most_32():
    sizes = [DecodeGraphs.bucket_of(n, 200) for n in range(1, 201)]
    assert all(n <= size < n + 32 for n, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 200]
