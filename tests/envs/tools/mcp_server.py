"""A server of the Model Context Protocol, written with the standard library alone, for tests.

    python mcp_server.py [--stubborn] [--silent] [--deaf]

`handle` answers one message; the standard streams and HTTP carry it.
"""

import json
import os
import signal
import sys
import threading
import time

NAME = {"type": "string"}
TOOLS = [
    ("echo", {"text": NAME}),
    ("fail", {"text": NAME}),
    ("refuse", {"text": NAME}),
    ("pid", {}),
    ("meet", {"text": NAME}),
    ("parts", {}),
    ("structured", {}),
    ("hang", {}),
    ("die", {}),
]
MEETING = threading.Barrier(3)


def described(name, properties):
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema}


def page(cursor):
    """Tools come in pages of four."""
    start = int(cursor or 0)
    listed = {"tools": [described(*entry) for entry in TOOLS[start : start + 4]]}
    return listed | ({"nextCursor": str(start + 4)} if start + 4 < len(TOOLS) else {})


def called(name, arguments):
    text = arguments.get("text", "")
    if name == "fail":
        return {"content": [{"type": "text", "text": f"cannot {text}"}], "isError": True}
    if name == "meet":
        MEETING.wait(60)
    if name == "hang":
        time.sleep(600)
    if name == "die":
        os.write(2, b"the last words\n")
        os._exit(3)
    if name == "structured":
        return {"content": [], "structuredContent": {"sum": 3}}
    if name == "parts":
        return {
            "content": [
                {"type": "text", "text": "one"},
                {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "file:///x", "text": "two"}},
                {"type": "resource_link", "uri": "file:///y", "name": "three"},
            ]
        }
    return {"content": [{"type": "text", "text": str(os.getpid()) if name == "pid" else text}]}


def handle(message):
    """The answer to a message, or None for a notification."""
    method, params = message.get("method"), message.get("params") or {}
    if "id" not in message or method is None:
        return None
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        result = {"protocolVersion": "2025-03-26", "capabilities": {"tools": {}}, "serverInfo": {}}
        return answer | {"result": result}
    if method == "tools/list":
        return answer | {"result": page(params.get("cursor"))}
    if method == "tools/call" and params["name"] != "refuse":
        return answer | {"result": called(params["name"], params["arguments"])}
    return answer | {"error": {"code": -32602, "message": f"no {method} of {params}"}}


def main():
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = threading.Lock()

    def write(value):
        with lock:
            sys.stdout.write(f"{json.dumps(value)}\n")
            sys.stdout.flush()

    def answer(message):
        if (reply := handle(message)) is not None:
            write(reply)

    sys.stdout.write("a greeting that is no message\n")
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "tools/list":
            write({"jsonrpc": "2.0", "id": "theirs", "method": "ping"})
            write({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        if message.get("id") == "theirs":
            assert message["result"] == {}
        if "--deaf" in sys.argv and message.get("method") == "notifications/initialized":
            time.sleep(600)
        if "--silent" not in sys.argv:
            threading.Thread(target=answer, args=(message,), daemon=True).start()
    while "--stubborn" in sys.argv:
        time.sleep(1)


if __name__ == "__main__":
    main()
