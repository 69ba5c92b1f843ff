"""Drives a session with the `openai` package, in an environment of its own: plain answers, streams,
tools, the newer API. Prints what it got as JSON.

    python client_openai.py BASE_URL KEY
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
IDS = {"return_token_ids": True}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def turn(answer: Any) -> dict[str, Any]:
    [choice] = answer.choices
    return {
        "prompt_ids": answer.prompt_token_ids,
        "ids": choice.token_ids,
        "logprobs": [entry.logprob for entry in choice.logprobs.content],
        "text": choice.message.content,
    }


def streamed(stream: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt_ids": [], "ids": [], "logprobs": [], "text": ""}
    for chunk in stream:
        found["prompt_ids"] = getattr(chunk, "prompt_token_ids", None) or found["prompt_ids"]
        for choice in chunk.choices:
            found["text"] += choice.delta.content or ""
            found["ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                found["logprobs"] += [entry.logprob for entry in choice.logprobs.content]
    return found


def main() -> None:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "one"}]
    ask = {"model": model, "logprobs": True, "extra_body": IDS, "tools": TOOLS}
    first = client.chat.completions.create(messages=messages, **ask)
    turns = [turn(first)]
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    turns.append(streamed(client.chat.completions.create(messages=messages, stream=True, **ask)))
    try:
        client.chat.completions.create(messages=messages, n=2, **ask)
        raise AssertionError("n=2 is not served")
    except BadRequestError as error:
        problem = error.body["param"]  # type: ignore[index]
    response = client.responses.create(model=model, input="two")
    with client.responses.stream(model=model, input="three") as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response().output_text
    print(  # noqa: T201
        json.dumps(
            {
                "turns": turns,
                "calls": len(message.tool_calls or ()),
                "problem": problem,
                "response": response.output_text,
                "streamed_response": final,
                "events": events,
            }
        )
    )


main()
