"""A reward model in shards over all training processes, which score their samples together.

    judge = SharedRewardModel(module, mesh, cfg.trainer.parallel, max_tokens=8192)
    scores = judge.begin(sequences)         # asks, in the processes that have samples
    while judge.meet(is_waiting):           # on all processes: scores what all have asked
        ...

A pass gathers the weights of one layer after the other from all processes, so none can score while
another one samples. What is asked waits for a *meeting*: every process brings its sequences, of
which it may have none, all plan the passes of all of them, and each keeps its own scores. Meetings
are repeated until no process waits for a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from time import perf_counter

import torch.distributed as dist
from transformers import PreTrainedModel

from hone.distributed.mesh import Mesh
from hone.distributed.settings import ParallelConfig
from hone.images.sending import with_pixels
from hone.rollout.judge import VALUES, rows_of
from hone.rollout.transcripts import Transcript
from hone.trainer.batcher import Batcher
from hone.trainer.build import frozen_model
from hone.trainer.frozen import SleepingWeights
from hone.trainer.scorer import row_outputs
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Row

__all__ = ["SharedRewardModel"]


class SharedRewardModel:
    """A frozen sequence classifier with one label, of which each process has a shard. A
    `SequenceScorer` in the processes that have samples."""

    def __init__(
        self, module: PreTrainedModel, mesh: Mesh, parallel: ParallelConfig, *, max_tokens: int
    ) -> None:
        """Shard `module`, a model of `load_value_model` with deferred weights, over all processes
        of `mesh` as `parallel.for_sequences` says. A pass of one process has at most `max_tokens`
        tokens, or one longer sequence. Collective. Raises as `ShardedModel`."""
        self._everyone = mesh
        self._pad_id: int | None = module.config.pad_token_id
        self._max_tokens = max_tokens
        # Not compiled, as a whole copy.
        cfg = SFTTrainerConfig(compile=False, parallel=parallel.for_sequences)
        self._batcher = Batcher.of(cfg, module)
        self._model = frozen_model(module, cfg, mesh)
        self._weights = SleepingWeights(module)
        self._asked: list[tuple[list[Row], Future[list[float]]]] = []
        """Rows that wait for a meeting, with the future of their scores."""
        self.busy_s = 0.0

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that it has collectives in."""
        return self._model.mesh.groups

    def begin(self, sequences: Sequence[Transcript]) -> Future[list[float]]:
        """Ask for the scores of sequences. The future is done after the next meeting."""
        scores = Future[list[float]]()
        self._asked.append((rows_of(sequences, self._pad_id), scores))
        return scores

    def meet(self, is_waiting: bool) -> bool:
        """Score what all processes have asked since the last meeting. Returns whether any of them
        waits, as its own `is_waiting` says: then all must meet again. Collective."""
        asked, self._asked = self._asked, []
        own = [row for rows, _ in asked for row in rows]
        everyones = self._everyone.gather((is_waiting, with_pixels(own)))
        start = perf_counter()
        scores = self._scores([rows for _, rows in everyones])
        self.busy_s += perf_counter() - start
        remaining = iter(scores[self._everyone.rank])
        for rows, future in asked:
            future.set_result([next(remaining) for _ in rows])
        return any(waits for waits, _ in everyones)

    def sleep(self) -> None:
        """Move this process's shard to host memory. Raises as `SleepingWeights.sleep`."""
        self._weights.sleep()

    def wake(self) -> None:
        """Bring the shard back. Raises as `SleepingWeights.wake`."""
        self._weights.wake()

    def _scores(self, of_ranks: Sequence[Sequence[Row]]) -> list[list[float]]:
        """The score of each row, by the process that has asked for it. Collective."""
        rows = [
            replace(row, id=f"{rank}/{number}")
            for rank, own in enumerate(of_ranks)
            for number, row in enumerate(own)
        ]
        if not rows:
            return [[] for _ in of_ranks]
        cap = max(self._max_tokens, *(row.num_tokens for row in rows))
        batcher = replace(self._batcher, max_tokens_forward=cap)
        found = row_outputs(self._model, batcher, rows, VALUES)
        values = chain.from_iterable(outputs["values"].tolist() for outputs in found)
        return [[next(values) for _ in own] for own in of_ranks]
