"""What listens does so at the address that is meant, and what is unpickled has shown a key."""

from __future__ import annotations

import ast
import pickle
import socket
from contextlib import closing
from pathlib import Path

import pytest

from hone.distributed.calls import Hub
from hone.distributed.listening import listen
from tests.ranks import ROOT

UNPICKLING = {
    "distributed/calls.py": "a Hub reads nothing of a connection before its key; `serve` reads "
    "what it has connected to",
    "distributed/channel.py": "messages between the processes of one run, over connections that "
    "their gloo group has made",
    "rewards/fork_server.py": "its parent's socket pair",
    "rewards/pool.py": "its child's socket pair",
    "rewards/worker.py": "its parent's pipe",
}
"""Each file that unpickles, and why nobody else can reach what it reads."""


def test_a_port_is_opened_at_one_address() -> None:
    with listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with listen("localhost") as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
    for elsewhere in ("192.0.2.1", "no host has this name"):
        with pytest.raises(OSError, match=f"no port can be opened at {elsewhere} "):
            listen(elsewhere)


def test_a_hub_listens_at_its_address_alone() -> None:
    with closing(Hub("127.0.0.2")) as hub:
        assert hub._listener.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", hub.address[1]), 60.0)


def test_every_place_that_unpickles_is_known() -> None:
    source = ROOT / "src" / "hone"
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if loads(path)}
    assert found == UNPICKLING.keys()


def loads(path: Path) -> bool:
    """Whether a file takes pickles apart: by `pickle.loads`, `pickle.load` or an Unpickler."""
    names = {name for name in ("loads", "load", "Unpickler") if hasattr(pickle, name)}
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("pickle", "cloudpickle", "dill")
        and node.attr in names
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
