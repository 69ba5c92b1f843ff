"""Groups to trajectories: what reaches the loss, and what must not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from tests.loops.conftest import MakeConfig, built_run
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.grpo import GRPO
from hone.algorithms.settings import AlgorithmConfig, KLConfig, Output
from hone.config.tree import RLConfig
from hone.loops.reinforce import RLRun
from hone.observe.metrics import Sum
from hone.trainer.models import Models
from hone.types import FailureKind, Group, Reward, Row, Sample

KINDS = list(FailureKind)


def collected(cfg: RLConfig) -> tuple[RLRun, list[Group]]:
    with built_run(cfg) as run:
        run.sampling.weights.push(0)
        return run, run.collector.collect(1)


def built(run: RLRun, groups: Sequence[Group]) -> list[Row]:
    return run.models.prepare(run.algorithm, groups, version=0)[0]


def gradient(run: RLRun, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Weights after one update of a fresh copy of the trainer's state."""
    tensors, metadata = run.trainer.state_dict()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    run.trainer.update(rows)
    after = {n: t.clone() for n, t in run.trainer.state_dict()[0].items()}
    run.trainer.load_state_dict(
        saved | {n: torch.zeros_like(t) for n, t in after.items() if n not in saved},
        metadata | {"num_tensors": len(after)},
    )
    return {n: t for n, t in after.items() if n.startswith("weights/")}


def drop(groups: Sequence[Group]) -> list[Group]:
    """The groups without their failed samples."""
    return [
        Group(id=g.id, prompt=g.prompt, samples=[s for s in g.samples if s.failure is None])
        for g in groups
    ]


def fail_some(groups: list[Group]) -> int:
    """Every fifth sample fails, each kind in turn; returns how many."""
    samples = [sample for group in groups for sample in group.samples]
    failed = samples[::5]
    for number, sample in enumerate(failed):
        sample.reward, sample.failure = None, KINDS[number % len(KINDS)]
    return len(failed)


def as_zero_reward(groups: list[Group]) -> None:
    """The planted bug: a failure becomes a reward of 0."""
    for sample in (s for group in groups for s in group.samples if s.failure):
        sample.failure, sample.reward = None, Reward(total=0.0)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_R12_failed_samples_leave_no_trace(make_config: MakeConfig, advantage: str) -> None:
    cfg = make_config(rollout={"prompts_per_step": 8}, algorithm={"advantage": advantage})
    run, groups = collected(cfg)
    assert fail_some(groups) == 7
    with_failures = gradient(run, built(run, groups))
    assert_equal(with_failures, gradient(run, built(run, drop(groups))))
    poisoned = copy.deepcopy(groups)
    as_zero_reward(poisoned)
    wrong = gradient(run, built(run, poisoned))
    with pytest.raises(AssertionError):
        assert_equal(with_failures, wrong)


def test_a_group_with_one_valid_sample_has_no_baseline(make_config: MakeConfig) -> None:
    run, groups = collected(make_config())
    for sample in groups[0].samples[1:]:
        sample.reward, sample.failure = None, FailureKind.TIMEOUT
    rows, metrics = run.models.prepare(run.algorithm, groups, version=0)
    assert metrics["rollout/groups_without_baseline"] == Sum(1)
    assert {row.group_id for row in rows} == {group.id for group in groups[1:]}


def test_R20_rows_hold_the_sampled_ids_and_their_mask(make_config: MakeConfig) -> None:
    run, groups = collected(make_config())
    samples: list[Sample] = [s for group in groups for s in group.samples]
    samples[0].loss_mask[0] = False  # an environment's token
    samples[1].weight_versions[0] = -2
    rows = built(run, groups)
    for sample, row in zip(samples, rows, strict=True):
        assert row.token_ids == [*sample.prompt.token_ids, *sample.token_ids]
        assert row.loss_mask == [*[False] * len(sample.prompt.token_ids), *sample.loss_mask]
        kept = [
            lp for lp, trained in zip(sample.logprobs, sample.loss_mask, strict=True) if trained
        ]
        assert row.column("logprobs/engine").tolist() == pytest.approx(kept)
        assert (
            len(row.column("logprobs/engine")) == len(row.column("advantages")) == row.num_trained
        )
    # What comes after a token of older weights may have been drawn over their keys.
    assert set(rows[1].column("staleness").tolist()) == {2}
    assert set(rows[0].column("staleness").tolist()) == {0}


class Ramp:
    """Token t of a row has the log-probability -t / divisor."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def outputs_before(self, rows: Sequence[Row]) -> frozenset[Output]:
        return frozenset()

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        return lambda: [{"logprobs": -torch.arange(row.num_trained) / self.divisor} for row in rows]


def test_a_kl_penalty_in_the_reward_lowers_it(make_config: MakeConfig) -> None:
    """By hand: return of token t is r - 0.1 * sum over later tokens of (t/5 - t/10)."""
    _, groups = collected(make_config())
    cfg = AlgorithmConfig(
        kl=KLConfig(coef=0.1, placement="reward", estimator="k1"), advantage="reinforce_pp"
    )
    models = Models({"policy": cast(Any, Ramp(10))}, {"reference": Ramp(5)})
    rows, _ = models.prepare(GRPO(cfg, max_completion_tokens=24), groups, version=0)
    samples = [s for group in groups for s in group.samples]
    returns = [
        [sample.reward.total - 0.1 * sum(u / 10 for u in range(t, len(sample.token_ids)))]
        for sample in samples
        if sample.reward
        for t in range(len(sample.token_ids))
    ]
    flat = torch.tensor(returns, dtype=torch.float64).flatten()
    expected = (flat - flat.mean()) / flat.std()
    actual = torch.cat([row.column("advantages") for row in rows])
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)
