"""Values of a `config.json` that no model can have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hone.families.spec import DIVIDED_FIELDS, RECURRENT_DIVIDED_FIELDS

__all__ = ["impossible_values"]

_DTYPE = re.compile(r"b?float16|float(32|64|8_\w+)?|half|double")
"""Names of torch dtypes for weights."""


def impossible_values(config: Mapping[str, Any]) -> Iterator[str]:
    """Values that no model can have, as `holds key = value`."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        yield f"holds text_config = {text!r}"
        return
    others = ("hidden_size", "num_hidden_layers", "vocab_size")
    for key in (*DIVIDED_FIELDS, *RECURRENT_DIVIDED_FIELDS, *others):
        size = text.get(key)
        if size is not None and (type(size) is not int or size < 1):
            yield f"holds {key} = {size!r}, where a whole number above 0 stands"
    for part in (config,) if text is config else (config, text):
        key = "torch_dtype" if part.get("dtype") is None else "dtype"
        name = part.get(key)
        if isinstance(name, str) and not _DTYPE.fullmatch(name):
            yield f"holds {key} = {name!r}, where transformers takes {_dtype_near(name)}"


def _dtype_near(name: str) -> str:
    """The dtype that a misspelt name probably means."""
    bare = name.removeprefix("torch.")
    found = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(bare, bare)
    return repr(found) if _DTYPE.fullmatch(found) else "'bfloat16', 'float16' or 'float32'"
