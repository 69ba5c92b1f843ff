"""What the door does with the turns of sessions: ids that are made once, branches, repeats, clients
that leave, tools."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from time import sleep
from typing import Any

import pytest

from hone.types import NOT_SAMPLED, Request
from tests.door.served import (
    THINKING,
    TOOLS,
    Served,
    SessionClient,
    chat_body,
    in_threads,
    logprob_of,
    serving,
    tokenizer_of,
    until,
    user,
)


def ids_of(answer: Any) -> list[int]:
    """Prompt and answer."""
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def message_of(answer: Any) -> dict[str, Any]:
    return answer["choices"][0]["message"]


def rendered(*messages: dict[str, Any]) -> list[int]:
    text = tokenizer_of().apply_chat_template(
        [*messages], tokenize=False, add_generation_prompt=True
    )
    return tokenizer_of()(text, add_special_tokens=False)["input_ids"]


def tell(client: SessionClient, *turns: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """A conversation of these messages of the user. Returns all messages and all answers."""
    messages, answers = list[dict[str, Any]](), list[Any]()
    for text in turns:
        messages.append(user(text))
        answers.append(client.chat(*messages))
        messages.append(message_of(answers[-1]))
    return messages, answers


def test_a_request_that_extends_the_last_turn_goes_on_behind_its_ids() -> None:
    # An answer whose ids are others than those that its text is encoded to.
    with serving(lambda request: "hel" + "lo") as served:
        client = served.open()
        messages, answers = tell(client, "one", "two", "three")
        for earlier, later in pairwise(answers):
            known = ids_of(earlier)
            assert later["prompt_token_ids"][: len(known)] == known
            sent = served.engine.submitted[later["turn"]]
            assert later["prompt_token_ids"] == list(sent.prompt_ids)
            asked = messages[: 2 * later["turn"] + 1]
            decoded = tokenizer_of().decode(later["prompt_token_ids"])
            assert decoded == tokenizer_of().decode(rendered(*asked)), "nothing is there twice"
        ended = client.end()
    assert (ended["bridged"], ended["forks"], ended["branches"]) == (2, 0, 0)
    [path] = ended["paths"]
    assert [*path["prompt_token_ids"], *path["token_ids"]] == ids_of(answers[-1])


def test_ids_logprobs_versions_and_masks_of_both_sides_agree() -> None:
    with serving() as served:
        client = served.open()
        _, answers = tell(client, "one", "two", "three")
        served.send(f"/sessions/{client.session}/reward", {"reward": 0.5, "turn": 1})
        client.send("/reward", {"parts": {"right": 1.0, "short": 0.25}})
        [path] = client.end()["paths"]
        [finished] = served.finished
        requests = served.engine.submitted
    ids = [*path["prompt_token_ids"], *path["token_ids"]]
    start = len(path["prompt_token_ids"])
    for answer, request, turn in zip(answers, requests, path["turns"], strict=True):
        first, last = start + turn["start"], start + turn["end"]
        choice = answer["choices"][0]
        assert ids[first:last] == choice["token_ids"]
        own = path["logprobs"][turn["start"] : turn["end"]]
        assert own == [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert own == [logprob_of(request, place) for place in range(len(own))]
        assert path["weight_versions"][turn["start"] : turn["end"]] == [3] * len(own)
        assert list(request.prompt_ids) == ids[:first]
    sampled = {n for t in path["turns"] for n in range(t["start"], t["end"])}
    for place, (flag, version) in enumerate(
        zip(path["loss_mask"], path["weight_versions"], strict=True)
    ):
        assert flag == (place in sampled)
        assert (version == NOT_SAMPLED) == (place not in sampled)
    [sample] = finished.paths
    assert sample.reward is not None
    assert (sample.reward.total, sample.reward.parts) == (1.25, {"right": 1.0, "short": 0.25})
    assert [turn.reward for turn in sample.turns] == [0.0, 0.5, 0.0]
    assert len({request.sampling.seed for request in requests}) == len(requests)


def test_equal_seeds_and_requests_give_equal_sessions() -> None:
    with serving() as served:
        first, second = (tell(served.open(seed=7), "one", "two")[1] for _ in range(2))
        other = tell(served.open(seed=8), "one", "two")[1]
        asked = [
            served.send("/v1/chat/completions", chat_body(user("x"), seed=5)).json for _ in range(2)
        ]
    assert list(map(ids_of, first)) == list(map(ids_of, second))
    assert list(map(ids_of, first)) != list(map(ids_of, other))
    assert ids_of(asked[0]) == ids_of(asked[1])


def test_a_history_that_is_written_anew_opens_a_branch_or_is_refused() -> None:
    with serving() as served:
        client = served.open(history="tree")
        messages, answers = tell(client, "one", "two")
        # Goes on behind the first turn: a fork that shares it.
        forked = client.chat(*messages[:2], user("another"))
        assert forked["prompt_token_ids"][: len(ids_of(answers[0]))] == ids_of(answers[0])
        # Another beginning: nothing is shared.
        summary = client.chat(user("a summary"), messages[1], user("two"))
        assert summary["prompt_token_ids"] == rendered(user("a summary"), messages[1], user("two"))
        # The same once more, not as a retry: another answer behind the same ids.
        again = client.chat(user("one"), seed=1)
        assert again["prompt_token_ids"] == answers[0]["prompt_token_ids"]
        ended = client.end()
        assert (ended["bridged"], ended["forks"], ended["branches"]) == (1, 2, 1)
        assert [sum(p["loss_mask"]) > 0 for p in ended["paths"]] == [True] * 4
        num_sampled = sum(len(a["choices"][0]["token_ids"]) for a in (*answers, forked, summary))
        num_sampled += len(again["choices"][0]["token_ids"])
        assert sum(sum(p["loss_mask"]) for p in ended["paths"]) == num_sampled
        assert ended["num_turns"] == 5

        client = served.open(history="linear")
        messages, _ = tell(client, "one", "two")
        refused = client.send("/v1/chat/completions", chat_body(*messages[:2], user("another")))
        assert refused.status == 409
        assert refused.json["error"]["code"] == "history_rewritten"
        assert refused.headers["x-should-retry"] == "false"
        assert client.chat(*messages, user("three"))["turn"] == 2


def test_a_template_that_drops_thoughts_opens_a_branch_only_where_the_user_speaks_again() -> None:
    def script(request: Request) -> str:
        return "<think>\nthe fox\n</think>\n\nhello"

    with serving(script, template=THINKING) as served:
        client = served.open()
        first = client.chat(user("one"))
        tool = client.chat(
            user("one"), message_of(first), {"role": "tool", "content": "42", "tool_call_id": "x"}
        )
        assert tool["prompt_token_ids"][: len(ids_of(first))] == ids_of(first)
        spoken = client.chat(user("one"), message_of(first), user("two"))
        assert "fox" not in tokenizer_of().decode(spoken["prompt_token_ids"])
        ended = client.end()
        assert (ended["bridged"], ended["branches"]) == (1, 1)

        client = served.open(history="linear")
        first = client.chat(user("one"))
        refused = client.send(
            "/v1/chat/completions", chat_body(user("one"), message_of(first), user("two"))
        )
        assert refused.status == 409
        assert "leaves out earlier thoughts" in refused.json["error"]["message"]


def test_what_clients_change_in_a_message_does_not_make_it_another_one() -> None:
    def script(request: Request) -> str:
        return ' I add. <call>add {"a":1,"b":[2.5,null]}</call>'

    with serving(script) as served:
        client = served.open()
        first = client.chat(user("one"), tools=TOOLS)
        message = message_of(first)
        [call] = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert (call["function"]["name"], message["content"]) == ("add", "I add.")
        rewritten = message | {
            "content": [{"type": "text", "text": " I add.\n"}],
            "refusal": None,
            "audio": None,
            "tool_calls": [
                call
                | {
                    "id": "of-the-client",
                    "function": {"name": "add", "arguments": '{"b": [2.5, null],  "a": 1}'},
                }
            ],
        }
        result = {"role": "tool", "tool_call_id": "of-the-client", "content": "3"}
        second = client.chat(user("one"), rewritten, result, tools=TOOLS)
        assert second["prompt_token_ids"][: len(ids_of(first))] == ids_of(first)
        # Other tools are another prompt.
        third = client.chat(user("one"), rewritten, result)
        assert third["prompt_token_ids"][: len(ids_of(first))] != ids_of(first)
        assert client.end()["bridged"] == 1


def test_arguments_that_are_no_json_do_not_end_an_episode() -> None:
    with serving(lambda _: "<call>add {'a': 1</call>") as served:
        client = served.open()
        first = message_of(client.chat(user("one"), tools=TOOLS))
        assert first["tool_calls"][0]["function"]["arguments"] == "{'a': 1"
        error = {"role": "tool", "tool_call_id": "call_0", "content": "no JSON"}
        client.chat(user("one"), first, error, tools=TOOLS)
        assert client.end()["bridged"] == 1


def test_tools_that_cannot_be_read_and_calls_that_cannot_be_forced_are_refused() -> None:
    with serving() as served:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            body = chat_body(user("x"), tools=TOOLS, tool_choice=choice)
            reply = served.send("/v1/chat/completions", body)
            assert (reply.status, reply.json["error"]["param"]) == (400, "tool_choice")
        plain = served.send(
            "/v1/chat/completions", chat_body(user("x"), tools=TOOLS, tool_choice="none")
        )
        assert plain.status == 200


@pytest.mark.parametrize("header", ["retry", "key"])
def test_a_repeated_request_gets_the_first_answer(header: str) -> None:
    body = chat_body(user("one"))
    with serving() as served:
        client = served.open()
        path = "/v1/chat/completions"
        sent = {"Idempotency_Key": "abc"} if header == "key" else {}
        first = client.send(path, body, **sent).json
        again = {"x_stainless_retry_count": "1"} if header == "retry" else sent
        assert client.send(path, body, **again).json == first
        streamed = client.send(path, body | {"stream": True}, **sent)
        is_other = json.loads(streamed.body.split(b"\n")[0].removeprefix(b"data: "))
        assert (is_other["id"] == first["id"]) == (header == "key")
        served.send(path, body, **again)  # of another key: nothing to repeat
        ended = client.end()
    assert ended["repeated"] == (2 if header == "key" else 1)
    assert ended["num_turns"] == (1 if header == "key" else 2)


def test_the_same_body_while_the_first_is_sampled_is_a_repetition_in_a_session_alone() -> None:
    body = chat_body(user("one"))
    with serving() as served:
        client = served.open()
        served.engine.gate.clear()
        opener = threading.Thread(
            target=lambda: (
                until(lambda: served.turns and served.turns[0].num_readers == 3),
                served.engine.gate.set(),
            )
        )
        opener.start()
        answers = [
            reply.json
            for reply in in_threads(
                [lambda: client.send("/v1/chat/completions", body) for _ in range(3)]
            )
        ]
        opener.join()
        assert len({answer["id"] for answer in answers}) == 1
        assert len(served.engine.submitted) == 1
        answers = [
            reply.json
            for reply in in_threads(
                [lambda: served.send("/v1/chat/completions", body) for _ in range(3)]
            )
        ]
        assert len({answer["id"] for answer in answers}) == 3, "they are samples of one prompt"
        assert client.end()["num_turns"] == 1


@pytest.mark.parametrize("streams", [True, False])
def test_a_turn_whose_client_leaves_is_aborted_and_not_recorded(streams: bool) -> None:
    with serving(lambda _: "hello " * 200) as served:
        client = served.open()
        engine = served.engine
        engine.on_step = lambda: engine.gate.clear() if engine.num_steps == 3 else None
        connection = served.connect()
        connection.request(
            "POST",
            f"/sessions/{client.session}/v1/chat/completions",
            json.dumps(chat_body(user("one"), stream=streams)),
            {"Authorization": f"Bearer {client.key}"},
        )
        until(lambda: not engine.gate.is_set())  # some tokens are there
        [turn] = served.turns  # one that was aborted is not remembered
        response = connection.getresponse() if streams else None
        [turn] = served.turns  # once the client has left, it is forgotten
        if response is not None:
            assert response.read(5) == b"data:"
            response.close()
        connection.close()
        until(turn.answer.done)
        engine.gate.set()
        until(lambda: engine.aborted)
        second = client.chat(user("one"))
        ended = client.end()
    assert (second["turn"], ended["num_turns"], len(ended["paths"])) == (0, 1, 1)


def test_a_session_that_ends_aborts_its_turns() -> None:
    with serving() as served:
        client = served.open()
        served.engine.gate.clear()
        replies: list[Any] = []
        thread = threading.Thread(
            target=lambda: replies.append(
                client.send("/v1/chat/completions", chat_body(user("one")))
            )
        )
        thread.start()
        until(lambda: served.engine.submitted)
        ended = client.end()
        thread.join(60)
        served.engine.gate.set()
        until(lambda: served.engine.aborted)
        assert (ended["num_turns"], replies[0].status) == (0, 503)
        assert client.send("/end").status == 404


def test_parallel_turns_of_one_session_are_siblings() -> None:
    with serving() as served:
        client = served.open(history="tree")
        bodies = [chat_body(user("one"), seed=seed) for seed in range(4)]
        list(
            in_threads(
                [lambda body=body: client.send("/v1/chat/completions", body) for body in bodies]
            )
        )
        ended = client.end()
    assert (ended["num_turns"], len(ended["paths"])) == (4, 4)
    assert len({tuple(path["prompt_token_ids"]) for path in ended["paths"]}) == 1


def test_texts_and_token_ids_have_trees_too() -> None:
    def generate(served: SessionClient, ids: list[int]) -> Any:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 64, "logprobs": 1}}
        return served.send("/inference/v1/generate", body).json

    with serving() as served:
        client = served.open(history="linear")
        first = generate(client, [5, 6])
        sampled = first["choices"][0]["token_ids"]
        second = generate(client, [5, 6, *sampled, 9])
        body = {"token_ids": [7], "sampling_params": {}}
        assert client.send("/inference/v1/generate", body).status == 409
        [path] = client.end()["paths"]
        assert path["prompt_token_ids"] == [5, 6]
        assert path["token_ids"] == [*sampled, 9, *second["choices"][0]["token_ids"]]
        content = second["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [
            f"token_id:{token}" for token in second["choices"][0]["token_ids"]
        ]
        assert path["logprobs"][-len(content) :] == [entry["logprob"] for entry in content]

        client = served.open(history="linear")
        options = {"return_token_ids": True, "logprobs": 1}
        first = client.send("/v1/completions", {"prompt": "hello", **options}).json["choices"][0]
        text = "hello" + first["text"] + " world"
        second = client.send("/v1/completions", {"prompt": text, **options}).json["choices"][0]
        known = [*first["prompt_token_ids"], *first["token_ids"]]
        assert second["prompt_token_ids"][: len(known)] == known
        assert client.end()["bridged"] == 1


def test_a_stop_string_ends_the_text_and_stays_in_the_ids() -> None:
    with serving(lambda _: "hello to the world") as served:
        client = served.open()
        first = client.chat(user("one"), stop=["the"])
        assert message_of(first)["content"] == "hello to "
        text = tokenizer_of().decode(first["choices"][0]["token_ids"])
        assert text.startswith("hello to the")
        second = client.chat(user("one"), message_of(first), user("two"))
        assert second["prompt_token_ids"][: len(ids_of(first))] == ids_of(first)


def test_sessions_that_end_are_handed_over_once() -> None:
    with serving(max_sessions=2, session_timeout_s=0.001) as served:
        clients = [served.open() for _ in range(2)]
        for client in clients:
            client.chat(user("one"))
        sleep(0.01)  # longer than the timeout
        third = served.open()
        assert {session.status for session in served.finished} == {"expired"}
        assert third.send("/end", {"status": "failed", "detail": "no disk"}).status == 200
        assert served.finished[-1].detail == "no disk"
        assert sorted(x.id for x in served.finished) == sorted(
            {x.session for x in (*clients, third)}
        )


def test_the_engine_without_progress_streams_the_whole_turn() -> None:
    for shows in (True, False):
        with serving(lambda _: "hello world", shows_tokens=shows) as served:
            events = stream(served, chat_body(user("x"), stream=True))
            texts = [e["choices"][0]["delta"].get("content", "") for e in events]
            assert "".join(texts) == "hello world"
            ids = [i for e in events for i in e["choices"][0].get("token_ids", ())]
            assert ids == [*tokenizer_of()("hello world", add_special_tokens=False)["input_ids"], 2]


def stream(served: Served, body: Any) -> list[Any]:
    reply = served.send("/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    return reply.events
