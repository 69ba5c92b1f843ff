"""The model being trained and the float32 copies that the optimizer moves.

The module computes in its own format. Where that is narrower than float32, each parameter has a
float32 *master*: gradients are added up in float32 as each micro-batch leaves them, the optimizer
moves the master, and the rounded master is written back in place. A bfloat16 weight alone would
swallow updates below 1/256 of itself. Where the module computes in float32, its parameters are the
masters. A tensor shared by two layers has one master.

Masters may lie in pinned host memory for good (`offload_optimizer`); then gradients lie beside them
in `host_masters` and the optimizer's step writes the module. Gradients may follow them there
(`offload_gradients`, `host_gradients`). And all but the module may go there while an engine
generates (`sleep`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.checkpoint.sharded import StoredTensor, local_part
from hone.config.errors import UserError
from hone.models.decoder import decoder_layers, head_weight
from hone.models.manifest import RoundedChecksums, build_manifest, export_weights
from hone.observe.metrics import Mean, Metrics
from hone.trainer.host_state import (
    HostGradients,
    HostMasters,
    StreamedGradients,
    norm_of_pieces,
)
from hone.trainer.offload import StateOffload
from hone.trainer.recompute import RecomputeMode, apply_recompute

__all__ = [
    "BasePolicy",
    "NonFiniteError",
    "Policy",
    "StaleWeightsError",
    "layer_gradient_bytes",
    "require_finite",
    "require_layout",
]

_MAX_SAMPLED_ELEMENTS = 1 << 22
_MAX_SAMPLED_ON_HOST = 1 << 18
"""Elements that lie far apart cost a host a cache miss each."""


class NonFiniteError(ValueError):
    """A loss, gradient or weight is infinite or not a number. Training must stop."""


class StaleWeightsError(RuntimeError):
    """The module computes, and an engine would sample, with weights that training did not make."""


class BasePolicy(ABC):
    """What a policy of one process and one of several have in common."""

    model: PreTrainedModel
    device: torch.device
    """Where it computes."""
    dtype: torch.dtype
    """In which format."""
    parameters: dict[str, nn.Parameter]
    """Of the module, a shared tensor once."""
    host_masters: HostMasters | None = None
    """For `ParameterOptimizer`, where the masters lie on the host."""
    host_gradients: HostGradients | None = None
    """The same for gradients."""

    @property
    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients, float32, in the order of the masters. Those that lie on the host
        are without the factor of `clip_gradient`."""

    @property
    def embedding_names(self) -> set[str]:
        """Names of the input embedding and the output head."""
        ends = (self.model.get_input_embeddings().weight, head_weight(self.model))
        return {name for name, p in self.parameters.items() if any(p is end for end in ends)}

    @property
    def host_bytes(self) -> int:
        """Of gradients and weights in host memory, besides masters."""
        return 0 if self.host_gradients is None else self.host_gradients.num_bytes

    def clip_gradient(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients whose global norm is `norm` down to `max_norm`; 0 leaves them. Those on
        the host are scaled when the optimizer's step fetches them."""
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if self.host_gradients is not None:
                self.host_gradients.scale = factor
                return
            for gradient in self.gradients.values():
                local_part(gradient).mul_(factor)

    def _sampled(self, masters: Mapping[str, Tensor]) -> Tensor:
        """Every so many elements of the local parts of `masters`, [K] on the device."""
        stride = self._stride(masters)
        shards = (local_part(p.detach()).flatten()[::stride] for p in masters.values())
        return torch.cat([*shards]).to(self.device)

    def _stride(self, masters: Mapping[str, Tensor]) -> int:
        limit = _MAX_SAMPLED_ELEMENTS if self.host_masters is None else _MAX_SAMPLED_ON_HOST
        return ceil(sum(p.numel() for p in masters.values()) / limit)


def layer_gradient_bytes(layers: Iterable[nn.Module]) -> int:
    """Float32 bytes of the gradients that the largest of `layers` brings at once, of what this
    process holds."""
    return max(
        sum(4 * local_part(p.detach()).numel() for p in layer.parameters() if p.requires_grad)
        for layer in layers
    )


def require_finite(ratio: Tensor) -> None:
    """Raise NonFiniteError unless the change of weights, relative to them, is a number."""
    if not bool(ratio.isfinite()):
        raise NonFiniteError(
            "the optimizer produced weights that are not finite: lower trainer.optimizer.lr "
            "and go on from the last checkpoint"
        )


class Policy(BasePolicy):
    """A causal language model with masters, gradient norm and update statistics."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        recompute: RecomputeMode = "off",
        recompute_every_n_layers: int = 1,
        offload_activations: bool = False,
        offload_optimizer: bool = False,
        offload_gradients: bool = False,
        compile: bool = False,
    ) -> None:
        """The first three as in `apply_recompute`. `offload_optimizer` keeps the masters of a
        module that is narrower than float32 in pinned host memory, `offload_gradients`, which needs
        it, the gradients. Raises UserError where there is too little memory. `compile` compiles
        each layer."""
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        layers = decoder_layers(model)
        apply_recompute(
            layers, mode=recompute, every=recompute_every_n_layers, offload=offload_activations
        )
        # A shared tensor once; those that are frozen have no masters.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if offload_optimizer and not self._computes_in_masters:
            self.host_masters = HostMasters.copied(self.parameters, self.device)
            self._masters = self.host_masters.masters
        elif self._computes_in_masters:
            self._masters = self.parameters
        else:
            self._masters = {
                name: nn.Parameter(parameter.detach().float())
                for name, parameter in self.parameters.items()
            }
        if offload_gradients:
            self.host_gradients = StreamedGradients(
                self.parameters, self.device, window_bytes=layer_gradient_bytes(layers)
            )
        if self._masters is not self.parameters or offload_gradients:
            for name, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._gradient_mover(name))
        if compile:
            for layer in layers:
                layer.compile(dynamic=True)  # no two micro-batches have the same shape
        self._state_offload = StateOffload()
        self._asleep_checksums: Mapping[str, int] = {}
        """Of what the masters rounded to when they left the device."""

    @property
    def _computes_in_masters(self) -> bool:
        return self.dtype in (torch.float32, torch.float64)

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by the names of the module's parameters."""
        self._require_awake()
        return self._masters

    @property
    def gradients(self) -> dict[str, Tensor]:
        if self.host_gradients is not None:
            return self.host_gradients.tensors
        if self.host_masters is not None:
            held = self.host_masters.gradients
            return {name: held[name] for name in self._masters if name in held}
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        if self.host_gradients is not None:
            return torch.linalg.vector_norm(torch.cat([*self.host_gradients.norms.values()]))
        return norm_of_pieces(self.gradients.values())

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.masters.values(), *self.parameters.values()):
            parameter.grad = None
        if self.host_masters is not None:
            self.host_masters.gradients.clear()
        if self.host_gradients is not None:
            self.host_gradients.clear()

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        for name, gradient in self.gradients.items():
            if not bool(gradient.isfinite().all()):
                return name
        return None

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` move the masters, write them into the module, and measure the move.

        Where the masters lie on the host, `update` writes the module, as the optimizer does.
        `train/update_to_weight_ratio` is |change| / |weights| of the masters and
        `train/share_unchanged` the share of the module's elements that kept their value. Both are
        exact up to 4 million parameters, 262,144 on the host, and beyond that taken from every k-th
        element.
        Raises NonFiniteError where a moved weight is not finite.
        """
        before = self._sampled(self.masters)
        update()
        after = self._sampled(self.masters)
        if self.masters is not self.parameters and self.host_masters is None:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])
        ratio = (after - before).norm() / before.norm().clamp(min=1e-30)
        require_finite(ratio)
        unchanged = before.to(self.dtype) == after.to(self.dtype)
        return {
            "train/update_to_weight_ratio": Mean.of(ratio[None]),
            "train/share_unchanged": Mean.of(unchanged),
        }

    def load_masters(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Take over saved masters. Raises as `require_layout`, with nothing changed."""
        require_layout(self.masters, tensors)
        with torch.no_grad():
            for name, master in self.masters.items():
                saved = tensors[name]
                values = saved.full() if isinstance(saved, StoredTensor) else saved
                if self.host_masters is not None:
                    self.host_masters.take(name, values)
                else:
                    master.copy_(values)
                    self.parameters[name].copy_(master)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own tensors under Hugging Face names, a tied one under each of its names.

        Raises StaleWeightsError, before the first one, unless those that are trained are what their
        masters round to.
        """
        self._require_rounded_masters()
        yield from export_weights(self.model)

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` from the device to pinned host
        memory, and their device memory to the driver.

        The module stays, since an engine computes with its weights. Pass
        `ParameterOptimizer.device_tensors()`. Raises RuntimeError while asleep, and UserError, with
        nothing moved, where the host has too little memory.
        """
        self._require_awake()
        checksums = self._rounded_checksums()
        tensors = [*moments]
        if self.host_gradients is None:
            tensors += self.gradients.values()
        if self._masters is not self.parameters and self.host_masters is None:
            tensors += [master.detach() for master in self._masters.values()]
        self._state_offload.offload(tensors)
        self._asleep_checksums = checksums

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises torch.OutOfMemoryError, still asleep, where
        the device has too little memory free."""
        self._state_offload.restore()

    def _require_awake(self) -> None:
        if self._state_offload.is_away:
            raise RuntimeError("the policy sleeps: its masters are away until wake()")

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
                "trainer.offload_optimizer": self.host_masters is not None,
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
        if self.host_masters is not None:
            return self.host_masters.checksums.values()
        if self._masters is self.parameters:
            return {}
        checksums = RoundedChecksums()
        by_dtype: dict[torch.dtype, list[tuple[str, int, Tensor]]] = {}
        for name, parameter in self.parameters.items():
            master = self._masters[name].detach().reshape(-1)
            by_dtype.setdefault(parameter.dtype, []).append((name, 0, master))
        for dtype, masters in by_dtype.items():
            checksums.add(masters, dtype)
        return checksums.values()

    def _gradient_mover(self, name: str) -> Callable[[Tensor], None]:
        """Hook that adds a parameter's fresh gradient to its master's and frees it."""
        host, master, streamed = self.host_masters, self._masters[name], self.host_gradients
        assert streamed is None or isinstance(streamed, StreamedGradients)

        def move(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient to move"
            if streamed is not None:
                streamed.add(name, gradient)
            elif host is not None:
                host.add_gradient(name, gradient)
            elif master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)
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
