"""The model being trained, spread over processes: each holds a shard of every parameter.

FSDP2 (`fully_shard`; Zhao et al., arXiv:2304.11277) gathers the weights of a decoder layer before
it runs and, by stage (Rajbhandari et al., arXiv:1910.02054), frees them or keeps them:

    stage   shards                      weights after forward   gradients between micro-batches
    0       of one rank, replicated     kept                    whole, added up on the last one
    1       over `Mesh.fsdp`            kept                    whole, added up on the last one
    2       over `Mesh.fsdp`            kept                    shards, added up after each
    3       over `Mesh.fsdp`            freed after each layer  shards, added up after each

Gradients that are to wait on the host are shards after each micro-batch in every stage; stage 3 can
keep its shards there too. After the last micro-batch of a step only shards are left, in every
stage. Embedding, head and final norm are one group that is whole during a pass: they are needed at
both of its ends.

Shards are the float32 masters. What is gathered is rounded to the format that computes, gradients
are added up in float32, and they are *summed* over ranks: the weights of tokens already carry the
normalisation over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil, prod
from typing import TypeVar, cast

import torch
import torch.distributed as dist
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

from hone.checkpoint.sharded import StoredTensor, laid_out, local_part, region_of, take
from hone.distributed.mesh import Mesh
from hone.models.decoder import decoder_layers
from hone.models.deferred import Weight, WeightSource, take_source
from hone.observe.metrics import Mean, Metrics
from hone.trainer.gathering import wholes
from hone.trainer.host_state import (
    HostGradients,
    HostMasters,
    StreamedGradients,
    norm_of_pieces,
)
from hone.trainer.offload import StateOffload
from hone.trainer.policy import (
    BasePolicy,
    layer_gradient_bytes,
    require_finite,
    require_layout,
)

__all__ = ["ShardedModel", "ShardedPolicy"]

T = TypeVar("T")


class _Pass(nn.Module):
    """Root of the sharded modules: what runs inside its forward finds embedding and head whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


class ShardedModel:
    """A model of which this process holds shards. Calling it runs a function of the model.

    `model(lambda: score(...))` is a pass. What it returns carries the hooks of backward, so loss
    and backward follow outside. All ranks run equally many passes, forward and backward: each is
    a fixed sequence of collectives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        stage: int,
        forward_prefetch: bool = False,
        master_dtype: torch.dtype | None = None,
        offload_gradients: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        """Shard `model` in place, over `mesh.fsdp`, on `mesh.device`. It may lie in host memory:
        the device then never holds more of it than the shards and one layer. Of one whose weights
        are deferred each process takes its own parts alone, one tensor after the other. Shards of
        what is trained are of `master_dtype`, all others, and what is gathered, of the model's
        own. With `offload_parameters` shards and their gradients lie in pinned host memory; with
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
        for module, own in (*((layer, [*layer.parameters()]) for layer in layers), (root, rest)):
            # One after the other: no more than a layer exists whole and wide. Buffers, which stay
            # whole, are moved by fully_shard.
            for parameter in own:
                _move(parameter, mesh.device, master_dtype if parameter.requires_grad else None)
            fully_shard(
                module,
                mesh=mesh.fsdp,
                reshard_after_forward=stage == 3 and module is not root,
                mp_policy=mixed,
                offload_policy=offload,
            )
        if source is not None:
            _materialise(root, mesh.device, on_host=offload_parameters)
            _fill(model, source, mesh.device, dtypes)
        self._root = cast(FSDPModule, root)
        self._parts = [cast(FSDPModule, module) for module in (*layers, root)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # no other reduction divides by 1 on gloo
        if forward_prefetch:
            for part, following in zip(self._parts[:-2], self._parts[1:-1], strict=True):
                part.set_modules_to_forward_prefetch([following])

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns, which must call each decoder layer once."""
        return cast(nn.Module, self._root)(function)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Say whether the next forward and backward are the last of an optimizer step."""
        if self._is_reduced_late and self._stage < 2:
            self._root.set_requires_gradient_sync(is_last)
        elif self._is_reduced_late:
            self._root.set_requires_all_reduce(is_last)
        if self._stage < 3:
            self._root.set_reshard_after_backward(is_last)

    def free(self) -> None:
        """Keep shards only. Backward does so by itself; call it after passes without gradient."""
        for part in self._parts:
            part.reshard()


class ShardedPolicy(BasePolicy):
    """A causal language model whose masters are shards; the interface of `Policy`.

    Everything that reads more than this process holds is collective over all processes of the
    mesh, and gives the same result on each.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        *,
        stage: int,
        forward_prefetch: bool = False,
        offload_gradients: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        """Shard `model`, which must be recomputing, compiled and split over the tensor axis by now
        where it is to be.

        `offload_gradients` keeps gradients in pinned host memory, `offload_parameters` shards and
        gradients; that needs stage 3. Raises UserError where the host has too little."""
        self.model = model
        self.mesh = mesh
        self.device = mesh.device
        self.dtype = model.dtype
        is_wide = self.dtype in (torch.float32, torch.float64)
        self.sharded = ShardedModel(
            model,
            mesh,
            stage=stage,
            forward_prefetch=forward_prefetch,
            master_dtype=None if is_wide else torch.float32,
            offload_gradients=offload_gradients,
            offload_parameters=offload_parameters,
        )
        self._state_offload = StateOffload()
        self.parameters = dict(model.named_parameters())  # a shared tensor once
        self.masters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        if offload_parameters:
            # FSDP takes gradients to where shards lie.
            self.host_masters = HostMasters(masters=self.masters, device=self.device)
            self.host_gradients = _ShardGradients(self.masters, self.device)
        elif offload_gradients:
            window = layer_gradient_bytes(decoder_layers(model))
            streamed = StreamedGradients(self.masters, self.device, window_bytes=window)
            self.host_gradients = streamed
            for name, master in self.masters.items():
                master.register_post_accumulate_grad_hook(_shard_mover(name, streamed))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients, float32 shards, as `BasePolicy.gradients`."""
        if self.host_gradients is not None:
            shards = self.host_gradients.tensors
            return {n: laid_out(shard, like=self.masters[n]) for n, shard in shards.items()}
        return _held_gradients(self.masters)

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        by_copies: dict[int, list[Tensor]] = {}
        if self.host_gradients is None:
            for gradient in self.gradients.values():
                by_copies.setdefault(_num_copies(gradient), []).append(local_part(gradient))
            norms = {n: norm_of_pieces(shards) for n, shards in by_copies.items()}
        else:
            for name, norm_K in self.host_gradients.norms.items():
                by_copies.setdefault(_num_copies(self.masters[name]), []).append(norm_K)
            norms = {n: torch.linalg.vector_norm(torch.cat(own)) for n, own in by_copies.items()}
        total = torch.stack([norm.double() ** 2 / n for n, norm in norms.items()]).sum()
        dist.all_reduce(total, group=self.mesh.world.group)
        return total.sqrt().float()

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.host_gradients is not None:
            self.host_gradients.clear()

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite on some rank."""
        own = [n for n, g in self.gradients.items() if not bool(local_part(g).isfinite().all())]
        everywhere = {name for names in self.mesh.gather(own) for name in names}
        return next((name for name in self.masters if name in everywhere), None)

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` move the masters, and measure the move, over all ranks; as `Policy.apply`.

        Raises NonFiniteError, on every rank, where a moved weight is not finite.
        """
        before = self._sampled(self.masters)
        update()
        after = self._sampled(self.masters)
        unchanged = before.to(self.dtype) == after.to(self.dtype)
        before, after = before.double(), after.double()
        values = ((after - before).square(), before.square(), unchanged, torch.ones_like(before))
        weights = self._sampled_weights()
        sums = torch.stack([(value * weights).sum() for value in values])
        dist.all_reduce(sums, group=self.mesh.world.group)
        moved, weight, num_unchanged, num_sampled = sums
        ratio = (moved / weight.clamp(min=1e-60)).sqrt()
        require_finite(ratio)
        return {
            "train/update_to_weight_ratio": Mean.of(ratio[None]),
            "train/share_unchanged": Mean(num_unchanged, float(num_sampled)),
        }

    def load_masters(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Take over saved masters, whole tensors or shards, or this process's part of what a
        checkpoint holds, one after the other. Raises ValueError unless names and shapes are the
        model's."""
        require_layout(self.masters, tensors)
        with torch.no_grad():
            for name, master in self.masters.items():
                _take_over(master, tensors[name])

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names in the format that computes.

        Collective: they are gathered some at a time (`wholes`), and each exists as long as the
        caller holds it. A tied parameter comes under each of its names, one after the other.
        """
        names: dict[Tensor, list[str]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            names.setdefault(value, []).append(name)
        values = (
            (value.detach(), self.dtype if isinstance(value, nn.Parameter) else value.dtype)
            for value in names
        )
        for tied, gathered in zip(names.values(), wholes(values), strict=True):
            for name in tied:
                yield name, gathered

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` to pinned host memory; as
        `Policy.sleep`. No pass and no `named_weights` until `wake`."""
        held: list[Tensor] = []
        if self.host_gradients is None:
            held += self.gradients.values()
        if self.host_masters is None:
            held += self.parameters.values()
        self._state_offload.offload([*(local_part(tensor.detach()) for tensor in held), *moments])

    def wake(self) -> None:
        """Bring back what `sleep` moved away; as `Policy.wake`."""
        self._state_offload.restore()

    def _sampled_weights(self) -> Tensor:
        """For each sampled element one over the number of processes that hold it, [K] float64."""
        shards = [(local_part(p), _num_copies(p)) for p in self.masters.values()]
        stride = self._stride(self.masters)
        numbers = torch.tensor([ceil(shard.numel() / stride) for shard, _ in shards])
        weights = torch.tensor([1 / copies for _, copies in shards], dtype=torch.float64)
        return weights.repeat_interleave(numbers).to(self.device)


class _ShardGradients(HostGradients):
    """Gradients that FSDP has brought to the host, to the shards that lie there.

    Those of the first micro-batch are copied while backward runs. To the sums of later ones cores
    add what arrives, while backward waits for it.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        super().__init__(device)
        self._masters = masters

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {n: local_part(g) for n, g in _held_gradients(self._masters).items()}

    @property
    def norms(self) -> dict[str, Tensor]:
        found = {n: norm_of_pieces([g])[None] for n, g in self.tensors.items()}
        values = torch.cat([*found.values()]).to(self.device)
        return dict(zip(found, values.split(1), strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(local_part(master.detach()).nbytes for master in self._masters.values())

    def clear(self) -> None:
        for master in self._masters.values():
            master.grad = None
        self.scale = None


def _held_gradients(masters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in masters.items() if p.grad is not None}


def _shard_mover(name: str, streamed: StreamedGradients) -> Callable[[Tensor], None]:
    """Hook that takes a shard's fresh gradient, which FSDP calls on the stream that reduced it."""

    def move(master: Tensor) -> None:
        assert master.grad is not None
        shard = local_part(master.grad)
        streamed.add(name, shard)
        if shard.is_cuda:
            # With replicas this is not the stream whose memory it is.
            shard.record_stream(torch.cuda.current_stream(shard.device))
        master.grad = None

    return move


def _move(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> None:
    """To `device`, unless there is nothing to move, and `dtype`, unless it is None, in place: tied
    parameters stay tied."""
    moved = parameter.detach().to(parameter.device if parameter.is_meta else device, dtype)
    if isinstance(parameter, DTensor):  # whose `data` does not replace the local tensor
        torch.utils.swap_tensors(
            parameter, nn.Parameter(moved, requires_grad=parameter.requires_grad)
        )
    else:
        parameter.data = moved


def _materialise(root: nn.Module, device: torch.device, *, on_host: bool) -> None:
    """Give shards and buffers that are on the meta device memory, shards that of the host where
    `on_host`. Shards are DTensors, which are exchanged in place: tied ones stay tied."""
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
    """Copy this process's part of every tensor that `source` gives into `model`.

    Values are first rounded to `dtypes`, the formats that compute: masters start as one process has
    them.
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


def _num_copies(parameter: Tensor) -> int:
    """Processes that hold the same elements as this one."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    mesh, placements = parameter.device_mesh, parameter.placements
    return prod(mesh.size(dim) for dim, p in enumerate(placements) if p.is_replicate())


def _take_over(master: Tensor, saved: Tensor | StoredTensor) -> None:
    """Copy a whole tensor, a shard of the same placement, or what is stored into a master."""
    if isinstance(saved, StoredTensor):
        local_part(master).copy_(local_part(take(saved, like=master)))
        return
    if isinstance(saved, DTensor):
        assert isinstance(master, DTensor)
        assert saved.placements == master.placements
        saved = saved.to_local()
    else:
        saved = saved[region_of(master).slices]
    local_part(master).copy_(saved)
