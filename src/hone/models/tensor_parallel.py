"""One model over several devices: which rank holds which part of a weight, and what is exchanged.

Every rank of a group runs the same engine on the same requests, one process a device. Nobody
drives them and no messages pass: scheduling is deterministic, and all ranks draw the same tokens
because they hold the same bits of the full logits. Within a layer a rank owns some of the heads and
some of the MLP's inner size (Megatron-LM, Shoeybi et al., arXiv:1909.08053):

    q, k, v, gate, up    rows of the weight: a rank's own outputs, nothing to exchange
    o, down              columns: every rank gets a part of a sum over ranks, two sums a layer
    experts              some experts of a layer, whole: parts of that same sum. Every rank has the
                         hidden states of all tokens and chooses as the others do, so that no token
                         is sent anywhere
    linear attention     heads, as in attention; a rank's rows of the product that gives queries,
                         keys and values lie in three blocks
    head                 rows, the vocabulary: logits are gathered, in float32
    embedding, norms,    whole on every rank: a lookup reads few rows, sharing them costs a sum
    routers

A layer's sums are small and come often, so they take as long as ranks need to meet. On CUDA they
run in `hone.models.tensor_parallel_kernels`, together with the norm that follows; large ones, of
prefill, and those of families without fused layers (`divide_layers`), go through NCCL.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hone.attention.recurrent.layer import is_recurrent, set_heads
from hone.distributed.processes import processes
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.registry import SPECS
from hone.families.spec import Split
from hone.models.experts import Experts
from hone.models.fused_layers import is_fusible
from hone.models.layer_ops import LayerOps, Mlp, Norm, Projection, TorchKernels
from hone.models.ranks import ModelRanks
from hone.models.support import head_dim_of

if TYPE_CHECKING:
    from hone.models.tensor_parallel_kernels import GatherMailboxes, SumMailboxes

__all__ = [
    "TensorParallel",
    "check_divides",
    "divide_config",
    "divide_layers",
    "fit_to_rank",
    "shard_model",
    "shard_of",
]

MAX_SUM_BYTES = 4 << 20
"""Largest sum in bytes, counting a rank's reads from the others, that is faster in one shot than
through NCCL, whose ranks forward partial sums and so read less from three ranks on."""
GATHER_PROGRAMS = 2048
"""Number of mailboxes for gathering logits: 64 MiB."""


class TensorParallel(ModelRanks):
    """One rank's place in a group that computes a model together; `from_environment` makes it.

    Calls that exchange data are collective: all ranks make them in the same order with equal
    shapes. If a rank fails, the others wait until torchrun ends them.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        """`group` may be None if nothing is exchanged: for shapes, and groups of one."""
        super().__init__(device)
        self.rank = rank
        self.size = size
        self.replica = replica
        self.num_replicas = num_replicas
        self._group = group
        self._gathers: GatherMailboxes | None = None
        if group is not None and _has_kernels(device):
            from hone.models.tensor_parallel_kernels import GatherMailboxes

            self._gathers = GatherMailboxes(
                self._connect, rank=rank, size=size, num_programs=GATHER_PROGRAMS
            )

    @classmethod
    def from_environment(
        cls, size: int, device: torch.device, *, timeout: timedelta | None = None
    ) -> Self:
        """Join the group of this process, one of those that torchrun has started, on `device`.

        Ranks i * size to (i + 1) * size - 1 are a group; several groups are replicas, which share
        nothing. Joins the default process group (NCCL on CUDA, gloo on a CPU) if that is needed and
        not done yet. `timeout` is for collectives; None: torch's own.
        """
        own = processes()
        rank, world_size = own.rank, own.world_size
        if size == 1:
            return cls(rank=0, size=1, device=device, replica=rank, num_replicas=world_size)
        if not dist.is_initialized():
            from hone.distributed.store import connect

            store = dist.PrefixStore("engine", connect(own))
            store.set_timeout(dist.default_pg_timeout)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
            )
        rank, world_size = dist.get_rank(), dist.get_world_size()
        assert world_size % size == 0, f"{world_size=} {size=}"  # a rule of `hone check`
        group: Any
        group, _ = dist.new_subgroups(size, timeout=timeout)
        return cls(
            rank=rank % size,
            size=size,
            device=device,
            group=group,
            replica=rank // size,
            num_replicas=world_size // size,
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of its ranks. None for a group of one."""
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over ranks, in place; returns it. The same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if self._gathers is not None:
            return self._gathers.gather_columns(x.contiguous())
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, 1)

    def smallest(self, value: int) -> int:
        """As of `ModelRanks`. The host waits for it."""
        if self.size == 1:
            return value
        number = torch.tensor(value, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._group)
        return int(number)

    def layer_ops(self, kernels: TorchKernels, *, width: int, dtype: torch.dtype) -> LayerOps:
        if self.size == 1:
            return LayerOps(kernels)
        sums = None
        if _has_kernels(self.device):
            from hone.models.tensor_parallel_kernels import SumMailboxes

            max_rows = MAX_SUM_BYTES // ((self.size - 1) * width * dtype.itemsize)
            sums = SumMailboxes(
                self._connect,
                rank=self.rank,
                size=self.size,
                max_rows=max(max_rows, 1),
                width=width,
                dtype=dtype,
            )
        return TensorParallelOps(kernels, self, sums)

    def check_divides(self, config: PreTrainedConfig) -> None:
        check_divides(config, self.size)

    def shard_of(self, name: str, tensor: Tensor, config: PreTrainedConfig) -> Tensor:
        return shard_of(name, tensor, config, self)

    def shard_model(self, model: PreTrainedModel) -> PreTrainedModel:
        return shard_model(model, self)

    def fit(self, model: PreTrainedModel) -> None:
        fit_to_rank(model, self)

    def divide_layers(self, model: PreTrainedModel) -> None:
        divide_layers(model, self)

    def _connect(self, num_bytes: int) -> Sequence[Tensor]:
        """Zeroed memory of every rank of the group, mapped into this rank: uint8 [num_bytes]
        each."""
        # Public under this name only. Multicast is not used.
        import torch.distributed._symmetric_memory as symmetric_memory

        assert self._group is not None
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_()
        handle = symmetric_memory.rendezvous(memory, self._group)
        torch.cuda.synchronize(self.device)
        dist.barrier(self._group)  # no rank writes before all memory is zeroed
        peers = [handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(self.size)]
        peers[self.rank] = memory
        return peers


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


class TensorParallelOps(LayerOps):
    """Operations of a layer that ranks share: additions first sum the parts of all ranks."""

    def __init__(
        self, kernels: TorchKernels, tp: TensorParallel, sums: SumMailboxes | None
    ) -> None:
        super().__init__(kernels)
        self.rank = tp.rank
        self._tp = tp
        self._sums = sums

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if self._sums is not None and len(x) <= self._sums.max_rows:
            return self._sums.add_rms_norm(x, residual, *norm), residual
        return super().add_rms_norm(self._tp.all_reduce(x), residual, norm)

    def sum_linear(self, x: Tensor, projection: Projection) -> Tensor:
        # Ranks add up whole products, not parts of them. The first rank adds the bias.
        bias = projection.bias if self._tp.rank == 0 else None
        return self.kernels.linear(x, projection.weight, bias)

    def sum_experts(self, x: Tensor, experts: Experts, shared: Mlp | None, context: Any) -> Tensor:
        found = super().sum_experts(x, experts, shared, context)
        return found if found.ndim == 2 else found.sum(0).to(x.dtype)


def shard_of(name: str, tensor: Tensor, config: PreTrainedConfig, tp: TensorParallel) -> Tensor:
    """A rank's shard of a full weight: a view of `tensor` where it lies together, or `tensor`
    itself.

    `name` is the weight's name in the checkpoint; `config` is that of the whole model or of a rank.
    A vocabulary that is no multiple of the number of ranks is not divided: then every rank computes
    all logits. Embedding and norms are whole.
    """
    if tp.size == 1:
        return tensor
    if name == "lm_head.weight":
        dim = None if len(tensor) % tp.size else 0
    else:
        module, _, kind = name.rpartition(".")
        match _split_of(module, config.model_type):
            case "rows" | "experts":
                dim = 0
            case "qkv_rows":
                blocks = tensor.split(_qkv_rows(config, len(tensor)))
                return torch.cat([block.chunk(tp.size)[tp.rank] for block in blocks])
            case "columns":
                # The bias of a sum is whole on every rank; the first rank adds it.
                dim = 1 if kind == "weight" else None
            case "shared":
                dim = None
    if dim is None:
        return tensor
    size = tensor.shape[dim] // tp.size
    return tensor.narrow(dim, tp.rank * size, size)


def _qkv_rows(config: PreTrainedConfig, num_rows: int) -> list[int]:
    """Rows of queries, keys and values of the whole model among all `num_rows`, by their shares,
    which a rank has as well as the whole."""
    layers = SPECS[config.model_type].recurrent_layers(config.to_dict())
    assert layers is not None
    times = num_rows // layers.num_channels
    return [times * rows for rows in layers.qkv_rows]


def _split_of(module: str, model_type: str) -> Split:
    """The split of a module, named as in the model."""
    *_, place = module.partition(".layers.")
    return (SPECS[model_type].tensor_plan or {}).get(place.partition(".")[2], "shared")


def shard_model(model: PreTrainedModel, tp: TensorParallel) -> PreTrainedModel:
    """A model of one rank's shards, on its device: copies of `shard_of` the weights of `model`.

    Built as by `fit_to_rank`, which also says what is refused. `model` is unchanged and can be
    freed; for a group of one it is returned itself.
    """
    if tp.size == 1:
        return model
    check_divides(model.config, tp.size)
    parts = {
        id(parameter): _part(shard_of(name, parameter.detach(), model.config, tp), tp)
        for name, parameter in model.named_parameters()
    }
    shard = copy.deepcopy(model, cast(dict[int, Any], parts))
    nn.Module.to(shard, tp.device)  # buffers
    fit_to_rank(shard, tp)
    return shard


def fit_to_rank(model: PreTrainedModel, tp: TensorParallel) -> None:
    """Adapt a model whose weights are a rank's shards, as `shard_of` cuts them, to the rank's
    sizes.

    Its config then has the numbers of this rank: heads, key heads, inner size. It can only
    generate, with `generation_model(..., tp=tp)`. A head that is tied to the embedding becomes a
    view of its rows. Raises UserError if the model was modified, since the modification would be
    lost.
    """
    if not _is_untouched(model):
        raise UserError(
            f"engine.tensor_parallel_size={tp.size}: tensor parallelism serves models as "
            "transformers has them, with plain linear layers of one dtype: this "
            f"{type(model).__name__} has other modules in it. Set it to 1."
        )
    divide_config(model.config, tp.size)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif is_recurrent(module):
            set_heads(
                module,
                num_key_heads=model.config.linear_num_key_heads,
                num_value_heads=model.config.linear_num_value_heads,
            )
    if model.config.tie_word_embeddings:
        head = cast(nn.Linear, model.get_output_embeddings())
        embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
        rows = shard_of("lm_head.weight", embedding.detach(), model.config, tp)
        if len(rows) < len(embedding):
            head.weight = nn.Parameter(rows, requires_grad=False)
            head.out_features = len(rows)


def _is_untouched(model: PreTrainedModel) -> bool:
    """Whether all modules are unmodified transformers modules."""
    if SPECS[model.config.model_type].decode is not None:
        return is_fusible(model)
    kinds = {type(module).__module__ for module in model.modules()}
    return all(kind.startswith(("transformers.", "torch.nn.modules.")) for kind in kinds)


def divide_layers(model: PreTrainedModel, tp: TensorParallel) -> None:
    """Make the layers of `model`, transformers' own with a rank's weights, compute the full result,
    in place: attention and MLP sum the parts of all ranks. Call before layers are compiled. From
    then on every call of the model is collective."""
    if tp.size == 1:
        return
    for name, module in model.named_modules():
        match _split_of(name, model.config.model_type):
            case "columns":
                if tp.rank > 0:
                    module.register_parameter("bias", None)  # the first rank adds it
            case "experts":
                raise AssertionError(f"fused layers divide experts, and {name} is in none")
            case "rows" | "qkv_rows" | "shared":
                pass
    layers: Any = model.base_model.layers
    for layer in layers:
        is_linear = hasattr(layer, "linear_attn")
        mixes = layer.linear_attn.out_proj if is_linear else layer.self_attn.o_proj
        for part in (mixes, layer.mlp):
            part.register_forward_hook(_SumOverRanks(tp))


class _SumOverRanks:
    """Forward hook that sums a module's output over ranks."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp

    @torch.compiler.disable  # a compiler has no need to know of groups
    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.tp.all_reduce(output)


def divide_config(config: PreTrainedConfig, size: int) -> None:
    """Put the numbers of one of `size` ranks into the config of a model that `check_divides`."""
    config.head_dim = head_dim_of(config)
    for field in SPECS[config.model_type].divided_fields:
        setattr(config, field, getattr(config, field) // size)


def _part(part: Tensor, tp: TensorParallel) -> nn.Parameter:
    copied = part.to(tp.device, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(copied, requires_grad=False)


def check_divides(config: PreTrainedConfig, size: int) -> None:
    """Raise ValueError for a model of a family that is not divided, or with numbers that do not
    divide; a rule of `hone check` comes first."""
    facts = ModelFacts.from_config(config.to_dict())
    if size > 1 and (not facts.is_divided or facts.undivided(size)):
        uneven = ", ".join(facts.undivided(size))
        raise ValueError(f"a {facts.family} model is not divided among {size} ranks: {uneven}")
