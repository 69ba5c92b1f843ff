"""The APIs of the server: shapes, streams, errors, keys and limits."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from hone.door import security
from hone.door.handover import Handover
from hone.door.security import Keys, read_key
from hone.door.wire import streaming
from hone.errors import UserError
from tests.door.served import (
    TOOLS,
    Reply,
    Served,
    chat_body,
    in_threads,
    serving,
    tokenizer_of,
    until,
    user,
)

CALLS = 'I add. <call>add {"a": 1}</call><call>add {"a": 2}</call>'
ASKING = {
    "/v1/chat/completions": {"messages": [user("x")]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [user("x")], "max_tokens": 64},
    "/inference/v1/generate": {"token_ids": [5]},
}
"""A small request of each API."""


def text_of(path: str, answer: Any) -> str:
    match path:
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case "/v1/completions":
            return answer["choices"][0]["text"]
        case "/v1/responses":
            return answer["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return answer["content"][0]["text"]
    return tokenizer_of().decode(answer["choices"][0]["token_ids"]).removesuffix("<|im_end|>")


def streamed_text(path: str, events: list[Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        case "/v1/completions":
            return "".join(e["choices"][0]["text"] for e in events)
        case "/v1/responses":
            return "".join(e["delta"] for e in events if e["type"].endswith("text.delta"))
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


def error_of(path: str, reply: Reply) -> dict[str, Any]:
    body = reply.json
    if path.endswith("messages"):
        assert body["type"] == "error"
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


# -- answers -------------------------------------------------------------------------------------


def test_every_api_answers_whole_and_as_a_stream() -> None:
    text = "hello w\u00f6rld \U0001f600 the end"
    with serving(lambda _: text) as served:
        for path, body in ASKING.items():
            whole = served.send(path, body)
            assert whole.status == 200
            assert text_of(path, whole.json) == text, path
            assert whole.json["weight_version"] == 3
            if path == "/inference/v1/generate":
                continue
            streamed = served.send(path, body | {"stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed_text(path, streamed.events) == text, path
            assert (b"data: [DONE]" in streamed.body) == path.endswith("completions")


def test_a_stream_shows_tokens_as_they_are_sampled() -> None:
    with serving(lambda _: "hello world") as served:
        engine = served.engine
        engine.on_step = lambda: engine.gate.clear() if engine.num_steps == 3 else None
        connection = served.connect()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({"messages": [user("x")], "stream": True}),
            {"x-api-key": served.key},
        )
        response = connection.getresponse()  # while the engine waits in its fourth step
        first = response.readline() + response.readline() + response.readline()
        assert b'"content":"' in first
        assert not served.turns[0].answer.done()
        engine.gate.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_only_the_tokens_of_streams_are_shown() -> None:
    """Each costs the thread of the engine a moment."""
    with serving(lambda _: "hello world") as served:
        shown = set[bool]()
        served.engine.on_step = lambda: shown.update(
            waiting.on_tokens is not None for waiting in served.handover._waiting.values()
        )
        for streams in (False, True):
            body = {"messages": [user("x")], "stream": streams}
            assert served.send("/v1/chat/completions", body).status == 200
            assert shown == {streams}
            shown.clear()


def test_a_stop_string_is_not_streamed_though_its_tokens_come_one_by_one() -> None:
    with serving(lambda _: "hello to the world") as served:
        body = {"messages": [user("x")], "stop": ["the", "xyzzy"], "stream": True}
        assert (
            streamed_text("/v1/chat/completions", served.send("/v1/chat/completions", body).events)
            == "hello to "
        )
        body = ASKING["/v1/messages"] | {"stop_sequences": ["the"]}
        reply = served.send("/v1/messages", body).json
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "the")


def test_tool_calls_in_every_api() -> None:
    with serving(lambda _: CALLS) as served:
        body = chat_body(user("x"), tools=TOOLS)
        choice = served.send("/v1/chat/completions", body).json["choices"][0]
        names = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert (names, choice["finish_reason"]) == (['{"a": 1}', '{"a": 2}'], "tool_calls")
        events = served.send("/v1/chat/completions", body | {"stream": True}).events
        deltas = [e["choices"][0]["delta"] for e in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1]
        assert streamed_text("/v1/chat/completions", events) == "I add."
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

        tool = {"name": "add", "input_schema": {"type": "object"}}
        body = ASKING["/v1/messages"] | {"tools": [tool]}
        message = served.send("/v1/messages", body).json
        assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
        assert message["content"][2]["input"] == {"a": 2}
        assert message["stop_reason"] == "tool_use"
        kinds = [e["type"] for e in served.send("/v1/messages", body | {"stream": True}).events]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert kinds == ["message_start", *3 * block, "message_delta", "message_stop"]

        tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
        body = ASKING["/v1/responses"] | {"tools": [tool]}
        response = served.send("/v1/responses", body).json
        assert [x["type"] for x in response["output"]] == ["message", *2 * ["function_call"]]
        events = served.send("/v1/responses", body | {"stream": True}).events
        assert [e["sequence_number"] for e in events] == [*range(len(events))]
        assert events[-1]["type"] == "response.completed"
        whole, ended = response["output"], events[-1]["response"]["output"]
        assert [x.get("arguments") for x in whole] == [x.get("arguments") for x in ended]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == ended


def test_an_agent_goes_on_in_anthropics_and_openais_newer_api() -> None:
    """Tool results and calls come back in each API's own form, and the turn is bridged."""
    with serving(lambda _: CALLS) as served:
        tool = {"name": "add", "input_schema": {"type": "object"}}
        client = served.open(history="linear")
        body = {"max_tokens": 64, "tools": [tool], "system": [{"type": "text", "text": "Add."}]}
        messages = [user("x")]
        first = client.send("/v1/messages", body | {"messages": messages}).json
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
            for block in first["content"][1:]
        ]
        messages += [{"role": "assistant", "content": first["content"]}, user("")]
        messages[-1]["content"] = [*results, {"type": "text", "text": "and now?"}]
        second = client.send("/v1/messages", body | {"messages": messages})
        assert second.status == 200, second.body
        assert client.end()["bridged"] == 1

        tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
        client = served.open(history="linear")
        body = {"tools": [tool], "instructions": "Add.", "return_token_ids": True}
        given = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
        first = client.send("/v1/responses", body | {"input": given}).json
        given += first["output"]
        given += [
            {"type": "function_call_output", "call_id": x["call_id"], "output": "3"}
            for x in first["output"]
            if x["type"] == "function_call"
        ]
        second = client.send("/v1/responses", body | {"input": given})
        assert second.status == 200, second.body
        ids = first["output"][-1]
        known = ids["prompt_token_ids"] + ids["generation_token_ids"]
        assert second.json["output"][-1]["prompt_token_ids"][: len(known)] == known
        assert client.end()["bridged"] == 1


def test_lengths_are_bounded_by_the_request_its_default_and_the_context() -> None:
    with serving(lambda _: "hello " * 40, max_model_len=60) as served:
        for field in ("max_tokens", "max_completion_tokens"):
            answer = served.send("/v1/chat/completions", chat_body(user("x"), **{field: 3})).json
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 3
        answer = served.send("/v1/chat/completions", chat_body(user("x"), max_tokens=9999)).json
        assert answer["usage"]["total_tokens"] == 60
        assert answer["choices"][0]["finish_reason"] == "length"
        message = served.send("/v1/messages", ASKING["/v1/messages"] | {"max_tokens": 2}).json
        assert message["stop_reason"] == "max_tokens"
        response = served.send("/v1/responses", {"input": "x", "max_output_tokens": 2}).json
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        for path, body, field in (
            ("/v1/chat/completions", {"messages": [user("x " * 60)]}, "messages"),
            ("/v1/chat/completions", {"messages": [user("x " * 6000)]}, "messages"),
            ("/v1/completions", {"prompt": "x " * 60}, "prompt"),
            ("/inference/v1/generate", {"token_ids": [5] * 60}, "token_ids"),
        ):
            reply = served.send(path, body)
            error = error_of(path, reply)
            assert (reply.status, error["param"]) == (400, field)
            assert error["code"] == "context_length_exceeded"
            assert reply.headers["x-should-retry"] == "false"


def test_sampling_parameters_reach_the_engine() -> None:
    with serving() as served:
        body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": "zz", "seed": 3}
        served.send("/v1/chat/completions", chat_body(user("x"), **body, max_tokens=5))
        served.send(
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"temperature": 0, "stop_token_ids": [9]}},
        )
        one, two = (request.sampling for request in served.engine.submitted)
    assert (one.temperature, one.top_p, one.top_k, one.min_p) == (0.5, 0.9, 7, 0.1)
    assert (one.stop, one.max_tokens) == (("zz",), 5)
    assert (two.temperature, two.stop_token_ids, two.max_tokens) == (0.0, (9,), 256)


# -- errors --------------------------------------------------------------------------------------

WRONG = [
    ("/v1/chat/completions", {"messages": [user("x")], "n": 2}, "n"),
    ("/v1/chat/completions", {"messages": [user("x")], "temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", {"messages": [user("x")], "temperature": -1}, "temperature"),
    ("/v1/chat/completions", {"messages": [user("x")], "top_p": 0}, "top_p"),
    ("/v1/chat/completions", {"messages": [user("x")], "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [user("x")], "logit_bias": {"5": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": [user("x")], "top_logprobs": 5}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [user("x")], "stream": "yes"}, "stream"),
    ("/v1/chat/completions", {"messages": [user("x")], "stop": [1]}, "stop"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "x"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [user("x"), {"role": "assistant"}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [user([{"type": "image_url"}])]},
        "messages[0].content[0]",
    ),
    (
        "/v1/chat/completions",
        {"messages": [user([{"type": "image_url", "image_url": {"url": "a"}, "text": "a cat"}])]},
        "messages[0].content[0]",
    ),
    (
        "/v1/chat/completions",
        {"messages": [user("x")], "tools": [{"type": "web"}]},
        "tools[0].type",
    ),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "a", "logprobs": 5}, "logprobs"),
    ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
    ("/v1/responses", {"input": [{"type": "image"}]}, "input[0].type"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [9999]}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [True]}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [5], "features": {"image": 1}}, "features"),
    (
        "/inference/v1/generate",
        {"token_ids": [5], "sampling_params": {"logprobs": 20}},
        "sampling_params.logprobs",
    ),
]


def test_what_is_wrong_in_a_request_is_named() -> None:
    problems: list[str] = []
    with serving() as served:
        for path, body, field in WRONG:
            reply = served.send(path, body)
            if reply.status != 400 or error_of(path, reply)["param"] != field:
                problems.append(f"{path} {body}: {reply.status} {reply.body[:200]!r}")
        for body, words in (
            ({"messages": [user("x")]}, "max_tokens"),
            ({"messages": [], "max_tokens": 5}, "messages"),
            ({"messages": [user([{"type": "image"}])], "max_tokens": 5}, "messages[0].content[0]"),
        ):
            reply = served.send("/v1/messages", body)
            error = error_of("/v1/messages", reply)
            if error["type"] != "invalid_request_error" or words not in error["message"]:
                problems.append(f"/v1/messages {body}: {error}")
        for body in (b"{", b"[]", b'{"messages": NaN}', b"\xff"):
            if served.send("/v1/chat/completions", body).status != 400:
                problems.append(f"{body!r}")
        assert not served.engine.submitted
    assert not problems, "\n".join(problems)


def test_every_api_has_its_own_shape_of_errors() -> None:
    with serving(max_body_mib=0.001) as served:
        for path, body in ASKING.items():
            for status, kind, reply in (
                (401, "authentication_error", served.send(path, body, key="wrong")),
                (413, "request_too_large", served.send(path, body | {"user": "x" * 2000})),
                (404, "not_found_error", served.send(f"/sessions/none{path}", body)),
            ):
                assert (reply.status, error_of(path, reply)["type"]) == (status, kind), path


def test_a_path_without_a_route_is_answered_in_json() -> None:
    with serving() as served:
        for method, path, status in (("POST", "/v2/chat", 404), ("GET", "/v1/messages", 405)):
            reply = served.send(path, method=method)
            assert reply.status == status
            assert f"there is no {method} {path}" in reply.json["error"]["message"]


def test_a_body_without_a_length_is_bounded_too() -> None:
    with serving(max_body_mib=0.001) as served:
        connection = served.connect()
        connection.request(
            "POST",
            "/v1/completions",
            iter([b"x" * 600] * 4),
            {"x-api-key": served.key},
            encode_chunked=True,
        )
        assert connection.getresponse().status == 413
        connection.close()


# -- limits --------------------------------------------------------------------------------------


def test_a_full_queue_is_answered_with_429_before_the_first_byte_of_a_stream() -> None:
    with serving(max_requests=1) as served:
        served.engine.gate.clear()

        def first() -> Reply:
            return served.send("/v1/chat/completions", chat_body(user("x")))

        def second() -> list[Reply]:
            until(lambda: served.engine.submitted)
            replies = [
                served.send(path, body | {"stream": path != "/inference/v1/generate"})
                for path, body in ASKING.items()
            ]
            served.engine.gate.set()
            return replies

        answered, refused = in_threads([first, second])
        assert answered.status == 200
        for path, reply in zip(ASKING, refused, strict=True):
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert error_of(path, reply)["type"] == "rate_limit_error"
        assert served.send("/v1/chat/completions", chat_body(user("x"))).status == 200


def _seeds(*, in_session: bool, refuses: bool) -> list[int]:
    """Seeds of two turns, between which a request may be refused."""
    path = "/v1/chat/completions"
    with serving(max_requests=1, max_sessions=1) as served:
        asks = served.open() if in_session else served
        served.engine.gate.clear()

        def second() -> None:
            until(lambda: served.engine.submitted)
            if refuses:
                assert asks.send(path, chat_body(user("y"))).status == 429
            served.engine.gate.set()

        answered, _ = in_threads([lambda: asks.send(path, chat_body(user("x"))), second])
        assert answered is not None
        assert answered.status == 200
        if refuses and in_session:
            assert served.send("/sessions").status == 429
        assert asks.send(path, chat_body(user("y"))).status == 200
        if in_session:
            asks.send("/end")
            served.open().chat(user("z"))
        return [request.sampling.seed for request in served.engine.submitted]


@pytest.mark.parametrize("in_session", [False, True])
def test_requests_that_are_refused_change_no_later_turn(in_session: bool) -> None:
    seeds = _seeds(in_session=in_session, refuses=False)
    assert len(set(seeds)) == 2 + in_session
    assert _seeds(in_session=in_session, refuses=True) == seeds


def test_an_engine_that_is_lost_is_said_to_all_who_wait_and_come() -> None:
    with serving() as served:
        served.engine.gate.clear()
        served.engine.error = RuntimeError("the device is gone")

        def lose() -> None:
            until(lambda: served.handover._num_open == 2)
            served.engine.gate.set()

        def ask(stream: bool) -> Reply:
            return served.send("/v1/messages", ASKING["/v1/messages"] | {"stream": stream})

        waited, streamed, _ = in_threads([lambda: ask(False), lambda: ask(True), lose])
        until(lambda: served.errors)
        for reply in (waited, streamed, ask(False)):
            assert reply.status == 503
            assert error_of("/v1/messages", reply)["type"] == "overloaded_error"
        assert "the device is gone" in str(served.errors[0])


def test_an_error_in_mid_stream_is_an_event() -> None:
    with serving(lambda _: "hello world") as served:
        engine = served.engine
        engine.on_step = lambda: engine.gate.clear() if engine.num_steps == 3 else None
        connection = served.connect()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(chat_body(user("x"), stream=True)),
            {"x-api-key": served.key},
        )
        response = connection.getresponse()
        engine.error = RuntimeError("gone")
        engine.gate.set()
        body = response.read()
        connection.close()
    assert response.status == 200
    assert Reply(200, {}, body).events[-1]["error"]["code"] == "engine_lost"
    assert b"[DONE]" not in body


def test_a_slow_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    with serving() as served:
        served.engine.gate.clear()
        connection = served.connect()
        connection.request(
            "POST",
            "/v1/messages",
            json.dumps(ASKING["/v1/messages"] | {"stream": True}),
            {"x-api-key": served.key},
        )
        response = connection.getresponse()
        assert response.readline() == b": keep-alive\n"
        served.engine.gate.set()
        assert b"message_stop" in response.read()
        connection.close()


def test_sessions_are_bounded() -> None:
    with serving(max_sessions=2) as served:
        clients = [served.open() for _ in range(2)]
        reply = served.send("/sessions")
        assert (reply.status, reply.json["error"]["code"]) == (429, "too_many_sessions")
        clients[0].end()
        served.open()


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_opens_what_it_is_for_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    chat = chat_body(user("x"))
    with serving() as served:
        one, two = served.open(), served.open()
        path = "/v1/chat/completions"
        for key in ("", "wrong", one.key + "x", one.key[:-1], f"hone-{one.session}"):
            assert served.send(path, chat, key=key).status == 401
            assert served.send("/sessions", key=key).status == 401
            assert served.send("/v1/models", key=key, method="GET").status == 401
            assert served.send(f"/sessions/{one.session}{path}", chat, key=key).status == 401
        assert served.send(f"/sessions/{two.session}{path}", chat, key=one.key).status == 401
        assert served.send(f"/sessions/{two.session}/end", key=one.key).status == 401
        assert served.send("/sessions", key=one.key).status == 401
        # A session's key on a route without the session, as where only a key can be given.
        assert served.send(path, chat, key=one.key).json["turn"] == 0
        assert served.send(f"/sessions/{one.session}{path}", chat).json["turn"] == 1
        one.end()
        assert one.send(path, chat).status == 404, "it has ended, and that is said to its client"
        secrets = (served.key, one.key, two.key)
    assert not any(secret in record.getMessage() for record in caplog.records for secret in secrets)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(given: Any, key: Any) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    keys = Keys("the-key-of-the-server")
    assert keys.session_of({"authorization": f"Bearer {keys.key}"}, "s") == "s"
    own = keys.session_key("s")
    assert keys.session_of({"x-api-key": own}, None) == "s"
    assert (own.encode(), own.encode()) in compared


def test_a_file_of_a_key_is_read_or_written_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "key"
    key = read_key(file)
    assert key is not None
    assert len(key) > 40
    assert read_key(file) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_key(None) is None
    for text in ("", "short", "has a blank inside of it"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"serve\.key_file=.* must hold one key of at least 16"):
            read_key(file)


def test_the_thread_of_the_runner_waits_without_work() -> None:
    handover = Handover(max_requests=1)

    class Idle:
        has_requests = False

        def step(self) -> None:
            raise AssertionError("there is nothing to step")

    handover.close()
    handover.serve(Idle())  # type: ignore[arg-type]


def models_of(served: Served) -> Any:
    return served.send("/v1/models", method="GET").json["data"]


def test_the_model_says_its_length() -> None:
    with serving(max_model_len=77) as served:
        [model] = models_of(served)
    assert (model["id"], model["max_model_len"]) == ("scripted", 77)
