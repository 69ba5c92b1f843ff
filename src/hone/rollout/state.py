"""Groups and requests as JSON-able values, for checkpoints; samples for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from hone.types import (
    Completion,
    FailureKind,
    Group,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingParams,
    StopReason,
)

__all__ = [
    "group_from_dict",
    "group_to_dict",
    "request_from_dict",
    "request_to_dict",
    "sample_of_values",
    "sample_values",
]


def sample_values(sample: Sample) -> dict[str, Any]:
    """The fields of a sample but its prompt, not copied."""
    return {f.name: getattr(sample, f.name) for f in fields(sample) if f.name != "prompt"}


def sample_of_values(values: Mapping[str, Any], prompt: Prompt) -> Sample:
    """Inverse of `sample_values`."""
    return Sample(prompt=prompt, **values)


def group_to_dict(group: Group) -> dict[str, Any]:
    """The prompt once, then the samples without it."""
    samples = [asdict(sample) for sample in group.samples]
    for sample in samples:
        del sample["prompt"]
    return {"id": group.id, "prompt": asdict(group.prompt), "samples": samples}


def group_from_dict(data: dict[str, Any]) -> Group:
    """Inverse of `group_to_dict`."""
    fields = dict(data["prompt"])
    fields["token_ids"] = tuple(fields["token_ids"])
    prompt = Prompt(**fields)
    samples = [_sample_from_dict(row, prompt) for row in data["samples"]]
    return Group(id=data["id"], prompt=prompt, samples=samples)


def _sample_from_dict(data: dict[str, Any], prompt: Prompt) -> Sample:
    fields = dict(data)
    fields["prompt"] = prompt
    fields["stop_reason"] = StopReason(fields["stop_reason"])
    if fields["reward"] is not None:
        fields["reward"] = Reward(**fields["reward"])
    if fields["failure"] is not None:
        fields["failure"] = FailureKind(fields["failure"])
    return Sample(**fields)


def request_to_dict(request: Request) -> dict[str, Any]:
    """All fields, nested."""
    return asdict(request)


def request_from_dict(data: dict[str, Any]) -> Request:
    """Inverse of `request_to_dict`."""
    fields, sampling = dict(data), dict(data["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    fields["prompt_ids"] = tuple(fields["prompt_ids"])
    fields["sampling"] = SamplingParams(**sampling)
    if fields["resumed"] is not None:
        resumed = dict(fields["resumed"])
        resumed["stop_reason"] = StopReason(resumed["stop_reason"])
        fields["resumed"] = Completion(**resumed)
    return Request(**fields)
