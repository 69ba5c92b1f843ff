"""Tools of servers of the Model Context Protocol, over standard streams and HTTP."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from hone.envs.session import End
from hone.envs.tools.load import make_tools
from hone.envs.tools.mcp import McpServer
from hone.envs.tools.tool import ToolError, ToolLostError
from hone.errors import UserError
from tests.envs.tools import mcp_server
from tests.envs.tools.test_session import action, add, call, contents, error, row

SERVER = f"mcp:{sys.executable} {Path(mcp_server.__file__)}"
DEADLINE_S = 60.0
NAMES = [name for name, _ in mcp_server.TOOLS]


class Handler(BaseHTTPRequestHandler):
    """Streamable HTTP around `mcp_server.handle`: answers are JSON or a stream of events."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        server = self.server
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((message.get("method"), dict(self.headers)))
        if message.get("id") == "theirs":
            server.pongs.append(message)
        if server.status != 200:
            return self.reply(server.status, b"it does not want to", "text/plain")
        if message.get("method") not in (None, "initialize"):
            assert self.headers["Mcp-Session-Id"] == "abc"
            assert self.headers["MCP-Protocol-Version"] == "2025-03-26"
        if (answer := mcp_server.handle(message)) is None:
            return self.reply(202, b"", "text/plain")
        if not server.streams:
            return self.reply(200, json.dumps(answer).encode(), "application/json")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Mcp-Session-Id", "abc")
        self.send_header("Connection", "close")
        self.end_headers()
        ping = {"jsonrpc": "2.0", "id": "theirs", "method": "ping"}
        split = json.dumps(answer, indent=1).replace("\n", "\ndata: ")
        self.wfile.write(f": a comment\r\n\r\ndata: {json.dumps(ping)}\r\n\r\n".encode())
        self.wfile.write(f"event: message\ndata: {split}\n\n".encode())

    def do_DELETE(self):
        self.server.seen.append(("DELETE", dict(self.headers)))
        self.reply(200, b"", "text/plain")

    def reply(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Mcp-Session-Id", "abc")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(*, streams):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.pongs, server.streams, server.status = [], [], streams, 200
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=[False, True], ids=["json", "events"])
def http_server(request):
    with serving(streams=request.param) as server:
        yield server


def spec_of(server):
    return f"mcp:http://127.0.0.1:{server.server_port}/mcp?key=1"


def load(spec):
    return {"add": add}[spec]


@pytest.fixture(params=["stdio", "json", "events"])
def spec(request):
    if request.param == "stdio":
        yield SERVER
    else:
        with serving(streams=request.param == "events") as server:
            yield spec_of(server)


def played(specs, *actions, deadline_s=DEADLINE_S):
    async def play():
        tools = make_tools(specs, load=load, deadline_s=deadline_s)
        session = tools.session(tool_format="hermes")
        await session.start(row())
        try:
            return [await session.step(each) for each in actions]
        finally:
            await session.close()

    return asyncio.run(play())


def test_tools_of_a_server_are_listed_with_functions(spec):
    schemas = make_tools([spec, "add"], load=load).schemas
    assert [x["function"]["name"] for x in schemas] == ["add", *NAMES]
    assert schemas[1] == {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "The tool echo.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }


def test_calls_reach_the_server_at_the_same_time(spec):
    """Each call of `meet` waits for two others."""
    turn = action(
        *(call("meet", text=text) for text in "abc"),
        call("echo", text="\u00e9\n"),
        call("add", a=1),
    )
    (messages,) = played([spec, "add"], turn)
    assert contents(messages) == ["a", "b", "c", "\u00e9\n", "2"]


def test_what_a_server_says_of_a_failed_call_is_the_answer(spec):
    (messages, end) = played(
        [spec],
        action(call("fail", text="fly"), call("refuse", text="x"), call("echo", txt="x")),
        action(),
    )
    assert error(messages[0]["content"]) == "cannot fly"
    assert error(messages[1]["content"]).startswith("no tools/call of")
    assert "Did you mean 'text'" in error(messages[2]["content"])
    assert isinstance(end, End)
    assert end.metrics["tools/errors_raised"] == 2


def test_parts_that_are_no_text_are_named(spec):
    (messages,) = played([spec], action(call("parts"), call("structured")))
    assert contents(messages) == [
        "one\n[image of type image/png, not shown]\ntwo\n[three: file:///y]",
        '{"sum": 3}',
    ]


def test_each_session_has_a_process_of_its_own_which_ends_with_it():
    turn = action(call("pid"))
    (first,), (second,) = played([SERVER], turn), played([SERVER], turn)
    pids = [int(messages[0]["content"]) for messages in (first, second)]
    assert pids[0] != pids[1]
    assert not any(map(psutil.pid_exists, pids))


def test_a_server_that_ignores_the_end_of_its_input_and_the_signal_is_killed(monkeypatch):
    monkeypatch.setattr("hone.envs.tools.mcp_stdio._PATIENCE_S", 0.1)
    (messages,) = played([f"{SERVER} --stubborn"], action(call("pid")))
    assert not psutil.pid_exists(int(messages[0]["content"]))


def test_a_server_that_dies_fails_the_episode_with_its_last_words():
    with pytest.raises(ToolLostError, match=r"has ended; its last lines were: the last words"):
        played([SERVER], action(call("hang"), call("die")))


def test_an_answer_after_the_deadline_fails_the_episode(spec):
    server = McpServer(spec, deadline_s=DEADLINE_S)
    server.start()
    try:
        server._connection._deadline_s = 0.2
        (hang,) = (x for x in server.tools(server.schemas()) if x.name == "hang")
        with pytest.raises(ToolLostError, match=r"did not answer tools/call in 0\.2 s"):
            hang.function()
    finally:
        server.close()


def test_a_server_that_never_answers_is_refused_at_the_start():
    with pytest.raises(UserError, match=r"did not answer initialize in 0\.2 s"):
        make_tools([f"{SERVER} --silent"], load=load, deadline_s=0.2)
    assert not [x for x in psutil.Process().children() if "--silent" in " ".join(x.cmdline())]


def test_a_server_that_does_not_read_fails_calls_at_their_deadline():
    """Each of the messages is longer than what the pipe to the server holds."""
    server = McpServer(f"{SERVER} --deaf", deadline_s=DEADLINE_S)
    server.start()
    process = psutil.Process(server._connection._process.pid)
    server._connection._deadline_s = 0.1
    try:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(server._call, "echo", text="x" * 2**20) for _ in range(2)]
            errors = [str(call.exception(DEADLINE_S)) for call in calls]
        assert any("did not answer tools/call in 0.1 s" in error for error in errors), errors
        with pytest.raises(ToolLostError, match="takes no messages: it did not read an earlier"):
            server._call("echo", text="x")
    finally:
        process.kill()
        server.close()


DRIPS = {
    "status": "HTTP/1.1 2",
    "headers": "HTTP/1.1 200 OK\r\nContent-Type: x",
    "json": "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n",
    "chunks": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;",
    "events": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ",
    "refusal": "HTTP/1.1 500 No\r\n\r\n",
}


@pytest.mark.parametrize("begun", DRIPS.values(), ids=DRIPS)
def test_a_server_that_sends_slowly_has_one_deadline(begun):
    """Each byte comes long before the deadline, and there are enough for 5 seconds."""
    stop = threading.Event()

    def drip(listener):
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            sock.recv(2**16)
            sock.sendall(begun.encode())
            for _ in range(250):
                if stop.wait(0.02):
                    return
                sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        server = McpServer(f"mcp:http://127.0.0.1:{listener.getsockname()[1]}/", deadline_s=0.2)
        try:
            with pytest.raises(ToolLostError, match=r"did not answer initialize in 0\.2 s"):
                server.start()
        finally:
            stop.set()
            thread.join()


def test_the_length_of_a_message_is_bounded(spec, monkeypatch):
    monkeypatch.setattr("hone.envs.tools.mcp_http._MAX_BYTES", 5000)
    monkeypatch.setattr("hone.envs.tools.mcp_stdio._MAX_LINE", 5000)
    monkeypatch.setattr("hone.envs.tools.mcp_stdio._PATIENCE_S", 0.1)
    with pytest.raises(ToolLostError, match="more than 5,000 bytes"):
        played([spec], action(call("echo", text="x" * 6000)))


def test_http_has_a_session_that_is_ended(http_server):
    http_server.seen.clear()
    played([spec_of(http_server)], action(call("echo", text="x")))
    methods = [method for method, _ in http_server.seen if method]
    pages = ["tools/list"] * 3
    assert methods == [
        *("initialize", "notifications/initialized", *pages, "DELETE"),
        *("initialize", "notifications/initialized", "tools/call", "DELETE"),
    ]
    assert http_server.seen[-1][1]["Mcp-Session-Id"] == "abc"
    if http_server.streams:
        assert {json.dumps(pong["result"]) for pong in http_server.pongs} == {"{}"}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("mcp:", "names no server"),
        ("mcp:'x", "is no command of a shell"),
        ("mcp:there-is-no-such-command x", "cannot be started"),
        (f"mcp:{sys.executable} -c ''", "has ended|takes no messages"),
        ("mcp:http:///mcp", "names no host"),
        ("mcp:http://127.0.0.1:x/", "Port could not be cast"),
    ],
)
def test_a_server_that_cannot_be_reached_is_refused(spec, text):
    with pytest.raises(UserError, match=text):
        make_tools([spec], load=load)


def test_a_refusal_of_http_is_shown(http_server):
    http_server.status = 401
    with pytest.raises(UserError, match=r"answered initialize with 401 .*it does not want to"):
        make_tools([spec_of(http_server)], load=load)


def test_a_port_where_nothing_listens_is_refused(http_server):
    spec = spec_of(http_server)
    http_server.shutdown()
    http_server.server_close()
    with pytest.raises(UserError, match="cannot be reached"):
        make_tools([spec], load=load)


def test_names_must_be_unique():
    with pytest.raises(UserError, match=r"env\.tools names 'add' twice"):
        make_tools(["add", "add"], load=load)
    with pytest.raises(UserError, match="two tools have the name 'echo'"):
        make_tools([SERVER, f"{SERVER} "], load=load)


def test_a_class_is_no_tool():
    with pytest.raises(UserError, match="is a class"):
        make_tools(["x"], load=lambda spec: dict)


def test_a_server_is_killed_with_its_worker(tmp_path):
    """It stays in the worker's process group, which the pool kills."""
    script = (
        "import sys; from hone.envs.tools.mcp import McpServer\n"
        f"server = McpServer({SERVER!r} + ' --stubborn', deadline_s=60); server.start()\n"
        "(pid,) = (x for x in server.tools(server.schemas()) if x.name == 'pid')\n"
        "print(pid.function(), flush=True); sys.stdin.read()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with worker:
        server = psutil.Process(int(worker.stdout.readline()))
        os.killpg(worker.pid, 9)
    psutil.wait_procs([server], timeout=DEADLINE_S)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


OFFICIAL = '''
import sys
try:
    from mcp.server.mcpserver import MCPServer as Server  # version 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # version 1
server = Server("sums")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
async def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else None
    if port is None:
        server.run("stdio")
    else:
        try:
            server.run("streamable-http", port=port)
        except TypeError:
            server.settings.port = port
            server.run("streamable-http")
'''


@pytest.fixture(scope="module", params=["mcp>=2,<3", "mcp>=1.9,<2"])
def official(request, tmp_path_factory):
    """A Python with the official package, and a server written with it."""
    folder = tmp_path_factory.mktemp("official")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", request.param]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"{request.param} cannot be installed")
    (folder / "server.py").write_text(OFFICIAL)
    return python, folder / "server.py"


def answers_of_official(spec):
    (messages, end) = played(
        [spec], action(call("add", a=2, b=3), call("add", a=1), call("fail", text="so")), action()
    )
    assert contents(messages)[:2] == ["5", "2"]
    assert "Error executing tool fail" in error(messages[2]["content"])
    assert end.metrics["tools/errors"] == 1


@pytest.mark.slow
def test_the_official_server_over_standard_streams(official):
    answers_of_official("mcp:{} {}".format(*official))


@pytest.mark.slow
def test_the_official_server_over_http(official):
    python, script = official
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as free:
        port = free.server_port
    process = subprocess.Popen([python, script, str(port)])
    try:
        spec = f"mcp:http://127.0.0.1:{port}/mcp"
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                McpServer(spec, deadline_s=DEADLINE_S).start()
                break
            except ToolLostError:
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.1)
        answers_of_official(spec)
    finally:
        process.kill()
        process.wait()


def test_errors_of_a_server_are_those_of_the_protocol(spec):
    server = McpServer(spec, deadline_s=DEADLINE_S)
    with pytest.raises(ToolLostError, match="is not running"):
        server.schemas()
    server.start()
    try:
        (refuse,) = (x for x in server.tools(server.schemas()) if x.name == "refuse")
        with pytest.raises(ToolError, match="no tools/call of"):
            refuse.function(text="x")
    finally:
        server.close()
    server.close()
