"""Routes of tokens, from the engine that records them to the trainer that replays them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from hone.attention import PackedContext
from hone.families.spec import EXPERT_MATRICES
from hone.models import routes as routes_module
from hone.models.adapters import adapt
from hone.models.manifest import build_manifest
from hone.models.routes import follow_routes, route_dtype, unrecorded
from hone.models.settings import LoraConfig
from hone.rollout.episodes import Episodes
from hone.rollout.state import (
    request_from_dict,
    request_to_dict,
    sample_from_dict,
    sample_to_dict,
)
from hone.trainer.frozen import WithoutAdapters
from hone.trainer.prefixes import shared_prefixes
from hone.types import Column, Completion, Prompt, Row, StopReason
from tests.rank_cases import check_cases, stir_adapters
from tests.ranks import parts_of, run_ranks
from tests.trainer import route_ranks
from tests.trainer.examples import gradients, logprobs_of, make_trainer
from tests.trainer.route_cases import (
    FAMILIES,
    chosen,
    complete,
    disturb,
    engine_of,
    ids_of,
    model_of,
    passed,
    request,
    rows_of,
)

EXACT = 1e-5


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def sampled(family: str, **fields: Any) -> list[Row]:
    requests = [request(number) for number in range(4)]
    return rows_of(requests, complete(engine_of(model_of(family), **fields), requests))


ENGINES = {
    "whole prompts": {},
    "prompts in pieces": {"max_num_batched_tokens": 4},
    "no shared blocks": {"enable_prefix_caching": False},
    # Of 4 tokens; sequences take up to 5 in the end.
    "blocks taken away": {"num_blocks": 10},
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines_record_what_routers_choose(family: str, name: str) -> None:
    model = model_of(family)
    fields: dict[str, Any] = {**ENGINES[name]}
    if num_blocks := fields.pop("num_blocks", None):
        num_bytes = (num_blocks + 0.5) * engine_of(model)._cache.block_bytes
        fields |= {"kv_cache_gib": num_bytes / 2**30, "max_model_len": 20}
    engine = engine_of(model, **fields)
    requests = [request(number) for number in range(6)]
    for one, done in zip(requests, complete(engine, requests), strict=True):
        expected = chosen(model, ids_of(one, done))
        assert done.routes is not None
        assert done.routes.dtype == np.uint8
        assert np.array_equal(done.routes, expected[:-1].numpy()), one.id
    assert (engine.stats().num_preemptions > 0) == (num_blocks is not None)
    is_shared = fields.get("enable_prefix_caching", True)
    assert (engine.stats().num_cached_tokens > 0) == is_shared


def test_replayed_routes_of_the_same_weights_change_no_bit(family: str) -> None:
    rows = sampled(family)
    live = make_trainer(model_of(family))
    replaying = make_trainer(model_of(family), replays_routes=True)
    for ours, theirs, row in zip(replaying.logprobs(rows), live.logprobs(rows), rows, strict=True):
        assert torch.equal(ours, theirs)
        assert float((ours - row.column("logprobs/engine")).abs().max()) < EXACT
    for trainer in (live, replaying):
        trainer.forward_backward(rows)
    found, expected = gradients(replaying), gradients(live)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def routing_differences(trainer: Any, rows: list[Row]) -> int:
    """Of recorded choices those that tokens do not pass."""
    with passed(trainer.model.module) as found:
        trainer.logprobs(rows)
    layers = rows[0].column("routes").shape[1]
    # One pass, rows in their order, a layer after the other.
    ids_TLK = torch.stack(found[-layers:], 1)
    recorded = torch.cat([row.column("routes") for row in rows])
    is_recorded = recorded != unrecorded(recorded.dtype)
    return int(((ids_TLK != recorded) & is_recorded).sum())


def test_a_router_that_has_moved_still_sends_tokens_where_they_were(family: str) -> None:
    rows, original = sampled(family), model_of(family)
    wanted = torch.cat(make_trainer(original).logprobs(rows))
    off: dict[bool, tuple[int, float]] = {}
    for replays in (False, True):
        model = model_of(family)
        disturb(model)
        trainer = make_trainer(model, replays_routes=replays)
        differing = routing_differences(trainer, rows)
        off[replays] = differing, float((torch.cat(trainer.logprobs(rows)) - wanted).abs().mean())
    assert off[False][0] > 20
    assert off[True][0] == 0
    assert off[True][1] < off[False][1]


def test_a_prompt_that_rows_pass_by_other_routes_is_shared_until_there() -> None:
    """Some samples of a group may have begun under other weights, as where they were carried over
    to the next step. Each row is computed as it is alone."""
    prompt = [7, 3, 11, 5, 2, 9, 1, 4, 6, 13]
    draw = torch.Generator().manual_seed(2)
    routes = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(32)])
    routes = routes.view(16, 2, 2).to(torch.uint8)
    rows: list[Row] = []
    for number in range(4):
        own = routes.clone()
        if number == 2:
            own[6, 1] = (own[6, 1] + 1) % 8
        own[:, 0] = own[:, 0].flip(-1) if number == 1 else own[:, 0]  # the same experts
        row = Row(
            id=f"r{number}",
            group_id="g",
            token_ids=[*prompt, *range(20 + number, 26 + number)],
            loss_mask=[False] * 10 + [True] * 6,
            columns={"routes": Column(own, per="token")},
        )
        rows.append(row)
    assert shared_prefixes(rows) == [6] * 4
    assert shared_prefixes([rows[0], rows[1], rows[3]]) == [10] * 3
    found = make_trainer(model_of("qwen3_5_moe_text"), replays_routes=True).logprobs(rows)
    for row, own in zip(rows, found, strict=True):
        alone = make_trainer(model_of("qwen3_5_moe_text"), replays_routes=True).logprobs([row])
        assert float((own - alone[0]).abs().max()) < EXACT


def reference_layer(
    mlp: Any, x: Tensor, ids: Tensor, *, scores: str, factor: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token through the experts it is sent to, weighted by their shares of the router's
    scores, in float64; with its parameters."""
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    own = dict(mlp.named_parameters())
    gate, gate_up, down = (own[n].detach().double().requires_grad_() for n in names)
    found = []
    for token, experts in zip(x, ids.tolist(), strict=True):
        logits = gate @ token
        of_all = logits.softmax(0) if scores == "softmax" else logits.sigmoid()
        total = sum(of_all[e] for e in experts)
        out = torch.zeros_like(token)
        for e in experts:
            left, right = (gate_up[e] @ token).chunk(2)
            out = out + factor * of_all[e] / total * (down[e] @ (silu(left) * right))
        found.append(out)
    return torch.stack(found), dict(zip(names, (gate, gate_up, down), strict=True))


def layer_errors(family: str) -> dict[str, float]:
    """Of a replaying layer's outputs and gradients, relative to the largest of each."""
    model = model_of(family)
    follow_routes(model)
    mlp: Any = model.base_model.layers[-1].mlp
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(9, 32, generator=draw)
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(9)])
    routes = torch.full((9, 2, 2), 255, dtype=torch.uint8)
    routes[:, 1] = ids
    mlp.gate.seen = (PackedContext.from_lengths([9]), 1)
    mlp.gate.seen[0].routes = routes
    _, weights, found = mlp.gate(x)
    ours = mlp.experts(x, found, weights)
    is_glm = family == "glm4_moe"
    factor = mlp.gate.routed_scaling_factor if is_glm else 1.0
    theirs, parameters = reference_layer(
        mlp, x.double(), ids, scores="sigmoid" if is_glm else "softmax", factor=factor
    )
    upstream = torch.randn(ours.shape, generator=draw)
    own = dict(mlp.named_parameters())
    grads = torch.autograd.grad((ours * upstream).sum(), [own[n] for n in parameters])
    wanted = torch.autograd.grad((theirs * upstream).sum(), list(parameters.values()))
    pairs = zip((ours, *grads), (theirs, *wanted), strict=True)
    return {
        name: float((a - b).detach().abs().max() / b.detach().abs().max())
        for name, (a, b) in zip(("output", *parameters), pairs, strict=True)
    }


def test_gate_weights_are_of_live_scores_and_have_their_gradient(family: str) -> None:
    assert max(layer_errors(family).values()) < EXACT


def test_scores_that_choosing_zeroed_are_seen(family: str) -> None:
    """The mistake: shares are read from what the router's own choice left of the scores, where
    experts that it would not choose have no share, and no gradient."""
    right = routes_module.gate_weights

    def of_own_choice(logits: Tensor, ids: Tensor, router: Any, scores: Any) -> Tensor:
        own = torch.full_like(logits, -torch.inf)
        live = logits.topk(ids.shape[-1]).indices
        return right(own.scatter(-1, live, logits.gather(-1, live)), ids, router, scores)

    with patch.object(routes_module, "gate_weights", of_own_choice):
        errors = layer_errors(family)
    assert not errors["gate.weight"] < 0.1


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_backward_computes_again_with_the_same_routes(family: str, recompute: str) -> None:
    rows, found = sampled(family), []
    for settings in ({"recompute": "off"}, {"recompute": recompute, "micro_batch_size": 1}):
        model = model_of(family)
        disturb(model)
        trainer = make_trainer(model, replays_routes=True, **settings)
        trainer.forward_backward(rows)
        found.append(gradients(trainer))
    for name, expected in found[0].items():
        scale = expected.abs().max().clamp(min=1e-12)
        assert float((found[1][name] - expected).abs().max() / scale) < EXACT, name


@pytest.mark.slow
def test_compiled_layers_replay(family: str) -> None:
    rows = sampled(family)
    model = model_of(family)
    disturb(model)
    trainer = make_trainer(model, replays_routes=True, recompute="full")
    torch.compiler.reset()
    twin = model_of(family)
    disturb(twin)
    compiled = make_trainer(twin, replays_routes=True, recompute="full")
    for layer in twin.base_model.layers:
        layer.compile(dynamic=True, backend="eager")
    for batch in (rows, rows[:2]):
        ours, theirs = compiled.logprobs(batch), trainer.logprobs(batch)
        assert float((torch.cat(ours) - torch.cat(theirs)).abs().max()) < EXACT
    for one in (trainer, compiled):
        one.forward_backward(rows)
    found, expected = gradients(compiled), gradients(trainer)
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < EXACT


def shifted(rows: list[Row]) -> list[Tensor]:
    return [row.column("routes").roll(1, 0) for row in rows]


def of_other_layers(rows: list[Row]) -> list[Tensor]:
    return [row.column("routes").flip(1) for row in rows]


def of_other_rows(rows: list[Row]) -> list[Tensor]:
    joined = torch.cat([row.column("routes") for row in reversed(rows)])
    return list(joined.split([row.num_tokens for row in rows]))


@pytest.mark.parametrize("plant", [shifted, of_other_layers, of_other_rows])
def test_planted_bugs_are_caught(family: str, plant: Callable[[list[Row]], list[Tensor]]) -> None:
    rows = sampled(family)
    trainer = make_trainer(model_of(family), replays_routes=True)
    right = torch.cat(trainer.logprobs(rows))
    for row, values in zip(rows, plant(rows), strict=True):
        row.columns["routes"] = Column(values, per="token")
    assert float((torch.cat(trainer.logprobs(rows)) - right).abs().max()) > 0.01


@pytest.mark.parametrize("in_flight", [0, 1])
def test_tokens_of_several_versions_keep_their_own(family: str, in_flight: int) -> None:
    """Of three sequences under new weights one goes on with the keys it has, one has lost its
    blocks, one was withdrawn; the last two are computed again."""
    model, old = model_of(family), model_of(family)
    engine = engine_of(model)
    engine._max_in_flight = in_flight  # 1: the host learns tokens a step late, as on CUDA
    requests = [request(number, max_tokens=14) for number in range(3)]
    stays, loses, withdrawn = requests
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine._scheduler._preempt(engine._sequences[loses.id])
    (partial,) = engine.abort([withdrawn.id])
    assert partial.stop_reason is StopReason.ABORT

    engine.begin_sync()
    known = {name: len(sequence.token_ids) - 1 for name, sequence in engine._sequences.items()} | {
        withdrawn.id: len(ids_of(withdrawn, partial)) - 1
    }
    disturb(model)
    engine.finish_sync(build_manifest(engine.named_weights(), version=1))
    engine.submit([replace(withdrawn, resumed=partial)])
    found: dict[str, Completion] = {}
    while engine.has_unfinished:
        found |= {done.request_id: done for done in engine.step()}
    for one in requests:
        done, first = found[one.id], known[one.id]
        assert len(set(done.weight_versions)) == 2
        assert done.routes is not None
        ids = ids_of(one, done)
        assert len(done.routes) == len(ids) - 1
        before, after = chosen(old, ids).numpy(), chosen(model, ids).numpy()
        assert np.array_equal(done.routes[:first], before[:first]), one.id
        assert not np.array_equal(before[:first], after[:first])
        if one is not stays:  # whose new tokens attend to keys of the old weights
            assert np.array_equal(done.routes[first:], after[first:-1]), one.id


def test_turns_before_the_last_keep_theirs() -> None:
    episodes = Episodes(decode=str, max_turns=2)
    sample = episodes.begin(Prompt(id="p", token_ids=(1, 2), text=""), "g/0", number=0)

    def turn(token_ids: list[int], routes: int, length: int) -> Completion:
        return Completion(
            request_id="g/0",
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            weight_versions=[0] * len(token_ids),
            stop_reason=StopReason.EOS,
            routes=np.full((length, 1, 2), routes, np.uint8),
        )

    episodes.take(sample, turn([3, 4], 1, 3), max_tokens=64)
    sample.token_ids += [5]  # of the environment
    episodes.take(sample, turn([6, 7], 2, 6), max_tokens=64)
    assert sample.routes is not None
    assert sample.routes[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert np.array_equal(
        sample_from_dict(
            json.loads(json.dumps(sample_to_dict(sample, sample.prompt))), sample.prompt
        ).routes,
        sample.routes,
    )
    one = request(0, resumed=turn([3], 300 % 256, 2))
    again = request_from_dict(json.loads(json.dumps(request_to_dict(one))))
    assert again.resumed is not None
    assert one.resumed is not None
    assert np.array_equal(again.resumed.routes, one.resumed.routes)


def test_a_reference_without_adapters_chooses_itself(family: str) -> None:
    rows = sampled(family)
    model = model_of(family)
    disturb(model)
    trainer = make_trainer(model, replays_routes=True)
    found = logprobs_of(WithoutAdapters(model, trainer), rows)
    twin = model_of(family)
    disturb(twin)
    expected = make_trainer(twin).logprobs(rows)
    assert all(map(torch.equal, found, expected))


def test_adapted_experts_follow_routes_as_merged_ones_do(family: str) -> None:
    rows, model = sampled(family), model_of(family)
    disturb(model)
    adapt(model, LoraConfig(rank=3, target_modules=("q_proj", *EXPERT_MATRICES)), seed=0)
    stir_adapters(model)
    trainer = make_trainer(model, replays_routes=True)
    assert routing_differences(trainer, rows) == 0
    merged = model_of(family)
    merged.load_state_dict(dict(trainer.named_weights()))
    wanted = torch.cat(make_trainer(merged, replays_routes=True).logprobs(rows))
    torch.testing.assert_close(torch.cat(trainer.logprobs(rows)), wanted, rtol=0, atol=1e-4)


def test_rows_without_routes_are_refused(family: str) -> None:
    rows = sampled(family)
    for row in rows:
        del row.columns["routes"]
    with pytest.raises(KeyError, match="routes"):
        make_trainer(model_of(family), replays_routes=True).logprobs(rows)


@pytest.mark.parametrize(("num_experts", "dtype"), [(254, torch.uint8), (255, torch.int16)])
def test_ids_leave_room_for_an_unknown_one(num_experts: int, dtype: torch.dtype) -> None:
    assert route_dtype(num_experts) == dtype
    assert unrecorded(dtype) >= num_experts


@pytest.mark.slow
def test_R8_processes_replay_as_one_does() -> None:
    """Experts divided, sequences split, stages, of any experts; see `route_ranks.py`."""
    ranks = parts_of(run_ranks("tests.trainer.route_ranks", 2))
    # Of a hybrid whose heads are divided, gradients in float32 differ by 3e-5.
    limits = {"logprobs": EXACT, "loss": EXACT, "gradient": 1e-4, "masters": EXACT}
    check_cases(ranks, "replayed", route_ranks.CASES, limits)
