"""AdamW, and Muon for hidden matrices, over named float32 parameters.

The rules come from torch. What this file adds: which parameter gets which rule, one learning-rate
factor for all, moments in bfloat16 or in host memory, and a state of named tensors that any
checkpoint format can hold.

A step over host memory streams masters and moments through the device rather than updating them
with the processor's cores. Per parameter of 4-byte state it sends 12 bytes each way, 96 GB for 8
billion parameters, which a bus of 50 GB/s does in 2 s, both directions at once; cores would read
and write 246 GB of host memory, more than 2 s, and be missing to rewards and data meanwhile. And
the numbers are then, bit for bit, those of a step without offload. Gradients that lie on the host
come along, and are scaled on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Muon
from torch.optim.adamw import adamw

from hone.checkpoint.sharded import StoredTensor, laid_out, local_part, own_part, region_of
from hone.config.trainer import OptimizerConfig
from hone.trainer.host_gradients import Piece
from hone.trainer.offload import BUCKET_BYTES, Bucket, host_tensors, stream_buckets

__all__ = ["FlatLayout", "ParameterOptimizer", "adamw_bfloat16_"]

_PIECE_STEP = 1024
_CHUNK = 1 << 22

WriteBack = Callable[[Sequence[tuple[Piece, Tensor]]], None]


@dataclass(slots=True)
class _Moments:
    """AdamW's state of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class _Operand:
    """What one update reads and writes of a piece of a parameter, flat."""

    piece: Piece
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where a flattened shard lies in its flattened parameter: element `i` of the shard is element
    `offset + i // row * stride + i % row` of the parameter.

    A shard in one piece, which is what a cut along the first dimension gives, has `row == stride`.
    """

    offset: int = 0
    row: int = 1
    stride: int = 1

    @classmethod
    def of(cls, parameter: Tensor) -> FlatLayout:
        """Of what this process holds. Raises ValueError where it is cut along two dimensions other
        than the first."""
        region, shape = region_of(parameter), tuple(parameter.shape)
        if not prod(region.shape):
            return cls()
        offset = sum(o * prod(shape[dim + 1 :]) for dim, o in enumerate(region.offsets))
        cut = [dim for dim, n in enumerate(region.shape) if dim and n != shape[dim]]
        if not cut:
            return cls(offset)
        if len(cut) > 1:
            raise ValueError(f"a shard of {region.shape} of {shape} is cut along dimensions {cut}")
        return cls(offset, prod(region.shape[cut[0] :]), prod(shape[cut[0] :]))


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
        host, and parameters: `write_back` is then called with each piece of them that has moved, on
        the device. Of DTensors offload sees each process's own part. Raises UserError where the
        host has too little memory.
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
        """AdamW's: on the device made when they are needed, on the host all at once."""
        self._layouts: dict[str, FlatLayout] = {}
        """Where the noise of bfloat16 moments is counted from."""
        if self._dtype is torch.bfloat16:
            self._layouts = {name: FlatLayout.of(p) for name, p in on_adamw.items()}

    def step(
        self, gradients: Mapping[str, Tensor], lr_scale: float, gradient_scale: Tensor | None = None
    ) -> None:
        """Apply gradients, by parameter, at `lr_scale` times the peak rates, after scaling them:
        in place, unless they lie on the host. Where memory for the moments is lacking, nothing has
        moved."""
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
        """The moments that lie in device memory, local parts of DTensors: what a trainer that
        sleeps can move away."""
        if self._offload:
            return []
        tensors = self.state_dict().items()
        return [local_part(tensor) for key, tensor in tensors if not key.startswith("step/")]

    def state_dict(self) -> dict[str, Tensor]:
        """`<moment>/<parameter>` to tensor; parameters that never had a gradient have none.

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
        """Take over a saved state, in the format configured here, from any device: whole moments,
        DTensors placed as their parameter is, or what is stored, of which each process reads its
        part, one tensor after the other. Raises ValueError for unknown parameters and wrong shapes
        or placements."""
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
        """Format of the moments; None is the parameter's own."""
        return torch.bfloat16 if self._cfg.state_dtype == "bfloat16" else None

    def _reserved(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, _Moments]:
        """All moments on the host."""
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

    def _operand(self, piece: Piece, gradients: Mapping[str, Tensor]) -> _Operand:
        """Views of what belongs to a piece, wherever it lies."""
        moments = self._moments[piece.name]
        tensors = (self._parameters[piece.name], gradients[piece.name])
        tensors += moments.exp_avg, moments.exp_avg_sq
        flat = (local_part(tensor.detach()).view(-1) for tensor in tensors)
        return _Operand(piece, *(tensor[piece.start : piece.stop] for tensor in flat))

    def _stream(
        self, gradients: Mapping[str, Tensor], lr: float, gradient_scale: Tensor | None
    ) -> None:
        """Update what lies on the host, one bucket after the other."""
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

        def of_host(names: Sequence[str], operands: Sequence[_Operand]) -> list[Tensor]:
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
                # Places of later pieces stay aligned.
                room -= -(-(stop - start) // _PIECE_STEP) * _PIECE_STEP
                start = stop
                if room == 0:
                    buckets.append([])
                    room = capacity
        return [bucket for bucket in buckets if bucket]

    @torch.no_grad()
    def _update(self, operands: Sequence[_Operand], lr: float) -> None:
        for is_decayed in (True, False):
            group = [o for o in operands if (self._parameters[o.piece.name].ndim > 1) == is_decayed]
            decay = self._cfg.weight_decay if is_decayed else 0.0
            if self._dtype is torch.bfloat16:
                for operand in group:
                    self._update_bfloat16(operand, lr, decay)
            elif group:
                self._update_float32(group, lr, decay)

    def _update_float32(self, group: Sequence[_Operand], lr: float, decay: float) -> None:
        # torch counts the step that it makes.
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

    def _update_bfloat16(self, operand: _Operand, lr: float, decay: float) -> None:
        name, first_index, _ = operand.piece
        num_steps = self._moments[name].num_steps
        adamw_bfloat16_(
            operand.master,
            operand.gradient,
            operand.exp_avg,
            operand.exp_avg_sq,
            first_index=first_index,
            layout=self._layouts[name],
            seed=zlib.crc32(f"{name}/{num_steps}".encode()) >> 1,
            num_steps=num_steps,
            cfg=self._cfg,
            lr=lr,
            decay=decay,
        )


def adamw_bfloat16_(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    first_index: int,
    layout: FlatLayout = FlatLayout(),
    seed: int,
    num_steps: int,
    cfg: OptimizerConfig,
    lr: float,
    decay: float,
) -> None:
    """Step `num_steps` (from 1) of AdamW in place: float32 master and gradient, bfloat16 moments.

    All are flat: elements from `first_index` on of a shard that lies in its parameter as `layout`
    says. The master moves by the moments before they are rounded. They are rounded up or down with
    the probability of the distance, by bits that depend on `seed` and on an element's place in the
    parameter, however that is sharded. To the nearest, a moment that should change by less than
    1/256 of itself would never change: at a decay of 0.999 it would keep its first value for ever.
    """
    beta1, beta2 = cfg.betas
    correction1, correction2 = 1 - beta1**num_steps, 1 - beta2**num_steps
    if master.is_cuda:
        from hone.trainer.adamw_kernel import adamw_bfloat16  # needs triton, absent on CPUs

        adamw_bfloat16(
            master,
            gradient,
            exp_avg.view(torch.int16),
            exp_avg_sq.view(torch.int16),
            first_index=first_index,
            offset=layout.offset,
            row=layout.row,
            stride=layout.stride,
            seed=seed,
            lr=lr,
            decay=decay,
            beta1=beta1,
            beta2=beta2,
            eps=cfg.eps,
            correction1=correction1,
            correction2=correction2,
        )
        return
    for start in range(0, master.numel(), _CHUNK):
        place = slice(start, start + _CHUNK)
        p, g = master[place], gradient[place]
        m = exp_avg[place].float().lerp_(g, 1 - beta1)
        v = exp_avg_sq[place].float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - lr * decay)
        p.addcdiv_(m, (v.sqrt() / correction2**0.5).add_(cfg.eps), value=-lr / correction1)
        noise = _noise(first_index + start, p.numel(), seed, layout)
        exp_avg[place] = _round_to_bfloat16(m, noise & 0xFFFF)
        exp_avg_sq[place] = _round_to_bfloat16(v, _shift_right(noise, 16))


def _round_to_bfloat16(x: Tensor, noise: Tensor) -> Tensor:
    """Adding 16 random bits below the last that stays carries with the probability of what goes."""
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


def _noise(first_index: int, size: int, seed: int, layout: FlatLayout = FlatLayout()) -> Tensor:
    """32 bits for each place, as int32: the finaliser of MurmurHash3 in wrapping arithmetic."""
    i = torch.arange(first_index, first_index + size)
    if layout.row != layout.stride:
        i = i // layout.row * layout.stride + i % layout.row
    x = (layout.offset + i).to(torch.int32)
    x = x * _signed(0x9E3779B1) + seed
    x = (x ^ _shift_right(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shift_right(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Of unsigned bits: zeros come in."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits
