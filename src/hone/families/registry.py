"""Registry of model families: every file of this package with a `SPEC`, by its `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hone.families.spec import GENERIC_FIELDS, UNSERVED_GENERIC_FIELDS, Json, ModelSpec, listed_or
from hone.families.vision.registry import VISION, VISION_FIELD, decoder_config
from hone.model_input import TEXT_ONLY, InputSpec

__all__ = [
    "DENSE_FUSED_FAMILIES",
    "DIVIDED_FAMILIES",
    "FUSED_FAMILIES",
    "SERVED",
    "SPECS",
    "VALUE_FAMILIES",
    "inputs_of",
    "public_configs",
    "spec_of",
    "unserved",
]

_SHARED = (
    "__init__",
    "config_values",
    "model_facts",
    "registry",
    "shape",
    "spec",
    "stages",
    "tokens",
)
"""Files of this package that are no family."""


def _read_specs() -> dict[str, ModelSpec]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return {
        name: import_module(f"hone.families.{name}").SPEC for name in names if name not in _SHARED
    }


SPECS: Mapping[str, ModelSpec] = _read_specs()
"""The families that hone knows, by `model_type`."""

FUSED_FAMILIES = tuple(name for name, spec in SPECS.items() if spec.decode is not None)
"""Families with a fused decode."""

DENSE_FUSED_FAMILIES = tuple(
    name for name in FUSED_FAMILIES if SPECS[name].experts is None and not SPECS[name].is_hybrid
)
"""Families that exact mode supports."""

VALUE_FAMILIES = tuple(name for name, spec in SPECS.items() if spec.gives_values)
"""Families that can be critics and reward models."""

DIVIDED_FAMILIES = tuple(name for name, spec in SPECS.items() if spec.tensor_plan is not None)
"""Families that engines divide among ranks, and the tensor axis among trainers."""

SERVED = (
    "hone runs dense decoders of text, and the vision-language models of the families "
    + ", ".join(VISION)
)
"""What is served, as a part of a message."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
_RECURRENT_TYPE = "linear_attention"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "mrope")
"""Rotary embeddings of a token's positions alone, of which `mrope` has three. `dynamic` and
`longrope` also depend on the longest sequence of the batch, so a packed sample would not equal the
same sample alone."""


def spec_of(model_type: str) -> ModelSpec:
    """The family of a `model_type`, or, if it has no spec, the properties that dense decoders have
    in common. Then a window applies to every layer, unless `config.json` lists the layers that have
    it."""
    return SPECS.get(model_type) or ModelSpec(
        model_type=model_type,
        slides=lambda config, layer: listed_or(config, layer, True),
        lora_targets=(),
        unserved_fields=UNSERVED_GENERIC_FIELDS,
    )


def inputs_of(config: Any) -> InputSpec:
    """What sequences of the model with this configuration of transformers may hold besides ids, and
    whether its layers keep states."""
    family = getattr(config, VISION_FIELD, None)
    inputs = TEXT_ONLY if family is None else VISION[family].inputs
    return replace(inputs, has_states=True) if spec_of(config.model_type).is_hybrid else inputs


def public_configs() -> dict[str, Json]:
    """`config.json` of public models by name in lower case, such as `qwen3-8b`."""
    families = (*SPECS.values(), *VISION.values())
    return {name: config for spec in families for name, config in spec.public.items()}


def unserved(config: Json) -> list[str]:
    """Unsupported settings of a `config.json`, as `field=value`; for a family without a spec also
    the missing numbers. Of a vision-language model they are those of its decoder."""
    config = decoder_config(config)
    family = str(config.get("model_type"))
    found = {name: config[name] for name in spec_of(family).unserved_fields if config.get(name)}
    served_types = (*_LAYER_TYPES, *([_RECURRENT_TYPE] if spec_of(family).is_hybrid else []))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    groups = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    rope_types = [x.get("rope_type") or x.get("type") or "default" for x in groups]
    found |= {
        name: sorted(others)
        for name, values, served in (
            ("layer_types", config.get("layer_types") or (), served_types),
            ("rope_type", rope_types, _ROPE_TYPES),
        )
        if (others := set(values) - set(served))
    }
    told = [name if isinstance(x, Mapping) else f"{name}={x!r}" for name, x in found.items()]
    if family not in SPECS:
        told += [f"no {name}" for name in GENERIC_FIELDS if config.get(name) is None]
    return told
