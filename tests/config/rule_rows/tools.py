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
    ("rl", "env.harness.command=no-such-program", "error", "env.harness.command"),
    ("eval", "env.harness.command=' '", "error", "env.harness.command"),
    ("generate", """env.harness.command='"python'""", "error", "env.harness.command"),
    ("rl", "env.harness.command=ls env.path=envs.py:Game", "error",
     "env.harness.command env.path"),
    ("eval", "env.harness.command=ls env.tools=[mcp:x]", "error", "env.harness.command env.tools"),
    ("rl", "env.harness.command=ls algorithm.routing_replay=true", "error",
     "env.harness.command algorithm.routing_replay"),
    ("eval", "env.harness.command=ls env.turn_timeout_s=9", "warning",
     "env.turn_timeout_s env.harness.command"),
    ("rl", "env.harness.command=ls reward.model.path=judge", "error",
     "env.harness.command reward.model.path"),
    ("rl", "env.history=tree", "warning", "env.history env.harness.command"),
]  # fmt: skip
