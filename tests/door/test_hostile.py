"""Requests that nobody sends by mistake: each is answered, none by an error of the server."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from hone.door.calls import calls_reader, decoded
from hone.door.nesting import MAX_DEPTH, is_deep
from tests.door.served import TOOLS, Served, SessionClient, chat_body, serving, user

CHAT = "/v1/chat/completions"
HALF = '{"a": "\\ud800"}'
"""Arguments of a call with a half of a surrogate pair, which no UTF-8 has."""


@pytest.fixture
def served(caplog: pytest.LogCaptureFixture) -> Generator[Served]:
    with serving(lambda _: f"<call>add {HALF}</call>") as found:
        yield found
    assert not caplog.records, "uvicorn logs errors of the server"


def nested(depth: int) -> Any:
    """Lists in each other."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 5000])
def test_depth_is_that_of_containers_in_each_other(depth: int) -> None:
    for value in (nested(depth), [1, {}, nested(depth - 1)] if depth > 1 else {}):
        assert is_deep(value) == (depth > MAX_DEPTH)
    assert not is_deep("x")


FIELDS: dict[str, Any] = {
    "tools": lambda deep: {"tools": [TOOLS[0] | {"function": {"name": "a", "parameters": deep}}]},
    "arguments of a template": lambda deep: {"chat_template_kwargs": deep},
    "arguments of a call": lambda deep: {
        "messages": [
            user("x"),
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": deep}}]},
            user("y"),
        ]
    },
    "content": lambda deep: {"messages": [user("x") | {"content": deep}]},
    "tool_choice": lambda deep: {"tool_choice": deep},
    "n": lambda deep: {"n": deep},
    "temperature": lambda deep: {"temperature": deep},
    "unused": lambda deep: {"metadata": deep},
}


@pytest.mark.parametrize("name", FIELDS)
def test_deep_values_are_refused_wherever_they_are(name: str, served: Served) -> None:
    for depth in (150, 400, 600, 950, 1010):
        deep = {"x": "DEEP"}
        body = json.dumps(chat_body(user("x")) | FIELDS[name](deep))
        text = body.replace('"DEEP"', "[" * depth + "]" * depth).encode()
        reply = served.send(CHAT, text)
        assert reply.status == 400, (depth, reply.body)
    body = json.dumps(chat_body(user("x")) | FIELDS[name]({"x": "DEEP"}))
    depth = MAX_DEPTH - 10
    reply = served.send(CHAT, body.replace('"DEEP"', "[" * depth + "]" * depth).encode())
    assert reply.status < 500


def test_a_call_that_no_json_can_hold_does_not_end_an_episode(served: Served) -> None:
    """The policy has written it, and each API answers it."""
    client = served.open()
    tools = {CHAT: TOOLS, "/v1/messages": [{"name": "add", "input_schema": {}}]}
    for path, own in tools.items():
        for streams in (False, True):
            body = {"messages": [user("x")], "max_tokens": 99, "tools": own, "stream": streams}
            reply = client.send(path, body)
            assert reply.status == 200, path
            assert b"ud800" in reply.body
    answer = client.chat(user("x"), tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "no"}
    client.chat(user("x"), answer, result, tools=TOOLS)
    assert client.end()["num_turns"] == 6


def test_arguments_are_objects_where_they_can_be_written() -> None:
    assert decoded('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert decoded('{"a": "\\\\ud800"}') == {"a": "\\ud800"}
    assert decoded(HALF) == HALF
    deep = '{"a": ' + "[" * 500 + "]" * 500 + "}"
    assert decoded(deep) == deep


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": "\\u00e9"}}', '{"a": "\u00e9"}'),
        (f'{{"name": "add", "arguments": {HALF}}}', None),
        ('{"name": "\\ud800", "arguments": {}}', None),
        ('{"name": "add", "arguments": {"a": ' + "[" * 500 + "]" * 500 + "}}", None),
    ],
)
def test_calls_are_read_where_they_can_be_written(call: str, arguments: str | None) -> None:
    read, why = calls_reader(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> '
        "{{ tools }} hermes"
    )
    assert read is not None, why
    text = f"<tool_call>\n{call}\n</tool_call>"
    answer = read(text, TOOLS, "")
    assert [made.arguments for made in answer.calls] == ([] if arguments is None else [arguments])
    assert answer.content == (text if arguments is None else "")


BODIES: list[tuple[str, bytes, str]] = [
    ("/inference/v1/generate", b'{"token_ids": [9223372036854775807]}', "token_ids"),
    ("/inference/v1/generate", b'{"token_ids": [18446744073709551615]}', "token_ids"),
    ("/inference/v1/generate", b'{"token_ids": [1%s]}' % (b"0" * 400), ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "seed": 1%s}' % (b"0" * 30), "seed"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}', ""),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', ""),
    (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x", "name": "%s"}]}' % (b"x" * 2000),
        "messages[0].name",
    ),
    (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": "%s"}}'
        % (b"x" * 70_000),
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), BODIES, ids=map(str, range(len(BODIES))))
def test_numbers_and_texts_without_end_are_refused(
    path: str, body: bytes, field: str, served: Served
) -> None:
    reply = served.send(path, body)
    assert reply.status == 400
    assert (reply.json["error"]["param"] or "") == field


def test_a_reward_is_finite(served: Served) -> None:
    client = served.open()
    for body in (
        b'{"parts": {"a": 1e308, "b": 1e308}}',
        b'{"reward": NaN}',
        json.dumps({"reward": 1, "parts": {f"{n}": 0 for n in range(300)}}).encode(),
    ):
        assert client.send("/reward", body).status == 400
    assert client.send("/end", {"detail": "x" * 10_001}).status == 400
    assert client.end()["reward"] is None


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1//models", "/v1/models/", "/v1/models%2F", "/V1/models"),
        *("/sessions/", "/sessions/a%2Fb/v1/models", "/%ff%fe", "/v1/../v1/models", "/*"),
        pytest.param("/" + "a" * 60_000, id="long"),
    ],
)
def test_a_path_is_a_route_or_none(path: str, served: Served) -> None:
    for method in ("GET", "HEAD", "OPTIONS", "POST"):
        reply = served.send(path, method=method, host="evil.example")
        assert reply.status == 404, method
        assert "evil" not in str(reply.headers), "nobody is sent to where a request says"


def test_a_head_of_any_length_is_bounded(served: Served) -> None:
    try:
        status = served.send("/v1/models", method="GET", x_long="x" * 2**22).status
    except ConnectionError:  # the rest of the head is not read, and the answer may be lost
        status = 400
    assert status == 400
    assert served.send("/v1/models", method="GET").status == 200


def test_a_page_in_a_browser_reads_and_asks_nothing(served: Served) -> None:
    """A page may send a request without key to any address, and one with a key after it has been
    allowed to: by an answer to OPTIONS with `Access-Control` headers."""
    origin = {"origin": "https://evil.example", "host": "evil.example"}
    asks = {"access_control_request_method": "POST"}
    asks |= {"access_control_request_headers": "authorization"}
    replies = [
        served.send(CHAT, method="OPTIONS", key="", **origin, **asks),
        served.send(CHAT, chat_body(user("x")), key="", **origin),
        served.send("/v1/models", method="GET", **origin),
    ]
    assert [reply.status for reply in replies] == [405, 401, 200]
    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control")]
    assert not served.engine.submitted


def test_a_session_of_another_name_is_none(served: Served) -> None:
    for name in ("..", "%00", "%ff", "x" * 1000):
        client = SessionClient(served, name, served.key)
        assert client.send(CHAT, chat_body(user("x"))).status == 404
