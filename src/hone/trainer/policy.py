"""The model being trained and the float32 copies that the optimizer moves.

The module computes in its own format. Where that is narrower than float32, each parameter has a
float32 *master*: gradients are added up in float32 as each micro-batch leaves them, the optimizer
moves the master, and the rounded master is written back in place. A bfloat16 weight alone would
swallow updates below 1/256 of itself. Where the module computes in float32, its parameters are the
masters. A tensor shared by two layers has one master.

Masters may lie in pinned host memory for good (`offload_optimizer`); then the optimizer's step, by
which they pass through the device, writes the module. Gradients may follow them there
(`offload_gradients`). And all but the module may go there while an engine generates (`sleep`).

`Policy` is that of one process; `hone.trainer.sharded` has that of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, prod
from types import MappingProxyType

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
from hone.trainer.host_gradients import HostGradients, Piece, norm_of_pieces, pieces_of
from hone.trainer.offload import StateOffload, host_tensors
from hone.trainer.precision import accumulation_dtype

__all__ = ["BasePolicy", "NonFiniteError", "Policy", "StaleWeightsError", "require_layout"]

_MAX_SAMPLED_ELEMENTS = 1 << 22
_MAX_SAMPLED_ON_HOST = 1 << 18
"""Elements that lie far apart cost a host a cache miss each."""


class NonFiniteError(ValueError):
    """A loss, gradient or weight is infinite or not a number. Training must stop."""


class StaleWeightsError(RuntimeError):
    """The module computes, and an engine would sample, with weights that training did not make."""


class BasePolicy(ABC):
    """A causal language model with masters and gradients, of which this process holds all or parts.

    Everything that reads more than this process holds is collective over all processes of the
    mesh, and gives the same result on each.
    """

    masters_on_host = False
    """Then steps are told to call `write_back`."""
    gradients_on_host = False
    _host_gradients: HostGradients | None = None
    _sums: dict[str, Tensor] | None = None
    """Gradients on the device, where they cannot be those of parameters."""
    _masters: dict[str, nn.Parameter]
    elsewhere: Mapping[str, Tensor] = MappingProxyType({})
    """Masters that other pipeline stages hold, on the meta device."""
    _tied: nn.Parameter | None = None
    """A master that the first and the last stage hold."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self.model = model
        self.mesh = mesh
        self.device = mesh.device
        """Where it computes."""
        self.dtype = model.dtype
        """In which format."""
        self.is_narrow = self.dtype not in (torch.float32, torch.float64)
        """Whether masters are wider than that."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Of the module, a shared tensor once."""
        self._state_offload = StateOffload()

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by the names of the module's parameters."""
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
        """Of gradients in host memory."""
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
        """Name of the first parameter whose gradient is not finite, of the first rank that has
        one."""
        own = [n for n, g in self.gradients.items() if not bool(local_part(g).isfinite().all())]
        return next((name for names in self.mesh.gather(own) for name in names), None)

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` move the masters, write them into the module, and measure the move.

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
        """Take over saved masters, whole tensors or shards, or this process's part of what a
        checkpoint holds, one after the other. Raises as `require_layout`, with nothing changed."""
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
        """As `named_weights`, but masters in place of what is computed with. Collective."""

    @abstractmethod
    def write_back(self, moved: Sequence[tuple[Piece, Tensor]]) -> None:
        """Give the module what pieces of masters on the host round to, from their values on the
        device, each parameter's in order."""

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` from the device to pinned host
        memory, and their device memory to the driver.

        Until `wake` no pass and no step. Raises RuntimeError while asleep, and UserError, with
        nothing moved, where the host has too little memory.
        """
        self._require_awake()
        held = [*self._device_masters()]
        if not self.gradients_on_host:
            held += self.gradients.values()
        self._state_offload.offload([*(local_part(t.detach()) for t in held), *moments])

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises torch.OutOfMemoryError, still asleep, where
        the device has too little memory free."""
        self._state_offload.restore()

    def _device_masters(self) -> Iterable[Tensor]:
        """What sleeps, beside gradients and moments."""
        return () if self.masters_on_host else self._masters.values()

    @abstractmethod
    def _write_module(self) -> None:
        """Give the module what its masters round to, where they are not the same."""

    def _require_awake(self) -> None:
        if self._state_offload.is_away:
            raise RuntimeError("the policy sleeps: its masters are away until wake()")

    def _keep_gradients_on_host(self) -> HostGradients:
        window = max(
            sum(4 * local_part(p.detach()).numel() for p in layer.parameters() if p.requires_grad)
            for layer in decoder_layers(self.model)
        )
        self.gradients_on_host = True
        self._host_gradients = HostGradients(self._masters, self.device, window_bytes=window)
        return self._host_gradients

    def _num_copies(self, name: str) -> int:
        """Processes that hold the same elements of a master as this one."""
        master = self._masters[name]
        if not isinstance(master, DTensor):
            return self.mesh.world.size
        grid, placements = master.device_mesh, master.placements
        copies = prod(grid.size(dim) for dim, p in enumerate(placements) if p.is_replicate())
        return 2 * copies if master is self._tied else copies

    def _add_up(self, values: Tensor) -> None:
        """Over all processes, in place."""
        if self.mesh.world.size > 1:
            dist.all_reduce(values, group=self.mesh.world.group)

    def _sampled(self) -> dict[int, Tensor]:
        """Every so many elements of what this process holds of the masters, by the number of
        processes that hold the same, each [K] on the device."""
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
    """That of one process. An engine may compute with the module's own weights."""

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
        # A shared tensor once; those that are frozen have no masters.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._masters = self.parameters
        self._host_checksums = RoundedChecksums()
        """Of what masters on the host round to: to compare weights with them, nothing crosses the
        bus."""
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
        """Of what the masters rounded to when they left the device."""

    @torch.no_grad()
    def _copied(self) -> dict[str, nn.Parameter]:
        """Masters for all parameters."""
        if self.masters_on_host:
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
        """The module's own tensors. Raises StaleWeightsError, before the first one, unless those
        that are trained are what their masters round to."""
        self._require_rounded_masters()
        yield from export_weights(self.model)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        masters = self.masters
        for name, value in export_weights(self.model):
            yield name, masters.get(name, value).detach()

    @torch.no_grad()
    def write_back(self, moved: Sequence[tuple[Piece, Tensor]]) -> None:
        # Noted apart from where they are written: what is written is compared with what is noted.
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
        """Raise StaleWeightsError unless each trained weight is what its master rounds to.

        The module's current tensors are read, not those that were known when masters were made. One
        launch reads the masters, 4 bytes a parameter, and another the weights, 2 bytes: 10 GB for
        1.7 billion parameters, 3 ms at 4 TB/s, beside 7 GB that the manifests of trainer and engine
        take. Of masters on the host the step has left checksums, and weights alone are read. Those
        that are not finite are left to the sync, which names them.
        """
        checksums = (
            self._asleep_checksums if self._state_offload.is_away else self._rounded_checksums()
        )
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
                "with weights that training did not make, so the run ends here. This is a fault of "
                "hone and not of your configuration; please report it with the run's config.yaml. "
                f"Checkpoints hold the masters.{advice}"
            )

    def _rounded_checksums(self) -> Mapping[str, int]:
        """Of what the masters round to, by the weights' names; none where they are the weights."""
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
        """`RoundedChecksums.add` of pieces of masters, in the formats of their weights."""
        by_dtype: defaultdict[torch.dtype, list[tuple[str, int, Tensor]]] = defaultdict(list)
        for name, start, values in pieces:
            by_dtype[self.parameters[name].dtype].append((name, start, values))
        for dtype, own in by_dtype.items():
            checksums.add(own, dtype)

    def _gradient_mover(self, name: str) -> Callable[[Tensor], None]:
        """Hook that adds a parameter's fresh gradient to what its master has, and frees it."""
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
    """Raise unless saved tensors have the masters' names and (whole) shapes: UserError where
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
    """Rank of the adapters among tensors of these shapes; 0 where there are none."""
    return next((shape[0] for name, shape in shapes.items() if name.endswith("lora_A")), 0)
