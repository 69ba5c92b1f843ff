"""Verified weight sync from the trainer to an engine in the same process.

A sync has a version and a manifest. The trainer's side states what the engine must hold; the engine
recomputes the manifest from the tensors it samples with and refuses to sample until both agree.

Trainer and engine may share the memory of a tensor (same process, same dtype). Such a tensor is not
copied, and its manifests agree whatever the memory contains. Its proof is another one: before the
trainer exports the first weight it compares its weights with the master weights
(`hone.trainer.policy.Policy.named_weights`). A tensor-parallel rank of an engine receives, and
verifies, its own shards.

Weights are taken from the trainer as they come and released in groups, since a sharded trainer
gathers only a few whole weights at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hone.models.manifest import build_manifest, match_layout, memory_of
from hone.types import Engine, Trainer

__all__ = ["Delivery", "NonFiniteWeightsError", "SyncReport", "WeightSync"]

GROUP_BYTES = 1 << 28
"""Whole weights in memory at a time, in bytes; the last one may exceed it."""


class NonFiniteWeightsError(ValueError):
    """The trainer has NaN or infinite weights; neither they nor later weights were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Time and size of one sync."""

    seconds: float
    """Wall time from when the engine stops sampling to its confirmation of the weights."""
    bytes: int
    """Bytes written into the engine's tensors, or sent to engines; 0 when all are aliased."""


class WeightSync:
    """Delivers the weights of one trainer to one engine in the same process, verified.

    weights = WeightSync(trainer, engine)
    report = weights.push(version=step)  # `report.seconds`, `report.bytes`
    """

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self.trainer = trainer
        self.engine = engine

    @torch.no_grad()
    def push(self, version: int) -> SyncReport:
        """Make the engine sample with the trainer's weights from now on, as `version`.

        Raises NonFiniteWeightsError naming a tensor; StaleWeightsError naming a tensor that differs
        from its rounded master weights; and RuntimeError naming missing, unexpected and different
        tensors. After an error the engine refuses to sample until a later push succeeds.
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
    """One push into one engine, or into one rank of it. Weights are copied as they come."""

    def __init__(self, engine: Engine) -> None:
        self.targets = dict(engine.named_weights())
        # The engine's dtype may differ from the trainer's: the value after the cast is verified.
        self.dtypes = {name: target.dtype for name, target in self.targets.items()}
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of the shards that the engine should hold."""
        self.moved: set[object] = set()
        """Memory of the engine that has been written."""
        self.num_bytes = 0
        self._engine = engine

    def sources(
        self,
        named: Iterable[tuple[str, Tensor]],
        *,
        are_finite: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Copy each weight of `named` (whole weights) into the engine, then yield the engine's
        shard of it. With `are_finite` the weights are known to be finite in their own dtype, and
        only those that the engine casts to another one are checked."""
        for group in in_groups(named, GROUP_BYTES):
            # Whole weights are checked, so that all ranks of an engine refuse the same ones.
            to_check = {
                name: tensor
                for name, tensor in group.items()
                if name in self.targets and not (are_finite and self.dtypes[name] == tensor.dtype)
            }
            check_finite(to_check, self.dtypes)
            shards = {name: self._engine.shard(name, tensor) for name, tensor in group.items()}
            self.shapes |= {name: shard.shape for name, shard in shards.items()}
            self._deliver(shards)
            yield from shards.items()
            del group, shards, to_check  # frees them before the next group is gathered

    def _deliver(self, shards: Mapping[str, Tensor]) -> None:
        name_of: dict[object, str] = {}
        for name, shard in shards.items():
            target = self.targets.get(name)
            if target is None or target.shape != shard.shape:
                continue
            if not target.is_meta and target.is_set_to(shard):  # shared memory: nothing to copy
                continue
            name_of[id(target) if target.is_meta else memory_of(target)] = name
        names = [name for memory, name in name_of.items() if memory not in self.moved]
        if names:
            self.num_bytes += self._engine.write(
                {name: (self.targets[name], shards[name]) for name in names}
            )
        self.moved |= name_of.keys()


def in_groups(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive weights in groups of at least `limit` bytes; the last group may be smaller."""
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


def check_finite(sources: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    """Raise NonFiniteWeightsError for the first tensor that is not finite in the dtype of `dtypes`,
    or in its own dtype where that one is an integer dtype (quantized weights)."""
    floats = {name: t for name, t in sources.items() if t.is_floating_point()}
    dtypes = {name: _float_of(dtypes[name], t) for name, t in floats.items()}
    if not floats:
        return
    # A sum with a term that is not finite is not finite. A sum may also overflow by itself, so the
    # elements of tensors with such a sum are counted. One sum for each tensor keeps the host's wait
    # for the device to one transfer a group.
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
