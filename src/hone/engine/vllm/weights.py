"""The weights that vLLM computes with, under Hugging Face names.

vLLM holds queries, keys and values of a layer in one tensor, gates and ups in another. Of each, and
of everything else, a rank of several holds its part:

    q, gate, up          rows, a rank's own
    k, v                 the same; with more ranks than key heads, several ranks hold the same rows
    o, down              columns
    embedding, head      rows, the vocabulary, with padding behind the last
    experts              whole ones, the first rank the first; gate and up of each in one tensor
    the rest             whole on every rank
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["VLLMWeights", "check_reads_weights", "unpacked_weights"]


_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""vLLM's name and transformers' name of each tensor that has all experts of a layer."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a weight: `size` of `whole` elements along `dim`, from `start`."""

    dim: int
    start: int
    size: int
    whole: int


class VLLMWeights:
    """Views into the tensors of a vLLM model, which its kernels read."""

    def __init__(self, model: nn.Module, *, is_tied: bool) -> None:
        """`is_tied`: the output head is the embedding, whether or not `model` has one."""
        self._model = model
        self._is_tied = is_tied
        self._linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
        self._vocabulary: Any = importlib.import_module(
            "vllm.model_executor.layers.vocab_parallel_embedding"
        )
        self._parts = {name: part for name, _, part in self._walk() if part is not None}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, or this rank's part of it, as a view; tied ones by each of their names."""
        return ((name, view) for name, view, _ in self._walk())

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a full weight that this rank holds: a view, or the tensor itself.

        Raises RuntimeError where the model's is of another size.
        """
        part = self._parts.get(name)
        if part is None:
            return tensor
        if tensor.ndim <= part.dim or tensor.shape[part.dim] != part.whole:
            raise RuntimeError(
                f"{name} has shape {list(tensor.shape)}; the model that vLLM was made for has "
                f"{part.whole} in dimension {part.dim}"
            )
        return tensor.narrow(part.dim, part.start, part.size)

    def _walk(self) -> Iterator[tuple[str, Tensor, _Part | None]]:
        """Name and view of each weight, and its part; None: the whole weight."""
        packed: Mapping[str, Seq[str]] = getattr(self._model, "packed_modules_mapping", {})
        head = embedding = None
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            path, _, leaf = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            module, tensor = self._model.get_submodule(path), parameter.detach()
            if ".experts." in name:
                if leaf in _EXPERTS:
                    yield f"{parent}.{_EXPERTS[leaf]}", tensor, _own_experts(module)
                continue  # what computes them holds their router as well
            if last in packed:
                pieces = zip(packed[last], self._pieces(module, tensor), strict=True)
                for own, (view, part) in pieces:
                    yield f"{parent}.{own}.{leaf}", view, part
                continue
            view, part = self._alone(module, leaf, tensor)
            if isinstance(module, self._vocabulary.VocabParallelEmbedding):
                head = (view, part) if last == "lm_head" else head
                embedding = (view, part) if last == "embed_tokens" else embedding
            yield name, view, part
        if self._is_tied and head is None and embedding is not None:
            yield "lm_head.weight", *embedding  # a model class that has no head of its own

    def _pieces(self, module: Any, tensor: Tensor) -> Iterator[tuple[Tensor, _Part | None]]:
        """The weights that a fused layer has in one tensor."""
        for i, view in enumerate(tensor.split(list(module.output_partition_sizes))):
            is_keys = isinstance(module, self._linear.QKVParallelLinear) and i > 0
            yield view, _rows(module, view, replicas=module.num_kv_head_replicas if is_keys else 1)

    def _alone(self, module: Any, leaf: str, tensor: Tensor) -> tuple[Tensor, _Part | None]:
        if isinstance(module, self._vocabulary.VocabParallelEmbedding):
            own = module.shard_indices
            view = tensor[: own.num_org_elements]  # the rows beyond are padding
            if module.tp_size == 1:
                return view, None
            return view, _Part(0, own.org_vocab_start_index, len(view), module.org_vocab_size)
        if isinstance(module, self._linear.ColumnParallelLinear):
            return tensor, _rows(module, tensor)
        # The bias of a sum is whole on every rank, and added by the first.
        if isinstance(module, self._linear.RowParallelLinear) and leaf == "weight":
            return tensor, _part(1, tensor.shape[1], module.tp_rank, module.tp_size)
        return tensor, None


def _own_experts(module: Any) -> _Part | None:
    num_all, own = module.global_num_experts, module.local_num_experts
    return _part(0, own, module.moe_config.moe_parallel_config.ep_rank, num_all // own)


def _rows(module: Any, view: Tensor, *, replicas: int = 1) -> _Part | None:
    """This rank's rows of a weight of which `replicas` neighbouring ranks have the same rows."""
    return _part(0, len(view), module.tp_rank // replicas, module.tp_size // replicas)


def _part(dim: int, size: int, index: int, num_parts: int) -> _Part | None:
    return None if num_parts == 1 else _Part(dim, index * size, size, num_parts * size)


@contextmanager
def unpacked_weights() -> Generator[None]:
    """Context in which vLLM's linear layers on a CPU keep their weights unchanged.

    Otherwise each layer packs a copy in its own layout and drops the weight; new values would
    silently not reach the copy of a tied output head.
    """
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    pack: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


def check_reads_weights(model: nn.Module) -> None:
    """Raise RuntimeError where a linear layer computes with a packed copy of its weight."""
    packed = [
        name
        for name, module in model.named_modules()
        if getattr(module, "cpu_linear", F.linear) is not F.linear
    ]
    if packed:
        raise RuntimeError(
            f"vLLM computes with packed copies of the weights of {', '.join(packed[:8])}, which a "
            "sync does not reach; this version of vLLM cannot be served on a CPU"
        )
