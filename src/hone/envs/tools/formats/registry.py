"""Finds the format of a chat template's calls, and reads a turn in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.envs.session import ToolCall
from hone.envs.tools.formats.families import FORMATS, ToolFormat
from hone.envs.tools.formats.found import Found, Schemas, TooManyErrors
from hone.errors import UserError

__all__ = ["FORMATS", "Parsed", "ToolFormat", "detect", "format_of", "parse"]


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
    if left is None and not found.calls and not found.errors:
        left = next((mark for mark in form.around if mark in content), None)
    if left is not None:
        found.error(f"`{left}` stands outside of a call")
    if removed := (*form.around, *form.framing):
        content = re.sub("|".join(map(re.escape, removed)), "", content)
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
