"""Rules on trainers: batches, memory, adapters, number formats, parallel axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cached_property

from hone.config.rules.facts import LONG_ROW, Facts
from hone.config.rules.rule import error, excludes, needs, unused, warning, with_facts
from hone.config.rules.view import Details, Fact, NotKnownError, required
from hone.config.tree import SAMPLING, SUPERVISED
from hone.families.model_facts import FP8_ALIGNMENT, NF4_BLOCK
from hone.families.registry import DIVIDED_FAMILIES, SPECS, spec_of
from hone.families.spec import EXPERT_MATRICES, PROJECTIONS
from hone.families.stages import stage_layers
from hone.trainer.cost import adapted_tensors

__all__ = ["RULES"]

_EXACT = (*SAMPLING, "bench engine", "bench train")
_BUDGET, _FORWARD = "trainer.max_tokens_per_microbatch", "trainer.max_tokens_per_forward"
_PARALLEL, _TENSOR = "trainer.parallel", "trainer.parallel.tensor_parallel_size"
_EXPERTS = "trainer.parallel.expert_parallel_size"
_STAGES = "trainer.parallel.pipeline_parallel_size"
_VIRTUAL = "trainer.parallel.virtual_stages"
_OF_EXPERTS = (EXPERT_MATRICES[0], *EXPERT_MATRICES)
"""The matrices of experts that compute what gate, up and down of an MLP do."""
_PRECISION, _RANK = "trainer.matmul_precision", "model.lora.rank"
_TARGETS = "model.lora.target_modules"
_BY_TOKENS = "not trainer.micro_batch_size"
_SIZES = "trainer.parallel.ring_size x trainer.parallel.ulysses_size"
_REFERENCE_SIZES = (f"{_PARALLEL}.reference_ring_size", f"{_PARALLEL}.reference_ulysses_size")
_SPLIT = ", ".join(DIVIDED_FAMILIES)
"""Families that the tensor axis splits."""


class TrainerFacts(Facts):
    """The facts that rules on trainers compare."""

    @cached_property
    def two_rows(self) -> Fact[int]:
        """Tokens of two of the longest rows. Not known for rows that are too long to be packed or
        are shared by processes, and where the planner knows that memory does not hold two."""
        row = self.longest
        if self.known.get("lacks_room_for_two_rows", False):
            raise NotKnownError("two_rows")
        if self.context_size.value > 1 or row.value > LONG_ROW:
            raise NotKnownError("two_rows")
        return Fact(2 * row.value, "twice the longest sequence", f"2 x ({row.how})")

    @cached_property
    def sequences_per_step(self) -> Fact[int]:
        """Rows of an optimizer step, over all devices."""
        if self.command == "bench train":
            return Fact(self["rows.per_step"], "the number of rows of a step", "rows.per_step")
        batch = required(self.plan.batch, "sequences_per_step")
        is_supervised = self.command in SUPERVISED
        key = "data.examples_per_step" if is_supervised else "trainer.prompts_per_minibatch"
        noun = "the number of sequences of an optimizer step"
        return Fact(batch.samples_per_optimizer_step, noun, key)

    @cached_property
    def longest_pair(self) -> Fact[int]:
        """Tokens of the longest pair of rows."""
        gives_values = self.command == "reward-model"
        if not gives_values and (self.command != "dpo" or self["algorithm.loss"] == "kto"):
            raise NotKnownError("longest_pair")
        row, how = self["data.max_tokens"], "data.max_tokens"
        if gives_values:  # a reward model reads its value at a token after the last of the row
            row, how = row + 1, "(data.max_tokens + 1)"
        share = -(-2 * row // self.context_size.value)
        return Fact(share, "a process's share of the longest pair", f"2 x {how}")

    @cached_property
    def critic_recomputes(self) -> bool:
        """Whether there is a critic, some of whose layers are recomputed."""
        critic = self.plan.roles.get("critic")
        return critic is not None and critic.trainer.recompute != "off"

    @cached_property
    def minibatch_below(self) -> int:
        """The largest mini-batch that divides a step and does not exceed the configured one."""
        asked = self["trainer.prompts_per_minibatch"]
        prompts = self["rollout.prompts_per_step"]
        return max(n for n in range(1, min(asked, prompts) + 1) if prompts % n == 0)

    @cached_property
    def or_share_rows(self) -> str:
        """A remedy other than the budget that just holds the longest row: a larger budget for short
        rows, which are packed, and more processes that share a row for long ones."""
        budget, size = self[_BUDGET], self.context_size.value
        row, world_size = self.longest.value, self.plan.world_size
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

    @cached_property
    def num_shares(self) -> Fact[int]:
        """Groups of processes that each train rows of their own."""
        together = self[_TENSOR] * self.context_size.value * self[_STAGES]
        number = self.num_processes.value // together
        those = f"groups of {together} processes" if together > 1 else "processes"
        return Fact(number, f"the number of {those}")

    @cached_property
    def reference_replica(self) -> Fact[int]:
        """Processes of a replica of a model that only scores rows and has sizes of its own."""
        sizes = {key: self[key] for key in _REFERENCE_SIZES if self[key] is not None}
        if not sizes or self.plan.problem is not None:
            raise NotKnownError("reference_replica")
        of_policy = {
            key: self[key.replace("reference_", "")] for key in _REFERENCE_SIZES if key not in sizes
        }
        tensor = {_TENSOR: self[_TENSOR]}
        how = " x ".join(f"{key} {size}" for key, size in (sizes | tensor).items())
        number = math.prod([*sizes.values(), *of_policy.values(), *tensor.values()])
        return Fact(number, "the number of processes of a replica of reference or teacher", how)

    @cached_property
    def num_sharing_shards(self) -> Fact[int]:
        """Processes that share one set of shards."""
        return Fact(self.plan.policy.axes.fsdp, "the processes that share shards")

    @cached_property
    def num_laid_out(self) -> Fact[int]:
        """Number of trainer processes; those of one replica where the number is not known."""
        return Fact(self.plan.policy.axes.world, "the number of processes")

    @cached_property
    def problem(self) -> str | None:
        """Why the processes cannot be laid out along the axes of training."""
        return self.plan.problem

    @cached_property
    def trainers_hold_frozen(self) -> bool:
        """Whether a reference model or teacher is divided over the processes that train."""
        return self.plan.trainers_hold_frozen

    @cached_property
    def adaptable(self) -> tuple[str, ...]:
        """Matrices of the model's layers that can have adapters."""
        known = self.plan.model
        own = () if known is None else spec_of(str(known.family)).adaptable
        return own or (*PROJECTIONS, *EXPERT_MATRICES)

    @cached_property
    def adapted_unnamed(self) -> str:
        """Which of `adaptable` have adapters where the recipe names none, in words."""
        has_experts = any(name in EXPERT_MATRICES for name in self.adaptable)
        return "all of them but experts" if has_experts else "all of them"

    @cached_property
    def adapted_experts(self) -> str:
        """Names in `model.lora.target_modules` of matrices of experts."""
        return ", ".join(name for name in self[_TARGETS] if name in EXPERT_MATRICES)

    @cached_property
    def unknown_targets(self) -> str:
        """Names in `model.lora.target_modules` that no layer has, each with the closest name that a
        layer has."""
        known = self.adaptable
        unknown = [name for name in self["model.lora.target_modules"] if name not in known]
        experts = dict(zip(PROJECTIONS[4:], _OF_EXPERTS, strict=True))
        near = {
            name: [experts[name]]
            if experts.get(name) in known
            else get_close_matches(name, known, 1)
            for name in unknown
        }
        return ", ".join(
            f"{name} (did you mean {near[name][0]}?)" if near[name] else name for name in unknown
        )

    @cached_property
    def has_tensor_plan(self) -> bool:
        """Whether the tensor axis splits the model's layers."""
        return self.model.family in (None, *DIVIDED_FAMILIES)

    @cached_property
    def num_experts(self) -> Fact[int]:
        """Experts of a layer of the model."""
        shape = required(self.model.shape, "num_experts")
        return Fact(shape.num_experts, "the number of a layer's experts")

    @cached_property
    def num_layers(self) -> Fact[int]:
        """Layers of the model."""
        shape = required(self.model.shape, "num_layers")
        return Fact(shape.num_layers, "the number of its layers")

    @cached_property
    def recompute_number(self) -> Fact[int]:
        """Number of layers in the value of `trainer.recompute`; 0 where it has none."""
        trainer = self.plan.trainer
        number = 0 if trainer is None else trainer.recompute_number or 0
        return Fact(number, "the layers of trainer.recompute")

    @cached_property
    def recomputes_together(self) -> bool:
        """Whether several layers are recomputed together."""
        return self.plan.trainer is not None and self.plan.trainer.recomputed_together > 1

    @cached_property
    def layers_of_stage(self) -> Fact[int]:
        """Layers of the largest pipeline stage, or of the largest group of neighbours in one."""
        shape, groups = self.model.shape, self[_VIRTUAL]
        num_stages, has_head = self[_STAGES], not self.plan.gives_values
        if shape is None or (num_stages > 1 and shape.family not in SPECS):
            raise NotKnownError("layers_of_stage")
        stages = stage_layers(shape, num_stages, groups, has_head=has_head)
        number = max(len(group) for own in stages for group in own)
        return Fact(number, "the layers of a group" if groups > 1 else "the layers of a stage")

    @cached_property
    def num_groups(self) -> Fact[int]:
        """Groups of neighbouring layers in all pipeline stages."""
        return Fact(self[_STAGES] * self[_VIRTUAL], f"{_STAGES} x {_VIRTUAL}")

    @cached_property
    def groups_that_fit(self) -> int:
        """Largest number of groups of layers that each pipeline stage can have."""
        return self.num_layers.value // self[_STAGES]

    @cached_property
    def has_fp8_widths(self) -> bool:
        """Whether some projection can be multiplied in float8."""
        tensors = () if self.plan.shape is None else self.plan.shape.tensors()
        sizes = [t.size for t in tensors if t.in_layer and len(t.size) == 2]
        return not sizes or any(all(n % FP8_ALIGNMENT == 0 for n in size) for size in sizes)

    @cached_property
    def broken_4bit_blocks(self) -> str:
        """Names and sizes of adapted projections whose number of values is no multiple of a 4-bit
        block."""
        shape, lora = self.plan.shape, self.plan.lora
        if shape is None or lora is None:
            return ""
        broken = [t for t in adapted_tensors(shape, lora) if math.prod(t.size[-2:]) % NF4_BLOCK]
        return ", ".join(f"{t.name} ({' x '.join(map(str, t.size))})" for t in broken)

    @cached_property
    def stage_without_adapters(self) -> str:
        """The first pipeline stage in which nothing is trained, and its layers."""
        shape, lora = self.model.shape, self.plan.lora
        num_stages, groups = self[_STAGES], self[_VIRTUAL]
        if shape is None or lora is None or num_stages == 1 or shape.family not in SPECS:
            return ""
        adapted = {t.name for t in adapted_tensors(shape, lora)}
        stages = stage_layers(shape, num_stages, groups, has_head=not self.plan.gives_values)
        for number, own in enumerate(stages):
            # A head of values is trained as a whole.
            trains = self.plan.gives_values and number == num_stages - 1
            # The first group gets no hidden states that others have trained.
            layers = own[0] if number == 0 else [layer for group in own for layer in group]
            matrices = {t.name for layer in layers for t in shape.matrices_of_layer(layer)}
            if layers and not trains and not adapted & matrices:
                return f"pipeline stage {number + 1} of {num_stages}, from layer {min(layers)} on"
        return ""

    @cached_property
    def undivided_in_training(self) -> str:
        """Numbers of the model that `trainer.parallel.tensor_parallel_size` does not divide."""
        return ", ".join(self.model.undivided(self[_TENSOR]))


def _where_read(name: str) -> tuple[str, ...]:
    """Conditions for errors of an axis: the sizes of frozen models have no effect without them."""
    return ("@trainers_hold_frozen",) if name.startswith("reference_") else ()


def _ulysses_problem(key: str) -> Callable[[TrainerFacts], Iterator[Details]]:
    def find(view: TrainerFacts) -> Iterator[Details]:
        size, fix = view[key], "use a size that fits"
        if view.model.ring_problem is None:
            fix = "use one of them | split tokens further by ring_size, which divides no heads"
        for problem in view.model.ulysses_problems(size or 1, tensor_parallel_size=view[_TENSOR]):
            yield {"problem": problem, "fix": fix}

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
          why="the projections of a layer, which can have adapters, are {adaptable}",
          fix="name some of these | none for {adapted_unnamed}"),
    unused(_TARGETS, f"not {_RANK}",
           why="there are no adapters, and all weights are trained", instead=f"{_RANK} = 16"),
    error("model.lora.load_in_4bit", f"{_EXPERTS} > 1", given=(_RANK, "@adapted_experts"),
          why="codes of four bits are not divided over the expert axis, and "
          f"{_TARGETS} names {{adapted_experts}}",
          fix=f"{_EXPERTS} = 1 | model.lora.load_in_4bit = false | leave these out of {_TARGETS}"),
    error("trainer.optimizer.name = muon", f"{_RANK} < @num_sharing_shards",
          given=(_RANK,),
          why="Muon steps matrices whose rows are shared, and each process needs one",
          fix=f"{_RANK} = {{num_sharing_shards}} or more | trainer.optimizer.name = adamw"),
    error(_RANK, f"{_STAGES} > 1", "@stage_without_adapters",
          says=f"{_RANK} is {{{_RANK}}}, and no adapter lies in {{stage_without_adapters}}",
          why="a pipeline stage that trains nothing has no gradient to send on",
          fix=f"{_STAGES} = 1 | name a matrix that each stage has in {_TARGETS}, such as q_proj"),
    error("model.lora.load_in_4bit", f"{_TENSOR} > 1", given=(_RANK,),
          why="codes of four bits are not split over the tensor axis",
          fix=f"{_TENSOR} = 1 | model.lora.load_in_4bit = false"),
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
    *(error(f"{_PARALLEL}.{name} > 1", "@sees_images",
            says=f"{_PARALLEL}.{name} is {{{_PARALLEL}.{name}}}, and {{the_model}} sees images",
            given=_where_read(name), why=why, fix=f"{_PARALLEL}.{name} = 1")
      for names, why in (
          (("ring_size", "ulysses_size", "reference_ring_size", "reference_ulysses_size"),
           "an image's features go to the process that has all of its row"),
          (("pipeline_parallel_size",), "features of images do not pass from stage to stage"))
      for name in names),
    *(error(f"{_PARALLEL}.{name} > 1", "@is_hybrid",
            says=f"{_PARALLEL}.{name} is {{{_PARALLEL}.{name}}}, and {{the_model}} has layers of "
            "gated linear attention",
            given=_where_read(name),
            why="these read a row from its first token to its last, and a ring has parts of it in "
            "another order",
            fix=f"{_PARALLEL}.{name} = 1 | {_PARALLEL}.{name.replace('ring', 'ulysses')}, which "
            "divides heads")
      for name in ("ring_size", "reference_ring_size")),
    error("model.exact", "@sees_images", only=_EXACT,
          says="model.exact is on, and {the_model} sees images",
          why="exact mode computes text models", fix="model.exact = false"),
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
          why=f"only layers of {_SPLIT} are split over the tensor axis",
          fix=f"{_TENSOR} = 1 | shard by {_PARALLEL}.zero_stage 3"),
    error(f"{_TENSOR} > 1", "@has_experts", given=(f"{_EXPERTS} = 1",),
          says=f"{_TENSOR} is {{{_TENSOR}}}, {_EXPERTS} is 1, and {{the_model}} has experts",
          why="processes that share matrices have different tokens where experts compute",
          fix=f"{_EXPERTS} = {{{_TENSOR}}} or a multiple"),
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
    error(f"{_STAGES} > 1", "trainer.offload = gradients|parameters",
          why="the first and the last stage add up their gradients of a tied embedding on the "
          "device",
          fix=f"trainer.offload = optimizer | {_STAGES} = 1"),
    error(f"{_STAGES} > 1", only=("bench train",),
          why="it measures passes that run through all layers",
          fix=f"{_STAGES} = 1"),
    *(error(each=_ulysses_problem(key),
            given=("not @undivided_in_training", *_where_read(key.removeprefix(f"{_PARALLEL}."))),
            says=f"{key} is {{{key}}}, for {{the_model}}", why="{problem}",
            fix="{fix}")
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

RULES = with_facts(TrainerFacts, *_BATCHES, *_MEMORY, *_FORMATS, *_AXES)
