"""How samples are drawn: groups, lengths, the sampling distribution, filters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "FilteredSamplingConfig",
    "GenerationConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Stop",
]


Stop = tuple[str | int, ...]


class SamplingConfig(Section):
    """How completions are drawn."""

    max_completion_tokens: int = Field(default=1024, ge=1)
    """Longest completion, in tokens."""

    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""


class FilteredSamplingConfig(SamplingConfig):
    """How completions are drawn that nothing is trained on: unlikely tokens may be left out."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this much; 1 keeps all."""

    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens kept; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less probable than this share of the most probable one; 0 keeps all."""


class GenerationConfig(FilteredSamplingConfig):
    """How completions are drawn, and what ends them."""

    stop: Stop = ()
    """Texts and token ids that end a completion, besides the model's own end-of-sequence ids."""


class RolloutConfig(SamplingConfig):
    """What one training step samples. There is no top_p and no top_k: tokens are drawn from the
    whole distribution, which is the one that the trainer scores."""

    stop: Stop = ()
    """Texts and token ids that end a completion, besides the model's own end-of-sequence ids; in
    evaluations too."""

    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) sampled in a step, over all devices."""

    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Group size: samples drawn for each prompt."""

    dynamic_sampling: bool = False
    """Drop groups whose samples all earn the same reward and sample other prompts instead (DAPO,
    arXiv:2503.14476). After ten rounds of further prompts a step goes on with fewer."""

    reward_range: tuple[float, float] | None = None
    """With `dynamic_sampling`, also drop groups whose mean reward does not lie between these two:
    [0.1, 0.9] of rewards from 0 to 1 leaves out what is nearly solved and what is nearly
    hopeless."""

    oversample_prompts: int = Field(default=0, ge=0)
    """Further prompts started in a step; once `prompts_per_step` groups are complete, what is
    unfinished is carried over to the next step as partial rollouts."""

    max_aborted_count: int | None = Field(default=None, ge=0)
    """Changes of weights that may interrupt a sample. One that was interrupted so often is left to
    finish: the step waits for it, or where sampling runs ahead the next change does, whatever
    `pipeline.in_flight`. Unset: no limit (`pipeline.max_staleness` is one too)."""

    mask_off_policy_tokens: bool = False
    """Of a sample that a change of weights has interrupted, train only on the tokens since the last
    one: those of older weights than its newest token are masked. A sample of one version is
    trained whole however old it is, and the newest tokens of another may be old as well:
    `algorithm.correction` is for those."""

    truncated_samples: Literal["train", "mask"] = "train"
    """Samples cut at the length limit: trained on, or kept in the baseline but out of the loss
    (DAPO's overlong filter). To penalise them use the `overlong` reward."""
