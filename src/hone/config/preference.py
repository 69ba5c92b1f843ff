"""The learning rules of `hone dpo` and `hone reward-model`: losses over preferences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "REFERENCE_FREE",
    "UNPAIRED",
    "USED_BY",
    "BradleyTerryConfig",
    "PairLossName",
    "PreferenceConfig",
]

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
