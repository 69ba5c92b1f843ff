"""The formats of calls by name, how each is recognised, and how a turn is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hone.envs.session import ToolCall
from hone.envs.tools.formats import harmony as gpt_oss
from hone.envs.tools.formats import json_calls, python_calls, xml_calls
from hone.envs.tools.formats.found import Found, Schemas, TooManyErrors
from hone.envs.tools.formats.json_calls import deepseek_mark
from hone.errors import UserError
from hone.types import Message

__all__ = ["FORMATS", "Parsed", "ToolFormat", "detect", "format_of", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way of writing calls of tools."""

    read: Callable[[str, Schemas, Found], None]
    """Finds the calls of a turn, without its reasoning. Notes malformed calls, and raises
    nothing but TooManyErrors."""
    template: tuple[tuple[str, ...], ...]
    """Texts by which a chat template is recognised: all texts of one of these tuples."""
    marks: tuple[str, ...] = ()
    """Marks of calls. One that is left outside of all calls shows that a call was not read."""
    around: tuple[str, ...] = ()
    """Marks around a list of calls, which belong to no single one. They are removed from the text.
    Without any call in the turn they show that one was not read."""
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    """Marks around the reasoning at the start of a turn. None: `read` finds it."""
    needs_ids: bool = False
    """The template refuses the answer of a tool without the id of its call."""
    answers: Callable[[Sequence[Message]], str] | None = None
    """Writes the answers of tools and the header of the next turn, for templates that can write
    neither after a turn whose calls are text."""


FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": ToolFormat(
        read=json_calls.deepseek_v3,
        template=((deepseek_mark("tool call begin"),),),
        marks=(
            deepseek_mark("tool call begin"),
            deepseek_mark("tool sep"),
            deepseek_mark("tool call end"),
        ),
        around=(deepseek_mark("tool calls begin"), deepseek_mark("tool calls end")),
    ),
    "kimi_k2": ToolFormat(
        read=json_calls.kimi_k2,
        template=(("<|tool_call_begin|>",),),
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": ToolFormat(
        read=json_calls.mistral,
        template=(("[TOOL_CALLS]",),),
        marks=("[TOOL_CALLS]", "[ARGS]"),
        reasoning=("[THINK]", "[/THINK]"),
        needs_ids=True,
    ),
    "harmony": ToolFormat(
        read=gpt_oss.harmony,
        template=(("<|channel|>", "<|message|>"),),
        marks=("to=functions.",),
        around=("<|start|>assistant",),
        reasoning=None,
        answers=gpt_oss.answers,
    ),
    "glm45": ToolFormat(
        read=xml_calls.glm45,
        template=(("<arg_key>",),),
        marks=("<tool_call>", "</tool_call>", "<arg_key>"),
    ),
    "qwen3_coder": ToolFormat(
        read=xml_calls.qwen3_coder,
        template=(("<function=", "<parameter="),),
        marks=("<function=", "</function>", "<parameter=", "</parameter>"),
        around=("</tool_call>", "</seed:tool_call>"),
    ),
    "olmo3": ToolFormat(
        read=python_calls.olmo3,
        template=(("<function_calls>",),),
        marks=("<function_calls>", "</function_calls>"),
    ),
    "lfm2": ToolFormat(
        read=python_calls.lfm2,
        template=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "pythonic": ToolFormat(
        read=python_calls.pythonic,
        template=(("<|python_start|>",), ("func_name1(params_name1=",)),
        marks=("<|python_start|>",),
        around=("<|python_end|>",),
    ),
    "phi4": ToolFormat(
        read=json_calls.phi4,
        template=(("functools",), ("<|tool|>", "<|/tool|>")),
        marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite": ToolFormat(
        read=json_calls.granite,
        template=(("<|tool_call|>",),),
        marks=("<|tool_call|>", "<tool_call>"),
    ),
    "hermes": ToolFormat(
        read=json_calls.hermes,
        template=(("<tool_call>",),),
        marks=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ToolFormat(
        read=json_calls.llama3_json,
        template=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
        marks=("<|python_tag|>",),
    ),
}
"""The formats by name. The first one that a chat template shows is its format: marks that other
families use with another meaning come last."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a turn says. A malformed call is never left out: `parse_error` has it."""

    content: str
    """What remains of the turn, without whitespace at both ends."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    """Why something that looks like a call is none; empty where all calls were read."""


def detect(chat_template: str | None) -> str:
    """The name of the format in which a chat template writes or asks for calls.

    Raises UserError, which lists the names, where it shows none of them.
    """
    for name, form in FORMATS.items():
        if any(all(text in (chat_template or "") for text in texts) for texts in form.template):
            return name
    what = "shows no format of tool calls that is known" if chat_template else "is missing"
    raise UserError(
        f"the chat template {what}, so the calls of env.tools could not be read. Name the format "
        f"in which the model writes calls in env.tool_format; allowed: {', '.join(sorted(FORMATS))}"
        ", auto. Or give the template of a model with tools in model.chat_template"
    )


def format_of(tool_format: str, chat_template: str | None) -> str:
    """The name of the format for `env.tool_format`, which may be `auto`. Raises UserError."""
    return detect(chat_template) if tool_format == "auto" else tool_format


def parse(text: str, tool_format: str, schemas: Schemas, *, opened: str = "") -> Parsed:
    """Read a turn, decoded with its special tokens but without its end token.

    `tool_format` is a name of `FORMATS`; `schemas` say of which type an argument is where the
    format writes it as text. `opened` is the tag of reasoning that the prompt ends with
    (`hone.types.opened_tag`).
    """
    form = FORMATS[tool_format]
    found = Found()
    reasoning, rest = _without_reasoning(text, form, opened.strip(), found)
    try:
        form.read(rest, schemas, found)
        content = _checked_content(form, found)
    except TooManyErrors:
        content = "".join(found.texts)
        found.errors.append("the rest of the turn was not read")
    return Parsed(
        content.strip(),
        "".join([reasoning, *found.reasoning]).strip(),
        tuple(found.calls),
        found.parse_error,
    )


def _checked_content(form: ToolFormat, found: Found) -> str:
    """The text outside of calls without the marks around them. Notes an error for marks that show a
    call which was not read."""
    content = "".join(found.texts)
    left = next((mark for mark in form.marks if mark in content), None)
    if left is None and not found.calls and not found.errors and form.reasoning is not None:
        left = next((mark for mark in form.around if mark in content), None)
    if left is not None:
        found.error(f"`{left}` stands outside of a call")
    if form.around:
        content = re.sub("|".join(map(re.escape, form.around)), "", content)
    return content


def _without_reasoning(text: str, form: ToolFormat, opened: str, found: Found) -> tuple[str, str]:
    """The reasoning at the start of a turn, and the rest. A closing tag before all calls ends
    reasoning too where the prompt's opening tag is not known."""
    if form.reasoning is None:
        return "", text
    opening, closing = form.reasoning
    if text.lstrip().startswith("<seed:think>") or opened == "<seed:think>":
        opening, closing = "<seed:think>", "</seed:think>"
    begun = text.lstrip().startswith(opening)
    body = text.lstrip().removeprefix(opening) if begun else text
    before, closed, after = body.partition(closing)
    marks = (*form.marks, *form.around)
    if begun or opened == opening:
        if not closed and any(mark in body for mark in marks):
            found.error(f"a call stands in the reasoning, which no `{closing}` ends")
        return before, after
    if closed and not any(mark in before for mark in marks):
        return before, after
    return "", text
