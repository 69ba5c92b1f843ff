"""The objects of a reinforcement run, chosen and joined before the loop starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.grpo import GRPO
from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.model import ModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.reward import RewardConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.data.prompts import PromptData, load_prompts
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.kv_cache import cache_dtype
from hone.families.shape import ModelShape
from hone.loops.launch import Launch, load_for_training
from hone.loops.rank0 import Controller
from hone.loops.recorder import Limits, Recorder, alarms_for
from hone.loops.remote import (
    Collects,
    MakePools,
    Pools,
    Pushes,
    Sampling,
    reference_apart,
    sampling_apart,
    weights_to,
)
from hone.loops.resuming import restore
from hone.models.adapters import adapt, is_adapted
from hone.models.decoder import alias_module
from hone.models.load import (
    blank_model,
    compute_dtype,
    load_config,
    load_model,
)
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
from hone.observe.alarms import Alarms
from hone.observe.console import Console
from hone.observe.disk import DiskError
from hone.observe.loggers import RunLog
from hone.observe.metrics import Metrics
from hone.observe.peaks import device_peaks
from hone.observe.spans import Spans
from hone.rewards.pool import default_num_workers
from hone.rewards.scorer import FailureRateError, Scorer, check_failure_rate
from hone.rollout.buffer import Progress
from hone.rollout.collector import Collector, Comm, SingleProcess
from hone.rollout.evaluate import PassRule, evaluate, pass_rule, summarise
from hone.rollout.requests import Decode
from hone.rollout.vllm import VLLMEngine
from hone.trainer.models import Models
from hone.trainer.scorer import FrozenScorer, RowScorer, WithoutAdapters
from hone.trainer.trainer import Trainer
from hone.types import Engine, Sample, SamplingEngine
from hone.weights.sync import WeightSync

__all__ = [
    "InferenceParts",
    "RLParts",
    "assemble",
    "assemble_inference",
    "decoder",
    "encoder",
    "recording",
    "share_of_workers",
]


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RLParts:
    """What the loops work with. All processes have the same parts, but for the engine."""

    cfg: RLConfig
    launch: Launch
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    scorer: Scorer | None
    engine: SamplingEngine | None
    """Of this process; engines with devices of their own, and the scorer then, are the first
    one's."""
    algorithm: Algorithm
    models: Models
    collector: Collects
    weights: Pushes
    recorder: Recorder
    decode: Decode
    controller: Controller | None = None
    """Set where engines have weights of their own and the first process drives them."""
    pass_rule: PassRule | str | None = None
    """By what samples pass in all evaluations of the run, or why there is no pass@k; None before
    the first one that has a reward."""

    @property
    def trainer(self) -> Trainer:
        """Of the policy."""
        return self.models.trainer

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, by part."""
        tensors, metadata = self.trainer.state_dict()
        return {
            "trainer": tensors,
            "trainer_metadata": metadata,
            "data": self.data.train.state_dict(),
            "rollout": self.collector.state_dict(),
            "random": capture_random_state(),
            "evaluation": {"pass_rule": _plain_rule(self.pass_rule)},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; the trainer has been restored before."""
        self.data.train.load_state_dict(state["data"])
        self.collector.load_state_dict(state["rollout"])
        match state.get("evaluation", {}).get("pass_rule"):
            case [[*functions], threshold]:
                self.pass_rule = PassRule(tuple(functions), threshold)
            case rule:
                self.pass_rule = rule

    @contextmanager
    def phase(self, name: Literal["train", "push", "save"], step: int) -> Generator[None]:
        """Prepare collector, trainer and engine for a part of `step`, and for the next at its end.

        *train*: the trainer has the device; engines with weights of their own go on sampling.
        *push*: engines hold still and receive weight version `step`. *save*: nothing is in flight,
        and the trainer has the device, so that `state` can be read.
        """
        match name:
            case "train":
                with self.collector.background(), self._trainer_on_device():
                    yield
            case "push":
                with self.collector.pause(step):
                    yield
            case "save":
                with self.collector.idle(), self._trainer_on_device():
                    yield

    @contextmanager
    def _trainer_on_device(self) -> Generator[None]:
        """With `enable_sleep`, who takes the device finds the memory of who leaves it free."""
        engine = cast("Engine", self.engine) if self.cfg.engine.enable_sleep else None
        if engine is not None:  # a rule keeps it from engines with devices of their own
            engine.sleep()
        if self.cfg.trainer.enable_sleep:
            self.trainer.wake()
        yield
        if self.cfg.trainer.enable_sleep:
            self.trainer.sleep()
        if engine is not None:
            engine.wake()

    def evaluate(self, *, should_stop: Callable[[], bool]) -> Metrics | None:
        """Held-out prompts, sampled and scored, as metrics. Nothing else may be in flight.

        None where `should_stop`, which is asked between steps of the engine, has become true in any
        process that samples. Raises FailureRateError where too many cannot be scored.
        """
        with self.recorder.spans.span("eval"), self.core_for_rewards():
            if self.controller is None:
                samples = self._evaluated(should_stop, self.launch.mesh)
            else:
                samples = self.controller.broadcast_from_rank0(
                    partial(self._evaluated, should_stop, SingleProcess())
                )
        if samples is None:
            return None
        check_failure_rate(samples, self.cfg.reward.max_failure_rate)
        rule = self.pass_rule or pass_rule(samples, self.cfg.eval, self.cfg.reward)
        if self.pass_rule is None and any(sample.valid for sample in samples):
            self.pass_rule = rule
            if isinstance(rule, str):
                _log.info("evaluations have no pass@k: %s", rule)
        return summarise(samples, self.cfg.eval, rule)

    def _evaluated(
        self, should_stop: Callable[[], bool], comm: Comm, progress: Progress | None = None
    ) -> list[Sample] | None:
        assert self.engine is not None
        assert self.scorer is not None
        return evaluate(
            self.data.eval,
            engine=self.engine,
            scorer=self.scorer,
            cfg=self.cfg.eval,
            decode=self.decode,
            seed=self.cfg.run.seed,
            comm=comm,
            max_failure_rate=self.cfg.reward.max_failure_rate,
            progress=progress,
            should_stop=should_stop,
        )

    def core_for_rewards(self) -> AbstractContextManager[None]:
        """Inside, a CPU that generates leaves one core to reward workers.

        OpenMP threads wait for each other by spinning. One that loses its core to a worker holds up
        all others for a time slice, thousands of times in a step.
        """
        on_cpu = self.launch.device.type == "cpu"
        uses_workers = self.scorer is not None and self.scorer.uses_workers
        return _one_thread_less() if on_cpu and uses_workers else nullcontext()


def _plain_rule(rule: PassRule | str | None) -> Any:
    return [list(rule.functions), rule.threshold] if isinstance(rule, PassRule) else rule


@contextmanager
def _one_thread_less() -> Generator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(num_threads - 1, 1))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Token ids to text without special tokens, exactly as the tokens spell it."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    return decode


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Text to token ids, as a completion has them."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def planned(cfg: RLConfig, mesh: Mesh) -> RunPlan:
    """What has been decided for the processes that run."""
    devices = Devices(kind="cpu" if mesh.device.type == "cpu" else "cuda")
    return resolve(cfg, ModelFacts.read(cfg.model.path), devices, world_size=mesh.world.size)


def _limits(plan: RunPlan, model: PreTrainedModel, mesh: Mesh) -> Limits:
    cfg, batch, engine = plan.config, plan.batch, plan.roles["engine"]
    assert isinstance(cfg, RLConfig)
    assert batch is not None
    kl, dtype = cfg.algorithm.kl, compute_dtype(cfg.model, mesh.device)
    puts_kl_in_rewards = kl.coef > 0 and kl.placement == "reward"
    scores_policy = batch.optimizer_steps_per_rollout > 1 or puts_kl_in_rewards
    return Limits(
        shape=ModelShape.from_config(model.config.to_dict()),
        peaks=None if plan.is_on_cpu else device_peaks(mesh.device, dtype),
        num_devices=mesh.world.size,
        num_engines=engine.num_workers,
        devices_per_engine=engine.axes.world,
        overlaps=cfg.pipeline.enabled,
        bytes_per_value=plan.num_bytes,
        kv_bytes_per_value=cache_dtype(cfg.engine, dtype).itemsize,
        max_num_seqs=cfg.engine.max_num_seqs,
        # Frozen weights, beside which adapters are trained, get no gradients.
        passes=(2.0 if cfg.model.lora.rank else 3.0) * batch.num_epochs
        + scores_policy
        + (kl.coef > 0 and not cfg.cluster.num_references),
    )


def make_engine(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    owns_weights: bool,
    tensor_parallel: TensorParallel | None = None,
    device: torch.device | None = None,
) -> Engine:
    """The engine of `engine.backend` over `model`, which with `tensor_parallel` is this rank's.

    vLLM has weights of its own: for it the model is whole in any case, may lie on meta, and
    `device` says where vLLM runs."""
    if cfg.engine.backend == "vllm":
        return VLLMEngine(
            model,
            cfg.engine,
            eos_token_ids=eos_token_ids(model, tokenizer),
            tokenizer=tokenizer,
            device=device,
            tensor_parallel=tensor_parallel,
        )
    return EmbeddedEngine(
        model,
        cfg.engine,
        eos_token_ids=eos_token_ids(model, tokenizer),
        tokenizer=tokenizer,
        max_model_len=cfg.engine.max_model_len or context_length(model.config),
        owns_weights=owns_weights,
        tensor_parallel=tensor_parallel,
        exact=cfg.model.exact,
    )


def _room_for_prompt(cfg: ModelConfig, max_model_len: int | None, completion_tokens: int) -> int:
    """Longest prompt that leaves the completion its full length."""
    return (max_model_len or context_length(load_config(cfg))) - completion_tokens


def _longest_completion(cfg: RLConfig) -> int:
    """Of training and, where the run evaluates, of evaluation: both must fit behind a prompt."""
    measured = cfg.eval.max_completion_tokens if cfg.eval.is_scheduled else 0
    return max(cfg.rollout.max_completion_tokens, measured)


def share_of_workers(cfg: RewardConfig) -> RewardConfig:
    """The reward workers of one process: its part of those of the host."""
    num_workers = (cfg.num_workers or default_num_workers()) // processes().local_world_size
    return cfg.model_copy(update={"num_workers": max(num_workers, 1)})


@contextmanager
def recording(
    cfg: RLConfig | SFTConfig, begin: Launch, alarms: Alarms, limits: Limits | None = None
) -> Generator[Recorder]:
    """The recorder of this process; the first one's writes into the run folder, also the samples
    of a step that fails."""
    recorder = Recorder(begin.mesh, Spans(on_begin=begin.watch.enter), alarms, limits=limits)
    with ExitStack() as stack:
        if begin.mesh.is_first:
            recorder.log = stack.enter_context(
                RunLog(
                    begin.dir,
                    cfg.log,
                    resume_step=begin.resume_step,
                    config=cfg.model_dump(mode="json"),
                )
            )
            is_rl = isinstance(cfg, RLConfig)
            recorder.console = stack.enter_context(
                Console(
                    cfg.run.steps,
                    done=begin.steps_done,
                    runs_ahead=is_rl and cfg.pipeline.enabled,
                    has_reference=is_rl and cfg.algorithm.kl.coef > 0,
                    has_limit=limits is not None and limits.peaks is not None,
                )
            )
        try:
            yield recorder
        except BaseException as failure:
            if isinstance(failure, FailureRateError):
                split = "eval" if begin.watch.phase == "eval" else "train"
                recorder.unscored(begin.watch.step, failure.samples, split=split)
            try:
                recorder.before_failure()
                recorder.write_unrecorded()
            except DiskError as error:  # the error that ends the run is the one to be told
                _log.warning("warning: %s", error)
            raise


@contextmanager
def _scoring(
    plan: RunPlan, mesh: Mesh, data: PromptData, tokenizer: PreTrainedTokenizerBase
) -> Generator[Scorer | None]:
    """The scorer of this process, its functions tried by the first one; with engines apart there is
    that of the first one alone."""
    cfg = plan.config
    assert isinstance(cfg, RLConfig)
    if plan.is_apart and not mesh.is_first:
        yield None
        return
    rewards = cfg.reward if plan.is_apart else share_of_workers(cfg.reward)
    with Scorer(rewards, max_completion_tokens=cfg.rollout.max_completion_tokens) as scorer:
        if mesh.is_first:
            scorer.check_data(data.all_rows(), encoder(tokenizer))
        yield scorer


@contextmanager
def assemble(cfg: RLConfig, begin: Launch, make_pools: MakePools) -> Generator[RLParts]:
    """Build the parts of a run, restored from its checkpoint; release them at the end.

    Cheap and likely mistakes come first: configuration, tokenizer and data are read, and reward
    functions tried, before any weight is loaded. `make_pools` starts engines and references that
    have weights of their own; the first process calls it.
    """
    with ExitStack() as stack:
        mesh, plan = begin.mesh, planned(cfg, begin.mesh)
        tokenizer = load_tokenizer(cfg.model)
        data = load_prompts(
            cfg.data,
            tokenizer,
            seed=cfg.run.seed,
            max_prompt_tokens=_room_for_prompt(
                cfg.model, cfg.engine.max_model_len, _longest_completion(cfg)
            ),
        )
        scorer = stack.enter_context(_scoring(plan, mesh, data, tokenizer))
        pools = None
        if (plan.is_apart or cfg.cluster.is_used) and mesh.is_first:
            pools = stack.enter_context(make_pools(cfg))
        load = partial(load_for_training, cfg.model, mesh, seed=cfg.run.seed)
        model = load()
        limits = _limits(plan, model, mesh)
        lora = cfg.model.lora
        sampled = None if plan.is_apart else _sampled_model(cfg, model, mesh, load)
        if lora.rank:
            adapt(model, lora, seed=cfg.run.seed)
        algorithm, models = _learning(plan, begin, model, load, pools)
        begin.watch.follow(models.groups)
        if begin.checkpoint is not None:
            restore(models.trainer, begin.checkpoint.parts)
        random_state = capture_random_state()
        if cfg.trainer.enable_sleep:
            models.trainer.sleep()  # before the engine looks how much memory there is
        decode = decoder(tokenizer)
        if sampled is None:
            weights = weights_to(pools, cfg.cluster, models.trainer, mesh)
            stack.callback(weights.close)
            controller = Controller(mesh, pools and pools.engines, weights)
            sampling = sampling_apart(cfg, controller, scorer, data, decode)
        else:
            assert scorer is not None
            engine = make_engine(
                cfg,
                sampled,
                tokenizer,
                owns_weights=plan.roles["engine"].aliases_weights_of is None,
                device=mesh.device,
            )
            collector = Collector(
                engine=engine,
                scorer=scorer,
                prompts=data.train,
                rollout_cfg=cfg.rollout,
                pipeline_cfg=cfg.pipeline,
                decode=decode,
                seed=cfg.run.seed,
                max_failure_rate=cfg.reward.max_failure_rate,
                comm=mesh,
            )
            sampling = Sampling(engine, collector, WeightSync(models.trainer, engine))
        staleness = cfg.pipeline.max_staleness if cfg.pipeline.enabled else 0
        recorder = stack.enter_context(
            recording(cfg, begin, alarms_for(model, max_staleness=staleness), limits)
        )
        if pools is not None:
            pools.report_to(recorder.event)
        if scorer is not None:
            scorer.on_wait = recorder.waiting
        parts = RLParts(
            cfg=cfg,
            launch=begin,
            model=model,
            tokenizer=tokenizer,
            data=data,
            scorer=scorer,
            engine=sampling.engine,
            algorithm=algorithm,
            models=models,
            collector=sampling.collector,
            weights=sampling.weights,
            recorder=recorder,
            decode=decode,
            controller=sampling.controller,
        )
        if begin.checkpoint is not None:
            parts.load_state(begin.checkpoint.parts)
        begin.save_config()
        restore_random_state(random_state)  # whatever the engine has drawn to profile itself
        yield parts


def _learning(
    plan: RunPlan,
    begin: Launch,
    model: PreTrainedModel,
    load: Callable[[], PreTrainedModel],
    pools: Pools | None,
) -> tuple[Algorithm, Models]:
    """The algorithm, the trainer of `model` and the reference: with devices of its own, beside the
    trainers, or where adapters are trained the policy without them."""
    cfg = plan.config
    assert isinstance(cfg, RLConfig)
    algorithm = GRPO(cfg.algorithm, max_completion_tokens=cfg.rollout.max_completion_tokens)
    frozen = load() if plan.trainers_hold_reference else None
    trainer = Trainer(
        model,
        cfg.trainer,
        algorithm.objectives["policy"],
        total_steps=plan.optimizer_steps,
        seed=cfg.run.seed,
        dump_dir=begin.dir,
        temperature=cfg.rollout.temperature,
        exact=cfg.model.exact,
        mesh=begin.mesh,
    )
    reference: RowScorer | None = reference_apart(cfg.cluster, pools, trainer, begin.mesh)
    if frozen is not None:
        reference = FrozenScorer(
            frozen,
            cfg.trainer,
            temperature=cfg.rollout.temperature,
            exact=cfg.model.exact,
            mesh=begin.mesh,
        )
    elif reference is None and is_adapted(model):
        reference = WithoutAdapters(model, trainer.logprobs)
    return algorithm, Models(trainer, reference)


def _sampled_model(
    cfg: RLConfig,
    model: PreTrainedModel,
    mesh: Mesh,
    load: Callable[[], PreTrainedModel],
) -> PreTrainedModel:
    """What an engine beside the trainer samples with: `model` itself where that is whole and
    becomes the policy as it is."""
    if cfg.engine.backend == "vllm":
        return blank_model(cfg.model, device="meta")
    if mesh.world.size > 1:  # the first sync fills it, before anything is sampled
        return blank_model(cfg.model, device=mesh.device)
    return load() if cfg.model.lora.rank else alias_module(model)


@dataclass(slots=True)
class InferenceParts:
    """What evaluation and generation work with: no trainer."""

    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    engine: Engine
    decode: Decode
    tensor_parallel: TensorParallel


def assemble_inference(
    cfg: EvaluateConfig | GenerateConfig,
    device: torch.device,
    *,
    max_completion_tokens: int,
    check_data: Callable[[PromptData, PreTrainedTokenizerBase], None] | None = None,
) -> InferenceParts:
    """Tokenizer, prompts and an engine over the model's weights, in a process that has joined.
    `check_data` is called before any weight is loaded."""
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, device)
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    data = load_prompts(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=_room_for_prompt(
            cfg.model, cfg.engine.max_model_len, max_completion_tokens
        ),
    )
    if check_data is not None:
        check_data(data, tokenizer)
    own = None if cfg.engine.backend == "vllm" else tp
    model = load_model(cfg.model, device=device, seed=cfg.run.seed, tp=own)
    engine = make_engine(cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp)
    return InferenceParts(tokenizer, data, engine, decoder(tokenizer), tp)
