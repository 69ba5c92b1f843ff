"""A run of reinforcement learning: built from its configuration, trained, exported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm, Objective
from hone.algorithms.configured import algorithm_of
from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.cluster import ScorerName
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig
from hone.data.prompts import PromptData
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.engine.kv_cache import cache_dtype
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.loops.engine_ranks import EngineRanks
from hone.loops.inputs import (
    prompts_of,
    share_of_workers,
    transcripts_of,
    try_out,
    turns_of,
)
from hone.loops.launch import Launch, load_for_training
from hone.loops.loop import run_to_end
from hone.loops.rank0 import Controller, CriticLead, Lead, Rank0Collector, Rank0Scorer
from hone.loops.recorder import Limits, recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Phase, Run
from hone.loops.untrained import Untrained, is_stalled, why_untrained
from hone.loops.workers import Pools, judged, make_engine, reserved_gpus, thread_pools
from hone.models.adapters import adapt, is_adapted
from hone.models.decoder import alias_module
from hone.models.load import (
    blank_model,
    compute_dtype,
    load_config,
    load_value_model,
)
from hone.models.tokenizer import (
    decoder,
    load_tokenizer,
    require_room_for_tokens,
    require_same_tokens,
)
from hone.observe.metrics import Last, Metrics, to_scalars
from hone.observe.peaks import device_peaks
from hone.planner.smaller_start import smaller_start
from hone.rewards.scorer import Scorer, check_failure_rate
from hone.rollout.buffer import apply_masks
from hone.rollout.collector import Collector
from hone.rollout.evaluate import PassRule, pass_rule, summarise
from hone.rollout.metrics import rollout_metrics
from hone.rollout.runner import SampleScorer
from hone.trainer.models import Models
from hone.trainer.scorer import FrozenScorer, RowScorer, WithoutAdapters
from hone.trainer.trainer import Trainer
from hone.types import Engine, Group, Row, SamplingEngine
from hone.weights.broadcast import BroadcastSync
from hone.weights.parity import ParityGate
from hone.weights.sync import WeightSync

__all__ = ["MakePools", "Outcome", "RLRun", "build_run", "run"]

MakePools = Callable[[RLConfig], AbstractContextManager[Pools]]
"""Starts the engines and frozen models with weights of their own; they end with the context."""
_log = logging.getLogger(__name__)


def run(cfg: RLConfig, make_pools: MakePools = thread_pools) -> Outcome:
    """As `run_to_end`."""

    def build(start: Launch) -> AbstractContextManager[RLRun]:
        trains_policy = start.roles.own == "policy"
        return (build_run if trains_policy else build_critic)(cfg, start, make_pools)

    return run_to_end(cfg, build)


@dataclass(slots=True)
class Sampling:
    """The side of a run that samples."""

    data: PromptData
    scorer: Scorer | None
    """Of this process; None where another one drives the engine."""
    engine: SamplingEngine | None
    """Of this process, or its rank of one; where the first drives all engines, None in others."""
    collector: Rank0Collector
    weights: WeightSync | Controller | None
    """None where what this process trains goes to no engine."""


@dataclass(kw_only=True)
class RLRun(Run[Group]):
    """Samples groups, scores them, trains the policy on them."""

    cfg: RLConfig
    sampling: Sampling
    _pass_rule: PassRule | str | None = None
    """By what samples pass in all evaluations of the run, or why there is no pass@k; None before
    the first one that has a reward."""
    _untrained: list[Untrained] = field(default_factory=list[Untrained])
    """The last steps in a row without a trained token."""

    @property
    def collector(self) -> Rank0Collector:
        return self.sampling.collector

    @property
    def _sleeping_engine(self) -> Engine | None:
        """The engine of this process where it leaves the device to the trainer."""
        if not self.cfg.engine.enable_sleep:  # a rule keeps it from engines with their own devices
            return None
        return cast("Engine", self.sampling.engine)

    def collect(self, step: int) -> list[Group]:
        engine = self._sleeping_engine
        if engine is not None and engine.needs_weights:  # since a checkpoint was written
            self.push(step - 1)
        with self.span("generate"), self._reserve_cpu_core():
            groups = self.collector.collect(step, self.recorder.progress)
            self.recorder.sampled(step, groups)
            samples = [sample for group in groups for sample in group.samples]
            check_failure_rate(samples, self.cfg.reward.max_failure_rate)
        return groups

    def push(self, step: int) -> Metrics:
        if self.sampling.weights is None:
            return {}
        with self.span("sync"):
            report = self.sampling.weights.push(version=step)
        metrics: Metrics = {
            "time/sync/proof_s": Last(report.seconds),
            "perf/sync_bytes": Last(report.bytes),
        }
        if report.bytes:  # else engine and trainer have one memory
            metrics["perf/sync_bytes_per_s"] = Last(report.bytes / max(report.seconds, 1e-9))
        return metrics

    @contextmanager
    def phase(self, name: Phase, step: int) -> Generator[None]:
        """*train*: the trainer has the device; engines with weights of their own go on sampling.
        *push*: engines hold still and receive weight version `step`. *evaluate*: nothing is in
        flight. *save*: nor is it here, and the trainer has the device, so that `state` can be read.
        """
        match name:
            case "train":
                with self.collector.background(), self._trainer_on_device():
                    yield
            case "push":
                with self.collector.pause(step):
                    yield
            case "evaluate":
                with self.collector.idle():
                    yield
            case "save":
                with self.collector.idle(), self._trainer_on_device():
                    yield

    @contextmanager
    def _trainer_on_device(self) -> Generator[None]:
        """With `enable_sleep`, who takes the device finds the memory of who leaves it free."""
        engine = self._sleeping_engine
        if engine is not None:
            self.recorder.memory.end_phase()
            engine.sleep()
        if self.cfg.trainer.enable_sleep:
            self.models.wake()
        yield
        if self.cfg.trainer.enable_sleep:
            self.models.sleep()
        if engine is not None:
            self.recorder.memory.end_phase()
            engine.wake()

    @contextmanager
    def _reserve_cpu_core(self) -> Generator[None]:
        """Inside, a CPU that generates leaves one core to reward workers.

        OpenMP threads wait for each other by spinning. One that loses its core to a worker holds up
        all others for a time slice, thousands of times in a step.
        """
        scorer, num_threads = self.sampling.scorer, torch.get_num_threads()
        if self.launch.mesh.device.type != "cpu" or scorer is None or not scorer.uses_workers:
            yield
            return
        torch.set_num_threads(max(num_threads - 1, 1))
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def evaluate(self, step: int) -> Metrics:
        cfg, prompts = self.cfg, self.sampling.data.eval
        with self._reserve_cpu_core():
            stop = self.interrupt.has_come
            samples = self.collector.evaluate(prompts, cfg.eval, should_stop=stop)
        if samples is None:
            return {}
        check_failure_rate(samples, cfg.reward.max_failure_rate)
        self.recorder.evaluated(step, samples)
        rule = self._pass_rule or pass_rule(samples, cfg.eval, cfg.reward)
        if self._pass_rule is None and any(sample.valid for sample in samples):
            self._pass_rule = rule
            if isinstance(rule, str):
                _log.info("evaluations do not report pass@k: %s", rule)
        return summarise(samples, cfg.eval, rule, has_env=cfg.env.path is not None)

    def rank(self, evaluated: Mapping[str, float]) -> float | None:
        return evaluated.get(self.cfg.eval.metric)

    def record(
        self, step: int, batch: list[Group], rows: Sequence[Row], metrics: Metrics
    ) -> str | None:
        counts = self.collector.counts
        metrics |= rollout_metrics(batch, counts)
        correction = to_scalars(metrics).get("off_policy/correction")
        why = why_untrained(self.cfg, batch, rows, counts, correction=correction)
        self._untrained = [*self._untrained, why] if why else []
        metrics["train/untrained_steps"] = Last(len(self._untrained))
        cause = why and why.cause
        self.recorder.record(step, metrics, groups=batch, rows=rows, why_untrained=cause)
        if not is_stalled(self._untrained):
            return None
        return (
            f"{len(self._untrained)} updates in a row had no token to train, and the run ends "
            f"after step {step}, which is saved. {cause}"
        )

    def state(self) -> dict[str, Any]:
        rule = self._pass_rule
        plain = [list(rule.functions), rule.threshold] if isinstance(rule, PassRule) else rule
        return super().state() | {
            "data": self.sampling.data.train.state_dict(),
            "rollout": self.collector.state_dict(),
            "evaluation": {"pass_rule": plain},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; the trainer has been restored before."""
        self.sampling.data.train.load_state_dict(state["data"])
        self.collector.load_state_dict(state["rollout"])
        match state.get("evaluation", {}).get("pass_rule"):
            case [[*functions], threshold]:
                self._pass_rule = PassRule(tuple(functions), threshold)
            case rule:
                self._pass_rule = rule


@contextmanager
def build_run(cfg: RLConfig, start: Launch, make_pools: MakePools) -> Generator[RLRun]:
    """Build a run, restored from its checkpoint; release what it holds at the end.

    Cheap and likely mistakes come first: configuration, tokenizer and data are read, and reward
    functions tried, before any weight is loaded. `make_pools` is called by the first process.
    """
    mesh, plan = start.mesh, _plan(cfg, start)
    tokenizer = _tokenizer(cfg)
    data = prompts_of(cfg, tokenizer)
    with ExitStack() as stack:
        ranks = None
        if not plan.is_apart:
            size, timeout_s = cfg.engine.tensor_parallel_size, cfg.trainer.parallel.timeout_s
            ranks = EngineRanks.join(size, mesh, timeout_s=timeout_s)
        scoring = _scoring(cfg, mesh, ranks, data=data, tokenizer=tokenizer)
        scorer = stack.enter_context(scoring)
        transcripts = transcripts_of(cfg, data.all_rows()) if scorer is not None else None
        pools = stack.enter_context(_pools(cfg, plan, start, make_pools))

        load = partial(load_for_training, cfg.model, mesh, seed=cfg.run.seed)
        model = load()
        if mesh.is_first and plan.shape is not None and plan.shape.num_experts:
            _log.info(
                "no loss balances the load of experts in a run of reinforcement learning, whatever "
                "config.json says of one"
            )
        limits = _limits(cfg, plan, model, mesh)
        sampled = None if ranks is None else _sampled_model(cfg, model, mesh, ranks, load)
        if cfg.model.lora.rank:
            adapt(model, cfg.model.lora, seed=cfg.run.seed)
        algorithm = algorithm_of(cfg)
        models = _models(cfg, plan, start, model=model, algorithm=algorithm, load=load, pools=pools)
        trainer = models.trainer
        groups = models.groups | (ranks.groups if ranks else frozenset())
        start.watch.follow(groups, start.roles.channels)
        if start.checkpoint is not None:
            restore(models, start.checkpoint.parts)
        random_state = capture_random_state()
        if cfg.trainer.enable_sleep:
            models.sleep()  # before the engine looks how much memory there is

        judges = pools and pools.scorers.get("reward_model")
        scores = scorer and judged(scorer, transcripts, cfg, mesh.device, judges)
        sampling = stack.enter_context(
            _sampling(
                cfg,
                plan,
                trainer,
                sampled=sampled,
                ranks=ranks,
                tokenizer=tokenizer,
                data=data,
                scorer=scorer,
                scores=scores,
                pools=pools,
                lead_critic=start.roles.lead and partial(CriticLead, start.roles.lead),
                on_complete=_scoring_ahead(cfg, algorithm, models),
            )
        )
        recorder = stack.enter_context(recording(start, limits, plan))
        if pools is not None:
            pools.report_to(recorder.event)
            recorder.engine_lanes = pools.engines.take_busy
        if scorer is not None:
            scorer.on_wait = recorder.waiting
        built = RLRun(
            cfg=cfg,
            launch=start,
            algorithm=algorithm,
            models=models,
            sampling=sampling,
            tokenizer=tokenizer,
            recorder=recorder,
        )
        if start.checkpoint is not None:
            built.load_state(start.checkpoint.parts)
        start.save_config()
        restore_random_state(random_state)  # whatever the engine has drawn to profile itself
        yield built


@contextmanager
def build_critic(cfg: RLConfig, start: Launch, make_pools: MakePools) -> Generator[RLRun]:
    """The same run in a process that trains a critic with devices of its own: it samples nothing,
    hears from the first process what that has collected, and makes the same calls as all."""
    plan, tokenizer, algorithm = _plan(cfg, start), _tokenizer(cfg), algorithm_of(cfg)
    data, lead = prompts_of(cfg, tokenizer), start.roles.lead
    assert lead is not None
    with ExitStack() as stack:
        stack.enter_context(_pools(cfg, plan, start, make_pools))
        critic = _critic(cfg, plan, start, algorithm.objectives["critic"])
        models = Models({"critic": critic}, share=start.everyone.share)
        start.watch.follow(models.groups, start.roles.channels)
        if start.checkpoint is not None:
            restore(models, start.checkpoint.parts)
        collector = Rank0Collector(CriticLead(lead), None)
        engine = cfg.engine.model_copy(update={"enable_sleep": False})  # there is none here
        built = RLRun(
            cfg=cfg.model_copy(update={"trainer": cfg.critic_trainer, "engine": engine}),
            launch=start,
            algorithm=algorithm,
            models=models,
            sampling=Sampling(data, None, None, collector, None),
            tokenizer=tokenizer,
            recorder=stack.enter_context(recording(start, plan=plan)),
        )
        if start.checkpoint is not None:
            built.load_state(start.checkpoint.parts)
        yield built


def _plan(cfg: RLConfig, start: Launch) -> RunPlan:
    devices = Devices(kind="cpu" if start.mesh.device.type == "cpu" else "cuda")
    facts = ModelFacts.read(cfg.model.path)
    return resolve(cfg, facts, devices, world_size=start.roles.num_trainers)


def _tokenizer(cfg: RLConfig) -> PreTrainedTokenizerBase:
    """Of the policy, whose tokens all models have. Raises UserError where one has others."""
    tokenizer = load_tokenizer(cfg.model)
    beside = {"teacher.path": cfg.teacher_model, "critic.path": cfg.critic_model}
    for key, other in beside.items():
        if other is not None:
            its = load_tokenizer(other, path_key=key)
            require_same_tokens(tokenizer, its, key, other.path)
            policy_size, size = (load_config(x).vocab_size for x in (cfg.model, other))
            require_room_for_tokens(tokenizer, policy_size, key, other.path, size)
    return tokenizer


@contextmanager
def _pools(
    cfg: RLConfig, plan: RunPlan, start: Launch, make_pools: MakePools
) -> Generator[Pools | None]:
    """What the first process has, once the trainers of all nodes have their GPUs for themselves."""
    cluster, everyone = cfg.cluster, start.everyone
    with ExitStack() as stack:
        if cluster.needs_ray and cluster.address is not None and everyone.size > 1:
            if processes().local_rank == 0 and not everyone.is_first:
                stack.enter_context(reserved_gpus(cfg))
            everyone.gather(None)  # before any GPU is given to an engine
        needs_pools = (plan.is_apart or cluster.needs_ray) and everyone.is_first
        yield stack.enter_context(make_pools(cfg)) if needs_pools else None


@contextmanager
def _scoring(
    cfg: RLConfig,
    mesh: Mesh,
    ranks: EngineRanks | None,
    *,
    data: PromptData,
    tokenizer: PreTrainedTokenizerBase,
) -> Generator[Scorer | None]:
    """The scorer of this process, its functions tried by the first one; of processes for which
    another one drives the engine, None."""
    if not (mesh.is_first if ranks is None else ranks.is_first):
        yield None
        return
    rewards = cfg.reward
    if ranks is not None:
        rewards = share_of_workers(rewards, processes_per_engine=ranks.tp.size)
    limit = cfg.rollout.max_completion_tokens
    with Scorer(rewards, max_completion_tokens=limit, env=cfg.env) as scorer:
        if mesh.is_first:
            try_out(scorer, data.all_rows(), tokenizer, turns_of(cfg, tokenizer))
        yield scorer


@contextmanager
def _sampling(
    cfg: RLConfig,
    plan: RunPlan,
    trainer: Trainer,
    *,
    sampled: PreTrainedModel | None,
    ranks: EngineRanks | None,
    tokenizer: PreTrainedTokenizerBase,
    data: PromptData,
    scorer: Scorer | None,
    scores: SampleScorer | None,
    pools: Pools | None,
    lead_critic: Callable[[Lead], Lead] | None,
    on_complete: Callable[[Group], None] | None,
) -> Generator[Sampling]:
    """Engine, collector and the way of weights: with an engine, or a rank of one, over `sampled`
    in each process, or with engines that have weights of their own, which the first process drives.
    `scores` is `scorer`, with what else scores. `lead_critic` makes a lead one of the critic's
    processes too, where this is the first and there are some."""
    mesh = trainer.mesh
    lead_all = lead_critic or (lambda lead: lead)
    turns = turns_of(cfg, tokenizer)
    collector_of = partial(
        Collector,
        prompts=data.train,
        rollout_cfg=cfg.rollout,
        pipeline_cfg=cfg.pipeline,
        decode=decoder(tokenizer, turns.ends),
        render=turns,
        seed=cfg.run.seed,
        max_failure_rate=cfg.reward.max_failure_rate,
        on_complete=on_complete,
    )
    if sampled is not None:
        assert ranks is not None
        owns_weights = plan.roles["engine"].aliases_weights_of is None
        engine = make_engine(
            cfg,
            sampled,
            tokenizer,
            owns_weights=owns_weights,
            tensor_parallel=ranks.tp,
            device=mesh.device,
            name=f"engine {ranks.tp.replica}",
        )
        lead = ranks.lead(engine)
        own = None if scores is None else collector_of(lead.engine, scores, comm=ranks.comm)
        weights = WeightSync(trainer, engine)
        yield Sampling(data, scorer, engine, Rank0Collector(lead_all(lead), own), weights)
        return
    engines = pools and pools.engines
    weights = BroadcastSync(
        trainer,
        mesh,
        engines,
        bucket_bytes=cfg.cluster.update_weight_buffer_size,
        timeout_s=cfg.cluster.engine_timeout_s,
        host=pools.host if pools else "",
    )
    with closing(weights):
        controller = Controller(mesh, engines, weights)
        own = collector_of(engines, scores) if engines is not None and scores is not None else None
        collector = Rank0Collector(lead_all(controller), own)
        yield Sampling(data, scorer, engines, collector, controller)


def _models(
    cfg: RLConfig,
    plan: RunPlan,
    start: Launch,
    *,
    model: PreTrainedModel,
    algorithm: Algorithm[Group],
    load: Callable[[], PreTrainedModel],
    pools: Pools | None,
) -> Models:
    """The trainer of `model`, and what scores: reference and teacher, with devices of their own or
    beside the trainers, or where adapters are trained the policy without them as the reference."""
    temperature, exact = cfg.rollout.temperature, cfg.model.exact
    assert plan.batch is not None
    waits = algorithm.needs.learns_after.get("policy", 0) * plan.batch.optimizer_steps_per_rollout
    mesh, frozen = start.mesh, load() if plan.trainers_hold_reference else None
    trainer = Trainer(
        model,
        cfg.trainer,
        algorithm.objectives["policy"],
        total_steps=plan.optimizer_steps - waits,
        seed=cfg.run.seed,
        dump_dir=start.dir,
        on_exhausted=partial(smaller_start, plan),
        temperature=temperature,
        exact=exact,
        replays_routes=cfg.algorithm.routing_replay,
        mesh=mesh,
    )
    scorers: dict[str, RowScorer] = {}
    for role, number in cfg.cluster.num_scorers.items():
        if role != "reward_model":  # which scores samples as they end
            scorers[role] = _scorer_apart(role, number, cfg, trainer, pools)
    if frozen is not None:
        scorers["reference"] = FrozenScorer(
            frozen,
            cfg.trainer,
            temperature=temperature,
            exact=exact,
            mesh=mesh,
            dump_dir=start.dir,
            on_exhausted=partial(smaller_start, plan),
        )
    elif is_adapted(model):  # a rule keeps it from devices of its own
        scorers["reference"] = WithoutAdapters(model, trainer)
    if cfg.teacher_model is not None and "teacher" not in scorers:
        teacher = load_for_training(cfg.teacher_model, mesh, seed=cfg.run.seed)
        scorers["teacher"] = FrozenScorer(
            teacher,
            cfg.teacher_trainer,
            temperature=temperature,
            top_k=cfg.teacher.top_k,
            mesh=mesh,
            role="teacher",
            dump_dir=start.dir,
            on_exhausted=partial(smaller_start, plan),
        )
    is_half = compute_dtype(cfg.model, mesh.device).itemsize == 2
    is_rounded = is_half or cfg.engine.packs_rows
    gate = ParityGate(cfg.trainer.parity, "bfloat16" if is_rounded else "float32", exact=exact)
    learners = {"policy": trainer}
    if "critic" in algorithm.objectives and not cfg.cluster.num_critics:
        learners["critic"] = _critic(cfg, plan, start, algorithm.objectives["critic"])
    return Models(learners, scorers, gate, start.everyone.share)


def _scorer_apart(
    role: ScorerName, number: int, cfg: RLConfig, trainer: Trainer, pools: Pools | None
) -> Rank0Scorer:
    """Copies of a frozen model with devices of their own, for the rows of a step."""
    batcher = trainer.batcher
    if role == "teacher" and cfg.teacher.max_tokens_per_forward is not None:
        batcher = replace(batcher, max_tokens_forward=cfg.teacher.max_tokens_per_forward)
    plan_passes = partial(batcher.plan_scoring_passes, num_devices=number)
    return Rank0Scorer(trainer.mesh, pools and pools.scorers[role], plan_passes)


def _scoring_ahead(
    cfg: RLConfig, algorithm: Algorithm[Group], models: Models
) -> Callable[[Group], None] | None:
    """What begins to score a group by models with devices of their own as soon as it is complete,
    so that trainers seldom wait for them; None without such models."""
    scorers = {r: s for r, s in models.scorers.items() if isinstance(s, Rank0Scorer)}

    def begin(group: Group) -> None:
        apply_masks([group], cfg.rollout)  # as the collector does when the group is taken
        rows = algorithm.rows([group], version=0)  # which ages alone depend on
        for role, scorer in scorers.items():
            scorer.begin_ahead(rows, algorithm.needs.scores[role])

    return begin if scorers else None


def _critic(cfg: RLConfig, plan: RunPlan, start: Launch, objective: Objective) -> Trainer:
    """The critic learns of the rows of the policy, in micro-batches of its own."""
    model = cfg.critic_model or cfg.model
    mesh, seed = start.mesh, cfg.run.seed
    return Trainer(
        load_value_model(model, device=mesh.device, seed=seed, deferred=mesh.world.size > 1),
        cfg.critic_trainer,
        objective,
        role="critic",
        total_steps=plan.optimizer_steps,
        seed=seed,
        dump_dir=start.dir,
        on_exhausted=partial(smaller_start, plan),
        mesh=mesh,
    )


def _sampled_model(
    cfg: RLConfig,
    model: PreTrainedModel,
    mesh: Mesh,
    ranks: EngineRanks,
    load: Callable[[], PreTrainedModel],
) -> PreTrainedModel:
    """What an engine beside the trainer samples with: `model` itself where that is whole and
    becomes the policy as it is; this rank's part of several, or weights in a form of its own."""
    if cfg.engine.backend == "vllm":
        return blank_model(cfg.model, device="meta")
    packs_rows = cfg.engine.packs_rows
    if mesh.world.size > 1 or packs_rows:  # the first sync fills it, before anything is sampled
        return blank_model(cfg.model, device=mesh.device, tp=ranks.tp, packs_rows=packs_rows)
    return load() if cfg.model.lora.rank else alias_module(model)


def _limits(cfg: RLConfig, plan: RunPlan, model: PreTrainedModel, mesh: Mesh) -> Limits:
    batch, engine, kl = plan.batch, plan.roles["engine"], cfg.algorithm.kl
    dtype = compute_dtype(cfg.model, mesh.device)
    assert batch is not None
    beside = {name for name, role in plan.roles.items() if role.shares_devices_of == "policy"}
    return Limits(
        shape=ModelShape.from_config(model.config.to_dict()),
        peaks=None if plan.is_on_cpu else device_peaks(mesh.device, dtype),
        num_devices=mesh.world.size,
        num_engines=engine.num_workers,
        devices_per_engine=engine.axes.world,
        overlaps=cfg.pipeline.samples_ahead,
        bytes_per_value=plan.num_bytes,
        kv_bytes_per_value=cache_dtype(cfg.engine, dtype).itemsize,
        packs_rows=plan.packs_rows,
        shares_prefixes=mesh.context.size == 1 and not cfg.model.exact,
        max_num_seqs=cfg.engine.max_num_seqs,
        # Frozen weights, beside which adapters are trained, get no gradients. Passes of a teacher
        # are not counted, which may be of any size.
        passes=(2.0 if cfg.model.lora.rank else 3.0) * batch.num_epochs
        + plan.scores_policy
        + (kl.coef > 0 and not cfg.cluster.num_references)
        + ("critic" in beside and 1 + 3.0 * batch.num_epochs),
    )
