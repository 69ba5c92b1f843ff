"""Everything that is decided before a run: who has which devices, formats, layers, batches.

    plan = resolve(config, model, devices, world_size=8)
    plan.roles["policy"].axes, plan.batch.samples_per_optimizer_step

`resolve` is pure and decides once. The rules (`hone.rules`) and the memory model
(`hone.trainer.cost`) are functions of a plan; `hone check`, `hone plan`, the builder, the
trainer and the report read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Literal, TypeAlias, TypedDict, cast

from hone.config.bench import BenchModelConfig
from hone.config.roles import (
    MODEL_KEYS,
    Layers,
    Role,
    Settings,
    critic_model,
    critic_settings,
    reward_model,
    teacher_model,
    teacher_settings,
)
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
    ServeConfig,
    SFTConfig,
)
from hone.data.settings import DataConfig
from hone.distributed.settings import AxisSizes, ClusterConfig, RoleName
from hone.engine.backends import BACKENDS
from hone.engine.settings import EngineConfig
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.registry import FUSED_FAMILIES
from hone.families.shape import ModelShape
from hone.hardware import Peaks
from hone.models.settings import Dtype, LoraConfig, ModelConfig, compute_dtype
from hone.rollout.settings import SamplingConfig
from hone.trainer.settings import SFTTrainerConfig

__all__ = [
    "RECIPE_TREES",
    "AxisSizes",
    "BatchArithmetic",
    "Command",
    "Devices",
    "Role",
    "RoleName",
    "RunPlan",
    "known_models",
    "resolve",
]

Command: TypeAlias = (
    RLConfig
    | SFTConfig
    | EvaluateConfig
    | GenerateConfig
    | ServeConfig
    | BenchEngineConfig
    | BenchTrainConfig
)
"""Any tree that a run is made of; that of `hone plan` is an `RLConfig`."""
RECIPE_TREES = cast(
    "Mapping[str, type[Command]]", {command: TREES[command] for command in RECIPE_COMMANDS}
)
"""The trees of the commands that a recipe may be for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPU of the run; with `hone check --gpu`, the assumed one."""

    kind: Literal["cpu", "cuda"] = "cuda"
    gpu: Peaks | None = None
    """None: a CPU, or a GPU of which nothing is known."""
    per_node: int | None = None
    """GPUs, or on a CPU processes, of a host; None: not known."""
    nodes: int = 1
    host_bytes: int | None = None
    """Memory of this host that processes can still take; None: not known."""
    keeps_margin: bool = False
    """Whether a run has to leave as much of the GPU free as predictions have been off
    (`hone.planner.margin`). In a plan that `hone.tools.plan.search` has found, it says whether the
    run does."""


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
    """The result of `resolve`."""

    config: Command
    model: ModelFacts | None
    """None: there is no `config.json` here, and the name is not that of a public shape."""
    devices: Devices
    world_size: int | None
    """Processes that train, those of a critic apart not among them, or without a trainer sample;
    None: not known yet, so that `roles` has as few as make up one replica."""
    roles: Mapping[RoleName, Role]
    batch: BatchArithmetic | None
    """None: nothing is trained on a schedule of rows (`hone eval`, `generate`, `bench`)."""
    others: Mapping[str, ModelFacts] = field(default_factory=dict[str, ModelFacts])
    """Facts about models other than the policy, by path."""
    problem: str | None = None
    """Why `world_size` processes cannot be laid out along the axes of training; `roles` is then
    laid out for one replica."""
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings that are `auto` in the recipe and have a value in `config`, by key, each with the
    reason for its value (`hone.planner.recompute`)."""

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
        has_none = isinstance(cfg, ServeConfig | BenchEngineConfig | BenchTrainConfig)
        return None if has_none else cfg.data

    @property
    def sampling(self) -> dict[str, SamplingConfig]:
        """Kinds of sampling, by the section that configures them: `rollout`, `eval`,
        `generation`."""
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
        """The batch plan of training. Raises KeyError for commands that only sample."""
        return self.roles["policy"]

    @property
    def gives_values(self) -> bool:
        """Whether what is trained gives a number in place of logits."""
        return isinstance(self.config, RewardModelingConfig)

    @property
    def scorers(self) -> list[Role]:
        """The frozen models, which score rows or samples."""
        return [role for role in self.roles.values() if role.is_scorer]

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
    def samples_ahead(self) -> bool:
        """Whether engines sample while trainers train."""
        return isinstance(self.config, RLConfig) and self.config.pipeline.samples_ahead

    @property
    def cluster(self) -> ClusterConfig:
        """Raises TypeError for commands without one."""
        if isinstance(self.config, RLConfig):
            return self.config.cluster
        raise TypeError(f"{type(self.config).__name__} has no cluster")

    @property
    def timeout_s(self) -> float:
        """Seconds after which a process that waits for other trainers gives up."""
        return self.policy.trainer.parallel.timeout_s

    @property
    def trainers_hold_frozen(self) -> bool:
        """Whether a frozen model that scores rows is divided over the processes that train."""
        held = (role for role in self.roles.values() if role.scores_rows)
        return any(role.where == "here" and not role.aliases_weights_of for role in held)

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
        """Bytes of an element of the weights in the format that computes."""
        return 4 if self.dtype == "float32" else 2

    @property
    def max_sequence_parts(self) -> dict[str, int]:
        """Terms that add up to the longest row, of training or of sampling, by setting."""
        cfg = self.config
        if isinstance(cfg, SFTConfig):
            return {"data.max_tokens": cfg.data.max_tokens}
        if isinstance(cfg, ServeConfig):
            return {"serve.max_model_len": self.max_model_len or 0}
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
        if isinstance(cfg, ServeConfig):
            return cfg.serve.max_model_len or (self.model and self.model.context_length)
        if not isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig):
            return None
        longest = cfg.data.max_prompt_tokens + cfg.max_completion_tokens
        return min(longest, (self.model and self.model.context_length) or longest)

    def devices_of_roles(self) -> int:
        """Devices in all, each counted once."""
        return sum(x.num_devices for x in self.roles.values() if x.shares_devices_of is None)


def known_models(config: Command, *, may_fetch: bool = False) -> dict[str, ModelFacts]:
    """What is known of the models of a run besides the policy, by path, as `ModelFacts.known`."""
    paths: set[str | None] = set()
    if isinstance(config, RLConfig):
        has_critic = config.algorithm.needs_critic
        keys = (key for role, key in MODEL_KEYS.items() if role != "critic" or has_critic)
        paths |= {attrgetter(key)(config) for key in keys}
    elif isinstance(config, EvaluateConfig | GenerateConfig):
        paths.add(config.reward.model.path)
    found = {path: ModelFacts.known(path, may_fetch=may_fetch) for path in paths if path}
    return {path: facts for path, facts in found.items() if facts is not None}


def resolve(
    config: Command,
    model: ModelFacts | None,
    devices: Devices,
    *,
    world_size: int | None = None,
    others: Mapping[str, ModelFacts] | None = None,
) -> RunPlan:
    """Decide how `config` runs on `devices`, in `world_size` processes where that is known. `model`
    is what is known of the policy, `others` of other models (`known_models`).

    Never raises: what cannot be is for the rules to say.
    """
    axes, problem = AxisSizes(), None
    if isinstance(config, RLConfig | SFTConfig | BenchTrainConfig):
        parallel = config.trainer.parallel
        try:
            axes = AxisSizes.of(parallel, world_size)
        except UserError as error:
            axes, problem = AxisSizes.of(parallel), str(error)
    roles: dict[RoleName, Role] = {}
    plan = RunPlan(
        config=config,
        model=model,
        devices=devices,
        world_size=world_size,
        roles=roles,
        batch=_batch(config),
        others=others or {},
        problem=problem,
    )
    roles |= {role.name: role for role in _roles(plan, axes)}
    return plan


def _roles(plan: RunPlan, axes: AxisSizes) -> Iterator[Role]:
    """All parts of the run that have a model. Whatever goes over the roles meets them in this
    order."""
    cfg, trainer, engine = plan.config, plan.trainer, plan.engine
    if trainer is not None:
        yield _policy(plan, trainer, axes)
    if engine is not None:
        yield _engine(plan, engine, axes)
    if isinstance(cfg, RLConfig) and cfg.algorithm.needs_critic:
        yield _critic(plan, cfg, axes)
    if isinstance(cfg, RLConfig | DPOConfig):
        yield from _reference(plan, cfg, axes)
    if isinstance(cfg, RLConfig) and (model := teacher_model(cfg)) is not None:
        settings = teacher_settings(cfg)
        teacher = replace(
            _role(plan, "teacher", settings, model),
            layers=_layers(plan, settings),
            top_k=cfg.teacher.top_k,
            num_scorings=1,
        )
        yield _placed(teacher, cfg, axes)
    if isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig):
        yield from _reward_model(plan, cfg, axes)


class _Common(TypedDict):
    """Fields that every role has from its settings and its model."""

    name: RoleName
    settings: Settings
    model: ModelConfig
    facts: ModelFacts | None
    dtype: Dtype
    temperature: float


def _common(plan: RunPlan, name: RoleName, settings: Settings, model: ModelConfig) -> _Common:
    cfg = plan.config
    return _Common(
        name=name,
        settings=settings,
        model=model,
        facts=plan.model if model.path == (cfg.model.path or "") else plan.others.get(model.path),
        dtype=compute_dtype(cfg.model.dtype, plan.devices.kind),
        temperature=cfg.rollout.temperature
        if isinstance(cfg, RLConfig) and name != "critic"  # whose values are no logits
        else 1.0,
    )


def _role(plan: RunPlan, name: RoleName, settings: Settings, model: ModelConfig) -> Role:
    """A role on devices of its own."""
    return Role(**_common(plan, name, settings, model))


def _own_model(cfg: Command) -> ModelConfig:
    """That of `model`."""
    if isinstance(cfg.model, BenchModelConfig):
        fields = cfg.model.model_dump(include={"init", "dtype", "exact"})
        return ModelConfig(path=cfg.model.path or "", **fields)
    return cfg.model


def _policy(plan: RunPlan, trainer: SFTTrainerConfig, axes: AxisSizes) -> Role:
    cfg, batch = plan.config, plan.batch
    # Where several optimizer steps share the rows, and where rewards or advantages are made of
    # log-probabilities.
    is_scored = False
    if isinstance(cfg, RLConfig) and batch is not None:
        has_teacher = cfg.teacher.path is not None and cfg.teacher.loss == "policy_gradient"
        is_asked = has_teacher or "policy" in cfg.algorithm.needs.scores
        is_scored = batch.optimizer_steps_per_rollout > 1 or is_asked
    return Role(
        **_common(plan, "policy", trainer, _own_model(cfg)),
        axes=axes,
        layers=_policy_layers(plan, trainer),
        replays_routes=_replays_routes(cfg),
        num_scorings=int(is_scored),
        num_epochs=1 if batch is None else batch.num_epochs,
    )


def _replays_routes(cfg: Command) -> bool:
    return isinstance(cfg, RLConfig) and cfg.algorithm.routing_replay


def _policy_layers(plan: RunPlan, trainer: SFTTrainerConfig) -> Layers:
    """How layers of the policy and of its reference compute. On rows of files nothing has to be
    exact."""
    cfg = plan.config
    is_exact = not isinstance(cfg, SFTConfig) and cfg.model.exact
    return "exact" if is_exact else _layers(plan, trainer)


def _layers(plan: RunPlan, trainer: SFTTrainerConfig) -> Layers:
    """Execution of the layers of all other models that are trained or score rows."""
    return "compiled" if trainer.compiles(plan.devices.kind) else "eager"


def _critic(plan: RunPlan, cfg: RLConfig, axes: AxisSizes) -> Role:
    """Beside the policy, or in processes of its own."""
    settings = critic_settings(cfg)
    role = replace(
        _role(plan, "critic", settings, critic_model(cfg)),
        axes=axes,
        layers=_layers(plan, settings),
        num_scorings=1,
        num_epochs=cfg.trainer.num_epochs,
    )
    if not cfg.cluster.num_critics:
        return replace(role, shares_devices_of="policy")
    # Sizes that do not fit its processes are for the rules to refuse.
    with suppress(UserError):
        role = replace(role, axes=AxisSizes.of(settings.parallel, cfg.cluster.num_critics))
    return role


def _reference(plan: RunPlan, cfg: RLConfig | DPOConfig, axes: AxisSizes) -> Iterator[Role]:
    """The policy before training: adapters switched off, or a frozen copy."""
    is_asked = cfg.algorithm.kl.coef > 0 if isinstance(cfg, RLConfig) else _is_scored_anew(cfg)
    if not is_asked:
        return
    role = _role(plan, "reference", cfg.trainer, cfg.model)
    role = replace(role, layers=_policy_layers(plan, cfg.trainer), num_scorings=1)
    if cfg.model.lora.rank:
        yield replace(role, axes=axes, shares_devices_of="policy", aliases_weights_of="policy")
    else:
        yield _placed(role, cfg, axes)


def _is_scored_anew(cfg: DPOConfig) -> bool:
    return cfg.has_frozen_reference or (cfg.algorithm.needs_reference and cfg.model.lora.rank > 0)


def _reward_model(
    plan: RunPlan, cfg: RLConfig | EvaluateConfig | GenerateConfig, axes: AxisSizes
) -> Iterator[Role]:
    """On devices of its own; else in shards over trainers that sample, where their policy is; else
    whole in each process that drives an engine, and in the first where that drives all."""
    if (model := reward_model(cfg)) is None:
        return
    role = _role(plan, "reward_model", cfg.reward.model, model)
    if (apart := _apart(role, cfg)) is not None:
        yield apart
        return
    host_role: RoleName = "engine" if plan.trainer is None else "policy"
    role = replace(role, shares_devices_of=host_role)
    if isinstance(cfg, RLConfig) and _trainers_sample(cfg) and cfg.trainer.parallel.zero_stage == 3:
        # Sizes that fit no mesh are for the rules to refuse.
        with suppress(UserError):
            own = AxisSizes.of(cfg.trainer.parallel.for_sequences, axes.world)
            role = replace(role, axes=own)
    yield role


def _trainers_sample(cfg: RLConfig) -> bool:
    """Whether every trainer has a part of an engine, and none samples while it trains."""
    return not (cfg.cluster.num_engines or cfg.has_engine_thread)


def _apart(role: Role, cfg: Command) -> Role | None:
    """A frozen model on devices of its own, one a copy; None where it has none."""
    number = cfg.cluster.num_scorers.get(role.name, 0) if isinstance(cfg, RLConfig) else 0
    return replace(role, num_workers=number, where="ray") if number else None


def _placed(role: Role, cfg: RLConfig | DPOConfig, axes: AxisSizes) -> Role:
    """A model that scores rows: on devices of its own, or beside the policy, over all trainers."""
    if (apart := _apart(role, cfg)) is not None:
        return apart
    # Sizes of its own that fit no mesh are for the rules to refuse.
    with suppress(UserError):
        axes = AxisSizes.of(cfg.trainer.parallel.for_reference, axes.world)
    return replace(role, axes=axes, shares_devices_of="policy")


def _engine(plan: RunPlan, engine: EngineConfig, axes: AxisSizes) -> Role:
    cfg, size = plan.config, engine.tensor_parallel_size
    family = plan.model and plan.model.family
    is_fused = family is None or family in FUSED_FAMILIES
    layers: Layers = "fused" if is_fused else "eager" if engine.enforce_eager else "compiled"
    role = partial(
        Role,
        **_common(plan, "engine", engine, _own_model(cfg)),
        axes=AxisSizes(tensor=size),
        layers="exact" if cfg.model.exact else layers,
        replays_routes=_replays_routes(cfg),
    )
    if not isinstance(cfg, RLConfig):
        return role(num_workers=max((plan.world_size or size) // size, 1))
    if cfg.cluster.num_engines:
        return role(num_workers=cfg.cluster.num_engines, where="ray")
    if cfg.has_engine_thread:
        return role(shares_devices_of="policy", where="thread")
    has_own_weights = BACKENDS[engine.backend].has_own_weights
    has_own_form = bool(cfg.model.lora.rank) or engine.packs_rows
    is_alias = axes.world == 1 and not (has_own_weights or has_own_form)
    return role(
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
