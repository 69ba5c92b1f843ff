"""Readers of formats in which each argument has tags of its own, and its text is no JSON."""

from __future__ import annotations

import re

from hone.envs.tools.formats.found import (
    Found,
    Malformed,
    Schemas,
    closed,
    decode_json,
    read_each,
    skip_space,
)
from hone.envs.tools.formats.values import typed_arguments

__all__ = ["glm45", "longcat", "qwen3_coder"]

_QWEN = re.compile(r"<(?:seed:)?tool_call>|<function=")
_QWEN_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_QWEN_CLOSED = re.compile(r"\s*</(?:seed:)?tool_call>")
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")


def qwen3_coder(text: str, schemas: Schemas, found: Found) -> None:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen 3
    Coder, Qwen 3.5 and later, Nemotron 3, and with other tags around it Seed-OSS."""

    def read(match: re.Match[str]) -> int:
        has_tag = match[0] != "<function="
        is_seed = match[0] == "<seed:tool_call>"  # it writes values without lines of their own
        head = _QWEN_FUNCTION.match(text, match.end() if has_tag else match.start())
        if head is None:
            raise Malformed(f"`{match[0]}` is followed by no `<function=NAME>`")
        position, texts = head.end(), dict[str, str]()
        while key := _QWEN_PARAMETER.match(text, position):
            value, position = _until(text, key.end(), "</parameter>")
            if not is_seed:
                value = value.removeprefix("\n").removesuffix("\n")
            texts[key[1].strip()] = value
        position = closed(text, position, "</function>", is_whole=False)
        if end := _QWEN_CLOSED.match(text, position):
            position = end.end()
        found.call(head[1], typed_arguments(head[1].strip(), texts, schemas))
        return position

    read_each(text, found, _QWEN, read, closing="</function>")


def glm45(text: str, schemas: Schemas, found: Found) -> None:
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each
    argument, and `</tool_call>`: GLM 4.5 and later."""
    _read_keys(text, schemas, found, "")


def longcat(text: str, schemas: Schemas, found: Found) -> None:
    """As `glm45`, with `longcat_` before the name of each tag; the first LongCat Flash writes
    `{"name": ..., "arguments": {...}}` between the outer ones."""
    _read_keys(text, schemas, found, "longcat_")


def _read_keys(text: str, schemas: Schemas, found: Found, prefix: str) -> None:
    opening, closing = re.compile(f"<{prefix}tool_call>"), f"</{prefix}tool_call>"
    end_of_value = f"</{prefix}arg_value>"
    key_in = re.compile(rf"\s*<{prefix}arg_key>([^<]*)</{prefix}arg_key>\s*<{prefix}arg_value>")

    def read(match: re.Match[str]) -> int:
        if prefix and text.startswith("{", skip_space(text, match.end())):
            value, position = decode_json(text, match.end())
            position = closed(text, position, closing)
            found.json_calls(value)
            return position
        if (head := _GLM_NAME.match(text, match.end())) is None:
            raise Malformed(f"{match[0]} is followed by no name of a tool")
        position, texts = head.end(), dict[str, str]()
        while key := key_in.match(text, position):
            texts[key[1].strip()], position = _until(text, key.end(), end_of_value)
        position = closed(text, position, closing, is_whole=False)
        found.call(head[1], typed_arguments(head[1], texts, schemas))
        return position

    read_each(text, found, opening, read, closing=closing)


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """The text up to `closing`, and the place after it. Raises Malformed."""
    if (end := text.find(closing, start)) < 0:
        raise Malformed(f"an argument has no `{closing}`")
    return text[start:end], skip_space(text, end + len(closing))
