"""A run of `hone rl` once more: plain transformers in float64, one sequence at a time.

    found = replay(run_dir, start)      # `start` is the folder of the weights before the run
    found.largest["weights"]            # the largest difference of each kind

The replay reads what the run has written and has no code of the product: token ids, turns, weight
versions and rewards are those of `samples.jsonl`, settings those of `config.yaml`.

Two things are compared, each by itself, so that neither has to allow for the rounding of the other:

* Log-probabilities of tokens, with those of the weights that the run had then, which are in the
  checkpoints of its steps.
* Weights after each step, with those of a training in float64 that goes on from its own.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.recurrent.formulas import (
    FEWEST,
    advantages_of_groups,
    correction,
    divergence,
    gae,
    lr_scale,
    policy_loss,
    token_weights,
    whitened,
)
from tests.recurrent.routers import noted, prescribed
from tests.recurrent.unrounded import unrounded

__all__ = ["Replay", "replay"]

_CUT = ("length", "max_turns", "deadline")
"""What stops an episode that is not at its end."""


@dataclass(kw_only=True)
class Replay:
    """What the replay has found."""

    largest: dict[str, float] = field(default_factory=dict[str, float])
    """The largest difference between run and replay, of each kind."""
    where: dict[str, str] = field(default_factory=dict[str, str])
    num_steps: int = 0
    """Optimizer steps of the policy."""
    num_tokens: int = 0
    """Tokens that these have trained."""
    num_cut: int = 0
    """Tokens of these that were clipped."""
    num_stale: int = 0
    """Tokens that older weights than the newest ones had drawn."""
    moved: float = 0.0
    """Norm of the change of all weights."""

    def compare(self, kind: str, difference: float, where: str) -> None:
        if kind not in self.largest or not difference <= self.largest[kind]:  # nan too
            self.largest[kind], self.where[kind] = difference, where


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A sample as it was written."""

    id: str
    group: str
    ids: Tensor
    """Prompt and completion."""
    drawn: Tensor
    """Places in `ids` of the tokens that the policy has drawn."""
    is_trained: Tensor
    """Of each drawn token, as of the columns below."""
    versions: Tensor
    engine: Tensor
    """The engine's log-probabilities."""
    policy: Tensor | None
    """The trainer's log-probabilities of trained tokens, where they were written, and entropies."""
    entropies: Tensor | None
    reward: float
    advantage: float | None
    """The mean over trained tokens."""

    @property
    def trained(self) -> Tensor:
        return self.drawn[self.is_trained]

    @property
    def size(self) -> int:
        return int(self.is_trained.sum())


def replay(run_dir: Path, start: Path) -> Replay:
    """Train the weights in `start` on what the run has sampled, and compare."""
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    with unrounded():
        return _Run(settings, run_dir, start).all_steps()


class _Learner:
    """A model, the gradients of its batches, and AdamW."""

    def __init__(self, model: nn.Module, optimizer: Mapping[str, Any], total_steps: int) -> None:
        self.model = model
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.moments = {
            name: {n: torch.zeros_like(p) for n, p in self.start.items()}
            for name in ("exp_avg", "exp_avg_sq")
        }
        self.num_steps = 0
        self.num_updates = 0
        self._cfg = optimizer
        self._total_steps = total_steps

    @torch.no_grad()
    def step(self) -> float:
        """Clip the gradient and apply it. Returns its norm."""
        cfg, count = self._cfg, self.num_steps + 1
        beta1, beta2 = cfg["betas"]
        lr = cfg["lr"] * lr_scale(cfg, self.num_steps, self._total_steps)
        named = dict(self.model.named_parameters())
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        norm = math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))
        clip = min(1.0, cfg["max_grad_norm"] / (norm + 1e-6)) if cfg["max_grad_norm"] else 1.0
        for name, gradient in gradients.items():
            parameter = named[name]
            first, second = (self.moments[moment][name] for moment in ("exp_avg", "exp_avg_sq"))
            first.mul_(beta1).add_((1 - beta1) * clip * gradient)
            second.mul_(beta2).add_((1 - beta2) * (clip * gradient) ** 2)
            if parameter.ndim > 1:
                parameter.mul_(1 - lr * cfg["weight_decay"])
            mean, square = first / (1 - beta1**count), second / (1 - beta2**count)
            parameter.sub_(lr * mean / (square.sqrt() + cfg["eps"]))
            parameter.grad = None
        self.num_steps = count
        return norm


class _Critic(nn.Module):
    """The backbone of a language model with a head for one value, which starts at 0."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.model = causal.model
        self.score = nn.Linear(self.model.config.hidden_size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.score.weight)

    def forward(self, episode: Episode) -> Tensor:
        """The value before each trained token is drawn."""
        hidden = self.model(input_ids=episode.ids[None], use_cache=False).last_hidden_state[0]
        return self.score(hidden[episode.trained - 1])[:, 0]


class _Run:
    def __init__(self, settings: Mapping[str, Any], run_dir: Path, start: Path) -> None:
        self.cfg = settings
        self.algorithm: Mapping[str, Any] = settings["algorithm"]
        self.trainer: Mapping[str, Any] = settings["trainer"]
        self.rollout: Mapping[str, Any] = settings["rollout"]
        self.run_dir = run_dir
        self.found = Replay()
        has_critic = self.algorithm["advantage"] == "gae"
        self.waits: int = settings["critic"]["warmup_steps"] if has_critic else 0
        """Steps in which the critic alone learns."""
        num_prompts = self.rollout["prompts_per_step"]
        size = self.trainer["prompts_per_minibatch"] or num_prompts
        each = self.trainer["num_epochs"] * math.ceil(num_prompts / size)
        num_steps = settings["run"]["steps"]
        optimizer = self.trainer["optimizer"]
        self.policy = _Learner(_load(start), optimizer, (num_steps - self.waits) * each)
        self.critic: _Learner | None = None
        if has_critic:
            own = {**optimizer, "lr": settings["critic"]["lr"]}
            self.critic = _Learner(_Critic(_load(start)), own, num_steps * each)
        self.reference = copy.deepcopy(self.policy.model)
        self.versions = {0: self.reference}
        """The weights of the run after so many steps."""
        self.routes: dict[str, list[Tensor]] = {}

    def all_steps(self) -> Replay:
        rows = {r["step"]: r for r in _lines(self.run_dir / "metrics.jsonl") if "train/lr" in r}
        steps: dict[int, list[Episode]] = {}
        for row in _lines(self.run_dir / "samples.jsonl"):
            if row["split"] == "train" and row["failure"] is None:
                steps.setdefault(row["step"], []).append(self.episode(row))
        for step in range(1, self.cfg["run"]["steps"] + 1):
            self.one_step(step, steps.get(step, []), rows.get(step, {}))
            self.compare_checkpoint(step)
        self.compare_weights("weights", self.policy, _load(self.run_dir / "model"), "the export")
        if self.critic is not None:
            kind = AutoModelForSequenceClassification
            written = _load(self.run_dir / "critic", kind)
            self.compare_weights("critic", self.critic, written, "the export")
        return self.found

    def episode(self, row: Mapping[str, Any]) -> Episode:
        """Which tokens are trained follows from turns and settings, and is what was written."""
        drawn = [t for turn in row["turns"] for t in range(turn["start"], turn["end"])]
        versions = row["weight_versions"]
        is_trained = [True] * len(drawn)
        if self.rollout["truncated_samples"] == "mask" and row["stop_reason"] in _CUT:
            is_trained = [False] * len(drawn)
        elif self.rollout["mask_off_policy_tokens"]:
            is_trained = [versions[t] == max(versions) for t in drawn]
        trained = [t for t, own in zip(drawn, is_trained, strict=True) if own]
        written = [t for t, own in enumerate(row["loss_mask"]) if own]
        assert written == trained, f"{row['id']} trains the tokens {written} and not {trained}"

        def column(name: str, places: Sequence[int]) -> Tensor | None:
            values = row.get(name)
            return values and torch.tensor([values[t] for t in places], dtype=torch.float64)

        engine = column("logprobs", drawn)
        assert engine is not None, f"{row['id']} has no log-probabilities"
        num_prompt = len(row["prompt_token_ids"])
        return Episode(
            id=row["id"],
            group=row["id"].rpartition("/")[0],
            ids=torch.tensor([*row["prompt_token_ids"], *row["token_ids"]]),
            drawn=num_prompt + torch.tensor(drawn),
            is_trained=torch.tensor(is_trained),
            versions=torch.tensor([versions[t] for t in drawn]),
            engine=engine,
            policy=column("policy_logprobs", trained),
            entropies=column("entropy", trained),
            reward=row["reward"],
            advantage=row["advantage"],
        )

    def one_step(self, step: int, episodes: Sequence[Episode], row: Mapping[str, float]) -> None:
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)
        fewest = FEWEST.get(self.algorithm["advantage"], 1)
        groups = {name: own for name, own in groups.items() if len(own) >= fewest}
        kl = self.algorithm["kl"]
        before: dict[str, Tensor] = {}
        reference: dict[str, Tensor] = {}
        with torch.no_grad():
            for episode in episodes:
                self.compare_engine(step, episode)
            for episode in _all(groups):
                before[episode.id], _ = self.trained_tokens(self.policy.model, episode)
                if kl["coef"]:
                    reference[episode.id], _ = self.tokens(self.reference, episode)
        paid = {name: torch.zeros_like(own) for name, own in before.items()}
        if kl["placement"] == "reward":
            for name, own in reference.items():
                paid[name] = kl["coef"] * divergence(kl["estimator"], before[name], own)
        if self.critic is not None:
            advantages = self.train_critic(self.critic, groups, paid)
        else:
            scored = [[(e.reward, paid[e.id]) for e in own] for own in groups.values()]
            found = advantages_of_groups(self.algorithm["advantage"], scored)
            advantages = _by_id(groups, found)
        for episode in _all(groups):
            if episode.advantage is not None and episode.size:
                mean = float(advantages[episode.id].mean())
                error = abs(episode.advantage - mean) / max(1.0, abs(mean))
                self.found.compare("advantage", error, f"step {step}, {episode.id}")
        if step <= self.waits:
            return

        def objective(episode: Episode) -> Tensor:
            own = advantages[episode.id]
            logprobs, entropy = self.trained_tokens(self.policy.model, episode)
            terms, is_cut = policy_loss(self.algorithm, logprobs, before[episode.id], own)
            log_ratio = before[episode.id] - episode.engine[episode.is_trained]
            terms = terms * correction(self.algorithm["correction"], log_ratio)
            if kl["coef"] and kl["placement"] == "loss":
                wanted = reference[episode.id]
                terms = terms + kl["coef"] * divergence(kl["estimator"], logprobs, wanted)
            self.found.num_cut += int(is_cut.sum())
            self.found.num_tokens += episode.size
            return terms - self.algorithm["entropy_coef"] * entropy

        aggregation = self.algorithm["aggregation"]
        batches = [*self.minibatches(self.policy, groups)]
        self.compare_trainer(step, batches[0] if batches else [])
        steps = [*self.train(self.policy, batches, objective, aggregation)]
        self.found.num_steps += len(steps)
        for kind, mine in zip(("loss", "grad_norm"), zip(*steps, strict=True), strict=False):
            mean = sum(mine) / len(mine)
            error = abs(row[f"train/{kind}"] - mean) / max(abs(mean), 0.01)
            self.found.compare(kind, error, f"step {step}")

    def train_critic(
        self,
        critic: _Learner,
        groups: Mapping[str, Sequence[Episode]],
        paid: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Advantages against the critic, which then learns what was earned."""
        clip = self.cfg["critic"]["value_clip"]
        discounts = {name: self.algorithm[name] for name in ("gamma", "lam")}
        values: dict[str, Tensor] = {}
        returns: dict[str, Tensor] = {}
        found: list[list[Tensor]] = []
        for own in groups.values():
            found.append([])
            for episode in own:
                with torch.no_grad():
                    old = values[episode.id] = critic.model(episode)
                mine = old
                if episode.size:
                    mine = gae(episode.reward, paid[episode.id], old, **discounts)
                returns[episode.id] = mine + old
                found[-1].append(mine)

        def objective(episode: Episode) -> Tensor:
            old, wanted = values[episode.id], returns[episode.id]
            now = critic.model(episode)
            terms = (now - wanted) ** 2
            if clip is not None:
                cut = torch.minimum(torch.maximum(now, old - clip), old + clip)
                terms = torch.maximum(terms, (cut - wanted) ** 2)
            return terms / 2

        for _ in self.train(critic, self.minibatches(critic, groups), objective, "token_mean"):
            pass
        return _by_id(groups, whitened(found))

    def minibatches(
        self, learner: _Learner, groups: Mapping[str, Sequence[Episode]]
    ) -> Iterator[list[Episode]]:
        """Whole groups, each once an epoch, in an order that follows from the seed."""
        size = self.trainer["prompts_per_minibatch"] or max(len(groups), 1)
        for epoch in range(self.trainer["num_epochs"]):
            order = list(groups)
            seed = f"{self.cfg['run']['seed']}/minibatch/{learner.num_updates}/{epoch}"
            random.Random(seed).shuffle(order)
            for first in range(0, len(order), size):
                yield [e for name in order[first : first + size] for e in groups[name]]
        learner.num_updates += 1

    def train(
        self,
        learner: _Learner,
        batches: Iterator[list[Episode]] | Sequence[list[Episode]],
        objective: Callable[[Episode], Tensor],
        aggregation: str,
    ) -> Iterator[tuple[float, float]]:
        """An optimizer step for each batch with a trained token: its loss and the gradient's
        norm."""
        for batch in batches:
            sizes = [episode.size for episode in batch]
            weights = token_weights(aggregation, sizes, self.rollout["max_completion_tokens"])
            loss = 0.0
            for episode, weight in zip(batch, weights, strict=True):
                if episode.size:
                    own = weight * objective(episode).sum()
                    own.backward()
                    loss += float(own.detach())
            if any(sizes):
                yield loss, learner.step()

    def tokens(
        self, model: nn.Module, episode: Episode, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens at `places`, by default the trained ones, and entropies
        of the distributions that they were drawn from."""
        places = episode.trained if places is None else places
        logits = model(input_ids=episode.ids[None], use_cache=False).logits[0, places - 1]
        words = (logits / self.rollout["temperature"]).log_softmax(-1)
        logprobs = words.gather(1, episode.ids[places, None])[:, 0]
        return logprobs, -(words.exp() * words).sum(-1)

    def trained_tokens(self, model: nn.Module, episode: Episode) -> tuple[Tensor, Tensor]:
        """As `tokens`, of the policy in training, whose routes may be those of the engine."""
        if not self.algorithm["routing_replay"]:
            return self.tokens(model, episode)
        if episode.id not in self.routes:
            self.routes[episode.id] = self.routes_of(episode)
        with prescribed(model, self.routes[episode.id]):
            return self.tokens(model, episode)

    @torch.no_grad()
    def routes_of(self, episode: Episode) -> list[Tensor]:
        """The experts of each token in each layer, chosen by the weights that drew the next token
        of the policy's."""
        chosen: dict[int, list[Tensor]] = {}
        for version in episode.versions.unique().tolist():
            with noted(self.versions[version]) as chosen[version]:
                self.tokens(self.versions[version], episode)
        drawn, versions = episode.drawn.tolist(), episode.versions.tolist()
        routes = [experts.clone() for experts in chosen[versions[-1]]]
        for start, place, version in zip([0, *drawn], drawn, versions, strict=False):
            for own, experts in zip(routes, chosen[version], strict=True):
                own[start:place] = experts[start:place]
        return routes

    @torch.no_grad()
    def compare_engine(self, step: int, episode: Episode) -> None:
        """Each token was drawn by the weights of its version, which knew all tokens before it."""
        for version in episode.versions.unique().tolist():
            own = episode.versions == version
            mine, _ = self.tokens(self.versions[version], episode, episode.drawn[own])
            self.compare_tokens("engine", episode.engine[own], mine, f"step {step}, {episode.id}")
            self.found.num_stale += int(own.sum()) if version < step - 1 else 0

    @torch.no_grad()
    def compare_trainer(self, step: int, batch: Sequence[Episode]) -> None:
        """What was written is the first pass of an episode in the update. In its first optimizer
        step, that of `batch`, the weights are those before it."""
        for episode in batch:
            if episode.size and episode.policy is not None and episode.entropies is not None:
                logprobs, entropies = self.trained_tokens(self.versions[step - 1], episode)
                where = f"step {step}, {episode.id}"
                self.compare_tokens("trainer", episode.policy, logprobs, where)
                self.compare_tokens("entropy", episode.entropies, entropies, where)

    def compare_tokens(self, kind: str, written: Tensor, mine: Tensor, where: str) -> None:
        self.found.compare(kind, float((written - mine).abs().max()), where)

    def compare_checkpoint(self, step: int) -> None:
        """Weights after the step, and AdamW's moments: a gradient that is wrong by a factor moves
        weights as a right one does."""
        file = self.run_dir / "checkpoints" / f"step_{step}" / "trainer.rank0.safetensors"
        version = self.versions[step] = copy.deepcopy(self.reference)
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name, parameter in version.named_parameters():
                parameter.copy_(tensors.get_tensor(f"trainer.weights/{name}"))
            for moment, mine in self.policy.moments.items() if self.policy.num_steps else ():
                theirs = {n: tensors.get_tensor(f"trainer.optimizer/{moment}/{n}") for n in mine}
                for name, scale in _scales(mine).items():
                    error = float((theirs[name] - mine[name]).norm()) / scale
                    self.found.compare("moments", error, f"step {step}, {moment} of {name}")
        self.compare_weights("weights", self.policy, version, f"step {step}")

    @torch.no_grad()
    def compare_weights(self, kind: str, learner: _Learner, written: nn.Module, when: str) -> None:
        """For each tensor the norm of the difference, relative to that of the change since the
        start. What float32 rounds off a weight in each step is no part of the difference."""
        theirs, mine = dict(written.named_parameters()), dict(learner.model.named_parameters())
        assert theirs.keys() == mine.keys()
        moved = {name: weight - learner.start[name] for name, weight in mine.items()}
        for name, scale in _scales(moved).items():
            rounded = learner.num_steps * 2**-24 * float(mine[name].norm())
            error = max(float((theirs[name] - mine[name]).norm()) - rounded, 0.0) / scale
            self.found.compare(kind, error, f"{when}, {name}")
        if learner is self.policy:
            self.found.moved = math.hypot(*(float(change.norm()) for change in moved.values()))


def _scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The norms with which differences are compared. Where a tensor is almost zero it is a
    hundredth of what an equal share in all tensors would be."""
    norms = {name: float(tensor.norm()) for name, tensor in tensors.items()}
    number = sum(tensor.numel() for tensor in tensors.values())
    typical = math.hypot(*norms.values()) / math.sqrt(number)
    return {
        name: max(norm, typical * math.sqrt(tensors[name].numel()) / 100, 1e-12)
        for name, norm in norms.items()
    }


def _load(folder: Path, kind: Any = AutoModelForCausalLM) -> nn.Module:
    """The model of a folder, with eager attention and experts."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return kind.from_pretrained(folder, dtype=torch.float64, local_files_only=True, **eager).eval()


def _all(groups: Mapping[str, Sequence[Episode]]) -> list[Episode]:
    return [episode for own in groups.values() for episode in own]


def _by_id(
    groups: Mapping[str, Sequence[Episode]], values: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    flat = [own for group in values for own in group]
    return {episode.id: own for episode, own in zip(_all(groups), flat, strict=True)}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
