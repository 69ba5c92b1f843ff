"""Calls of tools over HTTP: their ids, and the answers that clients send back."""

from __future__ import annotations

import re

import pytest

from hone.door.calls import calls_reader, format_in, with_names
from hone.types import Message
from tests.door.served import TOOLS, serving, tokenizer_of, user
from tests.door.test_turns import ids_of, message_of

CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": {}}},
        {"id": "b", "type": "function", "function": {"name": "sub", "arguments": {}}},
    ],
}


def test_answers_get_the_names_of_the_calls_they_answer() -> None:
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": "b", "content": "1"},
        {"role": "tool", "tool_call_id": "a", "name": "other", "content": "2"},
        {"role": "tool", "tool_call_id": "unknown", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "5"},
    ]
    found = with_names([{"role": "user", "content": "0"}, CALLED, *answers], 2)
    assert [message.get("name") for message in found] == ["sub", "other", None, None, None]
    assert [message["content"] for message in found] == ["1", "2", "3", "4", "5"]
    assert "name" not in answers[0]


@pytest.mark.parametrize(
    ("template", "text", "pattern"),
    [
        ("[TOOL_CALLS]", "[TOOL_CALLS]add[ARGS]{}", r"[a-zA-Z0-9]{9}"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        ("<|START_ACTION|>", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", '
         '"parameters": {}}]<|END_ACTION|>', r"[a-zA-Z0-9]{9}"),
        ("<|tool_call_begin|>", "<|tool_call_begin|>functions.add:0"
         "<|tool_call_argument_begin|>{}<|tool_call_end|>", r"functions\.add:0"),
        ("<tool_call>", '<tool_call>{"name": "add"}</tool_call>', "call_[0-9a-f]{24}"),
    ],
)  # fmt: skip
def test_calls_have_ids_that_their_templates_accept(template: str, text: str, pattern: str) -> None:
    read, _ = calls_reader(template)
    assert read is not None
    ids = {read(text, TOOLS, "").calls[0].id for _ in range(2)}
    assert all(re.fullmatch(pattern, one) for one in ids)
    assert len(ids) == (1 if pattern in ("abcdefghi", r"functions\.add:0") else 2)


def test_a_template_without_calls_has_no_format() -> None:
    assert format_in("{{ messages }}") is None
    assert format_in("<tool_call>") == "hermes"


NAMES_ANSWERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.name }} found {{ m.content }}{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_answer_of_a_tool_follows_the_turn_with_the_name_of_the_tool() -> None:
    with serving(lambda _: '<call>add {"a": 1}</call>', template=NAMES_ANSWERS) as served:
        client = served.open()
        first = client.chat(user("one"), tools=TOOLS)
        message = message_of(first)
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        second = client.chat(user("one"), message, answer, tools=TOOLS)
        known = ids_of(first)
        assert second["prompt_token_ids"][: len(known)] == known
        text = tokenizer_of(NAMES_ANSWERS).decode(second["prompt_token_ids"][len(known) :])
        assert text == "\n<|im_start|>tool\nadd found 3<|im_end|>\n<|im_start|>assistant\n"
