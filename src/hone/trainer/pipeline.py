"""Pipeline stages of the trained model: each process holds neighbouring layers, and passes hidden
states on.

A stage runs the model's own forward, in which modules of other stages return their input unchanged.
The first stage's input is embeddings, that of the others hidden states. The last stage computes
losses and log-probabilities. Micro-batches follow each other in the order 1F1B (PipeDream-Flush,
Narayanan et al., arXiv:2006.09503): of S stages, stage s is at most S - s forward passes ahead of
backward. `timetable` for S = 3, with four micro-batches:

    stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

With V `virtual_stages` a process holds V groups of layers, dealt out in turn, and a micro-batch
passes all processes V times (interleaved 1F1B, Narayanan et al., arXiv:2104.04473, section 2.2).
Each takes a round of S micro-batches or a few more through one group, then through the next. A pass
takes a V-th of the time, and so does waiting for the first and the last. S = 2, V = 2, groups 0 and
2 in the first process, 1 and 3 in the second; F20 is forward of micro-batch 0 through group 2:

    stage 0   F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 ... B22 ... B23 B02 B03
    stage 1   ... F10 F11 F30 B30 F31 B31 F12 B10 F13 B11 F32 B32 F33 B33 B12 B13 ...

All processes make the same timetable, and each executes its own row. Results are sent, and receives
posted, after the passes of a time step and before those of the next. So no pass waits for another
of the same or a later time step, and processes never wait for each other in a circle, even where
all posted receives must complete first. On a GPU that happens with calls that wait for the whole
device, such as the first launch of a kernel and the release of memory.

All stages have the same micro-batches, so both sides know the shape of every message: a rank of the
tensor and context axes sends its share of the tokens to the rank of the next stage that has the
same share. Hidden states and their gradients have a process group each, and so have those that go
from the last process back to the first: in a single group, two processes that send to each other
would both wait.

A tied embedding lies in the first and in the last stage, which add up their gradients of it.

Letters: T tokens of this rank, D model width, S stages, V groups of each, M micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import local_part
from hone.distributed.mesh import Mesh
from hone.families.shape import ModelShape
from hone.families.stages import passes_in_flight, rounds, stage_layers
from hone.models.decoder import Elsewhere, head_weight
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.heads import has_value_head
from hone.trainer.context import share_of_layers
from hone.types import MicroBatch

__all__ = [
    "Pass",
    "Pipeline",
    "cut_stage",
    "of_all_stages",
    "tied_weight",
    "timetable",
    "with_other_stages",
]


def cut_stage(model: PreTrainedModel, mesh: Mesh) -> None:
    """Remove the modules of other stages of `mesh` from `model`, in place; with one stage
    nothing changes.

    Call it before any other change of the modules. Every process passes the same model;
    with deferred weights each will read only its own.
    """
    axis = mesh.pipeline
    if axis.size == 1:
        return
    base: Any = model.base_model
    is_first, is_last = axis.rank == 0, axis.rank == axis.size - 1
    is_tied = tied_weight(model) is not None
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    shape = ModelShape.from_config(model.config.to_dict())
    has_head = not has_value_head(model)
    stages = stage_layers(shape, axis.size, mesh.sizes.virtual_stages, has_head=has_head)
    groups = stages[axis.rank]
    for number in set(range(len(base.layers))) - set(chain(*groups)):
        base.layers[number] = Elsewhere()
    if not (is_first or (is_tied and is_last)):
        model.set_input_embeddings(Elsewhere())
    if not is_last:
        base.norm = Elsewhere()
    if not (is_last or (is_tied and is_first)):
        if not has_head:
            model.score = Elsewhere()
        else:
            model.set_output_embeddings(Elsewhere())
    source = take_source(model)
    if source is not None:
        kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        defer(model, _OwnWeights(source, frozenset(names - kept)))


@dataclass(frozen=True, slots=True)
class _OwnWeights:
    """A source of weights that leaves out those of other stages."""

    source: WeightSource
    elsewhere: frozenset[str]

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_own(weight: Weight) -> None:
            if weight.name not in self.elsewhere:
                take(weight)

        self.source.give(take_own, device=device)


class Pass(NamedTuple):
    """One pass of a micro-batch through a group of layers. Groups are numbered over all stages:
    with S stages, group g is in stage g % S."""

    group: int
    batch: int
    is_backward: bool = False

    @property
    def before(self) -> Pass:
        """The pass whose result is the input of this one."""
        return self._replace(group=self.group + (1 if self.is_backward else -1))

    @property
    def after(self) -> Pass:
        """The pass whose input is the result of this one."""
        return self._replace(group=self.group + (-1 if self.is_backward else 1))


def timetable(
    num_stages: int, virtual_stages: int, num_batches: int, *, with_backward: bool = True
) -> list[list[Pass | None]]:
    """The pass of each stage at each time, [time][stage], where all passes take equally long; None
    where the stage waits."""
    groups = range(num_stages * virtual_stages)
    remaining = [
        deque(_in_order(stage, num_stages, virtual_stages, num_batches, with_backward))
        for stage in range(num_stages)
    ]
    done: set[Pass] = set()

    def is_ready(each: Pass) -> bool:
        return each.before.group not in groups or each.before in done

    times: list[list[Pass | None]] = []
    while any(remaining):
        now = [own.popleft() if own and is_ready(own[0]) else None for own in remaining]
        assert any(now), f"stages wait for each other at time {len(times)}"
        done.update(each for each in now if each is not None)
        times.append(now)
    return times


def _in_order(
    stage: int, num_stages: int, virtual_stages: int, num_batches: int, with_backward: bool
) -> list[Pass]:
    """The passes of a stage: a round of micro-batches goes through a group, then the next."""
    groups = range(stage, num_stages * virtual_stages, num_stages)
    forward, backward = list[Pass](), list[Pass]()
    for together in rounds(num_batches, num_stages):
        forward += [Pass(group, batch) for group in groups for batch in together]
        backward += [Pass(group, batch, True) for group in reversed(groups) for batch in together]
    if not with_backward:
        return forward
    ahead = passes_in_flight(stage, num_stages, virtual_stages, num_batches=num_batches) - 1
    alternating = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *alternating, *backward[len(forward) - ahead :]]


_MOST_SENT = 4
"""Largest number of unfinished sends; a stage that runs ahead of its receiver waits."""

Run = Callable[[MicroBatch, Tensor | None, int], Any]
"""The forward of one group of layers, from the micro-batch, the group's input [1, T, D] (None for
the first group of all stages) and its number in this stage. It returns hidden states [1, T, D], or
for the last group of all stages the requested outputs."""


class _BeginBackward(Protocol):
    def __call__(self, *, is_last: bool, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """Input and output of a forward pass, kept for its backward."""

    entered: Tensor | None
    """The input, an autograd leaf whose gradient goes to the stage before."""
    left: Any
    """The output, at which backward begins; for the last group of all, the requested outputs."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A tensor that is being received or sent."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Pipeline:
    """Runs the passes of this stage, and sends and receives their tensors."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        """`model` must have been cut by `cut_stage` and not be sharded yet."""
        self._model, self._mesh = model, mesh
        self._device, self._dtype = mesh.device, model.dtype
        self._stage, self._num_stages = mesh.pipeline.rank, mesh.pipeline.size
        self._virtual_stages = mesh.sizes.virtual_stages
        self._groups = range(self._num_stages * self._virtual_stages)
        """Numbers of the groups of layers of all stages."""
        self._width: int = model.config.hidden_size
        self._arriving: dict[Pass, _Message] = {}
        """Posted receives of the inputs of passes."""
        self._sent: deque[_Message] = deque()
        """Sends that may be unfinished, in their order."""

    def add_tied_gradients(self) -> None:
        """Add up the gradients of a tied embedding over the first and the last stage, after the
        last backward of a step. Collective over both."""
        weight, ends = tied_weight(self._model), self._mesh.pipeline_ends
        if ends.size > 1 and weight is not None and weight.grad is not None:
            dist.all_reduce(local_part(weight.grad), group=ends.group)

    @property
    def batches_together(self) -> int:
        """Number of micro-batches without gradient that fill all stages."""
        return 1 if self._virtual_stages == 1 else self._num_stages

    def forward(self, batches: Sequence[MicroBatch], run: Run) -> list[Any]:
        """Results of `run` for each micro-batch in the last group of all; None in other stages.
        Collective along the stages."""
        results: list[Any] = [None] * len(batches)
        for now in self._timetable(len(batches), with_backward=False):
            own, leaving = now[self._stage], None
            if own is not None:
                batch = batches[own.batch]
                leaving = run(batch, self._take(own), own.group // self._num_stages)
                if own.group == self._groups[-1]:
                    results[own.batch] = leaving
            self._exchange(now, leaving, batches)
        return results

    def forward_backward(
        self,
        batches: Iterable[MicroBatch],
        run: Run,
        learn: Callable[[Any, MicroBatch], None],
        begin_backward: _BeginBackward,
    ) -> int:
        """Run forward and backward of all micro-batches of an optimizer step; returns their number.

        In the last group of all `learn` takes the result of `run` and runs backward. Before each
        backward `begin_backward` is called with the number of the group in this stage, and whether
        this is the step's last backward through it. Collective along the stages.
        """
        batches = [*batches]
        kept: dict[Pass, _Kept] = {}

        def forward(own: Pass) -> Tensor | None:
            entered = self._take(own)
            if entered is not None:
                entered.requires_grad_()
            left = run(batches[own.batch], entered, own.group // self._num_stages)
            if own.group == self._groups[-1]:
                kept[own] = _Kept(entered, left)
                return None
            # The graph stays; the memory of the values may be freed once they are sent.
            kept[own] = _Kept(entered, get_gradient_edge(left))
            return left.detach()

        def backward(own: Pass) -> Tensor | None:
            of_forward = kept.pop(own._replace(is_backward=False))
            is_last = own.batch == len(batches) - 1
            begin_backward(is_last=is_last, group=own.group // self._num_stages)
            gradient = self._take(own)
            if gradient is None:
                learn(of_forward.left, batches[own.batch])
            else:
                torch.autograd.backward(of_forward.left, gradient)
            return None if of_forward.entered is None else of_forward.entered.grad

        for now in self._timetable(len(batches), with_backward=True):
            own, leaving = now[self._stage], None
            if own is not None:
                leaving = backward(own) if own.is_backward else forward(own)
            self._exchange(now, leaving, batches)
        self.finish()
        return len(batches)

    def finish(self) -> None:
        """Wait for all sends and drop their tensors, after passes without gradient."""
        while self._sent:
            self._sent.popleft().wait()

    def _timetable(self, num_batches: int, *, with_backward: bool) -> list[list[Pass | None]]:
        return timetable(
            self._num_stages, self._virtual_stages, num_batches, with_backward=with_backward
        )

    def _take(self, own: Pass) -> Tensor | None:
        """The input of a pass; None for the first group of all."""
        return self._arriving.pop(own).wait() if own in self._arriving else None

    def _exchange(
        self, now: Sequence[Pass | None], leaving: Tensor | None, batches: Sequence[MicroBatch]
    ) -> None:
        """Send the result of this stage's pass, and post the receives of results of other stages.
        Sends come first, since they do not wait for receives."""
        own = now[self._stage]
        if own is not None and own.after.group in self._groups:
            assert leaving is not None
            self._send(leaving, *self._link(own, own.after.group % self._num_stages))
        for sender, done in enumerate(now):
            if done is None or done.after.group not in self._groups:
                continue
            if done.after.group % self._num_stages == self._stage:
                group, rank = self._link(done, sender)
                self._arriving[done.after] = self._ask(batches[done.batch], group, rank)

    def _link(self, done: Pass, other: int) -> tuple[dist.ProcessGroup | None, int]:
        """The process group for the result of a pass, and the rank in it of the stage on the other
        side."""
        mesh, last = self._mesh, self._num_stages - 1
        first_group = min(done.group, done.after.group)
        if first_group % self._num_stages == last:  # from the last stage to the first, or back
            axis = mesh.pipeline_wrap_back if done.is_backward else mesh.pipeline_wrap
            return axis.group, 1 if other == last else 0
        return (mesh.pipeline_back if done.is_backward else mesh.pipeline).group, other

    def _ask(self, batch: MicroBatch, group: dist.ProcessGroup | None, sender: int) -> _Message:
        shape = 1, share_of_layers(batch, self._mesh), self._width
        received = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(received, group=group, group_src=sender)
        assert work is not None
        return _Message(work, received)

    def _send(self, tensor: Tensor, group: dist.ProcessGroup | None, receiver: int) -> None:
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft().wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=receiver)
        assert work is not None
        self._sent.append(_Message(work, tensor))


def tied_weight(model: PreTrainedModel) -> nn.Parameter | None:
    """The embedding that is also the head, where the stage has both; None otherwise."""
    weight = cast("nn.Parameter | None", model.get_input_embeddings().weight)
    return weight if weight is not None and head_weight(model) is weight else None


def of_all_stages(
    own: Sequence[tuple[tuple[str, ...], torch.Size, torch.dtype]],
    values: Iterable[Tensor],
    mesh: Mesh,
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the names and values of each tensor of all stages on every process, beginning with the
    first stage. `own` has names, shapes and dtypes of this stage's tensors, `values` yields these
    tensors, whole, one when it is needed. Collective."""
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
    """A stage's part of a state, extended by the names of the tensors of other stages: these are on
    the meta device, except plain tensors, which every stage gets. A tensor of several stages
    belongs to the first of them. Collective along the stages."""
    described = mesh.gather_stages(
        {
            key: (tensor.shape, tensor.dtype) if isinstance(tensor, DTensor) else tensor
            for key, tensor in tensors.items()
        }
    )
    merged: dict[str, Tensor] = {}
    for stage, of_stage in enumerate(described):
        for key, entry in of_stage.items():
            if key in merged:
                continue
            if stage == mesh.pipeline.rank:
                merged[key] = tensors[key]
            elif isinstance(entry, Tensor):
                merged[key] = entry
            else:
                shape, dtype = entry
                merged[key] = torch.empty(shape, dtype=dtype, device="meta")
    return merged
