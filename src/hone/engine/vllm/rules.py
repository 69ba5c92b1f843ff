"""Rules on runs that sample with vLLM."""

from __future__ import annotations

from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, excludes, needs, warning, with_facts
from hone.config.rules.view import required
from hone.config.tree import SAMPLING
from hone.engine.vllm import facts
from hone.engine.vllm.facts import LOWEST_TEMPERATURE, VERSIONS, VLLM_EXPERTS
from hone.extras import installed_version

__all__ = ["RULES"]

_SIZE, _BACKEND, _VLLM = "engine.tensor_parallel_size", "engine.backend", "engine.backend = vllm"


class VllmFacts(Facts):
    """The facts that rules on vLLM compare."""

    @cached_property
    def head_dim(self) -> int:
        """Values of a head of the model."""
        return required(self.plan.shape, "head_dim").head_dim

    @cached_property
    def vllm_version(self) -> str:
        """The installed version of vLLM."""
        is_known = not self.known.get("can_install", False)
        return required(installed_version("vllm") if is_known else None, "vllm")

    @cached_property
    def vllm_version_not_served(self) -> bool:
        """Whether vLLM is installed and cannot be used."""
        return not facts.is_served(self.vllm_version)

    @cached_property
    def vllm_head_dims(self) -> str:
        """Head sizes that the installed vLLM computes on a CPU; empty where the model's is one."""
        served = facts.cpu_head_dims()
        return "" if self.head_dim in served else ", ".join(map(str, served))

    @cached_property
    def has_vllm_experts(self) -> bool:
        """Whether vLLM serves the model's experts, if it has any."""
        return not self.has_experts or self.model.family in VLLM_EXPERTS


RULES = with_facts(
    VllmFacts,
    error(_VLLM, "@sees_images", only=SAMPLING,
          says="engine.backend is vllm, and {the_model} sees images",
          why="vLLM gets texts alone from hone", fix=f"{_BACKEND} = embedded"),
    error(f"{_SIZE} > 1", _VLLM, only=("rl",), given=("not @is_apart",),
          why="colocated with trainers, each vLLM engine has one device",
          fix=f"{_BACKEND} = embedded | {_SIZE} = 1 | give engines devices of their own: "
          "cluster.num_engines"),
    error(_VLLM, "pipeline.max_staleness", "cluster.num_engines = 0",
          why="vLLM runs in processes of its own, and this engine in a thread",
          fix=f"set cluster.num_engines | {_BACKEND} = embedded"),
    error(_VLLM, "run.device = cpu", "@has_experts", only=SAMPLING,
          says="engine.backend is vllm, run.device is cpu, and {the_model} has experts",
          why="on a CPU vLLM packs the weights of experts, and a sync would not reach these copies",
          fix=f"{_BACKEND} = embedded"),
    error(_VLLM, "not @has_vllm_experts", only=SAMPLING,
          says="engine.backend is vllm, and {the_model} has experts and is of the family {family}",
          why=f"of models with experts vLLM serves {', '.join(VLLM_EXPERTS)} here",
          fix=f"{_BACKEND} = embedded"),
    warning(_VLLM, "@has_experts", "not algorithm.routing_replay", only=("rl",),
            says="engine.backend is vllm, {the_model} has experts, and algorithm.routing_replay is "
            "off",
            why="vLLM chooses experts by other kernels than the trainer, and the two send some "
            "tokens to different ones",
            fix="algorithm.routing_replay = true"),
    needs("vllm", _VLLM, by="engine.backend=vllm", instead=f"{_BACKEND} = embedded", only=SAMPLING),
    error(_VLLM, "@vllm_version_not_served", only=SAMPLING,
          says=f"{_BACKEND} is vllm, and version {{vllm_version}} is installed",
          why=f"versions {VERSIONS} are served",
          fix=f"install one of them | {_BACKEND} = embedded"),
    error(_VLLM, "run.device = cpu", "@vllm_head_dims", only=SAMPLING,
          says="engine.backend is vllm, run.device is cpu, and {the_model} has heads of {head_dim}",
          why="on a CPU vLLM computes heads of {vllm_head_dims}",
          fix=f"{_BACKEND} = embedded"),
    *excludes(_VLLM, f"{_BACKEND} = embedded", {
        "model.exact": ("its kernels depend on the batch and are not the trainer's", "false"),
        "engine.kv_cache_dtype = fp8":
            ("its FP8 scales are not set anew for each weight version", "auto"),
        "engine.weight_dtype = int8":
            ("its formats of 8 bits are not filled by syncs", "auto"),
    }),
    error("engine.max_num_batched_tokens < engine.max_num_seqs", _VLLM, only=SAMPLING,
          why="vLLM refuses that",
          fix="raise engine.max_num_batched_tokens"),
    error(f"sampling.temperature < {LOWEST_TEMPERATURE}", _VLLM,
          given=("sampling.temperature > 0",),
          why=f"vLLM raises what is below {LOWEST_TEMPERATURE} to that, and would sample from "
          "another distribution",
          fix=f"use 0 (greedy) | {LOWEST_TEMPERATURE} or more"),
    warning("engine.enable_sleep", _VLLM, "run.device = cpu", only=SAMPLING,
            why="vLLM frees nothing there", fix="remove engine.enable_sleep"),
    error(_VLLM, only=("bench engine",),
          why="`hone bench engine` measures the embedded engine, and runs vLLM beside it where "
          "against is vllm",
          fix=f"{_BACKEND} = embedded"),
)  # fmt: skip
