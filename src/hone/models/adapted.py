"""Adapters as seen by users of a model, whether it has some or not."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "AdaptedLayer",
    "Adapters",
    "adapters_of",
    "adapters_off",
    "attach_adapters",
    "merged_weights",
]

_ATTRIBUTE = "_hone_adapters"


class AdaptedLayer(nn.Module):
    """A frozen layer with an adapter, which is active while `is_on`."""

    is_on = True


class Adapters(Protocol):
    """Which layers of a model have adapters, and how they are merged. It knows all layers, also
    those that other pipeline stages have."""

    @property
    def paths(self) -> frozenset[str]:
        """The adapted layers, by their paths in the model."""
        ...

    def merged_name(self, path: str) -> str:
        """Name of the merged weight of the layer at `path` in a model without adapters."""
        ...

    @property
    def stored(self) -> frozenset[str]:
        """Names, in a layer, of the tensors from which its merged weight is computed."""
        ...

    def merge(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weight of an equivalent layer without adapter, from tensors by these names."""
        ...


def attach_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Note what adapters a model has got."""
    setattr(model, _ATTRIBUTE, adapters)


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters of a model; None where it has none."""
    return getattr(model, _ATTRIBUTE, None)


@contextmanager
def adapters_off(model: nn.Module) -> Generator[None]:
    """Context manager in which the model is the frozen base: a reference that needs no memory of
    its own."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


@torch.no_grad()
def merged_weights(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of an equivalent model without adapters, under its names.

    `named` iterates over the adapted model's own tensors, whole, also over those of other pipeline
    stages. At most the tensors of one layer are kept at a time. Without adapters they pass through.
    Raises RuntimeError if parts of a projection are missing.
    """
    adapters = adapters_of(model)
    # Not `yield from`: each tensor is kept here until the next one is there.
    if adapters is None:
        for name, tensor in named:
            yield name, tensor
        return
    incomplete: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        path, _, leaf = name.rpartition(".")
        if path not in adapters.paths or leaf not in adapters.stored:
            yield name, tensor
            continue
        held = incomplete.setdefault(path, {})
        held[leaf] = tensor
        if held.keys() == adapters.stored:
            del incomplete[path]
            yield adapters.merged_name(path), adapters.merge(held)
    if incomplete:
        missing = [
            f"{path}.{leaf}"
            for path, held in incomplete.items()
            for leaf in sorted(adapters.stored - held.keys())
        ]
        raise RuntimeError(f"parts of adapted projections are missing: {', '.join(missing)}")
