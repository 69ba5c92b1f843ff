"""Rules on what a trainer holds and computes: batches, memory, adapters, number formats, axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hone.config.parallel import ulysses_problem
from hone.config.rules.facts import TENSOR
from hone.config.rules.rule import error, excludes, needs, unused, warning
from hone.config.rules.view import View
from hone.config.tree import SUPERVISED
from hone.families.model_facts import FP8_ALIGNMENT, NF4_BLOCK
from hone.families.spec import PROJECTIONS

__all__ = ["RULES"]

_EXACT = ("rl", "eval", "generate", "bench engine", "bench train")
_BUDGET, _FORWARD = "trainer.max_tokens_per_microbatch", "trainer.max_tokens_per_forward"
_PARALLEL, _TENSOR = "trainer.parallel", "trainer.parallel.tensor_parallel_size"
_EXPERTS = "trainer.parallel.expert_parallel_size"
_STAGES = "trainer.parallel.pipeline_parallel_size"
_VIRTUAL = "trainer.parallel.virtual_stages"
_PRECISION, _RANK = "trainer.matmul_precision", "model.lora.rank"
_TARGETS = "model.lora.target_modules"
_BY_TOKENS = "not trainer.micro_batch_size"


def _ulysses_problem(key: str) -> Callable[[View], Iterator[Mapping[str, object]]]:
    def find(view: View) -> Iterator[Mapping[str, object]]:
        heads = view.model.divided.get("num_attention_heads")
        size, tensor = view[key], view[_TENSOR]
        if heads is None or size is None:
            return
        parts = heads // tensor, view.model.divided.get("num_key_value_heads", heads) // tensor
        if problem := ulysses_problem(size, *parts):
            yield {"problem": problem}

    return find


_BATCHES = (
    error("trainer.prompts_per_minibatch does not divide rollout.prompts_per_step",
          why="optimizer steps would differ in size",
          fix="trainer.prompts_per_minibatch = {minibatch_below} | use another divisor"),
    unused(_BUDGET, "trainer.micro_batch_size",
           why="that counts sequences in place of tokens",
           instead="remove trainer.micro_batch_size"),
    warning("trainer.micro_batch_size > @sequences_per_step",
            why="it acts as {sequences_per_step}",
            fix="trainer.micro_batch_size = {sequences_per_step}"),
    error(f"{_BUDGET} < @longest_share", given=(_BY_TOKENS,),
          why="a sequence is never cut",
          fix=f"{_BUDGET} = {{longest_share}} or more | {{or_share_rows}}"),
    warning(f"{_BUDGET} < @two_rows", given=(_BY_TOKENS, f"{_BUDGET} >= @longest_share"),
            why="micro-batches of long sequences stay half empty",
            fix=f"{_BUDGET} = {{two_rows}} or more, where memory allows"),
    error(f"{_BUDGET} < @longest_pair", given=(_BY_TOKENS, f"{_BUDGET} >= @longest_share"),
          why="the two of a pair share a micro-batch",
          fix=f"{_BUDGET} = {{longest_pair}} or more | lower data.max_tokens"),
    error(f"{_FORWARD} < @longest_pair", given=(f"{_FORWARD} >= @longest_share",),
          why="the two of a pair share a pass",
          fix=f"{_FORWARD} = {{longest_pair}} or more | leave it unset"),
    error("trainer.micro_batch_size = 1", given=("@longest_pair > 0",),
          why="the two of a pair share a micro-batch",
          fix="trainer.micro_batch_size = 2"),
    error(f"{_FORWARD} < @longest_share",
          why="a sequence is never cut",
          fix=f"{_FORWARD} = {{longest_share}} or more | leave it unset"),
    warning(f"{_FORWARD} < {_BUDGET}", given=(_BY_TOKENS, f"{_FORWARD} >= @longest_share"),
            why="a pass without backward needs less memory, not more",
            fix="leave it unset, for twice that budget"),
    warning("@context_size > 1", f"{_BUDGET} >= @longest", given=(_BY_TOKENS,),
            why="rows fit into one device, and sharing them costs time and saves nothing",
            fix=f"set both sizes to 1 | {_BUDGET} = {{longest_share}}"),
    warning("@sequences_per_step < @num_shares", only=(*SUPERVISED, "bench train"),
            why="the others have nothing to train",
            fix="raise it to a multiple of {num_shares} | start fewer processes"),
    warning("rollout.prompts_per_step < @num_processes",
            why="the others have nothing to generate",
            fix="raise rollout.prompts_per_step to a multiple of {num_processes} | start fewer "
            "processes"),
)  # fmt: skip

_CRITIC = ("algorithm.advantage = gae",)
_OFFLOADS = (("trainer.offload", ()), ("critic.offload", (*_CRITIC, "cluster.num_critics = 0")))
_MEMORY = (
    error("trainer.offload_activations", "trainer.recompute = off",
          why="the first keeps the inputs of recomputed layers on the host",
          fix="trainer.recompute = full | trainer.offload_activations = false"),
    unused("trainer.recompute_every_n_layers", "trainer.recompute = off",
           given=("not @critic_recomputes",),
           why="nothing is recomputed", instead="trainer.recompute = full"),
    unused("trainer.recompute_every_n_layers", "@recompute_number > 0",
           says="trainer.recompute_every_n_layers is set, and trainer.recompute is "
           "{trainer.recompute}",
           why="that says itself which layers are recomputed", instead="trainer.recompute = full"),
    warning("@recompute_number > @layers_of_stage",
            says="trainer.recompute is {trainer.recompute}, and no stage has more than "
            "{layers_of_stage} neighbouring layers",
            why="there are no more to recompute",
            fix="name {layers_of_stage} layers or fewer"),
    error("@recomputes_together", "not @has_spec",
          says="trainer.recompute is {trainer.recompute}, and {the_model} is of the family "
          "{family}",
          why="what its forward does between its layers is not known",
          fix="trainer.recompute = full"),
    error("trainer.offload != none", "trainer.optimizer.name = muon",
          why="Muon multiplies whole momentum matrices with themselves in every step, while what "
          "lies on the host visits the device in pieces",
          fix="trainer.optimizer.name = adamw | trainer.offload = none"),
    *(error(f"{offload} != none", f"{optimizer} = muon", given=(*_CRITIC, *given),
            why="the critic is offloaded, and Muon needs whole matrices on the device",
            fix=f"{optimizer} = adamw | {offload} = none")
      for offload, optimizer, given in (
          ("trainer.offload", "critic.optimizer", ("critic.offload = unset",)),
          ("critic.offload", "critic.optimizer", ("critic.offload",)),
          ("critic.offload", "trainer.optimizer.name",
           ("critic.offload", "critic.optimizer = unset")))),
    *(error(f"{offload} = parameters", f"{_PARALLEL}.zero_stage != 3",
            given=("@num_processes > 1", *given),
            why="other stages keep the gathered weights of all layers on the device",
            fix=f"{_PARALLEL}.zero_stage = 3")
      for offload, given in _OFFLOADS),
    *(error(f"{offload} = parameters", "@num_processes = 1", given=given,
            why="it keeps the shards of several in host memory",
            fix=f"start several processes (--nproc N) | {offload} = gradients")
      for offload, given in _OFFLOADS),
    unused("trainer.(offload_activations|offload)", "run.device = cpu",
           why="host memory is all there is, and copies only cost time"),
    unused("critic.offload", "run.device = cpu", given=_CRITIC,
           why="host memory is all there is, and copies only cost time"),
    *(error("trainer.enable_sleep", f"{offload} = gradients|parameters", only=("rl",), given=given,
            why="the one moves masters, moments and gradients to the host while the engine "
            "generates, the other keeps them there for good, so that nothing is left to move",
            fix="trainer.enable_sleep = false")
      for offload, given in _OFFLOADS),
)  # fmt: skip

_FORMATS = (
    # Adapters.
    error("model.lora.load_in_4bit", f"not {_RANK}",
          why="four bits cannot be trained, only adapters beside them",
          fix=f"{_RANK} = 16 | model.lora.load_in_4bit = false"),
    error("model.lora.load_in_4bit", "@broken_4bit_blocks", given=(_RANK,),
          says="model.lora.load_in_4bit is on, and {the_model} has {broken_4bit_blocks}",
          why=f"{NF4_BLOCK} values share a scale",
          fix="model.lora.load_in_4bit = false | leave these out of model.lora.target_modules"),
    error("@unknown_targets",
          says=f"{_TARGETS} names {{unknown_targets}}",
          why=f"the projections of a layer, which can have adapters, are {', '.join(PROJECTIONS)}",
          fix="name some of these | none for all of them"),
    unused(_TARGETS, f"not {_RANK}",
           why="there are no adapters, and all weights are trained", instead=f"{_RANK} = 16"),
    error(_RANK, f"{_TENSOR} > 1",
          why="adapters are not split over the tensor axis",
          fix=f"{_TENSOR} = 1 | with {_PARALLEL}.zero_stage 3 let each process hold a part of the "
          "frozen weights"),
    # Products.
    *excludes(f"{_PRECISION} = tf32", f"{_PRECISION} = default", {
        "run.device = cpu": ("only GPUs have it", "cuda"),
        "model.dtype != float32": ("it rounds operands of float32 products", "float32"),
    }),
    *excludes(f"{_PRECISION} = fp8", f"{_PRECISION} = default", {
        "run.device = cpu": ("only GPUs have it", "cuda"),
        "model.dtype = float32": ("it is for models in bfloat16", "auto"),
        "model.exact": ("exact mode computes in bfloat16 alone", "false"),
        f"{_RANK} > 0": ("products beside adapters are not rounded", "0"),
        f"{_TENSOR} > 1": ("parts of a matrix are not rounded", "1"),
    }),
    error(f"{_PRECISION} = fp8", "@lacks_fp8",
          says=f"{_PRECISION} is fp8, and the GPU of run.device is {{gpu}}",
          why="it does not multiply eight-bit floats", fix=f"{_PRECISION} = default"),
    error(f"{_PRECISION} = fp8", "not @has_fp8_widths",
          says=f"{_PRECISION} is fp8, for {{the_model}}",
          why=f"no projection of its layers has widths that are multiples of {FP8_ALIGNMENT}",
          fix=f"{_PRECISION} = default"),
    needs("torchao", f"{_PRECISION} = fp8",
          by=f"{_PRECISION}=fp8", instead=f"{_PRECISION} = default"),
    warning(f"{_PRECISION} = fp8", "trainer.compile = false",
            why="rounding operands by itself takes longer than float8 saves",
            fix="leave trainer.compile unset"),
    error("trainer.parity <= 0", fix="write auto | off | a limit above 0"),
    warning(f"{_PRECISION} != default", "trainer.parity = auto", only=("rl",),
            why="its default is for products in the model's own format, and a sound run may exceed "
            "it",
            fix="set trainer.parity to a few times what the gate reports of the first step "
            "(off_policy/parity/kl)"),
    # Exact mode.
    *(error("model.exact", other, why=why, fix=f"{fix} | model.exact = false", only=_EXACT)
      for other, why, fix in (
          (f"{_RANK} > 0", "exact mode computes with whole weights", f"{_RANK} = 0"),
          ("trainer.recompute = selective", "exact mode recomputes whole layers or none",
           "trainer.recompute = full | trainer.recompute = off"),
          ("trainer.offload = parameters",
           "exact mode computes with the engine's layers, which hold their weights",
           "trainer.offload = gradients"))),
    error("model.exact", "@recompute_number > 0", only=_EXACT,
          says="model.exact is on, and trainer.recompute is {trainer.recompute}",
          why="exact mode recomputes every layer by itself, or none",
          fix="trainer.recompute = full | trainer.recompute = off"),
    error("model.exact", "trainer.(recompute_every_n_layers|offload_activations) is set",
          only=_EXACT, given=("trainer.recompute = full",),
          why="exact mode recomputes every layer from its input on the device",
          fix="remove {meant} | model.exact = false"),
    *(error("model.exact", f"{_PARALLEL}.{name} > 1", only=_EXACT,
            why="sums over processes are taken in another order than the engine's",
            fix=f"{_PARALLEL}.{name} = 1 | model.exact = false")
      for name in ("ring_size", "ulysses_size", "tensor_parallel_size", "pipeline_parallel_size")),
    error("model.exact", "@num_processes > 1", only=("rl", "bench train"),
          given=(f"{_TENSOR} = 1", f"{_STAGES} = 1", "@context_size = 1"),
          why="sums over processes are taken in another order than the engine's",
          fix="train in one process | model.exact = false"),
    unused("model.exact", only=SUPERVISED,
           why="it makes trainer and engine compute the same bits, and there is no engine"),
    unused("trainer.logits_chunk_tokens", only=("reward-model",),
           why="a reward model has a value in place of logits"),
    unused("model.exact", "objective = sft",
           why="it makes trainer and engine compute the same bits, and there is no engine",
           instead="objective = rl"),
)  # fmt: skip

_AXES = (
    error("@problem", says="{problem}"),
    error(f"{_TENSOR} > 1", "@undivided_in_training",
          says=f"{_TENSOR} is {{{_TENSOR}}}, which does not divide {{undivided_in_training}} of "
          "{the_model}",
          fix="use a size that does; further processes share rows or tokens"),
    error(f"{_TENSOR} > 1", "not @has_tensor_plan",
          says=f"{_TENSOR} is {{{_TENSOR}}}, and {{the_model}} is of the family {{family}}",
          why=f"only layers of {TENSOR} are split over the tensor axis",
          fix=f"{_TENSOR} = 1 | shard by {_PARALLEL}.zero_stage 3"),
    error(f"{_EXPERTS} > 1", "not @has_experts",
          says=f"{_EXPERTS} is {{{_EXPERTS}}}, and {{the_model}} has no experts",
          fix=f"{_EXPERTS} = 1"),
    error(f"{_EXPERTS} does not divide @num_experts",
          fix="use a size that does; further processes share rows or tokens"),
    error(f"{_STAGES} > @num_layers",
          why="each stage has a layer of its own at least",
          fix=f"{_STAGES} = {{num_layers}} or less"),
    error(f"{_VIRTUAL} > 1", "@num_groups > @num_layers",
          given=(f"{_STAGES} > 1", f"{_STAGES} <= @num_layers"),
          says=f"{_STAGES} {{{_STAGES}}} x {_VIRTUAL} {{{_VIRTUAL}}} = {{num_groups}} groups of "
          "layers, and {the_model} has {num_layers} layers",
          why="each group has a layer of its own at least",
          fix=f"{_VIRTUAL} = {{groups_that_fit}} or less | lower {_STAGES}"),
    error(f"{_VIRTUAL} > 1", f"{_STAGES} = 1",
          why="one stage holds all layers as neighbours, and waits for no other",
          fix=f"{_VIRTUAL} = 1 | {_STAGES} = 2"),
    error(f"{_STAGES} > 1", "not @has_spec",
          says=f"{_STAGES} is {{{_STAGES}}}, and {{the_model}} is of the family {{family}}",
          why="what its forward does beside its layers is not known, and would be done by every "
          "stage",
          fix=f"{_STAGES} = 1 | shard by {_PARALLEL}.zero_stage 3"),
    error(f"{_STAGES} > 1", f"{_RANK} > 0",
          why="adapters are merged where all layers are",
          fix=f"{_RANK} = 0 | {_STAGES} = 1"),
    error(f"{_STAGES} > 1", "trainer.offload = gradients|parameters",
          why="the first and the last stage add up their gradients of a tied embedding on the "
          "device",
          fix=f"trainer.offload = optimizer | {_STAGES} = 1"),
    error(f"{_STAGES} > 1", only=("bench train",),
          why="it measures passes that run through all layers",
          fix=f"{_STAGES} = 1"),
    *(error(each=_ulysses_problem(key), given=("not @undivided_in_training",),
            says=f"{key} is {{{key}}}, for {{the_model}}", why="{problem}",
            fix="use one of them | split tokens further by ring_size, which divides no heads")
      for key in (f"{_PARALLEL}.ulysses_size", f"{_PARALLEL}.reference_ulysses_size")),
    unused(f"{_PARALLEL}.(reference_ring_size|reference_ulysses_size)",
           given=("not @trainers_hold_frozen",),
           why="the trainers have no teacher and no reference model of their own (without a KL "
           "term, or with a loss that needs none, there is none; with adapters it is the policy "
           "without them; or it has devices of its own)"),
    error("@reference_replica does not divide @num_laid_out", given=("@trainers_hold_frozen",),
          fix="use sizes whose product does"),
    unused(f"{_PARALLEL}.(zero_stage|fsdp_size)",
           "@num_processes = 1",
           why="one process has nobody to share with", instead="start several (--nproc N)"),
)  # fmt: skip

RULES = (*_BATCHES, *_MEMORY, *_FORMATS, *_AXES)
