"""Deliver the trainer's weights to the engine, and prove that they arrived.

A sync has a version and a manifest. The trainer's side says what the engine must hold; the engine
recomputes the manifest from the tensors it samples with and refuses to sample until both agree.
Tensors that are one memory on both sides (one process, one number format) are not moved, only
proven: there the manifests agree whatever lies in that memory, and what proves it is the trainer's
own comparison of its weights with its masters, before it gives the first
(`hone.trainer.policy.Policy.named_weights`). An engine that is one rank of several gets, and
proves, its own parts.

Weights are taken from the trainer as they come and released in groups, since a trainer whose
weights are spread over processes makes them whole some at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hone.models.manifest import ManifestDiff, build_manifest, memory_of
from hone.types import Engine, Trainer

__all__ = ["Delivery", "NonFiniteWeightsError", "SyncReport", "WeightSync"]

GROUP_BYTES = 1 << 28
"""Whole weights that are held at a time, up to the last one."""


class NonFiniteWeightsError(ValueError):
    """The trainer holds NaN or infinite weights; they were not sent, nor any behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one sync did."""

    seconds: float
    """Wall time from the first refusal of tokens to the engine's confirmation."""
    bytes: int
    """Bytes written into the engine's tensors, or sent to engines; 0 when all are aliased."""


class WeightSync:
    """Delivers the weights of one trainer to one engine in the same process, with proof.

    weights = WeightSync(trainer, engine)
    report = weights.push(version=step)  # `report.seconds`, `report.bytes`
    """

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self.trainer = trainer
        self.engine = engine

    @torch.no_grad()
    def push(self, version: int) -> SyncReport:
        """Make the engine sample with the trainer's weights from now on, as `version`.

        Raises NonFiniteWeightsError naming a tensor, StaleWeightsError naming one that is not what
        the trainer's master rounds to, and RuntimeError naming missing, unexpected and different
        ones. After an error the engine refuses to sample until a later push succeeds.
        """
        start = perf_counter()
        self.engine.begin_sync()
        delivery = Delivery(self.engine)
        manifest = build_manifest(
            delivery.sources(self.trainer.named_weights()), version, dtypes=delivery.dtypes
        )
        if diff := match_layout(delivery.shapes, delivery.targets):
            raise RuntimeError(f"The engine cannot take version {version}: {diff.describe()}")
        self.engine.finish_sync(manifest)
        return SyncReport(seconds=perf_counter() - start, bytes=delivery.num_bytes)


class Delivery:
    """One push into one engine, or rank of one: weights go into its tensors as they come."""

    def __init__(self, engine: Engine) -> None:
        self.targets = dict(engine.named_weights())
        # The engine may compute in another number format: what counts is the value after the cast.
        self.dtypes = {name: target.dtype for name, target in self.targets.items()}
        self.shapes: dict[str, torch.Size] = {}
        """Of the parts that the engine should hold."""
        self.moved: set[tuple[object, ...]] = set()
        """Memory of the engine that has been written."""
        self.num_bytes = 0
        self._engine = engine

    def sources(
        self,
        named: Iterable[tuple[str, Tensor]],
        *,
        are_finite: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the engine's part of each weight, after its delivery. `named` are whole weights.
        With `are_finite` they are finite in their own number format, and are looked at only where
        the engine's is another."""
        for group in in_groups(named, GROUP_BYTES):
            # Of whole weights, so that engines with different parts of them all refuse.
            doubtful = {
                name: tensor
                for name, tensor in group.items()
                if name in self.targets and not (are_finite and self.is_as_it_came(name, tensor))
            }
            check_finite(doubtful, self.dtypes)
            parts = {name: self._engine.shard(name, tensor) for name, tensor in group.items()}
            self.shapes |= {name: part.shape for name, part in parts.items()}
            self._deliver(parts)
            yield from parts.items()
            del group, parts, doubtful  # before there are others

    def is_as_it_came(self, name: str, tensor: Tensor) -> bool:
        """Whether the engine holds that part in the number format of `tensor`."""
        return self.dtypes.get(name) == tensor.dtype

    def _deliver(self, parts: Mapping[str, Tensor]) -> None:
        pairs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        for name, part in parts.items():
            target = self.targets.get(name)
            if target is None or target.shape != part.shape or target.is_set_to(part):
                continue
            pairs[memory_of(target)] = target, part
        self.num_bytes += deliver([pair for key, pair in pairs.items() if key not in self.moved])
        self.moved |= pairs.keys()


def in_groups(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Neighbours of at least `limit` bytes together, as far as they go."""
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named:
        group[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= limit:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group


def match_layout(sources: Mapping[str, torch.Size], targets: Mapping[str, Tensor]) -> ManifestDiff:
    """Names and shapes on which trainer and engine disagree."""
    return ManifestDiff(
        missing=tuple(name for name in sources if name not in targets),
        unexpected=tuple(name for name in targets if name not in sources),
        different={
            name: f"shape {list(targets[name].shape)}, expected {list(shape)}"
            for name, shape in sources.items()
            if name in targets and targets[name].shape != shape
        },
    )


def check_finite(sources: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    """Raise NonFiniteWeightsError for the first tensor that is not finite in its exported dtype, or
    in its own where it is exported as integers."""
    floats = {name: t for name, t in sources.items() if t.is_floating_point()}
    dtypes = {name: _float_of(dtypes[name], t) for name, t in floats.items()}
    if not floats:
        return
    # A sum is not finite where one of its terms is not. It may also overflow by itself, so a bad
    # sum is a suspicion, and the elements are looked at.
    sums = [t.to(dtypes[name]).sum(dtype=torch.float32) for name, t in floats.items()]
    finite = torch.stack(sums).isfinite().tolist()
    suspects = (name for name, is_finite in zip(floats, finite, strict=True) if not is_finite)
    for name in suspects:
        if num_bad := int(floats[name].to(dtypes[name]).isfinite().logical_not().sum()):
            raise NonFiniteWeightsError(
                f"{num_bad} of {floats[name].numel()} values of {name} are NaN or infinite: the "
                "weights were not sent. Go back to the last checkpoint; a lower optimizer.lr or "
                "optimizer.max_grad_norm keeps updates small."
            )


def _float_of(exported: torch.dtype, tensor: Tensor) -> torch.dtype:
    return exported if exported.is_floating_point else tensor.dtype


def deliver(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Copy each source into its target (target, source), casting; return the bytes written."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        # The public `copy_` takes one launch a tensor; this one fuses them, casts included.
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
    return sum(target.nbytes for target, _ in pairs)
