"""Training on rows of files: `hone sft`, `hone dpo` and `hone reward-model`. The same loop and
trainer, no engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm, Outputs
from hone.algorithms.configured import algorithm_of
from hone.config.plan import Devices, resolve
from hone.config.tree import DPOConfig, PairsConfig, RewardModelingConfig, SFTConfig
from hone.data.pairs import load_pairs
from hone.data.sft import load_sft
from hone.data.split import Data
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.loops.launch import Launch, load_for_training
from hone.loops.loop import run_to_end
from hone.loops.recorder import recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Run
from hone.models.adapters import adapt, is_adapted
from hone.models.load import load_config, load_end_ids, load_value_model
from hone.models.tokenizer import load_tokenizer, require_known_tokens, require_padding
from hone.observe.metrics import Mean, Metrics
from hone.planner.smaller_start import smaller_start
from hone.trainer.collating import collate
from hone.trainer.kept_scores import KeptScores
from hone.trainer.models import Models
from hone.trainer.scorer import FrozenScorer, RowScorer, WithoutAdapters
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["SupervisedRun", "build_run", "evaluate", "load_rows", "run"]


def run(cfg: SFTConfig) -> Outcome:
    """As `run_to_end`."""
    return run_to_end(cfg, partial(build_run, cfg))


class _Stopped(Exception):
    """An evaluation has been cut short."""


@dataclass(kw_only=True)
class SupervisedRun(Run[Any]):
    """Trains on demonstrations or preferences, as its algorithm takes them."""

    cfg: SFTConfig
    data: Data[Any]
    kept: dict[str, list[Outputs]] = field(default_factory=dict[str, list[Outputs]])
    """What models that do not learn say of the held-out rows."""

    def collect(self, step: int) -> list[Any]:
        del step
        with self.span("data"):
            return self.data.train.take(self.cfg.data.examples_per_step)

    def evaluate(self, step: int) -> Metrics:
        del step
        try:
            return evaluate(
                self.models,
                self.algorithm,
                self.data.eval,
                kept=self.kept,
                before_pass=self._stop_if_asked,
            )
        except _Stopped:
            return {}

    def _stop_if_asked(self) -> None:
        """Collective, so that all processes leave an evaluation before the same pass."""
        if self.interrupt.is_requested():
            raise _Stopped

    def rank(self, evaluated: Mapping[str, float]) -> float | None:
        return -evaluated["eval/loss"] if evaluated else None

    def record(self, step: int, batch: list[Any], rows: Sequence[Row], metrics: Metrics) -> None:
        self.recorder.record(step, metrics, rows=rows)

    def state(self) -> dict[str, Any]:
        return super().state() | {"data": self.data.train.state_dict()}


@contextmanager
def build_run(cfg: SFTConfig, start: Launch) -> Generator[SupervisedRun]:
    """Build a run, restored from its checkpoint."""
    mesh = start.mesh
    tokenizer = load_tokenizer(cfg.model)
    data = load_rows(cfg, tokenizer)
    vocab_size = load_config(cfg.model).vocab_size
    require_known_tokens(data.all_rows(), tokenizer, vocab_size, cfg.model.path)
    load = partial(load_for_training, cfg.model, mesh, seed=cfg.run.seed)
    pad_id = require_padding(tokenizer) if isinstance(cfg, RewardModelingConfig) else None
    model = load() if pad_id is None else _value_model(cfg, mesh, pad_id)
    if cfg.model.lora.rank:
        adapt(model, cfg.model.lora, seed=cfg.run.seed)
    algorithm = algorithm_of(cfg, pad_id=pad_id)
    models = _models(cfg, start, model, algorithm, load)
    if isinstance(cfg, DPOConfig) and (folder := cfg.algorithm.kept_reference) is not None:
        models.scorers = {"reference": _kept_scores(cfg, folder, models, data)}
    start.watch.follow(models.groups)
    if start.checkpoint is not None:
        state: Mapping[str, Any] = start.checkpoint.parts
        restore(models, state)
        data.train.load_state_dict(state["data"])
    start.save_config()
    with recording(start) as recorder:
        yield SupervisedRun(
            cfg=cfg,
            launch=start,
            algorithm=algorithm,
            models=models,
            data=data,
            tokenizer=tokenizer,
            recorder=recorder,
        )


def _value_model(cfg: SFTConfig, mesh: Mesh, pad_id: int) -> PreTrainedModel:
    """A model with a head for one value, and with the padding that it is saved with."""
    seed, is_shared = cfg.run.seed, mesh.world.size > 1
    model = load_value_model(cfg.model, device=mesh.device, seed=seed, deferred=is_shared)
    if pad_id >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer's padding is token {pad_id}, and {cfg.model.path!r} has "
            f"{model.config.vocab_size}: the model could not be loaded again. Set pad_token in "
            "tokenizer_config.json to a token that the model has, such as its end token"
        )
    model.config.pad_token_id = pad_id
    return model


def load_rows(cfg: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Data[Any]:
    """What `cfg.data` has to train and to evaluate on. Raises UserError."""
    end_ids = load_end_ids(cfg.model, tokenizer)
    if not isinstance(cfg, PairsConfig):
        return load_sft(cfg.data, tokenizer, seed=cfg.run.seed, end_ids=end_ids)
    return load_pairs(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        is_unpaired=cfg.is_unpaired,
        for_reward_model=cfg.for_reward_model,
        end_ids=end_ids,
    )


def _models(
    cfg: SFTConfig,
    start: Launch,
    model: PreTrainedModel,
    algorithm: Algorithm[Any],
    load: Callable[[], PreTrainedModel],
) -> Models:
    """The trainer of `model` and, where the algorithm asks for it, the reference: a copy of the
    start, or where adapters are trained the policy without them."""
    mesh = start.mesh
    devices = Devices(kind="cpu" if mesh.device.type == "cpu" else "cuda")
    plan = resolve(cfg, ModelFacts.read(cfg.model.path), devices, world_size=mesh.world.size)
    frozen = load() if plan.trainers_hold_reference else None
    trainer = Trainer(
        model,
        cfg.trainer,
        algorithm.objectives["policy"],
        total_steps=cfg.run.steps,
        dump_dir=start.dir,
        on_exhausted=partial(smaller_start, plan),
        mesh=mesh,
    )
    scorers: dict[str, RowScorer] = {}
    if frozen is not None:
        scorers["reference"] = FrozenScorer(
            frozen,
            cfg.trainer,
            mesh=mesh,
            dump_dir=start.dir,
            on_exhausted=partial(smaller_start, plan),
        )
    elif "reference" in algorithm.needs.scores and is_adapted(model):
        scorers["reference"] = WithoutAdapters(model, trainer)
    return Models({"policy": trainer}, scorers)


def _kept_scores(cfg: DPOConfig, folder: Path, models: Models, data: Data[Any]) -> KeptScores:
    """What the policy, which nothing has trained yet, says of all rows."""
    rows = [row for item in data.all_rows() for row in item.rows]
    settings = cfg.model.model_dump(exclude={"path"}), cfg.trainer.model_dump(exclude={"optimizer"})
    scorer = models.scorers.get("reference", models.trainer)
    return KeptScores.of(rows, scorer, models.trainer, folder, str(settings))


def evaluate(
    models: Models,
    algorithm: Algorithm[Any],
    items: Sequence[Any],
    *,
    kept: dict[str, list[Outputs]] | None = None,
    before_pass: Callable[[], None] = lambda: None,
) -> Metrics:
    """The mean of the loss, of each token, row or unit as the objective says, and the objective's
    metrics, as `eval/...`; no gradient. Collective. `kept` as in `Models.prepare`, `before_pass` as
    in `row_outputs`."""
    rows, _ = models.prepare(algorithm, items, version=0, kept=kept)
    objective = algorithm.objectives["policy"]
    found = models.trainer.outputs(rows, objective.outputs, before_pass=before_pass)
    outputs: Outputs = {o: torch.cat([own[o] for own in found]) for o in objective.outputs}
    batch = collate(rows, objective.weights(rows), "cpu", per=objective.per)
    loss = objective(outputs, batch)
    metrics = {f"eval/{name}": metric for name, metric in loss.metrics.items()}
    return {"eval/loss": Mean.of(loss.values), **metrics}
