"""Adapters as seen by users of a model, whether it has some or not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["AdaptedLayer", "adapters_off", "is_adapted", "merged_weights"]


class AdaptedLayer(nn.Module):
    """A frozen layer with an adapter, which is active while `is_on`."""

    is_on = True

    @property
    @abstractmethod
    def stored(self) -> frozenset[str]:
        """Names of the tensors from which the merged weight is computed."""

    @abstractmethod
    def merge(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weight of an equivalent layer without adapter, computed from tensors by their names
        in this layer."""


def is_adapted(model: nn.Module) -> bool:
    """Whether some layer has an adapter."""
    return any(isinstance(module, AdaptedLayer) for module in model.modules())


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

    `named` iterates over the adapted model's own tensors, whole. At most the tensors of one layer
    are kept at a time. Without adapters they pass through. Raises RuntimeError if parts of a
    projection are missing.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, AdaptedLayer)}
    incomplete: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        path, _, leaf = name.rpartition(".")
        layer = layers.get(path)
        if layer is None or leaf not in layer.stored:
            yield name, tensor
            continue
        held = incomplete.setdefault(path, {})
        held[leaf] = tensor
        if held.keys() == layer.stored:
            del incomplete[path]
            yield f"{path}.weight", layer.merge(held)
    if incomplete:
        missing = [
            f"{path}.{leaf}"
            for path, held in incomplete.items()
            for leaf in sorted(layers[path].stored - held.keys())
        ]
        raise RuntimeError(f"parts of adapted projections are missing: {', '.join(missing)}")
