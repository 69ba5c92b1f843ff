"""Cross-entropy of demonstrations, and reward models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from hone.algorithms.preferences.reward_model import RewardModeling
from hone.algorithms.settings import BradleyTerryConfig
from hone.algorithms.sft import CrossEntropy
from hone.types import Column, Preference, Row
from peer_losses.drawn import Draw, Found, Tokens, graded, summed, trainer
from peer_losses.peers import RewardTrainer, openrlhf


def supervised(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 6)
    rows = [replace(row, columns={}) for row in tokens.rows(range(6))]
    own, _ = summed(CrossEntropy(), rows, tokens.outputs(range(6)))
    expected = openrlhf.SFTLoss()(tokens.logprobs(tokens.logits), tokens.mask.double())
    yield "SFT", "OpenRLHF `SFTLoss`", "", *graded(own, expected, tokens.logits)
    labels = tokens.ids[:, 1:].masked_fill(~tokens.mask, -100)
    expected = F.cross_entropy(tokens.logits[:, :-1].flatten(0, 1), labels.flatten())
    yield "SFT", "PyTorch `cross_entropy`", "", *graded(own, expected, tokens.logits)


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
