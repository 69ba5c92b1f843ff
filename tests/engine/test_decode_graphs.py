"""Replayed decode steps, with a recorder that a CPU can run in the place of CUDA graphs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hone.engine import model_runner
from hone.engine.decode_graphs import DecodeGraphs
from hone.models.decoder import hidden_states
from hone.types import Request, SamplingParams
from tests.engine.test_generation import check_against_recomputation, run


@dataclass
class Recording:
    """Like a graph: computes from the memory it was recorded with, into the same memory."""

    model: Any
    inputs: Any
    output: torch.Tensor

    def replay(self):
        self.output.copy_(hidden_states(self.model, *self.inputs))


class CPUGraphs(DecodeGraphs):
    def __init__(self, model, *, max_rows):
        self._model, self._max_rows, self._recorded = model, max_rows, {}

    def clear(self):
        self._recorded.clear()

    def _record(self, *inputs):
        output = torch.zeros(len(inputs[0]), self._model.config.hidden_size)
        recording = Recording(self._model, inputs, output)
        return recording, output


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


def check_replays(models):
    # Without prefix caching the blocks of a finished sequence are at once those of others.
    engine = models.engine(max_num_seqs=11, enable_prefix_caching=False)
    engine._runner._graphs = graphs = CPUGraphs(models.hone, max_rows=11)
    requests = make_requests(11)
    check_against_recomputation(models, requests, run(engine, requests))
    assert set(graphs._recorded) == {1, 2, 4, 8, 11}
    engine.sleep()
    assert not graphs._recorded  # they would hold on to the memory of the cache
    engine.wake()
    again = [replace(request, id=f"{request.id} again") for request in requests]
    check_against_recomputation(models, again, run(engine, again))


def test_R4_padded_and_replayed_decode_equals_full_recomputation(models):
    check_replays(models)


def _padding_writes_to_block_0(correct):
    return lambda buffer, values, **pad: correct(buffer, values, **pad | {"fill": 0})


def _padding_keeps_what_lay_there(correct):
    def upload(buffer, values, *, padding=0, fill=0):
        correct(buffer, values)
        return buffer._device[: len(values) + padding]

    return upload


def _a_new_buffer_each_time(correct):
    return lambda buffer, values, **pad: correct(buffer, values, **pad).clone()


@pytest.mark.parametrize(
    "plant", [_padding_writes_to_block_0, _padding_keeps_what_lay_there, _a_new_buffer_each_time]
)
def test_R4_planted_bugs_are_caught(models, monkeypatch, plant):
    buffer = model_runner.InputBuffer
    monkeypatch.setattr(buffer, "upload", plant(buffer.upload))
    with pytest.raises(AssertionError):
        check_replays(models)


def test_sizes_grow_in_steps_of_at_most_32():
    graphs = CPUGraphs(None, max_rows=200)
    sizes = [graphs.num_rows(n) for n in range(1, 201)]
    assert all(n <= size < n + 32 for n, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 200]
