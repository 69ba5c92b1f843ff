"""A chat template that leaves out a part of a dialogue is refused, and not obeyed silently."""

from __future__ import annotations

from typing import Any

import pytest

from hone.data.chat import Renderer
from hone.data.columns import Example, choose_columns, map_rows
from hone.data.settings import DataConfig, SourceConfig
from hone.data.sources import SourceRow
from hone.data.template_check import RenderError
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.types import Message, Observation, Prompt, Sample, StopReason, Turn
from tests.data.support import CHATML, LLAMA3, TAKES_TOOLS, char_tokenizer
from tests.tables import table

ASKED: Message = {"role": "user", "content": "is it hot?"}
SAID: Message = {"role": "assistant", "content": "yes"}
FOUND: Message = {"role": "tool", "content": "30"}


def calls(*names: str, content: str = "") -> Message:
    made = [{"function": {"name": name, "arguments": {"city": "Bern"}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": made}


NAMED_BY_ID: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "functions.weather:0", **calls("weather")["tool_calls"][0]}],
}
FLAT: Message = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}
"""A call as some data sets have it."""

ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Neither what a tool has found nor what a system message says."""
TRIMMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim | tojson }}"
    "{% for call in m.tool_calls %}{{ (call.function or call) | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
)
IDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.id }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
"""Of a call its id, which holds the name, as Kimi K2's template has it."""
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Content that is a list of parts, or none."""
RAISES = "{% if 'hot' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + ROLES
"""Looks into what is said: what it leaves out is not known."""

PROMPTS: list[tuple[str, list[Message], str]] = [
    (CHATML, [ASKED, calls("weather"), FOUND], "the call of 'weather' in message 2"),
    (CHATML, [ASKED, FLAT, FOUND], "the call of 'weather' in message 2"),
    (CHATML, [ASKED, calls("weather", content="wait"), FOUND], "the call of 'weather' in"),
    (ROLES, [ASKED, SAID, FOUND], "message 3, of the role 'tool'"),
    (ROLES, [{"role": "system", "content": "a"}, ASKED], "message 1, of the role 'system'"),
    (LLAMA3, [ASKED, calls("weather", "calculate"), FOUND], "the call of 'calculate' in message 2"),
    (CHATML, [ASKED, SAID, FOUND], ""),
    (CHATML, [ASKED, {"role": "assistant", "content": "", "tool_calls": []}, ASKED], ""),
    (ROLES, [{"role": "system", "content": " "}, ASKED], ""),
    (LLAMA3, [ASKED, calls("weather", content="wait"), FOUND], ""),  # as its family is trained
    (TAKES_TOOLS, [ASKED, calls("weather", "calculate"), FOUND], ""),
    (TRIMMED, [ASKED, calls("weather"), FLAT, FOUND], ""),
    (RAISES, [ASKED, SAID, ASKED], ""),
    (IDS, [ASKED, NAMED_BY_ID, FOUND], ""),
    (CHATML, [ASKED, NAMED_BY_ID, FOUND], "the call of 'weather' in message 2"),
]


def examples_of(rows: list[dict[str, Any]]) -> list[Example]:
    located = [SourceRow(row, f"f, line {number}") for number, row in enumerate(rows, 1)]
    source = SourceConfig(path="f.jsonl")
    demonstrations = any("completion" in row for row in rows)
    columns = choose_columns(located, source, demonstrations=demonstrations)
    return map_rows(located, source, columns, name="f")


@table("template, messages, lost", PROMPTS)
def test_a_prompt_of_which_the_template_leaves_out_a_part_is_refused(
    template: str, messages: list[Message], lost: str
) -> None:
    renderer = Renderer(char_tokenizer(template), DataConfig(train=()))
    examples = examples_of([{"prompt": [ASKED]}, {"prompt": messages}])
    if not lost:
        assert len(renderer.prompts(examples)) == 2
        return
    with pytest.raises(UserError) as caught:
        renderer.prompts(examples)
    assert f"f, line 2: the chat template leaves out {lost}" in str(caught.value)
    assert "model.chat_template" in str(caught.value)


def test_a_system_prompt_that_the_template_leaves_out_is_refused() -> None:
    renderer = Renderer(char_tokenizer(ROLES), DataConfig(train=(), system_prompt="Be brief."))
    with pytest.raises(UserError, match="leaves out message 1, of the role 'system'"):
        renderer.prompts(examples_of([{"prompt": "1+1"}]))


def test_each_call_of_a_demonstration_is_written() -> None:
    renderer = Renderer(char_tokenizer(LLAMA3), DataConfig(train=()))
    rows = [
        {"prompt": [ASKED], "completion": [calls(*names)]}
        for names in (("weather",), ("weather", "calculate"))
    ]
    assert renderer.demonstrations(examples_of(rows[:1]))
    with pytest.raises(UserError, match=r"f, line 2: .*leaves out the call of 'calculate' in mes"):
        renderer.demonstrations(examples_of(rows))


def goes_on(template: str) -> tuple[TurnRenderer, Sample]:
    tokenizer = char_tokenizer(template)
    text = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    sample = Sample(
        id="0/0",
        prompt=Prompt(id="f:1", token_ids=(1,), text=str(text), messages=(ASKED,)),
        index=0,
        token_ids=[5, 3],
        logprobs=[0.0] * 2,
        weight_versions=[0] * 2,
        loss_mask=[True] * 2,
        stop_reason=StopReason.EOS,
        turns=[Turn(start=0, end=2, text="a", stop_reason=StopReason.EOS)],
    )
    return TurnRenderer(tokenizer, DataConfig(train=()), vocab_size=len(tokenizer)), sample


def test_what_an_environment_says_and_the_template_leaves_out_fails_the_sample() -> None:
    render, sample = goes_on(ROLES)
    assert "30" in render(sample, Observation("30"))[0]
    answers = ((3, Observation("30", role="tool")), (4, Observation((ASKED, FOUND))))
    for number, said in answers:
        told = f"the chat template leaves out message {number}, of the role 'tool'"
        with pytest.raises(RenderError, match=told):
            render(sample, said)
    render, sample = goes_on(CHATML)
    assert "tool\n30" in render(sample, Observation("30", role="tool"))[0]


def test_what_an_environment_says_in_parts_is_the_business_of_the_template() -> None:
    render, sample = goes_on(PARTS)
    for content, said in (([{"type": "text", "text": "30"}], "30"), (None, "")):
        message: Message = {"role": "user", "content": content}
        assert f"user\n{said}<|im_end|>" in render(sample, Observation((message,)))[0]
