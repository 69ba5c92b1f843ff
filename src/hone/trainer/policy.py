"""The model in training and its float32 masters.

The module computes in its own format. Where that is narrower than float32, each parameter has a
float32 *master*: gradients are added up in float32 as each micro-batch leaves them, the optimizer
moves the master, and the rounded master is written back in place. A bfloat16 weight alone would
swallow updates below 1/256 of itself. Where the module computes in float32, its parameters are the
masters. A tensor shared by two layers has one master.

Masters may lie in pinned host memory throughout (`offload_optimizer`); then the optimizer's step,
which streams them through the device, also writes the module. Gradients may lie there too
(`offload_gradients`). Everything but the module can move there while an engine generates (`sleep`).

`Policy` is for one process; `hone.trainer.sharded` has the class for several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from transformers import PreTrainedModel

from hone.checkpoint.sharded import StoredTensor, laid_out, local_part, own_part
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.models.decoder import decoder_layers, head_weight
from hone.models.manifest import RoundedChecksums, build_manifest, export_weights
from hone.observe.metrics import Mean, Metrics
from hone.trainer.pieces import Piece, accumulation_dtype, norm_of_pieces, pieces_of

if TYPE_CHECKING:
    from hone.trainer.host_gradients import HostGradients
    from hone.trainer.offload import StateOffload

__all__ = ["BasePolicy", "NonFiniteError", "Policy", "StaleWeightsError", "require_layout"]

_MAX_SAMPLED_ELEMENTS = 1 << 22
_MAX_SAMPLED_ON_HOST = 1 << 18
"""Largest sample on the host, where elements that lie far apart cost a cache miss each."""


class NonFiniteError(ValueError):
    """A loss, gradient or weight is infinite or not a number. Training must stop."""


class StaleWeightsError(RuntimeError):
    """The module's weights are not the rounded masters, so an engine would sample with weights that
    are not those trained."""


class BasePolicy(ABC):
    """A causal language model with masters and gradients; this process has all of them or parts.

    Methods that read more than this process's part are collective over all processes of the mesh,
    and give the same result on each.
    """

    masters_on_host = False
    """Whether masters lie on the host; then the optimizer's step calls `write_back`."""
    gradients_on_host = False
    _host_gradients: HostGradients | None = None
    _sums: dict[str, Tensor] | None = None
    """Gradients on the device that cannot be the `grad` of a parameter."""
    _masters: dict[str, nn.Parameter]
    elsewhere: Mapping[str, Tensor] = MappingProxyType({})
    """Masters of other pipeline stages, on the meta device."""
    _tied: nn.Parameter | None = None
    """The master that both the first and the last stage have, of a tied embedding."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self.model = model
        self.mesh = mesh
        self.device = mesh.device
        """Device of the passes."""
        self.dtype = model.dtype
        """Number format of the module."""
        self.is_narrow = self.dtype not in (torch.float32, torch.float64)
        """Whether masters are wider than the module's dtype."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters of the module; a shared tensor appears once."""
        self._state_offload: StateOffload | None = None
        """Created by the first `sleep`."""

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The masters, which the optimizer updates, by the names of the module's parameters."""
        self._require_awake()
        return self._masters

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients, float32, in the order of the masters and laid out as they are."""
        if self._host_gradients is not None:
            found = self._host_gradients.tensors
            return {name: laid_out(g, like=self._masters[name]) for name, g in found.items()}
        if self._sums is not None:
            return {name: self._sums[name] for name in self._masters if name in self._sums}
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    @property
    def embedding_names(self) -> set[str]:
        """Names of the input embedding and the output head."""
        ends = (self.model.get_input_embeddings().weight, head_weight(self.model))
        return {name for name, p in self.parameters.items() if any(p is end for end in ends)}

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients in host memory."""
        if self._host_gradients is not None:
            return self._host_gradients.num_bytes
        if not self.gradients_on_host:
            return 0
        return sum(local_part(master.detach()).nbytes for master in self._masters.values())

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        found: defaultdict[int, list[Tensor]] = defaultdict(list)  # by number of copies
        if self._host_gradients is not None:
            for name, norm_K in self._host_gradients.norms.items():
                found[self._num_copies(name)].append(norm_K)
            norms = {n: vector_norm(torch.cat(own)) for n, own in found.items()}
        else:
            for name, gradient in self.gradients.items():
                found[self._num_copies(name)].append(local_part(gradient))
            norms = {n: norm_of_pieces(own).to(self.device) for n, own in found.items()}
        total = torch.stack([norm.double() ** 2 / n for n, norm in norms.items()]).sum()
        self._add_up(total)
        return total.sqrt().float()

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.masters.values(), *self.parameters.values()):
            parameter.grad = None
        for gradients in (self._sums, self._host_gradients):
            if gradients is not None:
                gradients.clear()

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite, on the first rank that has
        one."""
        own = [n for n, g in self.gradients.items() if not bool(local_part(g).isfinite().all())]
        return next((name for names in self.mesh.gather(own) for name in names), None)

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` change the masters, write them into the module, and measure the change.

        Where the masters lie on the host, `update` writes the module, as the optimizer does.
        `train/update_to_weight_ratio` is |change| / |weights| of the masters and
        `train/share_unchanged` the share of the module's elements that kept their value. Both are
        exact up to 4 million parameters, 262,144 on the host, and beyond that taken from every k-th
        element. Raises NonFiniteError, on every rank, where a moved weight is not finite.
        """
        before = self._sampled()
        update()
        after = self._sampled()
        if not self.masters_on_host:
            self._write_module()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for num_copies, old in before.items():
            new = after[num_copies]
            num_unchanged = (old.to(self.dtype) == new.to(self.dtype)).sum()
            moved, length = (vector_norm(v, dtype=torch.float64) for v in (new - old, old))
            own = (moved**2, length**2, num_unchanged, moved.new_tensor(old.numel()))
            sums += torch.stack(own) / num_copies
        self._add_up(sums)
        moved, weight, num_unchanged, num_sampled = sums
        ratio = (moved / weight.clamp(min=1e-60)).sqrt()
        if not bool(ratio.isfinite()):
            raise NonFiniteError(
                "the optimizer produced weights that are not finite: lower trainer.optimizer.lr "
                "and go on from the last checkpoint"
            )
        return {
            "train/update_to_weight_ratio": Mean.of(ratio[None]),
            "train/share_unchanged": Mean(num_unchanged, num_sampled),
        }

    @torch.no_grad()
    def load_masters(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Load saved masters, one after the other: whole tensors, shards, or this process's part of
        stored tensors. Raises as `require_layout`, with nothing changed."""
        require_layout({**self.elsewhere, **self.masters}, tensors)
        for name, master in self.masters.items():
            local_part(master).copy_(own_part(tensors[name], like=master))
        self._write_module()

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names, in the format that
        computes; a tied one under each of its names. Collective."""

    @abstractmethod
    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters, under the names of `named_weights`. Collective."""

    @abstractmethod
    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters of what is trained, without frozen weights: whole tensors of all
        pipeline stages. Collective."""

    @abstractmethod
    def write_back(self, moved: Sequence[tuple[Piece, Tensor]]) -> None:
        """Write rounded masters into the module, for masters on the host: `moved` has their pieces
        on the device, those of each parameter in order."""

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` from the device to pinned host
        memory, and their device memory to the driver.

        No pass and no step may run until `wake`. Raises RuntimeError while asleep, and UserError,
        with nothing moved, where the host has too little memory.
        """
        self._require_awake()
        held = [*self._device_masters()]
        if not self.gradients_on_host:
            held += self.gradients.values()
        if self._state_offload is None:
            from hone.trainer.offload import StateOffload

            self._state_offload = StateOffload()
        self._state_offload.offload([*(local_part(t.detach()) for t in held), *moments])

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises torch.OutOfMemoryError, still asleep, where
        the device has too little memory free."""
        if self._state_offload is not None:
            self._state_offload.restore()

    def _device_masters(self) -> Iterable[Tensor]:
        """Masters on the device, which `sleep` moves to the host."""
        return () if self.masters_on_host else self._masters.values()

    @abstractmethod
    def _write_module(self) -> None:
        """Write the rounded masters into the module, where module and masters are different
        tensors."""

    @property
    def _is_away(self) -> bool:
        """Whether it sleeps."""
        return self._state_offload is not None and self._state_offload.is_away

    def _require_awake(self) -> None:
        if self._is_away:
            raise RuntimeError("the policy sleeps: its masters are away until wake()")

    def _keep_gradients_on_host(self) -> HostGradients:
        from hone.trainer.host_gradients import HostGradients

        window = max(
            sum(4 * local_part(p.detach()).numel() for p in layer.parameters() if p.requires_grad)
            for layer in decoder_layers(self.model)
        )
        self.gradients_on_host = True
        self._host_gradients = HostGradients(self._masters, self.device, window_bytes=window)
        return self._host_gradients

    def _num_copies(self, name: str) -> int:
        """Number of processes that have the same elements of a master as this one."""
        master = self._masters[name]
        if not isinstance(master, DTensor):
            return self.mesh.world.size
        grid, placements = master.device_mesh, master.placements
        copies = prod(grid.size(dim) for dim, p in enumerate(placements) if p.is_replicate())
        return 2 * copies if master is self._tied else copies

    def _add_up(self, values: Tensor) -> None:
        """Add `values` up over all processes, in place."""
        if self.mesh.world.size > 1:
            dist.all_reduce(values, group=self.mesh.world.group)

    def _sampled(self) -> dict[int, Tensor]:
        """Every k-th element of this process's masters, by the number of processes that have the
        same elements; each tensor is [K] on the device."""
        stride = self._stride
        parts: defaultdict[int, list[Tensor]] = defaultdict(list)
        for name, master in self.masters.items():
            kept = local_part(master.detach()).flatten()[::stride]
            parts[self._num_copies(name)].append(kept)
        return {n: torch.cat(own).to(self.device) for n, own in parts.items()}

    @property
    def _stride(self) -> int:
        limit = _MAX_SAMPLED_ON_HOST if self.masters_on_host else _MAX_SAMPLED_ELEMENTS
        masters = *self._masters.values(), *self.elsewhere.values()
        return ceil(sum(p.numel() for p in masters) / limit)


class Policy(BasePolicy):
    """The policy of a single process. An engine may compute with the module's own weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        offload_optimizer: bool = False,
        offload_gradients: bool = False,
    ) -> None:
        """`offload_optimizer` keeps the masters of a module that is narrower than float32 in pinned
        host memory, `offload_gradients`, which needs it, the gradients. Raises UserError where
        there is too little memory."""
        super().__init__(model, Mesh.alone(model.device))
        # A shared tensor has one master, a frozen tensor none.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._masters = self.parameters
        self._host_checksums = RoundedChecksums()
        """Checksums of rounded masters that lie on the host, so that weights are verified without
        copying masters to the device."""
        if self.is_narrow:
            self.masters_on_host = offload_optimizer
            self._masters = self._copied()
            if self.masters_on_host:
                weights = [(n, 0, p.detach().reshape(-1)) for n, p in self.parameters.items()]
                self._add_checksums(self._host_checksums, weights)
        if offload_gradients:
            self._keep_gradients_on_host()
        elif self.is_narrow:
            self._sums = {}
        if self._host_gradients is not None or self._sums is not None:
            for name, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._gradient_mover(name))
        self._asleep_checksums: Mapping[str, int] = {}
        """Checksums of the rounded masters, taken when `sleep` moved them to the host."""

    @torch.no_grad()
    def _copied(self) -> dict[str, nn.Parameter]:
        """Float32 copies of all trained parameters."""
        if self.masters_on_host:
            from hone.trainer.offload import host_tensors

            masters = host_tensors(
                [(p.shape, accumulation_dtype(p.dtype)) for p in self.parameters.values()],
                self.device,
                purpose="trainer.offload keeps master weights on the host",
            )
            for master, parameter in zip(masters, self.parameters.values(), strict=True):
                master.copy_(parameter)
        else:
            masters = [
                p.detach().to(accumulation_dtype(p.dtype), copy=True)
                for p in self.parameters.values()
            ]
        return {n: nn.Parameter(m) for n, m in zip(self.parameters, masters, strict=True)}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own tensors. Raises StaleWeightsError, before the first one, unless every
        trained tensor equals its rounded master."""
        self._require_rounded_masters()
        yield from export_weights(self.model)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        masters = self.masters
        for name, value in export_weights(self.model):
            yield name, masters.get(name, value).detach()

    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.masters.items():
            yield name, master.detach()

    @torch.no_grad()
    def write_back(self, moved: Sequence[tuple[Piece, Tensor]]) -> None:
        # The checksums are taken here, and not from the written weights, which are compared with
        # them later.
        self._add_checksums(self._host_checksums, [(p.name, p.start, v) for p, v in moved])
        for piece, values in moved:
            # The parameter itself: an engine that shares it may have given it other memory
            # (`hone.models.layer_ops.merge_rows`).
            weight = self.parameters[piece.name].detach()
            weight.view(-1)[piece.start : piece.stop].copy_(values)

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        self._require_awake()
        checksums = self._rounded_checksums()
        super().sleep(moments)
        self._asleep_checksums = checksums

    def _device_masters(self) -> Iterable[Tensor]:
        # An engine computes with the module's weights.
        return super()._device_masters() if self.is_narrow else ()

    def _write_module(self) -> None:
        if self.masters_on_host:
            for name, master in self._masters.items():
                start = 0
                for values in pieces_of(master.detach()):
                    piece = Piece(name, start, start + values.numel())
                    self.write_back([(piece, values.to(self.device))])
                    start = piece.stop
        elif self.is_narrow:
            for name, parameter in self.parameters.items():
                parameter.copy_(self._masters[name])

    @torch.no_grad()
    def _require_rounded_masters(self) -> None:
        """Raise StaleWeightsError unless each trained weight equals its rounded master.

        The module's current tensors are read, not those known when masters were made. One launch
        reads the masters, 4 bytes a parameter, and another the weights, 2 bytes: 10 GB for 1.7
        billion parameters, 3 ms at 4 TB/s, compared to 7 GB for the manifests of trainer and
        engine. For masters on the host the optimizer's step has left checksums, and only weights
        are read. The sync reports weights that are not finite, with their names.
        """
        checksums = self._asleep_checksums if self._is_away else self._rounded_checksums()
        if not checksums:
            return  # the weights are the masters
        held = self.model.state_dict(keep_vars=True)
        weights = {name: held[name].detach() for name in checksums}
        found = build_manifest(weights.items(), 0, are_held=True).tensors
        stale = [
            name
            for name, checksum in checksums.items()
            if found[name].checksum != checksum and bool(weights[name].isfinite().all())
        ]
        if stale:
            options = {
                "trainer.offload": self.masters_on_host,
                "trainer.enable_sleep": bool(self._asleep_checksums),  # it has slept
            }
            used = " and ".join(key for key, is_used in options.items() if is_used)
            advice = f" Until it is mended, try without {used}." if used else ""
            raise StaleWeightsError(
                f"{len(stale)} of {len(checksums)} trained weights, the first {stale[0]}, are not "
                f"what the optimizer's masters round to in {self.dtype}: an engine would sample "
                "with weights that are not those trained, so the run ends here. This is a fault of "
                "hone and not of your configuration; please report it with the run's config.yaml. "
                f"Checkpoints hold the masters.{advice}"
            )

    def _rounded_checksums(self) -> Mapping[str, int]:
        """Checksums of the rounded masters by the weights' names; empty where masters are the
        weights."""
        if self.masters_on_host:
            return self._host_checksums.values()
        checksums = RoundedChecksums()
        if self.is_narrow:
            masters = [(n, 0, m.detach().reshape(-1)) for n, m in self._masters.items()]
            self._add_checksums(checksums, masters)
        return checksums.values()

    def _add_checksums(
        self, checksums: RoundedChecksums, pieces: Iterable[tuple[str, int, Tensor]]
    ) -> None:
        """Add pieces of masters to `checksums`, rounded to the dtypes of their weights."""
        by_dtype: defaultdict[torch.dtype, list[tuple[str, int, Tensor]]] = defaultdict(list)
        for name, start, values in pieces:
            by_dtype[self.parameters[name].dtype].append((name, start, values))
        for dtype, own in by_dtype.items():
            checksums.add(own, dtype)

    def _gradient_mover(self, name: str) -> Callable[[Tensor], None]:
        """Hook that adds a parameter's fresh gradient to its master's gradient, and frees it."""
        host, sums = self._host_gradients, self._sums

        def move(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient to move"
            if host is not None:
                host.add(name, gradient)
            elif sums is not None and name in sums:
                sums[name].add_(gradient)
            elif sums is not None:
                sums[name] = gradient.to(accumulation_dtype(gradient.dtype), copy=True)
            parameter.grad = None

        return move


def require_layout(
    masters: Mapping[str, Tensor], saved: Mapping[str, Tensor | StoredTensor]
) -> None:
    """Check that saved tensors have the masters' names and whole shapes. Raises UserError where
    adapters of another rank are the reason, ValueError otherwise."""
    expected = {name: tuple(p.shape) for name, p in masters.items()}
    got = {name: tuple(t.shape) for name, t in saved.items()}
    if got == expected:
        return
    saved_rank, rank = _adapter_rank(got), _adapter_rank(expected)
    if saved_rank != rank:
        raise UserError(
            f"the checkpoint was trained with model.lora.rank {saved_rank}, and model.lora.rank is "
            f"{rank} now. Set it to {saved_rank} to go on, or choose another run.dir to start "
            "afresh."
        )
    wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
    raise ValueError(
        f"the checkpoint's weights are not this model's: {len(wrong)} tensors differ in "
        f"name or shape, first {wrong[0]!r} (checkpoint {got.get(wrong[0])}, model "
        f"{expected.get(wrong[0])})"
    )


def _adapter_rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rank of the LoRA adapters among tensors of these shapes; 0 where there are none."""
    return next((shape[-2] for name, shape in shapes.items() if name.endswith("lora_A")), 0)
