"""Rules on the parallel axes of models other than the policy: a critic, colocated or remote, and a
colocated teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused, with_facts
from hone.config.rules.view import Details, Fact, NotKnownError
from hone.distributed.settings import ParallelConfig
from hone.families.model_facts import ModelFacts
from hone.families.registry import DIVIDED_FAMILIES, SPECS

__all__ = ["RULES"]

_CRITICS, _OWN, _POLICYS = "cluster.num_critics", "critic.parallel", "trainer.parallel"
_GAE = ("algorithm.advantage = gae",)
_APART = (*_GAE, _CRITICS)
_BUDGET, _FORWARD = "max_tokens_per_microbatch", "max_tokens_per_forward"

_SPLIT = ", ".join(DIVIDED_FAMILIES)
"""Families that the tensor axis of training splits."""

Problem = Callable[[ModelFacts, ParallelConfig], str | None]
"""Function that returns why a model cannot be divided in this way; None where it can."""


class CriticFacts(Facts):
    """The facts that rules on a critic's processes compare."""

    @cached_property
    def critic_divisor(self) -> Fact[int]:
        """The divisor that the number of processes of a remote critic must have."""
        parallel = _sizes(self)
        # Experts lie over the processes of a stage, shards over those of them that hold the same
        # part of layers.
        within = {"expert_parallel_size": parallel.expert_parallel_size}
        stages, parts = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
        number = math.lcm(parallel.replica_size, stages * parallel.expert_parallel_size)
        if parallel.zero_stage and parallel.fsdp_size > 0:
            within["fsdp_size"] = parallel.fsdp_size
            number = math.lcm(number, stages * parts * parallel.fsdp_size)
        sizes = {name: getattr(parallel, name) for name in _REPLICA} | within
        how = ", ".join(f"{_key(self, name)} {size}" for name, size in sizes.items() if size > 1)
        return Fact(number, "what the sizes of the critic's axes divide", how)

    @cached_property
    def critic_longest_share(self) -> Fact[int]:
        """Tokens of the longest row that one device of the critic has."""
        row, parallel = self.longest, _sizes(self)
        size = parallel.ring_size * parallel.ulysses_size
        if size == 1:
            return row
        noun = f"its part on each of {size} processes of the critic that share the longest sequence"
        return Fact(-(-row.value // size), noun, f"({row.how}) / {size}")


def _sizes(view: CriticFacts) -> ParallelConfig:
    """The parallel sizes of the critic. Raises NotKnownError without a critic."""
    if "critic" not in view.plan.roles:
        raise NotKnownError("critic")
    return view.plan.roles["critic"].trainer.parallel


def _key(view: CriticFacts, name: str) -> str:
    """The key that a size of the critic is read from."""
    is_own = view[_CRITICS] and view[f"{_OWN}.{name}"] is not None
    return f"{_OWN if is_own else _POLICYS}.{name}"


_REPLICA = ("ring_size", "ulysses_size", "tensor_parallel_size", "pipeline_parallel_size")


def _mixed_shards(view: CriticFacts) -> Iterator[Details]:
    """Experts that are divided over some processes of one set of shards and some of another."""
    parallel = _sizes(view)
    experts, shards = parallel.expert_parallel_size, parallel.fsdp_size
    together = shards * parallel.tensor_parallel_size
    if parallel.zero_stage and shards > 0 and together % experts and experts % together:
        keys = (_key(view, name) for name in ("expert_parallel_size", "fsdp_size"))
        yield dict(zip(("key", "other"), keys, strict=True)) | {"size": experts, "shards": shards}


def _misfit(
    name: str, problem: Problem, *, instead: str
) -> Callable[[CriticFacts], Iterator[Details]]:
    """Finder of sizes that do not fit the critic's model. Where size and model are both the
    policy's, the policy's own rules report it."""

    def find(view: CriticFacts) -> Iterator[Details]:
        parallel, key, path = _sizes(view), _key(view, name), view["critic.path"]
        is_own, model = key.startswith(_OWN), view.plan.roles["critic"].facts
        if model is None or not (is_own or path) or not (text := problem(model, parallel)):
            return
        yield {
            "key": key,
            "size": getattr(parallel, name),
            "which": view.the_model if path is None else "the model at critic.path",
            "problem": text,
            "instead": instead if is_own else f"give the critic its own by {_CRITICS} and {_OWN}",
        }

    return find


def _of_tensor(model: ModelFacts, parallel: ParallelConfig) -> str | None:
    size = parallel.tensor_parallel_size
    if size == 1:
        return None
    if model.family not in (None, *DIVIDED_FAMILIES):
        return f"it is of the family {model.family}, and only layers of {_SPLIT} are split so"
    if model.shape is not None and model.shape.num_experts and parallel.expert_parallel_size % size:
        return "processes that share its matrices have to share its experts too"
    undivided = ", ".join(model.undivided(size))
    return f"the size does not divide {undivided}" if undivided else None


def _of_experts(model: ModelFacts, parallel: ParallelConfig) -> str | None:
    size = parallel.expert_parallel_size
    if size == 1 or model.shape is None:
        return None
    if not model.shape.num_experts:
        return "it has no experts"
    is_divided = model.shape.num_experts % size == 0
    return None if is_divided else f"the size does not divide its {model.shape.num_experts} experts"


def _of_stages(model: ModelFacts, parallel: ParallelConfig) -> str | None:
    stages, groups = parallel.pipeline_parallel_size, parallel.virtual_stages
    if stages == 1:
        return None
    if model.family not in (None, *SPECS):
        return f"what the forward of the family {model.family} does beside its layers is not known"
    if model.shape is None or stages * groups <= model.shape.num_layers:
        return None
    each = "each stage" if groups == 1 else f"each of its {groups} groups of layers in a stage"
    return f"{each} has a layer of its own at least, and it has {model.shape.num_layers}"


def _of_ulysses(model: ModelFacts, parallel: ParallelConfig) -> str | None:
    tensor = parallel.tensor_parallel_size
    if model.undivided(tensor):
        return None
    found = model.ulysses_problems(parallel.ulysses_size, tensor_parallel_size=tensor)
    return found[0] if found else None


def _of_ring(model: ModelFacts, parallel: ParallelConfig) -> str | None:
    return None if parallel.ring_size == 1 else model.ring_problem


def _teacher_misfit(name: str, problem: Problem) -> Callable[[CriticFacts], Iterator[Details]]:
    """Finder of the policy's sizes that do not fit a colocated teacher, which is divided over the
    policy's processes."""

    def find(view: CriticFacts) -> Iterator[Details]:
        role = view.plan.roles.get("teacher")
        if role is None or role.has_own_devices:
            return
        model, parallel = role.facts, role.trainer.parallel.for_reference
        if model is None or not (text := problem(model, parallel)):
            return
        of_reference = f"{_POLICYS}.reference_{name}"
        is_own = view.has(of_reference) and view[of_reference] is not None
        key = of_reference if is_own else f"{_POLICYS}.{name}"
        yield {"key": key, "size": getattr(parallel, name), "problem": text}

    return find


_LAYOUT = (
    unused(f"{_OWN}.*", "algorithm.advantage != gae",
           why="there is no critic", instead="algorithm.advantage = gae"),
    error(f"{_OWN}.* is set", f"{_CRITICS} = 0", given=_GAE, only=("rl", "plan"),
          why="the critic then has the processes of the policy, and their axes",
          fix=f"give it processes of its own by {_CRITICS} | remove {{meant}}"),
    error(f"@critic_divisor does not divide {_CRITICS}", only=("rl", "plan"), given=(_CRITICS,),
          why=f"processes of the critic are divided as {_OWN} says, or where that is unset as "
          "those of the policy are",
          fix=f"use a multiple of {{critic_divisor}} | give the critic smaller sizes in {_OWN}"),
    error(each=_mixed_shards, given=_APART, only=("rl", "plan"),
          says="{key} is {size}, and {other} is {shards}, for the critic",
          why="its experts are divided within one set of shards, or over several whole ones",
          fix=f"set sizes in {_OWN} of which one divides the other"),
    unused(f"{_OWN}.(zero_stage|fsdp_size)", f"{_CRITICS} = 1", given=_GAE,
           why="one process has nobody to share with", instead=f"{_CRITICS} = 2"),
)  # fmt: skip

_MODEL = tuple(
    error(each=_misfit(name, problem, instead=instead), given=_GAE, only=("rl", "plan"),
          says="{key} is {size}, for the critic, which is {which}", why="{problem}",
          fix="use a size that fits | {instead}")
    for name, problem, instead in (
        ("tensor_parallel_size", _of_tensor, f"shard it by {_OWN}.zero_stage 3"),
        ("expert_parallel_size", _of_experts, ""),
        ("pipeline_parallel_size", _of_stages, f"shard it by {_OWN}.zero_stage 3"),
        ("ulysses_size", _of_ulysses, f"share rows by {_OWN}.ring_size, which divides no heads, "
         "where all layers have attention"),
        ("ring_size", _of_ring, f"share rows by {_OWN}.ulysses_size, which divides heads"),
    )
)  # fmt: skip

_TEACHER = tuple(
    error(each=_teacher_misfit(name, problem), only=("rl", "plan"),
          says="{key} is {size}, also for the teacher at teacher.path, which the same processes "
          "hold", why="{problem}",
          fix="use a size that fits both | give the teacher devices of its own by "
          "cluster.num_teachers")
    for name, problem in (
        ("tensor_parallel_size", _of_tensor),
        ("expert_parallel_size", _of_experts),
        ("ulysses_size", _of_ulysses),
        ("ring_size", _of_ring),
    )
)  # fmt: skip

_MEMORY = (
    error("trainer.matmul_precision = fp8", f"{_OWN}.tensor_parallel_size > 1", given=_APART,
          why="parts of a matrix are not rounded",
          fix=f"{_OWN}.tensor_parallel_size = 1 | trainer.matmul_precision = default"),
    *(error(f"{offload} = parameters", f"{zero} != 3",
            given=(*_APART, f"{_CRITICS} > 1", *given),
            why="the critic's other stages keep the gathered weights of all layers on the device",
            fix=f"{_OWN}.zero_stage = 3")
      for offload, zero, given in (
          ("critic.offload", f"{_OWN}.zero_stage", (f"{_OWN}.zero_stage is set",)),
          ("critic.offload", f"{_POLICYS}.zero_stage", (f"{_OWN}.zero_stage = unset",)),
          ("trainer.offload", f"{_OWN}.zero_stage",
           (f"{_OWN}.zero_stage is set", "critic.offload = unset")))),
    error(f"critic.{_BUDGET} < @critic_longest_share", only=("rl",),
          given=(*_GAE, "not trainer.micro_batch_size"),
          why="no pass of the critic could hold it",
          fix=f"raise critic.{_BUDGET} to at least {{critic_longest_share}}"),
    # The policy's budgets, which its own rules compare with its own share.
    *(error(f"trainer.{budget} < @critic_longest_share", only=("rl",),
            given=(*_APART, *given, f"trainer.{budget} >= @longest_share"),
            why="the critic, which has the same budget, shares rows over fewer processes, and no "
            "pass of it could hold one",
            fix=f"critic.{budget} = {{critic_longest_share}} | share its rows by {_OWN}.ring_size")
      for budget, given in (
          (_BUDGET, (f"critic.{_BUDGET} = unset", "not trainer.micro_batch_size")),
          (_FORWARD, (f"critic.{_BUDGET} = unset", f"critic.{_FORWARD} = unset")))),
)  # fmt: skip

RULES = with_facts(CriticFacts, *_LAYOUT, *_MODEL, *_TEACHER, *_MEMORY)
