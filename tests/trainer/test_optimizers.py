from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hone.config.trainer import OptimizerConfig
from hone.trainer.optimizers import ParameterOptimizer

SHAPES = {"embed": (12, 6), "wide": (4, 10), "tall": (10, 4), "norm": (6,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def gradient(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def run(optimizer: ParameterOptimizer, named: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, parameter in named.items():
            parameter.grad = gradient(name, step)
        optimizer.step(lr_scale=1.0 / (step + 1))
        assert all(p.grad is None for p in named.values())


def slow_adamw(name: str, start: Tensor, cfg: OptimizerConfig, steps: int) -> Tensor:
    w, m, v = start.double(), 0.0, 0.0
    decay = cfg.weight_decay if start.ndim > 1 else 0.0
    for step in range(steps):
        lr, g = cfg.lr / (step + 1), gradient(name, step).double()
        m = cfg.betas[0] * m + (1 - cfg.betas[0]) * g
        v = cfg.betas[1] * v + (1 - cfg.betas[1]) * g * g
        m_hat, v_hat = m / (1 - cfg.betas[0] ** (step + 1)), v / (1 - cfg.betas[1] ** (step + 1))
        w = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + cfg.eps)
    return w


def slow_muon_directions(name: str, cfg: OptimizerConfig, steps: int) -> list[Tensor]:
    """Exact orthogonalisation U V^T of the Nesterov momentum, by singular values."""
    momentum, directions = torch.zeros(SHAPES[name], dtype=torch.float64), []
    for step in range(steps):
        g = gradient(name, step).double()
        momentum = cfg.muon_momentum * momentum + (1 - cfg.muon_momentum) * g
        u, _, v = torch.linalg.svd(
            (1 - cfg.muon_momentum) * g + cfg.muon_momentum * momentum, full_matrices=False
        )
        directions.append(u @ v)
    return directions


def test_adamw_equals_the_textbook_and_spares_vectors_the_decay():
    cfg = OptimizerConfig(lr=0.05, weight_decay=0.1)
    named = parameters()
    run(ParameterOptimizer(named, cfg, {"embed"}), named, range(5))
    for name, start in parameters().items():
        expected = slow_adamw(name, start.detach(), cfg, 5)
        torch.testing.assert_close(named[name].detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_muon_moves_hidden_matrices_along_orthogonalised_momentum():
    cfg = OptimizerConfig(name="muon", lr=0.05, muon_lr=0.02)
    named, start = parameters(), parameters()
    optimizer = ParameterOptimizer(named, cfg, {"embed"})
    for step in range(3):
        before = {n: p.detach().clone() for n, p in named.items()}
        run(optimizer, named, range(step, step + 1))
        for name in ("wide", "tall"):
            rows, columns = SHAPES[name]
            scale = max(1.0, rows / columns) ** 0.5 * 0.02 / (step + 1)
            moved = (before[name] - named[name].detach()).double() / scale
            exact = slow_muon_directions(name, cfg, step + 1)[-1]
            # Newton-Schulz leaves singular values in about [0.7, 1.2], in bfloat16.
            singular = torch.linalg.svdvals(moved)
            assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.3
            cosine = (moved * exact).sum() / (moved.norm() * exact.norm())
            assert float(cosine) > 0.97
    for name in ("embed", "norm"):
        expected = slow_adamw(name, start[name].detach(), cfg, 3)
        torch.testing.assert_close(named[name].detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_state_survives_a_round_trip_bit_for_bit(rule: str):
    cfg = OptimizerConfig.model_validate({"name": rule, "lr": 0.05})
    straight = parameters()
    optimizer = ParameterOptimizer(straight, cfg, {"embed"})
    run(optimizer, straight, range(3))
    saved = {n: t.clone() for n, t in optimizer.state_dict().items()}
    resumed = {n: nn.Parameter(p.detach().clone()) for n, p in straight.items()}
    other = ParameterOptimizer(resumed, cfg, {"embed"})
    other.load_state_dict(saved)
    run(optimizer, straight, range(3, 6))
    run(other, resumed, range(3, 6))
    for name, parameter in straight.items():
        assert torch.equal(parameter, resumed[name]), name
    assert saved.keys() == other.state_dict().keys()


@pytest.mark.parametrize("name", ["exp_avg/unknown", "exp_avg/wide"])
def test_foreign_state_is_refused(name: str):
    optimizer = ParameterOptimizer(parameters(), OptimizerConfig(), {"embed"})
    tensors: dict[str, Any] = {name: torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(tensors)
