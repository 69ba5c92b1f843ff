"""How the tiny models of the recipes of agents see a conversation."""

from __future__ import annotations

from hone.types import Message

__all__ = ["CHAT_TEMPLATE", "said"]

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>{{ tool['function']['name'] }}<|im_end|>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Turns without role names, after the names of the tools: at one token a letter a whole schema
would take most of the time."""


def said(role: str, content: str) -> Message:
    """A message."""
    return {"role": role, "content": content}
