"""How samples are scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from hone.address import is_address, name_of_address, names_code
from hone.config.base import Section
from hone.hardware import num_usable_cores

__all__ = [
    "ANSWER_REWARDS",
    "BUILTIN_REWARDS",
    "CODE_TIMEOUT_S",
    "REWARD_MODEL",
    "GenerateRewardConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
]

BUILTIN_REWARDS = ("exact_match", "math", "format", "length", "overlong", "code_tests", "judge")
"""Scoring functions that come with the package."""
ANSWER_REWARDS = ("exact_match", "math", "code_tests")
"""Those of them that need the answer of a row."""
REWARD_MODEL = "reward_model"
"""What the part of a reward model is called in metrics."""
CODE_TIMEOUT_S = 5.0
"""Seconds that all tests of a sample may take in `code_tests` where nothing else is said."""


class RewardFunctionConfig(Section):
    """One scoring function and its share of the total."""

    fn: str
    """A built-in (`exact_match`, `math`, `format`, `length`, `overlong`, `code_tests`, `judge`), or
    the user's own: `package.module:function`, `path/to/file.py:function`, or the `http://` or
    `https://` address of a service that answers `{"query": [...], "prompts": [...], "labels":
    [...]}` with `{"rewards": [...]}`."""

    weight: float = 1.0
    """Factor of this part in the total reward."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for every call. `math`: `latex_only: true` reads results in LaTeX alone, as
    TRL's `accuracy_reward`; otherwise bare numbers and what stands behind `####` count too.
    `judge`: `base_url`, `model`, `template`, `pattern`, `max_tokens` and `temperature`. Of it and
    of a service `headers`, in which `$NAME` is an environment variable, for keys: `{Authorization:
    Bearer $API_KEY}`."""

    whole_groups: bool = False
    """Call a function that takes lists, in TRL's or OpenRLHF's shape, once for all completions of a
    prompt, which it may compare. Off: once for each, with lists of one."""


class RewardModelConfig(Section):
    """A reward model: a frozen model that gives a number to a prompt with its completion. It lies
    whole beside the engine of each process, or of the first one where that drives all engines; or
    in shards over training processes that sample, with `trainer.parallel.zero_stage` 3."""

    path: str | None = None
    """Folder or hub name of a model with one label for `AutoModelForSequenceClassification`, with
    its tokenizer; unset: there is none. Prompt and completion are rendered as text, by the model's
    own chat template where it has one, and the number is the score at the last token. It is called
    `reward_model` in metrics."""

    weight: float = 1.0
    """Factor of its score in the total reward, beside those of `reward.functions`."""

    max_tokens_per_forward: int = Field(default=32768, ge=1)
    """Tokens of completions, with their prompts, that are scored in one pass; a longer one has a
    pass of its own. It may be twice the budget of the policy's passes and more: there are no logits
    and nothing is kept for a gradient."""


class RewardConfig(Section):
    """The reward of a sample: a weighted sum of functions, run in killable worker processes, and of
    a reward model."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(fn="exact_match"),)
    """Scoring functions; the total is their weighted sum. Left out, it is `exact_match`, or none
    where `reward.model.path` names a model. Before the model is loaded each is called
    once on the first row, with its answer as the completion: a wrong call, an unknown name or a
    score of a wrong type ends the run, another failure is a warning."""

    clip: tuple[float, float] | None = None
    """Lowest and highest total reward, such as [-10, 10]: one outside becomes the nearer of them,
    before groups are chosen and anything is normalised. The parts are reported as they are. Unset:
    totals are not clipped."""

    model: RewardModelConfig = RewardModelConfig()
    """A model that scores."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one call may take before its worker is killed and the sample counted as failed. Those
    of a service or a judge are for all attempts of a call: it is repeated after the statuses 429
    and 5xx, and where the connection is refused or lost."""

    memory_limit_gib: float = Field(default=4.0, gt=0)
    """Address space one worker may take, in GiB."""

    num_workers: int | None = Field(default=None, ge=1)
    """Worker processes, and so calls at a time; unset: one per CPU core, at most 16, or 32 where a
    service or a judge scores and no function of your own."""

    max_failure_rate: float = Field(default=0.3, ge=0, le=1)
    """Share of a step's or evaluation's samples that may fail scoring: the run ends as soon as more
    have failed, without scoring the rest. It also ends where none of the first 24 could be scored,
    unless this is 1."""

    def clipped(self, total: float) -> float:
        """A total reward within `clip`."""
        return total if self.clip is None else min(max(total, self.clip[0]), self.clip[1])

    @property
    def worker_limit(self) -> int:
        """`num_workers`, or what it is where it is unset: workers of the user's code may each
        import large libraries, and stay few; those that wait for services take 8 MiB each."""
        if self.num_workers is not None:
            return self.num_workers
        if self.waits_for_services and not any(names_code(entry.fn) for entry in self.functions):
            return 32
        return min(num_usable_cores(), 16)

    @property
    def waits_for_services(self) -> bool:
        """Whether a service or a judge scores."""
        return any(is_address(entry.fn) or entry.fn == "judge" for entry in self.functions)

    @model_validator(mode="before")
    @classmethod
    def _a_model_replaces_the_default_function(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "functions" in values:
            return values
        model = values.get("model")
        path = model.get("path") if isinstance(model, Mapping) else getattr(model, "path", None)
        return values if path is None else {**values, "functions": ()}

    @property
    def has_parts(self) -> bool:
        """Whether anything scores, an environment apart."""
        return bool(self.functions) or self.model.path is not None

    @property
    def names(self) -> list[str]:
        """What each function is called in metrics: the part behind the colon, the built-in's name,
        or host and path of an address, joined with `_`; the second and later of equals with `_2`,
        `_3`, ... behind."""
        unique = [REWARD_MODEL] * (self.model.path is not None)
        for entry in self.functions:
            name = entry.fn.rpartition(":")[2]
            if is_address(entry.fn):
                name = name_of_address(entry.fn)
            candidate = name
            number = 1
            while candidate in unique:
                number += 1
                candidate = f"{name}_{number}"
            unique.append(candidate)
        return unique[-len(self.functions) :] if self.functions else []


class GenerateRewardConfig(RewardConfig):
    """The reward of a completion, where it is to have one."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """Scoring functions; the total is their weighted sum. None named, no `reward.model.path` and no
    `env.path`: completions are not scored.
    Before the model is loaded each is called once on the first row, with its answer as the
    completion."""
