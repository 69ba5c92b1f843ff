"""What answers the policy between its turns."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hone.config.base import Section

__all__ = ["EnvConfig"]


class EnvConfig(Section):
    """The environment of an episode: tools, simulated users, games. Unset, a sample is one turn,
    scored by `reward.functions`."""

    path: str | None = None
    """Class whose method `step` answers each turn of the policy, with a text that goes before it or
    with the reward that ends the episode: `path/to/file.py:Class` or `package.module:Class`. It
    runs in the workers of reward functions, within `reward.timeout_s` and
    `reward.memory_limit_gib`. `reward.functions` score the episodes that it ends without a reward,
    and no others."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the class is made with, once in each worker."""

    max_turns: int = Field(default=8, ge=1)
    """Most turns of the policy in an episode. All of them, and what the environment says between
    them, share the longest completion."""
