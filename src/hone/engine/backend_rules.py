"""The rules of each engine, collected from its folder. They are not part of `hone.engine.backends`,
because the plan reads that module, and rules read the plan."""

from __future__ import annotations

from collections.abc import Mapping

from hone.config.rules.rule import Rule
from hone.engine.settings import BackendName
from hone.engine.sglang.rules import RULES as SGLANG_RULES
from hone.engine.vllm.rules import RULES as VLLM_RULES

__all__ = ["BACKEND_RULES"]

BACKEND_RULES: Mapping[BackendName, tuple[Rule, ...]] = {
    "embedded": (),  # they are the general ones
    "vllm": VLLM_RULES,
    "sglang": SGLANG_RULES,
}
