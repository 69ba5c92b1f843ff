"""Training on rows of files: `hone sft`, `hone dpo` and `hone reward-model`. They use the loop and
the trainer of `hone rl`, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm, Outputs
from hone.algorithms.configured import algorithm_of
from hone.config.tree import DPOConfig, PairsConfig, RewardModelingConfig, SFTConfig
from hone.data.pairs import load_pairs
from hone.data.sft import load_sft
from hone.data.split import Data
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.images.sending import prefetch_pixels
from hone.loops.inputs import image_reader
from hone.loops.launch import Launch, frozen_scorer, load_for_training
from hone.loops.loop import run_to_end
from hone.loops.recorder import recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Run
from hone.model_input import ModelInput
from hone.models.adapters import adapt
from hone.models.load import load_config, load_end_ids, load_value_model
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer, require_known_tokens, require_padding
from hone.observe.metrics import Mean, Metrics
from hone.observe.pages import Pages
from hone.observe.run_folder import INDEXES
from hone.trainer.collating import collate
from hone.trainer.frozen import WithoutAdapters
from hone.trainer.kept_scores import KeptScores
from hone.trainer.models import Models
from hone.trainer.scorer import RowScorer
from hone.trainer.trainer import Trainer
from hone.types import Preference, Row

__all__ = ["SupervisedRun", "build_run", "evaluate", "load_rows", "run"]


def run(cfg: SFTConfig, *, pages: Pages | None = None) -> Outcome:
    """Run `hone sft`, `hone dpo` or `hone reward-model`. `run_to_end` says what is written."""
    return run_to_end(cfg, partial(build_run, cfg), pages)


class _Stopped(Exception):
    """Raised to stop an evaluation early."""


def _inputs(items: Iterable[Row | Preference]) -> Iterator[ModelInput]:
    """The model inputs of all rows of demonstrations or preferences."""
    for item in items:
        rows = item.rows if isinstance(item, Preference) else (item,)
        yield from (row.model_input for row in rows)


@dataclass(kw_only=True)
class SupervisedRun(Run[Any]):
    """Run that trains on demonstrations or preferences."""

    cfg: SFTConfig
    data: Data[Any]
    kept: dict[str, list[Outputs]] = field(default_factory=dict[str, list[Outputs]])
    """Outputs of frozen models for the held-out rows, by role."""

    def collect(self, step: int) -> list[Any]:
        with self.span("data"):
            number, train = self.cfg.data.examples_per_step, self.data.train
            items = train.take(number, step=step)
            prefetch_pixels(_inputs(items), lambda: _inputs(train.peek(number, step=step + 1)))
            return items

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
        """Raise _Stopped if a signal has come. Collective, so that all processes leave the
        evaluation before the same pass."""
        if self.interrupt.is_requested():
            raise _Stopped

    def checkpoint_metric(self, evaluated: Mapping[str, float]) -> float | None:
        return -evaluated["eval/loss"] if evaluated else None

    def record(self, step: int, batch: list[Any], rows: Sequence[Row], metrics: Metrics) -> None:
        self.recorder.record(step, metrics | self.data.metrics(), rows=rows)

    def state(self) -> dict[str, Any]:
        return super().state() | {"data": self.data.train.state_dict()}


@contextmanager
def build_run(cfg: SFTConfig, start: Launch) -> Generator[SupervisedRun]:
    """Build a run and restore it from its checkpoint."""
    mesh, policy = start.mesh, start.plan.policy.model
    tokenizer = load_tokenizer(policy)
    data = load_rows(cfg, tokenizer)
    vocab_size = load_config(policy).vocab_size
    data.check(lambda rows: require_known_tokens(rows, tokenizer, vocab_size, policy.path))
    if isinstance(cfg, RewardModelingConfig):
        pad_id = require_padding(tokenizer)
        model = _value_model(policy, mesh, pad_id, seed=cfg.run.seed)
    else:
        pad_id, model = None, load_for_training(policy, mesh, seed=cfg.run.seed)
    if (lora := start.plan.lora) is not None and lora.rank:
        adapt(model, lora, seed=cfg.run.seed)
    algorithm = algorithm_of(cfg, pad_id=pad_id)
    models = _models(start, model, algorithm)
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


def _value_model(cfg: ModelConfig, mesh: Mesh, pad_id: int, *, seed: int) -> PreTrainedModel:
    """Load a model with a head for one value, and set the padding token that it is saved with."""
    is_shared = mesh.world.size > 1
    model = load_value_model(cfg, device=mesh.device, seed=seed, deferred=is_shared)
    if pad_id >= model.config.vocab_size:
        raise UserError(
            f"the tokenizer's padding is token {pad_id}, and {cfg.path!r} has "
            f"{model.config.vocab_size}: the model could not be loaded again. Set pad_token in "
            "tokenizer_config.json to a token that the model has, such as its end token"
        )
    model.config.pad_token_id = pad_id
    return model


def load_rows(cfg: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Data[Any]:
    """Load the training and evaluation data of `cfg.data`. Raises UserError."""
    end_ids = load_end_ids(cfg.model, tokenizer)
    images, cache = image_reader(cfg.model, cfg.data, tokenizer), cfg.run.dir / INDEXES
    if not isinstance(cfg, PairsConfig):
        return load_sft(
            cfg.data, tokenizer, seed=cfg.run.seed, end_ids=end_ids, images=images, cache=cache
        )
    return load_pairs(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        is_unpaired=cfg.is_unpaired,
        for_reward_model=cfg.for_reward_model,
        end_ids=end_ids,
        images=images,
        cache=cache,
    )


def _models(start: Launch, model: PreTrainedModel, algorithm: Algorithm[Any]) -> Models:
    """The trainer of `model` and, if the algorithm needs it, the reference: a copy of the initial
    model, or the policy without its adapters."""
    plan = start.plan
    trainer = Trainer(
        model,
        plan.policy.trainer,
        algorithm.objectives["policy"],
        total_steps=plan.optimizer_steps,
        dump_dir=start.dir,
        on_exhausted=start.smaller_start,
        mesh=start.mesh,
    )
    scorers: dict[str, RowScorer] = {}
    if (role := plan.roles.get("reference")) is not None:
        is_base = role.aliases_weights_of is not None
        scorers[role.name] = (
            WithoutAdapters(model, trainer) if is_base else frozen_scorer(role, start)
        )
    return Models({"policy": trainer}, scorers)


def _kept_scores(cfg: DPOConfig, folder: Path, models: Models, data: Data[Any]) -> KeptScores:
    """Reference log-probabilities of all rows, computed with the untrained policy and cached in
    `folder`. Raises UserError for a source that is not read whole."""
    streamed = [x.name for x in data.train.sources if x.is_streamed]
    if streamed:
        raise UserError(
            f"reference log-probabilities of all rows are to be kept, and {streamed[0]} is read as "
            "rows are drawn: leave data.shuffle_window unset, give it fewer rows (max_rows), or "
            "leave algorithm.reference_cache unset"
        )
    rows = [row for item in data.known_rows() for row in item.rows]
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
    """Evaluate the policy without gradients. Returns the mean loss (per token, row or unit, as the
    objective defines) and the objective's metrics, as `eval/...`.

    Collective. `kept` as in `Models.prepare`, `before_pass` as in `row_outputs`.
    """
    rows, _ = models.prepare(algorithm, items, version=0, kept=kept)
    objective = algorithm.objectives["policy"]
    of_rows = models.trainer.outputs(rows, objective.outputs, before_pass=before_pass)
    outputs: Outputs = {o: torch.cat([row[o] for row in of_rows]) for o in objective.outputs}
    batch = collate(rows, objective.weights(rows), "cpu", per=objective.per)
    loss = objective(outputs, batch)
    metrics = {f"eval/{name}": metric for name, metric in loss.metrics.items()}
    return {"eval/loss": Mean.of(loss.values), **metrics}
