"""Recurrent states in the engine: sharing, chunks, preemption, weights that change, turns.

The reference computes each sequence from its first token, with the stock model."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hone.engine.settings import num_state_rows
from hone.types import Request, SamplingParams
from tests.engine.test_generation import run, tight_cache_gib
from tests.engine.test_sync import change_weights, push
from tests.tables import table

FAMILY = "qwen3_5_text"
BLOCK = 4


@pytest.fixture
def models(make_models):
    return make_models(FAMILY)


def prompt_of(seed, size):
    return tuple(random.Random(seed).choices(range(3, 39), k=size))


def group_of(prompt, *, count=8, start=0, max_tokens=6, **fields):
    params = [SamplingParams(max_tokens=max_tokens, seed=start + i) for i in range(count)]
    return [
        Request(id=f"{start + i}", prompt_ids=prompt, sampling=one, **fields)
        for i, one in enumerate(params)
    ]


@torch.no_grad()
def check(models, requests, done):
    """Log-probabilities of the sampled tokens are those of the stock model over the sequence from
    its first token. (That samples follow from them is shown in test_generation.)"""
    for request in requests:
        completion = done[request.id]
        count = len(request.prompt_ids)
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = models.plain(ids, use_cache=False).logits[0, count - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, count:, None])[:, 0]
        assert len(completion.token_ids) == request.sampling.max_tokens
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@table("size", [1, 2, 4, 5, 17, 30])
def test_a_group_computes_its_prompt_once(models, size):
    """Prompts shorter than the convolution too, and such as end at a block's border."""
    requests = group_of(prompt_of(size, size))
    engine = models.engine()
    done = run(engine, requests)
    check(models, requests, done)
    shared = (size - 1) // BLOCK * BLOCK
    assert [done[request.id].num_cached_tokens for request in requests] == [0] + [shared] * 7


def test_a_later_group_finds_the_state(models):
    engine = models.engine()
    prompt = prompt_of(0, 22)
    run(engine, group_of(prompt, count=2))
    later = group_of(prompt, count=2, start=10)
    done = run(engine, later)
    check(models, later, done)
    assert [done[request.id].num_cached_tokens for request in later] == [20, 20]


def test_prompts_with_a_common_beginning_share_it_from_the_third_on(models):
    """The second finds keys and no state there; it leaves one."""
    engine = models.engine()
    stem = prompt_of(1, 13)
    cached = []
    for number in range(3):
        requests = group_of(stem + prompt_of(10 + number, 9), count=1, start=number)
        done = run(engine, requests)
        check(models, requests, done)
        cached.append(done[f"{number}"].num_cached_tokens)
    assert cached == [0, 0, 12]


@table("budget", [1, 3, 7, 19])
def test_chunks_of_any_size(models, budget):
    requests = group_of(prompt_of(2, 21), count=3) + group_of(prompt_of(3, 18), count=2, start=5)
    engine = models.engine(max_num_batched_tokens=budget)
    check(models, requests, run(engine, requests))


@table("num_blocks", [16, 17, 20])
def test_preempted_sequences_are_computed_again(models, num_blocks):
    requests = group_of(prompt_of(4, 14), count=4, max_tokens=24)
    requests += group_of(prompt_of(5, 9), count=3, start=6, max_tokens=24)
    config = models.hone.config
    share = config.layer_types.count("full_attention") / config.num_hidden_layers
    gib = tight_cache_gib(models, num_blocks=num_blocks) * share
    engine = models.engine(kv_cache_gib=gib)
    check(models, requests, run(engine, requests))
    assert engine.stats().num_preemptions > 0


@table("stop", range(1, 9))
def test_aborted_and_resumed_at_every_position(models, stop):
    requests = group_of(prompt_of(6, 11), count=3, max_tokens=10)
    engine = models.engine()
    engine.submit(requests)
    for _ in range(stop):
        engine.step()
    parts = engine.abort([request.id for request in requests])
    resumed = [replace(a, resumed=b) for a, b in zip(requests, parts, strict=True)]
    check(models, requests, run(engine, resumed))


def test_more_prompts_than_snapshots(models, monkeypatch):
    monkeypatch.setattr("hone.engine.engine.num_snapshots", lambda _, **__: 2)
    engine = models.engine()
    for round_ in range(2):
        for number in range(5):
            requests = group_of(prompt_of(20 + number, 15), count=3, start=10 * number)
            requests = [replace(each, id=f"{round_}.{each.id}") for each in requests]
            check(models, requests, run(engine, requests))


def test_turns_of_an_episode_go_on_from_the_state_of_the_last_prompt(models):
    engine = models.engine(max_model_len=128)
    prompt, shared = prompt_of(7, 12), 0
    for turn in range(4):
        request = group_of(prompt, count=1, start=turn)[0]
        done = run(engine, [request])
        check(models, [request], done)
        assert done[request.id].num_cached_tokens == shared
        shared = (len(prompt) - 1) // BLOCK * BLOCK
        prompt = prompt + tuple(done[request.id].token_ids) + prompt_of(30 + turn, 5)


def test_R9_states_belong_to_a_weight_version(models):
    own = replace(models, hone=copy.deepcopy(models.hone), plain=copy.deepcopy(models.plain))
    engine = own.engine()
    prompt = prompt_of(8, 18)
    run(engine, group_of(prompt, count=2))
    change_weights(own.hone)
    own.plain.load_state_dict(own.hone.state_dict())
    push(engine, 1)
    requests = group_of(prompt, count=3, start=5)
    done = run(engine, requests)
    check(own, requests, done)
    assert [done[request.id].num_cached_tokens for request in requests] == [0, 16, 16]


def test_weights_that_change_under_a_sequence_keep_its_state(models):
    """As with keys and values: tokens behind the change are those of the new weights, over states
    of the old ones. A prompt that is half computed begins again."""
    own = replace(models, hone=copy.deepcopy(models.hone))
    requests = group_of(prompt_of(9, 13), count=1, max_tokens=8)
    requests += group_of(prompt_of(12, 13), count=1, start=1, max_tokens=8)
    plain = copy.deepcopy(models.plain)
    engine = own.engine(max_num_batched_tokens=8)
    engine.submit(requests[:1])
    for _ in range(4):
        engine.step()
    engine.submit(requests[1:])
    engine.step()
    change_weights(own.hone, scale=0.1)
    push(engine, 1)
    done = {}
    while engine.has_unfinished:
        done |= {each.request_id: each for each in engine.step()}
    plain.load_state_dict(own.hone.state_dict())
    check(replace(own, plain=plain), requests[1:], done)
    assert done["0"].weight_versions[0] == 0
    assert done["0"].weight_versions[-1] == 1
    # The first token behind the change: state and keys of the old weights, the new ones for it.
    change = done["0"].weight_versions.index(1)
    count = len(requests[0].prompt_ids) + change - 1
    old = copy.deepcopy(models.plain)
    with torch.no_grad():
        ids = torch.tensor([[*requests[0].prompt_ids, *done["0"].token_ids]])
        cache = old(ids[:, :count], use_cache=True).past_key_values
        logits = plain(ids[:, count : count + 1], past_key_values=cache).logits[0, 0]
    expected = logits.log_softmax(-1)[done["0"].token_ids[change]].item()
    assert done["0"].logprobs[change] == pytest.approx(expected, abs=1e-5)


@table("gib", [None, 0.25])
def test_a_model_without_attention_has_blocks_that_take_no_bytes(make_models, gib):
    """As many as its sequences can use, which a size of the cache does not change."""
    models = make_models(FAMILY, num_layers=2, layer_types=["linear_attention"] * 2)
    requests = group_of(prompt_of(14, 18), count=4) + group_of(prompt_of(15, 5), start=4)
    engine = models.engine(kv_cache_gib=gib, enable_sleep=True)
    assert (engine._blocks.num_blocks, engine._cache.block_bytes) == (8 * 16, 0)
    check(models, requests, run(engine, requests))
    engine.sleep()
    engine.wake()
    check(models, requests, run(engine, requests))


def test_keys_in_eight_bits_leave_states_as_they_are(models):
    """Runs are refused them. Scales are found by the number of a layer, whether it has keys or
    not."""
    engine = models.engine(kv_cache_dtype="fp8", max_num_batched_tokens=7)
    done = run(engine, group_of(prompt_of(13, 21), count=2, max_tokens=1))
    expected = run(models.engine(), group_of(prompt_of(13, 21), count=2, max_tokens=1))
    for name, completion in done.items():
        assert completion.logprobs == pytest.approx(expected[name].logprobs, abs=0.05)
    cache, kinds = engine._cache, models.hone.config.layer_types
    assert {x.dtype for pair in cache.states if pair for x in pair} == {torch.float32}
    is_scaled = [bool((row != 1).all()) for row in cache.scales]
    assert is_scaled == [kind == "full_attention" for kind in kinds]


def test_sleep_gives_up_states(models):
    engine = models.engine(enable_sleep=True)
    requests = group_of(prompt_of(11, 17), count=3)
    run(engine, requests)
    engine.sleep()
    assert engine._cache.states == []
    engine.wake()
    done = run(engine, requests)
    check(models, requests, done)
    assert done["0"].num_cached_tokens == 0


def test_the_largest_prefill_reads_and_stores_states_as_others_do(models):
    """Otherwise the memory of one step would be measured without them. It has the row of padding
    alone."""
    engine = models.engine(max_num_seqs=3)
    states = [x for pair in engine._cache.states if pair for x in pair]
    for each in states:
        each.normal_()
    before = [each.clone() for each in states]
    with torch.inference_mode():
        engine._runner._largest_prefill()
    for each, old in zip(states, before, strict=True):
        changed = (each != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [engine._runner.max_num_seqs]


@table("shares", [True, False])
def test_bytes_of_states_are_counted(models, shares):
    engine = models.engine(max_num_seqs=6, enable_prefix_caching=shares)
    rows = num_state_rows(6, enable_prefix_caching=shares)
    tensors = [x for pair in engine._cache.states if pair for x in pair]
    assert len(tensors) == 2 * 3
    assert all(len(tensor) == rows == 6 + 1 + 8 * shares for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == engine._cache.state_bytes
