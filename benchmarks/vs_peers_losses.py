"""hone's losses, advantages, divergences and metrics against the functions that TRL, verl and
OpenRLHF train with, on the same random tensors in float64.

    python -m venv peers && peers/bin/pip install torch==2.13.0 trl==1.16.0 peft omegaconf \
        tensordict ray orjson pylatexenc pydantic pyyaml numpy
    peers/bin/pip install --no-deps verl==0.9.1 openrlhf==0.11.2
    PYTHONPATH=src peers/bin/python benchmarks/vs_peers_losses.py [--draws 20]

A peer's own code runs: trainers' methods are called on a stand-in for the trainer, with a model
that gives the drawn logits. `vllm` and `deepspeed`, which OpenRLHF imports beside them, are
stand-ins too. Each line is the largest |a - b| / max(1, |b|) over all draws, of the value and of
the gradient with respect to log-probabilities, logits, values or rewards. Where definitions differ,
the line says what was done to compare them. The exit status is 1 where a line is above 1e-6.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

# TRL looks for vLLM, so it comes before the stand-ins.
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from hone.algorithms.advantage import ScoredSample
from hone.algorithms.advantages import ADVANTAGES
from hone.algorithms.algorithm import Objective, Outputs
from hone.algorithms.divergences import DIVERGENCES
from hone.algorithms.kl import KL_ESTIMATORS
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.ppo import PPO, ValueObjective, gae
from hone.algorithms.preferences.dpo import DPO
from hone.algorithms.preferences.kto import KTO
from hone.algorithms.preferences.reward_model import RewardModeling
from hone.algorithms.sft import CrossEntropy
from hone.config.algorithm import AlgorithmConfig, CriticConfig
from hone.config.preference import BradleyTerryConfig, PreferenceConfig
from hone.observe.metrics import to_scalars
from hone.trainer.packing import collate
from hone.types import (
    Column,
    Group,
    Preference,
    Prompt,
    Reward,
    Row,
    Sample,
    StopReason,
)


class _StandIns(MetaPathFinder, Loader):
    """Packages that peers import beside what is compared."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_one = fullname.partition(".")[0] in {"vllm", "deepspeed", "flash_attn"}
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_StandIns())
from openrlhf.models import loss as openrlhf  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from verl.trainer.ppo import core_algos as verl  # noqa: E402
from verl.trainer.ppo.metric_utils import compute_data_metrics  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

LIMIT = 1e-6
Found = Iterator[tuple[str, str, str, Any, Any]]
"""What, whose, how they were brought together, hone's number or tensors, the peer's."""


# ------------------------------------------------------------------------ what is drawn


class Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def mask(self, lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.max()))[None] < lengths[:, None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of one token and a completion each, padded: logits [S, L + 1, V], ids [S, L + 1]; the
    token at t is predicted by the logits at t - 1."""

    ids: Tensor
    lengths: Tensor
    logits: Tensor
    reference: Tensor

    @classmethod
    def of(cls, draw: Draw, number: int, *, vocabulary: int = 11) -> Tokens:
        lengths = draw.integers(1, 8, number)
        shape = (number, int(lengths.max()) + 1)
        logits = draw.normal(*shape, vocabulary, scale=2.0)
        reference = logits + draw.normal(*shape, vocabulary)
        ids = draw.integers(0, vocabulary, *shape)
        return cls(ids, lengths, logits.requires_grad_(), reference)

    @property
    def mask(self) -> Tensor:
        """Of completions, [S, L]."""
        return torch.arange(self.ids.shape[1] - 1)[None] < self.lengths[:, None]

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, L], 0 behind a completion."""
        labels = self.ids[:, 1:, None]
        return logits[:, :-1].log_softmax(-1).gather(-1, labels)[..., 0] * self.mask

    def model(self, **fields: Any) -> Any:
        """What TRL's model with a fused head gives."""
        del fields
        return SimpleNamespace(
            logits=self.logits,
            log_probs=self.logprobs(self.logits),
            entropy=torch.zeros(self.mask.shape),
            mean_logits=self.logits[:, :-1].mean(-1),
            is_top1=torch.zeros(self.mask.shape, dtype=torch.bool),
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        mask = torch.cat([torch.zeros(len(self.ids), 1, dtype=torch.bool), self.mask], 1)
        return {
            "input_ids": self.ids,
            "completion_mask": mask.long(),
            "attention_mask": torch.ones_like(self.ids),
        }

    def rows(self, indices: Sequence[int]) -> list[Row]:
        logprobs = self.logprobs(self.reference).detach()
        return [
            Row(
                id=str(i),
                token_ids=self.ids[i, : length + 1].tolist(),
                loss_mask=[False] + [True] * length,
                columns={"logprobs/reference": Column(logprobs[i, :length])},
            )
            for i in indices
            for length in [int(self.lengths[i])]
        ]

    def outputs(self, indices: Sequence[int]) -> Outputs:
        """What hone's trainer hands an objective, of rows packed in that order."""
        logprobs, means = self.logprobs(self.logits), self.logits[:, :-1].mean(-1).detach()
        of_rows = [slice(0, int(self.lengths[i])) for i in indices]
        pieces = list(zip(indices, of_rows, strict=True))
        return {
            "logprobs": torch.cat([logprobs[i, own] for i, own in pieces]),
            "mean_logits": torch.cat([means[i, own] for i, own in pieces]),
        }


def trainer(**fields: Any) -> Any:
    """A stand-in for one of TRL's, in training, alone."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
        num_processes=1,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


def summed(objective: Objective, rows: list[Row], outputs: Outputs) -> tuple[Tensor, Any]:
    """The loss of a step as the trainer sums it, its weights in float64, and the metrics."""
    weights = objective.weights(rows)
    batch = collate(rows, weights, "cpu", per=objective.per)
    found = objective(outputs, batch)
    of_rows = torch.tensor(weights, dtype=torch.float64)
    match objective.per:
        case "trained":
            carried = of_rows[batch.sequence_index]
        case "row":
            carried = of_rows
        case "unit":
            carried = of_rows.new_zeros(batch.num_units)
            carried[batch.unit_index] = of_rows
    return (found.values * carried).sum(), to_scalars(found.metrics)


def graded(own: Tensor, expected: Tensor, leaf: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each loss with its gradient."""
    for loss in (own, expected):
        yield loss.detach(), torch.autograd.grad(loss, leaf, retain_graph=True)[0]


# ------------------------------------------------------------------------ preferences

DPO_LOSSES: list[tuple[Any, float]] = [
    *((name, 0.0) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
    *((name, 0.0) for name in ("apo_zero", "apo_down", "discopop", "sft")),
    ("exo_pair", 0.1),
    ("robust", 0.1),
    ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, 0.0),
]
PAIR_METRICS = [
    *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")),
    *(f"{kind}/{name}" for kind in ("logps", "logits") for name in ("chosen", "rejected")),
]


def own_pairs(tokens: Tokens, cfg: PreferenceConfig) -> tuple[Tensor, Any]:
    """Pairs of the rows i and i + half."""
    half = len(tokens.ids) // 2
    order = [i for pair in range(half) for i in (pair, half + pair)]
    rows = tokens.rows(order)
    items = [Preference(f"{n}", (rows[2 * n], rows[2 * n + 1]), (True, False)) for n in range(half)]
    algorithm = DPO(cfg)
    labelled = algorithm.rows(items, 0)
    for row, drawn in zip(labelled, rows, strict=True):
        row.columns |= drawn.columns
    algorithm.targets(labelled, items)
    return summed(algorithm.objectives["policy"], labelled, tokens.outputs(order))


def dpo(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 12)
    reference = tokens.logprobs(tokens.reference).sum(1).chunk(2)
    for loss, smoothing in DPO_LOSSES:
        cfg = PreferenceConfig(loss=loss, beta=0.3, label_smoothing=smoothing)
        peer = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=list(cfg.losses),
            loss_weights=list(cfg.losses.values()),
            beta=cfg.beta,
            label_smoothing=smoothing,
            use_weighting=False,
            args=SimpleNamespace(discopop_tau=0.05),
        )
        refs = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
        expected = DPOTrainer._compute_loss(peer, tokens.model, {**tokens.inputs, **refs}, False)
        own, metrics = own_pairs(tokens, cfg)
        name = loss if isinstance(loss, str) else " + ".join(loss)
        what = f"DPO, `{name}`"
        yield what, "TRL `DPOTrainer`", "", *graded(own, expected, tokens.logits)
        if loss == "sigmoid":
            theirs = peer._metrics["train"]
            for key in PAIR_METRICS:
                yield "DPO, metrics", "TRL `DPOTrainer`", "", metrics[key], theirs[key][0]


def dpo_of_openrlhf(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 12)
    own, _ = own_pairs(tokens, PreferenceConfig(beta=0.3, label_smoothing=0.1))
    sums = tokens.logprobs(tokens.logits).sum(1).chunk(2)
    reference = tokens.logprobs(tokens.reference).sum(1).chunk(2)
    expected, *_ = openrlhf.DPOLoss(0.3, 0.1)(*sums, *reference)
    yield (
        "DPO, `sigmoid` with label smoothing",
        "OpenRLHF `DPOLoss`",
        "",
        *graded(own, expected, tokens.logits),
    )
    # By the means that hone takes, its sums are handed over divided.
    counts = tokens.lengths.chunk(2)
    own, _ = own_pairs(tokens, PreferenceConfig(loss="ipo", beta=0.3))
    divided = [x / n for pair in (sums, reference) for x, n in zip(pair, counts, strict=True)]
    expected, *_ = openrlhf.DPOLoss(0.3, ipo=True)(*divided)
    yield (
        "DPO, `ipo`",
        "OpenRLHF `DPOLoss`",
        "it sums log-probabilities; given means",
        *graded(own, expected, tokens.logits),
    )


def without_reference(draw: Draw) -> Found:
    """CPO, SimPO and ORPO, whose metrics are of TRL's scores: sums, means, means."""
    tokens = Tokens.of(draw, 12)
    mask = tokens.inputs["completion_mask"].bool()
    labels = tokens.ids.masked_fill(~mask, -100)
    is_row = torch.cat([torch.ones(len(mask), 1, dtype=torch.bool), tokens.mask], 1)
    batch: dict[str, Any] = {}
    for half, name in enumerate(("chosen", "rejected")):
        batch |= {
            f"{name}_{field}": values.chunk(2)[half]
            for field, values in (
                ("input_ids", tokens.ids),
                ("labels", labels),
                ("attention_mask", is_row.long()),
            )
        }
    common = {
        "beta": 0.3,
        "is_encoder_decoder": False,
        "pad_token_id": 0,
        "padding_value": 0,
    }

    def model(*args: Any, **fields: Any) -> Any:
        del args, fields
        return SimpleNamespace(logits=tokens.logits)

    for loss, kind, alpha in (
        ("cpo", "sigmoid", 1.0),
        ({"simpo": 1.0, "sft": 1.0}, "simpo", 1.0),
        ("simpo", "simpo", 0.0),
        ("orpo", "orpo", 1.0),
    ):
        trainer_of = ORPOTrainer if loss == "orpo" else CPOTrainer
        peer = trainer(
            **common,
            loss_type=kind,
            cpo_alpha=alpha,
            alpha=0.0,
            simpo_gamma=0.5,
            label_smoothing=0.1,
        )
        for method in ("concatenated_inputs", "concatenated_forward", "get_batch_logps"):
            found = trainer_of.__dict__[method]
            is_static = isinstance(found, staticmethod)
            setattr(peer, method, getattr(trainer_of, method) if is_static else _bound(found, peer))
        for method in ("cpo_loss", "odds_ratio_loss"):
            if method in trainer_of.__dict__:
                setattr(peer, method, _bound(trainer_of.__dict__[method], peer))
        expected, theirs = trainer_of.get_batch_loss_metrics(peer, model, batch)
        smoothing = 0.0 if loss == "orpo" else 0.1
        cfg = PreferenceConfig(loss=loss, beta=0.3, label_smoothing=smoothing, simpo_gamma=0.5)
        own, metrics = own_pairs(tokens, cfg)
        name = loss if isinstance(loss, str) else " + ".join(loss)
        whose = f"TRL `{trainer_of.__name__}`"
        note = "its odds are in float32" if loss == "orpo" else ""
        yield f"`{name}`", whose, note, *graded(own, expected, tokens.logits)
        keys = [] if alpha == 0 else ["nll_loss"]
        if loss == "orpo":
            keys += ["log_odds_chosen", "log_odds_ratio", *PAIR_METRICS[:4]]
        else:
            keys += PAIR_METRICS[:4]
        for key in keys:
            yield f"`{name}`, metrics", whose, note, metrics[key], theirs[key]


def _bound(function: Any, owner: Any) -> Callable[..., Any]:
    return lambda *args, **fields: function(owner, *args, **fields)


def kto(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 9)
    labels = draw.integers(0, 2, 9).bool()
    labels[:2] = torch.tensor([True, False])
    cfg = PreferenceConfig(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    swapped = draw.normal(2, 9) + torch.tensor([[0.3], [0.0]], dtype=torch.float64)
    peer = trainer(
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
        _compute_kl_logps=lambda *_: swapped[0],
    )
    inputs = tokens.inputs | {
        "label": labels,
        "ref_logps": tokens.logprobs(tokens.reference).sum(1),
        "ref_KL_logps": swapped[1],
    }
    expected = KTOTrainer._compute_loss(peer, tokens.model, inputs, False)
    drawn = tokens.rows(range(9))
    items = [
        Preference(row.id, (row,), (label,))
        for row, label in zip(drawn, labels.tolist(), strict=True)
    ]
    algorithm = KTO(cfg, max_tokens=99)
    rows = algorithm.rows(items, 0)
    for i, row in enumerate(rows):
        if i < 9:
            row.columns |= drawn[i].columns
            row.columns["logprobs/policy"] = Column(torch.zeros(row.num_trained))
        else:  # the prompts with other completions, whose sums are drawn
            for which, name in enumerate(("policy", "reference")):
                values = torch.zeros(row.num_trained, dtype=torch.float64)
                values[0] = swapped[which, i - 9]
                row.columns[f"logprobs/{name}"] = Column(values)
    kl = to_scalars(algorithm.targets(rows, items))
    own, metrics = summed(algorithm.objectives["policy"], rows, tokens.outputs(range(9)))
    whose = "TRL `KTOTrainer`"
    yield (
        "`kto`",
        whose,
        "given the same completions of other prompts",
        *graded(own, expected, tokens.logits),
    )
    theirs = peer._metrics["train"]
    keys = [key for key in PAIR_METRICS if key != "rewards/accuracies"]
    for key in ("kl", *keys):
        yield "`kto`, metrics", whose, "", (metrics | kl)[key], theirs[key][0]


def reward_model(draw: Draw) -> Found:
    rewards = draw.normal(12, 1).requires_grad_()
    margins = draw.normal(6).abs()
    for center in (0.0, 0.01):
        peer = trainer(args=SimpleNamespace(center_rewards_coefficient=center or None))
        inputs = {"margin": margins, "attention_mask": torch.ones(12, 3)}
        expected = RewardTrainer.compute_loss(
            peer, lambda **_: SimpleNamespace(logits=rewards), inputs
        )
        algorithm = RewardModeling(BradleyTerryConfig(center_coef=center), pad_id=None)
        row = Row(id="", token_ids=[1, 2], loss_mask=[False, True])
        items = [
            Preference(str(n), (row, row), (True, False), margin=float(margins[n]))
            for n in range(6)
        ]
        rows = algorithm.rows(items, 0)
        for n, own_row in enumerate(rows):
            own_row.columns["margin"] = Column(margins[n // 2][None], "row")
        values = rewards[:, 0].view(2, 6).T.flatten()
        own, metrics = summed(algorithm.objectives["policy"], rows, {"values": values})
        name = "reward model" + ", centred" * bool(center)
        yield name, "TRL `RewardTrainer`", "", *graded(own, expected, rewards)
        for key in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
            theirs = peer._metrics["train"][key][0]
            yield "reward model, metrics", "TRL `RewardTrainer`", "", metrics[key], theirs
        if not center:
            chosen, rejected = rewards[:, 0].chunk(2)
            expected = openrlhf.PairWiseLoss()(chosen, rejected, margins)
            yield name, "OpenRLHF `PairWiseLoss`", "", *graded(own, expected, rewards)


# ------------------------------------------------------------------------ policy and critic


def policy_batch(draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
    """The mask of 8 rows, some tokens of which are not the policy's, and [8, L] of each column."""
    lengths = draw.integers(2, 9, 8)
    mask = draw.mask(lengths)
    mask &= draw.integers(0, 5, *mask.shape) > 0  # tokens of tools
    mask[:, 0] = True
    shape = mask.shape
    old = -draw.normal(*shape).abs()
    columns = {
        "logprobs": (old + draw.normal(*shape, scale=0.3)).requires_grad_(),
        "logprobs/policy": old,
        "logprobs/engine": old + draw.normal(*shape, scale=0.4),
        "logprobs/reference": old + draw.normal(*shape, scale=0.5),
        "advantages": draw.normal(*shape),
    }
    return mask, columns


def policy_rows(mask: Tensor, columns: dict[str, Tensor]) -> list[Row]:
    return [
        Row(
            id=str(i),
            token_ids=[1] * (own.numel() + 1),
            loss_mask=[False, *own.tolist()],
            columns={
                name: Column(values[i][own])
                for name, values in columns.items()
                if name != "logprobs"
            },
        )
        for i, own in enumerate(mask)
    ]


def own_policy(mask: Tensor, columns: dict[str, Tensor], **fields: Any) -> Tensor:
    cfg = AlgorithmConfig.model_validate(fields)
    objective = PolicyObjective(cfg, max_completion_tokens=50)
    logprobs = columns["logprobs"][mask]
    outputs: Outputs = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}
    return summed(objective, policy_rows(mask, columns), outputs)[0]


def policy_of_verl(draw: Draw) -> Found:
    mask, columns = policy_batch(draw)
    cfg = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    functions: dict[str, Any] = {
        "ppo_clip": verl.compute_policy_loss_vanilla,
        "gspo": verl.compute_policy_loss_gspo,
        "cispo": verl.compute_policy_loss_cispo,
        "sapo": verl.compute_policy_loss_sapo,
    }
    modes = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    for name, function in functions.items():
        for aggregation, mode in modes.items():
            if (name, aggregation) == ("sapo", "token_mean"):
                continue  # verl's takes means of sequences whatever is asked for
            notes = ["it adds 1e-8 to a row's tokens"] if aggregation == "sequence_mean" else []
            if name == "gspo":
                of_rows = columns["advantages"][:, :1].expand_as(mask)
                columns = columns | {"advantages": of_rows}
                notes.append("its gradient is of each token; advantages of whole samples")
            expected, _ = function(
                columns["logprobs/policy"],
                columns["logprobs"],
                columns["advantages"],
                mask.double(),
                mode,
                cfg,
            )
            dual = {"dual_clip": 3.0} if name == "ppo_clip" else {}
            own = own_policy(mask, columns, loss=name, aggregation=aggregation, **clips, **dual)
            yield (
                f"`{name}`, `{aggregation}`",
                "verl `core_algos`",
                "; ".join(notes),
                *graded(own, expected, columns["logprobs"]),
            )
    expected = verl.agg_loss(
        -columns["advantages"] * (columns["logprobs"] - columns["logprobs/policy"]).exp(),
        mask.double(),
        "seq-mean-token-sum-norm",
        loss_scale_factor=50,
    )
    own = own_policy(mask, columns, aggregation="constant", clip_low=9.0, clip_high=1e9)
    yield (
        "`ppo_clip` without a clip, `constant`",
        "verl `agg_loss`",
        "",
        *graded(own, expected, columns["logprobs"]),
    )


def policy_of_trl(draw: Draw) -> Found:
    mask, columns = policy_batch(draw)
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"aggregation": "sequence_mean", **clips}, {"loss_type": "grpo"}, ""),
        ({"aggregation": "token_mean", **clips}, {"loss_type": "dapo"}, ""),
        ({"aggregation": "constant", **clips}, {"loss_type": "dr_grpo"}, ""),
        (
            {"aggregation": "token_mean", "dual_clip": 3.0, **clips},
            {"loss_type": "dapo", "delta": 3.0},
            "",
        ),
        (
            {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
            {"loss_type": "cispo", "epsilon_high": 1.28},
            "its bound is the ratio, hone's what it exceeds 1 by",
        ),
        ({"loss": "sapo", "aggregation": "sequence_mean"}, {"loss_type": "sapo"}, ""),
        (
            {"loss": "gspo", "aggregation": "sequence_mean", **clips},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            "",
        ),
        (
            {"kl": {"coef": 0.1, "estimator": "k3"}, "aggregation": "sequence_mean", **clips},
            {"loss_type": "grpo", "beta": 0.1},
            "",
        ),
        (
            {"correction": {"kind": "tis", "high": 2.0}, "aggregation": "sequence_mean", **clips},
            {"loss_type": "grpo", "use_vllm": True},
            "",
        ),
    ]
    for own_fields, fields, note in cases:
        ratio = (columns["logprobs/policy"] - columns["logprobs/engine"]).exp().clamp(max=2.0)
        peer = trainer(
            **{
                "loss_type": "grpo",
                "importance_sampling_level": "token",
                "beta": 0.0,
                "epsilon_low": 0.2,
                "epsilon_high": 0.28,
                "use_vllm": False,
                **{k: v for k, v in fields.items() if k != "delta"},
            },
            vllm_importance_sampling_correction=True,
            max_completion_length=50,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            args=SimpleNamespace(
                delta=fields.get("delta"),
                use_bias_correction_kl=False,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
                steps_per_generation=1,
            ),
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                columns["logprobs"],
                torch.zeros(mask.shape),
                None,
            ),
        )
        inputs = {
            "prompt_ids": torch.ones(8, 1).long(),
            "prompt_mask": torch.ones(8, 1).long(),
            "completion_ids": torch.ones_like(mask).long(),
            "completion_mask": mask.long(),
            "advantages": columns["advantages"],
            "old_per_token_logps": columns["logprobs/policy"],
            "ref_per_token_logps": columns["logprobs/reference"],
            "importance_sampling_ratio": ratio,
            "num_items_in_batch": mask.sum(),
        }
        expected = GRPOTrainer._compute_loss(peer, None, inputs)
        own = own_policy(mask, columns, **own_fields)
        name = own_fields.get("loss", "ppo_clip")
        extras = [
            *(["dual clip"] if "dual_clip" in own_fields else []),
            *(["KL in the loss"] if "kl" in own_fields else []),
            *(["`tis`"] if "correction" in own_fields else []),
        ]
        how = ", ".join([f"`{name}`, `{own_fields.get('aggregation', 'token_mean')}`", *extras])
        yield how, "TRL `GRPOTrainer`", note, *graded(own, expected, columns["logprobs"])


def policy_of_openrlhf(draw: Draw) -> Found:
    mask, columns = policy_batch(draw)
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("`ppo_clip`, dual clip", {"dual_clip": 3.0, **clips}, {"dual_clip": 3.0}),
        ("`gspo`", {"loss": "gspo", "aggregation": "sequence_mean", **clips},
         {"policy_loss_type": "gspo"}),
        ("`ppo_clip`, `tis`", {"correction": {"kind": "tis", "high": 2.0}, **clips},
         {"is_correction_level": "token", "is_correction_mode": "clip",
          "is_correction_threshold": (0.0, 2.0)}),
        ("`ppo_clip`, `icepop`",
         {"correction": {"kind": "icepop", "low": 0.5, "high": 2.0}, **clips},
         {"is_correction_level": "token", "is_correction_threshold": (0.5, 2.0)}),
    ]  # fmt: skip
    for what, own_fields, fields in cases:
        loss = openrlhf.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, **fields)
        expected, *_ = loss(
            columns["logprobs"],
            columns["logprobs/policy"],
            columns["advantages"],
            mask.double(),
            columns["logprobs/engine"],
        )
        own = own_policy(mask, columns, **own_fields)
        yield (
            what,
            "OpenRLHF `PolicyLoss`",
            "it adds 1e-8 to a row's tokens" if "gspo" in what else "",
            *graded(own, expected, columns["logprobs"]),
        )


def divergences(draw: Draw) -> Found:
    logprobs, reference = -draw.normal(50).abs(), -draw.normal(50).abs()
    logprobs.requires_grad_()
    for name, estimator in KL_ESTIMATORS.items():
        own = estimator(logprobs, reference).sum()
        expected = verl.kl_penalty(logprobs, reference, name).sum()
        yield f"KL `{name}`", "verl `kl_penalty`", "", *graded(own, expected, logprobs)
        expected = compute_approx_kl(logprobs, reference, kl_estimator=name).sum()
        note = "it computes in float32"
        yield (
            f"KL `{name}`",
            "OpenRLHF `compute_approx_kl`",
            note,
            *graded(own, expected, logprobs),
        )
    student, teacher = draw.normal(4, 5, 9).requires_grad_(), draw.normal(4, 5, 9)
    for name, beta in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("js", 0.5)):
        expected = GKDTrainer.generalized_jsd_loss(
            student, teacher, beta=beta, reduction="batchmean", labels=torch.ones(4, 5)
        )
        values = DIVERGENCES[name](student.log_softmax(-1), teacher.log_softmax(-1))
        yield (
            f"distillation, `{name}`",
            "TRL `GKDTrainer`",
            "all words",
            *graded(values.mean(), expected, student),
        )


def critic(draw: Draw) -> Found:
    mask, _ = policy_batch(draw)
    returns, old = draw.normal(*mask.shape), draw.normal(*mask.shape)
    values = (old + draw.normal(*mask.shape)).requires_grad_()
    rows = policy_rows(mask, {"returns": returns, "values/critic": old})
    for clip in (0.5, None):
        own, metrics = summed(ValueObjective(clip), rows, {"values": values[mask]})
        expected = openrlhf.ValueLoss(clip)(values, old, returns, mask.double())
        yield (
            "value loss" + ", clipped" * (clip is not None),
            "OpenRLHF `ValueLoss`",
            "",
            *graded(own, expected, values),
        )
        if clip is None:
            continue
        expected, share = verl.compute_value_loss(values, returns, old, mask.double(), clip)
        yield "value loss, clipped", "verl `compute_value_loss`", "", *graded(own, expected, values)
        yield "`train/vf_clipfrac`", "verl `compute_value_loss`", "", (
            metrics["train/vf_clipfrac"]
        ), share  # fmt: skip


def whole_batch(draw: Draw) -> tuple[Tensor, Tensor, list[Group]]:
    """Mask, rewards of 4 groups of 3 samples, some of whose tokens are a tool's, and the groups."""
    lengths = draw.integers(2, 9, 12)
    mask = draw.mask(lengths) & (draw.integers(0, 4, 12, int(lengths.max())) > 0)
    mask[:, 0] = True
    rewards = draw.normal(12)
    groups = []
    for g in range(4):
        prompt = Prompt(id=str(g), token_ids=(1, 2), text="")
        samples = [
            Sample(
                id=f"{i}",
                prompt=prompt,
                index=i % 3,
                token_ids=[3] * mask.shape[1],
                logprobs=[-1.0] * mask.shape[1],
                weight_versions=[0] * mask.shape[1],
                loss_mask=mask[i].tolist(),
                stop_reason=StopReason.EOS,
                reward=Reward(total=float(rewards[i])),
            )
            for i in range(3 * g, 3 * g + 3)
        ]
        groups.append(Group(id=str(g), prompt=prompt, samples=samples))
    return mask, rewards, groups


def last_of(mask: Tensor) -> Tensor:
    """Where the last token of each row is that is the policy's."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    return torch.where(mask, positions, -1).argmax(1)


def advantages(draw: Draw) -> Found:
    mask, rewards, _ = whole_batch(draw)
    penalties = draw.normal(*mask.shape, scale=0.1) * mask
    scores = torch.zeros_like(penalties)
    scores[torch.arange(12), last_of(mask)] = rewards
    index = [i // 3 for i in range(12)]

    def own(name: str, paid: Tensor) -> Tensor:
        groups = [
            [ScoredSample(float(rewards[i]), paid[i][mask[i]]) for i in range(3 * g, 3 * g + 3)]
            for g in range(4)
        ]
        return torch.cat([x for group in ADVANTAGES[name](groups) for x in group])

    config = SimpleNamespace(gamma=1.0)
    whitened = "`std + 1e-6`; its `sqrt(var + 1e-8)`"
    peers: list[tuple[str, Any, dict[str, Any], bool, str]] = [
        ("grpo", verl.compute_grpo_outcome_advantage, {"index": index}, True, ""),
        ("dr_grpo", verl.compute_grpo_outcome_advantage,
         {"index": index, "norm_adv_by_std_in_grpo": False}, True, ""),
        ("rloo", verl.compute_rloo_outcome_advantage, {"index": index}, True, ""),
        ("reinforce_pp", verl.compute_reinforce_plus_plus_outcome_advantage,
         {"config": config}, True, whitened),
        ("reinforce_pp_baseline", verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
         {"index": index}, False, f"{whitened}; without a KL penalty"),
    ]  # fmt: skip
    for name, function, fields, has_penalties, note in peers:
        paid = penalties if has_penalties else torch.zeros_like(penalties)
        expected, _ = function(scores - paid, mask.double(), **fields)
        expected = expected[mask]
        if note:  # by its own normalisation, undone and done again as hone does
            expected = (expected - expected.mean()) / (expected.std() + 0.0)
            found = own(name, paid).double()
            found = (found - found.mean()) / found.std()
        else:
            found = own(name, paid).double()
        yield f"advantages, `{name}`", "verl `core_algos`", _undone(note), found, expected
    for name, estimator in (("rloo", "rloo"), ("dr_grpo", "dr_grpo"),
                            ("reinforce_pp", "reinforce"),
                            ("reinforce_pp_baseline", "reinforce_baseline")):  # fmt: skip
        expected = openrlhf_advantages(estimator, rewards, penalties, mask)
        found = own(name, penalties).double()
        note = ""
        if name in ("rloo", "dr_grpo"):
            note = "without a KL penalty, which it takes from tokens after the baseline"
            expected = openrlhf_advantages(estimator, rewards, 0 * penalties, mask)
            found = own(name, 0 * penalties).double()
        else:
            note = _undone("N - 1 and 1e-6; its N")
            expected = (expected - expected.mean()) / expected.std()
            found = (found - found.mean()) / found.std()
        yield f"advantages, `{name}`", "OpenRLHF `RemoteExperienceMaker`", note, found, expected


def _undone(note: str) -> str:
    return note and f"normalised alike: {note}"


def openrlhf_advantages(
    estimator: str, rewards: Tensor, penalties: Tensor, mask: Tensor, values: Any = None
) -> Tensor:
    algo = SimpleNamespace(
        advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    )
    args = SimpleNamespace(
        algo=algo,
        rollout=SimpleNamespace(n_samples_per_prompt=3),
        reward=SimpleNamespace(
            clip_range=None,
            overlong_buffer_len=None,
            overlong_penalty_factor=0.0,
            stop_properly_penalty_coef=None,
        ),
    )
    maker: Any = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=1.0),
    )
    for method in ("get_cumulative_returns", "get_advantages_and_returns"):
        setattr(maker, method, _bound(getattr(RemoteExperienceMaker, method), maker))
    experience = SimpleNamespace(
        index=list(range(12)),
        rewards=rewards.clone(),
        kl=penalties,
        action_mask=mask,
        values=values,
        info={},
    )
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])
    return experience.advantages[mask]


def generalised(draw: Draw) -> Found:
    """GAE over tokens of which some are not the policy's, what the critic learns, and metrics."""
    mask, rewards, groups = whole_batch(draw)
    values = draw.normal(*mask.shape)
    paid = draw.normal(*mask.shape, scale=0.1) * mask
    scores = torch.zeros_like(values)
    scores[torch.arange(12), last_of(mask)] = rewards
    for gamma, lam in ((1.0, 1.0), (0.97, 0.9)):
        expected, returns = verl.compute_gae_advantage_return(
            scores - paid, values, mask.double(), gamma, lam
        )
        own = torch.cat(
            [
                gae((scores - paid)[i][mask[i]], values[i][mask[i]], gamma=gamma, lam=lam)
                for i in range(12)
            ]
        )
        yield (
            "GAE with gaps, returns",
            "verl `compute_gae_advantage_return`",
            "",
            own + values[mask],
            returns[mask],
        )
        yield (
            "GAE with gaps, advantages",
            "verl `compute_gae_advantage_return`",
            _undone("`std + 1e-6`; its `sqrt(var + 1e-8)`"),
            (own - own.mean()) / own.std(),
            expected[mask] / expected[mask].std(),
        )
        whole = torch.ones_like(mask)
        theirs, returns = RemoteExperienceMaker.get_advantages_and_returns(
            None, values, scores, whole, gamma, lam
        )
        own = torch.stack([gae(scores[i], values[i], gamma=gamma, lam=lam) for i in range(12)])
        yield "GAE without gaps", "OpenRLHF `RemoteExperienceMaker`", "", own, theirs
    # Through the algorithm, with large returns, beside which the 1e-5 in verl's metric is nothing.
    scaled = [
        replace(
            group,
            samples=[
                replace(sample, reward=Reward(total=1000 * sample.reward.total))
                for sample in group.samples
            ],
        )
        for group in groups
    ]
    algorithm = PPO(
        AlgorithmConfig(advantage="gae", gamma=0.97, lam=0.9),
        CriticConfig(),
        max_completion_tokens=mask.shape[1],
    )
    rows = algorithm.rows(scaled, 0)
    for i, row in enumerate(rows):
        row.columns["values/critic"] = Column(values[i][mask[i]])
    metrics = to_scalars(algorithm.targets(rows, scaled))
    expected, returns = verl.compute_gae_advantage_return(
        1000 * scores, values, mask.double(), 0.97, 0.9
    )
    batch = {
        "token_level_scores": 1000 * scores,
        "token_level_rewards": 1000 * scores,
        "advantages": expected,
        "returns": returns,
        "values": values,
        "prompts": torch.ones(12, 2),
        "responses": torch.ones(mask.shape),
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(12, 2), torch.ones(mask.shape)], 1),
    }
    theirs = compute_data_metrics(SimpleNamespace(batch=batch, non_tensor_batch={}))
    for name in ("values", "returns", "advantages"):
        for part in ("mean", "max", "min"):
            key = f"critic/{name}/{part}"
            yield "`critic/{values,returns,advantages}`", "verl `compute_data_metrics`", "", (
                metrics[key]
            ), theirs[key]  # fmt: skip
    yield "`critic/vf_explained_var`", "verl `compute_data_metrics`", (
        "it adds 1e-5 to a variance of 1e6"
    ), metrics["critic/vf_explained_var"], theirs["critic/vf_explained_var"]  # fmt: skip


def supervised(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 6)
    rows = [replace(row, columns={}) for row in tokens.rows(range(6))]
    own, _ = summed(CrossEntropy(), rows, tokens.outputs(range(6)))
    expected = openrlhf.SFTLoss()(tokens.logprobs(tokens.logits), tokens.mask.double())
    yield "SFT", "OpenRLHF `SFTLoss`", "", *graded(own, expected, tokens.logits)
    labels = tokens.ids[:, 1:].masked_fill(~tokens.mask, -100)
    expected = F.cross_entropy(tokens.logits[:, :-1].flatten(0, 1), labels.flatten())
    yield "SFT", "PyTorch `cross_entropy`", "", *graded(own, expected, tokens.logits)


COMPARISONS: list[Callable[[Draw], Found]] = [
    supervised, reward_model, dpo, dpo_of_openrlhf, without_reference, kto,
    policy_of_trl, policy_of_verl, policy_of_openrlhf, divergences, critic, advantages, generalised,
]  # fmt: skip


def distance(own: Any, expected: Any) -> float:
    pairs = zip(own, expected, strict=True) if isinstance(own, tuple) else [(own, expected)]
    worst = 0.0
    for one, other in pairs:
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
        assert a.shape == b.shape, f"{a.shape=} {b.shape=}"
        worst = max(worst, float(((a - b).abs() / b.abs().clamp(min=1)).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    worst: dict[tuple[str, str, str], float] = {}
    for seed in range(args.draws):
        for compare in COMPARISONS:
            for *line, own, expected in compare(Draw(seed)):
                key = (line[0], line[1], line[2])
                worst[key] = max(worst.get(key, 0.0), distance(own, expected))
    print("| what | whose function | what differs by definition | largest difference |")
    print("|---|---|---|---|")
    for (what, whose, note), value in worst.items():
        print(f"| {what} | {whose} | {note} | {value:.0e} |")
    beyond = [key for key, value in worst.items() if not value <= LIMIT]
    print(f"\n{len(worst)} lines, {args.draws} draws, {len(beyond)} above {LIMIT:.0e}")
    sys.exit(bool(beyond))


if __name__ == "__main__":
    main()
