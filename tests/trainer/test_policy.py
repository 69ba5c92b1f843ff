from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.models.decoder import alias_module
from hone.observe.metrics import to_scalars
from hone.trainer.policy import NonFiniteError, Policy, StaleWeightsError, require_layout
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer
from hone.weights.broadcast import BroadcastSync
from tests.tables import table
from tests.trainer.examples import gradients, make_trainer, random_rows, tiny_model

LR, STEPS = 1e-6, 1000


def moved_by_constant_gradient(policy: Policy, masters: dict[str, nn.Parameter]) -> Tensor:
    """Elements' movement under AdamW at LR with gradient 1 in every step; analytically LR a step,
    as both moments, corrected for their start, are 1."""
    optimizer = ParameterOptimizer(masters, OptimizerConfig(lr=LR), set())
    before = [p.detach().double().clone() for p in masters.values()]
    for _ in range(STEPS):
        ones = {name: torch.ones_like(parameter) for name, parameter in masters.items()}
        policy.apply(partial(optimizer.step, ones, 1.0))
    after = [p.detach().double() for p in masters.values()]
    return torch.cat([(b - a).flatten() for b, a in zip(before, after, strict=True)])


def check_analytic_movement(moved: Tensor) -> None:
    error = (moved / (LR * STEPS) - 1).abs()
    assert float(error.mean()) < 0.01
    # A step of 1e-6 is 16.8 units in the last place of a float32 just below 1, and rounds to 17.
    assert float(error.max()) < 0.02


def test_R23_small_steps_move_bfloat16_models_by_the_analytic_amount():
    policy = Policy(tiny_model(dtype=torch.bfloat16, num_hidden_layers=1))
    start = {n: w.detach().clone() for n, w in policy.parameters.items()}
    check_analytic_movement(moved_by_constant_gradient(policy, policy.masters))
    for name, weight in policy.parameters.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, policy.masters[name].detach().bfloat16()), name
        # Weights below 0.1 are spaced finer than 1e-3 and must have moved in bfloat16 too.
        fine = start[name].abs() < 0.1
        assert bool((weight != start[name])[fine].all()), name


def test_R23_planted_bfloat16_masters_are_caught():
    policy = Policy(tiny_model(dtype=torch.bfloat16, num_hidden_layers=1))
    parameters = dict(policy.model.named_parameters())
    with pytest.raises(AssertionError):
        check_analytic_movement(moved_by_constant_gradient(policy, parameters))


@pytest.mark.parametrize(
    "knobs",
    [{}, {"offload_optimizer": True}, {"offload_optimizer": True, "offload_gradients": True}],
)
def test_bfloat16_gradients_add_up_in_float32(knobs: dict[str, bool]):
    """Micro-batch gradients g_1 ... g_k: the master's is their float32 sum, to the bit."""
    policy = Policy(tiny_model(dtype=torch.bfloat16), **knobs)
    generator = torch.Generator().manual_seed(0)
    total = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in policy.parameters.items()}
    for _ in range(5):
        for name, parameter in policy.parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            (parameter * gradient).sum().backward()
            total[name] += gradient.float()
    assert all(p.grad is None for p in policy.model.parameters())
    for name, expected in total.items():
        assert torch.equal(policy.gradients[name], expected), name


def test_tied_weights_have_one_master_and_both_ends_are_named():
    tied = Policy(tiny_model(dtype=torch.bfloat16))
    assert tied.embedding_names == {"model.embed_tokens.weight"}
    assert "lm_head.weight" not in tied.masters
    untied = Policy(tiny_model(tie_word_embeddings=False))
    assert untied.embedding_names == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_aliased_module_sees_each_step(dtype: torch.dtype):
    model = tiny_model(dtype=dtype)
    alias = alias_module(model)
    trainer = make_trainer(model, optimizer={"lr": 0.01})
    before = {n: p.clone() for n, p in alias.state_dict().items()}
    trainer.update(random_rows(8))
    for name, weight in trainer.named_weights():
        seen = alias.state_dict()[name]
        assert seen.data_ptr() == weight.data_ptr()
        assert not torch.equal(seen, before[name]), name


@pytest.mark.parametrize("max_norm", [0.0, 0.01, 100.0])
def test_gradient_norm_and_clipping(max_norm: float):
    """The first moment of the first step is the clipped gradient times 1 - beta1."""
    trainer = make_trainer(tiny_model(), optimizer={"max_grad_norm": max_norm})
    rows = random_rows(8)
    trainer.forward_backward(rows)
    free = gradients(trainer)
    exact = float(torch.cat([g.flatten() for g in free.values()]).norm())
    trainer.forward_backward(rows)
    norm = trainer.policy.gradient_norm()
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    trainer.optimizer.step(norm)
    factor = min(1.0, max_norm / exact) if max_norm else 1.0
    moments = trainer.optimizer.state_dict()
    for name, gradient in free.items():
        got = moments[f"optimizer/exp_avg/{name}"].double() / (1 - OptimizerConfig().betas[0])
        torch.testing.assert_close(got, factor * gradient, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_statistics_equal_a_recount(dtype: torch.dtype):
    policy = Policy(tiny_model(dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    old = {n: p.detach().double().clone() for n, p in policy.masters.items()}
    weights = {n: w.detach().clone() for n, w in policy.parameters.items()}

    def update() -> None:
        for parameter in policy.masters.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(1e-3 * noise * (noise > 0))

    scalars = to_scalars(policy.apply(update))
    change = sum(
        float((p.detach().double() - old[n]).square().sum()) for n, p in policy.masters.items()
    )
    size = sum(float(w.square().sum()) for w in old.values())
    kept = sum(int((w == weights[n]).sum()) for n, w in policy.parameters.items())
    total = sum(w.numel() for w in weights.values())
    assert scalars["train/update_to_weight_ratio"] == pytest.approx(
        (change / size) ** 0.5, rel=1e-4
    )
    assert scalars["train/share_unchanged"] == pytest.approx(kept / total, rel=1e-9)
    assert 0.4 < kept / total < 1.0


def test_weights_that_become_non_finite_stop_the_run():
    policy = Policy(tiny_model())
    with pytest.raises(NonFiniteError, match="weights that are not finite"):
        policy.apply(lambda: policy.masters["model.norm.weight"].fill_(float("nan")))


@table(
    "saved, current, error, text",
    [
        (8, 16, UserError, "trained with model.lora.rank 8, and model.lora.rank is 16 now"),
        (0, 16, UserError, "trained with model.lora.rank 0, and model.lora.rank is 16 now"),
        (8, 8, ValueError, "1 tensors differ in name or shape, first 'q.bias'"),
    ],
)
@table("experts", [(), (5,)])
def test_a_checkpoint_of_another_layout_is_refused_with_the_reason(
    experts: tuple[int, ...], saved: int, current: int, error: type[Exception], text: str
):
    def tensors(rank: int) -> dict[str, Tensor]:
        if not rank:
            return {"q.weight": torch.zeros(*experts, 6, 4)}
        a, b = torch.zeros(*experts, rank, 4), torch.zeros(*experts, 6, rank)
        return {"q.lora_A": a, "q.lora_B": b}

    require_layout(tensors(current), tensors(current))
    extra = {"q.bias": torch.zeros(6)} if saved == current else {}
    with pytest.raises(error, match=text):
        require_layout(tensors(current), tensors(saved) | extra)


@table("is_asleep", [False, True])
@table("offload", ["none", "optimizer"])
def test_R3_no_sync_of_weights_that_are_not_what_masters_round_to(offload: str, is_asleep: bool):
    """Of any kind of sync: all of them walk through the trainer's weights, and that is refused."""
    trainer = make_trainer(tiny_model(dtype=torch.bfloat16), offload=offload)
    trainer.update(random_rows(3))
    weight = trainer.policy.parameters["model.layers.1.mlp.up_proj.weight"]
    broadcast = BroadcastSync(
        trainer, Mesh.alone("cpu"), cast(Any, object()), bucket_bytes=1 << 20, timeout_s=1.0
    )
    if is_asleep:
        trainer.sleep()
    assert len(dict(trainer.named_weights())) == len(trainer.policy.model.state_dict())
    with torch.no_grad():
        weight[3, 5] += weight[3, 5].abs() / 128  # the next number there is
    message = r"^1 of 24 trained weights, the first model.layers.1.mlp.up_proj.weight, are not what"
    with pytest.raises(StaleWeightsError, match=message) as error:
        next(trainer.named_weights())
    assert ("trainer.offload" in str(error.value)) == (offload != "none")
    assert ("trainer.enable_sleep" in str(error.value)) == is_asleep
    with pytest.raises(StaleWeightsError, match=message):
        broadcast.push(1)


def test_weights_that_are_not_finite_are_left_to_the_sync_that_names_them():
    trainer = make_trainer(tiny_model(dtype=torch.bfloat16))
    for tensors in (trainer.policy.masters, trainer.policy.parameters):
        tensors["model.norm.weight"].data[:] = float("nan")
    assert len(dict(trainer.named_weights())) == len(trainer.policy.model.state_dict())
