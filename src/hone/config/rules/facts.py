"""Facts that conditions compare: what follows from a plan, with the settings it comes from."""

from __future__ import annotations

import math
from difflib import get_close_matches

from hone.config import vllm
from hone.config.cluster import host_and_port
from hone.config.engine import BLOCK_SIZE, CPU_CACHE_GIB
from hone.config.rules.view import Fact, NotKnownError, View, fact, outside
from hone.config.tree import SUPERVISED, RLConfig
from hone.extras import installed_version
from hone.families.model_facts import FP8_ALIGNMENT, NF4_BLOCK
from hone.families.registry import (
    DENSE_FUSED_FAMILIES,
    DIVIDED_FAMILIES,
    FUSED_FAMILIES,
    SPECS,
    TENSOR_FAMILIES,
)
from hone.families.shape import ROW_TAIL_BYTES
from hone.families.spec import PROJECTIONS
from hone.families.stages import stage_layers
from hone.hardware import GIB

__all__ = ["DECODED", "DIVIDED", "FAMILIES", "FUSED", "LONG_ROW", "TENSOR", "divisors"]

LONG_ROW = 32768
"""Tokens of a row above which it fills a device by itself: packing several brings nothing."""
_STAGES = "trainer.parallel.pipeline_parallel_size"
_SIZES = "trainer.parallel.ring_size x trainer.parallel.ulysses_size"


# -- rows and batches ----------------------------------------------------------------------------


@fact
def longest(view: View) -> Fact:
    """Tokens of the longest row that is trained."""
    if view.command == "bench train":
        return Fact(view["rows.tokens"], "the longest row", "rows.tokens")
    tokens = view.plan.max_sequence_tokens
    if tokens is None:
        raise NotKnownError("longest")
    return Fact(tokens, "the longest sequence", " + ".join(view.plan.max_sequence_keys))


@fact
def longest_share(view: View) -> Fact:
    """Tokens of the longest row that one device has."""
    row, size = view.fact("longest"), view.number("context_size")
    if size == 1:
        return row
    noun = f"its part on each of {size} processes that share the longest sequence"
    return Fact(-(-row.value // size), noun, f"({row.how}) / {size}")


@fact
def two_rows(view: View) -> Fact:
    """Tokens of two of the longest rows, of those that are packed; where the planner knows that
    memory does not hold two, nothing is asked for."""
    row = view.fact("longest")
    if view.known.get("lacks_room_for_two_rows", False):
        raise NotKnownError("two_rows")
    if view.number("context_size") > 1 or row.value > LONG_ROW:
        raise NotKnownError("two_rows")
    return Fact(2 * row.value, "twice the longest sequence", f"2 x ({row.how})")


@fact
def longest_sample(view: View) -> Fact:
    """Tokens of the longest sequence that is sampled."""
    keys = "data.max_prompt_tokens", view.key("sampling.max_completion_tokens")
    return Fact(sum(view[key] for key in keys), "the longest sequence", " + ".join(keys))


@fact
def completion_limit(view: View) -> int:
    """Tokens that the model's context leaves to completions."""
    return view.number("context_length") - view["data.max_prompt_tokens"]


@fact
def sequences_per_step(view: View) -> Fact:
    """Rows of an optimizer step, over all devices."""
    if view.command == "bench train":
        return Fact(view["rows.per_step"], "the number of rows of a step", "rows.per_step")
    if view.plan.batch is None:
        raise NotKnownError("sequences_per_step")
    key = "trainer.prompts_per_minibatch"
    if view.command in SUPERVISED:
        key = "data.examples_per_step"
    number = view.plan.batch.samples_per_optimizer_step
    return Fact(number, "the number of sequences of an optimizer step", key)


@fact
def longest_pair(view: View) -> Fact:
    """Tokens of the longest pair of rows."""
    gives_values = view.command == "reward-model"
    if not gives_values and (view.command != "dpo" or view["algorithm.loss"] == "kto"):
        raise NotKnownError("longest_pair")
    row, how = view["data.max_tokens"], "data.max_tokens"
    if gives_values:  # which are read before a token that stands behind the last
        row, how = row + 1, "(data.max_tokens + 1)"
    share = -(-2 * row // view.number("context_size"))
    return Fact(share, "a process's share of the longest pair", f"2 x {how}")


@fact
def samples_per_step(view: View) -> Fact:
    """Samples that a step of a rollout begins."""
    keys = "rollout.prompts_per_step", "rollout.oversample_prompts", "rollout.n_samples_per_prompt"
    prompts, more, samples = (view[key] for key in keys)
    how = f"({keys[0]} + {keys[1]}) x {keys[2]}"
    return Fact((prompts + more) * samples, "the samples of a step", how)


@fact
def optimizer_steps(view: View) -> Fact:
    """Optimizer steps of the whole run."""
    if view.plan.batch is None:
        raise NotKnownError("optimizer_steps")
    return Fact(
        view.plan.batch.optimizer_steps,
        "the optimizer steps of the run",
        "run.steps x optimizer steps of each",
    )


@fact
def optimizer_steps_per_rollout(view: View) -> Fact:
    """Optimizer steps that the samples of a step are used for."""
    if view.plan.batch is None:
        raise NotKnownError("optimizer_steps_per_rollout")
    number = view.plan.batch.optimizer_steps_per_rollout
    how = "trainer.prompts_per_minibatch, trainer.num_epochs"
    return Fact(number, "the number of optimizer steps a rollout", how)


@fact
def learns_from_rewards(view: View) -> bool:
    """Whether rewards make advantages, rather than a teacher alone."""
    return view["teacher.path"] is None or view["teacher.reward_coef"] > 0


@fact
def critic_recomputes(view: View) -> bool:
    """Whether there is a critic, some of whose layers are recomputed."""
    cfg = view.plan.config
    if not isinstance(cfg, RLConfig) or not cfg.algorithm.needs_critic:
        return False
    return cfg.critic_trainer.recompute != "off"


@fact
def minibatch_below(view: View) -> int:
    """The largest mini-batch that divides a step and is no larger than what was asked for."""
    asked = view["trainer.prompts_per_minibatch"]
    return max(n for n in divisors(view["rollout.prompts_per_step"]) if n <= asked)


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


@fact
def or_share_rows(view: View) -> str:
    """What else serves a long row than the budget that just holds it: more for short rows, which
    are packed; for long ones more processes that share it."""
    budget, size = view["trainer.max_tokens_per_microbatch"], view.number("context_size")
    row, world_size = view.number("longest"), view.plan.world_size
    if row <= LONG_ROW:
        return f"to {2 * -(-row // size)} or more, which packs well"
    if world_size is None:
        return f"with several devices share rows by {_SIZES}"
    larger = [n for n in range(size + 1, world_size + 1) if world_size % n == 0]
    if not larger:
        return ""
    serving = next((n for n in larger if -(-row // n) <= budget), larger[-1])
    share = -(-row // serving)
    enough = "" if share <= budget else f", and trainer.max_tokens_per_microbatch to {share}"
    return f"share rows over processes: set {_SIZES} to {serving}{enough}"


# -- processes -----------------------------------------------------------------------------------


@fact
def num_processes(view: View) -> Fact:
    """Processes that train, or without a trainer sample."""
    if view.plan.world_size is None:
        raise NotKnownError("world_size")
    apart = view.command == "rl" and view["cluster.num_critics"]
    of = " that train the policy" if apart else ""
    return Fact(view.plan.world_size, f"the number of processes{of}")


@fact
def context_size(view: View) -> Fact:
    """Processes that share the tokens of a row."""
    keys = "trainer.parallel.ring_size", "trainer.parallel.ulysses_size"
    return Fact(view[keys[0]] * view[keys[1]], " x ".join(keys))


@fact
def num_shares(view: View) -> Fact:
    """Groups of processes that each train rows of their own."""
    together = view["trainer.parallel.tensor_parallel_size"] * view.number("context_size")
    together *= view[_STAGES]
    number = view.number("num_processes") // together
    those = f"groups of {together} processes" if together > 1 else "processes"
    return Fact(number, f"the number of {those}")


@fact
def reference_replica(view: View) -> Fact:
    """Processes of a replica of a model that only scores rows, where sizes of its own are set."""
    sizes = {key: view[key] for key in _REFERENCE_SIZES if view[key] is not None}
    if not sizes or view.plan.problem is not None:
        raise NotKnownError("reference_replica")
    of_policy = {
        key: view[key.replace("reference_", "")] for key in _REFERENCE_SIZES if key not in sizes
    }
    tensor = {_TENSOR: view[_TENSOR]}
    how = " x ".join(f"{key} {size}" for key, size in (sizes | tensor).items())
    number = math.prod([*sizes.values(), *of_policy.values(), *tensor.values()])
    return Fact(number, "the number of processes of a replica of reference or teacher", how)


_REFERENCE_SIZES = (
    "trainer.parallel.reference_ring_size",
    "trainer.parallel.reference_ulysses_size",
)
_TENSOR = "trainer.parallel.tensor_parallel_size"


@fact
def num_laid_out(view: View) -> Fact:
    """Processes that train, as few as make up one replica where the number is not known."""
    return Fact(view.plan.policy.axes.world, "the number of processes")


@fact
def bad_address(view: View) -> bool:
    """Whether `cluster.address` names nothing."""
    address = view["cluster.address"] if view["cluster.is_used"] else None
    return address not in (None, "auto") and host_and_port(address) is None


@fact
def idle_serve(view: View) -> str:
    """Who makes the best use of idle devices."""
    return "more engines" if view["cluster.num_engines"] else "more trainers"


@fact
def teacher_budget(view: View) -> Fact:
    """Tokens of a pass of a teacher on one device."""
    key = "teacher.max_tokens_per_forward"
    if view[key] is None:
        return view.fact("reference_budget")
    return Fact(view[key], "what a pass of one device may hold", key)


@fact
def scorer_devices(view: View) -> Fact:
    """Devices of frozen models and of a critic apart."""
    cluster = view["cluster"]
    numbers = {"critic": cluster.num_critics, **cluster.num_scorers}
    how = " + ".join(f"cluster.num_{role}s" for role, number in numbers.items() if number)
    noun = "the number of devices of frozen models" + " and the critic" * bool(cluster.num_critics)
    return Fact(sum(numbers.values()), noun, how)


@fact
def reference_budget(view: View) -> Fact:
    """Tokens of a pass without backward on one device."""
    key = "trainer.max_tokens_per_forward"
    if view[key] is not None:
        return Fact(view[key], "what a pass of one device may hold", key)
    key = "trainer.max_tokens_per_microbatch"
    return Fact(2 * view[key], "what a pass of one device may hold", f"2 x {key}")


@fact
def devices_needed(view: View) -> Fact:
    """The sum of the devices of all roles."""
    roles = view["cluster"].devices(view["engine.tensor_parallel_size"])
    how = " + ".join(role.words for role in roles)
    return Fact(sum(role.number for role in roles), "the number of devices of all roles", how)


@fact
def devices_there(view: View) -> Fact:
    """The devices of all nodes."""
    nodes, each = view["cluster.num_nodes"], view["cluster.devices_per_node"]
    if each is None:
        raise NotKnownError("devices_there")
    how = f"cluster.num_nodes {nodes} x cluster.devices_per_node {each}"
    return Fact(nodes * each, "what there is", how)


@fact
def max_engines(view: View) -> Fact:
    """Engines, each on one node, that fit beside the trainers, which share one or have whole ones;
    frozen models are of one device and take what is left."""
    size, each = view["engine.tensor_parallel_size"], view["cluster.devices_per_node"]
    if each is None:
        raise NotKnownError("max_engines")
    whole, rest = divmod(view["cluster"].num_processes, each)
    beside, nodes = (each - rest) % each, view["cluster.num_nodes"] - whole
    noun = (
        f"what fits with engine.tensor_parallel_size {size} devices each on one node, where "
        f"trainers leave {beside} of theirs (cluster.devices_per_node less "
        f"{view['cluster'].processes_by})"
    )
    return Fact(beside // size + (nodes - (rest > 0)) * (each // size), noun)


@fact
def devices_how(view: View) -> str:
    """The settings that say how many devices are needed."""
    needed = view.fact("devices_needed")
    return f"{needed.how} = {needed.value}"


# Where a command starts processes. `hone check` plans for other hosts too, and does not know them.
outside("num_started", "started_by", "gpus_here", "cores_here", "num_trainers_here")
outside("first_rows", "unread_arrays", "data_problems", "weak_pairs", "reward_problems")
outside("hub_problems")


# -- the model -----------------------------------------------------------------------------------


@fact
def the_model(view: View) -> str:
    """The model, by the setting that names it."""
    named = getattr(view.plan.config.model, "shape", None)
    return "the model of model.shape" if named else "the model at model.path"


@fact
def unknown_targets(view: View) -> str:
    """Names in `model.lora.target_modules` that no layer has, each with what is near."""
    unknown = [name for name in view["model.lora.target_modules"] if name not in PROJECTIONS]
    near = {name: get_close_matches(name, PROJECTIONS, 1) for name in unknown}
    told = [f"{name} (did you mean {near[name][0]}?)" if near[name] else name for name in unknown]
    return ", ".join(told)


@fact
def vllm_version(view: View) -> str:
    """The installed version of vLLM."""
    version = None if view.known.get("can_install", False) else installed_version("vllm")
    if version is None:
        raise NotKnownError("vllm")
    return version


@fact
def vllm_version_not_served(view: View) -> bool:
    """Whether vLLM is installed and cannot be used."""
    return not vllm.is_served(view.number("vllm_version"))


@fact
def head_dim(view: View) -> int:
    """Values of a head of the model."""
    if view.plan.shape is None:
        raise NotKnownError("head_dim")
    return view.plan.shape.head_dim


@fact
def vllm_head_dims(view: View) -> str:
    """Head sizes that the installed vLLM computes on a CPU; empty where the model's is one."""
    served = vllm.cpu_head_dims()
    return "" if view.number("head_dim") in served else ", ".join(map(str, served))


@fact
def context_length(view: View) -> Fact:
    """Positions the model was made for."""
    return Fact(view.model.context_length, f"the context of {view.number('the_model')}")


FAMILIES = ", ".join(SPECS)
"""Those that hone has a spec of."""
FUSED = f"{', '.join(DENSE_FUSED_FAMILIES)} with the activation silu"
"""Models whose decode is fused."""
DECODED = f"{', '.join(FUSED_FAMILIES)} with the activation silu"
"""Models whose decode is fused, experts or not."""
DIVIDED = f"{', '.join(DIVIDED_FAMILIES)} with the activation silu"
"""Models that engines divide among devices."""
TENSOR = ", ".join(TENSOR_FAMILIES)
"""Families that the tensor axis of training splits."""


@fact
def has_tensor_plan(view: View) -> bool:
    """Whether the tensor axis splits the model's layers."""
    return view.model.family in (None, *TENSOR_FAMILIES)


@fact
def family(view: View) -> str:
    """`model_type` of the model, with an activation that layers of ours do not have."""
    act = view.model.hidden_act
    with_act = f" with the activation {act}" if act not in (None, "silu") else ""
    return f"{view.model.family}{with_act}"


@fact
def has_spec(view: View) -> bool:
    """Whether the model's family is one of hone's own."""
    return view.model.family in (None, *SPECS)


@fact
def has_experts(view: View) -> bool:
    """Whether layers of the model are a mixture of experts."""
    if view.model.shape is None:
        raise NotKnownError("has_experts")
    return view.model.shape.num_experts > 0


@fact
def has_vllm_experts(view: View) -> bool:
    """Whether vLLM serves the model's experts, if it has any."""
    return not has_experts(view) or view.model.family in vllm.VLLM_EXPERTS


@fact
def num_experts(view: View) -> Fact:
    """Of a layer."""
    if view.model.shape is None:
        raise NotKnownError("num_experts")
    return Fact(view.model.shape.num_experts, "the number of a layer's experts")


@fact
def num_layers(view: View) -> Fact:
    """Of the model."""
    if view.model.shape is None:
        raise NotKnownError("num_layers")
    return Fact(view.model.shape.num_layers, "the number of its layers")


@fact
def recompute_number(view: View) -> Fact:
    """Layers that `trainer.recompute` names; 0 where it names none."""
    trainer = view.plan.trainer
    number = 0 if trainer is None else trainer.recompute_number or 0
    return Fact(number, "the layers of trainer.recompute")


@fact
def recomputes_together(view: View) -> bool:
    """Whether several layers are computed again at once."""
    return view.plan.trainer is not None and view.plan.trainer.recomputed_together > 1


@fact
def layers_of_stage(view: View) -> Fact:
    """Of the largest pipeline stage, or of the largest group of neighbours in one."""
    shape, groups = view.model.shape, view["trainer.parallel.virtual_stages"]
    num_stages, has_head = view[_STAGES], not view.plan.gives_values
    if shape is None or (num_stages > 1 and shape.family not in SPECS):
        raise NotKnownError("layers_of_stage")
    stages = stage_layers(shape, num_stages, groups, has_head=has_head)
    number = max(len(group) for own in stages for group in own)
    return Fact(number, "the layers of a group" if groups > 1 else "the layers of a stage")


@fact
def num_groups(view: View) -> Fact:
    """Groups of neighbouring layers in all pipeline stages."""
    keys = _STAGES, "trainer.parallel.virtual_stages"
    return Fact(view[keys[0]] * view[keys[1]], " x ".join(keys))


@fact
def groups_that_fit(view: View) -> int:
    """Most groups of layers that each pipeline stage can hold."""
    return view.number("num_layers") // view[_STAGES]


@fact
def has_fp8_widths(view: View) -> bool:
    """Whether some projection can be multiplied in float8."""
    tensors = () if view.plan.shape is None else view.plan.shape.tensors()
    sizes = [t.size for t in tensors if t.in_layer and len(t.size) == 2]
    return not sizes or any(all(n % FP8_ALIGNMENT == 0 for n in size) for size in sizes)


@fact
def broken_4bit_blocks(view: View) -> str:
    """Adapted projections whose values make no whole number of blocks, in words."""
    targets = view["model.lora.target_modules"] or PROJECTIONS
    tensors = () if view.plan.shape is None else view.plan.shape.tensors()
    found = [t for t in tensors if t.name in targets and t.numel % NF4_BLOCK]
    return ", ".join(f"{t.name} ({' x '.join(map(str, t.size))})" for t in found)


@fact
def broken_rows(view: View) -> int:
    """The length of rows that 8-bit codes do not fit, on a device of an engine; 0: they fit."""
    tensors = () if view.plan.shape is None else view.plan.shape.tensors()
    size = view["engine.tensor_parallel_size"]
    widths = (t.local(size)[-1] for t in tensors if t.is_layer_matrix)
    return next((width for width in widths if width % ROW_TAIL_BYTES), 0)


@fact
def uncut_matrix(view: View) -> str:
    """A matrix of 8-bit codes that each decode step on a GPU has to unpack, in words."""
    tensors = () if view.plan.shape is None or view.plan.is_on_cpu else view.plan.shape.tensors()
    size = view["engine.tensor_parallel_size"]
    found = (t for t in tensors if t.is_layer_matrix and not t.is_cut(size))
    return next((f"{t.name} ({' x '.join(map(str, t.local(size)))})" for t in found), "")


@fact
def lacks_fp8(view: View) -> bool:
    """Whether the GPU is known to multiply no eight-bit floats."""
    gpu = view.plan.devices.gpu
    return gpu is not None and view.plan.device == "cuda" and not gpu.has_fp8


@fact
def gpu(view: View) -> str:
    """The GPU, where it is known."""
    return "unknown" if view.plan.devices.gpu is None else view.plan.devices.gpu.name


@fact
def uses_gpu_of_host(view: View) -> bool:
    """Whether the run is on GPUs of this host, rather than planned for those of others."""
    there = view.plan.devices
    return there.kind == "cuda" and there.per_node is not None


@fact
def undivided(view: View) -> str:
    """Numbers of the model that `engine.tensor_parallel_size` does not divide, in words."""
    size, numbers = view["engine.tensor_parallel_size"], view.model.divided
    if view["engine.backend"] == "vllm":
        return ", ".join(vllm.undivided(numbers, size))
    return ", ".join(view.model.undivided(size))


@fact
def undivided_in_training(view: View) -> str:
    """Numbers of the model that `trainer.parallel.tensor_parallel_size` does not divide."""
    return ", ".join(view.model.undivided(view["trainer.parallel.tensor_parallel_size"]))


@fact
def kv_cache_gib(view: View) -> Fact:
    """GiB of the KV cache, where it does not depend on a GPU's memory."""
    key, on_cpu = "engine.kv_cache_gib", view["run.device"] == "cpu"
    if view[key] is None and (not on_cpu or view["engine.backend"] == "vllm"):
        raise NotKnownError("kv_cache_gib")
    if view[key] is None:
        return Fact(CPU_CACHE_GIB, key, "the default on a CPU")
    return Fact(view[key], key)


@fact
def sequence_gib(view: View) -> Fact:
    """GiB of the KV cache that one sequence of the longest length takes on each device: engines
    start with room for one."""
    per_token = view.model.kv_bytes_per_token(view.plan.kv_dtype)
    longest = view.plan.max_model_len
    if per_token is None or longest is None:
        raise NotKnownError("sequence_gib")
    num_bytes = -(-longest // BLOCK_SIZE) * BLOCK_SIZE * per_token
    num_bytes //= view["engine.tensor_parallel_size"]
    sampling = view.plan.sampling
    section = max(sampling, key=lambda name: sampling[name].max_completion_tokens)
    how = f"data.max_prompt_tokens + {section}.max_completion_tokens, {longest} tokens"
    return Fact(num_bytes / GIB, "what one sequence of full length takes, in GiB", how)


@fact
def resumes_samples(view: View) -> bool:
    """Whether samples go on under other weights than those that began them."""
    pipeline = view["pipeline"]
    return pipeline.resumes_samples or view["rollout.oversample_prompts"] > 0


@fact
def beta_out_of_range(view: View) -> bool:
    """Whether a decay of moments is none."""
    return not all(0 <= beta < 1 for beta in view["trainer.optimizer.betas"])


@fact
def has_empty_stop(view: View) -> bool:
    """Whether a text that ends completions is empty."""
    return "" in view["sampling.stop"]


@fact
def held_out(view: View) -> bool:
    """Whether rows of `data.train` are held out."""
    return bool(view["data.train"]) and view["data.eval_fraction"] > 0
