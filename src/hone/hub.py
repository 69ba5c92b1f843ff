"""What the Hugging Face hub can give here: itself, the local cache of it, or nothing.

Where the hub cannot be reached, the libraries that read from it try for a minute and then blame
what they looked for; so whether it can is found out once, before they are called.
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

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from hone.errors import UserError
from hone.paths import must_be_local

__all__ = ["cache_alone", "config_of", "locate_model", "refusal", "unreachable"]

_CONNECT_S = 5.0
"""For all addresses of the hub together, and the time to resolve its name."""
_PORTS = {"http": 80, "https": 443}
_SOCKS_PORT = 1080

logger = logging.getLogger(__name__)


def locate_model(name: str, key: str) -> str:
    """What to load a model or tokenizer by that `key` names: a folder, or a hub name as it is, for
    which the folder of the local cache stands where the hub cannot be reached.

    Raises UserError where it is nowhere.
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
    """`config.json` of a hub name, from the local cache, or where it `may_fetch` from the hub; None
    where it is in neither."""
    is_local = not may_fetch or unreachable() is not None
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=is_local))
    except (OSError, ValueError):
        return None


def refusal(name: str) -> str | None:
    """Why the hub, which answers, does not give the `config.json` of a name, for people; None where
    it does, where that is in the local cache, and where the hub cannot be reached."""
    if config_of(name, may_fetch=False) is not None or unreachable() is not None:
        return None
    try:
        hf_hub_download(name, "config.json")
    except GatedRepoError:
        return "its owner grants access: accept the terms on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        return "there is no such model, or a private one, for which `hf auth login` is needed"
    except LocalEntryNotFoundError:  # the answer was lost on the way
        return None
    except EntryNotFoundError:
        return "it holds none, as no model of transformers does"
    except HFValidationError as error:
        return f"it is no name of a model ({error})"
    except OSError:  # what loads the model meets it again, and says it
        return None
    return None


@cache
def unreachable() -> str | None:
    """Why nothing can come from the hub, for people; None where it, or the proxy to it, answers.

    `HF_ENDPOINT`, `HF_HUB_OFFLINE` and the variables that name proxies are honoured. Takes five
    seconds at most, the first time.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    who, host, port = _next_hop(constants.ENDPOINT)
    answer: SimpleQueue[str | None] = SimpleQueue()
    # In a thread, since nothing limits how long a name is resolved.
    Thread(target=lambda: answer.put(_refusal(host, port)), daemon=True).start()
    try:
        refusal = answer.get(timeout=_CONNECT_S)
    except Empty:
        refusal = f"no answer in {_CONNECT_S:g} s"
    return None if refusal is None else f"{who} cannot be reached ({refusal})"


@contextmanager
def cache_alone() -> Generator[None]:
    """Inside, libraries that read from the hub look into their local cache at once."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _next_hop(endpoint: str) -> tuple[str, str, int]:
    """Who is connected to for the hub, in words, with host and port."""
    url, proxies = urlsplit(endpoint), getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(url.netloc):
        return endpoint, url.hostname or "", url.port or _PORTS.get(url.scheme, 443)
    via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = via.port or _PORTS.get(via.scheme or "http", _SOCKS_PORT)
    return f"the proxy {via.hostname}:{port} to {endpoint}", via.hostname or "", port


def _refusal(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return None


def _cached(name: str) -> str | None:
    """The folder of the local cache that holds a repository; None where there is none."""
    try:
        return snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
