"""Models whose weights are loaded once the sharding over processes is known.

Such a model lies on the meta device, and beside it is a *source* that gives its tensors one after
the other. Whoever spreads the model over processes (`hone.trainer.sharded.ShardedModel`) reads of
each tensor the part that is its own, so that no process ever holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["Weight", "WeightSource", "defer", "take_source"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, readable in parts. It may be invalid once the next one is given."""

    name: str
    shape: torch.Size
    read: Callable[[tuple[slice, ...]], Tensor]
    """Reads a region, given one slice per dimension: on any device, in the stored dtype. The result
    may be a view that must not be written to."""

    @classmethod
    def of(cls, name: str, whole: Tensor) -> Self:
        """Wrap an existing tensor."""
        return cls(name, whole.shape, whole.__getitem__)

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self.read(tuple(slice(0, size) for size in self.shape))


class WeightSource(Protocol):
    """A source of a model's tensors."""

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        """Call `take` with every parameter (a shared one once, under the first of its names) and
        every buffer, in any order. Every process that calls this gets the same values. Values that
        have to be computed are computed on `device`."""
        ...


_sources: WeakKeyDictionary[nn.Module, WeightSource] = WeakKeyDictionary()


def defer(model: nn.Module, source: WeightSource) -> None:
    """Set the source of the tensors of `model`, which are on the meta device."""
    _sources[model] = source


def take_source(model: nn.Module) -> WeightSource | None:
    """Return and remove the source that `defer` has set. None if the tensors are loaded already."""
    return _sources.pop(model, None)
