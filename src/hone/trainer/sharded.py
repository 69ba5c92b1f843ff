"""The model being trained, spread over processes: each holds a shard of every parameter.

FSDP2 (`fully_shard`; Zhao et al., arXiv:2304.11277) gathers the weights of a decoder layer before
it runs and, by stage (Rajbhandari et al., arXiv:1910.02054), frees them or keeps them:

    stage   shards                      weights after forward   gradients between micro-batches
    0       of one rank, replicated     kept                    whole, added up on the last one
    1       over `Mesh.fsdp`            kept                    whole, added up on the last one
    2       over `Mesh.fsdp`            kept                    shards, added up after each
    3       over `Mesh.fsdp`            freed after each layer  shards, added up after each

After the last micro-batch of a step only shards are left, in every stage. Embedding, head and final
norm are one group that is whole during a pass: they are needed at both of its ends.

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import StoredTensor, local_part, take
from hone.distributed.mesh import Mesh
from hone.models.decoder import decoder_layers, head_weight
from hone.observe.metrics import Mean, Metrics
from hone.trainer.offload import Parking
from hone.trainer.policy import NonFiniteError, require_layout

__all__ = ["ShardedModel", "ShardedPolicy", "whole"]

_MAX_SAMPLED_ELEMENTS = 1 << 22

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
    ) -> None:
        """Shard `model` in place, over `mesh.fsdp`, on `mesh.device`. It may lie in host memory:
        the device then never holds more of it than the shards and one layer. Shards of what is
        trained are of `master_dtype`, all others, and what is gathered, of the model's own."""
        assert mesh.fsdp is not None, "one process has nobody to share with"
        self.mesh = mesh
        self._stage = stage
        mixed = MixedPrecisionPolicy(
            param_dtype=None if master_dtype is None else model.dtype,
            reduce_dtype=master_dtype,
            cast_forward_inputs=False,
        )
        layers = list(decoder_layers(model))
        root = _Pass(model)
        in_layers = {p for layer in layers for p in layer.parameters()}
        rest = [p for p in model.parameters() if p not in in_layers]
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
            )
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
        if self._stage < 2:
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)
        if self._stage < 3:
            self._root.set_reshard_after_backward(is_last)

    def free(self) -> None:
        """Keep shards only. Backward does so by itself; call it after passes without gradient."""
        for part in self._parts:
            part.reshard()


class ShardedPolicy:
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
    ) -> None:
        """Shard `model`, which must be recomputing, compiled and split over the tensor axis by now
        where it is to be."""
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
        )
        self.host_masters = None
        """Masters do not wait on the host: passes gather their weights from them."""
        self._parking = Parking()
        self.parameters = dict(model.named_parameters())  # a shared tensor once
        self.masters = {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def embedding_names(self) -> set[str]:
        """Names of the input embedding and the output head."""
        ends = (self.model.get_input_embeddings().weight, head_weight(self.model))
        return {name for name, p in self.parameters.items() if any(p is end for end in ends)}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients, float32 shards."""
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        by_copies: dict[int, list[Tensor]] = {}
        for gradient in self.gradients.values():
            by_copies.setdefault(_num_copies(gradient), []).append(local_part(gradient))
        squares = [nn.utils.get_total_norm(g).double() ** 2 / n for n, g in by_copies.items()]
        total = torch.stack(squares).sum()
        dist.all_reduce(total, group=self.mesh.world.group)
        return total.sqrt().float()

    def clip_gradient(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients whose global norm is `norm` down to `max_norm`; 0 leaves them."""
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in self.gradients.values():
                local_part(gradient).mul_(factor)

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

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
        before = self._sampled_masters()
        update()
        after = self._sampled_masters()
        unchanged = before.to(self.dtype) == after.to(self.dtype)
        before, after = before.double(), after.double()
        values = ((after - before).square(), before.square(), unchanged, torch.ones_like(before))
        weights = self._sampled_weights()
        sums = torch.stack([(value * weights).sum() for value in values])
        dist.all_reduce(sums, group=self.mesh.world.group)
        moved, weight, num_unchanged, num_sampled = sums
        ratio = (moved / weight.clamp(min=1e-60)).sqrt()
        if not bool(ratio.isfinite()):
            raise NonFiniteError(
                "the optimizer produced weights that are not finite: lower trainer.optimizer.lr "
                "and go on from the last checkpoint"
            )
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

        Collective: each is gathered when it is asked for, and exists as long as the caller holds
        it. A tied parameter comes under each of its names, one after the other.
        """
        names: dict[Tensor, list[str]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            names.setdefault(value, []).append(name)
        for value, tied in names.items():
            is_parameter = isinstance(value, nn.Parameter)
            gathered = whole(value.detach().to(self.dtype) if is_parameter else value)
            for name in tied:
                yield name, gathered

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` to pinned host memory; as
        `Policy.sleep`. No pass and no `named_weights` until `wake`."""
        held = (*self.gradients.values(), *self.parameters.values())
        self._parking.park([*(local_part(tensor.detach()) for tensor in held), *moments])

    def wake(self) -> None:
        """Bring back what `sleep` moved away; as `Policy.wake`."""
        self._parking.restore()

    @property
    def _stride(self) -> int:
        """Every so many elements are sampled."""
        return ceil(sum(p.numel() for p in self.masters.values()) / _MAX_SAMPLED_ELEMENTS)

    def _sampled_masters(self) -> Tensor:
        """Elements of this process's shards, [K] float32."""
        shards = (local_part(p.detach()).flatten()[:: self._stride] for p in self.masters.values())
        return torch.cat([*shards])

    def _sampled_weights(self) -> Tensor:
        """For each sampled element one over the number of processes that hold it, [K] float64."""
        shards = [(local_part(p), _num_copies(p)) for p in self.masters.values()]
        numbers = torch.tensor([ceil(shard.numel() / self._stride) for shard, _ in shards])
        weights = torch.tensor([1 / copies for _, copies in shards], dtype=torch.float64)
        return weights.repeat_interleave(numbers).to(self.device)


def _move(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> None:
    """To `device` and, unless it is None, `dtype`, in place: tied parameters stay tied."""
    moved = parameter.detach().to(device, dtype)
    if isinstance(parameter, DTensor):  # whose `data` does not replace the local tensor
        torch.utils.swap_tensors(
            parameter, nn.Parameter(moved, requires_grad=parameter.requires_grad)
        )
    else:
        parameter.data = moved


def whole(tensor: Tensor) -> Tensor:
    """Gathered from all processes that have parts of it. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One axis after the other, which is how shards over several have been cut.
    placements = list(tensor.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


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
    if isinstance(master, DTensor) and not isinstance(saved, DTensor):
        # Every process has the whole: nothing is sent.
        saved = distribute_tensor(
            saved.to(master.device), master.device_mesh, master.placements, src_data_rank=None
        )
    master.copy_(saved)
