"""Facts about vLLM, without importing it."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "LOWEST_TEMPERATURE",
    "OLDEST",
    "TOO_NEW",
    "VERSIONS",
    "VLLM_EXPERTS",
    "cpu_head_dims",
    "is_served",
]

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and would then sample from another distribution."""
OLDEST, TOO_NEW = (0, 24), (0, 33)
"""Versions that are served: from the first, below the second."""
VERSIONS = f"from {'.'.join(map(str, OLDEST))}, below {'.'.join(map(str, TOO_NEW))},"

VLLM_EXPERTS = ("qwen3_moe",)
"""Families with experts whose weights a sync finds in vLLM."""


def is_served(version: str) -> bool:
    """Whether engines run on this version; not on builds from source without tags."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and OLDEST <= (int(major), int(minor)) < TOO_NEW


def cpu_head_dims() -> list[int]:
    """Head sizes that the installed vLLM computes on a CPU, as its source lists them; empty where
    it is not known."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    file = Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"def get_supported_head_sizes\(.*?return (\[[\d,\s]+\])", text, re.DOTALL)
    return [] if found is None else json.loads(found[1])
