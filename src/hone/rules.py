"""All rules on a run, collected from its parts, and their findings for a plan.

    for finding in findings(plan): ...

Findings of the level `error` come first and stop a run before it starts; warnings are printed.
Files on this machine are inspected; no code of the user is imported or run.

The language of rules is `hone.config.rules`. The rules on a part of a run lie in its folder, and
load no torch; those on sections that belong to no part lie with the language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Unpack, cast

from hone.algorithms import rules as algorithms
from hone.config.plan import RunPlan
from hone.config.rules import bench, cluster, files, host, mixing, profile, run
from hone.config.rules.facts import Facts
from hone.config.rules.finding import Finding, Level
from hone.config.rules.rule import Rule
from hone.config.rules.view import Known, command_of
from hone.engine import rules as engine
from hone.engine.backend_rules import BACKEND_RULES
from hone.envs import rules as tools
from hone.rewards import rules as rewards
from hone.rollout import rules as sampling
from hone.trainer import critic_axes_rules as critic
from hone.trainer import rules as trainer

__all__ = ["RULES", "TOPICS", "findings", "matches", "unread_keys"]

TOPICS: Mapping[str, tuple[Rule, ...]] = {
    "files": files.RULES,
    "mixing": mixing.RULES,
    "rewards": rewards.RULES,
    "tools": tools.RULES,
    "sampling": sampling.RULES,
    "engine": engine.RULES,
    "trainer": trainer.RULES,
    "algorithm": algorithms.RULES,
    "critic": critic.RULES,
    "cluster": cluster.RULES,
    "run": run.RULES,
    "profile": profile.RULES,
    "bench": bench.RULES,
    "host": host.RULES,
}
RULES: tuple[Rule, ...] = tuple(
    rule for rules in (*TOPICS.values(), *BACKEND_RULES.values()) for rule in rules
)

_CLASSES = dict.fromkeys(rule.facts for rule in RULES if rule.facts is not Facts)
_AllFacts = cast("type[Facts]", type("_AllFacts", tuple(_CLASSES), {}))
"""The facts of all parts in one class, so that each is computed once for a plan: a search asks for
the findings of thousands. No two parts have a fact of the same name (a test)."""


def findings(plan: RunPlan, *, level: Level | None = None, **known: Unpack[Known]) -> list[Finding]:
    """The problems of a planned run, errors first, or those of one level. `known` has facts that
    are not part of a plan."""
    found = dict.fromkeys(finding for _, finding in matches(plan, level=level, **known))
    return sorted(found, key=lambda finding: finding.level)


@cache
def unread_keys(command: str) -> frozenset[str]:
    """The keys of a command that have no effect on it, whatever else is set."""
    return frozenset(key for rule in RULES for key in rule.unread_keys(command))


def matches(
    plan: RunPlan, *, level: Level | None = None, **known: Unpack[Known]
) -> Iterator[tuple[Rule, Finding]]:
    """Each rule, of one level or of all, that applies, with its finding: once for each section that
    samples, or once for a command without sampling."""
    command = command_of(plan)
    rules = [x for x in RULES if level in (None, x.level) and x.is_for(command)]
    for section in plan.sampling or [None]:
        view = _AllFacts(plan, section, known)
        for rule in rules:
            for finding in rule.find(view):
                yield rule, finding
