"""Training while the next samples are being drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = ["PipelineConfig"]


class PipelineConfig(Section):
    """Asynchronous training: engines go on sampling while the trainer trains."""

    max_staleness: int = Field(default=0, ge=0)
    """Updates that may lie between the weights that began a sample and the update it is trained in:
    a hard bound, and so many batches are started ahead. An update waits for the samples that would
    exceed it, so that each prompt is trained once, however long its answers are. 0: sampling and
    training take turns. Above 0 they overlap; the engines are those of `cluster.num_engines`, or
    where that is 0, on a CPU, one in a thread of the first training process, with a copy of the
    weights. Start with 1; raise it while training waits for samples, lower it where the loss is
    unstable."""

    in_flight: Literal["pause", "abort", "finish"] = "pause"
    """Unfinished samples at a change of weights. `pause`: they keep their keys and values and go on
    under the new weights; a prompt that is half computed starts again. `abort`: they are put back
    with their tokens, whose keys and values are computed anew. `finish`: they end under their own
    weights, and the change waits for them."""

    @property
    def samples_ahead(self) -> bool:
        """Whether engines sample while the trainer trains."""
        return self.max_staleness > 0

    @property
    def resumes_samples(self) -> bool:
        """Whether samples may go on under other weights than those that began them."""
        return self.samples_ahead and self.in_flight != "finish"
