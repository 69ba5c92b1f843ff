"""Deliver the trainer's weights to the engine, and prove that they arrived.

A sync has a version and a manifest. The trainer's side says what the engine must hold; the engine
recomputes the manifest from the tensors it samples with and refuses to sample until both agree.
Tensors that are one memory on both sides (one process, one number format) are not moved, only
proven. An engine that is one rank of several gets, and proves, its own parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hone.models.manifest import ManifestDiff, build_manifest, memory_of
from hone.types import Engine, Trainer

__all__ = ["NonFiniteWeightsError", "SyncReport", "WeightSync"]


class NonFiniteWeightsError(ValueError):
    """The trainer holds NaN or infinite weights; they were not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one sync did."""

    seconds: float
    """Wall time from the first refusal of tokens to the engine's confirmation."""
    bytes: int
    """Bytes written into the engine's tensors; 0 when all are aliased."""
    num_tensors: int
    """Names in the manifest."""
    aliased: bool
    """Trainer and engine share the memory of every tensor."""


class WeightSync:
    """The way of weights from one trainer to one engine in the same process."""

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self.trainer = trainer
        self.engine = engine

    @torch.no_grad()
    def push(self, version: int) -> SyncReport:
        """Make the engine sample with the trainer's weights from now on, as `version`.

        Raises NonFiniteWeightsError naming a tensor, and RuntimeError naming missing, unexpected
        and different ones. After an error the engine refuses to sample until a later push succeeds.
        """
        start = perf_counter()
        self.engine.begin_sync()
        weights = dict(self.trainer.named_weights())
        sources = {name: self.engine.shard(name, tensor) for name, tensor in weights.items()}
        targets = dict(self.engine.named_weights())
        if diff := match_layout(sources, targets):
            raise RuntimeError(f"The engine cannot take version {version}: {diff.describe()}")
        # The engine may compute in another number format: what counts is the value after the cast.
        dtypes = {name: target.dtype for name, target in targets.items()}
        # Of whole weights, so that engines with different parts of them all refuse.
        check_finite(weights, dtypes)
        manifest = build_manifest(sources.items(), version, dtypes=dtypes)
        moved = {
            memory_of(targets[name]): (targets[name], source)
            for name, source in sources.items()
            if not targets[name].is_set_to(source)
        }
        num_bytes = deliver(list(moved.values()))
        self.engine.finish_sync(manifest)
        return SyncReport(
            seconds=perf_counter() - start,
            bytes=num_bytes,
            num_tensors=len(sources),
            aliased=not moved,
        )


def match_layout(sources: dict[str, Tensor], targets: dict[str, Tensor]) -> ManifestDiff:
    """Names and shapes on which trainer and engine disagree, before anything is moved."""
    return ManifestDiff(
        missing=tuple(name for name in sources if name not in targets),
        unexpected=tuple(name for name in targets if name not in sources),
        different={
            name: f"shape {list(targets[name].shape)}, expected {list(source.shape)}"
            for name, source in sources.items()
            if name in targets and targets[name].shape != source.shape
        },
    )


def check_finite(sources: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    """Raise NonFiniteWeightsError for the first tensor that is not finite in its exported dtype."""
    exported = {name: t for name, t in sources.items() if dtypes[name].is_floating_point}
    if not exported:
        return
    # A sum is not finite where one of its terms is not. It may also overflow by itself, so a bad
    # sum is a suspicion, and the elements are looked at.
    sums = [t.to(dtypes[name]).sum(dtype=torch.float32) for name, t in exported.items()]
    finite = torch.stack(sums).isfinite().tolist()
    suspects = (name for name, is_finite in zip(exported, finite, strict=True) if not is_finite)
    for name in suspects:
        if num_bad := int(exported[name].to(dtypes[name]).isfinite().logical_not().sum()):
            raise NonFiniteWeightsError(
                f"{num_bad} of {exported[name].numel()} values of {name} are NaN or infinite: the "
                "weights were not sent. Go back to the last checkpoint; a lower optimizer.lr or "
                "optimizer.max_grad_norm keeps updates small."
            )


def deliver(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Copy each source into its target (target, source), casting; return the bytes written."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        # The public `copy_` takes one launch a tensor; this one fuses them, casts included.
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
    return sum(target.nbytes for target, _ in pairs)
