"""What a door keeps: of sessions so many turns and tokens, of answered requests no prompt."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from hone.door import door, repeats, sessions
from hone.door.prompts import ChatPrompt
from tests.door.served import SessionClient, chat_body, serving, until, user

CHAT = "/v1/chat/completions"


def prompts() -> list[ChatPrompt]:
    """All that are alive in this process."""
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, ChatPrompt)]


def refused(client: SessionClient, *messages: dict[str, Any]) -> str:
    reply = client.send(CHAT, chat_body(*messages))
    assert (reply.status, reply.json["error"]["code"]) == (409, "session_full")
    assert reply.headers["x-should-retry"] == "false"
    return reply.json["error"]["message"]


def test_the_turns_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TURNS", 3)
    with serving() as served:
        client = served.open()
        for number in range(3):
            client.chat(user(f"{number}"))
        assert "at most 3 turns in all its branches" in refused(client, user("3"))
        served.open().chat(user("3"))
        assert client.end()["num_turns"] == 3


def test_the_tokens_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_CONTEXTS", 1)
    with serving(lambda _: "hello", max_model_len=200) as served:
        client = served.open()
        num_tokens = 0
        for number in range(100):
            reply = client.send(CHAT, chat_body(user(f"another beginning {number}")))
            if reply.status != 200:
                break
            answer = reply.json
            num_tokens += len(answer["prompt_token_ids"])
            num_tokens += len(answer["choices"][0]["token_ids"])
        assert "at most 200 tokens" in refused(client, user("one more, a longer beginning"))
        assert num_tokens <= 200 + len(answer["choices"][0]["token_ids"])
        # Asking again after the same messages adds no token but the answer's.
        client.chat(user("another beginning 0"), seed=1)
        paths = client.end()["paths"]
    assert sum(sum(path["loss_mask"]) for path in paths) > 0


def test_the_prompt_of_an_answered_request_is_not_kept() -> None:
    body = chat_body(user("a long prompt"))
    with serving() as served:
        first = served.send(CHAT, body, Idempotency_Key="k" * 1000)
        until(lambda: not prompts())
        assert served.send(CHAT, body, Idempotency_Key="k" * 1000).json == first.json
        assert max(map(len, served.door.repeats._turns)) < 200


@pytest.mark.parametrize(("limit", "kept"), [("MAX_FINISHED", 2), ("MAX_TOKENS", 2)])
def test_answers_that_may_be_sent_again_are_bounded(
    limit: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda _: "hello") as served:

        def ask(number: int) -> str:
            body = chat_body(user(f"number {number}"))
            return served.send(CHAT, body, x_stainless_retry_count="1").json["id"]

        ask(0)
        [turn] = served.turns
        num_tokens = repeats._num_tokens(turn)
        monkeypatch.setattr(repeats, limit, 2 if limit == "MAX_FINISHED" else 2 * num_tokens)
        ids = [ask(number) for number in range(5)]
        assert len(served.turns) == kept
        assert [ask(number) for number in (4, 3)] == ids[:2:-1], "the newest are there"
        assert ask(0) != ids[0]
        monkeypatch.setattr(repeats, "MAX_TOKENS", 1)
        assert ask(7) == ask(7), "one is kept, whatever its length"
