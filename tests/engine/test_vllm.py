"""vLLM as the engine: what it samples from, that weights reach it, and that it ends as ours does.

Tests with the marker `vllm` need vLLM: `make test-vllm` runs them on a CPU, in an environment of
their own.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hone.checkpoint.random_state import capture_random_state
from hone.config.load import dump_config
from hone.config.tree import RLConfig
from hone.engine import base as base_module
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.vllm import engine as vllm_module
from hone.engine.vllm import setup as vllm_setup
from hone.engine.vllm.engine import VLLMEngine
from hone.errors import UserError
from hone.extras import is_installed
from hone.loops import reinforce
from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.types import Completion, Engine, Request, SamplingParams, StopReason
from hone.weights.sync import WeightSync
from tests.engine.reference import distribution
from tests.ranks import run_ranks
from tests.tiny_runs import write_inputs


def on_vllm(test: Any) -> Any:
    """Marks a test that needs vLLM."""
    is_missing = not is_installed("vllm")
    return pytest.mark.vllm(pytest.mark.skipif(is_missing, reason="vLLM is not installed")(test))


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"num_heads": 2, "num_kv_heads": 1},  # vLLM divides the hidden size by them
    "mistral": {"sliding_window": 7, "tie_word_embeddings": False},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_layers": 3},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_layers": 3},
}
EXACT = 5e-5
"""Float32 log-probabilities of two implementations, over a few layers."""


class ModuleTrainer:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, model: PreTrainedModel, forgets: str = "") -> None:
        self.model, self.forgets = model, forgets

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, t) for n, t in export_weights(self.model) if n != self.forgets)


@dataclass(slots=True)
class Models:
    """The same weights for our engine, for vLLM, and as a stock model to score with."""

    hone: PreTrainedModel
    plain: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def vllm(self, *, eos_token_ids: Sequence[int] = (), **fields: Any) -> VLLMEngine:
        length = fields.pop("max_model_len", 320)
        return VLLMEngine(
            self.hone,
            EngineConfig(**{"backend": "vllm", "max_num_seqs": 8, **fields}),
            max_model_len=length,
            eos_token_ids=eos_token_ids,
            tokenizer=self.tokenizer,
        )

    def embedded(self, *, eos_token_ids: Sequence[int] = (), **fields: Any) -> EmbeddedEngine:
        return EmbeddedEngine(
            self.hone,
            EngineConfig(**{"max_num_seqs": 8, **fields}),
            max_model_len=320,
            eos_token_ids=eos_token_ids,
            tokenizer=self.tokenizer,
        )


@pytest.fixture(scope="module")
def make_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    made: dict[str, Models] = {}

    def make(family: str) -> Models:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_folder(folder, family)
            made[family] = load_models(folder)
        return made[family]

    return make


def make_folder(folder: Path, family: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 32, "intermediate_size": 96}
    make_tiny_model(
        folder,
        family=family,
        tokenizer=make_char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789"),
        seed=random.randrange(2**31),
        initializer_range=0.2,
        **sizes | FAMILIES[family],
    )


def load_models(folder: Path) -> Models:
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    hone = load_model(ModelConfig(path=str(folder)), device="cpu", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Models(hone, plain, tokenizer)


@pytest.fixture(scope="module")
def models(make_models: Callable[[str], Models]) -> Models:
    return make_models("qwen3")


@pytest.fixture(scope="module")
def shared(models: Models) -> VLLMEngine:
    """One engine for tests that leave it empty and awake."""
    return models.vllm()


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def requests_like(num: int, *, lengths: range = range(1, 12), **params: Any) -> list[Request]:
    params = {"max_tokens": 12, **params}
    return [
        Request(
            id=f"{i}/a-b",
            prompt_ids=tuple(random.randrange(3, 40) for _ in range(random.choice(lengths))),
            sampling=SamplingParams(seed=random.randrange(2**63), **params),
        )
        for i in range(num)
    ]


@torch.no_grad()
def expected_logprobs(plain: PreTrainedModel, request: Request, done: Completion) -> list[float]:
    """Of each sampled token, under the distribution that the request asks for."""
    token_ids = [*request.prompt_ids, *done.token_ids]
    logits_TV = plain(torch.tensor([token_ids]), use_cache=False).logits[0].double().numpy()
    rows = logits_TV[len(request.prompt_ids) - 1 : -1]
    return [
        math.log(distribution(row, request.sampling)[token])
        for row, token in zip(rows, done.token_ids, strict=True)
    ]


def largest_difference(
    plain: PreTrainedModel, requests: Sequence[Request], done: dict[str, Completion]
) -> float:
    assert done.keys() == {request.id for request in requests}
    return max(
        abs(a - b)
        for request in requests
        for a, b in zip(
            done[request.id].logprobs,
            expected_logprobs(plain, request, done[request.id]),
            strict=True,
        )
    )


@torch.no_grad()
def perturb(models: Models) -> None:
    """Change every weight of both models alike; tied ones stay tied."""
    for ours, plain in zip(models.hone.parameters(), models.plain.parameters(), strict=True):
        plain.add_(torch.randn_like(plain) * 0.1)
        ours.copy_(plain)


@on_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_R2_R4_vllm_samples_with_the_weights_that_were_delivered(
    make_models: Callable[[str], Models], family: str
) -> None:
    models = make_models(family)
    engine = models.vllm()
    requests = requests_like(6)
    assert largest_difference(models.plain, requests, run(engine, requests)) < EXACT
    perturb(models)
    stale = run(engine, requests)
    assert largest_difference(models.plain, requests, stale) > 0.1
    report = WeightSync(ModuleTrainer(models.hone), engine).push(version=7)
    assert report.bytes
    fresh = run(engine, requests)
    assert largest_difference(models.plain, requests, fresh) < EXACT
    assert {v for done in stale.values() for v in done.weight_versions} == {0}
    assert {v for done in fresh.values() for v in done.weight_versions} == {7}


@on_vllm
def test_R2_each_single_weight_reaches_what_is_sampled(models: Models, shared: VLLMEngine) -> None:
    [request] = requests_like(1, temperature=0.0, max_tokens=3, lengths=range(5, 6))
    for version, parameter in enumerate(models.hone.parameters(), start=10):
        plain = dict(models.plain.named_parameters())[name_of(models.hone, parameter)]
        before = run(shared, [request])
        with torch.no_grad():
            plain.mul_(1 + 0.3 * torch.rand_like(plain))
            parameter.copy_(plain)
        WeightSync(ModuleTrainer(models.hone), shared).push(version=version)
        after = run(shared, [request])
        assert before[request.id].logprobs != after[request.id].logprobs
        assert largest_difference(models.plain, [request], after) < EXACT


def name_of(model: PreTrainedModel, parameter: Tensor) -> str:
    return next(name for name, found in model.named_parameters() if found is parameter)


@on_vllm
@pytest.mark.parametrize("plant", ["never sent", "not written", "half written", "untied"])
def test_R3_planted_an_incomplete_delivery_is_refused(
    models: Models, shared: VLLMEngine, plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturb(models)
    victim = "model.layers.1.self_attn.k_proj.weight"
    trainer = ModuleTrainer(models.hone, forgets=victim if plant == "never sent" else "")
    correct = base_module.deliver

    def faulty(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        target = dict(shared.named_weights())[victim]
        kept = [pair for pair in pairs if not pair[0].is_set_to(target)]
        if plant == "half written":
            source = models.hone.get_parameter(victim).detach()
            kept.append((target[: len(target) // 2], source[: len(target) // 2]))
        return correct(kept)

    if plant in ("not written", "half written"):
        monkeypatch.setattr(base_module, "deliver", faulty)
    if plant == "untied":
        untied = copy.deepcopy(models.hone)
        head = untied.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        trainer = ModuleTrainer(untied)
    with pytest.raises(RuntimeError, match="lm_head" if plant == "untied" else victim):
        WeightSync(trainer, shared).push(version=99)
    shared.submit(requests := requests_like(2))
    with pytest.raises(RuntimeError, match="syncing"):
        shared.step()
    monkeypatch.undo()
    WeightSync(ModuleTrainer(models.hone), shared).push(version=100)
    done = run(shared, [])
    assert largest_difference(models.plain, requests, done) < EXACT


@on_vllm
def test_R2_planted_packed_weights_are_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone, vLLM on a CPU computes with copies that no delivery reaches."""
    monkeypatch.setattr(vllm_setup, "unpacked_weights", nullcontext)
    with pytest.raises(
        RuntimeError, match=r"packed copies .* model\.layers\.0\.self_attn\.qkv_proj"
    ):
        models.vllm()


@on_vllm
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_drawn_from(
    models: Models, shared: VLLMEngine, params: dict[str, float]
) -> None:
    requests = requests_like(6, **params)
    others = [replace(r, id=f"other {r.id}") for r in requests_like(3, temperature=0.5)]
    done = run(shared, [*requests, *others])
    assert largest_difference(models.plain, [*requests, *others], done) < EXACT


@on_vllm
def test_draws_follow_the_distribution_and_the_seed_alone(
    models: Models, shared: VLLMEngine
) -> None:
    """Neighbouring seeds give independent draws, the same seed the same in any company."""
    [request] = requests_like(1, max_tokens=1, temperature=1.5)
    many = [
        replace(request, id=str(seed), sampling=replace(request.sampling, seed=seed))
        for seed in range(3000)
    ]
    done = run(shared, many)
    with torch.no_grad():
        logits_TV = models.plain(torch.tensor([request.prompt_ids])).logits[0].double().numpy()
    probs = distribution(logits_TV[-1], request.sampling)
    counts = Counter(completion.token_ids[0] for completion in done.values())
    likely = [token for token in range(len(probs)) if probs[token] * len(many) > 5]
    chi_squared = sum(
        (counts[token] - len(many) * probs[token]) ** 2 / (len(many) * probs[token])
        for token in likely
    )
    assert chi_squared < len(likely) + 6 * math.sqrt(2 * len(likely))
    alone = requests_like(1, max_tokens=20)
    in_company = run(shared, [*alone, *(replace(r, id=f"x{r.id}") for r in requests_like(7))])
    assert run(shared, alone)[alone[0].id].token_ids == in_company[alone[0].id].token_ids


def test_a_continuation_does_not_repeat_the_draws_of_the_beginning() -> None:
    seeds = {vllm_module._seed(seed, num) for seed in (-3, 0, 1, 2**64) for num in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


@on_vllm
def test_R20_completions_end_as_those_of_the_embedded_engine(models: Models) -> None:
    """Greedy requests give the same tokens in both, so that all that is left is how they end."""
    free = requests_like(4, temperature=0.0, max_tokens=24)
    told = run(models.embedded(), free)
    cases = list(free)
    for request in free:
        tokens = told[request.id].token_ids
        text = models.tokenizer.decode(tokens[8:11])
        assert isinstance(text, str)
        for changes in (
            {"stop_token_ids": (tokens[5],)},
            {"stop_token_ids": (tokens[0],)},
            {"stop": ("never there", text)},
            {"stop": (text,), "max_tokens": 11},
            {"stop": (text,), "stop_token_ids": (tokens[10],)},
            {"stop": (text,), "stop_token_ids": (tokens[10],), "ignore_eos": True},
            {"max_tokens": 1},
            {"stop_token_ids": (tokens[9],), "max_tokens": 10},
        ):
            sampling = replace(request.sampling, **changes)
            cases.append(replace(request, id=f"{request.id} {len(cases)}", sampling=sampling))
        resumed = Completion(
            request_id=request.id,
            token_ids=tokens[:9],
            logprobs=told[request.id].logprobs[:9],
            weight_versions=[3] * 9,
            stop_reason=StopReason.ABORT,
        )
        for stop in ((), (text,)):  # the second is complete only after the resumed part
            sampling = replace(request.sampling, stop=stop)
            cases.append(
                replace(
                    request, id=f"{request.id} {len(cases)}", sampling=sampling, resumed=resumed
                )
            )
    # An id that no resumed part holds, so that none has ended already.
    late = [t for r in free for t in told[r.id].token_ids[9:]]
    early = {t for r in free for t in told[r.id].token_ids[:9]}
    eos = [t for t in late if t not in early][:1]
    embedded = models.embedded(eos_token_ids=eos, enable_prefix_caching=False)
    ours = run(embedded, cases)
    engine = models.vllm(eos_token_ids=eos, enable_prefix_caching=False)
    theirs = run(engine, cases)
    stopped = next(case for case in cases if case.sampling.stop)
    for each in (embedded, engine):
        run(each, [stopped])
    assert engine.stats().num_running == 0, "vLLM does not go on with what has ended here"
    assert {done.stop_reason for done in ours.values()} >= {
        StopReason.EOS,
        StopReason.LENGTH,
        StopReason.STOP_STRING,
    }
    counts = engine.stats()
    for field in ("num_prompt_tokens", "num_generated_tokens", "num_first_tokens"):
        assert getattr(counts, field) == getattr(embedded.stats(), field), field
    for name, done in ours.items():
        assert theirs[name].logprobs == pytest.approx(done.logprobs, abs=EXACT)
        assert replace(theirs[name], logprobs=[]) == replace(done, logprobs=[])


@on_vllm
def test_an_aborted_request_goes_on_from_its_tokens(models: Models, shared: VLLMEngine) -> None:
    requests = requests_like(10, temperature=0.0, max_tokens=20)
    whole = run(shared, requests)
    shared.submit(requests)
    for _ in range(7):
        shared.step()
    assert shared.stats().num_running == 8
    assert shared.stats().num_waiting == 2
    assert shared.stats().kv_cache_usage > 0
    partial = shared.abort([*(request.id for request in requests), "never submitted"])
    assert not shared.has_unfinished
    assert shared.stats().num_running == shared.stats().num_waiting == 0
    assert shared.stats().kv_cache_usage == 0
    assert [len(p.token_ids) for p in partial] == [7] * 8 + [0] * 2
    for done in partial:
        assert done.stop_reason is StopReason.ABORT
        assert done.token_ids == whole[done.request_id].token_ids[: len(done.token_ids)]
    resumed = [
        replace(request, resumed=done if done.token_ids else None)
        for request, done in zip(requests, partial, strict=True)
    ]
    for name, done in run(shared, resumed).items():
        assert done.token_ids == whole[name].token_ids
        assert done.logprobs == pytest.approx(whole[name].logprobs, abs=EXACT)
        assert done.stop_reason is whole[name].stop_reason


@on_vllm
@pytest.mark.parametrize("plant", [False, True], ids=["sound", "planted"])
def test_weights_change_under_running_requests(
    models: Models, plant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running ones go on with the keys they have; what starts later finds none of older weights.

    Planted: cached blocks keep their names over a sync.
    """
    engine = models.vllm(max_num_seqs=2)
    start = engine.weight_version
    prompt = tuple(random.randrange(3, 40) for _ in range(260))
    params = SamplingParams(max_tokens=20, temperature=0.0)
    [running, second, waiting, late] = [
        Request(id=name, prompt_ids=(*prompt, i + 3), sampling=params)
        for i, name in enumerate(("running", "second", "waiting", "late"))
    ]
    engine.submit([running, second, waiting])
    for _ in range(5):
        engine.step()
    perturb(models)
    if plant:
        monkeypatch.setattr(engine, "_caches_prefixes", False)
        monkeypatch.setattr(engine, "_num_syncs", -1)
    WeightSync(ModuleTrainer(models.hone), engine).push(version=5)
    if plant:
        monkeypatch.setattr(engine, "_caches_prefixes", True)
        monkeypatch.setattr(engine, "_num_syncs", 1)
    done = run(engine, [late])
    for name in ("running", "second"):
        assert done[name].weight_versions == [start] * 5 + [5] * 15
    fresh = {name: done[name] for name in ("waiting", "late")}
    assert all(set(c.weight_versions) == {5} for c in fresh.values())
    stale_keys = largest_difference(models.plain, [waiting, late], fresh) > EXACT
    assert stale_keys is plant
    assert fresh["late"].num_cached_tokens == 256  # from `waiting`, of the same weights
    if not plant:
        assert fresh["waiting"].num_cached_tokens == 0


@on_vllm
@pytest.mark.parametrize("caches", [True, False], ids=["caches prefixes", "no cache"])
def test_a_prompt_that_a_sync_cuts_in_two_begins_anew(models: Models, caches: bool) -> None:
    """All its tokens record the new weights, so none may be drawn over keys of the old ones."""
    engine = models.vllm(max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=caches)
    request = Request(
        id="cut",
        prompt_ids=tuple(random.randrange(3, 40) for _ in range(200)),
        # Greedy: vLLM on a CPU cannot put the generator of a seeded request back after a part of a
        # prefill ("CPU Generator does not use offset").
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
    )
    engine.submit([request])
    engine.step()
    engine.step()
    perturb(models)
    WeightSync(ModuleTrainer(models.hone), engine).push(version=5)
    done = run(engine, [])
    assert done["cut"].weight_versions == [5] * 4
    assert largest_difference(models.plain, [request], done) < EXACT


@on_vllm
def test_prefixes_are_shared_within_a_group(shared: VLLMEngine) -> None:
    prompt = tuple(random.randrange(3, 40) for _ in range(200))
    before = shared.stats()
    for name, cached in (("first", 0), ("second", 128)):
        params = SamplingParams(max_tokens=2, seed=1)
        done = run(shared, [Request(id=name, prompt_ids=prompt, sampling=params)])
        assert done[name].num_cached_tokens == cached
    after = shared.stats()
    assert after.num_cached_tokens - before.num_cached_tokens == 128
    assert after.num_prompt_tokens - before.num_prompt_tokens == 400
    assert after.num_generated_tokens - before.num_generated_tokens == 4
    assert after.num_first_tokens - before.num_first_tokens == 2
    assert after.num_steps - before.num_steps == 4
    assert after.busy_s > before.busy_s


@on_vllm
def test_a_full_cache_loses_no_token(models: Models) -> None:
    """Sequences that do not fit together are preempted, and go on where they were."""
    blocks = 7 * 2 * 2 * 128 * 2 * 32 * 4  # layers, keys and values, tokens, heads, bytes
    engine = models.vllm(kv_cache_gib=blocks / 2**30, enable_prefix_caching=False)
    requests = requests_like(6, lengths=range(60, 100), max_tokens=120)
    done = run(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert largest_difference(models.plain, requests, done) < 5 * EXACT
    assert all(len(completion.token_ids) == 120 for completion in done.values())


@on_vllm
def test_lower_priorities_go_first_then_the_order_of_submission(models: Models) -> None:
    engine = models.vllm(max_num_seqs=1)
    priorities = [0, 0, -1, 1, -1, 0, *[0] * 8]
    requests = [
        replace(request, priority=priority)
        for request, priority in zip(
            requests_like(len(priorities), max_tokens=2), priorities, strict=True
        )
    ]
    order = [int(name.partition("/")[0]) for name in run(engine, requests)]
    assert order == sorted(range(len(priorities)), key=lambda i: (priorities[i], i))


@on_vllm
@pytest.mark.parametrize("frees", [True, False])
def test_sleep_keeps_requests(models: Models, frees: bool) -> None:
    engine = models.vllm(enable_sleep=frees)
    requests = requests_like(2)
    engine.submit(requests)
    engine.step()
    with pytest.raises(RuntimeError, match="2 sequences run"):
        engine.sleep()
    engine.abort([request.id for request in requests])
    engine.submit(requests[:1])
    engine.sleep()
    for call in (engine.step, engine.sleep, engine.begin_sync):
        with pytest.raises(RuntimeError, match="this one is asleep"):
            call()
    engine.submit(requests[1:])
    engine.wake()
    done = run(engine, [])
    assert largest_difference(models.plain, requests, done) < EXACT


@on_vllm
def test_an_engine_without_weights_waits_for_them(models: Models) -> None:
    shape = copy.deepcopy(models.hone).to("meta")
    engine = VLLMEngine(
        shape,
        EngineConfig(backend="vllm", max_num_seqs=4),
        max_model_len=64,
        eos_token_ids=(),
        device=torch.device("cpu"),
    )
    with pytest.raises(RuntimeError, match=r"step\(\) needs an engine that is awake"):
        engine.step()
    WeightSync(ModuleTrainer(models.hone), engine).push(version=0)
    requests = requests_like(3)
    assert largest_difference(models.plain, requests, run(engine, requests)) < EXACT


@on_vllm
def test_what_cannot_be_served_is_refused(
    models: Models, shared: VLLMEngine, tmp_path: Path
) -> None:
    [request] = requests_like(1)
    for params, said in (({"temperature": 0.003}, "0.01 or more"), ({"max_tokens": 999}, "fit")):
        with pytest.raises(ValueError, match=said):
            shared.submit([request, replace(request, id="b", sampling=SamplingParams(**{
                "max_tokens": 4, **params}))])  # fmt: skip
        assert not shared.has_unfinished
    with pytest.raises(ValueError, match="already in use"):
        shared.submit([request, request])
    with pytest.raises(ValueError, match="context length of 512"):
        models.vllm(max_model_len=513)
    odd = load_model(
        ModelConfig(path=str(make_tiny_model(tmp_path, head_dim=16))), device="cpu", seed=0
    )
    with pytest.raises(UserError, match="head_dim is 16; on a CPU vLLM serves 32"):
        VLLMEngine(odd, EngineConfig(), eos_token_ids=(), max_model_len=32)


def rl_config(folder: Path, name: str, **sections: dict[str, Any]) -> RLConfig:
    source = {"eval": [{"path": str(folder / "eval.jsonl")}]}
    source["train"] = [{"path": str(folder / "train.jsonl")}]
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": folder / name, "steps": 16, "device": "cpu"},
        "model": {"path": str(folder / "model")},
        "data": {**source, "chat": "never", "max_prompt_tokens": 8},
        "rollout": {
            "prompts_per_step": 8,
            "n_samples_per_prompt": 8,
            "max_completion_tokens": 8,
            "oversample_prompts": 2,
        },
        "engine": {"backend": "vllm", "max_num_seqs": 64},
        "reward": {"functions": [{"fn": f"{folder / 'rewards.py'}:even"}], "num_workers": 1},
        "trainer": {"optimizer": {"lr": 3e-3}},
        "eval": {"max_completion_tokens": 8, "every_n_steps": 16},
        "checkpoint": {"every_n_steps": 0},
        "log": {"to": [], "samples_per_step": 99},
    }
    for section, overrides in sections.items():
        tree[section] = tree.get(section, {}) | overrides
    return RLConfig.model_validate(tree)


@on_vllm
def test_R4_a_run_trains_with_vllm_and_goes_on_exactly(tmp_path: Path) -> None:
    """Every step's samples are scored alike by the trainer, the reward rises, and a run that was
    interrupted gives the same weights as one that was not."""
    write_inputs(tmp_path, head_dim=32)
    straight = rl_config(tmp_path, "straight")
    reinforce.run(straight)
    rows = [json.loads(line) for line in (straight.run.dir / "metrics.jsonl").open()]
    assert rows[0]["off_policy/parity/kl"] < 1e-6
    assert rows[0]["off_policy/parity/max_difference"] < EXACT
    assert all(row["rollout/weight_version/max"] == row["step"] - 1 for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert any(row["rollout/carried_samples"] for row in rows)
    for steps in (9, 16):
        run = {"dir": tmp_path / "broken", "steps": steps, "device": "cpu"}
        reinforce.run(rl_config(tmp_path, "broken", run=run, checkpoint={"every_n_steps": 50}))
    weights = [
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("straight", "broken")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@on_vllm
def test_R4_planted_weights_that_stay_behind_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof over other tensors than vLLM computes with would pass; the gate does not."""
    write_inputs(tmp_path, head_dim=32)
    copies: dict[str, Tensor] = {}
    views = VLLMEngine.named_weights

    def beside(engine: VLLMEngine) -> Iterator[tuple[str, Tensor]]:
        tied: dict[int, Tensor] = {}
        for name, tensor in views(engine):
            mine = tied.setdefault(tensor.data_ptr(), copies.get(name, tensor.clone()))
            yield name, copies.setdefault(name, mine)

    monkeypatch.setattr(VLLMEngine, "named_weights", beside)
    with pytest.raises(UserError, match="disagree before the first update"):
        reinforce.run(rl_config(tmp_path, "planted"))


@on_vllm
def test_the_trainer_finds_its_process_as_it_was(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    held = capture_random_state(), torch.set_num_threads
    engine = models.vllm()
    assert os.environ["LOCAL_WORLD_SIZE"] == "7"
    assert "LD_PRELOAD" not in os.environ
    assert torch.get_float32_matmul_precision() == "medium"
    now = capture_random_state()
    assert torch.equal(held[0].pop("torch"), now.pop("torch"))
    assert (held[0], held[1]) == (now, torch.set_num_threads)
    torch.set_float32_matmul_precision(before)
    finalizer = getattr(engine._llm.engine_core, "_finalizer", None)
    assert finalizer is None or not finalizer.alive, "it destroys all process groups"


@on_vllm
@pytest.mark.parametrize("is_ahead", [False, True], ids=["sync", "pipelined"])
def test_an_engine_apart_is_filled_by_broadcast(tmp_path: Path, is_ahead: bool) -> None:
    """Commanded through its host, under requests in flight where the loop samples ahead."""
    write_inputs(tmp_path, head_dim=32)
    cfg = rl_config(
        tmp_path,
        "apart",
        run={"dir": tmp_path / "apart", "steps": 6, "device": "cpu"},
        rollout={"oversample_prompts": 0},
        cluster={"num_engines": 1},
        pipeline={"max_staleness": int(is_ahead)},
    )
    reinforce.run(cfg)
    rows = [json.loads(line) for line in (cfg.run.dir / "metrics.jsonl").open()]
    assert len(rows) == 6
    assert rows[0]["off_policy/parity/max_difference"] < EXACT
    for row in rows:
        assert row["rollout/weight_version/max"] <= row["step"] - 1
        if not is_ahead:
            assert row["rollout/weight_version/min"] == row["step"] - 1
            assert row["off_policy/mismatch_kl"] < 1e-9


@on_vllm
def test_an_engine_apart_works_with_as_many_threads_as_torch_has(tmp_path: Path) -> None:
    """Which are others than OpenMP's own number, and one less while the trainer collects."""
    write_inputs(tmp_path, head_dim=32)
    cfg = rl_config(
        tmp_path,
        "apart",
        run={"dir": tmp_path / "apart", "steps": 1, "device": "cpu"},
        cluster={"num_engines": 1},
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 2)
    try:
        reinforce.run(cfg)
    finally:
        torch.set_num_threads(num_threads)
    assert len((cfg.run.dir / "metrics.jsonl").read_text().splitlines()) == 1


@on_vllm
def test_two_processes_sample_beside_their_trainers(tmp_path: Path) -> None:
    """Each has an engine in a process group that is the trainers'; one process does the same."""
    write_inputs(tmp_path, head_dim=32)
    found: list[list[float]] = []
    for num in (1, 2):
        name = f"by_{num}"
        run = {"dir": tmp_path / name, "steps": 3, "device": "cpu"}
        cfg = rl_config(tmp_path, name, run=run, rollout={"oversample_prompts": 0})
        (tmp_path / "recipe.yaml").write_text(dump_config(cfg))
        command = [sys.executable, "-m", "hone", "rl", str(tmp_path / "recipe.yaml")]
        ended = subprocess.run(
            [*command, "--nproc", str(num)], capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stderr
        rows = [json.loads(line) for line in (cfg.run.dir / "metrics.jsonl").open()]
        assert rows[0]["off_policy/parity/max_difference"] < EXACT
        found.append([row["reward/mean"] for row in rows])
    assert found[0] == pytest.approx(found[1])


@on_vllm
def test_R2_R3_R4_two_ranks_sample_as_one_model(tmp_path: Path) -> None:
    """Each holds, and proves, its parts. The vocabulary does not divide, and among the models are
    one with fewer key heads than ranks and biases, and one with a head of its own."""
    families = ("qwen3", "qwen2", "llama", "gemma2")
    for family in families:
        make_folder(tmp_path / family, family)
    found = run_ranks("tests.engine.vllm_ranks", 2, tmp_path)
    for family in families:
        assert max(found[family]["first"], found[family]["fresh"]) < EXACT, family
        assert found[family]["stale"] > 0.1
        assert found[family]["version"] == 7
    refused = found["refused"]
    assert all("k_proj.weight" in said for said in refused["never sent"])
    assert "on another rank" in refused["not written"][0]
    assert "k_proj.weight: values" in refused["not written"][1]
    assert all("has shape [6, 64]" in said for said in refused["other size"])
    assert found["kept"]["same"] == 10
    assert found["kept"]["versions"]
    assert found["kept"]["free blocks"]
    assert found["kept"]["late"] < EXACT
    first, second = found["preempted"]["preemptions"]
    assert first == second > 0
    assert found["preempted"]["difference"] < 5 * EXACT
    assert found["planted"]["rows"] > 0.1
    assert found["planted"]["columns"] > 0.1
    hosted = found["hosted"]
    assert max(hosted["first"], hosted["fresh"]) < EXACT
    assert hosted["versions"] == [2]
    assert hosted["uncounted"] == 0
