"""Weight versions, the prefix cache across them, and the order of sync, sleep and wake."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch

from hone.engine.base import EngineState
from hone.engine.block_manager import BlockManager
from hone.engine.engine import EmbeddedEngine
from hone.errors import UserError
from hone.models import manifest
from hone.types import Request, SamplingParams
from tests.engine.test_generation import assert_equal, make_requests, run
from tests.tables import table

PROMPT = Request(
    id="a", prompt_ids=tuple(range(3, 20)), sampling=SamplingParams(max_tokens=12, seed=3)
)


@pytest.fixture
def own(make_models):
    """Models whose weights a test may change: a copy that shares nothing."""
    models = make_models("qwen3")
    return replace(models, hone=copy.deepcopy(models.hone))


def change_weights(model, seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * scale)


def push(engine, version):
    engine.begin_sync()
    engine.finish_sync(manifest.build_manifest(engine.named_weights(), version))


def check_new_weights_see_no_old_keys(models):
    """The first requests under new weights equal those of an engine that never saw the old."""
    engine = models.engine()
    before = run(engine, [PROMPT])["a"]
    assert run(engine, [replace(PROMPT, id="b")])["b"].num_cached_tokens == 16
    change_weights(models.hone)
    push(engine, 1)
    requests = [PROMPT, *(replace(PROMPT, id=f"{i}") for i in range(2))]
    after = run(engine, requests)
    assert [after[name].num_cached_tokens for name in ("a", "0", "1")] == [0, 16, 16]
    assert_equal(after, run(models.engine(), requests))
    assert before.token_ids != after["a"].token_ids
    assert after["a"].weight_versions == [1] * 12


@table("family", ["qwen3", "gemma2"])
@table("moved", ["self_attn.q_proj", "self_attn.o_proj"])
def test_weights_that_were_moved_are_not_what_samples(make_models, family, moved):
    """Manifests agree: they read where the weights lie now, merged layers and graphs where they
    lay."""
    model = copy.deepcopy(make_models(family).hone)
    engine = replace(make_models(family), hone=model).engine()
    push(engine, 1)
    parameter = model.get_parameter(f"model.layers.0.{moved}.weight")
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="have been moved"):
        push(engine, 2)
    assert (engine.weight_version, engine.state) == (1, EngineState.SYNCING)


def test_R9_cached_keys_belong_to_a_weight_version(own):
    check_new_weights_see_no_old_keys(own)


def test_R9_planted_unversioned_key_is_caught(own, monkeypatch):
    monkeypatch.setattr(BlockManager, "invalidate_prefixes", lambda self: None)
    with pytest.raises(AssertionError):
        check_new_weights_see_no_old_keys(own)


def test_R9_versions_may_come_back(own):
    """A version number that is pushed again with other weights is still another set of weights."""
    engine = own.engine()
    push(engine, 5)
    run(engine, [PROMPT])
    change_weights(own.hone)
    push(engine, 5)
    assert_equal(run(engine, [PROMPT]), run(own.engine(), [PROMPT]))


def check_sequences_in_flight(models):
    engine = models.engine()
    engine.submit([PROMPT])
    for _ in range(5):
        engine.step()
    change_weights(models.hone)
    push(engine, 7)
    done = run(engine, [replace(PROMPT, id="new")])
    assert done["a"].weight_versions == [0] * 5 + [7] * 7
    assert done["new"].weight_versions == [7] * 12
    assert done["new"].num_cached_tokens == 0
    # A block that was filled after the sync continues keys of the old weights: never reused.
    longer = replace(PROMPT, id="z", prompt_ids=(*PROMPT.prompt_ids, *done["a"].token_ids))
    later = run(engine, [longer])
    assert later["z"].num_cached_tokens <= 16
    assert_equal(later, run(models.engine(), [longer]))


def test_R9_sequences_in_flight_record_both_versions_and_share_nothing(own):
    check_sequences_in_flight(own)


def test_R9_planted_sharing_of_mixed_blocks_is_caught(own, monkeypatch):
    correct = BlockManager.publish

    def publish(self, sequence, num_tokens):
        if sequence.num_published == 0 or sequence.chain < self._root:
            sequence.chain, sequence.num_published = self._root, 0
        correct(self, sequence, num_tokens)

    def invalidate(self):
        self._root = next(self._chain_ids)

    monkeypatch.setattr(BlockManager, "publish", publish)
    monkeypatch.setattr(BlockManager, "invalidate_prefixes", invalidate)
    with pytest.raises(AssertionError):
        check_sequences_in_flight(own)


@table("budget", [5, 6, 7, 8])
def test_R9_what_an_aborted_request_leaves_in_the_cache_is_whole(models, budget):
    """After any number of steps, in the middle of a block, the prompt or the answer."""
    expected = run(models.engine(), [PROMPT])["a"]
    longer = replace(PROMPT, prompt_ids=(*PROMPT.prompt_ids, *expected.token_ids))
    again = run(models.engine(), [longer])["a"]
    num_cached = set()
    for num_steps in range(1, 10):
        engine = models.engine(max_num_batched_tokens=budget, max_num_seqs=2)
        engine.submit([PROMPT])
        for _ in range(num_steps):
            engine.step()
        engine.abort([PROMPT.id])
        done = run(engine, [longer])["a"]
        num_cached.add(done.num_cached_tokens)
        assert_equal({"a": done}, {"a": again})
    assert len(num_cached) > 2


class Recomputed:
    """Stock models under each version of the weights, to score what an engine has sampled."""

    def __init__(self, models):
        self._plain, self._hone = models.plain, models.hone
        self._versions = {}
        self.remember(0)

    def remember(self, version):
        """The weights of now are `version`."""
        self._versions[version] = copy.deepcopy(self._plain)
        self._versions[version].load_state_dict(self._hone.state_dict())

    @torch.no_grad()
    def check(self, request, completion):
        """Each token that no older one precedes has, under the version that it records, the
        log-probability that was recorded; returns how many these are."""
        versions = completion.weight_versions
        assert versions == sorted(versions)
        num_fresh = versions.count(versions[0])
        token_ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = self._versions[versions[0]](token_ids, use_cache=False).logits[0].double()
        start = len(request.prompt_ids)
        scored = logits.log_softmax(-1)[start - 1 : -1].gather(1, token_ids[0, start:, None])[:, 0]
        recorded = torch.tensor(completion.logprobs, dtype=torch.float64)
        gap = (scored - recorded)[:num_fresh].abs().max()
        assert gap < 1e-4, f"{request.id}: {float(gap):.3f} nats under version {versions[0]}"
        return num_fresh


LONG = [
    Request(
        id=f"{group}/{index}",
        prompt_ids=tuple((7 * group + 3 * position) % 30 + 3 for position in range(17 + 4 * group)),
        sampling=SamplingParams(max_tokens=11, seed=10 * group + index),
    )
    for group in range(3)
    for index in range(2)
]
"""Groups of two; each prompt takes several steps of 8 tokens."""
SMALL = {"max_num_batched_tokens": 8, "max_num_seqs": 6}
CUT_PROMPTS = {
    "shared prompts": SMALL,
    "no prefix cache": {**SMALL, "enable_prefix_caching": False},
    "a step in flight": {**SMALL, "in_flight": 1},
    "preempted": {**SMALL, "kv_cache_gib": 14 * 4 * 256 / 2**30, "max_model_len": 40},
}


@pytest.mark.parametrize("name", CUT_PROMPTS)
def test_R9_a_prompt_that_a_sync_cuts_in_two_begins_anew(own, name):
    """Whatever step the weights change after: no token that counts as fresh was drawn over keys of
    older weights."""
    recomputed, num_cut, num_preempted = Recomputed(own), 0, 0
    for num_steps in range(1, 13, 2):
        engine = own.engine(**CUT_PROMPTS[name])
        version = 2 * num_steps
        push(engine, version - 1)
        recomputed.remember(version - 1)
        engine.submit(LONG)
        done = {c.request_id: c for _ in range(num_steps) for c in engine.step()}
        num_cut += any(
            0 < sequence.num_computed < len(sequence.request.prompt_ids)
            for sequence in engine._scheduler.running
        )
        change_weights(own.hone, seed=num_steps, scale=0.1)
        push(engine, version)
        recomputed.remember(version)
        done |= run(engine, [])
        assert len(done) == len(LONG)
        for request in LONG:
            assert recomputed.check(request, done[request.id]) > 0
        num_preempted += engine.stats().num_preemptions
    assert num_cut > 2
    assert (num_preempted > 0) == (name == "preempted")


def test_a_resumed_sample_that_a_sync_cuts_in_two_begins_anew(own):
    """It goes on as one that is resumed after the sync."""
    first = run(own.engine(), LONG[:2])
    requests = [replace(r, resumed=first_tokens(first[r.id], 3)) for r in LONG[:2]]
    change_weights(own.hone)
    after = own.engine(**SMALL)
    push(after, 2)
    expected = run(after, requests)
    engine = own.engine(**SMALL)
    engine.submit(requests)
    engine.step()
    assert 0 < engine._scheduler.running[0].num_computed < len(LONG[0].prompt_ids)
    # The engine computes with other weights until then.
    undo = {n: p.detach().clone() for n, p in own.hone.named_parameters()}
    change_weights(own.hone, seed=1)
    engine.step()
    with torch.no_grad():
        for n, p in own.hone.named_parameters():
            p.copy_(undo[n])
    push(engine, 2)
    actual = run(engine, [])
    for completion in (*actual.values(), *expected.values()):
        completion.num_cached_tokens = 0  # of the first admission
    assert_equal(actual, expected)


def test_R9_a_resumed_request_keeps_the_version_of_each_token(own):
    engine, requests = own.engine(), {request.id: request for request in LONG[:2]}
    expected = []
    for version in range(1, 5):
        push(engine, version)
        engine.submit(list(requests.values()))
        for _ in range(2):
            engine.step()
        expected += [version] * 2
        for partial in engine.abort(requests):
            assert partial.weight_versions == expected
            requests[partial.request_id] = replace(requests[partial.request_id], resumed=partial)
    push(engine, 9)
    for done in run(engine, list(requests.values())).values():
        assert done.weight_versions == [*expected, 9, 9, 9]


def test_cached_tokens_of_a_resumed_request_are_those_of_its_prompt(models):
    engine = models.engine()
    done = run(engine, [PROMPT])["a"]
    resumed = run(engine, [replace(PROMPT, id="b", resumed=first_tokens(done, 9))])["b"]
    assert resumed.num_cached_tokens == len(PROMPT.prompt_ids)
    assert engine.stats().num_cached_tokens == len(PROMPT.prompt_ids)


def test_preempted_sequences_are_recomputed_under_the_new_weights(own):
    """Recomputed from their tokens, they go on exactly like a resumed request."""
    requests = make_requests()[:3]
    engine = own.engine()
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine._scheduler.restart(engine._sequences.values())
    change_weights(own.hone)
    push(engine, 2)
    done = run(engine, [])

    other = own.engine()
    push(other, 2)
    resumed = [replace(request, resumed=first_tokens(done[request.id], 4)) for request in requests]
    assert_equal(done, run(other, resumed))
    assert all(list(done[r.id].weight_versions[:5]) == [0, 0, 0, 0, 2] for r in requests)


def first_tokens(completion, count):
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        weight_versions=completion.weight_versions[:count],
    )


def test_finish_sync_names_what_is_wrong_and_stays_in_sync(own):
    engine = own.engine()
    good = manifest.build_manifest(engine.named_weights(), 1)
    engine.begin_sync()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = dict(good.tensors)
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    tensors[name] = replace(tensors[name], checksum=1)
    with pytest.raises(RuntimeError) as error:
        engine.finish_sync(replace(good, tensors=tensors))
    for text in ("model.extra", "model.norm.weight", name, "version 1"):
        assert text in str(error.value)
    assert engine.state is EngineState.SYNCING
    assert engine.weight_version == 0
    with pytest.raises(RuntimeError, match="syncing"):
        engine.step()
    engine.finish_sync(good)
    assert engine.weight_version == 1
    run(engine, [PROMPT])


# The state machine -------------------------------------------------------------------------------

LEGAL = {
    (EngineState.AWAKE, "step"): EngineState.AWAKE,
    (EngineState.AWAKE, "sleep"): EngineState.ASLEEP,
    (EngineState.AWAKE, "begin_sync"): EngineState.SYNCING,
    (EngineState.SYNCING, "begin_sync"): EngineState.SYNCING,
    (EngineState.SYNCING, "finish_sync"): EngineState.AWAKE,
    (EngineState.ASLEEP, "wake"): EngineState.AWAKE,
}
CALLS = ("step", "sleep", "wake", "begin_sync", "finish_sync")


def call(engine: EmbeddedEngine, name):
    if name == "finish_sync":
        engine.finish_sync(manifest.build_manifest(engine.named_weights(), 3))
    else:
        getattr(engine, name)()


@table("order", list(product(CALLS, repeat=3)))
def test_every_order_of_calls_follows_the_state_machine(models, order):
    engine = models.engine(max_num_seqs=1)
    state = EngineState.AWAKE
    for name in order:
        if (state, name) in LEGAL:
            call(engine, name)
            state = LEGAL[state, name]
        else:
            with pytest.raises(RuntimeError, match=rf"{name}\(\).*{state}"):
                call(engine, name)
        assert engine.state is state


def test_sleep_frees_the_cache_and_wake_brings_it_back_empty(models):
    engine = models.engine()
    expected = run(engine, [PROMPT])
    engine.sleep()
    assert engine._cache.layers == []
    engine.submit([PROMPT])
    assert engine.has_unfinished
    engine.wake()
    done = run(engine, [])
    assert done["a"].num_cached_tokens == 0
    assert_equal(expected, done)


def test_sleep_is_refused_while_sequences_run(models):
    engine = models.engine()
    engine.submit([PROMPT])
    engine.step()
    with pytest.raises(RuntimeError, match="1 sequences run"):
        engine.sleep()
    run(engine, [])


def test_wake_without_memory_says_both_sizes_and_stays_asleep(models, monkeypatch):
    engine = models.engine(kv_cache_gib=0.25)
    engine.sleep()
    monkeypatch.setattr("hone.engine.kv_cache.available_bytes", lambda device: 2**26)
    with pytest.raises(UserError, match=r"0\.25 GiB.*0\.06 GiB"):
        engine.wake()
    assert engine.state is EngineState.ASLEEP
    monkeypatch.undo()
    engine.wake()
    run(engine, [PROMPT])
