"""The engines that `engine.backend` names, and the attributes of each that the rest of hone reads.

    backend = BACKENDS[cfg.engine.backend]
    model = blank_model(...) if backend.has_own_weights else ...
    engine = backend.build(EngineParts(model, cfg.engine, ...))

An engine is a folder: its adapter, its rules, and the facts that can be known without its library.
A new one is added by its folder, an entry here and one in `backend_rules.py`. Everything else reads
the attributes of `Backend`, and names no engine but the embedded one.

This module loads neither torch nor the library of any engine: configuration, rules and the planner
read it. What computes is imported by `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hone.engine.settings import BackendName, EngineConfig
    from hone.models.tensor_parallel import TensorParallel
    from hone.observe.tracing import EngineTracer
    from hone.types import Engine

    class TracedEngine(Engine, Protocol):
        """An engine that reports each forward pass to `tracer`, if there is one."""

        tracer: EngineTracer | None


__all__ = ["BACKENDS", "Backend", "EngineParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Arguments for building an engine."""

    model: PreTrainedModel
    """The model to sample from: this rank's part. For an engine that owns its weights it is the
    whole model, or one on the meta device, of which only architecture and dtype are used."""
    cfg: EngineConfig
    eos_token_ids: Collection[int]
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    """Tokens of the longest sequence."""
    device: torch.device | None
    """Device of the engine; None: that of `model`."""
    tensor_parallel: TensorParallel | None
    owns_weights: bool
    """Whether the embedded engine may free the weights of `model` while it sleeps."""
    is_exact: bool
    """Whether `model.exact` is on."""
    records_routes: bool
    """Whether completions include the experts that each token passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Attributes of an engine that builders, rules and the planner read."""

    build: Callable[[EngineParts], TracedEngine]
    """Makes an engine in this process. Raises UserError as the engine's class does."""
    has_own_weights: bool
    """Whether the engine allocates weights itself, whole or divided among its ranks, which a sync
    fills. Else it computes with the tensors of the model that it is given."""
    keeps_weights_asleep: bool = False
    """Whether the weights of a sleeping engine wait in host memory. Else a sync delivers them."""
    sizes_cache_by_share: bool = False
    """Whether the KV cache takes all of `engine.gpu_memory_utilization`. Else it takes no more than
    the sequences of a run can use."""
    shares_prefix_reads: bool = False
    """Whether a decode step on a GPU reads keys that several sequences share only once."""
    repeats_key_heads: bool = False
    """Whether more ranks than key heads may share a model, where several hold the same heads."""


def _build_embedded(parts: EngineParts) -> TracedEngine:
    from hone.engine.engine import EmbeddedEngine

    return EmbeddedEngine(
        parts.model,
        parts.cfg,
        eos_token_ids=parts.eos_token_ids,
        tokenizer=parts.tokenizer,
        max_model_len=parts.max_model_len,
        owns_weights=parts.owns_weights,
        tensor_parallel=parts.tensor_parallel,
        exact=parts.is_exact,
        records_routes=parts.records_routes,
    )


def _build_vllm(parts: EngineParts) -> TracedEngine:
    from hone.engine.vllm.engine import VLLMEngine

    return VLLMEngine(
        parts.model,
        parts.cfg,
        eos_token_ids=parts.eos_token_ids,
        tokenizer=parts.tokenizer,
        max_model_len=parts.max_model_len,
        device=parts.device,
        tensor_parallel=parts.tensor_parallel,
        records_routes=parts.records_routes,
    )


def _build_sglang(parts: EngineParts) -> TracedEngine:
    from hone.engine.sglang.engine import SGLangEngine

    return SGLangEngine(
        parts.model,
        parts.cfg,
        eos_token_ids=parts.eos_token_ids,
        tokenizer=parts.tokenizer,
        max_model_len=parts.max_model_len,
        device=parts.device,
    )


BACKENDS: Mapping[BackendName, Backend] = {
    "embedded": Backend(
        build=_build_embedded,
        has_own_weights=False,
        shares_prefix_reads=True,
    ),
    "vllm": Backend(
        build=_build_vllm,
        has_own_weights=True,
        keeps_weights_asleep=True,
        sizes_cache_by_share=True,
        repeats_key_heads=True,
    ),
    "sglang": Backend(
        build=_build_sglang,
        has_own_weights=True,
        sizes_cache_by_share=True,
    ),
}
