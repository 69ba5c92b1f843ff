"""Record of the versions and devices of a run."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch

from hone.extras import installed_version
from hone.observe.whole_file import write_whole
from hone.version import __version__

__all__ = ["save_environment"]

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "triton",
    "flash-attn-4",
    "torchao",
    "vllm",
    "ray",
)


def save_environment(path: Path, device: torch.device, num_processes: int) -> None:
    """Write versions and devices as JSON: `{"torch": "2.12.0", "device": "NVIDIA H200", ...}`.
    `device` is that of this process; the others are assumed to have the same. Raises DiskError."""
    versions = {name: installed_version(name) for name in _PACKAGES}
    on_gpu = device.type == "cuda"
    record = {
        "hone": __version__,
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version is not None},
        **({"cuda": torch.version.cuda} if on_gpu else {}),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": num_processes,
        "system": platform.platform(),
    }
    write_whole(path, json.dumps(record, indent=2), "run.dir")
