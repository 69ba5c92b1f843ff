"""What listens does so at the address that is meant, and what is unpickled has shown a key."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from hone.distributed.calls import Hub
from hone.distributed.listening import listen, on_loopback
from hone.distributed.processes import Processes
from hone.distributed.store import connect
from hone.errors import UserError
from tests.ports import listening, reserved_port
from tests.ranks import ROOT

FIRST = Processes(rank=0, world_size=2, local_rank=0, local_world_size=2)

LISTENING = {
    "distributed/listening.py": "at the address that the caller means",
    "distributed/spawn.py": "the store of a run on one host, on loopback",
    "tools/doctor/links.py": "groups for seconds, of processes that meet at a file: no store; "
    "gloo and NCCL listen where they do, and nothing of theirs is unpickled",
    "door/server.py": "what asks for turns of a model, at serve.host, by default loopback; of a "
    "request without a key nothing is read, and what is read is JSON",
    "observe/local_server.py": "metrics and reports to read, on loopback",
}
"""Each file that opens a port, or has torch open one, and where."""
UNPICKLING = {
    "tools/plan/short_runs.py": "pipes to its children, and the socket of a fork server in a "
    "folder of this user alone",
    "distributed/calls.py": "a Hub reads nothing of a connection before its key; `serve` reads "
    "what it has connected to",
    "distributed/channel.py": "messages that carry the signature of the run's key",
    "distributed/local.py": "its parent's pipe",
    "distributed/ray.py": "Ray's own messages, of those who have the token of this Ray: a Ray of "
    "this host has one of its own, that of cluster.address what the user gave it",
    "distributed/ray_trainers.py": "as ray.py, of cluster.address",
    "tools/doctor/machine.py": "pipes to its children",
    "images/pool.py": "nothing: a worker, which decodes what strangers have made, answers in JSON",
    "images/worker.py": "its parent's socket pair",
    "models/manifest.py": "nothing: how storages are told from each other",
    "rewards/fork_server.py": "its parent's socket pair",
    "rewards/pool.py": "its child's socket pair",
    "rewards/worker.py": "its parent's pipe",
    "weights/buckets.py": "nothing: how storages are told from each other",
}
"""Each file that unpickles, or uses what does, and why nobody else can reach what it reads."""

OPENS = {"TCPStore", "create_server", "bind", "listen", "start_server", "init_process_group"}
OPENS |= {"HTTPServer", "ThreadingHTTPServer", "TCPServer", "ThreadingTCPServer", "Listener"}
OPENS |= {"Server"}  # uvicorn's
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
BY_PICKLES = {"multiprocessing", "ray", "rpc"}
"""Modules whose messages are pickles."""


def test_a_port_is_opened_at_one_address() -> None:
    with listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match=f"port {taken} cannot be opened at 127.0.0.1 "):
            listen("127.0.0.1", taken)
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


def test_without_a_launcher_the_first_process_serves_at_MASTER_ADDR_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        store = connect(FIRST)
        connect(FIRST).set("key", "of the same store")
        assert store.get("key") == b"of the same store"
        assert {host for host, at in listening() if at == port} == {"127.0.0.3"}
        monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
        with pytest.raises(UserError, match=r"at MASTER_ADDR .* cannot be opened at 192\.0\.2\.1"):
            connect(FIRST)


def test_groups_of_one_host_take_loopback_unless_the_user_names_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with on_loopback():
        named = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        assert named == ("lo", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_every_place_that_listens_is_known() -> None:
    assert files_with(opens) == LISTENING.keys()


def test_every_place_that_unpickles_is_known() -> None:
    assert files_with(unpickles) == UNPICKLING.keys()


def test_what_unpickles_is_found() -> None:
    for line in (
        "dist.all_gather_object(values, value)",
        "from torch.distributed import broadcast_object_list",
        "pickle.loads(message)",
        "from pickle import loads",
        "pickle.Unpickler(file)",
        "import multiprocessing.connection",
        "from multiprocessing import Pipe",
        "import cloudpickle",
        "from torch.distributed import rpc",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ):
        assert any(map(unpickles, ast.walk(ast.parse(line)))), line
    for line in (
        "pickle.dumps(value)",
        "np.load(path)",
        "torch.load(path, weights_only=True)",
        "orjson.loads(message)",
        "from pickle import PickleBuffer",
        "from hone.distributed.ray import join",
    ):
        assert not any(map(unpickles, ast.walk(ast.parse(line)))), line


def test_what_listens_is_found() -> None:
    for line in ("dist.TCPStore(host, 0, is_master=True)", "server.listen(5)", "s.bind(place)"):
        assert any(map(opens, ast.walk(ast.parse(line)))), line
    for line in ("dist.TCPStore(host, 1)", "dist.init_process_group('gloo', store=store)"):
        assert not any(map(opens, ast.walk(ast.parse(line)))), line


def files_with(is_one: Callable[[ast.AST], bool]) -> set[str]:
    source = ROOT / "src" / "hone"
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(map(is_one, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }


def opens(node: ast.AST) -> bool:
    """Whether a call opens a port. A store does where it is the master, and torch serves one of its
    own for a group that is given none; `inspect.Signature.bind` opens nothing."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.ClassDef) and any(name(base) in OPENS for base in node.bases)
    given = {keyword.arg for keyword in node.keywords}
    match name(node.func):
        case "TCPStore":
            return "is_master" in given or len(node.args) > 3
        case "init_process_group":
            return "store" not in given
        case "bind":
            return "signature" not in ast.unparse(node.func)
        case "listen":
            return isinstance(node.func, ast.Attribute)
        case found:
            return found in OPENS


def unpickles(node: ast.AST) -> bool:
    """Whether a node takes pickles apart, or brings in what does."""
    match node:
        case ast.Import(names=names):
            found = {part for alias in names for part in alias.name.split(".")}
            return bool(found & (BY_PICKLES | PICKLERS - {"pickle"}))
        case ast.ImportFrom(module=str(module), names=names):
            imported = {alias.name for alias in names}
            parts = set() if module.startswith("hone.") else {*module.split("."), *imported}
            reads = module in PICKLERS and imported & {"load", "loads", "Unpickler"}
            return bool(reads or parts & (BY_PICKLES | OBJECT_COLLECTIVES))
        case ast.Attribute(value=ast.Name(id=module), attr="load" | "loads" | "Unpickler"):
            return module in PICKLERS
        case ast.Attribute(attr=attribute):
            return attribute in OBJECT_COLLECTIVES
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load"), keywords=given):
            flags = {k.arg: getattr(k.value, "value", None) for k in given}
            if module == "torch":
                return flags.get("weights_only") is not True
            return module in ("np", "numpy") and bool(flags.get("allow_pickle"))
    return False


def name(node: ast.AST) -> str:
    """The last part of what is called."""
    return getattr(node, "attr", getattr(node, "id", ""))
