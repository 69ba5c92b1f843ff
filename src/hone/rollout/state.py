"""Groups and requests as JSON values, for checkpoints; samples as dicts, for other processes."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from hone.images.shown import with_images
from hone.model_input import ModelInput
from hone.types import Group, Prompt, Request, Routes, Sample

if TYPE_CHECKING:
    from hone.images.store import ShownTile

__all__ = [
    "group_from_dict",
    "group_to_dict",
    "inputs_of",
    "request_from_dict",
    "request_to_dict",
    "sample_from_dict",
    "sample_of_values",
    "sample_to_dict",
    "sample_values",
]

_NONE: Mapping[str, ShownTile] = {}
_PROMPT, _SAMPLE, _REQUEST = TypeAdapter(Prompt), TypeAdapter(Sample), TypeAdapter(Request)


def request_to_dict(request: Request) -> dict[str, Any]:
    """All fields, nested."""
    values = _fields(request)
    if values["resumed"] is not None:
        values["resumed"]["routes"] = _routes_to_dict(values["resumed"]["routes"])
    return values


def request_from_dict(data: Mapping[str, Any], images: Mapping[str, ShownTile] = _NONE) -> Request:
    """Inverse of `request_to_dict`. `images` are those that environments have shown, by hash."""
    request = _REQUEST.validate_python(data)
    if request.resumed is not None:
        request.resumed.routes = _routes_from_dict(request.resumed.routes)
    return replace(request, model_input=with_images(request.model_input, images))


def _fields(value: Request | Sample | Prompt) -> dict[str, Any]:
    """All fields, nested; per-token arrays as lists."""
    return asdict(value, dict_factory=_with_lists)


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: list(item) if isinstance(item, array) else item
        for name, item in items
        if name != "shown"  # of a `Content`: saved once for all (`hone.images.shown`)
    }


def sample_values(sample: Sample, known: Prompt) -> dict[str, Any]:
    """All fields, for a process that has the prompt `known`: the sample's prompt is left out where
    it is that one."""
    names = [field.name for field in fields(Sample)]
    values = {name: getattr(sample, name) for name in names}
    if sample.prompt is known:
        del values["prompt"]
    return values


def sample_of_values(values: Mapping[str, Any], known: Prompt) -> Sample:
    """Inverse of `sample_values`."""
    all_values: dict[str, Any] = {"prompt": known, **values}
    return Sample(**all_values)


def group_to_dict(group: Group) -> dict[str, Any]:
    """All fields, nested; the prompt once, and again in a sample only where that has its own."""
    samples = [sample_to_dict(sample, group.prompt) for sample in group.samples]
    return {"id": group.id, "prompt": _fields(group.prompt), "samples": samples}


def sample_to_dict(sample: Sample, known: Prompt) -> dict[str, Any]:
    """All fields, nested; the prompt only where it is not the prompt `known`. The times of turns
    are left out: they are of no use to who goes on, and differ between checkpoints that are equal
    else."""
    values = _fields(sample)
    if sample.prompt is known:
        del values["prompt"]
    for path, own in zip((values, *values["branches"]), (sample, *sample.branches), strict=True):
        path["routes"] = _routes_to_dict(own.routes)
        for turn in path["turns"]:
            del turn["policy_s"], turn["env_s"]
    return values


def sample_from_dict(
    data: Mapping[str, Any], known: Prompt, images: Mapping[str, ShownTile] = _NONE
) -> Sample:
    """Inverse of `sample_to_dict`. `images` are those that environments have shown, by hash."""
    sample = _SAMPLE.validate_python({"prompt": known, **data})
    for path in (sample, *sample.branches):
        path.routes = _routes_from_dict(path.routes)
        path.model_input = with_images(path.model_input, images)
    own = with_images(sample.prompt.model_input, images)
    if own is not sample.prompt.model_input:
        sample.prompt = replace(sample.prompt, model_input=own)
    return sample


def inputs_of(sample: Sample) -> Iterator[ModelInput]:
    """The inputs besides ids of a sample, on all of its paths."""
    yield sample.prompt.model_input
    for path in (sample, *sample.branches):
        yield path.model_input


def group_from_dict(data: Mapping[str, Any], images: Mapping[str, ShownTile] = _NONE) -> Group:
    """Inverse of `group_to_dict`. `images` are those that environments have shown, by hash."""
    prompt = _PROMPT.validate_python(data["prompt"])
    samples = [sample_from_dict(row, prompt, images) for row in data["samples"]]
    return Group(id=data["id"], prompt=prompt, samples=samples)


def _routes_to_dict(routes: Routes | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    plain = b64encode(routes.tobytes()).decode("ascii")
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "base64": plain}


def _routes_from_dict(plain: Any) -> Routes | None:
    if plain is None:
        return None
    dtype: np.dtype[np.integer[Any]] = np.dtype(plain["dtype"])
    return np.frombuffer(b64decode(plain["base64"]), dtype=dtype).reshape(plain["shape"])
