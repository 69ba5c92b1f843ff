"""The policy's losses, divergences of a teacher, and the critic's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.divergences import DIVERGENCES
from hone.algorithms.kl import KL_ESTIMATORS
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.ppo import ValueObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.types import Column, Row
from peer_losses.drawn import Draw, Found, graded, summed, trainer
from peer_losses.peers import (
    ActorConfig,
    GKDTrainer,
    GRPOTrainer,
    compute_approx_kl,
    openrlhf,
    verl,
)


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
