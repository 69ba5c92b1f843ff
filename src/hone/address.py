"""Addresses of services: what is one, what may be wrong with it, and what its reward is called."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["address_problem", "is_address", "name_of_address", "names_code"]


def is_address(text: str) -> bool:
    """Whether the text is meant as the address of a service."""
    return text.lower().startswith(("http://", "https://"))


def names_code(fn: str) -> bool:
    """Whether a reward function is the user's own, `MODULE:NAME`, rather than a built-in or a
    service."""
    return ":" in fn and not is_address(fn)


def address_problem(address: str) -> str | None:
    """What is wrong with the form of an address, or None. Nothing is contacted, and what may be a
    secret in it is not repeated."""
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises where it is none
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
    """What the reward of a service is called: its host and its path, with `_` between the parts.

    `https://scores.example.org:8000/v1/get_reward?model=a` is `scores.example.org_v1_get_reward`.
    """
    parts = urlsplit(address)
    return re.sub(r"[^\w.-]+", "_", f"{parts.hostname}{parts.path}").strip("_")
