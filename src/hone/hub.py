"""Access to the Hugging Face hub: the hub itself, its local cache, or neither.

Where the hub cannot be reached, the libraries that read from it try for a minute and then report
the repository as missing. So this module checks once, before they are called, whether it answers.
What asks the hub is imported where it is called: it costs a quarter of a second, and every command
imports this module.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

from hone.errors import UserError
from hone.paths import must_be_local

__all__ = ["cache_alone", "config_of", "locate_model", "refusal", "unreachable"]

_CONNECT_S = 5.0
"""Limit for resolving the hub's name and connecting to any of its addresses, in seconds."""
_PORTS = {"http": 80, "https": 443}
_SOCKS_PORT = 1080

logger = logging.getLogger(__name__)


def locate_model(name: str, key: str) -> str:
    """The folder or hub name from which to load the model or tokenizer `name`, the value of `key`.
    Where the hub cannot be reached, a hub name becomes its folder in the local cache.

    Raises UserError where the model is neither here nor reachable.
    """
    if must_be_local(name) or Path(name).exists() or (reason := unreachable()) is None:
        return name
    folder = _cached(name)
    if folder is None:
        raise UserError(
            f"{key}={name!r} is no folder here, it is not in the local cache of the Hugging Face "
            f"hub, and {reason}. Connect this machine, or name a folder that holds the model."
        )
    logger.info("%s comes from the local cache: %s", name, reason)
    return folder


def config_of(name: str, *, may_fetch: bool) -> Path | None:
    """`config.json` of a hub name, from the local cache, or with `may_fetch` from the hub; None
    where neither has it."""
    from huggingface_hub import hf_hub_download

    is_local = not may_fetch or unreachable() is not None
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=is_local))
    except (OSError, ValueError):
        return None


def refusal(name: str) -> str | None:
    """Why the hub refuses the `config.json` of a model, as a part of a message. None where the hub
    or the local cache has the file, and where the hub cannot be reached."""
    if config_of(name, may_fetch=False) is not None or unreachable() is not None:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        hf_hub_download(name, "config.json")
    except GatedRepoError:
        return "its owner grants access: accept the terms on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        return "there is no such model, or a private one, for which `hf auth login` is needed"
    except LocalEntryNotFoundError:  # the answer was lost on the way
        return None
    except EntryNotFoundError:
        return "the repository has no such file, which every model of transformers has"
    except HFValidationError as error:
        return f"it is no name of a model ({error})"
    except OSError:  # loading the model will raise it again, and report it
        return None
    return None


@cache
def unreachable() -> str | None:
    """Why the hub cannot be reached, as a part of a message; None where the hub, or the proxy to
    it, accepts a connection.

    `HF_ENDPOINT`, `HF_HUB_OFFLINE` and proxy variables are honoured. The first call takes at most
    five seconds.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    who, host, port = _next_hop(constants.ENDPOINT)
    answer: SimpleQueue[str | None] = SimpleQueue()
    # In a thread, since resolving a name has no timeout.
    Thread(target=lambda: answer.put(_connection_error(host, port)), daemon=True).start()
    try:
        problem = answer.get(timeout=_CONNECT_S)
    except Empty:
        problem = f"no answer in {_CONNECT_S:g} s"
    return None if problem is None else f"{who} cannot be reached ({problem})"


@contextmanager
def cache_alone() -> Generator[None]:
    """Let libraries that read from the hub use only their local cache in the block."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _next_hop(endpoint: str) -> tuple[str, str, int]:
    """The hub, or the proxy to it: a description, the host and the port."""
    url, proxies = urlsplit(endpoint), getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(url.netloc):
        return endpoint, url.hostname or "", url.port or _PORTS.get(url.scheme, 443)
    via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = via.port or _PORTS.get(via.scheme or "http", _SOCKS_PORT)
    return f"the proxy {via.hostname}:{port} to {endpoint}", via.hostname or "", port


def _connection_error(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return None


def _cached(name: str) -> str | None:
    """The folder of a repository in the local cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
