"""Replaces the embeddings of placeholder tokens by features of contents, such as images.

Trainer and engine give the forward of a family that takes contents a hook:

    ids ─► embeddings ─► rows `index` become `features` ─► layers, to whose output the first K add
                                                           `deepstack`

A text model has no hook: its forward embeds as transformers does, and neither graphs nor compiled
layers know of contents. The hook runs before the layers, outside of what is compiled, and so does
what is added between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hone.families.registry import inputs_of

if TYPE_CHECKING:
    from hone.models.features import FeatureSource
    from hone.models.vision import WholeModel

__all__ = [
    "add_deepstack",
    "attach_features",
    "attach_whole",
    "embed_contents",
    "features_of",
    "follow_inputs",
    "require_features",
    "require_whole",
    "whole_of",
]

_ATTRIBUTE = "_hone_features"
_WHOLE_ATTRIBUTE = "_hone_whole"


def attach_features(model: PreTrainedModel, source: FeatureSource) -> None:
    """Give a decoder, and the aliases that will be made of it, the features of its contents."""
    setattr(model, _ATTRIBUTE, source)


def features_of(model: PreTrainedModel) -> FeatureSource | None:
    """The features of a decoder's contents; None for a text model."""
    return getattr(model, _ATTRIBUTE, None)


def require_features(model: PreTrainedModel) -> FeatureSource:
    """The features of a decoder's contents. Raises ValueError for a model without a tower."""
    source = features_of(model)
    if source is None:
        raise ValueError(
            f"a {model.config.model_type} model got sequences with images, and has no tower to "
            "encode them: load it with hone.load_model, or attach its features"
        )
    return source


def attach_whole(model: PreTrainedModel, whole: WholeModel) -> None:
    """Let exports of a decoder write the whole model."""
    setattr(model, _WHOLE_ATTRIBUTE, whole)


def whole_of(model: PreTrainedModel) -> WholeModel | None:
    """The whole model of a decoder; None for a text model."""
    return getattr(model, _WHOLE_ATTRIBUTE, None)


def require_whole(model: PreTrainedModel) -> WholeModel:
    """The whole model of a decoder, which must have one."""
    whole = whole_of(model)
    assert whole is not None
    return whole


def follow_inputs(model: PreTrainedModel) -> None:
    """Make the forward of `model` read from its context what its family needs besides ids, in
    place: features of contents, segments and states of recurrent layers. Call before its layers
    are compiled. Idempotent."""
    base: Any = model.base_model
    inputs = inputs_of(model.config)
    if inputs.has_states:
        from hone.attention.recurrent.layer import follow_segments

        follow_segments(model)
    if inputs.kinds and _embed not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_embed, with_kwargs=True)
        if hasattr(base, "_deepstack_process"):
            # transformers' own looks for the tokens by a mask, which waits for the device.
            base._deepstack_process = _add_rows


def embed_contents(embeddings_TD: Tensor, index_C: Tensor, features_CD: Tensor) -> Tensor:
    """Embeddings with the features of contents in the rows `index_C`."""
    return embeddings_TD.index_copy(0, index_C, features_CD.to(embeddings_TD.dtype))


def add_deepstack(hidden_TD: Tensor, index_C: Tensor, features_CD: Tensor) -> Tensor:
    """Hidden states with the features of one layer added to the rows `index_C`."""
    return hidden_TD.index_add(0, index_C, features_CD.to(hidden_TD.dtype))


def _add_rows(hidden_1TD: Tensor, index_C: Tensor, features_CD: Tensor) -> Tensor:
    return add_deepstack(hidden_1TD[0], index_C, features_CD)[None]


def _embed(
    base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward hook of a backbone: embeddings in place of ids if its context has contents."""
    contents = kwargs["attention_context"].contents
    if contents is None or "input_ids" not in kwargs:  # later pipeline stages have no ids
        return None
    embeddings_TD = base.embed_tokens(kwargs["input_ids"])[0]
    embeddings_TD = embed_contents(embeddings_TD, contents.index, contents.features)
    rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
    rest |= {"inputs_embeds": embeddings_TD[None]}
    if contents.deepstack is not None:
        rest["visual_pos_masks"] = contents.index
        rest["deepstack_visual_embeds"] = [*contents.deepstack]
    return args, rest
