"""AdamW, and Muon for hidden matrices, over named float32 parameters.

The rules come from torch. This file adds the choice of the rule for each parameter, one
learning-rate factor for all, moments in bfloat16 or in host memory, and a state of named tensors
that any checkpoint format can store.

A step over host memory streams masters and moments through the device rather than updating them
with the processor's cores. Per parameter of 4-byte state it sends 12 bytes each way, 96 GB for 8
billion parameters, which a bus of 50 GB/s does in 2 s, both directions at once; cores would read
and write 246 GB of host memory, which takes more than 2 s, and would not be available for rewards
and data in that time. Streaming also gives, bit for bit, the numbers of a step without offload.
Gradients on the host are streamed too, and scaled on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Muon
from torch.optim.adamw import adamw

from hone.checkpoint.sharded import StoredTensor, laid_out, local_part, own_part
from hone.trainer.pieces import BUCKET_BYTES, Operand, Piece
from hone.trainer.settings import OptimizerConfig

if TYPE_CHECKING:
    from hone.trainer.narrow_moments import NarrowMoments

__all__ = ["ParameterOptimizer"]

_PIECE_STEP = 1024

WriteBack = Callable[[Sequence[tuple[Piece, Tensor]]], None]


@dataclass(slots=True)
class _Moments:
    """AdamW's state of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: int = 0


class ParameterOptimizer:
    """One optimizer over named parameters.

    With `name="muon"`, matrices outside `embeddings` are updated by Muon (Keller Jordan,
    https://kellerjordan.github.io/posts/muon/): Nesterov momentum, five Newton-Schulz steps in
    bfloat16, and his scale `sqrt(max(1, rows / columns))`, for which rates near 0.02 are usual.
    All else gets AdamW (arXiv:1711.05101). Vectors (norms, biases) are never decayed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cfg: OptimizerConfig,
        embeddings: set[str],
        *,
        device: torch.device | None = None,
        offload: bool = False,
        gradients_on_host: bool = False,
        write_back: WriteBack | None = None,
    ) -> None:
        """`embeddings` names the input embedding and the output head.

        `offload`, which Muon does not serve, keeps moments in pinned host memory; steps are then
        computed on `device`, that of the parameters by default. With it gradients may lie on the
        host, and parameters too: `write_back` is then called with each updated piece of them, on
        the device. For DTensors offload applies to each process's own part. Raises UserError where
        the host has too little memory.
        """
        self._parameters = dict(parameters)
        self._cfg = cfg
        self._device = device or next(iter(parameters.values())).device
        self._offload = offload
        self._gradients_on_host = gradients_on_host
        self._write_back = write_back
        self._muon_names = {
            parameter: name
            for name, parameter in parameters.items()
            if cfg.name == "muon" and parameter.ndim == 2 and name not in embeddings
        }
        self._muon: Muon | None = None
        if self._muon_names:
            self._muon = Muon(
                self._muon_names,
                lr=cfg.muon_lr,
                weight_decay=cfg.weight_decay,
                momentum=0.95,
                adjust_lr_fn="original",
            )
        on_adamw = {n: p for n, p in parameters.items() if p not in self._muon_names}
        self._moments: dict[str, _Moments] = self._reserved(on_adamw) if offload else {}
        """AdamW's moments: on the device made when they are needed, on the host all at once."""
        self._narrow: NarrowMoments | None = None
        if self._dtype is torch.bfloat16:
            from hone.trainer.narrow_moments import NarrowMoments

            self._narrow = NarrowMoments(on_adamw, cfg)

    def step(
        self, gradients: Mapping[str, Tensor], lr_scale: float, gradient_scale: Tensor | None = None
    ) -> None:
        """Scale the gradients by `gradient_scale` (in place, unless they lie on the host) and apply
        them at `lr_scale` times the peak rates. Where memory for the moments is lacking, no
        parameter is changed."""
        for name in gradients:
            if not self._is_on_muon(name):
                self._moments_of(name)
        if gradient_scale is not None and not self._gradients_on_host:
            for gradient in gradients.values():
                local_part(gradient).mul_(gradient_scale)
        rest: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            if self._is_on_muon(name):
                self._parameters[name].grad = gradient
            else:
                rest[name] = gradient
                self._moments_of(name).num_steps += 1
        lr = self._cfg.lr * lr_scale
        if self._offload:
            self._stream(rest, lr, gradient_scale)
        else:
            wholes = (Piece(name, 0, local_part(g).numel()) for name, g in rest.items())
            self._update([self._operand(piece, rest) for piece in wholes], lr)
        if self._muon is not None:
            self._muon.param_groups[0]["lr"] = self._cfg.muon_lr * lr_scale
            self._muon.step()
            self._muon.zero_grad(set_to_none=True)

    def device_tensors(self) -> list[Tensor]:
        """The moments in device memory, local parts of DTensors, which a sleeping trainer moves
        away."""
        if self._offload:
            return []
        tensors = self.state_dict().items()
        return [local_part(tensor) for key, tensor in tensors if not key.startswith("step/")]

    def state_dict(self) -> dict[str, Tensor]:
        """The moments by the name `<moment>/<parameter>`; a parameter that never had a gradient has
        none.

        Moments have the shape and placements of their parameter, wherever they lie.
        """
        tensors: dict[str, Tensor] = {}
        for name, moments in self._moments.items():
            if moments.num_steps:
                tensors[f"step/{name}"] = torch.tensor(float(moments.num_steps))
                tensors[f"exp_avg/{name}"] = moments.exp_avg
                tensors[f"exp_avg_sq/{name}"] = moments.exp_avg_sq
        muon_states = {} if self._muon is None else self._muon.state
        for parameter, name in self._muon_names.items():
            for moment, value in muon_states.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Load a saved state from any device, converted to the configured dtype: whole moments,
        DTensors with the placement of their parameter, or stored tensors, from which each process
        reads its part, one after the other. Raises ValueError for unknown parameters and wrong
        shapes or placements."""
        if not self._offload:
            self._moments.clear()
        for moments in self._moments.values():
            moments.exp_avg.zero_()
            moments.exp_avg_sq.zero_()
            moments.num_steps = 0
        if self._muon is not None:
            self._muon.state.clear()
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            try:
                self._load(moment, name, value)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"optimizer state {key!r} of shape {tuple(value.shape)} fits no parameter of "
                    "this model; resume with the model that wrote the checkpoint"
                ) from error

    def _load(self, moment: str, name: str, value: Tensor | StoredTensor) -> None:
        parameter = self._parameters[name]
        if moment == "step":
            count = own_part(value, like=torch.empty(()))
            self._moments_of(name).num_steps = int(count)
            return
        own = own_part(value, like=parameter)
        if self._muon is not None and self._is_on_muon(name):
            if moment != "momentum_buffer":
                raise KeyError(moment)
            target = torch.empty_like(parameter.detach(), dtype=value.dtype)
            self._muon.state[parameter] = {moment: target}
        else:
            moments = self._moments_of(name)
            target = {"exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}[moment]
        local_part(target).copy_(own)

    def _is_on_muon(self, name: str) -> bool:
        return self._parameters[name] in self._muon_names

    def _moments_of(self, name: str) -> _Moments:
        if name not in self._moments:
            like = self._parameters[name].detach()
            first, second = (torch.zeros_like(like, dtype=self._dtype) for _ in range(2))
            self._moments[name] = _Moments(first, second)
        return self._moments[name]

    @property
    def _dtype(self) -> torch.dtype | None:
        """Dtype of the moments; None: that of the parameter."""
        return torch.bfloat16 if self._cfg.state_dtype == "bfloat16" else None

    def _reserved(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, _Moments]:
        """Moments of all parameters, allocated in host memory."""
        from hone.trainer.offload import host_tensors

        tensors = host_tensors(
            [
                (local_part(p).shape, self._dtype or p.dtype)
                for p in parameters.values()
                for _ in range(2)
            ],
            self._device,
            purpose="trainer.offload keeps AdamW's moments; set "
            "trainer.optimizer.state_dtype to bfloat16, or train on more processes",
        )
        return {
            name: _Moments(laid_out(exp_avg, like=like), laid_out(exp_avg_sq, like=like))
            for exp_avg, exp_avg_sq, (name, like) in zip(
                tensors[::2], tensors[1::2], parameters.items(), strict=True
            )
        }

    def _operand(self, piece: Piece, gradients: Mapping[str, Tensor]) -> Operand:
        """Views of the tensors of a piece, on device or host."""
        moments = self._moments[piece.name]
        tensors = (self._parameters[piece.name], gradients[piece.name])
        tensors += moments.exp_avg, moments.exp_avg_sq
        flat = (local_part(tensor.detach()).view(-1) for tensor in tensors)
        return Operand(piece, *(tensor[piece.start : piece.stop] for tensor in flat))

    def _stream(
        self, gradients: Mapping[str, Tensor], lr: float, gradient_scale: Tensor | None
    ) -> None:
        """Update the parameters whose state lies on the host, one bucket after the other."""
        from hone.trainer.offload import Bucket, stream_buckets

        buckets = [
            [self._operand(piece, gradients) for piece in pieces]
            for pieces in self._buckets(gradients)
        ]
        changed = ["exp_avg", "exp_avg_sq", *(["master"] if self._write_back else [])]
        read = ["gradient"] if self._gradients_on_host else []

        def update(index: int, staged: Bucket) -> None:
            arrived = iter(staged.changed), iter(staged.read)
            operands = [
                replace(
                    operand,
                    **{name: next(arrived[0]) for name in changed},
                    **{name: next(arrived[1]) for name in read},
                )
                for operand in buckets[index]
            ]
            if self._gradients_on_host and gradient_scale is not None:
                for operand in operands:
                    operand.gradient.mul_(gradient_scale)
            self._update(operands, lr)
            if self._write_back is not None:
                self._write_back([(operand.piece, operand.master) for operand in operands])

        def of_host(names: Sequence[str], operands: Sequence[Operand]) -> list[Tensor]:
            return [getattr(operand, name) for operand in operands for name in names]

        on_host = (Bucket(of_host(changed, own), of_host(read, own)) for own in buckets)
        with torch.no_grad():
            stream_buckets(on_host, update, self._device)

    def _buckets(self, gradients: Mapping[str, Tensor]) -> list[list[Piece]]:
        """Pieces of the parameters with a gradient, `BUCKET_BYTES` of host state at most in each
        bucket."""
        num_bytes = 2 * (2 if self._dtype is torch.bfloat16 else 4) + 4
        if self._gradients_on_host:
            num_bytes += 4
        capacity = BUCKET_BYTES // num_bytes // _PIECE_STEP * _PIECE_STEP
        buckets: list[list[Piece]] = [[]]
        room = capacity
        for name, gradient in gradients.items():
            start, size = 0, local_part(gradient).numel()
            while start < size:
                stop = min(size, start + room)
                buckets[-1].append(Piece(name, start, stop))
                # Rounded up, so that the places of later pieces stay aligned.
                room -= -(-(stop - start) // _PIECE_STEP) * _PIECE_STEP
                start = stop
                if room == 0:
                    buckets.append([])
                    room = capacity
        return [bucket for bucket in buckets if bucket]

    @torch.no_grad()
    def _update(self, operands: Sequence[Operand], lr: float) -> None:
        for is_decayed in (True, False):
            group = [o for o in operands if (self._parameters[o.piece.name].ndim > 1) == is_decayed]
            decay = self._cfg.weight_decay if is_decayed else 0.0
            if self._narrow is not None:
                for operand in group:
                    num_steps = self._moments[operand.piece.name].num_steps
                    self._narrow.update(operand, num_steps, lr, decay)
            elif group:
                self._update_float32(group, lr, decay)

    def _update_float32(self, group: Sequence[Operand], lr: float, decay: float) -> None:
        # torch increases the step count itself.
        counts = torch.tensor([self._moments[o.piece.name].num_steps - 1.0 for o in group])
        adamw(
            [o.master for o in group],
            [o.gradient for o in group],
            [o.exp_avg for o in group],
            [o.exp_avg_sq for o in group],
            [],
            list(counts.to(self._device, non_blocking=True).unbind()),
            fused=True,
            amsgrad=False,
            beta1=self._cfg.betas[0],
            beta2=self._cfg.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self._cfg.eps,
            maximize=False,
        )
