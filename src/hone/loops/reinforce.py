"""A reinforcement learning run: built from its configuration, trained, exported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.configured import algorithm_of
from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.plan import Role, RunPlan
from hone.config.tree import RLConfig
from hone.data.prompts import PromptData
from hone.data.turns import TurnRenderer
from hone.distributed.processes import processes
from hone.distributed.team import Team
from hone.engine.backends import BACKENDS
from hone.families.shape import ModelShape
from hone.loops.engine_ranks import EngineRanks, LedEngine
from hone.loops.inputs import (
    facts_of,
    prompts_of,
    rates_to,
    require_same_images,
    share_of_workers,
    tools_of,
    transcripts_of,
    try_out,
    turns_of,
)
from hone.loops.launch import Launch, frozen_scorer, load_for_training
from hone.loops.loop import run_to_end
from hone.loops.rank0 import PoolWeights, Rank0Collector, Rank0Scorer
from hone.loops.recorder import Limits, recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Phase, Run
from hone.loops.scoring import Scoring, scoring
from hone.loops.untrained import Untrained, is_stalled, why_untrained
from hone.loops.workers import (
    ColocatedJudge,
    Pools,
    colocated_reward_model,
    engine_model,
    make_engine,
    reserved_gpus,
    thread_pools,
    with_reward_model,
)
from hone.models.adapters import adapt
from hone.models.decoder import alias_module
from hone.models.load import (
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
from hone.observe.pages import Pages
from hone.observe.peaks import device_peaks
from hone.rewards.scorer import Scorer, check_failure_rate
from hone.rollout.buffer import apply_masks
from hone.rollout.collector import Collector
from hone.rollout.eval_metrics import PassRule, pass_rule, summarise
from hone.rollout.judge import RewardModelScorer
from hone.rollout.metrics import rollout_metrics
from hone.rollout.runner import SampleScorer
from hone.rollout.shared_judge import SharedRewardModel
from hone.rollout.transcripts import Transcripts
from hone.trainer.frozen import WithoutAdapters
from hone.trainer.models import Models
from hone.trainer.scorer import RowScorer
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Engine, Group, Row, SamplingEngine
from hone.weights.broadcast import BroadcastSync
from hone.weights.parity import ParityGate
from hone.weights.sync import WeightSync

__all__ = ["MakePools", "Outcome", "RLRun", "build_run", "run"]

MakePools = Callable[[RunPlan], AbstractContextManager[Pools]]
"""Starts the engines and scorers that have their own devices. They end with the context."""
_log = logging.getLogger(__name__)


def run(
    cfg: RLConfig, make_pools: MakePools = thread_pools, *, pages: Pages | None = None
) -> Outcome:
    """Run `hone rl`. `run_to_end` says what is written."""

    def build(start: Launch) -> AbstractContextManager[RLRun]:
        trains_policy = start.roles.own == "policy"
        return (build_run if trains_policy else build_critic)(cfg, start, make_pools)

    return run_to_end(cfg, build, pages)


@dataclass(slots=True)
class Sampling:
    """The parts of a run that sample and send weights to engines."""

    data: PromptData
    scorer: Scorer | None
    """The scorer of this process. None if another process drives the engine."""
    engine: SamplingEngine | None
    """The engine of this process, its rank of a colocated engine, or the pool of engines. None in
    processes other than the first where that drives all engines."""
    collector: Rank0Collector
    weights: WeightSync | PoolWeights | None
    """None if the model that this process trains goes to no engine."""
    judge: ColocatedJudge | None = None
    """The reward model in this process. None where that has none."""


@dataclass(kw_only=True)
class RLRun(Run[Group]):
    """Run of `hone rl`: samples groups, scores them, trains the policy on them."""

    cfg: RLConfig
    sampling: Sampling
    _pass_rule: PassRule | str | None = None
    """Criterion by which samples pass in all evaluations of the run, or the reason why there is no
    pass@k. None before the first evaluation with a reward."""
    _untrained: list[Untrained] = field(default_factory=list[Untrained])
    """The latest consecutive steps without a trained token."""

    @property
    def collector(self) -> Rank0Collector:
        return self.sampling.collector

    @property
    def _sleeping_engine(self) -> Engine | None:
        """The colocated engine, if it frees the device for the trainer. None otherwise."""
        if not self.launch.plan.roles["engine"].sleeps:  # a remote engine never sleeps
            return None
        return cast("Engine | None", self.sampling.engine)

    def collect(self, step: int) -> list[Group]:
        engine = self._sleeping_engine
        # A checkpoint was written since the last push.
        if engine is not None and engine.needs_weights:
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
        if report.bytes:  # 0 bytes: engine and trainer share their weights in memory
            metrics["perf/sync_bytes_per_s"] = Last(report.bytes / max(report.seconds, 1e-9))
        return metrics

    @contextmanager
    def phase(self, name: Phase, step: int) -> Generator[None]:
        """Set up devices and engines for a phase.

        *train*: the trainer has the device; remote engines go on sampling. *push*: engines pause
        and receive weight version `step`. *evaluate*: no request is in flight. *save*: no request
        is in flight either, and the trainer has the device, so that `state` can be read.
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
        """Context manager in which the trainer has the device. With `enable_sleep` each side frees
        its memory before the other takes the device."""
        engine, judge = self._sleeping_engine, self.sampling.judge
        if engine is not None:
            self.recorder.memory.end_phase()
            engine.sleep()
            if judge is not None:
                judge.sleep()
        sleeps = self.launch.plan.roles[self.launch.roles.own].sleeps
        if sleeps:
            self.models.wake()
        yield
        if sleeps:
            self.models.sleep()
        if engine is not None:
            self.recorder.memory.end_phase()
            if judge is not None:
                judge.wake()
            engine.wake()

    @contextmanager
    def _reserve_cpu_core(self) -> Generator[None]:
        """Context manager in which an engine on a CPU leaves one core to the reward workers.

        OpenMP threads wait for each other by spinning. A thread that loses its core to a worker
        delays all others for a time slice, thousands of times in a step.
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
        return summarise(samples, cfg.eval, rule, has_env=cfg.env.is_set)

    def checkpoint_metric(self, evaluated: Mapping[str, float]) -> float | None:
        return evaluated.get(self.cfg.eval.metric)

    def record(
        self, step: int, batch: list[Group], rows: Sequence[Row], metrics: Metrics
    ) -> str | None:
        counts = self.collector.counts
        metrics |= rollout_metrics(batch, counts) | self.sampling.data.metrics()
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
        """Restore `state`. The trainer must have been restored before."""
        self.sampling.data.train.load_state_dict(state["data"])
        self.collector.load_state_dict(state["rollout"])
        match state.get("evaluation", {}).get("pass_rule"):
            case [[*functions], threshold]:
                self._pass_rule = PassRule(tuple(functions), threshold)
            case rule:
                self._pass_rule = rule


@contextmanager
def build_run(cfg: RLConfig, start: Launch, make_pools: MakePools) -> Generator[RLRun]:
    """Build a run and restore it from its checkpoint. All resources are released at the end.

    Cheap and likely mistakes come first: configuration, tokenizer and data are read, and reward
    functions tried, before any weight is loaded. `make_pools` is called by the first process only.
    """
    mesh, plan = start.mesh, start.plan
    tokenizer = _tokenizer(plan)
    tools = tools_of(facts_of(cfg.env, cfg.reward, start.everyone), cfg.env, tokenizer)
    data = prompts_of(cfg, tokenizer, tools=tools.schemas)
    turns = turns_of(cfg, tokenizer, tools=tools)
    with ExitStack() as stack:
        ranks = None
        if not plan.is_apart:
            size = plan.roles["engine"].axes.tensor
            ranks = EngineRanks.join(size, mesh, timeout_s=plan.timeout_s)
        made = _scoring(
            cfg, start, ranks, data=data, tokenizer=tokenizer, turns=turns, tool_format=tools.format
        )
        (scorer, plays), transcripts = stack.enter_context(made)
        pools = stack.enter_context(_pools(start, make_pools))

        load = partial(load_for_training, plan.policy.model, mesh, seed=cfg.run.seed)
        model = load()
        if mesh.is_first and plan.shape is not None and plan.shape.num_experts:
            _log.info(
                "no loss balances the load of experts in a run of reinforcement learning, whatever "
                "config.json says of one"
            )
        shape = plan.shape or ModelShape.from_config(model.config.to_dict())
        sampled = None if ranks is None else _colocated_model(start, model, ranks, load)
        if (lora := plan.lora) is not None and lora.rank:
            adapt(model, lora, seed=cfg.run.seed)
        algorithm = algorithm_of(cfg)
        models = _models(start, algorithm, policy=model, pools=pools)
        trainer = models.trainer
        groups = models.groups | (ranks.groups if ranks else frozenset())
        start.watch.follow(groups, start.roles.channels)
        if start.checkpoint is not None:
            restore(models, start.checkpoint.parts)
        random_state = capture_random_state()
        if plan.policy.sleeps:
            models.sleep()  # before the engine measures the free memory

        judge = _colocated_judge(start, groups, scores=transcripts is not None)
        remote = pools and pools.scorers.get("reward_model")
        scores = plays and with_reward_model(plays, transcripts, plan, remote or judge)
        sampling = stack.enter_context(
            _sampling(
                cfg,
                plan,
                trainer,
                sampled=sampled,
                ranks=ranks,
                turns=turns,
                tokenizer=tokenizer,
                data=data,
                scorer=scorer,
                scores=scores,
                judge=judge,
                pools=pools,
                critics=_critic_team(start),
                on_complete=_scoring_ahead(cfg, algorithm, models),
            )
        )
        peaks = None if plan.is_on_cpu else device_peaks(mesh.device, getattr(torch, plan.dtype))
        recorder = stack.enter_context(recording(start, Limits.of(plan, shape, peaks)))
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
        restore_random_state(random_state)  # undo the random draws of the engine's memory profiling
        yield built


@contextmanager
def build_critic(cfg: RLConfig, start: Launch, make_pools: MakePools) -> Generator[RLRun]:
    """Build the same run in a process that trains a remote critic. It samples nothing, receives the
    groups from the first process, and makes the same calls as all."""
    tokenizer, algorithm = _tokenizer(start.plan), algorithm_of(cfg)
    tools = tools_of(facts_of(cfg.env, cfg.reward, start.everyone), cfg.env, tokenizer)
    data = prompts_of(cfg, tokenizer, tools=tools.schemas)
    with ExitStack() as stack:
        stack.enter_context(_pools(start, make_pools))
        models = _models(start, algorithm, policy=None, pools=None)
        start.watch.follow(models.groups, start.roles.channels)
        if start.checkpoint is not None:
            restore(models, start.checkpoint.parts)
        built = RLRun(
            cfg=cfg,
            launch=start,
            algorithm=algorithm,
            models=models,
            sampling=Sampling(data, None, None, Rank0Collector(_critic_team(start), None), None),
            tokenizer=tokenizer,
            recorder=stack.enter_context(recording(start)),
        )
        if start.checkpoint is not None:
            built.load_state(start.checkpoint.parts)
        yield built


def _critic_team(start: Launch) -> list[Team]:
    """Team of the first process and the processes of a remote critic. Empty in all other
    processes."""
    roles = start.roles
    return [Team(roles.lead, is_first=roles.own == "policy")] if roles.lead is not None else []


def _tokenizer(plan: RunPlan) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises UserError if another model of the run has other tokens."""
    policy = plan.policy.model
    tokenizer = load_tokenizer(policy)
    for role in plan.roles.values():
        if role.model == policy or not (role.learns or role.scores_rows):
            continue
        key, path = role.path_key, role.model.path
        require_same_tokens(tokenizer, load_tokenizer(role.model, path_key=key), key, path)
        require_same_images(role, plan, tokenizer)
        policy_size, size = (load_config(x).vocab_size for x in (policy, role.model))
        require_room_for_tokens(tokenizer, policy_size, key, path, size)
    return tokenizer


@contextmanager
def _pools(start: Launch, make_pools: MakePools) -> Generator[Pools | None]:
    """The pools of the first process, and None in others. With Ray, trainers on all nodes reserve
    their GPUs first."""
    plan, cluster, everyone = start.plan, start.plan.cluster, start.everyone
    with ExitStack() as stack:
        if cluster.needs_ray and cluster.address is not None and everyone.size > 1:
            if processes().local_rank == 0 and not everyone.is_first:
                stack.enter_context(reserved_gpus(plan))
            everyone.gather(None)  # before any GPU is given to an engine
        needs_pools = (plan.is_apart or cluster.needs_ray) and everyone.is_first
        yield stack.enter_context(make_pools(plan)) if needs_pools else None


def _colocated_judge(
    start: Launch, groups: set[dist.ProcessGroup], *, scores: bool
) -> ColocatedJudge | None:
    """The result of `colocated_reward_model`. The watch follows the groups of a shared one besides
    `groups`."""
    judge = colocated_reward_model(start.plan, start.mesh, scores=scores)
    if isinstance(judge, SharedRewardModel):
        start.watch.follow(groups | judge.groups, start.roles.channels)
    return judge


@contextmanager
def _scoring(
    cfg: RLConfig,
    start: Launch,
    ranks: EngineRanks | None,
    *,
    data: PromptData,
    tokenizer: PreTrainedTokenizerBase,
    turns: TurnRenderer,
    tool_format: str | None,
) -> Generator[tuple[Scoring | tuple[None, None], Transcripts | None]]:
    """The scorer of this process, and what a reward model reads; None if another process drives
    its engine. The first process tries the reward functions."""
    is_first, plan = start.mesh.is_first, start.plan
    if not (is_first if ranks is None else ranks.is_first):
        yield (None, None), None
        return
    rewards = cfg.reward
    if ranks is not None:
        rewards = share_of_workers(rewards, processes_per_engine=ranks.tp.size)
    with scoring(
        cfg,
        rewards,
        plan.roles["engine"].model,
        tokenizer,
        tool_format=tool_format,
        max_model_len=plan.max_model_len,
    ) as made:
        transcripts = transcripts_of(plan, data.known_rows())
        if is_first:
            try_out(made.scorer, data.known_rows(), tokenizer, turns, transcripts)
        yield made, transcripts


@contextmanager
def _sampling(
    cfg: RLConfig,
    plan: RunPlan,
    trainer: Trainer,
    *,
    sampled: PreTrainedModel | None,
    ranks: EngineRanks | None,
    turns: TurnRenderer,
    tokenizer: PreTrainedTokenizerBase,
    data: PromptData,
    scorer: Scorer | None,
    scores: SampleScorer | None,
    judge: ColocatedJudge | None,
    pools: Pools | None,
    critics: Sequence[Team],
    on_complete: Callable[[Group], None] | None,
) -> Generator[Sampling]:
    """The engine, the collector and the weight sync of this process.

    A colocated engine, or a rank of one, uses the weights of `sampled`. Remote engines have their
    own weights, and the first process drives them. `scores` is `scorer` combined with the reward
    model if there is one; `judge` is what this process has of it. `critics` is the team of the
    remote critic where this process leads one.
    """
    mesh = trainer.mesh
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
        on_scored=rates_to(data.train),
    )
    if sampled is not None:
        assert ranks is not None
        owns_weights = plan.roles["engine"].aliases_weights_of is None
        engine = make_engine(
            plan,
            sampled,
            tokenizer,
            owns_weights=owns_weights,
            tensor_parallel=ranks.tp,
            device=mesh.device,
            name=f"engine {ranks.tp.replica}",
        )
        is_shared = isinstance(judge, SharedRewardModel)
        team = ranks.team(engine, {"meet": judge.meet} if is_shared else {})
        led = LedEngine(engine, team)
        local = None
        if scores is not None:
            meet = _meeting(scores, team) if is_shared else bool
            local = collector_of(led, scores, comm=ranks.comm, meet=meet)
        collector = Rank0Collector([*critics, team], local)
        yield Sampling(data, scorer, engine, collector, WeightSync(trainer, engine), judge)
        return
    engines = pools and pools.engines
    sync = BroadcastSync(
        trainer,
        mesh,
        engines,
        bucket_bytes=plan.cluster.update_weight_buffer_size,
        timeout_s=plan.cluster.engine_timeout_s,
        host=pools.host if pools else "",
    )
    with closing(sync):
        weights = PoolWeights(sync, engines, mesh)
        local = None
        if engines is not None and scores is not None:
            local = collector_of(engines, scores)
        collector = Rank0Collector([*critics, weights.team], local, weights)
        yield Sampling(data, scorer, engines, collector, weights, judge)


def _meeting(scores: SampleScorer, team: Team) -> Callable[[bool], bool]:
    """`Collector.meet` of a process whose `scores` ask a reward model that is shared. The ranks of
    its `team` come to meetings with it."""
    assert isinstance(scores, RewardModelScorer)

    def meet(is_waiting: bool) -> bool:
        scores.begin_passes()
        return team.call("meet", is_waiting)

    return meet


def _models(
    start: Launch,
    algorithm: Algorithm[Group],
    *,
    policy: PreTrainedModel | None,
    pools: Pools | None,
) -> Models:
    """The trainers and row scorers of this process, for all roles of the plan. `policy` is the
    model of the policy's trainer, in processes that have one."""
    plan, own = start.plan, start.roles.own
    learners: dict[str, Trainer] = {}
    scorers: dict[str, RowScorer] = {}
    for role in plan.roles.values():
        if role.learns and own in (role.name, role.shares_devices_of):
            learners[role.name] = _trainer(role, start, algorithm, policy)
        elif role.scores_rows and own == "policy":
            scorers[role.name] = _scorer(role, start, learners["policy"], pools)
    if own != "policy":
        return Models(learners, scorers, share=start.everyone.share)
    settings = plan.policy.trainer
    assert isinstance(settings, TrainerConfig)
    is_rounded = plan.dtype == "bfloat16" or plan.packs_rows
    format_ = "bfloat16" if is_rounded else "float32"
    gate = ParityGate(settings.parity, format_, exact=plan.policy.is_exact)
    return Models(learners, scorers, gate, start.everyone.share)


def _trainer(
    role: Role, start: Launch, algorithm: Algorithm[Group], policy: PreTrainedModel | None
) -> Trainer:
    """The trainer of a role. The critic trains on the policy's rows, in its own micro-batches."""
    plan, mesh, seed = start.plan, start.mesh, start.cfg.run.seed
    assert plan.batch is not None
    if role.name == "policy":
        assert policy is not None
        model = policy
    else:
        is_shared = mesh.world.size > 1
        model = load_value_model(role.model, device=mesh.device, seed=seed, deferred=is_shared)
    waits = algorithm.needs.learns_after.get(role.name, 0) * plan.batch.optimizer_steps_per_rollout
    return Trainer(
        model,
        role.trainer,
        algorithm.objectives[role.name],
        role=role.name,
        total_steps=plan.optimizer_steps - waits,
        seed=seed,
        dump_dir=start.dir,
        on_exhausted=start.smaller_start,
        temperature=role.temperature,
        exact=role.is_exact,
        replays_routes=role.replays_routes,
        mesh=mesh,
    )


def _scorer(role: Role, start: Launch, trainer: Trainer, pools: Pools | None) -> RowScorer:
    """The scorer of a role: remote copies of a frozen model, the policy without its adapters, or a
    frozen model colocated with the trainers."""
    if role.has_own_devices:
        batcher, own = trainer.batcher, role.trainer.max_tokens_per_forward
        if own is not None:
            batcher = replace(batcher, max_tokens_forward=own)
        plan_passes = partial(batcher.plan_scoring_passes, num_devices=role.num_workers)
        return Rank0Scorer(trainer.mesh, pools and pools.scorers[role.name], plan_passes)
    if role.aliases_weights_of is not None:
        return WithoutAdapters(trainer.policy.model, trainer)
    return frozen_scorer(role, start)


def _scoring_ahead(
    cfg: RLConfig, algorithm: Algorithm[Group], models: Models
) -> Callable[[Group], None] | None:
    """Callback that sends a finished group to the remote reference or teacher while sampling goes
    on. None without remote scorers."""
    scorers = {r: s for r, s in models.scorers.items() if isinstance(s, Rank0Scorer)}

    def begin(group: Group) -> None:
        apply_masks([group], cfg.rollout)  # as the collector does when the group is taken
        # The version only sets the ages of rows, which scorers do not use.
        rows = algorithm.rows([group], version=0)
        for role, scorer in scorers.items():
            scorer.begin_ahead(rows, algorithm.needs.scores[role])

    return begin if scorers else None


def _colocated_model(
    start: Launch,
    model: PreTrainedModel,
    ranks: EngineRanks,
    load: Callable[[], PreTrainedModel],
) -> PreTrainedModel:
    """The model whose weights a colocated engine uses.

    `model` itself, if the engine can read the policy's weights in place; otherwise this rank's
    shard, or weights in the engine's own format.
    """
    role, mesh = start.plan.roles["engine"], start.mesh
    if role.aliases_weights_of is not None:
        return alias_module(model)
    has_own_weights = BACKENDS[role.engine.backend].has_own_weights
    if mesh.world.size > 1 or has_own_weights or role.engine.packs_rows:
        return engine_model(role, mesh.device, ranks.tp, seed=start.cfg.run.seed)
    return load()  # The base weights. A sync delivers them with the adapters added.
