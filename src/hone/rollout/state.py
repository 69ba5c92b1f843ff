"""Groups and requests as JSON-able values, for checkpoints; samples for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter

from hone.types import Group, Prompt, Request, Sample

__all__ = [
    "group_from_dict",
    "group_to_dict",
    "request_from_dict",
    "sample_from_dict",
    "sample_of_values",
    "sample_to_dict",
    "sample_values",
]

_PROMPT, _SAMPLE = TypeAdapter(Prompt), TypeAdapter(Sample)
request_from_dict = TypeAdapter(Request).validate_python
"""Inverse of `dataclasses.asdict`."""


def sample_values(sample: Sample) -> dict[str, Any]:
    """All fields but the prompt, for a process that knows it."""
    names = (field.name for field in fields(Sample))
    return {name: getattr(sample, name) for name in names if name != "prompt"}


def sample_of_values(values: Mapping[str, Any], prompt: Prompt) -> Sample:
    """Inverse of `sample_values`."""
    return Sample(prompt=prompt, **values)


def group_to_dict(group: Group) -> dict[str, Any]:
    """All fields, nested; the prompt once, not in every sample."""
    samples = [sample_to_dict(sample) for sample in group.samples]
    return {"id": group.id, "prompt": asdict(group.prompt), "samples": samples}


def sample_to_dict(sample: Sample) -> dict[str, Any]:
    """All fields but the prompt, nested."""
    values = asdict(sample)
    del values["prompt"]
    return values


def sample_from_dict(data: Mapping[str, Any], prompt: Prompt) -> Sample:
    """Inverse of `sample_to_dict`."""
    return _SAMPLE.validate_python({**data, "prompt": prompt})


def group_from_dict(data: Mapping[str, Any]) -> Group:
    """Inverse of `group_to_dict`."""
    prompt = _PROMPT.validate_python(data["prompt"])
    samples = [sample_from_dict(row, prompt) for row in data["samples"]]
    return Group(id=data["id"], prompt=prompt, samples=samples)
