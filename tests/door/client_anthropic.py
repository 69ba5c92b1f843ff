"""Drives a session with the `anthropic` package, in an environment of its own. Prints what it got
as JSON.

    python client_anthropic.py BASE_URL KEY
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic, BadRequestError

client = Anthropic(base_url=sys.argv[1], api_key=sys.argv[2])
TOOLS: Any = [{"name": "add", "input_schema": {"type": "object"}}]


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": "one"}]
    ask: dict[str, Any] = {"model": "any", "max_tokens": 64, "tools": TOOLS}
    first = client.messages.create(messages=messages, **ask)
    messages.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
    with client.messages.stream(messages=messages, **ask) as stream:
        kinds = sorted({event.type for event in stream})
        second = stream.get_final_message()
    try:
        client.messages.create(model="any", max_tokens=5, messages=[])
        raise AssertionError("no messages")
    except BadRequestError as error:
        problem = str(error)
    print(  # noqa: T201
        json.dumps(
            {
                "first": [block.model_dump() for block in first.content],
                "stop_reason": first.stop_reason,
                "second": [block.model_dump() for block in second.content],
                "num_sampled": [first.usage.output_tokens, second.usage.output_tokens],
                "kinds": kinds,
                "problem": problem,
            }
        )
    )


main()
