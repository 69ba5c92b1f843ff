"""Readers of formats in which all calls of a turn are one list of JSON between two marks."""

from __future__ import annotations

import re
from typing import Any

from hone.envs.tools.formats.found import (
    Found,
    Malformed,
    Schemas,
    closed,
    decode_json,
    read_each,
    skip_space,
)

__all__ = ["apertus", "cohere", "hunyuan", "internlm", "nemotron", "xlam"]

_COHERE = re.compile(r"<\|START_ACTION\|>")
_APERTUS = re.compile(r"<\|tools_prefix\|>")
_HUNYUAN = re.compile("<tool_calls>")
_NEMOTRON = re.compile("<TOOLCALL>|<toolcall>")
_INTERNLM = re.compile(r"<\|action_start\|>")
_PLUGIN = "<|plugin|>"
_XLAM = re.compile(r'\s*+(```(?:json)?)?\s*+(?=\[\s*+\{\s*+"name"\s*+:)')


def cohere(text: str, schemas: Schemas, found: Found) -> None:
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]
    <|END_ACTION|>`: Command R7B and Command A."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        end = closed(text, end, "<|END_ACTION|>")
        entries = value if isinstance(value, list) else [value]
        found.json_calls([_of_cohere(entry) for entry in entries])
        return end

    read_each(text, found, _COHERE, read, closing="<|END_ACTION|>")


def _of_cohere(entry: Any) -> Any:
    if not isinstance(entry, dict) or "tool_name" not in entry:
        return entry
    names = {"tool_name": "name", "tool_call_id": "id"}
    return {names.get(key, key): value for key, value in entry.items()}


def apertus(text: str, schemas: Schemas, found: Found) -> None:
    """`<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>`: Apertus."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        end = closed(text, end, "<|tools_suffix|>")
        if not isinstance(value, list):
            raise Malformed("the calls are no list; write one, even of a single call")
        found.json_calls([_of_apertus(entry) for entry in value])
        return end

    read_each(text, found, _APERTUS, read, closing="<|tools_suffix|>")


def _of_apertus(entry: Any) -> Any:
    if not isinstance(entry, dict) or len(entry) != 1:
        return entry
    ((name, arguments),) = entry.items()
    return {"name": name, "arguments": arguments}


def hunyuan(text: str, schemas: Schemas, found: Found) -> None:
    """`<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`: Hunyuan A13B, Jamba. MiniMax
    M1 writes one object a line instead of a list."""

    def read(match: re.Match[str]) -> int:
        values: list[Any] = []
        end = skip_space(text, match.end())
        while not values or (end < len(text) and not text.startswith("</tool_calls>", end)):
            value, end = decode_json(text, end)
            values += value if isinstance(value, list) and value else [value]
            end = skip_space(text, end)
        end = closed(text, end, "</tool_calls>")
        found.json_calls(values)
        return end

    read_each(text, found, _HUNYUAN, read, closing="</tool_calls>")


def nemotron(text: str, schemas: Schemas, found: Found) -> None:
    """`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano 2 and Llama
    Nemotron; `<toolcall>` around one call: Nemotron Mini."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        end = closed(text, end, match[0].replace("<", "</"))
        found.json_calls(value)
        return end

    read_each(text, found, _NEMOTRON, read, closing="</TOOLCALL>")


def internlm(text: str, schemas: Schemas, found: Found) -> None:
    """`<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`: InternLM 2 and
    3."""

    def read(match: re.Match[str]) -> int:
        start = skip_space(text, match.end())
        if not text.startswith(_PLUGIN, start):
            raise Malformed(f"`{match[0]}` is followed by no `{_PLUGIN}`; there are no other tools")
        value, end = decode_json(text, start + len(_PLUGIN))
        end = closed(text, end, "<|action_end|>")
        found.json_calls(value)
        return end

    read_each(text, found, _INTERNLM, read, closing="<|action_end|>")


def xlam(text: str, schemas: Schemas, found: Found) -> None:
    """`[{"name": ..., "arguments": {...}}]` as the whole turn, also in a fence: xLAM. Another list
    is an answer."""
    opening = _XLAM.match(text)
    if opening is None:
        found.texts.append(text)
        return
    try:
        value, end = decode_json(text, opening.end())
        if not any(isinstance(entry, dict) and "arguments" in entry for entry in value):
            found.texts.append(text)
            return
        found.json_calls(value)
    except Malformed as error:
        found.error(error)
        return
    rest = text[end:]
    found.texts.append(rest.lstrip().removeprefix("```") if opening[1] else rest)
