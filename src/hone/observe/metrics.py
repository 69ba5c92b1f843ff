"""Metrics whose reduction is part of the value.

A metric is what one shard (a micro-batch, a rank, a worker) knows; `merge` combines shards. Because
each kind keeps what its reduction needs (a mean keeps sum and count), the merged value equals the
value computed over all samples at once, however they were cut. Nothing here looks at the name of a
metric to learn how to reduce it.

    shard_a = {"reward": Distribution.of([0.0, 1.0]), "policy/entropy": Mean.of(entropy_N)}
    to_scalars(merge(shard_a, shard_b))  # {"reward/mean": ..., "reward/p95": ..., ...}

Values may be numbers, lists, numpy arrays, or tensors on any device. A tensor's sum, or the tensor
of a distribution, stays on its device until two extremes are merged or `on_host` or `to_scalars`
reads it, so collecting a metric inside a training step does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Distribution",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "Sum",
    "merge",
    "on_host",
    "to_scalars",
]

Values: TypeAlias = "Sequence[float] | Sequence[bool] | np.ndarray[Any, Any] | Tensor"
Scalar: TypeAlias = "float | Tensor"


class Metric(Protocol):
    """One shard of a metric."""

    def merge(self, other: Self) -> Self:
        """The metric over both shards; `other` comes later."""
        ...

    def scalars(self) -> dict[str, float]:
        """Leaf name to value; the empty name stands for the metric itself. Empty without data."""
        ...


Metrics = dict[str, Metric]


def _is_tensor(values: object) -> bool:
    return hasattr(values, "detach")


def _array(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if _is_tensor(values):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _total(values: Any) -> Scalar:
    """Sum in float64; a tensor's stays on its device."""
    return values.detach().double().sum() if _is_tensor(values) else float(_array(values).sum())


def _count(values: Any) -> int:
    return int(values.numel()) if _is_tensor(values) else int(_array(values).size)


@dataclass(frozen=True, slots=True)
class Mean:
    """Sum over count, so that shards of different size weigh what they hold."""

    sum: Scalar
    count: Scalar
    """Number of values, or their total weight."""

    @classmethod
    def of(cls, values: Values) -> Mean:
        return cls(_total(values), _count(values))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    def scalars(self) -> dict[str, float]:
        count = float(self.count)
        return {"": float(self.sum) / count} if count else {}


@dataclass(frozen=True, slots=True)
class Sum:
    """A total, for counts and amounts."""

    value: Scalar

    @classmethod
    def of(cls, values: Values) -> Sum:
        return cls(_total(values))

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def scalars(self) -> dict[str, float]:
        return {"": float(self.value)}


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value; NaN where any value is NaN. Of no values: -inf, which has no scalar."""

    value: Scalar

    @classmethod
    def of(cls, values: Values) -> Max:
        return cls(float(_array(values).max(initial=-np.inf)))

    def merge(self, other: Max) -> Max:
        return Max(float(np.maximum(float(self.value), float(other.value))))

    def scalars(self) -> dict[str, float]:
        value = float(self.value)
        return {} if value == -np.inf else {"": value}


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value; NaN where any value is NaN. Of no values: inf, which has no scalar."""

    value: Scalar

    @classmethod
    def of(cls, values: Values) -> Min:
        return cls(float(_array(values).min(initial=np.inf)))

    def merge(self, other: Min) -> Min:
        return Min(float(np.minimum(float(self.value), float(other.value))))

    def scalars(self) -> dict[str, float]:
        value = float(self.value)
        return {} if value == np.inf else {"": value}


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value, for settings such as a learning rate."""

    value: Scalar

    def merge(self, other: Last) -> Last:
        return other

    def scalars(self) -> dict[str, float]:
        return {"": float(self.value)}


_QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """All values of one step, for exact quantiles. Merging shares the chunks and copies nothing.

    Leaves: mean, std (of the population), min, max, p05, p50, p95, p99; quantiles interpolate
    linearly between neighbours.
    """

    chunks: tuple[Values, ...]

    @classmethod
    def of(cls, values: Values) -> Distribution:
        """Values are not copied: leave them as they are."""
        return cls((cast(Any, values).detach() if _is_tensor(values) else _array(values),))

    def merge(self, other: Distribution) -> Distribution:
        return Distribution(self.chunks + other.chunks)

    def scalars(self) -> dict[str, float]:
        values = np.concatenate([np.empty(0), *map(_array, self.chunks)])
        if not values.size:
            return {}
        quantiles = np.quantile(values, list(_QUANTILES.values()))
        return {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "max": float(values.max()),
            **dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
        }


def merge(*shards: Metrics) -> Metrics:
    """Combine shards, in order. A key need not be in every shard.

    Raises ValueError where shards hold different kinds of metric under one key.
    """
    merged: Metrics = {}
    for shard in shards:
        for key, metric in shard.items():
            earlier = merged.get(key)
            if earlier is not None and type(earlier) is not type(metric):
                raise ValueError(
                    f"Metric {key!r} is a {type(earlier).__name__} in one shard and a "
                    f"{type(metric).__name__} in another; use one kind for each key."
                )
            merged[key] = metric if earlier is None else earlier.merge(metric)
    return merged


def on_host(metrics: Metrics) -> Metrics:
    """The metrics with numbers in place of tensors, to be sent to other processes."""
    return {key: _without_tensors(metric) for key, metric in metrics.items()}


def _without_tensors(metric: Metric) -> Metric:
    if isinstance(metric, Distribution):
        return Distribution(tuple(map(_array, metric.chunks)))
    values = {f.name: getattr(metric, f.name) for f in fields(cast(Any, metric))}
    numbers = {name: float(value) for name, value in values.items() if _is_tensor(value)}
    return replace(cast(Any, metric), **numbers)


def to_scalars(metrics: Metrics) -> dict[str, float]:
    """Flat names to floats: `key` for a single value, `key/leaf` for a `Distribution`."""
    return {
        f"{key}/{leaf}" if leaf else key: value
        for key, metric in metrics.items()
        for leaf, value in metric.scalars().items()
    }
