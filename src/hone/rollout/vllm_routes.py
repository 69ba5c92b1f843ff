"""What vLLM tells of the experts that tokens passed, as the routes of `hone.models.routes`."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from hone.engine.sequence import Sequence
from hone.families.registry import spec_of
from hone.models.routes import route_dtype

__all__ = ["VLLMRoutes"]


class VLLMRoutes:
    """The experts that vLLM's tokens pass: with each token it draws, vLLM says what the one before
    passed, and with the first what the prompt did."""

    def __init__(self, config: PreTrainedConfig, llm: Any) -> None:
        spec = spec_of(config.model_type)
        self._layers = list(spec.expert_layers(config.to_dict()))
        num_experts: int = config.num_experts
        self._dtype = str(route_dtype(num_experts)).removeprefix("torch.")
        self._states: dict[str, Any] = llm.output_processor.request_states
        self._own_keys: dict[str, str] = {}
        """vLLM's own name for a request."""

    def begin(self, key: str, own_key: str) -> None:
        """A request has been handed over, which vLLM calls `own_key`."""
        self._own_keys[key] = own_key

    def take(self, key: str, sequence: Sequence, output: Any = None) -> None:
        """Give `sequence` the routes of all its tokens but the last, before vLLM forgets them:
        those of tokens that it had when it was handed over stay what sampled the others.

        `output` is what vLLM gave where this call's request has just ended. Raises RuntimeError
        where vLLM has told of more tokens, or fewer.
        """
        state = self._states.get(self._own_keys.pop(key))
        if state is not None:
            parts = state.routed_experts_chunks
        else:  # it has just finished
            parts = [] if output is None else [output.outputs[0].routed_experts]
        if not parts and output is None:  # no token has been drawn
            return
        told = sum(len(part) for part in parts if part is not None)
        if told != len(sequence.token_ids) - 1:
            raise RuntimeError(
                f"vLLM told the experts of {told} tokens of request {sequence.request.id!r}, which "
                f"has {len(sequence.token_ids)} and should have them of all but the last"
            )
        found = np.concatenate(parts)[:, self._layers].astype(self._dtype)
        had = sequence.routes
        sequence.routes = found if had is None else np.concatenate([had, found[len(had) :]])
