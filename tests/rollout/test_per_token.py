"""Arrays of a sample's tokens are the lists that they were made of, wherever they go."""

from __future__ import annotations

import copy
import json
import pickle
import random
import struct
from dataclasses import FrozenInstanceError

import pytest

from hone.rollout.state import group_from_dict, group_to_dict
from hone.types import (
    EngineStats,
    Group,
    PerToken,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingParams,
    StopReason,
)


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_values_keep_every_bit_between_processes_and_in_checkpoints(size: int) -> None:
    draw = random.Random(size)
    logprobs = [-draw.expovariate(1.0) for _ in range(size)]
    ids = [draw.randrange(200_000) for _ in range(size)]
    prompt = Prompt(id="data:1", token_ids=(1, 2), text="?")
    sample = Sample(
        id="1-0/0",
        prompt=prompt,
        index=0,
        token_ids=ids,
        logprobs=logprobs,
        weight_versions=[7] * size,
        loss_mask=[n % 3 > 0 for n in range(size)],
        stop_reason=StopReason.EOS,
    )
    group = Group(id="1-0", prompt=prompt, samples=[sample])
    saved = group_from_dict(json.loads(json.dumps(group_to_dict(group))))
    pickled = [pickle.loads(pickle.dumps(sample, protocol)) for protocol in (2, 4, 5)]
    for other in (*pickled, copy.deepcopy(sample), saved.samples[0]):
        assert other == sample
        assert bits(list(other.logprobs)) == bits(logprobs)
        assert other.token_ids == ids
        assert other.token_ids != [*ids, 1]
        assert other.loss_mask == [n % 3 > 0 for n in range(size)]
        assert isinstance(other.token_ids, PerToken)
    assert len(pickle.dumps(sample)) < 17 * size + 600


def test_values_grow_by_lists_and_by_each_other() -> None:
    values = PerToken("i", [1, 2])
    values += [3]
    values += PerToken("i", [4])
    assert values == [1, 2, 3, 4]
    assert values != PerToken("i", [1, 2, 3])


def test_what_a_message_of_requests_holds_comes_out_as_it_went_in() -> None:
    sampling = SamplingParams(max_tokens=3, top_p=0.5, stop=("a", "b"), seed=2**62)
    prompt = Prompt(id="data:1", token_ids=(1, 2), text="?", metadata={"answer": [1]})
    stats = EngineStats(num_running=3, kv_cache_usage=0.25, busy_s=1.5)
    reward = Reward(total=0.5, parts={"format": 0.25})
    request = Request(id="1-0/0", prompt_ids=(1, 2), sampling=sampling, priority=-1)
    for protocol in (2, 4, 5):
        for value in (prompt, stats, reward, request):
            other = pickle.loads(pickle.dumps(value, protocol))
            assert other == value
            assert type(other) is type(value)
    with pytest.raises(FrozenInstanceError):
        pickle.loads(pickle.dumps(request)).priority = 0
