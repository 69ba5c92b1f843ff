"""Everything that is decided before a run: who has which devices, formats, layers, batches.

    plan = resolve(config, model, devices, world_size=8)
    plan.roles["policy"].axes, plan.batch.samples_per_optimizer_step

`resolve` is pure and decides once. The rules (`hone.config.rules`) and the memory model
(`hone.planner.memory`) are functions of a plan; `hone check`, `hone plan`, the builder, the
trainer and the report read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

from hone.config.cluster import ScorerName
from hone.config.data import DataConfig
from hone.config.engine import EngineConfig
from hone.config.model import Dtype, LoraConfig, compute_dtype
from hone.config.parallel import AxisSizes
from hone.config.rollout import SamplingConfig
from hone.config.trainer import SFTTrainerConfig
from hone.config.tree import (
    RECIPE_COMMANDS,
    TREES,
    BenchEngineConfig,
    BenchTrainConfig,
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    PairsConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
)
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.registry import FUSED_FAMILIES
from hone.families.shape import ModelShape
from hone.hardware import Peaks

__all__ = [
    "RECIPE_TREES",
    "AxisSizes",
    "BatchArithmetic",
    "Command",
    "Devices",
    "Role",
    "RoleName",
    "RunPlan",
    "resolve",
]

Command: TypeAlias = (
    RLConfig | SFTConfig | EvaluateConfig | GenerateConfig | BenchEngineConfig | BenchTrainConfig
)
"""Any tree that a run is made of; that of `hone plan` is an `RLConfig`."""
RECIPE_TREES = cast(
    "Mapping[str, type[Command]]", {command: TREES[command] for command in RECIPE_COMMANDS}
)
"""The trees of the commands that a recipe may be for."""
RoleName = Literal["policy", "engine", "reference", "critic", "teacher", "reward_model"]
Layers = Literal["eager", "compiled", "exact", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What there is; with `hone check --gpu`, what there shall be."""

    kind: Literal["cpu", "cuda"] = "cuda"
    gpu: Peaks | None = None
    """None: a CPU, or a GPU of which nothing is known."""
    per_node: int | None = None
    """GPUs, or on a CPU processes, of a host; None: not known."""
    nodes: int = 1
    host_bytes: int | None = None
    """Memory of this host that processes can still take; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Copies of a model that do the same work, and the devices they have."""

    name: RoleName
    num_workers: int = 1
    """Copies of the model, each over `axes.world` devices."""
    axes: AxisSizes = AxisSizes()
    """How one copy is divided."""
    shares_devices_of: RoleName | None = None
    """Whose devices it is on; None: its own."""
    where: Literal["here", "thread", "ray"] = "here"
    """In the process of whose devices it shares, there in a thread of its own, or in processes of
    its own."""
    layers: Layers = "eager"
    """How decoder layers compute: transformers' as they are or compiled, exact, or those made for
    decoding."""
    dtype: Dtype
    """Format of forward and backward."""
    aliases_weights_of: RoleName | None = None
    """Whose tensors it computes with; None: it has a copy of its own."""

    @property
    def num_devices(self) -> int:
        """Devices that it is on, shared or not."""
        return self.num_workers * self.axes.world


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """Rows of a step. Sizes are global, so they do not change with the number of devices."""

    prompts_per_step: int
    """Prompts of a step; of `hone sft`, rows."""
    samples_per_prompt: int
    prompts_per_minibatch: int
    """Prompts of an optimizer step."""
    num_minibatches: int
    """Optimizer steps that pass once over the samples of a step."""
    num_epochs: int
    num_steps: int
    """`run.steps`."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_optimizer_step(self) -> int:
        """At most, over all devices."""
        return self.prompts_per_minibatch * self.samples_per_prompt

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps that the samples of a step are used for, over all epochs."""
        return self.num_minibatches * self.num_epochs

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.num_steps * self.optimizer_steps_per_rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What `resolve` has decided."""

    config: Command
    model: ModelFacts | None
    """None: there is no `config.json` here, and the name is not that of a public shape."""
    teacher: ModelFacts | None
    """Likewise of `teacher.path`; None also without a teacher."""
    devices: Devices
    world_size: int | None
    """Processes that train, those of a critic apart not among them, or without a trainer sample;
    None: not known yet, so that `roles` has as few as make up one replica."""
    roles: Mapping[RoleName, Role]
    batch: BatchArithmetic | None
    """None: nothing is trained on a schedule of rows (`hone eval`, `generate`, `bench`)."""
    problem: str | None = None
    """Why `world_size` processes cannot be laid out along the axes of training; `roles` is then
    laid out for one replica."""

    # -- the sections of whichever command it is, None where it has none --------------------------

    @property
    def shape(self) -> ModelShape | None:
        """All sizes of the model, where they are known and its family is supported."""
        return None if self.model is None else self.model.shape

    @property
    def is_refused(self) -> bool:
        """Whether the model has what nobody here computes."""
        return self.model is not None and bool(self.model.unserved)

    @property
    def trainer(self) -> SFTTrainerConfig | None:
        cfg = self.config
        return cfg.trainer if isinstance(cfg, RLConfig | SFTConfig | BenchTrainConfig) else None

    @property
    def engine(self) -> EngineConfig | None:
        cfg = self.config
        return None if isinstance(cfg, SFTConfig | BenchTrainConfig) else cfg.engine

    @property
    def lora(self) -> LoraConfig | None:
        cfg = self.config
        return cfg.model.lora if isinstance(cfg, RLConfig | SFTConfig | BenchTrainConfig) else None

    @property
    def data(self) -> DataConfig | None:
        cfg = self.config
        return None if isinstance(cfg, BenchEngineConfig | BenchTrainConfig) else cfg.data

    @property
    def sampling(self) -> dict[str, SamplingConfig]:
        """What is sampled, by the section that says how: `rollout`, `eval`, `generation`."""
        match self.config:
            case RLConfig(eval=evaluation) as cfg:
                found: dict[str, SamplingConfig] = {"rollout": cfg.rollout}
                return found | ({"eval": evaluation} if evaluation.is_scheduled else {})
            case EvaluateConfig() as cfg:
                return {"eval": cfg.eval}
            case GenerateConfig() as cfg:
                return {"generation": cfg.generation}
            case _:
                return {}

    # -- what follows ----------------------------------------------------------------------------

    @property
    def policy(self) -> Role:
        """What is trained. Raises KeyError for commands that only sample."""
        return self.roles["policy"]

    @property
    def gives_values(self) -> bool:
        """Whether what is trained gives a number in place of logits."""
        return isinstance(self.config, RewardModelingConfig)

    @property
    def is_on_cpu(self) -> bool:
        return self.devices.kind == "cpu"

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """`run.device`; auto is decided on this host, and for a named GPU."""
        asked, there = self.config.run.device, self.devices
        is_known = self.is_on_cpu or there.gpu is not None or there.per_node is not None
        return there.kind if asked == "auto" and is_known else asked

    @property
    def is_apart(self) -> bool:
        """Whether engines have weights of their own, and the first process directs them."""
        return "engine" in self.roles and self.roles["engine"].where != "here"

    @property
    def trainers_hold_reference(self) -> bool:
        """Whether a frozen model lies beside the policy: the KL term has one, unless that is the
        base of adapters, or has devices of its own."""
        return "reference" in self.roles and self.roles["reference"].where == "here"

    @property
    def scores_policy(self) -> bool:
        """Whether trainers score the rows of `hone rl` before the update: where several optimizer
        steps share them, and where rewards or advantages are made of log-probabilities."""
        cfg, batch = self.config, self.batch
        if not isinstance(cfg, RLConfig) or batch is None:
            return False
        has_teacher = cfg.teacher.path is not None and cfg.teacher.loss == "policy_gradient"
        is_asked = has_teacher or "policy" in cfg.algorithm.needs.scores
        return batch.optimizer_steps_per_rollout > 1 or is_asked

    @property
    def trainers_hold_frozen(self) -> bool:
        """Whether a model that only scores rows, the reference or a teacher, is divided over the
        processes that train."""
        held = (self.roles.get(name) for name in ("reference", "teacher"))
        return any(role is not None and role.where == "here" for role in held)

    @property
    def dtype(self) -> Dtype:
        """Format of forward and backward, of all roles."""
        return next(iter(self.roles.values())).dtype

    @property
    def kv_dtype(self) -> Literal["float32", "bfloat16", "fp8"]:
        """Format of the KV cache."""
        is_rounded = self.engine is not None and self.engine.kv_cache_dtype == "fp8"
        return "fp8" if is_rounded else self.dtype

    @property
    def packs_rows(self) -> bool:
        """Whether an engine keeps matrices of layers as 8-bit codes."""
        return self.engine is not None and self.engine.packs_rows

    @property
    def num_bytes(self) -> int:
        """Of an element of the weights that compute."""
        return 4 if self.dtype == "float32" else 2

    @property
    def max_sequence_parts(self) -> dict[str, int]:
        """What adds up to the longest row, of training or of what is sampled, by setting."""
        cfg = self.config
        if isinstance(cfg, SFTConfig):
            return {"data.max_tokens": cfg.data.max_tokens}
        section, sampling = next(iter(self.sampling.items()), (None, None))
        if sampling is None or self.data is None:
            return {}
        return {
            "data.max_prompt_tokens": self.data.max_prompt_tokens,
            f"{section}.max_completion_tokens": sampling.max_completion_tokens,
        }

    @property
    def max_sequence_tokens(self) -> int | None:
        """Longest row, prompt and completion; None: no setting says so."""
        return sum(self.max_sequence_parts.values()) or None

    @property
    def max_sequence_keys(self) -> tuple[str, ...]:
        """The settings that say so."""
        return tuple(self.max_sequence_parts)

    # -- micro-batches, of a plan with a batch ---------------------------------------------------

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        assert self.batch is not None
        return self.batch.optimizer_steps

    @property
    def rows_per_data_rank(self) -> int:
        """Rows of an optimizer step that one data rank has, at most."""
        assert self.batch is not None
        return -(-self.batch.samples_per_optimizer_step // self.policy.axes.data)

    @property
    def tokens_per_packed_row(self) -> int:
        """Tokens of a micro-batch, over all processes that share them."""
        assert self.trainer is not None
        return self.trainer.max_tokens_per_microbatch * self.policy.axes.context

    @property
    def min_micro_batch(self) -> int:
        """Rows of a micro-batch, at least: as many as fit when all are of full length."""
        assert self.trainer is not None
        most = self.trainer.micro_batch_size
        if most is None:
            most = self.tokens_per_packed_row // (self.max_sequence_tokens or 1)
        return max(min(most, self.rows_per_data_rank), 1)

    @property
    def max_accumulation(self) -> int:
        """Micro-batches of an optimizer step, at most."""
        return -(-self.rows_per_data_rank // self.min_micro_batch)

    # -- engines ---------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that engines are made for; None: the workload of `hone
        bench` says."""
        cfg = self.config
        if not isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig):
            return None
        longest = cfg.data.max_prompt_tokens + cfg.max_completion_tokens
        return min(longest, (self.model and self.model.context_length) or longest)

    def devices_of_roles(self) -> int:
        """Devices in all, each counted once."""
        return sum(x.num_devices for x in self.roles.values() if x.shares_devices_of is None)


def resolve(
    config: Command,
    model: ModelFacts | None,
    devices: Devices,
    *,
    world_size: int | None = None,
    teacher: ModelFacts | None = None,
) -> RunPlan:
    """Decide how `config` runs on `devices`, in `world_size` processes where that is known.

    Never raises: what cannot be is for the rules to say.
    """
    plan = RunPlan(
        config=config,
        model=model,
        teacher=teacher,
        devices=devices,
        world_size=world_size,
        roles={},
        batch=None,
    )
    axes, problem = AxisSizes(), None
    if plan.trainer is not None:
        try:
            axes = AxisSizes.of(plan.trainer.parallel, world_size)
        except UserError as error:
            axes, problem = AxisSizes.of(plan.trainer.parallel), str(error)
    return replace(plan, roles=_roles(plan, axes), batch=_batch(config), problem=problem)


def _roles(plan: RunPlan, axes: AxisSizes) -> dict[RoleName, Role]:
    cfg, trainer, engine = plan.config, plan.trainer, plan.engine
    dtype = compute_dtype(cfg.model.dtype, plan.devices.kind)
    roles: dict[RoleName, Role] = {}
    if trainer is not None:
        layers = _training_layers(plan, trainer)
        roles["policy"] = Role(name="policy", axes=axes, layers=layers, dtype=dtype)
    if engine is not None:
        roles["engine"] = _engine_role(plan, engine, axes, dtype)
    if isinstance(cfg, RLConfig) and cfg.algorithm.kl.coef > 0 and not cfg.model.lora.rank:
        roles["reference"] = _frozen("reference", cfg, axes, dtype)
    if isinstance(cfg, DPOConfig) and cfg.has_frozen_reference:
        roles["reference"] = _frozen("reference", cfg, axes, dtype)
    if isinstance(cfg, RLConfig) and cfg.teacher.path is not None:
        roles["teacher"] = _frozen("teacher", cfg, axes, dtype)
    if isinstance(cfg, RLConfig) and cfg.algorithm.needs_critic and trainer is not None:
        roles["critic"] = _critic_role(cfg, roles["policy"])
    if isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig) and cfg.reward.model.path:
        # Whole in each process that drives an engine, and in the first where that drives all.
        beside: RoleName = "engine" if trainer is None else "policy"
        role = Role(name="reward_model", shares_devices_of=beside, dtype=dtype)
        roles["reward_model"] = _apart("reward_model", cfg, dtype) or role
    return roles


def _critic_role(cfg: RLConfig, policy: Role) -> Role:
    """Beside the policy, or in processes of its own."""
    layers: Layers = "eager" if policy.layers == "exact" else policy.layers
    role = replace(policy, name="critic", layers=layers)
    if not cfg.cluster.num_critics:
        return replace(role, shares_devices_of="policy")
    # Sizes that do not fit its processes are for the rules to refuse.
    with suppress(UserError):
        axes = AxisSizes.of(cfg.critic_parallel, cfg.cluster.num_critics)
        role = replace(role, axes=axes)
    return role


def _apart(name: ScorerName, cfg: Command, dtype: Dtype) -> Role | None:
    """A frozen model on devices of its own, one a copy; None where it has none."""
    number = cfg.cluster.num_scorers.get(name) if isinstance(cfg, RLConfig) else None
    if number is None:
        return None
    return Role(name=name, num_workers=number, where="ray", dtype=dtype)


def _frozen(name: ScorerName, cfg: RLConfig | DPOConfig, axes: AxisSizes, dtype: Dtype) -> Role:
    """A model that scores rows: on devices of its own, or beside the policy, over all trainers."""
    if (apart := _apart(name, cfg, dtype)) is not None:
        return apart
    # Sizes of its own that fit no mesh are for the rules to refuse.
    with suppress(UserError):
        axes = AxisSizes.of(cfg.trainer.parallel.for_reference, axes.world)
    return Role(name=name, axes=axes, shares_devices_of="policy", dtype=dtype)


def _training_layers(plan: RunPlan, trainer: SFTTrainerConfig) -> Layers:
    if plan.config.model.exact:
        return "exact"
    compiles = not plan.is_on_cpu if trainer.compile is None else trainer.compile
    return "compiled" if compiles else "eager"


def _engine_role(plan: RunPlan, engine: EngineConfig, axes: AxisSizes, dtype: Dtype) -> Role:
    cfg, size = plan.config, engine.tensor_parallel_size
    family, is_embedded = plan.model and plan.model.family, engine.backend == "embedded"
    is_fused = family is None or family in FUSED_FAMILIES
    layers: Layers = "fused" if is_fused else "eager" if engine.enforce_eager else "compiled"
    role = Role(
        name="engine",
        axes=AxisSizes(tensor=size),
        layers="exact" if cfg.model.exact else layers,
        dtype=dtype,
    )
    if not isinstance(cfg, RLConfig):
        return replace(role, num_workers=max((plan.world_size or size) // size, 1))
    if cfg.cluster.num_engines:
        return replace(role, num_workers=cfg.cluster.num_engines, where="ray")
    if cfg.has_engine_thread:
        return replace(role, shares_devices_of="policy", where="thread")
    has_own_form = bool(cfg.model.lora.rank) or engine.packs_rows
    is_alias = is_embedded and axes.world == 1 and not has_own_form
    return replace(
        role,
        num_workers=max(axes.world // size, 1),
        shares_devices_of="policy",
        aliases_weights_of="policy" if is_alias else None,
    )


def _batch(config: Command) -> BatchArithmetic | None:
    match config:
        case RLConfig():
            prompts = config.rollout.prompts_per_step
            mini = min(config.trainer.prompts_per_minibatch or prompts, prompts)
            samples, epochs = config.rollout.n_samples_per_prompt, config.trainer.num_epochs
        case SFTConfig():
            prompts = mini = config.data.examples_per_step
            is_paired = isinstance(config, PairsConfig) and not config.is_unpaired
            samples, epochs = 2 if is_paired else 1, 1
        case _:
            return None
    return BatchArithmetic(
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        prompts_per_minibatch=mini,
        num_minibatches=-(-prompts // mini),
        num_epochs=epochs,
        num_steps=config.run.steps,
    )
