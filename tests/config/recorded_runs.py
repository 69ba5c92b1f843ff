"""The runs that between them make each key of a tree be read, and what is known of the others."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hone.config import schema
from hone.config.base import Section
from hone.config.tree import TREES
from tests.config.key_reads import KeyReads, Readers
from tests.config.walk import Row, Seen, both, observe
from tests.config.walk_rows import ROWS
from tests.config.walk_rows.inference import HELD_OUT, SCORED
from tests.config.walk_rows.rl import AHEAD, GAE, JUDGE, PARTIAL, TEACHER
from tests.config.walk_rows.shared import EVAL_HUB, HUB, KL, LORA, MUON, TRACED
from tests.config.walk_rows.simulated import TEACHER as PLANNED_TEACHER
from tests.config.walk_rows.training import KTO, SFT_EVAL_HUB, SFT_HUB

ROOT = Path(__file__).parents[2]
TOO_LONG = ("--data.max_prompt_tokens=3", "--data.overlong_prompts=error")
REFUSED_RUNS = (TOO_LONG,)
"""Runs that end with an error, as they should."""
FROM_THE_HUB = (*HUB, *EVAL_HUB)
NO_EVAL = ("--data.eval=[]", "--eval.every_n_steps=0")
OTHER_STEPS = ("--trainer.optimizer.schedule=linear", "--trainer.recompute=full", *MUON)
ENV = ("--env.path=envs.py:Live", "--reward.max_failure_rate=1")
PASSES = ("--eval.pass_function=even",)
SUPERVISED_RUNS = ((*LORA, *TRACED), (*OTHER_STEPS, *NO_EVAL))
RUNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "rl": (
        (*LORA, *FROM_THE_HUB, *KL, *ENV, *TRACED, "--profile.rollout.steps=[0]"),
        (
            *(*TEACHER, "--teacher.loss=forward_kl", "--teacher.reward_coef=0.5"),
            *(*JUDGE, *PARTIAL, "--rollout.dynamic_sampling=true"),
            *(*OTHER_STEPS, *NO_EVAL),
        ),
        (*GAE, "--critic.path=other", "--run.steps=1", "--eval.every_n_steps=1", *PASSES),
        (*AHEAD, *KL),
    ),
    "sft": (*SUPERVISED_RUNS, (*SFT_HUB, *SFT_EVAL_HUB)),
    "dpo": (
        *SUPERVISED_RUNS,
        (*FROM_THE_HUB, "--algorithm.loss=simpo"),
        (*KTO, "--data.train=[{path: labelled.jsonl}]", "--data.eval=[{path: labelled.jsonl}]"),
    ),
    "reward-model": (*SUPERVISED_RUNS, FROM_THE_HUB),
    "eval": (
        (*EVAL_HUB, *ENV),
        (*JUDGE, *PASSES, *HELD_OUT[:1], *HUB, *HELD_OUT[2:]),
    ),
    "generate": (
        (*HUB, *ENV),
        (*SCORED, *JUDGE, "--keep=passing", "--n_samples_per_prompt=2"),
        TOO_LONG,
    ),
    "serve": (),
    "bench engine": (),
    "bench train": (LORA, OTHER_STEPS),
    "plan": (
        (*LORA, *PLANNED_TEACHER, "--model.path=Qwen/Qwen3-0.6B"),
        ("--plan.lengths.distribution=file", "--plan.lengths.path=lengths.jsonl"),
    ),
}
"""Flags of each run after the smallest one."""


@dataclass(frozen=True)
class Unread:
    """Why no recorded run reads a key, and where it is read all the same."""

    why: str
    source: str | None
    """The file that reads it, which must name `attribute`; None where only checks look at it."""
    attribute: str = ""


OF_A_GPU = Unread("of a GPU's memory", "src/hone/engine/kv_cache.py", "gpu_memory_utilization")
REFUSED = Unread("the checks refuse it where no engine samples, and on a CPU", None)
CARRIED = "which is simulated as it is, and goes into the recipe that is written"
NO_REFERENCE = {
    f"trainer.parallel.reference_{name}_size": Unread(
        "there is no reference, which the checks say", None
    )
    for name in ("ring", "ulysses")
}
UNREAD: Mapping[str, Mapping[str, Unread]] = {
    "rl": {
        "engine.gpu_memory_utilization": OF_A_GPU,
        "pipeline.in_flight": Unread(
            "after the first rollout of engines apart", "src/hone/rollout/collector.py", "in_flight"
        ),
        "cluster.num_nodes": Unread("on a Ray cluster", "src/hone/distributed/ray.py", "num_nodes"),
        **{
            f"critic.parallel.{name}": Unread(
                "of a critic in processes of its own: all are taken over together",
                "src/hone/config/roles.py",
                "model_fields",
            )
            for name in (
                *("zero_stage", "fsdp_size", "tensor_parallel_size", "pipeline_parallel_size"),
                *("expert_parallel_size", "ulysses_size", "ring_size"),
            )
        },
    },
    "sft": {**NO_REFERENCE, "model.exact": REFUSED},
    "dpo": {"model.exact": REFUSED},
    "reward-model": {**NO_REFERENCE, "model.exact": REFUSED},
    "eval": {"engine.gpu_memory_utilization": OF_A_GPU},
    "generate": {"engine.gpu_memory_utilization": OF_A_GPU},
    "serve": {"engine.gpu_memory_utilization": OF_A_GPU},
    "bench engine": {
        "engine.gpu_memory_utilization": OF_A_GPU,
        "engine.backend": Unread("the checks refuse all but the embedded engine", None),
    },
    "bench train": NO_REFERENCE,
    "plan": {
        "algorithm.correction.kind": Unread(
            f"needed by asynchronous modes, {CARRIED}", "src/hone/tools/plan/comparison.py", "kind"
        ),
        "cluster.address": Unread(CARRIED, "src/hone/tools/plan/search.py", "address"),
        "cluster.num_trainers": Unread(CARRIED, "src/hone/planner/fitting.py", "num_trainers"),
        "cluster.engine_timeout_s": Unread(CARRIED, None),
    },
}
"""Keys that no recorded run reads, and why."""


@dataclass(frozen=True)
class Recorded:
    """What the recorded runs of a tree have read, and what the smallest one left."""

    readers: Readers
    seen: Seen
    failed: tuple[str, ...]
    """Runs that neither ended well nor were stopped on purpose, with what they said."""


def smallest(tree: str, flags: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...], None]:
    """The smallest run of a tree, with further flags."""
    command, flags, _ = both(tree, "run.seed", Row("0", "samples", flags))[0]
    return command, flags, None


def record(tree: str, inputs: Path, folder: Path) -> Recorded:
    """Run what reads the keys of a tree."""
    readers: Readers = {}
    every: list[Seen] = []
    failed: list[str] = []
    for number, flags in enumerate(((), *RUNS[tree])):
        reads = KeyReads(tree)
        with pytest.MonkeyPatch.context() as patch:
            reads.record(patch)
            every.append(observe(inputs, folder / f"read-{number}", *smallest(tree, flags)))
        if every[-1]["exit"] not in (0, "stopped") and flags not in REFUSED_RUNS:
            failed.append(f"{tree} {' '.join(flags)}: {every[-1]['log'][-600:]}")
        for key, names in reads.readers.items():
            readers.setdefault(key, set()).update(names)
    return Recorded(readers, every[0], tuple(failed))


def unread(tree: str, readers: Readers) -> list[str]:
    """What is wrong with the reads of a tree: keys that nobody reads, and notes of `UNREAD` that no
    longer hold. Keys that a rule says to have no effect need no reader."""
    wrong: list[str] = []
    for key, row in ROWS[tree].items():
        why = UNREAD[tree].get(key)
        is_useless = row.shows.startswith("log:") and "no effect" in row.shows
        if key not in readers and why is None and not is_useless:
            wrong.append(f"{key}: no recorded run of `hone {tree}` reads it")
        elif key in readers and why is not None:
            wrong.append(f"{key} is said to be unread, and is read by {sorted(readers[key])}")
        elif why is not None and why.source is not None and not _names(why.source, why.attribute):
            wrong.append(f"{key} is said to be read in {why.source}, which names no such attribute")
    gone = UNREAD[tree].keys() - ROWS[tree].keys()
    return [*wrong, *(f"{key} is said to be unread, and is no key" for key in sorted(gone))]


@cache
def _names(source: str, attribute: str) -> bool:
    """Whether a file reads an attribute of that name."""
    nodes = ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8")))
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def section_file(tree: str, key: str) -> str:
    """The file of the class that defines a key, from the root of the repository."""
    path = tuple(key.split("."))
    owner = schema.locate(TREES[tree], path[:-1]) if len(path) > 1 else None
    section = TREES[tree] if owner is None else owner.annotation
    return _file_of(_defining(section, path[-1]))


def _defining(section: type[Section], name: str) -> str:
    found = (base for base in section.__mro__ if name in inspect.get_annotations(base))
    return next(found, section).__module__


def _file_of(module: str) -> str:
    name = f"src/{module.replace('.', '/')}"
    return f"{name}.py" if (ROOT / f"{name}.py").exists() else f"{name}/__init__.py"


COST_S = {
    **{"rl": 2.5, "sft": 1.6, "dpo": 1.6, "reward-model": 1.6, "eval": 1.8},
    **{"generate": 0.6, "serve": 1.0, "bench engine": 0.5, "bench train": 1.4, "plan": 1.5},
}
"""CPU seconds that the effect of a key takes, in about."""
BUDGET_S = 30.0
"""Of the effects that the quick suite looks at."""


def changed_keys(tree: str, changed_files: set[str], readers: Readers) -> list[str]:
    """Keys whose row, readers or section lie in changed files, those nearest to the change first:
    a row is of one key, a reader of a few, and a section of many. Equals go by their name."""
    return [key for _, key in _changed(tree, changed_files, readers)]


def _changed(tree: str, files: set[str], readers: Readers) -> Iterator[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for key, row in ROWS[tree].items():
        read_in = {_file_of(name.partition(":")[0]) for name in readers.get(key, ())}
        if (why := UNREAD[tree].get(key)) is not None and why.source is not None:
            read_in.add(why.source)
        near = (set(row.files), read_in, {section_file(tree, key)})
        if (distance := next((n for n, each in enumerate(near) if each & files), None)) is not None:
            found.append((distance, key))
    yield from sorted(found)


def affordable(
    files: set[str], readers: Mapping[str, Readers], budget_s: float = BUDGET_S
) -> tuple[list[tuple[str, str]], int]:
    """Trees and keys whose effects the quick suite looks at, and how many it leaves to the whole
    one."""
    found = [(*near, tree) for tree in readers for near in _changed(tree, files, readers[tree])]
    chosen: list[tuple[str, str]] = []
    spent = 0.0
    for _, key, tree in sorted(found):
        if spent + COST_S[tree] <= budget_s:
            spent += COST_S[tree]
            chosen.append((tree, key))
    return chosen, len(found) - len(chosen)
