"""Pipeline stages of the trained model: each process holds neighbouring layers, and passes hidden
states on.

A stage runs the model's own forward, in which modules that other stages hold give back what they
are given; what enters is embeddings in the first stage and hidden states in the others. Losses and
log-probabilities are the last stage's. Micro-batches follow each other as 1F1B has it
(PipeDream-Flush, Narayanan et al., arXiv:2006.09503): of S stages, stage s is at most S - s forward
passes ahead of backward. `timetable` for S = 3, with four micro-batches:

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

All processes make the same timetable, and each works off its own row. What a pass makes is sent and
asked for behind the passes of that time, before those of the next. So no pass waits for another of
the same time or a later one, and processes never wait for each other in a circle, not even where
all that was asked for has to come first. On a GPU it has to for what waits for the whole device, as
the first launch of a kernel and the release of memory do.

All stages have the same micro-batches, so what travels has a shape that both sides know: a rank of
the tensor and context axes sends its share of the tokens to the rank of the next stage that has the
same. Hidden states and their gradients have a process group each, and so have those that go round
from the last process to the first: in one, processes that send to each other would both wait.

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
from hone.config.parallel import passes_in_flight, rounds
from hone.distributed.mesh import Mesh
from hone.families.shape import ModelShape
from hone.families.stages import stage_layers
from hone.models.decoder import Elsewhere, head_weight
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.heads import has_value_head
from hone.trainer.context import share_of_layers
from hone.types import MicroBatch

__all__ = [
    "Pass",
    "Pipeline",
    "add_tied_gradients",
    "cut_stage",
    "of_all_stages",
    "tied_weight",
    "timetable",
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
    """A source of weights without those of other stages."""

    source: WeightSource
    elsewhere: frozenset[str]

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_own(weight: Weight) -> None:
            if weight.name not in self.elsewhere:
                take(weight)

        self.source.give(take_own, device=device)


class Pass(NamedTuple):
    """Of a micro-batch through a group of layers, whose numbers count through all stages: of S
    stages, group g is in stage g % S."""

    group: int
    batch: int
    is_backward: bool = False

    @property
    def before(self) -> Pass:
        """The pass whose result enters this one."""
        return self._replace(group=self.group + (1 if self.is_backward else -1))

    @property
    def after(self) -> Pass:
        """The pass that the result of this one enters."""
        return self._replace(group=self.group + (-1 if self.is_backward else 1))


def timetable(
    num_stages: int, virtual_stages: int, num_batches: int, *, with_backward: bool = True
) -> list[list[Pass | None]]:
    """What each stage does at a time, None where it waits: [time][stage], of passes that take
    equally long."""
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
"""Messages that may be on their way: a stage that runs ahead waits."""

Run = Callable[[MicroBatch, Tensor | None, int], Any]
"""The forward of one of this stage's groups of layers, by its number among them, of what enters it,
[1, T, D] or None in the first of all: hidden states [1, T, D], or in the last of all whatever is
wanted of them."""


class _BeginBackward(Protocol):
    def __call__(self, *, is_last: bool, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """What backward of a pass needs."""

    entered: Tensor | None
    """A leaf, whose gradient goes back."""
    left: Any
    """Where its graph begins, or what the last group of all has found."""


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
        self._mesh, self._device, self._dtype = mesh, mesh.device, model.dtype
        self._stage, self._num_stages = mesh.pipeline.rank, mesh.pipeline.size
        self._virtual_stages = mesh.sizes.virtual_stages
        self._groups = range(self._num_stages * self._virtual_stages)
        """Of all stages."""
        self._width: int = model.config.hidden_size
        self._arriving: dict[Pass, _Message] = {}
        """What enters a pass, from when it is asked for."""
        self._sent: deque[_Message] = deque()
        """What may be on its way still, in the order of sending."""

    @property
    def batches_together(self) -> int:
        """Micro-batches without gradient that fill all stages; a group that has nothing behind it
        needs no other to go on."""
        return 1 if self._virtual_stages == 1 else self._num_stages

    def forward(self, batches: Sequence[MicroBatch], run: Run) -> list[Any]:
        """What `run` gives of each in the last group of all; None in other stages. Collective along
        the stages."""
        found: list[Any] = [None] * len(batches)
        for now in self._timetable(len(batches), with_backward=False):
            own, leaving = now[self._stage], None
            if own is not None:
                batch = batches[own.batch]
                leaving = run(batch, self._take(own), own.group // self._num_stages)
                if own.group == self._groups[-1]:
                    found[own.batch] = leaving
            self._exchange(now, leaving, batches)
        return found

    def forward_backward(
        self,
        batches: Iterable[MicroBatch],
        run: Run,
        learn: Callable[[Any, MicroBatch], None],
        begin_backward: _BeginBackward,
    ) -> int:
        """Forward and backward of all micro-batches of an optimizer step, whose number is returned.

        In the last group of all `learn` takes what `run` gives, and runs backward. `begin_backward`
        is told before each backward through which of this stage's groups it goes, and whether it is
        the step's last through it. Collective along the stages.
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
            # The graph stays; the values may go when they have left.
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
        """Let go of what has been sent: after passes without gradient."""
        while self._sent:
            self._sent.popleft().wait()

    def _timetable(self, num_batches: int, *, with_backward: bool) -> list[list[Pass | None]]:
        return timetable(
            self._num_stages, self._virtual_stages, num_batches, with_backward=with_backward
        )

    def _take(self, own: Pass) -> Tensor | None:
        """What enters a pass; None where nothing does."""
        return self._arriving.pop(own).wait() if own in self._arriving else None

    def _exchange(
        self, now: Sequence[Pass | None], leaving: Tensor | None, batches: Sequence[MicroBatch]
    ) -> None:
        """Send what the pass of this stage goes on to another with, and ask for what those of
        others do here. Sending comes first: it does not wait for what comes."""
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
        """The group in which the result of a pass travels, and the rank in it of the stage with
        which this one exchanges it."""
        mesh, last = self._mesh, self._num_stages - 1
        first_group = min(done.group, done.after.group)
        if first_group % self._num_stages == last:  # from the last stage to the first, or back
            axis = mesh.pipeline_wrap_back if done.is_backward else mesh.pipeline_wrap
            return axis.group, 1 if other == last else 0
        return (mesh.pipeline_back if done.is_backward else mesh.pipeline).group, other

    def _ask(self, batch: MicroBatch, group: dist.ProcessGroup | None, sender: int) -> _Message:
        shape = 1, share_of_layers(batch, self._mesh), self._width
        found = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(found, group=group, group_src=sender)
        assert work is not None
        return _Message(work, found)

    def _send(self, tensor: Tensor, group: dist.ProcessGroup | None, receiver: int) -> None:
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft().wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=receiver)
        assert work is not None
        self._sent.append(_Message(work, tensor))


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
