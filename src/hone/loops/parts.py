"""The objects of a reinforcement run, chosen and joined before the loop starts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.checks.schedule import evaluates
from hone.config.derived import optimizer_steps_per_rollout
from hone.config.model import ModelConfig
from hone.config.reward import RewardConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.data.prompts import PromptData, load_prompts
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.kv_cache import cache_dtype
from hone.loops.exchange import Exchange
from hone.loops.experience import Experience
from hone.loops.launch import Launch, launch, load_for_training
from hone.loops.recorder import Limits, Recorder, alarms_for
from hone.loops.resuming import restore
from hone.models.adapters import adapt
from hone.models.decoder import alias_module
from hone.models.load import (
    blank_model,
    check_exact,
    compute_dtype,
    load_config,
    load_model,
)
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
from hone.observe.alarms import Alarms
from hone.observe.console import Console
from hone.observe.loggers import RunLog
from hone.observe.peaks import device_peaks
from hone.observe.spans import Spans
from hone.planner.model_shape import ModelShape
from hone.rewards.pool import default_num_workers
from hone.rewards.scorer import Scorer
from hone.rollout.requests import Decode
from hone.rollout.rollout import Rollout
from hone.trainer.precision import require_matmul_precision
from hone.trainer.trainer import PolicyTrainer
from hone.weights.sync import WeightSync

__all__ = [
    "InferenceParts",
    "RLParts",
    "assemble",
    "assemble_inference",
    "decoder",
    "recording",
    "share_of_workers",
]


@dataclass(slots=True)
class RLParts:
    """What `loops.sync.train` works with."""

    cfg: RLConfig
    launch: Launch
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    scorer: Scorer
    engine: EmbeddedEngine
    trainer: PolicyTrainer
    rollout: Rollout
    experience: Experience
    weights: WeightSync
    recorder: Recorder
    decode: Decode
    peers: Exchange

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, by part."""
        tensors, metadata = self.trainer.state_dict()
        return {
            "trainer": tensors,
            "trainer_metadata": metadata,
            "data": self.data.train.state_dict(),
            "rollout": self.rollout.state_dict(),
            "random": capture_random_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, with a trainer that has."""
        self.data.train.load_state_dict(state["data"])
        self.rollout.load_state_dict(state["rollout"])

    @contextmanager
    def training(self) -> Generator[None]:
        """The trainer has the device inside, the engine outside.

        As far as the keys `enable_sleep` of both ask for it: whoever comes finds the room of
        whoever has left.
        """
        engine_sleeps, trainer_sleeps = (
            self.cfg.engine.enable_sleep,
            self.cfg.trainer.enable_sleep,
        )
        if engine_sleeps:
            self.engine.sleep()
        if trainer_sleeps:
            self.trainer.wake()
        yield
        if trainer_sleeps:
            self.trainer.sleep()
        if engine_sleeps:
            self.engine.wake()

    def core_for_rewards(self) -> AbstractContextManager[None]:
        """Inside, a CPU that generates leaves one core to reward workers.

        OpenMP threads wait for each other by spinning. One that loses its core to a worker holds up
        all others for a time slice, thousands of times in a step.
        """
        on_cpu = self.launch.device.type == "cpu"
        return _one_thread_less() if on_cpu and self.scorer.uses_workers else nullcontext()


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


def _limits(cfg: RLConfig, model: PreTrainedModel, mesh: Mesh) -> Limits:
    dtype = compute_dtype(cfg.model, mesh.device)
    kl, steps = cfg.algorithm.kl, optimizer_steps_per_rollout(cfg)
    scores_policy = steps > 1 or (kl.coef > 0 and kl.placement == "reward")
    return Limits(
        shape=ModelShape.from_config(model.config.to_dict()),
        peaks=device_peaks(mesh.device, dtype),
        num_devices=mesh.world.size,
        bytes_per_value=dtype.itemsize,
        kv_bytes_per_value=cache_dtype(cfg.engine, dtype).itemsize,
        max_num_seqs=cfg.engine.max_num_seqs,
        # Frozen weights, beside which adapters are trained, get no gradients.
        passes=(2.0 if cfg.model.lora.rank else 3.0) * cfg.trainer.num_epochs
        + scores_policy
        + (kl.coef > 0),
    )


def _engine(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    owns_weights: bool,
    tensor_parallel: TensorParallel | None = None,
) -> EmbeddedEngine:
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
    measured = cfg.eval.max_completion_tokens if evaluates(cfg.eval) else 0
    return max(cfg.rollout.max_completion_tokens, measured)


def share_of_workers(cfg: RewardConfig) -> RewardConfig:
    """The reward workers of one process: its part of those of the host."""
    num_workers = (cfg.num_workers or default_num_workers()) // processes().local_world_size
    return cfg.model_copy(update={"num_workers": max(num_workers, 1)})


@contextmanager
def recording(
    cfg: RLConfig | SFTConfig, begin: Launch, alarms: Alarms, limits: Limits | None = None
) -> Generator[Recorder]:
    """The recorder of this process; the first one's writes into the run folder."""
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
            recorder.console = stack.enter_context(Console(cfg.run.steps, done=begin.steps_done))
        yield recorder


@contextmanager
def assemble(cfg: RLConfig) -> Generator[RLParts]:
    """Build the parts of a run, restored from its checkpoint; release them at the end.

    Cheap and likely mistakes come first: configuration, tokenizer and data are read before any
    weight is loaded.
    """
    with ExitStack() as stack:
        begin = stack.enter_context(launch(cfg.run, cfg.checkpoint, cfg.trainer.parallel, cfg))
        mesh = begin.mesh
        check_exact(cfg.model, mesh.device)
        require_matmul_precision(
            cfg.trainer.matmul_precision, compute_dtype(cfg.model, mesh.device), mesh.device
        )
        tokenizer = load_tokenizer(cfg.model)
        data = load_prompts(
            cfg.data,
            tokenizer,
            seed=cfg.run.seed,
            max_prompt_tokens=_room_for_prompt(
                cfg.model, cfg.engine.max_model_len, _longest_completion(cfg)
            ),
        )
        scorer = stack.enter_context(
            Scorer(
                share_of_workers(cfg.reward),
                max_completion_tokens=cfg.rollout.max_completion_tokens,
            )
        )
        load = partial(load_for_training, cfg.model, mesh, seed=cfg.run.seed)
        model = load(on_host=cfg.trainer.offload_parameters)
        limits = _limits(cfg, model, mesh)
        lora = cfg.model.lora
        # What the engine samples with is the trained module itself where that is one and whole.
        is_alone = mesh.world.size == 1
        is_alias = is_alone and not lora.rank
        if is_alias:
            sampled = alias_module(model)
        elif is_alone:
            sampled = load()
        else:  # the first sync fills it, before anything is sampled
            sampled = blank_model(cfg.model, device=mesh.device)
        if lora.rank:
            adapt(model, lora, seed=cfg.run.seed)
        trainer = PolicyTrainer(
            model,
            cfg.trainer,
            cfg.algorithm,
            temperature=cfg.rollout.temperature,
            max_completion_tokens=cfg.rollout.max_completion_tokens,
            total_steps=cfg.run.steps * optimizer_steps_per_rollout(cfg),
            seed=cfg.run.seed,
            reference=load() if cfg.algorithm.kl.coef > 0 and not lora.rank else None,
            dump_dir=begin.dir,
            exact=cfg.model.exact,
            mesh=mesh,
        )
        begin.watch.follow(trainer.groups)
        if begin.checkpoint is not None:
            restore(trainer, begin.checkpoint.parts)
        random_state = capture_random_state()
        if cfg.trainer.enable_sleep:
            trainer.sleep()  # before the engine looks how much memory there is
        engine = _engine(cfg, sampled, tokenizer, owns_weights=not is_alias)
        recorder = stack.enter_context(recording(cfg, begin, alarms_for(sampled), limits))
        decode, peers = decoder(tokenizer), Exchange(mesh)
        parts = RLParts(
            cfg=cfg,
            launch=begin,
            model=model,
            tokenizer=tokenizer,
            data=data,
            scorer=scorer,
            engine=engine,
            trainer=trainer,
            rollout=Rollout(
                engine=engine,
                scorer=scorer,
                prompts=data.train,
                cfg=cfg.rollout,
                decode=decode,
                seed=cfg.run.seed,
                peers=peers,
            ),
            experience=Experience(trainer, cfg.algorithm),
            weights=WeightSync(trainer, engine),
            recorder=recorder,
            decode=decode,
            peers=peers,
        )
        if begin.checkpoint is not None:
            parts.load_state(begin.checkpoint.parts)
        begin.save_config()
        restore_random_state(random_state)  # whatever the engine has drawn to profile itself
        yield parts


@dataclass(slots=True)
class InferenceParts:
    """What evaluation and generation work with: no trainer."""

    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    engine: EmbeddedEngine
    decode: Decode
    tensor_parallel: TensorParallel


def assemble_inference(
    cfg: EvaluateConfig | GenerateConfig, device: torch.device, *, max_completion_tokens: int
) -> InferenceParts:
    """Tokenizer, prompts and an engine over the model's weights, in a process that has joined."""
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, device)
    check_exact(cfg.model, device)
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
    model = load_model(cfg.model, device=device, seed=cfg.run.seed, tp=tp)
    engine = _engine(cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp)
    return InferenceParts(tokenizer, data, engine, decoder(tokenizer), tp)
