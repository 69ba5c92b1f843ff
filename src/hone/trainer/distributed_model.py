"""Passes of one model over several processes, each with a part of it.

Modules are split over the tensor axis and the expert axis and then held in shards. In a pass a
process computes its share of the tokens (`context.py`), with weights that are gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Outputs
from hone.distributed.mesh import Mesh
from hone.model_input import ContentPiece, pieces_within
from hone.observe.metrics import Metrics, merge, on_host
from hone.trainer.context import gather, own_part, split
from hone.trainer.experts import divide_experts
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.policy import BasePolicy
from hone.trainer.shard import MicroBatchShard
from hone.trainer.sharded import ShardedModel, ShardedPolicy
from hone.trainer.tensor import parallelize
from hone.types import MicroBatch

__all__ = ["DistributedModel"]


class DistributedModel(ParallelModel):
    """One process's part of a model; all processes make the same calls."""

    _sharded: ShardedModel

    def freeze(self) -> None:
        """Shard all weights over the reference's own mesh."""
        self.mesh = self.mesh.for_reference(self._cfg.parallel)
        _divide(self.module, self.mesh)
        self._compile_forward()
        self._sharded = ShardedModel(self.module, self.mesh, stage=3)

    def train(self) -> BasePolicy:
        _divide(self.module, self.mesh)
        self._prepare_layers()
        self._compile_forward()
        policy = ShardedPolicy(
            self.module,
            self.mesh,
            stage=self._cfg.parallel.zero_stage,
            offload_gradients=self._cfg.offloads("gradients"),
            offload_parameters=self._cfg.offloads("parameters"),
        )
        self._sharded = policy.sharded
        return policy

    def free(self) -> None:
        self._sharded.free()

    def _with_weights(self, compute: Callable[[], Outputs]) -> Outputs:
        return self._sharded(compute)

    def _share(self, batch: MicroBatch) -> MicroBatchShard:
        return split(batch, self.mesh, replays_routes=self._replays_routes)

    def _embedded(self, batch: MicroBatch) -> Sequence[ContentPiece]:
        tensor = self.mesh.tensor
        if tensor.size == 1:
            return batch.contents
        size = -(-batch.num_tokens // tensor.size)  # of each rank between layers
        return pieces_within(batch.contents, tensor.rank * size, (tensor.rank + 1) * size)

    def _own_part(self, values_N: Tensor, share: MicroBatchShard) -> Tensor:
        return own_part(values_N, share)

    def _gather(self, values_n: Tensor, share: MicroBatchShard) -> Tensor:
        return gather(values_n, share)

    def _begin_micro_batch(self, *, is_last: bool) -> None:
        self._sharded.begin_micro_batch(is_last=is_last)

    def _merge_ranks(self, loss: Tensor, metrics: Metrics) -> tuple[Tensor, Metrics]:
        """The loss summed over the data axis, and the metrics over all rows, equal on every
        rank."""
        mesh = self.mesh
        # Processes that share rows have the same values; the first one in the last stage reports
        # them.
        reports = mesh.context.rank == mesh.tensor.rank == 0 and mesh.is_last_stage
        own = (float(loss), on_host(metrics))
        everyones = mesh.gather(own if reports else None)
        losses, shards = zip(*(result for result in everyones if result is not None), strict=True)
        return loss.new_tensor(sum(losses)), merge(*shards)


def _divide(module: PreTrainedModel, mesh: Mesh) -> None:
    """Keep this rank's parts of layers and experts, as far as several processes share them."""
    parallelize(module, mesh)
    divide_experts(module, mesh)
