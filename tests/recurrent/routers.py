"""The experts that tokens pass in a plain model of transformers: noted, or prescribed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["noted", "prescribed"]


@contextmanager
def noted(model: nn.Module) -> Generator[list[Tensor]]:
    """Context manager whose list receives, for each router that a pass meets, the experts of each
    token, [T, K]."""
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(outputs[2])

    with _hooked(model, note):
        yield found


@contextmanager
def prescribed(model: nn.Module, routes: Sequence[Tensor]) -> Generator[None]:
    """Context manager in which the tokens of a pass go to these experts, with weights that the
    routers give to these."""
    left = iter(routes)

    def prescribe(
        module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, experts = outputs[0], next(left)
        weights = logits.softmax(-1).gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    with _hooked(model, prescribe):
        yield


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., Any]) -> Generator[None]:
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert routers, f"{type(model).__name__} has no routers"
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
