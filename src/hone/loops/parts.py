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
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.data.prompts import PromptData, load_prompts
from hone.engine.engine import EmbeddedEngine
from hone.engine.kv_cache import cache_dtype
from hone.loops.experience import Experience
from hone.loops.launch import Launch, choose_device, launch
from hone.loops.recorder import Limits, Recorder, alarms_for
from hone.models.decoder import alias_module
from hone.models.load import check_exact, compute_dtype, load_config, load_model
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
from hone.observe.console import Console
from hone.observe.loggers import RunLog
from hone.observe.peaks import device_peaks
from hone.observe.spans import Spans
from hone.planner.model_shape import ModelShape
from hone.rewards.scorer import Scorer
from hone.rollout.requests import Decode
from hone.rollout.rollout import Rollout
from hone.trainer.trainer import PolicyTrainer
from hone.weights.sync import WeightSync

__all__ = ["InferenceParts", "RLParts", "assemble", "assemble_inference", "decoder"]


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
        """Go on from `state`."""
        self.trainer.load_state_dict(state["trainer"], state["trainer_metadata"])
        self.data.train.load_state_dict(state["data"])
        self.rollout.load_state_dict(state["rollout"])
        restore_random_state(state["random"])

    def engine_asleep(self) -> AbstractContextManager[None]:
        """The KV cache is free inside, where `engine.enable_sleep` asks for it."""
        return _asleep(self.engine) if self.cfg.engine.enable_sleep else nullcontext()

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


@contextmanager
def _asleep(engine: EmbeddedEngine) -> Generator[None]:
    engine.sleep()
    yield
    engine.wake()


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Token ids to text without special tokens, exactly as the tokens spell it."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    return decode


def _limits(cfg: RLConfig, model: PreTrainedModel, device: torch.device) -> Limits:
    dtype = compute_dtype(cfg.model, device)
    kl, steps = cfg.algorithm.kl, optimizer_steps_per_rollout(cfg)
    scores_policy = steps > 1 or (kl.coef > 0 and kl.placement == "reward")
    return Limits(
        shape=ModelShape.from_config(model.config.to_dict()),
        peaks=device_peaks(device, dtype),
        bytes_per_value=dtype.itemsize,
        kv_bytes_per_value=cache_dtype(cfg.engine, dtype).itemsize,
        max_num_seqs=cfg.engine.max_num_seqs,
        passes=3.0 * cfg.trainer.num_epochs + scores_policy + (kl.coef > 0),
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


@contextmanager
def assemble(cfg: RLConfig) -> Generator[RLParts]:
    """Build the parts of a run, restored from its checkpoint; release them at the end.

    Cheap and likely mistakes come first: configuration, tokenizer and data are read before any
    weight is loaded.
    """
    begin = launch(cfg.run, cfg.checkpoint, cfg)
    check_exact(cfg.model, begin.device)
    tokenizer = load_tokenizer(cfg.model)
    data = load_prompts(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=_room_for_prompt(
            cfg.model, cfg.engine.max_model_len, _longest_completion(cfg)
        ),
    )
    with ExitStack() as stack:
        scorer = stack.enter_context(
            Scorer(cfg.reward, max_completion_tokens=cfg.rollout.max_completion_tokens)
        )
        load = partial(load_model, cfg.model, device=begin.device, seed=cfg.run.seed)
        model = load()
        trainer = PolicyTrainer(
            model,
            cfg.trainer,
            cfg.algorithm,
            temperature=cfg.rollout.temperature,
            max_completion_tokens=cfg.rollout.max_completion_tokens,
            total_steps=cfg.run.steps * optimizer_steps_per_rollout(cfg),
            seed=cfg.run.seed,
            reference=load() if cfg.algorithm.kl.coef > 0 else None,
            dump_dir=begin.dir,
            exact=cfg.model.exact,
        )
        engine = _engine(cfg, alias_module(model), tokenizer, owns_weights=False)
        log = stack.enter_context(
            RunLog(
                begin.dir,
                cfg.log,
                resume_step=begin.resume_step,
                config=cfg.model_dump(mode="json"),
            )
        )
        console = stack.enter_context(Console(cfg.run.steps, done=begin.steps_done))
        decode = decoder(tokenizer)
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
            ),
            experience=Experience(trainer, cfg.algorithm),
            weights=WeightSync(trainer, engine),
            recorder=Recorder(
                log,
                console,
                alarms_for(model),
                Spans(),
                begin.device,
                _limits(cfg, model, begin.device),
            ),
            decode=decode,
        )
        if begin.checkpoint is not None:
            parts.load_state(begin.checkpoint.parts)
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
    cfg: EvaluateConfig | GenerateConfig, *, max_completion_tokens: int
) -> InferenceParts:
    """Tokenizer, prompts and an engine over the model's weights."""
    device = choose_device(cfg.run)
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
