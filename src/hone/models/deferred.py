"""Models whose weights come once it is known which process holds what.

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
    """A tensor of a model, of which a part can be read. It may be gone after the next one."""

    name: str
    shape: torch.Size
    read: Callable[[tuple[slice, ...]], Tensor]
    """The values of a region, one slice a dimension: on any device, in the format in which they
    are stored. They may be a view of what must not be written to."""

    @classmethod
    def of(cls, name: str, whole: Tensor) -> Self:
        """A tensor that is there."""
        return cls(name, whole.shape, whole.__getitem__)

    def whole(self) -> Tensor:
        """All of it."""
        return self.read(tuple(slice(0, size) for size in self.shape))


class WeightSource(Protocol):
    """Where the tensors of a model come from."""

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        """Call `take` with every parameter, a shared one once and under the first of its names, and
        with every buffer, in any order. Every process that calls this gets the same values. What
        has to be computed is computed on `device`."""
        ...


_sources: WeakKeyDictionary[nn.Module, WeightSource] = WeakKeyDictionary()


def defer(model: nn.Module, source: WeightSource) -> None:
    """Have the tensors of `model`, which are on the meta device, come from `source`."""
    _sources[model] = source


def take_source(model: nn.Module) -> WeightSource | None:
    """What `defer` has put beside `model`, once; None where its tensors are there already."""
    return _sources.pop(model, None)
