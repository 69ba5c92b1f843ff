"""Many sessions at once, with clients that leave, histories that are written anew, and requests
that are sent again: each turn is there once, and nothing is left behind."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.door.served import Served, chat_body, in_threads, serving, user

NUM_SESSIONS, NUM_TURNS = 12, 12


def drive(served: Served, number: int) -> None:
    draw, client = random.Random(number), served.open(history="tree", seed=number)
    messages: list[dict[str, Any]] = []
    seen: dict[str, list[int]] = {}
    num_left = num_repeated = 0
    for turn in range(NUM_TURNS):
        fault = draw.choice(["none", "none", "leaves", "rewrites", "repeats"])
        asked = [*messages, user(f"{number} {turn}")]
        if fault == "rewrites":
            asked = [user(f"summary {number} {turn}"), *asked[2:]]
        body = chat_body(*asked, stream=fault == "leaves")
        if fault == "leaves":
            connection = served.connect()
            connection.request(
                "POST",
                f"/sessions/{client.session}/v1/chat/completions",
                json.dumps(body),
                {"x-api-key": client.key},
            )
            response = connection.getresponse()
            response.read(1)
            response.close()
            connection.close()
            num_left += 1
            continue
        answer = client.send("/v1/chat/completions", body).json
        if fault == "repeats":
            again = client.send("/v1/chat/completions", body, x_stainless_retry_count="2").json
            assert again == answer
            num_repeated += 1
        choice = answer["choices"][0]
        seen[answer["id"]] = [*answer["prompt_token_ids"], *choice["token_ids"]]
        messages = [*asked, choice["message"]]
    ended = client.end()
    assert ended["repeated"] == num_repeated
    # A turn whose client has left may have ended before that was seen.
    assert len(seen) <= ended["num_turns"] <= len(seen) + num_left
    rows = [[*p["prompt_token_ids"], *p["token_ids"]] for p in ended["paths"]]
    for ids in seen.values():
        assert any(row[: len(ids)] == ids for row in rows)
    turns = [(p, t) for p in ended["paths"] for t in p["turns"]]
    num_trained = [p["loss_mask"][t["start"]] for p, t in turns].count(True)
    assert num_trained == ended["num_turns"]


def test_each_turn_is_there_once_and_nothing_is_left_behind() -> None:
    with serving(lambda request: f"hello {request.sampling.seed % 1000} " * 6) as served:
        for _ in in_threads([lambda n=n: drive(served, n) for n in range(NUM_SESSIONS)]):
            pass
        assert len(served.finished) == NUM_SESSIONS
        assert len(served.door._sessions) == 0
    # The runner's episodes are looked at where the server ends.
    assert served.handover._num_open == 0
    assert not served.handover._waiting
