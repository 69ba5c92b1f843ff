"""Readers of formats in which a call, or its arguments, are JSON after a mark."""

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

__all__ = [
    "deepseek_mark",
    "deepseek_v3",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "phi4",
]


def deepseek_mark(words: str) -> str:
    """A special token of DeepSeek, which is written with a wide bar and a low block for blanks."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_BEGIN, _SEP, _END = map(deepseek_mark, ("tool call begin", "tool sep", "tool call end"))
_DEEPSEEK = re.compile(_BEGIN)
_DEEPSEEK_HEAD = re.compile(f"([^<]*){_SEP}")

_HERMES = re.compile("<tool_call>")
_GRANITE = re.compile(r"<\|?tool_call\|?>")
_PHI4 = re.compile(r"functools(?=\s*\[)|<\|tool_call\|>")
_MISTRAL = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]([^\[\]{}]*))?(?:\[ARGS\])?")
_DEEPSEEK_NAME = re.compile(r"([^\n<]+)\n```(?:json)?\n")
_DEEPSEEK_FENCE = re.compile(r"\s*```")
_KIMI = re.compile(r"<\|tool_call_begin\|>")
_KIMI_HEAD = re.compile(r"([^<]*)<\|tool_call_argument_begin\|>")
_KIMI_NAME = re.compile(r"(?:functions\.)?([^:]+)(?::\d+)?\Z")
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name"\s*:\s*"|type"\s*:\s*"function")')
_BETWEEN = re.compile(r"[\s;,]*")


def hermes(text: str, schemas: Schemas, found: Found) -> None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, EXAONE 4,
    SmolLM 3, Granite 4."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        end = closed(text, end, "</tool_call>")
        found.json_calls(value)
        return end

    read_each(text, found, _HERMES, read, closing="</tool_call>")


def granite(text: str, schemas: Schemas, found: Found) -> None:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        found.json_calls(value)
        return end

    read_each(text, found, _GRANITE, read)


def phi4(text: str, schemas: Schemas, found: Found) -> None:
    """`functools[{"name": ..., "arguments": {...}}]` or `<|tool_call|>[...]<|/tool_call|>`: Phi 4
    mini."""

    def read(match: re.Match[str]) -> int:
        value, end = decode_json(text, match.end())
        if match[0] != "functools":
            end = closed(text, end, "<|/tool_call|>")
        found.json_calls(value)
        return end

    read_each(text, found, _PHI4, read, closing="<|/tool_call|>")


def mistral(text: str, schemas: Schemas, found: Found) -> None:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, and since version 11 of
    Mistral's tokenizer `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    def read(match: re.Match[str]) -> int:
        start = skip_space(text, match.end())
        if text[start : start + 1] in ("[", "{"):
            value, end = decode_json(text, start)
            found.json_calls(value)
            return end
        head = _MISTRAL_NAME.match(text, start)
        if head is None:
            raise Malformed("[TOOL_CALLS] is followed by no name of a tool")
        value, end = decode_json(text, head.end())
        found.call(head[1], value, head[2])
        return end

    read_each(text, found, _MISTRAL, read)


def deepseek_v3(text: str, schemas: Schemas, found: Found) -> None:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, the arguments in a fence of JSON, and
    `<｜tool▁call▁end｜>`: DeepSeek V3 and R1. Since V3.1
    `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    def read(match: re.Match[str]) -> int:
        if (head := _DEEPSEEK_HEAD.match(text, match.end())) is None:
            raise Malformed(f"{_BEGIN} is followed by no name and {_SEP}")
        name, start, is_fenced = head[1], head.end(), False
        if inner := _DEEPSEEK_NAME.match(text, start):
            name, start, is_fenced = inner[1], inner.end(), True
        value, end = decode_json(text, start)
        if is_fenced and (fence := _DEEPSEEK_FENCE.match(text, end)):
            end = fence.end()
        end = closed(text, end, _END)
        found.call(name, value)
        return end

    read_each(text, found, _DEEPSEEK, read, closing=_END)


def kimi_k2(text: str, schemas: Schemas, found: Found) -> None:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`; what
    stands before the arguments is the id of the call."""

    def read(match: re.Match[str]) -> int:
        head = _KIMI_HEAD.match(text, match.end())
        name = _KIMI_NAME.match(head[1].strip()) if head else None
        if head is None or name is None:
            raise Malformed(
                "<|tool_call_begin|> is followed by no `functions.NAME:0` and "
                "<|tool_call_argument_begin|>"
            )
        value, end = decode_json(text, head.end())
        end = closed(text, end, "<|tool_call_end|>")
        found.call(name[1], value, head[1].strip())
        return end

    read_each(text, found, _KIMI, read, closing="<|tool_call_end|>")


def llama3_json(text: str, schemas: Schemas, found: Found) -> None:
    """`{"name": ..., "parameters": {...}}` as the whole turn, or after `<|python_tag|>`, and
    semicolons between several: Llama 3.1 to 3.3. Another JSON object is an answer."""
    before, tag, _ = text.partition(_PYTHON_TAG)
    if not tag and not _LLAMA_CALL.match(text):
        found.texts.append(text)
        return
    position = len(before) + len(tag) if tag else 0
    found.texts.append(before if tag else "")
    while True:
        between = _BETWEEN.match(text, position)
        assert between is not None
        position = between.end()
        if (found.calls or found.errors) and text[position : position + 1] != "{":
            found.texts.append(text[position:])
            return
        try:
            value, end = decode_json(text, position)
            if not tag and not found.calls and not {"arguments", "parameters"} & {*value}:
                found.texts.append(text)
                return
            found.json_calls(value)
        except Malformed as error:
            found.error(error)
            return
        position = end
