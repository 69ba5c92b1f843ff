"""Combinations that the rules on tools find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    ("rl", "env.tools=[nowhere.py:add]", "error", "env.tools"),
    ("eval", "env.tools=[scores.py:score,scores.py:score]", "error", "env.tools"),
    ("generate", "env.tools=[add]", "error", "env.tools"),
    ("rl", "env.tools=[mcp:]", "error", "env.tools"),
    ("rl", "env.tools=[envs.py:Game]", "error", "env.tools"),
    ("rl", "env.tools=[scores.py:no-name]", "error", "env.tools"),
    ("rl", "env.tool_format=hermes", "warning", "env.tool_format env.path env.tools"),
    ("rl", "env.max_tool_calls=3", "warning", "env.max_tool_calls env.path env.tools"),
    ("eval", "env.max_parallel_calls=3", "warning", "env.max_parallel_calls env.path env.tools"),
    ("generate", "env.max_observation_tokens=9", "warning",
     "env.max_observation_tokens env.path env.tools"),
]  # fmt: skip
