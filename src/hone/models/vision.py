"""The two parts of a vision-language checkpoint: its decoder and its tower, each read by itself.

    whole = WholeModel.of(place, config, dtype=dtype)
    weights = whole.decoder_weights(buffers)        # a weight source, as of a text model
    tower = whole.tower(device)                     # reads its own tensors alone

A checkpoint holds both under the names of the whole model of transformers, or under older ones that
transformers renames when it loads them. Both parts are found by these names in the files, so that
every tensor of a checkpoint belongs to one of them. `keys` keeps the names of the files, under
which an export writes the parts again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hone.attention import ATTENTION_NAME
from hone.errors import UserError
from hone.families.vision.registry import VISION, VISION_FIELD
from hone.families.vision.spec import VisionSpec
from hone.models.deferred import Weight
from hone.models.heads import has_value_head
from hone.models.support import classifies
from hone.models.towers import TOWERS, Tower
from hone.models.weight_files import STACKED, FileWeights, OtherFormatError, find_weights, locate

__all__ = [
    "WholeModel",
    "text_config_of",
    "whole_class",
]

VISION_ATTENTION = "sdpa"
"""Attention of towers, which is transformers' own."""
_TEMPLATE = "chat_template.json"
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    _TEMPLATE,
)


def text_config_of(whole: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration, with the fields that the whole model has outside of it, and the
    name of the whole model's family."""
    text = whole.get_text_config()
    text.tie_word_embeddings = whole.tie_word_embeddings
    text.architectures, text.name_or_path = whole.architectures, whole.name_or_path
    if classifies(whole):
        text.num_labels = whole.num_labels or 2
    if (quantization := getattr(whole, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    setattr(text, VISION_FIELD, whole.model_type)
    return text


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers for a whole model."""
    return cast("type[PreTrainedModel]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A vision-language model around its decoder. It loads the two parts, and holds all that an
    export needs besides the decoder's weights."""

    place: str
    """Folder or hub name of the checkpoint."""
    module: PreTrainedModel
    """The whole model on the meta device."""
    files: Mapping[str, bytes]
    """The processor's files by name."""
    weights: FileWeights | None
    """All tensors of the checkpoint, by name in `module`; None for random weights."""
    keys: Mapping[str, str]
    """Their names in the files; for random weights those that transformers would write."""

    @classmethod
    def of(cls, place: str, config: PreTrainedConfig, *, dtype: torch.dtype, drawn: bool) -> Self:
        """The whole model of a checkpoint's `config`, with the places of its tensors unless its
        weights are to be `drawn`. Reads no values.

        Raises FileNotFoundError without weights, and UserError where some are missing, misshapen,
        without a place, or in a format that is not read in parts.
        """
        with torch.device("meta"):
            module = whole_class(config)._from_config(  # pyright: ignore[reportPrivateUsage]
                config,
                dtype=dtype,
                attn_implementation={
                    "text_config": ATTENTION_NAME,
                    "vision_config": VISION_ATTENTION,
                },
            )
            if classifies(config):
                width = config.get_text_config().hidden_size
                module.lm_head = nn.Identity()
                module.score = nn.Linear(width, config.num_labels or 2, bias=False)
        weights = None if drawn else _in_files(place, module)
        keys = _written_names(module) if weights is None else weights.keys
        return cls(
            place=place,
            module=module,
            files=_processor_files(place),
            weights=weights,
            keys=keys,
        )

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def spec(self) -> VisionSpec:
        return VISION[self.config.model_type]

    def decoder_weights(self, buffers: Mapping[str, Tensor]) -> FileWeights:
        """Weight source of the decoder, whose other buffers are `buffers`."""
        assert self.weights is not None
        prefix = self.spec.decoder_prefix
        entries = {
            f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: entry
            for name, entry in self.weights.entries.items()
            if not name.startswith(self.spec.tower_prefixes)
        }
        return replace(self.weights, entries=entries, buffers=buffers)

    def whole_name(self, name: str) -> str:
        """The name in the whole model of a tensor of the decoder, or of the tower, which has it."""
        if name.startswith(self.spec.tower_prefixes) or not name.startswith("model."):
            return name
        return f"{self.spec.decoder_prefix}{name.removeprefix('model.')}"

    def key(self, name: str) -> str:
        """The name in files of such a tensor."""
        name = self.whole_name(name)
        return self.keys.get(name, name)

    def config_for(self, decoder: PreTrainedModel) -> PreTrainedConfig:
        """The configuration of a whole model with this decoder."""
        config = copy.deepcopy(self.config)
        if has_value_head(decoder):
            config.num_labels = 1
            for part in (config, config.get_text_config()):
                part.pad_token_id = decoder.config.pad_token_id
        return config

    def class_name_for(self, decoder: PreTrainedModel) -> str:
        """Name of the class of a whole model with this decoder."""
        name = whole_class(self.config).__name__
        if not has_value_head(decoder):
            return name
        return name.replace("ForConditionalGeneration", "ForSequenceClassification")

    def files_beside(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
        """The unchanged files of the processor, by name. One of an older checkpoint is the chat
        template, which is left out for tokenizers that have their own."""
        has_own = tokenizer.chat_template is not None
        return {n: x for n, x in self.files.items() if not (has_own and n == _TEMPLATE)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # aliases of a decoder have the same whole

    def tower(self, device: torch.device, *, seed: int) -> Tower:
        """The tower, from the files, or with random weights of `seed`."""
        tower = TOWERS[self.config.model_type](copy.deepcopy(self.module))
        drawn_on = torch.device("cpu") if self.weights is not None else device
        devices = [drawn_on] if drawn_on.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            for module in tower.modules.modules():
                # Rotary frequencies, of which a GPU computes other bits, are in modules without
                # weights.
                has_weights = any(True for _ in module.parameters(recurse=False))
                module.to_empty(device=drawn_on if has_weights else "cpu", recurse=False)
            for module, owner in self._owners(tower):
                owner._init_weights(module)  # pyright: ignore[reportPrivateUsage] families override
            if self.weights is not None:
                self._read_into(tower, self.weights)
        tower.modules.to(device)
        return tower

    def _owners(self, tower: Tower) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
        """The modules of a tower, each with the innermost model of transformers that it is in."""
        owners = dict.fromkeys(tower.modules.modules(), self.module)
        for model in tower.modules.modules():
            if isinstance(model, PreTrainedModel):
                owners |= dict.fromkeys(model.modules(), model)
        yield from owners.items()

    def _read_into(self, tower: Tower, weights: FileWeights) -> None:
        targets = tower.modules.state_dict()

        def take(weight: Weight) -> None:
            name = weight.name.removeprefix("model.")
            if name in targets:
                targets[name].copy_(weight.whole())

        weights.give(take, device=torch.device("cpu"))


def _in_files(place: str, module: PreTrainedModel) -> FileWeights:
    transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    state = module.state_dict()

    def renamed(key: str) -> str:
        name, _ = rename_source_key(key, renamings, [], module.base_model_prefix, state)
        return name

    try:
        return find_weights(place, module, {}, renamed=renamed)
    except OtherFormatError as error:
        raise UserError(
            f"model.path={place!r} is a vision-language model, whose two parts are read from "
            f"safetensors, and {error}. Load it with transformers and write it with save_pretrained"
        ) from error


def _written_names(module: PreTrainedModel) -> dict[str, str]:
    """Names under which transformers writes the tensors of a model, by name in the model."""
    # Experts have several names each; whoever writes them has transformers divide them.
    names = [name for name in module.state_dict() if not name.endswith(STACKED)]
    # The size of each stand-in is its number.
    numbered = {name: torch.empty(index, device="meta") for index, name in enumerate(names)}
    return {
        names[tensor.numel()]: key
        for key, tensor in revert_weight_conversion(module, numbered).items()
    }


def _processor_files(place: str) -> dict[str, bytes]:
    located = {name: locate(place, name) for name in _PROCESSOR_FILES}
    return {name: path.read_bytes() for name, path in located.items() if path is not None}
