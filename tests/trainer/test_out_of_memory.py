"""A pass that runs out of memory leaves no trace in what is learnt."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hone.algorithms.settings import AlgorithmConfig
from hone.models.decoder import decoder_layers
from hone.trainer.batcher import Batcher
from hone.trainer.out_of_memory import NOTES
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.trainer.update_rules import ParameterOptimizer
from hone.types import Row
from tests.tables import table
from tests.trainer.examples import (
    gradients,
    logprobs_of,
    make_reference,
    make_trainer,
    near_policy,
    random_rows,
    tiny_model,
)

NEED = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB."
FRAGMENTS = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. Of the allocated memory 60.00 GiB is "
    "allocated by PyTorch, and 5.20 GiB is reserved by PyTorch but unallocated."
)
BUDGET = 120


class Failing(torch.autograd.Function):
    """The identity, which counts its calls and fails when it is told to."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, fails: Callable[[str, Tensor], None]) -> Tensor:
        ctx.fails = fails
        fails("forward", hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        ctx.fails("backward", gradient)
        return gradient, None


class Faults:
    """Runs out of memory in the passes that are named, counted from 0 for each phase."""

    def __init__(self, trainer: Trainer, at: set[tuple[str, int]], message: str = NEED) -> None:
        self.at, self.message = at, message
        self.counts = {"forward": 0, "backward": 0}
        self.kept: list[weakref.ref[Tensor]] = []
        """What passes computed with."""
        self.errors: list[BaseException] = []
        projection = decoder_layers(trainer.policy.model)[1].get_submodule("self_attn.o_proj")
        projection.register_forward_hook(lambda _m, _i, out: Failing.apply(out, self))

    def __call__(self, phase: str, value: Tensor) -> None:
        number = self.counts[phase]
        self.counts[phase] += 1
        self.kept.append(weakref.ref(value))
        if (phase, number) in self.at:
            self.errors.append(torch.OutOfMemoryError(self.message))
            raise self.errors[-1]


class TooLarge(Faults):
    """Runs out of memory in every pass of more than so many tokens."""

    def __init__(self, trainer: Trainer, limit: int, phase: str = "forward") -> None:
        super().__init__(trainer, set())
        self.limit, self.phase = limit, phase

    def __call__(self, phase: str, value: Tensor) -> None:
        if phase == self.phase and value.shape[-2] > self.limit:
            raise torch.OutOfMemoryError(NEED)


def prepared(seed: int = 3, num_rows: int = 16) -> list[Row]:
    rows = random_rows(num_rows, seed=seed)
    near_policy(rows, make_trainer(tiny_model()))
    return rows


def weights_after(trainer: Trainer, rows: Sequence[Row]) -> dict[str, Tensor]:
    trainer.update(rows)
    return {name: p.detach().clone() for name, p in trainer.policy.masters.items()}


@settings(max_examples=25, deadline=None)
@given(
    at=st.sets(st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 6)), max_size=2),
    message=st.sampled_from([NEED, FRAGMENTS]),
    narrow=st.booleans(),
)
def test_the_gradient_is_that_of_a_step_that_never_failed(
    at: set[tuple[str, int]], message: str, narrow: bool
):
    """Bit for bit that of the cuts that were made in the end, and near that of all others."""
    dtype = torch.bfloat16 if narrow else torch.float32
    rows = prepared()
    failing = make_trainer(tiny_model(dtype=dtype), max_tokens_per_microbatch=BUDGET)
    faults = Faults(failing, at, message)
    failing.forward_backward(rows)
    got = gradients(failing)

    calm = make_trainer(tiny_model(dtype=dtype), max_tokens_per_microbatch=BUDGET)
    calm.batcher.oom_caps.update(failing.batcher.oom_caps)
    calm.forward_backward(rows)
    for name, want in gradients(calm).items():
        assert torch.equal(got[name], want), name
    del faults

    if not narrow:
        usual = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
        usual.forward_backward(rows)
        wants = gradients(usual)
        largest = max(float(want.abs().max()) for want in wants.values())
        for name, want in wants.items():
            assert float((got[name] - want).abs().max()) <= 1e-5 * largest, name


@table("phase", ["forward", "backward"])
@table(
    "options",
    [
        {"max_tokens_per_microbatch": BUDGET},
        {"micro_batch_size": 8},
        {"max_tokens_per_microbatch": BUDGET, "recompute": "full", "offload_activations": True},
        {"max_tokens_per_microbatch": BUDGET, "offload": "gradients"},
    ],
)
def test_weights_are_those_of_an_undisturbed_step(options: dict[str, Any], phase: str):
    rows = prepared()
    dtype = torch.bfloat16 if "offload" in options else torch.float32
    failing = make_trainer(tiny_model(dtype=dtype), **options)
    Faults(failing, {(phase, 1), (phase, 4)})
    got = weights_after(failing, rows)
    assert failing.repair.num_failures == 2
    calm = make_trainer(tiny_model(dtype=dtype), **options)
    calm.batcher.oom_caps.update(failing.batcher.oom_caps)
    wants = weights_after(calm, rows)
    assert all(torch.equal(got[name], want) for name, want in wants.items())


def test_random_numbers_are_drawn_again():
    rows = prepared()
    drawn: list[list[float]] = []
    for at in (set[tuple[str, int]](), {("forward", 1)}):
        trainer = make_trainer(tiny_model(), micro_batch_size=4)
        numbers: list[float] = []
        decoder_layers(trainer.policy.model)[0].register_forward_pre_hook(
            lambda *_, n=numbers: n.append(float(torch.rand(())))
        )
        Faults(trainer, at, FRAGMENTS)
        torch.manual_seed(7)
        trainer.forward_backward(rows)
        drawn.append(numbers)
    calm, failed = drawn
    assert failed[:2] == calm[:2]
    assert failed[2:] == calm


def test_nothing_of_a_failed_attempt_is_kept(monkeypatch: pytest.MonkeyPatch):
    """Neither by frames of the error, which a debugger may keep, nor by the gradient."""
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
    faults = Faults(trainer, {("backward", 1)})
    alive: list[bool] = []
    lower = Batcher.lower

    def then_lower(*args: Any) -> int | None:
        alive.extend(ref() is not None for ref in faults.kept)
        assert not trainer.policy.gradients
        return lower(*args)

    monkeypatch.setattr(Batcher, "lower", then_lower)
    trainer.forward_backward(prepared())
    assert len(faults.errors) == 1
    assert len(alive) == 4, "two passes forward, two back"
    assert not any(alive)


def test_the_cap_is_lowered_until_passes_fit_and_stays(caplog: pytest.LogCaptureFixture):
    rows = prepared()
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
    TooLarge(trainer, 40)
    with caplog.at_level(logging.WARNING):
        trainer.update(rows)
        assert len(caplog.records) == trainer.repair.num_failures == 2
        trainer.update(rows)
    assert len(caplog.records) == 2, "a reduction is logged once"
    assert trainer.batcher.oom_caps["backward"] <= 40
    told = caplog.messages[-1]
    assert f"trainer.max_tokens_per_microbatch {trainer.batcher.oom_caps['backward']}" in told


def test_a_longer_row_still_has_its_pass():
    short = [row for row in prepared() if row.num_tokens <= 12]
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
    Faults(trainer, {("forward", number) for number in range(3)})
    trainer.forward_backward(short)
    assert trainer.batcher.oom_caps["backward"] < 24
    trainer.forward_backward(prepared())


def test_recomputation_is_the_reduction_after_the_smallest_cap(caplog: pytest.LogCaptureFixture):
    rows = prepared()
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
    layer: Any = decoder_layers(trainer.policy.model)[0]

    class UntilRecomputed(Faults):
        def __call__(self, phase: str, value: Tensor) -> None:
            if not layer.gradient_checkpointing:
                raise torch.OutOfMemoryError(NEED)

    UntilRecomputed(trainer, set())
    with caplog.at_level(logging.WARNING):
        got = weights_after(trainer, rows)
    assert "trainer.recompute full" in caplog.messages[-1]
    calm = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET, recompute="full")
    calm.batcher.oom_caps.update(trainer.batcher.oom_caps)
    wants = weights_after(calm, rows)
    assert all(torch.equal(got[name], want) for name, want in wants.items())


def test_where_nothing_is_given_up_an_error_stays_what_it_is():
    """What is measured must not be changed by it."""
    objective = make_trainer(tiny_model()).objective
    trainer = Trainer(tiny_model(), TrainerConfig(), objective, total_steps=9)
    Faults(trainer, {("forward", 0)})
    with pytest.raises(torch.OutOfMemoryError, match=NEED.split(".")[0]) as got:
        trainer.update(prepared())
    assert str(got.value) == NEED


def test_an_end_that_no_reduction_helps_is_reported_with_nothing_moved():
    rows = prepared()
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=BUDGET)
    before = {name: p.detach().clone() for name, p in trainer.policy.masters.items()}
    TooLarge(trainer, 0)
    with pytest.raises(torch.OutOfMemoryError, match="the longest row alone") as got:
        trainer.update(rows)
    assert NEED in str(got.value)
    assert trainer.repair.num_failures < 10
    assert trainer.optimizer.num_steps == 0
    assert not trainer.policy.gradients
    assert all(torch.equal(before[n], p.detach()) for n, p in trainer.policy.masters.items())


@table("number", [0, 5])
def test_moments_that_do_not_fit_end_the_step_with_nothing_moved(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    """What is made of them in the first step is the last that a step takes."""
    rows, count = prepared(), iter(range(99))
    trainer = make_trainer(tiny_model())
    make = ParameterOptimizer._moments_of

    def fail_at(*args: Any) -> Any:
        if next(count) == number:
            raise torch.OutOfMemoryError(NEED)
        return make(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ParameterOptimizer, "_moments_of", fail_at)
        with pytest.raises(torch.OutOfMemoryError, match="The optimizer's step of the policy"):
            trainer.update(rows)
    wants = weights_after(make_trainer(tiny_model()), rows)
    got = weights_after(trainer, rows)
    assert all(torch.equal(got[name], want) for name, want in wants.items())


@pytest.mark.parametrize("kind", ["policy", "reference"])
def test_scores_are_those_of_passes_that_never_failed(kind: str):
    rows = prepared()
    calm = make_trainer(tiny_model(), max_tokens_per_forward=BUDGET)
    wants = logprobs_of(calm, rows)
    if kind == "policy":
        scorer: Any = make_trainer(tiny_model(), max_tokens_per_forward=BUDGET)
        Faults(scorer, {("forward", 1)})
    else:
        scorer = make_reference(tiny_model(), max_tokens_per_forward=BUDGET)
        count = iter([False, True])

        def fail(*_: Any) -> None:
            if next(count, False):
                raise torch.OutOfMemoryError(NEED)

        scorer.model.module.base_model.layers[0].register_forward_pre_hook(fail)
    for got, want in zip(logprobs_of(scorer, rows), wants, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert scorer.repair.num_failures == 1


def trainer_in(folder: Path, **options: Any) -> Trainer:
    cfg = TrainerConfig.model_validate({"max_tokens_per_microbatch": BUDGET, **options})
    objective = make_trainer(tiny_model(), AlgorithmConfig()).objective
    return Trainer(
        tiny_model(), cfg, objective, total_steps=9, dump_dir=folder, on_exhausted=lambda: ""
    )


def test_the_next_launch_begins_with_the_lowered_cap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = prepared()
    first = trainer_in(tmp_path)
    TooLarge(first, 50)
    first.forward_backward(rows)
    oom_caps = first.batcher.oom_caps["backward"]
    noted = json.loads((tmp_path / NOTES).read_text(encoding="utf-8"))
    assert noted == {"policy/backward": {"configured": BUDGET, "now": oom_caps}}

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = trainer_in(tmp_path)
    assert "to try again" in caplog.text
    TooLarge(again, 50)
    again.forward_backward(rows)
    assert again.repair.num_failures == 0
    assert trainer_in(tmp_path, max_tokens_per_microbatch=BUDGET + 1).batcher.oom_caps == {}
