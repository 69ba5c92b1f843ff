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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.adamw import adamw

from hone.checkpoint.sharded import laid_out, local_part, region_of
from hone.config.trainer import OptimizerConfig
from hone.trainer.host_state import HostGradients, HostMasters, Piece
from hone.trainer.offload import BUCKET_BYTES, Bucket, HostBuffer, stream_buckets

__all__ = ["FlatLayout", "ParameterOptimizer", "adamw_bfloat16_"]

_PIECE_STEP = 1024
_CHUNK = 1 << 22


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
        offload: bool = False,
        host_masters: HostMasters | None = None,
        host_gradients: HostGradients | None = None,
    ) -> None:
        """`embeddings` names the input embedding and the output head.

        `offload` keeps AdamW's moments in pinned host memory. With `host_masters`, whose `masters`
        must then be `parameters`, the masters lie there too, gradients come from it, and a step
        writes its weights. With `host_gradients` they come from there, and are scaled as it says.
        Of parameters that are DTensors, offload sees each process's own part. Raises UserError for
        Muon with offload, and where the host has too little memory; ValueError for gradients on the
        host without `offload`, whose step would not fetch them.
        """
        if host_gradients is not None and not offload:
            raise ValueError("host_gradients are fetched by a step with offload only")
        self._parameters = dict(parameters)
        on_muon = {
            name: parameter
            for name, parameter in parameters.items()
            if cfg.name == "muon" and parameter.ndim == 2 and name not in embeddings
        }
        self._adamw = _AdamW(
            {n: p for n, p in parameters.items() if n not in on_muon},
            cfg,
            offload,
            host_masters,
            host_gradients,
        )
        self._muon_names = {parameter: name for name, parameter in on_muon.items()}
        self._peak_muon_lr = cfg.muon_lr
        self._muon: Muon | None = None
        if on_muon:
            self._muon = Muon(
                on_muon.values(),
                lr=cfg.muon_lr,
                weight_decay=cfg.weight_decay,
                momentum=cfg.muon_momentum,
                adjust_lr_fn="original",
            )

    def step(self, lr_scale: float) -> None:
        """Apply the gradients at `lr_scale` times the peak rates, and drop them."""
        self._adamw.step(lr_scale)
        if self._muon is not None:
            self._muon.param_groups[0]["lr"] = self._peak_muon_lr * lr_scale
            self._muon.step()
            self._muon.zero_grad(set_to_none=True)

    def device_tensors(self) -> list[Tensor]:
        """The moments that lie in device memory, local parts of DTensors: what a trainer that
        sleeps can move away."""
        moments = [] if self._adamw.is_offloaded else list(self._adamw.moments())
        if self._muon is not None:
            moments += [t for state in self._muon.state.values() for t in state.values()]
        return [local_part(tensor) for tensor in moments]

    def state_dict(self) -> dict[str, Tensor]:
        """`<moment>/<parameter>` to tensor; parameters that never had a gradient have none.

        Moments have the shape and placements of their parameter, wherever they lie.
        """
        tensors = self._adamw.state_dict()
        if self._muon is not None:
            for parameter, name in self._muon_names.items():
                for moment, value in self._muon.state.get(parameter, {}).items():
                    tensors[f"{moment}/{name}"] = value
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state, in the format configured here, from any device: whole moments,
        or DTensors placed as their parameter is. Raises ValueError for unknown parameters and wrong
        shapes or placements."""
        self._adamw.clear()
        if self._muon is not None:
            self._muon.state.clear()
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            parameter = self._parameters.get(name)
            if parameter is None or not self._load(moment, name, parameter, value):
                raise ValueError(
                    f"optimizer state {key!r} of shape {tuple(value.shape)} fits no parameter of "
                    "this model; resume with the model that wrote the checkpoint"
                )

    def _load(self, moment: str, name: str, parameter: nn.Parameter, value: Tensor) -> bool:
        if self._muon is None or parameter not in self._muon_names:
            return self._adamw.load(moment, name, value)
        own = _own_part(value, parameter)
        if moment != "momentum_buffer" or own is None:
            return False
        buffer = torch.empty_like(parameter.detach(), dtype=value.dtype)
        local_part(buffer).copy_(own)
        self._muon.state[parameter][moment] = buffer
        return True


@dataclass(slots=True)
class _Moments:
    """AdamW's state of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class _Operand:
    """What one update reads and writes; all on the device, of one shape."""

    name: str
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    first_index: int = 0
    """Place of the first element in this process's flattened part of the parameter."""


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


class _AdamW:
    """AdamW with moments in float32 or bfloat16, on the device or on the host."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cfg: OptimizerConfig,
        offload: bool,
        host: HostMasters | None,
        host_gradients: HostGradients | None,
    ) -> None:
        self.is_offloaded = offload
        self._cfg = cfg
        self._parameters = parameters
        self._host = host
        self._host_gradients = host_gradients
        self._layouts: dict[str, FlatLayout] = {}
        """Where the noise of bfloat16 moments is counted from."""
        if self._dtype is torch.bfloat16:
            self._layouts = {name: FlatLayout.of(p) for name, p in parameters.items()}
        self._state: dict[str, _Moments] = {}
        self._buffer: HostBuffer | None = None
        self._on_host: dict[str, _Moments] = {}
        if offload:
            self._reserve()

    def step(self, lr_scale: float) -> None:
        gradients = self._gradients()
        for name in gradients:
            if name not in self._state:
                self._state[name] = self._on_host.get(name) or self._fresh(name)
            self._state[name].num_steps += 1
        lr = self._cfg.lr * lr_scale
        if self.is_offloaded:
            self._stream(gradients, lr)
        else:
            self._update(
                [
                    _Operand(
                        name,
                        self._parameters[name].detach(),
                        gradient,
                        self._state[name].exp_avg,
                        self._state[name].exp_avg_sq,
                    )
                    for name, gradient in gradients.items()
                ],
                lr,
            )
        self._drop_gradients()

    def moments(self) -> Iterator[Tensor]:
        for state in self._state.values():
            yield state.exp_avg
            yield state.exp_avg_sq

    def state_dict(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, state in self._state.items():
            tensors[f"step/{name}"] = torch.tensor(float(state.num_steps))
            tensors[f"exp_avg/{name}"] = state.exp_avg
            tensors[f"exp_avg_sq/{name}"] = state.exp_avg_sq
        return tensors

    def clear(self) -> None:
        """Forget all moments."""
        self._state = {}
        for state in self._on_host.values():
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()
            state.num_steps = 0

    def load(self, moment: str, name: str, value: Tensor) -> bool:
        """Take over one saved tensor; False where it is none of a parameter's state."""
        if moment not in ("step", "exp_avg", "exp_avg_sq"):
            return False
        own = value if moment == "step" else _own_part(value, self._parameters[name])
        if own is None or (moment == "step" and value.ndim):
            return False
        if name not in self._state:
            self._state[name] = self._on_host.get(name) or self._fresh(name)
        state = self._state[name]
        if moment == "step":
            state.num_steps = int(value)
        else:
            local_part(cast(Tensor, getattr(state, moment))).copy_(own)
        return True

    @property
    def _dtype(self) -> torch.dtype | None:
        """Format of the moments; None is the parameter's own."""
        return torch.bfloat16 if self._cfg.state_dtype == "bfloat16" else None

    def _fresh(self, name: str) -> _Moments:
        like = self._parameters[name].detach()
        return _Moments(
            torch.zeros_like(like, dtype=self._dtype), torch.zeros_like(like, dtype=self._dtype)
        )

    def _reserve(self) -> None:
        """All moments on the host, in one buffer."""
        names = list(self._parameters)
        locals_ = [local_part(self._parameters[name]) for name in names]
        layout = [(p.shape, self._dtype or p.dtype) for p in locals_ for _ in range(2)]
        self._buffer = HostBuffer.for_layout(
            layout,
            self._device(),
            purpose="trainer.offload_optimizer keeps AdamW's moments; set "
            "trainer.optimizer.state_dtype to bfloat16, or train on more processes",
        )
        moments = iter(self._buffer.tensors(layout))
        for name in names:
            like = self._parameters[name]
            self._on_host[name] = _Moments(
                laid_out(next(moments), like=like), laid_out(next(moments), like=like)
            )

    def _device(self) -> torch.device:
        """Where updates are computed."""
        for host in (self._host, self._host_gradients):
            if host is not None:
                return host.device
        return next(iter(self._parameters.values())).device

    def _gradients(self) -> dict[str, Tensor]:
        if self._host_gradients is not None:
            return self._host_gradients.tensors
        if self._host is not None:
            return dict(self._host.gradients)
        return {n: p.grad for n, p in self._parameters.items() if p.grad is not None}

    def _drop_gradients(self) -> None:
        if self._host_gradients is not None:
            self._host_gradients.clear()
        if self._host is not None:
            self._host.gradients.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _stream(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update what lies on the host, one bucket after the other."""
        host, away = self._host, self._host_gradients
        weights = {} if host is None else host.weights
        buckets = self._buckets(gradients)

        def of_host(pieces: Sequence[Piece]) -> Bucket:
            changed: list[Tensor] = []
            for piece in pieces:
                state = self._on_host[piece.name]
                changed += _part(state.exp_avg, piece), _part(state.exp_avg_sq, piece)
                if host is not None:
                    changed.append(_part(host.masters[piece.name], piece))
            return Bucket(
                changed,
                read=[] if away is None else [_part(gradients[p.name], p) for p in pieces],
            )

        def update(index: int, staged: Bucket) -> None:
            changed, read = map(iter, staged)
            operands: list[_Operand] = []
            for piece in buckets[index]:
                exp_avg, exp_avg_sq = next(changed), next(changed)
                own = self._parameters[piece.name]
                master = _part(own, piece) if host is None else next(changed)
                gradient = _part(gradients[piece.name], piece) if away is None else next(read)
                if away is not None and away.scale is not None:
                    gradient.mul_(away.scale)
                operands.append(
                    _Operand(piece.name, master, gradient, exp_avg, exp_avg_sq, piece.start)
                )
            self._update(operands, lr)
            moved = list(zip(buckets[index], operands, strict=True))
            if host is not None:
                host.record((piece, operand.master) for piece, operand in moved)
            for piece, operand in moved:
                if piece.name in weights:
                    _part(weights[piece.name], piece).copy_(operand.master)

        with torch.no_grad():
            stream_buckets(map(of_host, buckets), update, self._device())

    def _buckets(self, gradients: Mapping[str, Tensor]) -> list[list[Piece]]:
        """Pieces of the parameters with a gradient, `BUCKET_BYTES` of host state at most in each
        bucket."""
        num_bytes = 2 * (2 if self._dtype is torch.bfloat16 else 4) + 4
        if self._host_gradients is not None:
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
        return buckets if buckets[-1] else buckets[:-1]

    @torch.no_grad()
    def _update(self, operands: Sequence[_Operand], lr: float) -> None:
        for decayed in (True, False):
            group = [o for o in operands if (self._parameters[o.name].ndim > 1) == decayed]
            decay = self._cfg.weight_decay if decayed else 0.0
            if self._dtype is torch.bfloat16:
                for operand in group:
                    self._update_bfloat16(operand, lr, decay)
            elif group:
                self._update_float32(group, lr, decay)

    def _update_float32(self, group: Sequence[_Operand], lr: float, decay: float) -> None:
        device = group[0].gradient.device
        # torch counts the step that it makes.
        counts = [self._state[o.name].num_steps - 1.0 for o in group]
        adamw(
            [local_part(o.master) for o in group],
            [local_part(o.gradient) for o in group],
            [local_part(o.exp_avg) for o in group],
            [local_part(o.exp_avg_sq) for o in group],
            [],
            list(torch.tensor(counts).to(device, non_blocking=True).unbind()),
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
        num_steps = self._state[operand.name].num_steps
        adamw_bfloat16_(
            *map(_flat, (operand.master, operand.gradient, operand.exp_avg, operand.exp_avg_sq)),
            first_index=operand.first_index,
            layout=self._layouts[operand.name],
            seed=zlib.crc32(f"{operand.name}/{num_steps}".encode()) >> 1,
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


def _own_part(value: Tensor, parameter: Tensor) -> Tensor | None:
    """What this process needs of a parameter's moment; None where that is no moment of it."""
    region = region_of(parameter)
    if value.shape != parameter.shape:
        return None
    if isinstance(value, DTensor):
        return value.to_local() if region_of(value) == region else None
    return value[region.slices]


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return _flat(tensor)[piece.start : piece.stop]


def _flat(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).view(-1)
