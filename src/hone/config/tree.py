"""The trees that recipes fill, one a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from hone.algorithms.settings import (
    AlgorithmConfig,
    BradleyTerryConfig,
    CriticConfig,
    PreferenceConfig,
    TeacherConfig,
)
from hone.config.base import Section
from hone.config.bench import (
    BenchModelConfig,
    BenchTrainModelConfig,
    DecodeConfig,
    RowsConfig,
)
from hone.config.commands import COMMANDS
from hone.config.planning import PlannedModelConfig, PlanningConfig
from hone.config.run import (
    CheckpointConfig,
    DPORunConfig,
    EvalConfig,
    EvaluateRunConfig,
    GenerateRunConfig,
    LogConfig,
    RewardModelingRunConfig,
    RunConfig,
    SFTEvalConfig,
    SFTRunConfig,
    StandaloneEvaluationConfig,
)
from hone.data.settings import (
    CurriculumConfig,
    DataConfig,
    PairSourceBase,
    PairSourceConfig,
    ServedDataConfig,
    SourceConfig,
)
from hone.distributed.settings import ClusterConfig
from hone.door.settings import DoorConfig
from hone.engine.settings import EngineConfig
from hone.models.settings import ModelConfig, TrainedModelConfig
from hone.observe.settings import ProfileConfig, RLProfileConfig
from hone.rewards.settings import GenerateRewardConfig, RewardConfig
from hone.rollout.settings import EnvConfig, GenerationConfig, PipelineConfig, RolloutConfig
from hone.trainer.settings import OptimizerConfig, SFTTrainerConfig, TrainerConfig

__all__ = [
    "RECIPE_COMMANDS",
    "SAMPLING",
    "SUPERVISED",
    "TREES",
    "BenchEngineConfig",
    "BenchTrainConfig",
    "DPOConfig",
    "EvaluateConfig",
    "EvaluateDataConfig",
    "GenerateConfig",
    "PairsConfig",
    "PairsDataConfig",
    "PlanConfig",
    "RLConfig",
    "RLDataConfig",
    "RewardModelingConfig",
    "SFTConfig",
    "SFTDataConfig",
    "ServeConfig",
]


class RLDataConfig(DataConfig):
    """Data of `hone rl`: prompts."""

    curriculum: CurriculumConfig = CurriculumConfig()

    @model_validator(mode="before")
    @classmethod
    def _from_other_commands(cls, value: Any) -> Any:
        """Take the section of a command that has no curriculum, as a program passes it."""
        if isinstance(value, DataConfig) and not isinstance(value, cls):
            return {name: getattr(value, name) for name in value.model_fields_set}
        return value


class RLConfig(Section):
    """`hone rl`: reinforcement learning with verifiable rewards."""

    run: RunConfig = RunConfig()
    model: TrainedModelConfig
    data: RLDataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    trainer: TrainerConfig = TrainerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: RLProfileConfig = RLProfileConfig()

    @property
    def max_completion_tokens(self) -> int:
        """Of training and, where the run evaluates, of evaluation: both must fit behind a
        prompt."""
        measured = self.eval.max_completion_tokens if self.eval.is_scheduled else 0
        return max(self.rollout.max_completion_tokens, measured)

    @property
    def has_engine_thread(self) -> bool:
        """Whether an engine samples ahead in a thread of the first training process, with weights
        of its own."""
        return self.pipeline.samples_ahead and self.cluster.num_engines == 0

    @property
    def num_engines_apart(self) -> int:
        """Engines with weights of their own that sample beside the trainers, all driven by the
        first training process. 0: each training process drives one on its device."""
        return 1 if self.has_engine_thread else self.cluster.num_engines


class RowsDataConfig(DataConfig):
    """Data that are trained as they are read."""

    max_tokens: int = Field(default=2048, ge=2)
    """Longest prompt plus completion, in tokens; longer rows follow `overlong_prompts`."""

    examples_per_step: int = Field(default=64, ge=1)
    """Rows of the data per optimizer step, over all devices; of preferences pairs, or completions
    with a label."""


class SFTDataConfig(RowsDataConfig):
    """Data of supervised fine-tuning: rows with a demonstration."""

    train_on_prompt: bool = False
    """Also learn the prompt's tokens; off: the completion's only."""


class SFTOptimizerConfig(OptimizerConfig):
    """Optimizer of `hone sft` and `hone reward-model`, which learn what is written down and bear
    longer steps than reinforcement learning."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate (of AdamW)."""


class SupervisedTrainerConfig(SFTTrainerConfig):
    """Trainer of `hone sft` and `hone reward-model`."""

    optimizer: SFTOptimizerConfig = SFTOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Optimizer and schedule."""


class SFTConfig(Section):
    """`hone sft`: supervised fine-tuning on demonstrations."""

    run: SFTRunConfig = SFTRunConfig()
    model: TrainedModelConfig
    data: SFTDataConfig
    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()
    eval: SFTEvalConfig = SFTEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()


class PairsDataConfig(RowsDataConfig):
    """Data of preferences: rows with `prompt`, `chosen` and `rejected`, plain or conversational;
    without `prompt` it is their common start. For kto also rows with `prompt`, `completion` and
    `label`."""

    # Sections are frozen, so that narrower types are sound.
    train: tuple[PairSourceConfig, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Sources to train on, mixed by their weights."""

    eval: tuple[PairSourceBase, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Sources to evaluate on. Empty: rows are held out of `train`, see `eval_fraction`."""


class PairsConfig(SFTConfig):
    """What commands that learn from preferences have in common."""

    # Sections are frozen, so that another type with the keys that are read is sound.
    data: PairsDataConfig  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]

    @property
    def is_unpaired(self) -> bool:
        """Whether it learns from single completions."""
        return False

    @property
    def for_reward_model(self) -> bool:
        """Whether rows are read as a reward model reads them, and may have a margin."""
        return False


class DPOConfig(PairsConfig):
    """`hone dpo`: learn from preferences (DPO, KTO, ORPO, SimPO, CPO and kin)."""

    run: DPORunConfig = DPORunConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    # As `data` of pairs: another type with the keys that are read.
    trainer: SFTTrainerConfig = SFTTrainerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: PreferenceConfig = PreferenceConfig()

    @property
    def is_unpaired(self) -> bool:
        return self.algorithm.is_unpaired

    @property
    def has_frozen_reference(self) -> bool:
        """Whether a copy of the start lies beside the policy. Adapters switched off need none, nor
        rows that are scored before anything is trained."""
        algorithm = self.algorithm
        is_scored = algorithm.kept_reference is not None or self.model.lora.rank > 0
        return algorithm.needs_reference and not is_scored


class RewardModelingConfig(PairsConfig):
    """`hone reward-model`: train a model that scores completions, on pairs."""

    run: RewardModelingRunConfig = RewardModelingRunConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: BradleyTerryConfig = BradleyTerryConfig()

    @property
    def for_reward_model(self) -> bool:
        return True


class EvaluateDataConfig(DataConfig):
    """Data of `hone eval`."""

    train: tuple[SourceConfig, ...] = ()
    """Sources that `eval_fraction` holds rows out of, where `eval` is empty."""


class EvaluateConfig(Section):
    """`hone eval`: score a model on a data set."""

    run: EvaluateRunConfig = EvaluateRunConfig()
    model: ModelConfig
    data: EvaluateDataConfig = EvaluateDataConfig()
    engine: EngineConfig = EngineConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    eval: StandaloneEvaluationConfig = StandaloneEvaluationConfig()

    @property
    def max_completion_tokens(self) -> int:
        return self.eval.max_completion_tokens


class GenerateConfig(Section):
    """`hone generate`: sample completions for prompts from a file."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: ModelConfig
    data: DataConfig
    engine: EngineConfig = EngineConfig()
    env: EnvConfig = EnvConfig()
    generation: GenerationConfig = GenerationConfig()
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Samples drawn for each prompt."""
    reward: GenerateRewardConfig = GenerateRewardConfig()
    keep: Literal["all", "best", "passing", "pairs"] = "all"
    """What of a prompt's completions is written: `all`; the `best` by total reward, the first of
    equals; those `passing`, as `pass_threshold` says; `pairs`, a row with the best as `chosen` and
    the worst as `rejected`, where they differ in reward. All but `all` leave out what could not be
    scored."""
    pass_threshold: float = 1.0
    """Total reward from which a completion is `passing`."""
    output: Path = Path("completions.jsonl")
    """JSONL file that receives one row a completion, in the order of the prompts, whole once all
    are there; the settings lie beside it as `<output>.config.yaml`. Until then what is done lies in
    `<output>.parts`, from where the same command goes on. One with other settings replaces none of
    these."""

    @property
    def max_completion_tokens(self) -> int:
        return self.generation.max_completion_tokens


class ServeConfig(Section):
    """`hone serve`: answer requests over HTTP with a model."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: ModelConfig
    data: ServedDataConfig = ServedDataConfig()
    engine: EngineConfig = EngineConfig()
    generation: GenerationConfig = GenerationConfig()
    """How answers are drawn where a request does not say otherwise."""
    serve: DoorConfig = DoorConfig()


class BenchEngineConfig(Section):
    """`hone bench engine`: the engine's speed on a workload, with log-probabilities, against what
    the device allows and, where asked for, against vLLM on the same requests."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: BenchModelConfig = BenchModelConfig()
    engine: EngineConfig = EngineConfig()
    """The embedded engine, made for the longest request of the workload."""
    workload: str = "uniform"
    """`decode`: a full batch at one context, for the time of a step. `uniform`: 256 requests,
    prompt and output 100 to 1,024 tokens each. `groups`: 64 prompts of 256 tokens, 8 samples each,
    lengths log-normal (median 800, sigma 0.7, at most 3,800). Or a JSONL file; a line has
    `prompt_tokens` (a number) or `prompt_ids`, `max_tokens`, and where wanted `n`, `temperature`,
    `top_p`, `top_k`, `min_p`. All are submitted at once and sampled to their `max_tokens`."""
    decode: DecodeConfig = DecodeConfig()
    against: Literal["vllm"] | None = None
    """Also run the installed vLLM on the same requests, first and in a process of its own, with the
    same formats, memory, `engine.max_num_seqs` and prefix caching."""
    output: Path = Path("bench.json")
    """JSON file that receives all numbers; what vLLM logs lies beside it as `.vllm.log`."""


class BenchTrainConfig(Section):
    """`hone bench train`: speed and memory of optimizer steps, as a run takes them, against what
    the device allows and what was planned."""

    run: GenerateRunConfig = GenerateRunConfig()
    model: BenchTrainModelConfig = BenchTrainModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    """The trainer, as in a run; a step of the benchmark is one optimizer step."""
    objective: Literal["rl", "sft"] = "rl"
    """Whose step is taken: that of `hone rl`, with entropies, or that of `hone sft`."""
    rows: RowsConfig = RowsConfig()
    steps: int = Field(default=5, ge=1)
    """Optimizer steps that are measured."""
    warmup_steps: int = Field(default=2, ge=1)
    """Optimizer steps before them, the first of which compiles."""
    output: Path = Path("bench-train.json")
    """JSON file that receives all numbers."""


class PlanConfig(RLConfig):
    """`hone plan`: what a step of a recipe of `hone rl` would take on GPUs of a type, for all
    modes, splits into trainers and engines, and settings of memory."""

    # Sections are frozen, so that a narrower type is sound.
    model: PlannedModelConfig = PlannedModelConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    data: EvaluateDataConfig = EvaluateDataConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    plan: PlanningConfig = PlanningConfig()
    output: Path | None = None
    """YAML file that receives the first as a recipe; or JSON file that receives all numbers, beside
    which the plot lies as `.svg`. Unset: none is written."""


TREES: Mapping[str, type[Section]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward-model": RewardModelingConfig,
    "eval": EvaluateConfig,
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "plan": PlanConfig,
    "bench engine": BenchEngineConfig,
    "bench train": BenchTrainConfig,
}
"""Configuration trees by command, the words after `hone`."""

SUPERVISED = tuple(name for name, tree in TREES.items() if issubclass(tree, SFTConfig))
"""Commands that train on rows of files; nothing is sampled."""

RECIPE_COMMANDS = tuple(name for name in TREES if name in COMMANDS and COMMANDS[name].has_recipes)
"""Commands that a recipe may be for."""

SAMPLING = tuple(name for name in RECIPE_COMMANDS if "engine" in TREES[name].model_fields)
"""Commands of these that sample with engines."""
