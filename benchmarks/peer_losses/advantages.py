"""Advantages of groups, penalties by KL, returns, and what is reported of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages import ADVANTAGES, EstimatorName, ScoredSample, gae
from hone.algorithms.ppo import PPO
from hone.algorithms.settings import AlgorithmConfig, CriticConfig
from hone.observe.metrics import to_scalars
from hone.types import Column, Group, Prompt, Reward, Sample, StopReason
from peer_losses.drawn import Draw, Found, bound
from peer_losses.peers import RemoteExperienceMaker, compute_data_metrics, verl


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

    def own(name: EstimatorName, paid: Tensor) -> Tensor:
        groups = [
            [ScoredSample(float(rewards[i]), paid[i][mask[i]]) for i in range(3 * g, 3 * g + 3)]
            for g in range(4)
        ]
        return torch.cat([x for group in ADVANTAGES[name].estimate(groups) for x in group])

    config = SimpleNamespace(gamma=1.0)
    whitened = "`std + 1e-6`; its `sqrt(var + 1e-8)`"
    peers: list[tuple[EstimatorName, Any, dict[str, Any], bool, str]] = [
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
        setattr(maker, method, bound(getattr(RemoteExperienceMaker, method), maker))
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
