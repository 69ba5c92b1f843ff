"""The part of a micro-batch that one process computes: all of it without context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.attention import PackedContext
from hone.trainer.collating import to_device
from hone.types import MicroBatch

__all__ = ["MicroBatchShard", "whole_shard"]


@dataclass(frozen=True, slots=True)
class MicroBatchShard:
    """The tokens of a micro-batch that one rank of the context axis computes; tensors on the mesh's
    device.

    t is the same on all ranks; n differs, and may be 0.
    """

    input_ids: Tensor  # [t] int64
    position_ids: Tensor  # [t] or [A, t] int64, as in the whole row
    context: PackedContext
    predict_index: Tensor  # [n] int64 into [t]
    labels: Tensor  # [n] int64


def whole_shard(
    batch: MicroBatch, device: torch.device, *, replays_routes: bool = False
) -> MicroBatchShard:
    """The shard that is all of `batch`, copied to `device` without waiting for it. With
    `replays_routes` tokens pass the experts of the column `routes`, except in batches without
    rows."""
    routes = batch.column("routes") if replays_routes and batch.ids else None
    return MicroBatchShard(
        input_ids=to_device(batch.input_ids, device),
        position_ids=to_device(batch.position_ids, device),
        context=PackedContext(
            cu_seqlens=to_device(batch.cu_seqlens, device),
            max_seqlen=batch.max_seqlen,
            lengths=batch.lengths,
            keys=batch.keys,
            spans=batch.spans,
            segments=batch.segments,
            routes=None if routes is None else to_device(routes, device),
        ),
        predict_index=to_device(batch.predict_index, device),
        labels=to_device(batch.labels, device),
    )
