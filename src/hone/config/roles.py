"""The roles of a run: its parts that have a model, each with its settings.

A section of a recipe says what differs for a role from another one: the critic is trained as
`trainer` says but for the keys of `critic`, the teacher scores as the policy does but for those of
`teacher`. The functions of this module write these differences out, once, for `resolve`
(`plan.py`). Everything else reads the result off the `Role`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from hone.config.base import Section
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.distributed.settings import ROW_SCORERS, SCORERS, AxisSizes, ParallelConfig, RoleName
from hone.engine.settings import EngineConfig
from hone.families.model_facts import ModelFacts
from hone.models.settings import Dtype, ModelConfig
from hone.rewards.settings import RewardModelConfig
from hone.trainer.settings import SFTTrainerConfig, TrainerConfig

__all__ = [
    "MODEL_KEYS",
    "Layers",
    "Role",
    "Settings",
    "critic_model",
    "critic_settings",
    "reward_model",
    "teacher_model",
    "teacher_settings",
]

MODEL_KEYS: Mapping[RoleName, str] = {
    "critic": "critic.path",
    "teacher": "teacher.path",
    "reward_model": "reward.model.path",
}
"""The keys that name a model of their own for a role; others have the policy's, `model.path`."""
Layers = Literal["eager", "compiled", "exact", "fused"]
Settings: TypeAlias = SFTTrainerConfig | EngineConfig | RewardModelConfig

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Copies of a model that do the same work, their settings, and the devices they have."""

    name: RoleName
    settings: Settings
    """Settings of the role, with values inherited from other sections written out."""
    model: ModelConfig
    """The model that it loads."""
    facts: ModelFacts | None
    """Facts about the model; None: nothing is known, and memory and time are assumed to be the
    policy's."""
    num_workers: int = 1
    """Copies of the model, each over `axes.world` devices."""
    axes: AxisSizes = AxisSizes()
    """Division of one copy of the model over processes."""
    shares_devices_of: RoleName | None = None
    """Role with whose devices it is colocated; None: it is remote."""
    where: Literal["here", "thread", "ray"] = "here"
    """In the process of whose devices it shares, there in a thread of its own, or in processes of
    its own."""
    layers: Layers = "eager"
    """How decoder layers compute: transformers' as they are or compiled, exact, or those made for
    decoding."""
    dtype: Dtype
    """Format of forward and backward."""
    aliases_weights_of: RoleName | None = None
    """Role whose tensors it computes with; None: it has its own copy."""
    temperature: float = 1.0
    """Divides the logits of which log-probabilities are taken: that of sampling."""
    top_k: int = 1
    """Words of each token that it names as the likeliest."""
    replays_routes: bool = False
    """Whether its experts of each token are recorded in sampling, and taken again in training."""
    num_scorings: int = 0
    """Passes without gradient over the rows of a step."""
    num_epochs: int = 0
    """Passes with gradient over them."""

    @property
    def title(self) -> str:
        """The role's name for messages."""
        return self.name.replace("_", " ")

    @property
    def num_devices(self) -> int:
        """Devices that it is on, shared or not."""
        return self.num_workers * self.axes.world

    @property
    def has_own_devices(self) -> bool:
        """Whether nothing else works on its devices."""
        return self.shares_devices_of is None

    @property
    def passes(self) -> float:
        """Forward passes' worth of FLOPs over the rows of a step, where all weights are trained:
        backward counts as two of them."""
        return self.num_scorings + 3.0 * self.num_epochs

    @property
    def path_key(self) -> str:
        """The key that names its model."""
        return MODEL_KEYS.get(self.name, "model.path")

    @property
    def learns(self) -> bool:
        """Whether it has a trainer."""
        return self.name in ("policy", "critic")

    @property
    def scores_rows(self) -> bool:
        """Whether it is a frozen model whose outputs become columns of the rows."""
        return self.name in ROW_SCORERS

    @property
    def is_scorer(self) -> bool:
        """Whether it is a frozen model that scores rows, or samples."""
        return self.name in SCORERS

    @property
    def sleeps(self) -> bool:
        """Whether it leaves its devices while others work on them (`enable_sleep`)."""
        settings = self.settings
        return isinstance(settings, TrainerConfig | EngineConfig) and settings.enable_sleep

    @property
    def is_exact(self) -> bool:
        """Whether log-probabilities are the bits of every other role in exact mode."""
        return self.layers == "exact"

    @property
    def trainer(self) -> SFTTrainerConfig:
        """The settings of a role that learns, or scores rows as one that learns. Raises TypeError
        for others."""
        if isinstance(self.settings, SFTTrainerConfig):
            return self.settings
        raise TypeError(f"{self.name} has no settings of a trainer")

    @property
    def engine(self) -> EngineConfig:
        """The settings of engines. Raises TypeError for other roles."""
        if isinstance(self.settings, EngineConfig):
            return self.settings
        raise TypeError(f"{self.name} has no settings of an engine")


def _inherited(section: S, own: Section, *, but: tuple[str, ...] = ()) -> S:
    """`section` with what `own` sets in place of the keys that both have; unset keys are
    inherited."""
    both = type(section).model_fields.keys() & type(own).model_fields.keys() - set(but)
    set_keys = {key: value for key in both if (value := getattr(own, key)) is not None}
    return section.model_copy(update=set_keys)


def critic_settings(cfg: RLConfig) -> TrainerConfig:
    """`trainer`, with what `critic` says in its place."""
    critic, trainer, is_alone = cfg.critic, cfg.trainer, cfg.cluster.num_critics > 0
    optimizer = {"lr": critic.lr, "name": critic.optimizer or trainer.optimizer.name}
    update: dict[str, Any] = {
        "optimizer": trainer.optimizer.model_copy(update=optimizer),
        # Beside the policy it has the processes of that, and so the axes.
        "parallel": _critic_parallel(cfg) if is_alone else trainer.parallel,
    }
    if is_alone:  # nobody needs room on its devices
        update["enable_sleep"] = False
    if critic.max_tokens_per_microbatch is not None:
        update["max_tokens_per_forward"] = None  # twice that
    if critic.recompute == "off":
        update["offload_activations"] = False  # which are of recomputed layers
    own = trainer.model_copy(update=update)
    return _inherited(own, critic, but=("optimizer", "parallel"))


def _critic_parallel(cfg: RLConfig) -> ParallelConfig:
    own, of_policy = cfg.critic.parallel, cfg.trainer.parallel
    if own.pipeline_parallel_size is not None:
        of_policy = of_policy.model_copy(update={"virtual_stages": 1})
    return _inherited(of_policy, own)


def critic_model(cfg: RLConfig) -> ModelConfig:
    """The critic's initial model: the policy's, or one of its own."""
    if cfg.critic.path is None:
        return cfg.model
    own = {"path": cfg.critic.path, "init": "pretrained", "tokenizer": None}
    return cfg.model.model_copy(update=own)


def teacher_settings(cfg: RLConfig) -> TrainerConfig:
    """`trainer`, with the budget of the teacher's passes."""
    return _inherited(cfg.trainer, cfg.teacher)


def teacher_model(cfg: RLConfig) -> ModelConfig | None:
    """The teacher, loaded as the policy is but for what `teacher` says; None without one."""
    if cfg.teacher.path is None:
        return None
    own = {"path": cfg.teacher.path, "init": "pretrained", "tokenizer": None, "exact": False}
    return ModelConfig(**cfg.model.model_dump(include={*ModelConfig.model_fields}) | own)


def reward_model(cfg: RLConfig | EvaluateConfig | GenerateConfig) -> ModelConfig | None:
    """The reward model, loaded in the format of the policy, with as much room for features of
    images; None without one."""
    if cfg.reward.model.path is None:
        return None
    policy = cfg.model
    return ModelConfig(
        path=cfg.reward.model.path,
        dtype=policy.dtype,
        image_cache_gib=policy.image_cache_gib,
        trust_remote_code=policy.trust_remote_code,
    )
