"""Replaces the embeddings of placeholder tokens by features of contents, such as images.

Trainer and engine give the forward of a family that takes contents a hook:

    ids ─► embeddings ─► rows `index` become `features` ─► layers

A text model has no hook: its forward embeds as transformers does, and neither graphs nor compiled
layers know of contents. The hook runs before the layers, outside of what is compiled.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hone.families.registry import spec_of

__all__ = ["follow_contents"]


def follow_contents(model: PreTrainedModel) -> None:
    """Make the forward of `model` read features of contents from its context, in place, if its
    family takes contents. Idempotent."""
    base: Any = model.base_model
    takes_contents = bool(spec_of(model.config.model_type).inputs.kinds)
    if takes_contents and _embed not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_embed, with_kwargs=True)


def _embed(
    base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward hook of a backbone: embeddings in place of ids if its context has contents."""
    contents = kwargs["attention_context"].contents
    if contents is None or "input_ids" not in kwargs:  # later pipeline stages have no ids
        return None
    ids_1T = kwargs["input_ids"]
    embeddings_TD = base.embed_tokens(ids_1T)[0]
    features_CD = contents.features.to(embeddings_TD.dtype)
    embeddings_TD = embeddings_TD.index_copy(0, contents.index, features_CD)
    rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return args, rest | {"inputs_embeds": embeddings_TD[None]}
