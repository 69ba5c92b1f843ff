from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hone.trainer import narrow_moments, offload, update_rules
from hone.trainer.narrow_moments import FlatLayout, adamw_bfloat16_
from hone.trainer.optimizer import Optimizer
from hone.trainer.pieces import Piece
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer
from tests.interpreted import run_interpreted
from tests.tables import table

SHAPES = {"embed": (12, 6), "wide": (4, 10), "tall": (10, 4), "norm": (6,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def gradient(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def run(optimizer: ParameterOptimizer, named: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        optimizer.step({name: gradient(name, step) for name in named}, lr_scale=1.0 / (step + 1))


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
        momentum = 0.95 * momentum + (1 - 0.95) * g
        u, _, v = torch.linalg.svd((1 - 0.95) * g + 0.95 * momentum, full_matrices=False)
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


def newton_schulz(x: Tensor) -> Tensor:
    """Five steps of the polynomial of Keller Jordan's Muon, in float64."""
    x, is_tall = x / x.norm(), x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.T if is_tall else x


def test_muon_keeps_its_momentum_and_decays_matrices():
    """Nesterov's of 0.95, to float32; the moves to what bfloat16 leaves of the polynomial."""
    cfg = OptimizerConfig(name="muon", muon_lr=0.02, weight_decay=0.5)
    named = parameters()
    optimizer = ParameterOptimizer(named, cfg, {"embed"})
    momentum = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in ("wide", "tall")}
    for step in range(4):
        before = {n: p.detach().double() for n, p in named.items()}
        run(optimizer, named, range(step, step + 1))
        state = optimizer.state_dict()
        for name, held in momentum.items():
            g, lr = gradient(name, step).double(), 0.02 / (step + 1)
            held.mul_(0.95).add_(0.05 * g)
            own = state[f"momentum_buffer/{name}"].double()
            torch.testing.assert_close(own, held, rtol=1e-5, atol=1e-7)
            rows, columns = SHAPES[name]
            moved = before[name] * (1 - lr * 0.5) - named[name].detach().double()
            expected = newton_schulz(0.05 * g + 0.95 * held) * max(1.0, rows / columns) ** 0.5
            assert float((moved / lr - expected).norm() / expected.norm()) < 0.06


@table("rule", ["adamw", "muon"])
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


@table("name", ["exp_avg/unknown", "exp_avg/wide"])
def test_foreign_state_is_refused(name: str):
    optimizer = ParameterOptimizer(parameters(), OptimizerConfig(), {"embed"})
    tensors: dict[str, Any] = {name: torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=name):
        optimizer.load_state_dict(tensors)


@table("state_dtype", ["float32", "bfloat16"])
@table("masters_on_host", [False, True])
def test_offload_gives_the_bits_of_a_step_on_the_device(
    masters_on_host: bool, state_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    check_offload(masters_on_host, state_dtype, monkeypatch)


def check_offload(masters_on_host: bool, state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = OptimizerConfig.model_validate(
        {"lr": 0.05, "weight_decay": 0.1, "state_dtype": state_dtype}
    )
    # 12 bytes an element: buckets of 32 elements, so that most parameters lie in several.
    monkeypatch.setattr(update_rules, "BUCKET_BYTES", 32 * 12)
    monkeypatch.setattr(update_rules, "_PIECE_STEP", 16)
    named, on_host = parameters(), parameters()
    weights = {name: p.detach().bfloat16() for name, p in on_host.items()}

    def write_back(moved: Sequence[tuple[Piece, Tensor]]) -> None:
        for piece, values in moved:
            weights[piece.name].view(-1)[piece.start : piece.stop].copy_(values)

    expected = ParameterOptimizer(named, cfg, {"embed"})
    run(expected, named, range(5))
    optimizer = ParameterOptimizer(
        on_host, cfg, {"embed"}, offload=True, write_back=write_back if masters_on_host else None
    )
    run(optimizer, on_host, range(5))
    for name, parameter in named.items():
        assert torch.equal(on_host[name], parameter), name
        assert torch.equal(weights[name], parameter.detach().bfloat16()) == masters_on_host, name
    got, want = optimizer.state_dict(), expected.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert optimizer.device_tensors() == []


def test_planted_moment_that_is_not_written_back_is_caught(monkeypatch: pytest.MonkeyPatch):
    streamed = offload.stream_buckets

    def forget(buckets: Any, update: Any, device: torch.device) -> None:
        kept = (b._replace(changed=[b.changed[0].clone(), *b.changed[1:]]) for b in buckets)
        streamed(kept, update, device)

    monkeypatch.setattr(offload, "stream_buckets", forget)
    with pytest.raises(AssertionError):
        check_offload(True, "float32", monkeypatch)


def small_updates(state_dtype: str, steps: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Moments and movement of 4,096 weights whose gradients shrink tenfold after the first step,
    with slow second moments: every change of a moment is far below its last bfloat16 bit."""
    cfg = OptimizerConfig.model_validate(
        {"lr": 1e-4, "betas": (0.9, 0.999), "state_dtype": state_dtype}
    )
    generator = torch.Generator().manual_seed(0)
    named = {"w": nn.Parameter(torch.zeros(64, 64))}
    optimizer = ParameterOptimizer(named, cfg, set())
    for step in range(steps):
        noise = 1 + 0.3 * torch.randn(64, 64, generator=generator)
        optimizer.step({"w": noise * (1.0 if step == 0 else 0.1)}, 1.0)
    state = optimizer.state_dict()
    return state["exp_avg/w"].double(), state["exp_avg_sq/w"].double(), named["w"].detach().double()


def check_small_updates() -> None:
    _, exact_v, exact_w = small_updates("float32")
    _, v, w = small_updates("bfloat16")
    assert float((v.mean() / exact_v.mean() - 1).abs()) < 0.01
    assert float((w.mean() / exact_w.mean() - 1).abs()) < 0.01
    assert float((w - exact_w).norm() / exact_w.norm()) < 0.05


def test_bfloat16_moments_follow_small_updates_over_1000_steps():
    check_small_updates()


def test_planted_rounding_to_nearest_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(narrow_moments, "_round_to_bfloat16", lambda x, noise: x.bfloat16())
    with pytest.raises(AssertionError):
        check_small_updates()


def test_rounding_is_unbiased_and_goes_to_a_neighbour():
    x = torch.randn(1, generator=torch.Generator().manual_seed(0)).expand(1 << 16).contiguous()
    for shift in (0, 16):
        noise = (
            narrow_moments._shift_right(narrow_moments._noise(123, x.numel(), 77), shift) & 0xFFFF
        )
        rounded = narrow_moments._round_to_bfloat16(x, noise)
        below = (x[0].view(torch.int32) & -0x10000).view(torch.float32)
        ulp = rounded.double().abs().max() - below.double().abs()
        assert set(rounded.double().tolist()) == {
            float(below),
            float(rounded.double()[rounded != below][0]),
        }
        assert float((rounded.double().mean() - x[0].double()).abs()) < 0.01 * float(ulp)


def test_noise_depends_on_the_place_in_the_parameter_alone():
    whole = narrow_moments._noise(0, 1000, 5)
    assert torch.equal(whole[300:600], narrow_moments._noise(300, 300, 5))
    assert not torch.equal(whole, narrow_moments._noise(0, 1000, 6))


def test_noise_of_columns_is_that_of_their_place_in_the_parameter():
    whole = narrow_moments._noise(0, 60 * 50, 5).view(60, 50)
    shard = FlatLayout(offset=10 * 50 + 20, row=30, stride=50)
    assert torch.equal(whole[10:, 20:].reshape(-1)[7:407], narrow_moments._noise(7, 400, 5, shard))


def test_one_bfloat16_step_is_the_textbook_one_before_rounding():
    cfg = OptimizerConfig(lr=0.05, weight_decay=0.1, eps=1e-6)
    generator = torch.Generator().manual_seed(3)
    w, g = torch.randn(2, 500, generator=generator)
    m = torch.randn(500, generator=generator).bfloat16()
    v = torch.rand(500, generator=generator).bfloat16()
    got = [w.clone(), g, m.clone(), v.clone()]
    adamw_bfloat16_(*got, first_index=0, seed=9, num_steps=4, cfg=cfg, lr=0.03, decay=0.1)
    b1, b2 = cfg.betas
    new_m = b1 * m.double() + (1 - b1) * g.double()
    new_v = b2 * v.double() + (1 - b2) * g.double() ** 2
    moved = new_m / (1 - b1**4) / ((new_v / (1 - b2**4)).sqrt() + cfg.eps)
    expected = w.double() * (1 - 0.03 * 0.1) - 0.03 * moved
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-5, atol=1e-6)
    for stored, exact in ((got[2], new_m), (got[3], new_v)):
        assert float(((stored.double() - exact) / exact).abs().max()) < 2**-7


def test_the_kernel_equals_the_step_in_torch():
    """In Triton's interpreter, in a process of its own: it is chosen before triton is imported."""
    outcome = run_interpreted("tests.trainer.interpreted_adamw")
    for errors in outcome["found"].values():
        assert errors["master"] < 1e-6
        # Float sums may differ in their last bit, which the noise turns into a bfloat16 step.
        assert errors["share_of_moments_that_differ"] < 0.002
        assert errors["largest_difference_in_steps"] <= 1
    # Other noise, or the noise of another place.
    assert all(share > 0.1 for share in outcome["planted"].values())


@table(
    "name, rates",
    [
        ("adamw", {"train/lr": 0.5e-3}),
        ("muon", {"train/lr": 0.5e-3, "train/muon_lr": 0.5e-2}),
    ],
)
def test_the_rate_of_each_group_is_reported(name: Any, rates: dict[str, float]) -> None:
    """Half of the peak rates, in the only step of warm-up."""
    named = parameters()
    policy: Any = SimpleNamespace(
        masters=named,
        gradients={key: torch.ones_like(each) for key, each in named.items()},
        embedding_names={"embed"},
        device=torch.device("cpu"),
        gradients_on_host=False,
        masters_on_host=False,
        apply=lambda update: (update(), {})[1],
        drop_gradient=lambda: None,
    )
    cfg = OptimizerConfig(name=name, lr=1e-3, muon_lr=1e-2, warmup_steps=1)
    metrics = Optimizer(policy, cfg, total_steps=10).step(torch.tensor(1.0))
    found = {key: value.value for key, value in metrics.items() if key.endswith("lr")}
    assert found == pytest.approx(rates)
