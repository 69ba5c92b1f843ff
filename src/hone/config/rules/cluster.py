"""Rules on engines and frozen models with devices of their own, and on sampling ahead."""

from __future__ import annotations

from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, needs, unused, warning, with_facts
from hone.config.rules.view import Fact, required
from hone.distributed.settings import host_and_port

__all__ = ["RULES"]

_ENGINES, _REFERENCES = "cluster.num_engines", "cluster.num_references"
_TEACHERS, _REWARD_MODELS = "cluster.num_teachers", "cluster.num_reward_models"
_CRITICS = "cluster.num_critics"
_TRAINERS, _NODES = "cluster.num_trainers", "cluster.num_nodes"
_PER_NODE = "cluster.devices_per_node"
_SIZE = "engine.tensor_parallel_size"
_FITS = "@devices_needed <= @devices_there"


class ClusterFacts(Facts):
    """The facts that rules on devices compare."""

    @cached_property
    def bad_address(self) -> bool:
        """Whether `cluster.address` names nothing."""
        address = self["cluster.address"] if self["cluster.is_used"] else None
        return address not in (None, "auto") and host_and_port(address) is None

    @cached_property
    def idle_serve(self) -> str:
        """Who makes the best use of idle devices."""
        return "more engines" if self[_ENGINES] else "more trainers"

    @cached_property
    def num_trainers_here(self) -> Fact[int]:
        """Processes that train on this host, where others train elsewhere."""
        return required(self.known.get("num_trainers_here"), "num_trainers_here")

    @cached_property
    def teacher_budget(self) -> Fact[int]:
        """Tokens of a pass of a teacher on one device."""
        key = "teacher.max_tokens_per_forward"
        if self[key] is None:
            return self.reference_budget
        return Fact(self[key], "what a pass of one device may hold", key)

    @cached_property
    def reference_budget(self) -> Fact[int]:
        """Tokens of a pass without backward on one device."""
        key = "trainer.max_tokens_per_forward"
        if self[key] is not None:
            return Fact(self[key], "what a pass of one device may hold", key)
        key = "trainer.max_tokens_per_microbatch"
        return Fact(2 * self[key], "what a pass of one device may hold", f"2 x {key}")

    @cached_property
    def devices_there(self) -> Fact[int]:
        """The devices of all nodes."""
        nodes, each = self[_NODES], required(self[_PER_NODE], "devices_there")
        how = f"cluster.num_nodes {nodes} x cluster.devices_per_node {each}"
        return Fact(nodes * each, "what there is", how)

    @cached_property
    def max_engines(self) -> Fact[int]:
        """Engines, each on one node, that fit where trainers leave devices: these share a node, or
        have whole ones. Frozen models are of one device and take what is left."""
        size, each = self[_SIZE], required(self[_PER_NODE], "max_engines")
        whole, rest = divmod(self["cluster"].num_processes, each)
        left, nodes = (each - rest) % each, self[_NODES] - whole
        noun = (
            f"what fits with engine.tensor_parallel_size {size} devices each on one node, where "
            f"trainers leave {left} of theirs (cluster.devices_per_node less "
            f"{self['cluster'].processes_by})"
        )
        return Fact(left // size + (nodes - (rest > 0)) * (each // size), noun)


_DEVICES = (
    error("cluster.* is set", "not cluster.is_used",
          says="{meant} is set, and nothing but the policy's training has devices of its own",
          why=f"{_ENGINES}, {_CRITICS}, {_REFERENCES}, {_TEACHERS} and {_REWARD_MODELS} are 0, so "
          "that every training process has all on its own device, and there is no cluster",
          fix="set one of these | remove {meant}; --nproc N starts N training processes"),
    unused("cluster.update_weight_buffer_size", f"{_ENGINES} = 0", given=("cluster.is_used",),
           why="weights stay in their processes"),
    unused("cluster.engine_timeout_s", "not cluster.needs_ray", given=("cluster.is_used",),
           why="it is for engines and models that score on devices of their own"),
    needs("ray", "cluster.needs_ray", by="{cluster.used_by}"),
    needs("ray", "cluster.address", "cluster.is_used", "not cluster.needs_ray",
          by="cluster.address"),
    error(f"{_TRAINERS} != @num_processes", given=("cluster.is_used",),
          why="with {cluster.used_by} they are the same",
          fix="leave out --nproc | under torchrun start as many processes"),
    error(f"{_NODES} > 1", "cluster.address = unset", given=("cluster.is_used",),
          why="the run stays on this host", fix=f"name the Ray cluster | {_NODES} = 1"),
    error("@bad_address",
          says="cluster.address is {cluster.address}",
          why="it is host:port of the Ray cluster's head, ray://host:port of Ray's client, or "
          "auto; unset, a Ray of this host alone is started",
          fix="write one of these"),
    *(error(f"{side}.enable_sleep", _ENGINES,
            why="it makes room for whom a device is shared with, and trainers and engines share "
            "none",
            fix=f"{side}.enable_sleep = false")
      for side in ("engine", "trainer")),
    warning(f"{_TRAINERS} > 1", f"{_NODES} > 1", f"{_PER_NODE} = unset", given=("cluster.is_used",),
            why="then all trainers start on this host, and whether they fit is not known",
            fix=f"set {_PER_NODE}"),
    error("@devices_needed > @devices_there", given=("cluster.is_used",),
          fix="use fewer | use more nodes"),
    error(f"{_PER_NODE} does not divide {_TRAINERS}",
          given=("cluster.is_used", _FITS, f"{_TRAINERS} > {_PER_NODE}"),
          why="trainers on several nodes have whole nodes",
          fix=f"use a multiple of {{{_PER_NODE}}}"),
    error(f"{_SIZE} > {_PER_NODE}", given=("cluster.is_used", _FITS),
          why="the ranks of an engine talk twice a layer and must be on one node",
          fix=f"{_SIZE} = {{{_PER_NODE}}} | less"),
    error(f"{_ENGINES} > @max_engines",
          given=(_FITS, f"{_SIZE} <= {_PER_NODE}"),
          fix="use fewer engines | use a size that divides what a node has"),
    warning("@devices_needed < @devices_there", given=("cluster.is_used",),
            why="the rest stays idle",
            fix="give them to {idle_serve}"),
    error(f"{_TRAINERS} > @num_trainers_here", "cluster.address = unset", only=("rl",),
          given=("cluster.is_used",),
          why="the run's Ray would be of one node alone",
          fix="name the Ray cluster that all nodes have joined | no cluster "
          "({cluster.used_by} 0)"),
)  # fmt: skip

_REFERENCE = tuple(
    error(_REFERENCES, *when, given=given, why=why, fix=fix, only=("rl", "plan"))
    for when, given, why, fix in (
        (("algorithm.kl.coef = 0",), (),
         "there is no reference model and nothing for it to score",
         f"set algorithm.kl.coef | {_REFERENCES} = 0"),
        (("model.lora.rank > 0",), (),
         "the reference of adapters is the model without them, which the trainers have anyway",
         f"{_REFERENCES} = 0"),
        (("@longest > @reference_budget",), ("@context_size > 1", "not trainer.micro_batch_size"),
         "a reference has one device",
         f"raise the budget | {_REFERENCES} = 0: beside the policy it shares the tokens of a row"),
    )
)  # fmt: skip

_SCORERS = (
    error(_TEACHERS, "teacher.path = unset", only=("rl", "plan"),
          why="there is no teacher", fix=f"set teacher.path | {_TEACHERS} = 0"),
    error(_TEACHERS, "@longest > @teacher_budget", only=("rl", "plan"),
          given=("teacher.path", "@context_size > 1", "not trainer.micro_batch_size"),
          why="a teacher has one device",
          fix=f"raise the budget | {_TEACHERS} = 0: beside the policy it shares tokens of a row"),
    error(_REWARD_MODELS, "reward.model.path = unset", only=("rl", "plan"),
          why="there is no reward model", fix=f"set reward.model.path | {_REWARD_MODELS} = 0"),
    error(_REWARD_MODELS, f"{_SIZE} < @num_processes", only=("rl",), given=("not @is_apart",),
          why="then several engines are on trainers' devices, each scores its own samples, and the "
          "first process alone reaches the reward models",
          fix=f"set {_ENGINES} | {_REWARD_MODELS} = 0"),
)  # fmt: skip

_CRITIC = (
    error(_CRITICS, "algorithm.advantage != gae", only=("rl", "plan"),
          why="there is no critic", fix=f"algorithm.advantage = gae | {_CRITICS} = 0"),
)  # fmt: skip

_PIPELINE = (
    unused("pipeline.in_flight", "pipeline.max_staleness = 0",
           instead="pipeline.max_staleness = 1"),
    *(error(f"{side}.enable_sleep", "pipeline.max_staleness", f"{_ENGINES} = 0",
            why="it makes room for whom a device is shared with, and here trainer and engine work "
            "on one device at the same time",
            fix=f"{side}.enable_sleep = false | set {_ENGINES}")
      for side in ("engine", "trainer")),
    error("pipeline.max_staleness", f"{_ENGINES} = 0", "run.device = cuda",
          why="the engine runs in a thread beside the trainer, and on a GPU neither may wait for "
          "the device while the other records CUDA graphs",
          fix=f"set {_ENGINES} | run.device = cpu | pipeline.max_staleness = 0"),
    error(f"{_SIZE} > 1", "pipeline.max_staleness", f"{_ENGINES} = 0",
          why="the engine runs in a thread of the first training process",
          fix=f"set {_ENGINES} | {_SIZE} = 1"),
    error("rollout.oversample_prompts", "pipeline.max_staleness",
          why="engines begin samples ahead anyway, as many as pipeline.max_staleness allows",
          fix="rollout.oversample_prompts = 0"),
)  # fmt: skip

RULES = with_facts(ClusterFacts, *_DEVICES, *_CRITIC, *_REFERENCE, *_SCORERS, *_PIPELINE)
