"""Pipeline stages of the trained model: each process holds neighbouring layers, and passes hidden
states on.

A stage runs the model's own forward, in which modules that other stages hold give back what they
are given; what enters is embeddings in the first stage and hidden states in the others. Losses and
log-probabilities are the last stage's. Micro-batches follow each other as 1F1B has it
(PipeDream-Flush, Narayanan et al., arXiv:2006.09503): of S stages, stage s is at most S - s forward
passes ahead of backward. Here S = 3, with four micro-batches:

    stage 0   F0 F1 F2 .. .. B0 F3 .. B1 .. B2 .. B3
    stage 1      F0 F1 .. B0 F2 .. B1 F3 B2 .. B3
    stage 2         F0 B0 F1 B1 .. F2 B2 F3 B3

All stages have the same micro-batches, so what travels has a shape that both sides know: a rank of
the tensor and context axes sends its share of the tokens to the rank of the next stage that has the
same. Hidden states and their gradients have a group each: in one, a stage that sends both and one
that receives both would wait for each other. On a GPU, what has been asked for and has not come
holds up whatever waits for the whole device, as the first launch of a kernel and the release of
memory do. So hidden states alone are asked for a pass ahead: with gradients too, a stage in forward
and the next one in backward could each wait for what the other is about to send.

A tied embedding lies in the first and in the last stage, which add up their gradients of it.

Letters: T tokens of this rank, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import local_part
from hone.config.parallel import stage_layers
from hone.distributed.mesh import Axis, Mesh
from hone.models.decoder import Elsewhere, head_weight
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.heads import has_value_head
from hone.trainer.context import share_of_layers
from hone.types import MicroBatch

__all__ = [
    "Pipeline",
    "add_tied_gradients",
    "cut_stage",
    "of_all_stages",
    "tied_weight",
    "with_other_stages",
]


def cut_stage(model: PreTrainedModel, mesh: Mesh) -> None:
    """Take what other stages of `mesh` hold out of `model`, in place; nothing with one stage.

    Before anything else is done to its modules. Every process brings the same model; one whose
    weights are deferred will read its own alone.
    """
    axis = mesh.pipeline
    if axis.size == 1:
        return
    base: Any = model.base_model
    is_first, is_last = axis.rank == 0, axis.rank == axis.size - 1
    is_tied = tied_weight(model) is not None
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    own = stage_layers(len(base.layers), axis.size)[axis.rank]
    for number in set(range(len(base.layers))) - set(own):
        base.layers[number] = Elsewhere()
    if not (is_first or (is_tied and is_last)):
        model.set_input_embeddings(Elsewhere())
    if not is_last:
        base.norm = Elsewhere()
    if not (is_last or (is_tied and is_first)):
        if has_value_head(model):
            model.score = Elsewhere()
        else:
            model.set_output_embeddings(Elsewhere())
    source = take_source(model)
    if source is not None:
        kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        defer(model, _OwnWeights(source, frozenset(names - kept)))


@dataclass(frozen=True, slots=True)
class _OwnWeights:
    """A source of weights without those of other stages."""

    source: WeightSource
    elsewhere: frozenset[str]

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_own(weight: Weight) -> None:
            if weight.name not in self.elsewhere:
                take(weight)

        self.source.give(take_own, device=device)


_MOST_SENT = 4
"""Messages that may be on their way: a stage that runs ahead waits."""

Run = Callable[[MicroBatch, Tensor | None], Any]
"""A stage's forward of what enters it, [1, T, D] or None in the first: hidden states [1, T, D], or
in the last stage whatever is wanted of them."""


class _BeginBackward(Protocol):
    def __call__(self, *, is_last: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Pass:
    """What backward of a micro-batch needs."""

    batch: MicroBatch
    entered: Tensor | None
    """A leaf, whose gradient goes back."""
    left: Any
    """Where its graph begins, or what the last stage has found."""
    is_last: bool
    """Of the step."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor that comes or goes."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Pipeline:
    """What this stage does in a pass, and what it sends and receives."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        """Of a model that `cut_stage` has cut, before it is sharded."""
        self._axis, self._back, self._ends = mesh.pipeline, mesh.pipeline_back, mesh.pipeline_ends
        self._mesh, self._device, self._dtype = mesh, mesh.device, model.dtype
        self._width: int = model.config.hidden_size
        self._sent: deque[_Message] = deque()
        """What may be on its way still, in the order of sending."""

    def forward(self, batch: MicroBatch, run: Run) -> Any:
        """What `run` gives in the last stage; None in others. Collective along the stages."""
        left = run(batch, self._take(self._expect_states(batch)))
        if self._is_last:
            return left
        self._send(left, self._axis, self._axis.rank + 1)
        return None

    def forward_backward(
        self,
        batches: Iterable[MicroBatch],
        run: Run,
        learn: Callable[[Any, MicroBatch], None],
        begin_backward: _BeginBackward,
    ) -> int:
        """Forward and backward of all micro-batches of an optimizer step, whose number is returned.

        In the last stage `learn` takes what `run` gives, and runs backward. `begin_backward` is
        told before each backward whether it is the step's last. Collective along the stages.
        """
        num_passes = 0
        most = self._axis.size - self._axis.rank
        in_flight: deque[_Pass] = deque()
        remaining = iter(batches)
        batch = next(remaining, None)
        arriving = None if batch is None else self._expect_states(batch)

        def backward() -> None:
            done = in_flight.popleft()
            gradient = self._expect_gradient(done.batch)
            begin_backward(is_last=done.is_last)
            if gradient is None:
                learn(done.left, done.batch)
            else:
                torch.autograd.backward(done.left, gradient.wait())
            if done.entered is not None:
                assert done.entered.grad is not None
                self._send(done.entered.grad, self._back, self._axis.rank - 1)

        while batch is not None:
            num_passes += 1
            following = next(remaining, None)
            entered = self._take(arriving)
            if entered is not None:
                entered.requires_grad_()
            left = run(batch, entered)
            if not self._is_last:
                self._send(left.detach(), self._axis, self._axis.rank + 1)
                # The graph stays; the values may go when they have left.
                left = get_gradient_edge(left)
            in_flight.append(_Pass(batch, entered, left, is_last=following is None))
            del left
            if following is not None:
                arriving = self._expect_states(following)
            if len(in_flight) == most:
                backward()
            batch = following
        while in_flight:
            backward()
        self.finish()
        return num_passes

    def finish(self) -> None:
        """Let go of what has been sent: after passes without gradient."""
        while self._sent:
            self._sent.popleft().wait()

    @property
    def _is_last(self) -> bool:
        return self._axis.rank == self._axis.size - 1

    def _expect_states(self, batch: MicroBatch) -> _Message | None:
        """What the stage before sends of a micro-batch; None in the first."""
        if self._axis.rank == 0:
            return None
        return self._expect(batch, self._axis, self._axis.rank - 1)

    def _expect_gradient(self, batch: MicroBatch) -> _Message | None:
        """What the stage behind sends back; None in the last."""
        return None if self._is_last else self._expect(batch, self._back, self._axis.rank + 1)

    def _expect(self, batch: MicroBatch, axis: Axis, sender: int) -> _Message:
        shape = 1, share_of_layers(batch, self._mesh), self._width
        found = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(found, group=axis.group, group_src=sender)
        assert work is not None
        return _Message(work, found)

    def _send(self, tensor: Tensor, axis: Axis, receiver: int) -> None:
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft().wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=axis.group, group_dst=receiver)
        assert work is not None
        self._sent.append(_Message(work, tensor))

    @staticmethod
    def _take(message: _Message | None) -> Tensor | None:
        return None if message is None else message.wait()


def add_tied_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Give the first and the last stage the sum of their gradients of a tied embedding. After the
    last backward of a step; collective over both."""
    weight = tied_weight(model)
    if mesh.pipeline_ends.size > 1 and weight is not None and weight.grad is not None:
        dist.all_reduce(local_part(weight.grad), group=mesh.pipeline_ends.group)


def tied_weight(model: PreTrainedModel) -> nn.Parameter | None:
    """The embedding that is the head as well, of a stage that has both."""
    weight = cast("nn.Parameter | None", model.get_input_embeddings().weight)
    return weight if weight is not None and head_weight(model) is weight else None


def of_all_stages(
    own: Sequence[tuple[tuple[str, ...], torch.Size, torch.dtype]],
    values: Iterable[Tensor],
    mesh: Mesh,
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Names of each tensor of each stage, and its values, on every process: the first stage's come
    first. `own` are names, shape and format of this stage's, `values` these tensors, whole, made
    when they are asked for. Collective."""
    described = mesh.gather_stages([*own])
    own_values = iter(values)
    for stage, of_stage in enumerate(described):
        for names, shape, dtype in of_stage:
            if stage == mesh.pipeline.rank:
                value = next(own_values)
            else:
                value = torch.empty(shape, dtype=dtype, device=mesh.device)
            if mesh.pipeline.size > 1:
                value = value.contiguous()
                dist.broadcast(value, group=mesh.pipeline.group, group_src=stage)
            yield names, value


def with_other_stages(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """A stage's part of a state with names for what others hold: those tensors are on the meta
    device, but for what is no DTensor, which all have. What several stages hold is the first's.
    Collective along the stages."""
    described = mesh.gather_stages(
        {
            key: (tensor.shape, tensor.dtype) if isinstance(tensor, DTensor) else tensor
            for key, tensor in tensors.items()
        }
    )
    found: dict[str, Tensor] = {}
    for stage, of_stage in enumerate(described):
        for key, entry in of_stage.items():
            if key in found:
                continue
            if stage == mesh.pipeline.rank:
                found[key] = tensors[key]
            elif isinstance(entry, Tensor):
                found[key] = entry
            else:
                shape, dtype = entry
                found[key] = torch.empty(shape, dtype=dtype, device="meta")
    return found
