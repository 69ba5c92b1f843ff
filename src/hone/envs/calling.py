"""Calls of code that users wrote: whether arguments fit, and results that may be awaitable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.errors import did_you_mean

__all__ = ["awaited", "check_args"]


def check_args(
    path: str, found: Callable[..., Any], args: Mapping[str, Any], given: Sequence[str] = ()
) -> None:
    """Raise ValueError where `found` does not take `args` and the arguments named in `given`."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # written in C: the call itself shows it
    try:
        signature.bind(**{**dict.fromkeys(given), **args})
    except TypeError as error:
        names = [name for name in signature.parameters if name not in given]
        hint = next((did_you_mean(name, names) for name in args if name not in names), "")
        raise ValueError(
            f"env.args do not fit '{path}', which takes {', '.join(names) or 'nothing'}: "
            f"{error}.{hint}"
        ) from None


async def awaited(value: Any) -> Any:
    """The value, or the result of what it awaits where it is an awaitable."""
    return await value if inspect.isawaitable(value) else value
