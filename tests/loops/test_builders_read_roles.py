"""The plan decides what a role is set to, and builders read it nowhere else."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hone

PACKAGES = ("loops", "distributed")
OWNED = {"model", "trainer", "engine", "critic", "teacher"}
"""Sections that roles own."""
OWNED_KEYS = {"reward.model", "cluster.num_"}
"""Beginnings of keys of other sections that they own."""
LEFT = {
    # The plan itself is made from these: whose `config.json` is read, how many processes are whose.
    ("loops/launch.py", "model.path"): 1,
    ("loops/launch.py", "cluster.num_critics"): 1,
    # On the host that starts the others, before there is a process to plan for.
    ("distributed/ray_trainers.py", "cluster.num_trainer_nodes"): 1,
    # Rows and prompts become tokens of the policy; this is done for `hone check` too.
    ("loops/inputs.py", "model"): 6,
    ("loops/inputs.py", "model.path"): 1,
    ("loops/supervised.py", "model"): 2,
    # Scores that are kept on disk are those of all settings of the policy, as the recipe has them.
    ("loops/supervised.py", "model.model_dump"): 1,
    ("loops/supervised.py", "trainer.model_dump"): 1,
    # The schedule of the critic, which the algorithm has.
    ("loops/resuming.py", "critic.warmup_steps"): 1,
    # Commands that read prompts before there is a plan.
    ("loops/evaluation.py", "model"): 1,
    ("loops/generation.py", "engine.max_num_seqs"): 1,
    ("loops/generation.py", "model"): 3,
    ("loops/generation.py", "model.path"): 1,
}
"""All that is left, and why."""


def chain(node: ast.expr) -> list[str]:
    """`cfg.model.path` as its words; empty for what is not such a chain."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        words = chain(node.value)
        return [*words, node.attr] if words else []
    return []


def keys_read(source: str) -> Iterator[str]:
    """The keys of sections that roles own and `source` reads of a configuration, each once."""
    tree = ast.parse(source)
    inner = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        words = chain(node)
        roots = [i for i, word in enumerate(words) if word.lstrip("_") in ("cfg", "config")]
        key = ".".join(words[roots[0] + 1 :]) if roots else ""
        if key.partition(".")[0] in OWNED or key.startswith(tuple(OWNED_KEYS)):
            yield key


def test_only_what_is_listed_reads_a_section_that_a_role_owns() -> None:
    """Else a builder decides again what `hone check` has planned otherwise."""
    root = Path(hone.__file__).parent
    found: Counter[tuple[str, str]] = Counter()
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            place = str(file.relative_to(root))
            found.update((place, key) for key in keys_read(file.read_text(encoding="utf-8")))
    assert dict(found) == LEFT, "read it off a role of the plan (hone.config.roles)"


def test_reads_are_found_wherever_the_configuration_is_held() -> None:
    source = """
def build(cfg, plan):
    self._cfg.trainer.parallel.timeout_s
    plan.config.teacher.path and cfg.reward.model.path
    f(cfg.cluster.num_engines, cfg.rollout.temperature, cfg.cluster.address, role.model.path)
"""
    assert sorted(keys_read(source)) == [
        "cluster.num_engines",
        "reward.model.path",
        "teacher.path",
        "trainer.parallel.timeout_s",
    ]
