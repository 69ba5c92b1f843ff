"""The model in training, sharded by FSDP: each process has a shard of every parameter.

FSDP2 (`fully_shard`; Zhao et al., arXiv:2304.11277) gathers the weights of a decoder layer before
it runs and, by stage (Rajbhandari et al., arXiv:1910.02054), frees them or keeps them:

    stage   shards                      weights after forward   gradients between micro-batches
    0       of one rank, replicated     kept                    whole, added up on the last one
    1       over `Mesh.fsdp`            kept                    whole, added up on the last one
    2       over `Mesh.fsdp`            kept                    shards, added up after each
    3       over `Mesh.fsdp`            freed after each layer  shards, added up after each

Gradients that wait on the host are reduced to shards after each micro-batch in every stage; stage 3
can also keep the shards of weights there. After the last micro-batch of a step only shards are
left, in every stage. Embedding, head and final norm are one group that stays gathered during a
pass, since it is needed at the beginning and at the end.

Shards are the float32 masters. Gathered weights are rounded to the format that computes, gradients
are added up in float32, and they are *summed* over ranks: the weights of tokens already carry the
normalisation over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import local_part, region_of
from hone.distributed.mesh import Mesh
from hone.models.decoder import decoder_layers, layer_groups
from hone.models.deferred import Weight, WeightSource, take_source
from hone.trainer.experts import DividedExperts
from hone.trainer.gathering import wholes
from hone.trainer.host_gradients import HostGradients
from hone.trainer.pieces import Piece
from hone.trainer.pipeline import of_all_stages, tied_weight
from hone.trainer.policy import BasePolicy

__all__ = ["ShardedModel", "ShardedPolicy"]

T = TypeVar("T")


class _Pass(nn.Module):
    """Root of the sharded modules: embedding and head are gathered while its forward runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


class ShardedModel:
    """A model sharded over processes. Calling it runs a function with the model's weights gathered
    as needed.

    `model(lambda: score(...))` is a pass. Its result carries the hooks of backward, so loss and
    backward follow outside. All ranks run the same number of passes, forward and backward, since
    each is a fixed sequence of collectives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        stage: int,
        master_dtype: torch.dtype | None = None,
        offload_gradients: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        """Shard `model` in place, over `mesh.fsdp`, on `mesh.device`. The model may lie in host
        memory: the device then never has more of it than the shards and one layer. If its weights
        are deferred, each process reads only its own parts, one tensor after the other. Shards of
        trained parameters have `master_dtype`; all others, and gathered weights, have the model's
        dtype. With `offload_parameters` shards and their gradients lie in pinned host memory; with
        either offload gradients are reduced after each micro-batch. Raises RuntimeError where
        deferred weights are not the model's."""
        assert mesh.fsdp is not None, "shards need several processes"
        self.mesh = mesh
        self._stage = stage
        self._is_reduced_late = not (offload_gradients or offload_parameters)
        on_gpu = mesh.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=on_gpu) if offload_parameters else OffloadPolicy()
        mixed = MixedPrecisionPolicy(
            param_dtype=None if master_dtype is None else model.dtype,
            reduce_dtype=master_dtype,
            cast_forward_inputs=False,
        )
        layers = list(decoder_layers(model))
        root = _Pass(model)
        in_layers = {p for layer in layers for p in layer.parameters()}
        rest = [p for p in model.parameters() if p not in in_layers]
        source = take_source(model)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        divided = [m for m in model.modules() if isinstance(m, DividedExperts)]
        of_experts = {p for experts in divided for p in experts.parameters()}
        modules = [
            *((experts, [*experts.parameters()]) for experts in divided),
            *((layer, [p for p in layer.parameters() if p not in of_experts]) for layer in layers),
            (root, rest),
        ]
        for module, own in modules:
            # One layer after the other, so that at most one exists whole and in float32. Buffers,
            # which stay whole, are moved by fully_shard.
            for parameter in own:
                _move(parameter, mesh.device, master_dtype if parameter.requires_grad else None)
            fully_shard(
                module,
                mesh=mesh.expert_fsdp if module in divided else mesh.fsdp,
                reshard_after_forward=stage == 3 and module is not root,
                mp_policy=mixed,
                offload_policy=offload,
            )
        if source is not None:
            _materialise(root, mesh.device, on_host=offload_parameters)
            _fill(model, source, mesh.device, dtypes)
        self._root = cast(FSDPModule, root)
        self._parts = [cast(FSDPModule, module) for module, _ in modules]
        self._of_group: list[list[FSDPModule]] = [
            [module for module in group.modules() if isinstance(module, FSDPModule)]
            for group in layer_groups(model)
        ]
        # The first pipeline stage has the embedding, the last one the norm and the head.
        is_first = mesh.pipeline.rank == 0
        self._of_group[0 if is_first else -1].append(self._root)
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # no other reduction divides by 1 on gloo

    def __call__(self, function: Callable[[], T]) -> T:
        """Result of `function`, which must call each decoder layer of a group once."""
        return cast(nn.Module, self._root)(function)

    def begin_micro_batch(self, *, is_last: bool, group: int = 0) -> None:
        """Prepare the next forward and backward through `group` of the model's `layer_groups`.
        `is_last`: they are the last through it in this optimizer step."""
        for part in self._of_group[group]:
            if self._is_reduced_late and self._stage < 2:
                part.set_requires_gradient_sync(is_last, recurse=False)
            elif self._is_reduced_late:
                part.set_requires_all_reduce(is_last, recurse=False)
            if self._stage < 3:
                part.set_reshard_after_backward(is_last, recurse=False)

    def free(self) -> None:
        """Free gathered weights. Backward does so by itself; call this after passes without
        gradient."""
        for part in self._parts:
            part.reshard()


class ShardedPolicy(BasePolicy):
    """The policy of several processes: its masters are shards."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        stage: int,
        offload_gradients: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        """Shard `model`. Recomputation, compilation and tensor parallelism must be applied before.

        `offload_gradients` keeps gradients in pinned host memory, `offload_parameters` shards and
        gradients; that needs stage 3. Raises UserError where the host has too little."""
        super().__init__(model, mesh)
        self.sharded = ShardedModel(
            model,
            mesh,
            stage=stage,
            master_dtype=torch.float32 if self.is_narrow else None,
            offload_gradients=offload_gradients,
            offload_parameters=offload_parameters,
        )
        self.parameters = dict(model.named_parameters())  # a shared tensor appears once
        self._masters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        everyones = mesh.gather_stages({name: p.shape for name, p in self._masters.items()})
        self.elsewhere = {
            name: torch.empty(shape, device="meta")
            for of_stage in everyones
            for name, shape in of_stage.items()
            if name not in self._masters
        }
        if mesh.pipeline_ends.size > 1:
            self._tied = tied_weight(model)
        # With offloaded shards FSDP itself moves gradients to the host and adds them up there.
        self.masters_on_host = self.gradients_on_host = offload_parameters
        if offload_gradients and not offload_parameters:
            host = self._keep_gradients_on_host()
            for name, master in self._masters.items():
                master.register_post_accumulate_grad_hook(_shard_mover(name, host))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, gathered in groups (`wholes`); each exists as long as the caller refers to
        it. While the policy sleeps, only the shards of the current group are on the device."""
        return self._named_wholes(
            lambda value: self.dtype if isinstance(value, nn.Parameter) else value.dtype
        )

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        self._require_awake()
        return self._named_wholes(lambda value: value.dtype)

    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        self._require_awake()
        return self._named_wholes(lambda value: value.dtype, frozenset(self.masters))

    @torch.no_grad()
    def _named_wholes(
        self, dtype_of: Callable[[Tensor], torch.dtype], wanted: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of all stages in the dtypes of `dtype_of`, a tied one under each of its
        names; with `wanted` only this stage's tensors of these names."""
        names: dict[Tensor, list[str]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if wanted is None or name in wanted:
                names.setdefault(value, []).append(name)
        if self._tied is not None and self.mesh.is_last_stage:
            names.pop(self._tied, None)  # the first stage gives it
        dtypes = [dtype_of(value) for value in names]
        own = [(tuple(names[v]), v.shape, dtype) for v, dtype in zip(names, dtypes, strict=True)]
        gathered = wholes(zip(map(self._on_device, names), dtypes, strict=True))
        for tied, value in of_all_stages(own, gathered, self.mesh):
            for name in tied:
                yield name, value

    def _on_device(self, value: Tensor) -> Tensor:
        """`value`, detached; where its shard is on the host, a copy on the device."""
        value = value.detach()
        if self._state_offload is None or not self._state_offload.is_away:
            return value
        host = self._state_offload.host_copy(local_part(value))
        if host is None:
            return value
        shard = host.to(self.device)
        if not isinstance(value, DTensor):
            return shard
        return DTensor.from_local(
            shard,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    def write_back(self, moved: Sequence[tuple[Piece, Tensor]]) -> None:
        """Do nothing, since FSDP rounds the shards when it gathers them."""

    def _write_module(self) -> None:
        """Nothing, as `write_back`."""

    def _device_masters(self) -> Iterable[Tensor]:
        return () if self.masters_on_host else self.parameters.values()


def _shard_mover(name: str, host: HostGradients) -> Callable[[Tensor], None]:
    """Hook that takes a shard's fresh gradient, which FSDP calls on the stream that reduced it."""

    def move(master: Tensor) -> None:
        assert master.grad is not None
        shard = local_part(master.grad)
        host.add(name, shard)
        if shard.is_cuda:
            # With replicas this is not the stream whose memory it is.
            shard.record_stream(torch.cuda.current_stream(shard.device))
        master.grad = None

    return move


def _move(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move a parameter to `device` and to `dtype` (None: unchanged) in place, so that tied
    parameters stay tied."""
    moved = parameter.detach().to(parameter.device if parameter.is_meta else device, dtype)
    if isinstance(parameter, DTensor):  # whose `data` does not replace the local tensor
        torch.utils.swap_tensors(
            parameter, nn.Parameter(moved, requires_grad=parameter.requires_grad)
        )
    else:
        parameter.data = moved


def _materialise(root: nn.Module, device: torch.device, *, on_host: bool) -> None:
    """Allocate memory for shards and buffers that are on the meta device; for shards on the host
    where `on_host`. Shards are DTensors, which are exchanged in place, so that tied ones stay
    tied."""
    root.to_empty(device=torch.device("cpu") if on_host else device)
    for module in root.modules() if on_host else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@torch.no_grad()
def _fill(
    model: nn.Module,
    source: WeightSource,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Copy this process's part of every tensor of `source` into `model`.

    Values are first rounded to `dtypes`, the formats that compute, so that masters start with the
    same values as in a single process.
    """
    targets: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    awaited = set(targets)

    def take_part(weight: Weight) -> None:
        if weight.name not in awaited:
            raise RuntimeError(f"{weight.name} has been loaded already, or is not of this model")
        awaited.remove(weight.name)
        target = targets[weight.name].detach()
        if weight.shape != target.shape:
            raise RuntimeError(
                f"{weight.name} has the shape {list(weight.shape)}, not {list(target.shape)}"
            )
        local = local_part(target)
        if local.numel():
            part = weight.read(region_of(target).slices).to(local.device)
            local.copy_(part.to(dtypes.get(weight.name, target.dtype)))

    source.give(take_part, device=device)
    if awaited:
        raise RuntimeError(f"{len(awaited)} tensors were not loaded, as {min(awaited)}")
