"""Expert routes that vLLM reports, converted to the routes of `hone.models.routes`."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from hone.engine.sequence import Sequence
from hone.families.registry import spec_of
from hone.models.routes import route_dtype

__all__ = ["VLLMRoutes"]


class VLLMRoutes:
    """Collects the experts that vLLM's tokens pass. With each sampled token vLLM reports the
    experts of the token before, and with the first token those of the prompt."""

    def __init__(self, config: PreTrainedConfig, llm: Any) -> None:
        spec = spec_of(config.model_type)
        self._layers = list(spec.expert_layers(config.to_dict()))
        num_experts: int = config.num_experts
        self._dtype = str(route_dtype(num_experts)).removeprefix("torch.")
        self._states: dict[str, Any] = llm.output_processor.request_states
        self._own_keys: dict[str, str] = {}
        """vLLM's own name for a request."""

    def begin(self, key: str, own_key: str) -> None:
        """Register a request that was sent to vLLM, whose internal name is `own_key`."""
        self._own_keys[key] = own_key

    def take(self, key: str, sequence: Sequence, output: Any = None) -> None:
        """Give `sequence` the routes of all its tokens but the last, before vLLM forgets them:
        those of tokens that it had when it was handed over stay what sampled the others.

        `output` is vLLM's output where the request has just ended. Raises RuntimeError where vLLM
        has reported the experts of more or fewer tokens.
        """
        state = self._states.get(self._own_keys.pop(key))
        if state is not None:
            parts = state.routed_experts_chunks
        else:  # it has just finished
            parts = [] if output is None else [output.outputs[0].routed_experts]
        if not parts and output is None:  # no token has been drawn
            return
        num_reported = sum(len(part) for part in parts if part is not None)
        if num_reported != len(sequence.token_ids) - 1:
            raise RuntimeError(
                f"vLLM reported the experts of {num_reported} tokens of request "
                f"{sequence.request.id!r}, which has {len(sequence.token_ids)} and should have "
                "them of all but the last"
            )
        found = np.concatenate(parts)[:, self._layers].astype(self._dtype)
        had = sequence.routes
        sequence.routes = found if had is None else np.concatenate([had, found[len(had) :]])
