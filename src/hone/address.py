"""Addresses of services and names of code: how to recognise, check and name them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["address_problem", "is_address", "module_file", "name_of_address", "names_code"]


def is_address(text: str) -> bool:
    """Whether the text is meant as the address of a service."""
    return text.lower().startswith(("http://", "https://"))


def names_code(fn: str) -> bool:
    """Whether a reward function is the user's own, `MODULE:NAME`, rather than a built-in or a
    service."""
    return ":" in fn and not is_address(fn)


def module_file(spec: str) -> Path:
    """The file of `path/to/file.py:name`, or of `package.module:name` in the current folder; it
    need not exist."""
    location = spec.rpartition(":")[0]
    is_file = location.endswith(".py")
    return Path(location) if is_file else Path(*location.split(".")).with_suffix(".py")


def address_problem(address: str) -> str | None:
    """What is wrong with the form of an address, or None. Nothing is contacted, and the text never
    repeats a possible secret from the address."""
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError as error:
        return f"it is no address: {error}"
    if not is_address(address) or not parts.hostname:
        return "write it as http://HOST:PORT/PATH or https://HOST/PATH"
    if parts.username is not None or parts.password is not None:
        return (
            "it holds a user name or a password, which would be written into the run folder; let "
            "the service ask for none, or put a proxy that adds them before it"
        )
    if parts.fragment or re.search(r"[^!-~]", address):
        return "it has a '#', a blank or a letter that is not of ASCII; write it percent-encoded"
    return None


def name_of_address(address: str) -> str:
    """The name of a service's reward: its host and its path, joined by `_`.

    `https://scores.example.org:8000/v1/get_reward?model=a` is `scores.example.org_v1_get_reward`.
    """
    parts = urlsplit(address)
    return re.sub(r"[^\w.-]+", "_", f"{parts.hostname}{parts.path}").strip("_")
