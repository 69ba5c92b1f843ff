"""ShareGPT's turns, which are refused with a program that writes them as messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.data.settings import SourceBase
from hone.paths import data_suffix, is_url

__all__ = ["sharegpt_problem"]


def sharegpt_problem(source: SourceBase, column: str, turns: Any) -> str | None:
    """The message about a column whose value has the turns of ShareGPT; None for other values."""
    turn = turns[0] if isinstance(turns, list) and turns else None
    if not (isinstance(turn, Mapping) and {"from", "value"} <= turn.keys()):
        return None
    return (
        f"{source.path}: the turns of column {column!r} have `from` and `value`, as ShareGPT's do; "
        "messages have `role` and `content`. This Python writes them so:"
        f"\n\n{_converter(source, column)}\nName messages.jsonl in `path` then."
    )


def _converter(source: SourceBase, column: str) -> str:
    """A Python program that writes ShareGPT's turns as messages."""
    path = source.path if is_url(source.path) else str(Path(source.path).expanduser())
    if (suffix := data_suffix(path)) is not None:
        reader = "parquet" if suffix == ".parquet" else "json"
        opened = f"{reader!r}, data_files={path!r}, split='train'"
    else:
        subset = "" if source.subset is None else f"{source.subset!r}, "
        opened = f"{path!r}, {subset}split={source.split!r}"
    return (
        "    from datasets import load_dataset  # pip install datasets\n"
        "    roles = {'human': 'user', 'gpt': 'assistant'}\n"
        "    def message(turn):\n"
        "        who = turn['from']\n"
        "        return {'role': roles.get(who, who), 'content': turn['value']}\n"
        "    def messages(row):\n"
        f"        return {{'messages': [message(turn) for turn in row[{column!r}]]}}\n"
        f"    rows = load_dataset({opened})\n"
        f"    rows.map(messages, remove_columns={column!r}).to_json('messages.jsonl')\n"
    )
