"""Settings of the learning rules: advantages, losses, critic, teacher, and losses of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from hone.algorithms.advantages import GROUP_ESTIMATORS, AdvantageName
from hone.algorithms.aggregation import Aggregation
from hone.algorithms.corrections import CorrectionKind
from hone.algorithms.kl import KLEstimator
from hone.algorithms.losses import LossName
from hone.config.base import Section
from hone.distributed.settings import CriticParallelConfig
from hone.trainer.settings import OffloadLevel, RecomputeMode

__all__ = [
    "REFERENCE_FREE",
    "UNPAIRED",
    "USED_BY",
    "AlgorithmConfig",
    "BradleyTerryConfig",
    "CorrectionConfig",
    "CriticConfig",
    "KLConfig",
    "Needs",
    "Output",
    "PairLossName",
    "PreferenceConfig",
    "TeacherConfig",
]

Output = Literal[
    "logprobs", "entropy", "mean_logits", "values", "top_ids", "top_logprobs", "logprobs_at"
]
"""What a model gives for each trained token: one value; of `top_ids` (int32) and `top_logprobs` one
for each of its likeliest words, of `logprobs_at` one for each word in the rows' column `at_ids`.
`mean_logits` is over all words, and has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm asks of a run."""

    scores: Mapping[str, frozenset[Output]] = field(default_factory=dict[str, frozenset[Output]])
    """What its targets or objectives read of models, by role: each output is a column
    `<output>/<role>` of the rows."""
    learns_after: Mapping[str, int] = field(default_factory=dict[str, int])
    """Steps of the run in which a role that learns does not learn yet; others do from the start."""
    samples_per_group: int = 1
    """Valid ones; groups of fewer have no baseline, are left out and counted."""


class KLConfig(Section):
    """Penalty on the distance to the reference model (the policy before training)."""

    coef: float = Field(default=0.0, ge=0)
    """Factor of the KL term; 0 loads no reference model."""

    placement: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward of each token."""

    estimator: KLEstimator = "k3"
    """Estimator of the divergence (Schulman, http://joschu.net/blog/kl-approx.html). In the loss,
    k1 has zero expected gradient and is refused; k2 has the gradient of the reverse KL."""


class CorrectionConfig(Section):
    """Importance correction for the gap between the engine's and the trainer's policy."""

    kind: CorrectionKind = "none"
    """`tis`: truncate token ratios at `high`; `icepop`: zero tokens whose ratio is outside
    [`low`, `high`]; `sequence_mask`: zero sequences whose mean ratio is outside."""

    low: float = Field(default=0.5, ge=0)
    """Lower end of the accepted ratio trainer / engine."""

    high: float = Field(default=2.0, gt=0)
    """Upper end of the accepted ratio trainer / engine."""


class AlgorithmConfig(Section):
    """Everything that turns rewards into a gradient."""

    advantage: AdvantageName = "grpo"
    """Advantage estimator; `hone/algorithms/advantages.py` has a function of its name, with its
    paper, and says over which samples the baseline is taken. Standard deviations are those of a
    sample, divided by N - 1, plus 1e-6: over the group's valid samples for grpo, over all trained
    tokens of the step for reinforce_pp and reinforce_pp_baseline. `gae` takes advantages against a
    critic, a model of its own that learns what samples earn (PPO, section `critic`)."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token for `gae`: what lies n tokens ahead counts gamma^n. 1 is usual for
    rewards of whole answers."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae`: 1 compares what a sample has earned with the value of each token, lower
    trusts the values of tokens ahead more, which has less variance and more bias."""

    loss: LossName = "ppo_clip"
    """Policy loss; `hone/algorithms/losses.py` has a function of its name, with its paper. `gspo`
    replaces each token's ratio by the geometric mean of its sequence's, over trained tokens; `gmpo`
    clips each ratio before that mean, so that its range is wide: 0.33 and 0.49 in its paper;
    `correction.kind` tis and icepop still weight each token's term by that token's own factor,
    sequence_mask by one factor for all. Where an agent rewrote its history, each path of the
    episode is a sequence with a mean of its own."""

    aggregation: Aggregation = "token_mean"
    """How token losses of one optimizer step are averaged: over all trained tokens; within each
    sequence, then over sequences; or divided by sequences x `max_completion_tokens` (Dr.GRPO).
    Sequences without a trained token, all of whose tokens are masked, are not counted. An episode
    is one sequence, also where an agent rewrote its history, so that it has several rows."""

    clip_low: float = Field(default=0.2, ge=0)
    """Ratios below 1 - clip_low are clipped."""

    clip_high: float = Field(default=0.2, ge=0)
    """Ratios above 1 + clip_high are clipped; larger than `clip_low` keeps exploration (DAPO)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of tokens with negative advantage (arXiv:1912.09729), for example 3."""

    entropy_coef: float = 0.0
    """Factor of the entropy bonus: each trained token's entropy, averaged as `aggregation` averages
    losses and not multiplied by `correction`, is subtracted from the loss."""

    kl: KLConfig = KLConfig()
    """Distance to the reference model."""

    correction: CorrectionConfig = CorrectionConfig()
    """Engine/trainer mismatch."""

    routing_replay: bool = False
    """Of a mixture of experts: the trainer sends each token to the experts that it passed where it
    was sampled, and computes their gate weights anew (R3, arXiv:2510.11370). Engines record their
    numbers, a byte for each layer and expert of a token. Where engine and trainer differ in no more
    than rounding few tokens change experts without it."""

    @property
    def needs_critic(self) -> bool:
        """Whether a critic learns beside the policy."""
        return self.advantage == "gae"

    @property
    def penalises_reward(self) -> bool:
        """Whether the KL term is subtracted from rewards."""
        return self.kl.coef > 0 and self.kl.placement == "reward"

    @property
    def needs(self) -> Needs:
        logprobs = frozenset[Output]({"logprobs"})
        scores = {"policy": logprobs} if self.penalises_reward else {}
        return Needs(
            scores=scores | ({"reference": logprobs} if self.kl.coef > 0 else {}),
            samples_per_group=2 if self.advantage in GROUP_ESTIMATORS else 1,
        )


class CriticConfig(Section):
    """The critic of PPO (`algorithm.advantage` gae): a model of its own, trained as `trainer` says
    but for what is set here, and written to `<run.dir>/critic` at the end."""

    path: str | None = None
    """Folder or hub name of the model that it starts from, such as a reward model; unset:
    `model.path`. A value head `score` that the weights lack starts at 0."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate (of AdamW), in place of `trainer.optimizer.lr`."""

    optimizer: Literal["adamw", "muon"] | None = None
    """Optimizer of the critic; unset: that of the policy, `trainer.optimizer.name`. Muon has the
    rate `trainer.optimizer.muon_lr` for hidden matrices, also here."""

    value_clip: float | None = Field(default=0.5, gt=0)
    """How far an update may move a token's value before its gradient is cut; None does not clip."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which the critic alone learns."""

    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Token budget of one forward and backward pass of it on one device; unset: that of the policy.
    Its layers keep as much of a token as the policy's, and the logits that it does not have come in
    chunks there."""

    max_tokens_per_forward: int | None = Field(default=None, ge=1)
    """Token budget of a pass of it without gradient on one device; unset: twice
    `max_tokens_per_microbatch` where that is set, else that of the policy's passes."""

    recompute: RecomputeMode | None = None
    """What its backward computes again, as `trainer.recompute`; unset: that, also where it is
    chosen (`auto`)."""

    offload: OffloadLevel | None = None
    """What of it is kept in host memory, as `trainer.offload`; unset: that."""

    parallel: CriticParallelConfig = CriticParallelConfig()


class TeacherConfig(Section):
    """The teacher of on-policy distillation: a frozen model that scores what the policy samples."""

    path: str | None = None
    """Folder or hub name of a model with the policy's tokens, such as a larger one of its family.
    Each trained token's advantage is then how much likelier the teacher finds it than the policy
    does, less the mean over the step, which follows the reverse KL to the teacher; unset: there is
    no teacher, and advantages come from rewards alone."""

    loss: Literal["policy_gradient", "reverse_kl", "forward_kl", "js"] = "policy_gradient"
    """`policy_gradient`: as said, from the sampled token alone, with `algorithm.loss`. The others
    are divergences between the two distributions of each token, minimised directly: `reverse_kl`,
    `forward_kl` (which covers all that the teacher says), `js` (Jensen-Shannon, between both)."""

    top_k: int = Field(default=32, ge=1)
    """Words of each token that a divergence tells apart: the teacher's likeliest. All others count
    as one, the rest. From the size of the vocabulary on it is that of the whole distributions."""

    max_tokens_per_forward: int | None = Field(default=None, ge=1)
    """Token budget of one of its passes on one device, which keep nothing for a gradient; unset:
    that of the policy's passes without gradient."""

    reward_coef: float = Field(default=0.0, ge=0)
    """Factor of the advantages that `algorithm.advantage` takes from rewards, which are added to
    the teacher's; 0 learns from the teacher alone, and rewards are only measured."""


PairLossName = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "cpo",
    "simpo",
    "orpo",
    "sft",
]

REFERENCE_FREE = frozenset({"cpo", "simpo", "orpo", "sft"})
"""Losses that no reference model enters."""

UNPAIRED = frozenset({"kto"})
"""Losses of single completions with a label."""

USED_BY: Mapping[str, frozenset[str]] = {
    "beta": UNPAIRED.union(get_args(PairLossName)) - {"sft"},
    "label_smoothing": frozenset({"sigmoid", "exo_pair", "robust", "cpo", "simpo"}),
    "simpo_gamma": frozenset({"simpo"}),
    "desirable_weight": UNPAIRED,
    "undesirable_weight": UNPAIRED,
    "reference_cache": frozenset(get_args(PairLossName)) - REFERENCE_FREE,
}
"""The losses that a key of `PreferenceConfig` acts on."""


class PreferenceConfig(Section):
    """Everything that turns preferences into a gradient."""

    loss: PairLossName | Literal["kto"] | dict[PairLossName, Annotated[float, Field(gt=0)]] = (
        "sigmoid"
    )
    """Loss, by the names of TRL: `sigmoid` is DPO's; `hone/algorithms/preferences/losses.py` has a
    function and a paper for each. A mapping adds several with weights, such as `{sigmoid: 1, sft:
    0.2}`. `kto` learns from single completions with a `label`; `cpo`, `simpo`, `orpo` and `sft`
    need no reference model."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference: the reward of a completion is beta times
    the logarithm of its probability over the reference's. 2 is usual for simpo."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round, for sigmoid, robust, exo_pair (which
    needs it above 0), cpo and simpo."""

    simpo_gamma: float = Field(default=0.5, ge=0)
    """Margin between the rewards of the two that simpo asks for."""

    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of completions with a true label, for kto. Balanced: number times weight within 1 to
    4/3 of the others'."""

    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of completions with a false label, for kto."""

    reference_cache: Path | None = None
    """Folder for what the reference says of the rows, in a file named by a digest of weights, rows
    and settings. All are scored before the first step, unless an earlier run has left the file, and
    no reference model is held in training. Unset: it is, and scores each step's rows. Not for kto,
    which makes rows of its own."""

    @property
    def losses(self) -> dict[str, float]:
        """Weights by name; of kto, itself alone."""
        return {**self.loss} if isinstance(self.loss, dict) else {self.loss: 1.0}

    @property
    def is_unpaired(self) -> bool:
        """Whether it learns from single completions."""
        return not UNPAIRED.isdisjoint(self.losses)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model scores the rows."""
        return not REFERENCE_FREE.issuperset(self.losses)

    @property
    def kept_reference(self) -> Path | None:
        """`reference_cache` where a loss uses it."""
        is_used = not USED_BY["reference_cache"].isdisjoint(self.losses)
        return self.reference_cache if is_used else None


class BradleyTerryConfig(Section):
    """The loss of a reward model: `-log sigmoid(chosen - rejected - margin)`, the mean over the
    pairs of an optimizer step (arXiv:2203.02155; with margins, 0 where rows have none,
    arXiv:2307.09288)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Factor of the mean of `(chosen + rejected)^2`, which holds rewards around 0; 0.01 is usual.
    The loss alone leaves open what a reward of 0 is (arXiv:2312.09244, equation 2)."""
