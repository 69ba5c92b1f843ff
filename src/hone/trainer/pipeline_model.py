"""Passes of one model in pipeline stages, one stage in each process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.models.decoder import layer_outputs, only_group
from hone.trainer.distributed_model import DistributedModel
from hone.trainer.parallel_model import Learning
from hone.trainer.pipeline import Pipeline, cut_stage
from hone.trainer.policy import BasePolicy
from hone.types import MicroBatch

__all__ = ["PipelineModel"]


class PipelineModel(DistributedModel):
    """One pipeline stage of a model in training."""

    _pipeline: Pipeline

    def train(self) -> BasePolicy:
        cut_stage(self.module, self.mesh)
        self._pipeline = Pipeline(self.module, self.mesh)
        return super().train()

    def forward_each(
        self, batches: Iterable[MicroBatch], outputs: frozenset[Output]
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        """Yield each of `batches` with its outputs, which only the last stage has. As many batches
        are taken in advance as are in the pipeline at once."""
        run, remaining = partial(self._run_stage, outputs), iter(batches)
        while together := [*islice(remaining, self._pipeline.batches_together)]:
            for batch, found in zip(together, self._pipeline.forward(together, run), strict=True):
                yield batch, found or {}

    def free(self) -> None:
        self._pipeline.finish()
        super().free()

    def _learn(self, batches: Iterable[MicroBatch], learning: Learning) -> int:
        num_passes = self._pipeline.forward_backward(
            batches,
            partial(self._run_stage, learning.objective.outputs),
            learning.backward,
            self._sharded.begin_micro_batch,
        )
        self._pipeline.add_tied_gradients()
        return num_passes

    def _run_stage(
        self, outputs: frozenset[Output], batch: MicroBatch, entering: Tensor | None, group: int
    ) -> Outputs | Tensor:
        """Run a group of layers of this stage. Its input is [1, T, D], or None for the first group
        of all; its result has the same shape, or is the outputs for the last group of all."""
        return self._sharded(partial(self._forward_group, batch, outputs, entering, group))

    def _forward_group(
        self, batch: MicroBatch, outputs: frozenset[Output], entering: Tensor | None, group: int
    ) -> Outputs | Tensor:
        share = self._share(batch)
        name = "input_ids" if entering is None else "inputs_embeds"
        enters = share.input_ids.unsqueeze(0) if entering is None else entering
        with only_group(self.module, group):
            leaving = layer_outputs(self.module, {name: enters}, share.position_ids, share.context)
        if not (self.mesh.is_last_stage and group == self.mesh.sizes.virtual_stages - 1):
            return leaving
        return self._of_tokens(leaving.squeeze(0), share, batch, outputs)
