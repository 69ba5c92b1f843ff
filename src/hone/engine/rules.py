"""Rules on engines: concurrency, memory, tensor parallelism, exact mode. The rules on one backend
lie in its folder (`hone.engine.backend_rules`)."""

from __future__ import annotations

from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, excludes, needs, unused, warning, with_facts
from hone.config.rules.view import Fact, NotKnownError
from hone.config.tree import SAMPLING, TREES
from hone.engine.backends import BACKENDS
from hone.engine.settings import BLOCK_SIZE, CPU_CACHE_GIB
from hone.families.model_facts import EXACT_ALIGNMENT, EXACT_HEAD_DIMS
from hone.families.registry import DENSE_FUSED_FAMILIES, DIVIDED_FAMILIES, FUSED_FAMILIES
from hone.families.shape import ROW_TAIL_BYTES
from hone.hardware import GIB

__all__ = ["RULES"]

_SIZE, _BACKEND = "engine.tensor_parallel_size", "engine.backend"
_SMALL_BATCHED_TOKENS = 2048
_NOT_TRAINING = tuple(name for name in SAMPLING if "trainer" not in TREES[name].model_fields)
_EXACT_RUNS = (*SAMPLING, "bench engine", "bench train")
_FUSED = f"{', '.join(FUSED_FAMILIES)} with the activation silu"
"""Models with fused decode layers, dense or with experts, as text."""
_DENSE_FUSED = f"{', '.join(DENSE_FUSED_FAMILIES)} with the activation silu"
"""Dense models with fused decode layers, as text."""
_DIVIDED = f"{', '.join(DIVIDED_FAMILIES)} with the activation silu"
"""Models that engines divide among devices, as text."""


class EngineFacts(Facts):
    """The facts that rules on engines compare."""

    @cached_property
    def samples_per_step(self) -> Fact[int]:
        """Number of samples that a rollout step starts."""
        keys = (
            "rollout.prompts_per_step",
            "rollout.oversample_prompts",
            "rollout.n_samples_per_prompt",
        )
        prompts, more, samples = (self[key] for key in keys)
        how = f"({keys[0]} + {keys[1]}) x {keys[2]}"
        return Fact((prompts + more) * samples, "the samples of a step", how)

    @cached_property
    def needs_several_samples(self) -> bool:
        """Whether one sample of a prompt is an error."""
        compares = self["algorithm"].needs.samples_per_group > 1 and self.learns_from_rewards
        return compares or self["rollout.dynamic_sampling"]

    @cached_property
    def predicts_memory(self) -> bool:
        """Whether what each GPU has to hold is predicted, and compared with what it has."""
        plan, gpu = self.plan, self.plan.devices.gpu
        is_known = plan.shape is not None and plan.world_size is not None and plan.problem is None
        return is_known and not plan.is_on_cpu and gpu is not None and bool(gpu.memory_gib)

    @cached_property
    def broken_rows(self) -> int:
        """A row length, on one device of an engine, that int8 weights do not support; 0 where all
        are supported."""
        tensors = () if self.plan.shape is None else self.plan.shape.tensors()
        size = self["engine.tensor_parallel_size"]
        widths = (t.local(size)[-1] for t in tensors if t.is_layer_matrix)
        return next((width for width in widths if width % ROW_TAIL_BYTES), 0)

    @cached_property
    def uncut_matrix(self) -> str:
        """An int8 matrix that each decode step on a GPU would have to unpack, as text; empty where
        there is none."""
        tensors = (
            () if self.plan.shape is None or self.plan.is_on_cpu else self.plan.shape.tensors()
        )
        size = self["engine.tensor_parallel_size"]
        found = (t for t in tensors if t.is_layer_matrix and not t.is_cut(size))
        return next((f"{t.name} ({' x '.join(map(str, t.local(size)))})" for t in found), "")

    @cached_property
    def has_fused_layers(self) -> bool:
        """Whether decoding runs the model with hone's fused layers."""
        return self.model.has_fused_layers

    @cached_property
    def has_dense_fused_layers(self) -> bool:
        """Whether decoding runs the model with hone's fused layers, and the model is dense."""
        return self.model.has_dense_fused_layers

    @cached_property
    def is_divided(self) -> bool:
        """Whether several ranks of an engine can share the model's layers."""
        return self.model.is_divided

    @cached_property
    def exact_misfits(self) -> list[str]:
        """Sizes of the model that the kernels of exact mode do not support, as `name = number`."""
        return self.model.exact_misfits

    @cached_property
    def kv_cache_gib(self) -> Fact[float]:
        """GiB of the KV cache, where it does not depend on a GPU's memory."""
        key, on_cpu = "engine.kv_cache_gib", self["run.device"] == "cpu"
        if self[key] is None and (not on_cpu or self["engine.backend"] != "embedded"):
            raise NotKnownError("kv_cache_gib")
        if self[key] is None:
            return Fact(CPU_CACHE_GIB, key, "the default on a CPU")
        return Fact(self[key], key)

    @cached_property
    def sequence_gib(self) -> Fact[float]:
        """GiB that one sequence of the longest length takes in the KV cache of each device; an
        engine needs room for one to start."""
        per_token = self.model.kv_bytes_per_token(self.plan.kv_dtype)
        longest = self.plan.max_model_len
        if per_token is None or longest is None:
            raise NotKnownError("sequence_gib")
        num_bytes = -(-longest // BLOCK_SIZE) * BLOCK_SIZE * per_token
        num_bytes //= self["engine.tensor_parallel_size"]
        sampling = self.plan.sampling
        keys = "serve.max_model_len"
        if sampling:
            section = max(sampling, key=lambda name: sampling[name].max_completion_tokens)
            keys = f"data.max_prompt_tokens + {section}.max_completion_tokens"
        how = f"{keys}, {longest} tokens"
        return Fact(num_bytes / GIB, "what one sequence of full length takes, in GiB", how)

    @cached_property
    def undivided(self) -> str:
        """Sizes of the model that `engine.tensor_parallel_size` does not divide, as text."""
        size = self["engine.tensor_parallel_size"]
        if not BACKENDS[self["engine.backend"]].repeats_key_heads:
            return ", ".join(self.model.undivided(size))
        return ", ".join(
            f"{name} = {number}"
            for name, number in self.model.divided.items()
            if number % size and (name != "num_key_value_heads" or size % number)
        )


_ENGINE = (
    warning("engine.max_num_seqs < sampling.n_samples_per_prompt",
            why="the samples of a prompt cannot all run at once",
            fix="raise engine.max_num_seqs"),
    warning("engine.max_num_seqs > @samples_per_step", given=("engine.max_num_seqs is set",),
            why="the rest is not used",
            fix="engine.max_num_seqs = {samples_per_step}"),
    warning("engine.max_num_batched_tokens < engine.max_num_seqs",
            given=(f"{_BACKEND} = embedded",),
            why="a decode step takes one token of each running sequence, so that only so many can "
            "run",
            fix="raise engine.max_num_batched_tokens"),
    warning(f"engine.max_num_batched_tokens < {_SMALL_BATCHED_TOKENS}", "run.device = cuda",
            given=("engine.max_num_batched_tokens >= engine.max_num_seqs",),
            why="prompts are prefilled in chunks too small to fill a GPU",
            fix=f"engine.max_num_batched_tokens = {_SMALL_BATCHED_TOKENS} | more"),
    warning("engine.enable_prefix_caching", "rollout.n_samples_per_prompt = 1",
            given=("not @needs_several_samples",),
            why="it shares prompts within a group, and helps otherwise only where prompts begin "
            "alike",
            fix="engine.enable_prefix_caching = false | raise rollout.n_samples_per_prompt"),
    warning("not engine.enable_prefix_caching", "sampling.n_samples_per_prompt > 1",
            why="each prompt is prefilled once for each sample",
            fix="engine.enable_prefix_caching = true"),
    unused("engine.enable_sleep", only=(*_NOT_TRAINING, "bench engine"),
           why="it frees the KV cache while a trainer works, and nothing trains here"),
    warning("engine.gpu_memory_utilization > 0.8", "engine.kv_cache_gib = unset", only=("rl",),
            given=("not @is_apart", "not engine.enable_sleep", "not @predicts_memory"),
            why="the trainer needs the same GPU for gradients, optimizer and activations",
            fix="engine.gpu_memory_utilization = 0.5 | set engine.kv_cache_gib"),
    unused("engine.gpu_memory_utilization", "engine.kv_cache_gib",
           why="that is used instead", instead="remove engine.kv_cache_gib"),
    unused("engine.gpu_memory_utilization", "run.device = cpu",
           given=("engine.kv_cache_gib = unset",),
           why="there engine.kv_cache_gib says how large the cache is"),
    error("@kv_cache_gib < @sequence_gib",
          why="it must hold one",
          fix="raise engine.kv_cache_gib | shorten sequences"),
    error("engine.kv_cache_dtype = fp8", "@lacks_fp8",
          says="engine.kv_cache_dtype is fp8, and the GPU of run.device is {gpu}",
          why="it has no eight-bit floats", fix="engine.kv_cache_dtype = auto"),
    error("engine.kv_cache_dtype = fp8", "@is_hybrid", given=(f"{_BACKEND} = embedded",),
          says="engine.kv_cache_dtype is fp8, and {the_model} has layers of gated linear attention",
          why="few of its layers have keys and values, so that little would be saved",
          fix="engine.kv_cache_dtype = auto"),
    error("engine.weight_dtype = int8", "not @has_fused_layers", given=(f"{_BACKEND} = embedded",),
          says="engine.weight_dtype is int8, and {the_model} is of the family {family}",
          why=f"only {_FUSED} have products of such weights", fix="engine.weight_dtype = auto"),
    error("engine.weight_dtype = int8", "@broken_rows", given=(f"{_BACKEND} = embedded",),
          says="engine.weight_dtype is int8, and a matrix of {the_model} has rows of {broken_rows}",
          why="its rows are multiples of 16 values, on each device",
          fix="engine.weight_dtype = auto"),
    warning("engine.weight_dtype = int8", "@uncut_matrix", given=(f"{_BACKEND} = embedded",),
            says="engine.weight_dtype is int8, and each device has {uncut_matrix} of {the_model}",
            why="kernels multiply codes by 64 outputs and 128 inputs, and others are unpacked in "
            "each decode step, which takes longer than to read them in the model's format",
            fix="engine.weight_dtype = auto | use another engine.tensor_parallel_size"),
    needs("cuda.bindings", f"{_BACKEND} = embedded", "@uses_gpu_of_host",
          by=f"{_BACKEND}=embedded on a GPU"),
)  # fmt: skip

_TENSOR_PARALLEL = (
    error(f"{_SIZE} does not divide @num_processes", only=("rl",), given=("not @is_apart",),
          why="a colocated engine takes the devices of as many trainer processes",
          fix=f"start a multiple of {{{_SIZE}}} processes (--nproc N) | give engines devices of "
          "their own: cluster.num_engines"),
    error(f"{_SIZE} > 1", "not @is_divided",
          given=(f"{_BACKEND} = embedded",),
          says=f"{_SIZE} is {{{_SIZE}}}, and {{the_model}} is of the family {{family}}",
          why=f"only {_DIVIDED} are divided among devices", fix=f"{_SIZE} = 1"),
    error(f"{_SIZE} > 1", "@undivided",
          says=f"{_SIZE} is {{{_SIZE}}}, which does not divide {{undivided}} of {{the_model}}",
          fix=f"use a smaller power of two for {_SIZE}; further devices run as replicas"),
    error(f"{_SIZE} does not divide @num_processes", only=_NOT_TRAINING,
          why="each device of an engine takes a process, and further engines are replicas",
          fix=f"start a multiple of {{{_SIZE}}} processes (--nproc N)"),
    error(f"{_SIZE} != @num_processes", only=("bench engine",),
          why="one engine is measured, with a process for each of its devices",
          fix=f"start {{{_SIZE}}} of them, with torchrun --nproc-per-node where it is more than 1"),
)  # fmt: skip

_EXACT = (
    *excludes("model.exact", "model.exact = false", {
        "run.device = cpu": ("its kernels are for GPUs", "cuda"),
        "model.dtype = float32": ("it computes in bfloat16 alone", "auto"),
        "engine.kv_cache_dtype = fp8": ("the trainer does not round keys and values", "auto"),
        "engine.weight_dtype = int8": ("the trainer does not round weights", "auto"),
        f"{_SIZE} > 1": ("sums over devices are taken in another order than the trainer's", "1"),
    }),
    error("model.exact", "not @has_dense_fused_layers", only=_EXACT_RUNS,
          says="model.exact is on, and {the_model} is of the family {family}",
          why=f"it serves {_DENSE_FUSED}",
          fix="model.exact = false"),
    error("model.exact", "@exact_misfits", only=_EXACT_RUNS, given=("@has_dense_fused_layers",),
          says="model.exact is on, and {the_model} has {exact_misfits}",
          why=f"its kernels take heads of {', '.join(map(str, EXACT_HEAD_DIMS))} and widths that "
          f"are multiples of {EXACT_ALIGNMENT}",
          fix="model.exact = false"),
    needs("triton", "model.exact", "@uses_gpu_of_host", by="model.exact",
          instead="model.exact = false", only=_EXACT_RUNS),
)  # fmt: skip

RULES = with_facts(EngineFacts, *_ENGINE, *_TENSOR_PARALLEL, *_EXACT)
