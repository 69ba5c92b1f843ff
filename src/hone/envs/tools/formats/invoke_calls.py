"""Readers of formats in which a call is an element `invoke` with an element for each parameter."""

from __future__ import annotations

import re
from typing import Any

from hone.envs.tools.formats.found import (
    Found,
    Malformed,
    Schemas,
    closed,
    decode_json,
    decode_whole,
    read_each,
    skip_space,
)
from hone.envs.tools.formats.values import typed_arguments

__all__ = ["DSML", "deepseek_v32", "minimax_m2", "step3"]

DSML = "\uff5cDSML\uff5c"
"""What DeepSeek writes before the name of each element."""


def minimax_m2(text: str, schemas: Schemas, found: Found) -> None:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`, within
    `<minimax:tool_call>`: MiniMax M2."""
    _read(text, schemas, found, "")


def deepseek_v32(text: str, schemas: Schemas, found: Found) -> None:
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE
    </｜DSML｜parameter></｜DSML｜invoke>`: DeepSeek V3.2 and V4. What is no string is JSON."""
    _read(text, schemas, found, DSML)


def step3(text: str, schemas: Schemas, found: Found) -> None:
    """`<steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>
    </steptml:invoke>`: Step 3."""
    _read(text, schemas, found, "steptml:")


def _read(text: str, schemas: Schemas, found: Found, prefix: str) -> None:
    opening = re.compile(f"<{prefix}invoke(?![^\\s>])")
    name_in = re.compile(r'\s+name="([^"\n]*)"\s*>')
    parameter = re.compile(
        rf'\s*<{prefix}parameter\s+name="([^"\n]*)"(?:\s+string="(true|false)")?\s*>'
    )
    closing, end_of_value = f"</{prefix}invoke>", f"</{prefix}parameter>"

    def read(match: re.Match[str]) -> int:
        if (head := name_in.match(text, match.end())) is None:
            raise Malformed(f'`{match[0]}` is followed by no `name="NAME">`')
        position = skip_space(text, head.end())
        if text.startswith("{", position):  # the arguments as one object
            arguments, position = decode_json(text, position)
            position = closed(text, position, closing)
            found.call(head[1], arguments)
            return position
        texts, values = dict[str, str](), dict[str, Any]()
        while key := parameter.match(text, position):
            if (end := text.find(end_of_value, key.end())) < 0:
                raise Malformed(f"an argument has no `{end_of_value}`")
            value = text[key.end() : end]
            position = end + len(end_of_value)
            if key[2] is None:
                texts[key[1]] = value
            values[key[1]] = decode_whole(value) if key[2] == "false" else value
        position = closed(text, position, closing, is_whole=False)
        found.call(head[1], values | typed_arguments(head[1].strip(), texts, schemas))
        return position

    read_each(text, found, opening, read, closing=closing)
