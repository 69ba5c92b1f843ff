"""R24, first part: metrics equal one recomputation over everything, however samples are cut."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.config.run import LogConfig
from hone.observe.loggers import RunLog
from hone.observe.metrics import (
    Distribution,
    Last,
    Max,
    Mean,
    Metrics,
    Min,
    Sum,
    merge,
    on_host,
    to_scalars,
)
from hone.rollout.counts import RolloutCounts
from hone.rollout.metrics import rollout_metrics
from tests.observe.fake_run import make_group

Shards = list[list[float]]
Make = Callable[[list[float]], Metrics]

shards_of_values = st.lists(
    st.lists(st.floats(-1e4, 1e4, allow_subnormal=False), max_size=20), min_size=1, max_size=8
).filter(lambda shards: any(shards))


def make(values: list[float]) -> Metrics:
    metrics: Metrics = {
        "mean": Mean.of(values),
        "sum": Sum.of(values),
        "max": Max.of(values),
        "min": Min.of(values),
        "all": Distribution.of(values),
    }
    return metrics | ({"last": Last(values[-1])} if values else {})


def recomputed(values: list[float]) -> dict[str, float]:
    flat = np.array(values, dtype=np.float64)
    quantiles = {"p05": 5, "p50": 50, "p95": 95, "p99": 99}
    return {
        "mean": float(flat.mean()),
        "sum": float(flat.sum()),
        "max": float(flat.max()),
        "min": float(flat.min()),
        "last": values[-1],
        "all/mean": float(flat.mean()),
        "all/std": float(flat.std()),
        "all/min": float(flat.min()),
        "all/max": float(flat.max()),
        **{f"all/{name}": float(np.percentile(flat, q)) for name, q in quantiles.items()},
    }


def check_sharding(shards: Shards, make_metrics: Make = make) -> None:
    """The merged metrics equal a single-process recomputation to 1e-6 of the values' size."""
    flat = [value for shard in shards for value in shard]
    scalars = to_scalars(merge(*map(make_metrics, shards)))
    expected = recomputed(flat)
    assert scalars.keys() == expected.keys()
    tolerance = 1e-6 * max(1.0, max(map(abs, flat)))
    for name, value in expected.items():
        assert abs(scalars[name] - value) <= tolerance, name


@settings(deadline=None)
@given(shards_of_values)
def test_R24_any_sharding_gives_the_same_metrics(shards: Shards) -> None:
    check_sharding(shards)


@settings(max_examples=20, deadline=None)
@given(shards_of_values, st.integers(0, 7))
def test_R24_merging_is_associative(shards: Shards, cut: int) -> None:
    parts = list(map(make, shards))
    nested = merge(merge(*parts[:cut]), merge(*parts[cut:]))
    assert to_scalars(nested) == pytest.approx(to_scalars(merge(*parts)), abs=1e-6)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_R24_metrics_equal_a_recomputation_from_the_stored_samples(
    tmp_path: Path, num_shards: int
) -> None:
    groups = [make_group(1, i, np.random.default_rng(i), num_samples=3 + i) for i in range(5)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=10**6)) as log:
        log.samples(1, groups)
    shards = [groups[rank::num_shards] for rank in range(num_shards)]
    scalars = to_scalars(merge(*(rollout_metrics(shard, RolloutCounts()) for shard in shards)))

    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    valid = [row for row in rows if row["failure"] is None]
    rewards = np.array([row["reward"] for row in valid])
    lengths = np.array([len(row["token_ids"]) for row in valid])
    expected = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/correct/mean": np.mean([row["reward_parts"]["correct"] for row in valid]),
        "rollout/completion_tokens/mean": lengths.mean(),
        "rollout/completion_tokens/p95": np.percentile(lengths, 95),
        "rollout/completion_tokens/max": lengths.max(),
        "rollout/truncated_share": np.mean([row["stop_reason"] == "length" for row in valid]),
        "rollout/valid": len(valid),
        "rollout/failed/timeout": len(rows) - len(valid),
        "rollout/stop/eos": sum(row["stop_reason"] == "eos" for row in rows),
        "rollout/weight_version/max": max(v for row in rows for v in row["weight_versions"]),
    }
    assert len(rows) > len(valid) > 20
    for name, value in expected.items():
        assert scalars[name] == pytest.approx(float(value), abs=1e-6), name


@dataclass(frozen=True)
class MeanOfMeans:
    """Planted: averages the shards' means, whatever they hold."""

    total: float
    shards: int

    def merge(self, other: "MeanOfMeans") -> "MeanOfMeans":
        return MeanOfMeans(self.total + other.total, self.shards + other.shards)

    def scalars(self) -> dict[str, float]:
        return {"": self.total / self.shards}


@dataclass(frozen=True)
class SampledDistribution:
    """Planted: quantiles and spread are averaged over shards."""

    parts: tuple[dict[str, float], ...]

    def merge(self, other: "SampledDistribution") -> "SampledDistribution":
        return SampledDistribution(self.parts + other.parts)

    def scalars(self) -> dict[str, float]:
        return {key: float(np.mean([p[key] for p in self.parts])) for key in self.parts[0]}


def planted(name: str, build: Callable[[list[float]], Any]) -> Make:
    return lambda values: make(values) | {name: build(values)}


@pytest.mark.parametrize(
    "wrong",
    [
        planted("mean", lambda values: MeanOfMeans(float(np.mean(values)), 1)),
        planted("all", lambda values: SampledDistribution((Distribution.of(values).scalars(),))),
        planted("max", lambda values: Last(max(values))),
        planted("sum", Mean.of),
        planted("last", lambda values: Last(values[0])),
    ],
    ids=["mean_of_means", "mean_of_quantiles", "max_of_last_shard", "sum_as_mean", "first_as_last"],
)
def test_R24_planted_reductions_are_caught(wrong: Make) -> None:
    with pytest.raises(AssertionError):
        check_sharding([[1.0, 9.0], [0.0, 0.0, 0.5, 3.0]], wrong)


def test_mean_of_uneven_shards_is_the_mean_of_samples() -> None:
    shards = [{"x": Mean.of([1.0])}, {"x": Mean.of([0.0, 0.0, 0.0, 0.5])}]
    assert to_scalars(merge(*shards)) == {"x": 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_count_like_lists(dtype: torch.dtype) -> None:
    values = (torch.randn(3, 40) * 3).to(dtype)
    listed = values.double().reshape(-1).tolist()
    from_tensor = to_scalars({key: kind.of(values) for key, kind in KINDS.items()})
    assert from_tensor == pytest.approx(
        to_scalars({k: kind.of(listed) for k, kind in KINDS.items()})
    )


KINDS: dict[str, Any] = {"mean": Mean, "sum": Sum, "max": Max, "min": Min, "all": Distribution}


def test_on_host_has_the_same_values_and_no_tensor() -> None:
    values = torch.tensor([0.25, 3.0, -1.5])
    metrics = {
        "mean": Mean(values.sum(), torch.tensor(3)),
        "sum": Sum.of(values),
        "last": Last(2.0),
        "distribution": Distribution.of(values).merge(Distribution.of([7.0])),
    }
    found = on_host(metrics)
    assert to_scalars(found) == to_scalars(metrics)
    assert "tensor" not in repr(found)


def test_sums_of_bfloat16_do_not_round() -> None:
    assert to_scalars({"n": Sum.of(torch.ones(100_000, dtype=torch.bfloat16))}) == {"n": 100_000.0}


def test_nothing_measured_gives_no_scalar() -> None:
    empty = {key: kind.of([]) for key, kind in KINDS.items()}
    assert to_scalars(empty) == {"sum": 0.0}
    assert to_scalars(merge(empty, {"mean": Mean.of([2.0])})) == {"sum": 0.0, "mean": 2.0}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nan_survives_any_merge(order: tuple[int, int]) -> None:
    shards = [make([float("nan"), 1.0]), make([2.0])]
    scalars = to_scalars(merge(*(shards[i] for i in order)))
    assert all(np.isnan(scalars[name]) for name in ("mean", "sum", "max", "min", "all/p50"))


def test_kinds_do_not_mix() -> None:
    with pytest.raises(ValueError, match="'x' is a Mean in one shard and a Max"):
        merge({"x": Mean.of([1.0])}, {"x": Max.of([1.0])})
