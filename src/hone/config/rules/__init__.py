"""Every rule that a run must keep, as one table, and what it finds.

    for finding in findings(plan): ...

Findings with level `error` come first and stop a run before it starts; warnings are told. Files
are looked at as far as they are on this machine; nothing of the user's is imported or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.config.plan import RunPlan
from hone.config.rules import (
    algorithm,
    bench,
    cluster,
    critic,
    engine,
    facts,
    files,
    host,
    profile,
    rewards,
    run,
    sampling,
    trainer,
)
from hone.config.rules.finding import Finding
from hone.config.rules.rule import Rule
from hone.config.rules.view import Fact, View

__all__ = ["RULES", "TOPICS", "Fact", "Finding", "Rule", "facts", "findings", "matches"]

TOPICS = (
    files,
    rewards,
    sampling,
    engine,
    trainer,
    algorithm,
    critic,
    cluster,
    run,
    profile,
    bench,
    host,
)
RULES: tuple[Rule, ...] = tuple(rule for topic in TOPICS for rule in topic.RULES)


def findings(plan: RunPlan, **known: Any) -> list[Finding]:
    """What is wrong with a planned run, errors first; `known` are facts that no plan has."""
    found = dict.fromkeys(finding for _, finding in matches(plan, **known))
    return sorted(found, key=lambda finding: finding.level)


def matches(plan: RunPlan, **known: Any) -> Iterator[tuple[Rule, Finding]]:
    """Each rule that applies, with what it finds."""
    for view in View.all(plan, known):
        for rule in RULES:
            for finding in rule.find(view):
                yield rule, finding
