"""Episodes of several rows in the trainer: the whole loss of a batch, written out in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hone.algorithms.advantages import EstimatorName
from hone.algorithms.aggregation import Aggregation
from hone.algorithms.algorithm import Objective
from hone.algorithms.corrections import CorrectionKind
from hone.algorithms.grpo import GRPO
from hone.algorithms.losses import LossInputs, LossName
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.ppo import PPO
from hone.algorithms.settings import AlgorithmConfig, CriticConfig
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Group, Row
from tests.algorithms.episodes import rewritten
from tests.algorithms.test_advantages import BRUTE
from tests.algorithms.test_losses import by_hand, correction_by_hand
from tests.tables import table
from tests.trainer.examples import eager_twin, gradients, near_policy, tiny_model

LIMIT = 16
"""Divisor of the aggregation `constant`."""
CLIP = {"clip_low": 0.15, "clip_high": 0.25}


@dataclass
class Path:
    """One path of an episode: trained tokens in float64, under the policy now (with a gradient),
    before the update, the reference's and the engine's."""

    now: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor

    def __len__(self) -> int:
        return len(self.now)


@dataclass
class Played:
    """An episode with a reward, by its paths with trained tokens."""

    reward: float
    paths: list[Path]
    penalty: float = 0.0
    """Factor of k1 in the reward."""

    def paid(self) -> list[float]:
        return [
            self.penalty * float(o - r)
            for path in self.paths
            for o, r in zip(path.old, path.reference, strict=True)
        ]


def losses_by_hand(cfg: AlgorithmConfig, path: Path, advantages: list[float]) -> Tensor:
    """Loss of each token of a path, [N], whose sum has the gradient of the equations."""
    inputs = LossInputs(
        logprobs=path.now,
        old_logprobs=path.old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_index=torch.zeros(len(path), dtype=torch.int64),
        num_sequences=1,
    )
    values, slopes = (torch.tensor(x, dtype=torch.float64) for x in by_hand(cfg.loss, inputs, cfg))
    return values + slopes * (path.now - path.now.detach())


def loss_by_hand(groups: list[list[Played]], cfg: AlgorithmConfig) -> Tensor:
    """The loss of one optimizer step. A sequence of the loss and of the correction is a path, one
    of the baseline and of the aggregation is an episode."""
    case = [[(episode.reward, episode.paid()) for episode in group] for group in groups]
    assert cfg.advantage != "gae"
    by_group = BRUTE[cfg.advantage](case)
    episodes: list[Tensor] = []
    for group, of_group in zip(groups, by_group, strict=True):
        for episode, advantages in zip(group, of_group, strict=True):
            tokens, rest = list[Tensor](), advantages
            for path in episode.paths:
                own, rest = rest[: len(path)], rest[len(path) :]
                gaps = (path.old - path.engine).tolist()
                kind, bounds = cfg.correction.kind, (cfg.correction.low, cfg.correction.high)
                factors = correction_by_hand(kind, gaps, *bounds, lengths=[len(path)])
                terms = torch.tensor(factors) * losses_by_hand(cfg, path, own)
                if cfg.kl.placement == "loss":
                    terms = terms + cfg.kl.coef * 0.5 * (path.now - path.reference) ** 2
                tokens.append(terms)
            if tokens:
                episodes.append(torch.cat(tokens))
    match cfg.aggregation:
        case "token_mean":
            return torch.cat(episodes).mean()
        case "sequence_mean":
            return torch.stack([tokens.mean() for tokens in episodes]).mean()
        case "constant":
            return torch.cat(episodes).sum() / (len(episodes) * LIMIT)


@cache
def batch() -> tuple[Any, list[Group], dict[str, dict[str, Tensor]]]:
    """A tiny model, groups of rewritten episodes, and columns by row around the policy's own."""
    model, groups = tiny_model(), rewritten(3, num_groups=2)
    rows = GRPO(AlgorithmConfig(), max_completion_tokens=LIMIT).rows(groups, 0)
    near_policy(rows, trainer())
    names = ("logprobs/policy", "logprobs/reference", "logprobs/engine")
    return model, groups, {row.id: {n: row.column(n) for n in names} for row in rows}


@cache
def trainer(**settings: int) -> Trainer:
    """A trainer of the tiny model, whose objective each test sets."""
    cfg = TrainerConfig.model_validate(settings)
    objective = PolicyObjective(AlgorithmConfig(), max_completion_tokens=LIMIT)
    return Trainer(tiny_model(), cfg, objective, total_steps=9, on_exhausted=lambda: "")


def step(objective: Objective, rows: list[Row], **settings: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of an optimizer step."""
    own = trainer(**settings)
    own.objective = objective
    loss, _ = own.forward_backward(rows)
    return float(loss), gradients(own)


def rows_of(algorithm: GRPO) -> list[Row]:
    _, groups, columns = batch()
    rows = algorithm.rows(groups, 0)
    for row in rows:
        row.columns |= {name: Column(values) for name, values in columns[row.id].items()}
    algorithm.targets(rows, groups)
    return rows


def played(twin: Any, penalty: float = 0.0) -> list[list[Played]]:
    """The batch for the equations: each path alone through a float64 twin of the model."""
    _, groups, columns = batch()
    found: list[list[Played]] = []
    for group in groups:
        found.append([])
        for sample in group.samples:
            if sample.reward is None:
                continue
            paths: list[Path] = []
            for name, path in sample.paths.items():
                if not any(path.loss_mask):
                    continue
                ids = torch.tensor([[*path.prompt_ids, *path.token_ids]])
                logprobs = twin(ids).logits[0].log_softmax(-1)
                start = len(path.prompt_ids)
                trained = [start + t for t, m in enumerate(path.loss_mask) if m]
                now = torch.stack([logprobs[t - 1, ids[0, t]] for t in trained])
                own = columns[name]
                others = (own[f"logprobs/{w}"].double() for w in ("policy", "reference", "engine"))
                paths.append(Path(now, *others))
            found[-1].append(Played(sample.reward.total, paths, penalty))
    return found


@cache
def twin_of_model() -> tuple[Any, list[list[Played]]]:
    twin = eager_twin(batch()[0])
    return twin, played(twin)


def gradient_by_hand(loss: Tensor) -> dict[str, Tensor]:
    twin, _ = twin_of_model()
    names, parameters = zip(*twin.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    return dict(zip(names, found, strict=True))


def check(cfg: AlgorithmConfig, expected: Tensor, *, with_gradient: bool = False) -> None:
    algorithm = GRPO(cfg, max_completion_tokens=LIMIT)
    several, one = {"micro_batch_size": 2}, {"max_tokens_per_microbatch": 4096}
    for settings in (several, one) if with_gradient else (one,):
        loss, gradient = step(algorithm.objectives["policy"], rows_of(algorithm), **settings)
        assert loss == pytest.approx(expected.item(), abs=2e-6, rel=2e-5)
        if with_gradient:
            for name, by_hand in gradient_by_hand(expected).items():
                torch.testing.assert_close(gradient[name], by_hand, atol=1e-5, rtol=1e-3)


@table("advantage", get_args(EstimatorName))
@table("loss", get_args(LossName))
@table("aggregation", get_args(Aggregation))
def test_the_loss_of_a_batch_is_its_definition(
    advantage: EstimatorName, loss: LossName, aggregation: Aggregation
) -> None:
    """Values of all, and gradients of each loss, with the rows in one pass and in several."""
    cfg = AlgorithmConfig(advantage=advantage, loss=loss, aggregation=aggregation, **CLIP)
    expected = loss_by_hand(twin_of_model()[1], cfg)
    check(cfg, expected, with_gradient=(advantage, aggregation) == ("grpo", "sequence_mean"))


@table("correction", get_args(CorrectionKind))
def test_a_correction_is_of_a_path(correction: CorrectionKind) -> None:
    cfg = AlgorithmConfig.model_validate(
        {
            "aggregation": "sequence_mean",
            "correction": {"kind": correction, "low": 0.7, "high": 1.4},
        }
    )
    check(cfg, loss_by_hand(twin_of_model()[1], cfg))


@table("advantage", get_args(EstimatorName))
@table("kl", [("reward", "k1"), ("loss", "k2")])
def test_penalties_of_all_rows_count(advantage: EstimatorName, kl: tuple[str, str]) -> None:
    placement, estimator = kl
    section = {"coef": 0.2, "placement": placement, "estimator": estimator}
    cfg = AlgorithmConfig.model_validate({"advantage": advantage, "kl": section})
    groups = played(twin_of_model()[0], penalty=0.2 if placement == "reward" else 0.0)
    check(cfg, loss_by_hand(groups, cfg))


def test_policy_and_critic_of_ppo_learn_from_episodes() -> None:
    """GAE by its definition over all tokens of an episode; the value loss is the mean over tokens,
    which is that of the values that a critic with a head of zeros gives."""
    _, groups = twin_of_model()
    gamma, lam = 0.9, 0.8
    algorithm = PPO(
        AlgorithmConfig.model_validate({"advantage": "gae", "gamma": gamma, "lam": lam, **CLIP}),
        CriticConfig(value_clip=None),
        max_completion_tokens=LIMIT,
    )
    _, samples, columns = batch()
    rows = algorithm.rows(samples, 0)
    generator = torch.Generator().manual_seed(0)
    values: dict[str, list[float]] = {}
    for row in rows:
        row.columns |= {name: Column(own) for name, own in columns[row.id].items()}
        drawn = torch.randn(row.num_trained, generator=generator)
        row.columns["values/critic"] = Column(drawn)
        values.setdefault(row.episode, []).extend(drawn.tolist())
    algorithm.targets(rows, samples)
    raw: dict[str, list[float]] = {}
    names = [s.id for group in samples for s in group.samples if s.reward is not None]
    for name, episode in zip(names, (e for group in groups for e in group), strict=True):
        v = [*values[name], 0.0]
        n = len(v) - 1
        deltas = [episode.reward * (t == n - 1) + gamma * v[t + 1] - v[t] for t in range(n)]
        raw[name] = [
            sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
        ]
    flat = [a for of_episode in raw.values() for a in of_episode]
    mean, std = fmean(flat), stdev(flat) + 1e-6
    total, learnt = torch.zeros((), dtype=torch.float64), 0.0
    for name, episode in zip(names, (e for group in groups for e in group), strict=True):
        rest = list(raw[name])
        for path in episode.paths:
            own, rest = rest[: len(path)], rest[len(path) :]
            terms = losses_by_hand(algorithm.cfg, path, [(a - mean) / std for a in own])
            total = total + terms.sum()
        learnt += sum((a + v) ** 2 / 2 for a, v in zip(raw[name], values[name], strict=True))
    loss, _ = step(algorithm.objectives["policy"], rows)
    assert loss == pytest.approx(total.item() / len(flat), rel=2e-5)
    critic = algorithm.objectives["critic"]
    weights = critic.weights(rows)
    zeros = sum(
        w * float((0.5 * row.column("returns").double() ** 2).sum())
        for w, row in zip(weights, rows, strict=True)
    )
    assert zeros == pytest.approx(learnt / len(flat), rel=1e-5)


def test_rows_of_an_episode_stay_in_one_mini_batch() -> None:
    algorithm = GRPO(AlgorithmConfig(), max_completion_tokens=LIMIT)
    rows = rows_of(algorithm)
    steps = trainer(prompts_per_minibatch=1).batcher.optimizer_steps(rows, 0)
    assert len(steps) == 2
    of_steps = [{row.episode for row in step} for step in steps]
    assert sum(map(len, of_steps)) == len(set[str]().union(*of_steps))
    assert sum(map(len, steps)) == len(rows)
