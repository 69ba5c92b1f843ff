"""The families there are: every file of this package with a `SPEC`, by its `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from hone.families.spec import Json, ModelSpec

__all__ = ["FUSED_FAMILIES", "SPECS", "public_configs", "require_spec"]

_SHARED = ("__init__", "registry", "shape", "spec")
"""Files of this package that are no family."""


def _read_specs() -> dict[str, ModelSpec]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return {
        name: import_module(f"hone.families.{name}").SPEC for name in names if name not in _SHARED
    }


SPECS: Mapping[str, ModelSpec] = _read_specs()
"""Values of `model_type` that hone trains and samples."""

FUSED_FAMILIES = tuple(name for name, spec in SPECS.items() if spec.decode is not None)
"""Those with a fused decode, which exact mode and tensor parallelism of the engine need."""


def require_spec(model_type: str) -> ModelSpec:
    """The family of a `model_type`. Raises ValueError, naming those there are."""
    if model_type not in SPECS:
        raise ValueError(
            f"Cannot plan for model_type {model_type!r}; known are {', '.join(SPECS)}."
        )
    return SPECS[model_type]


def public_configs() -> dict[str, Json]:
    """`config.json` of public models by name in lower case, such as `qwen3-8b`."""
    return {name: config for spec in SPECS.values() for name, config in spec.public.items()}
