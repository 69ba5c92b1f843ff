"""Packages that only some settings need: whether they are here, and what to do when they are not.

They are imported where they are used. One that is installed may still be broken (a wheel for
another system, a dependency that was removed), which must be told apart from one that is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hone.config.errors import UserError

__all__ = ["import_extra", "is_installed"]


def is_installed(package: str) -> bool:
    """Whether a package can be found; nothing of it is run."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # imported already, by something that gave it no spec
        return True
    # A folder of that name in the working directory (wandb leaves one) is found without origin.
    return spec is not None and spec.origin is not None


def import_extra(package: str, *, install: str, needed_by: str, module: str | None = None) -> Any:
    """Import `module` (default: the package itself).

    `install` is what pip is told to install, `needed_by` the subject of the message. Raises
    UserError where the package is missing or cannot be imported.
    """
    if not is_installed(package):
        raise UserError(
            f"{needed_by} needs the `{package}` library, which is not installed: "
            f"pip install '{install}'"
        )
    try:
        return importlib.import_module(module or package)
    except (ImportError, AttributeError, OSError) as error:
        raise UserError(
            f"{needed_by} needs the `{package}` library, which is installed but broken: {error}. "
            f"Install it anew: pip install --force-reinstall '{install}'"
        ) from error
