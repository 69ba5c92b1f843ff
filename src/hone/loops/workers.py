"""Workers: engines and frozen models in their own threads or processes, and the pools of them."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from hone.config.plan import Role, RunPlan
from hone.config.run import GenerateRunConfig, RunConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.distributed.channel import GroupChannel
from hone.distributed.local import LocalWorker, local_workers
from hone.distributed.mesh import Mesh
from hone.distributed.pool import RecordEvent, ThreadWorker
from hone.distributed.processes import processes
from hone.distributed.settings import RoleName
from hone.distributed.worker_rank import runs_on_gpus, visible_gpus
from hone.engine.backends import BACKENDS, EngineParts
from hone.engine.worker import EngineWorker
from hone.errors import UserError
from hone.loops.launch import choose_device
from hone.models.load import blank_model, load_config, load_end_ids, load_model, load_value_model
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import decoder, load_tokenizer
from hone.observe.tracing import EngineTracer, MemoryRecorder
from hone.rewards.settings import RewardModelConfig
from hone.rollout.engine_pool import EnginePool
from hone.rollout.judge import PooledRewardModel, RewardModel, RewardModelScorer
from hone.rollout.runner import SampleScorer
from hone.rollout.scorer_pool import ScorerPool
from hone.rollout.shared_judge import SharedRewardModel
from hone.rollout.transcripts import Transcripts
from hone.trainer.frozen import FrozenScorer
from hone.types import Engine, EngineLostError
from hone.weights.receiver import WeightReceiver

__all__ = [
    "ColocatedJudge",
    "Pools",
    "build_engine_worker",
    "build_loaded_worker",
    "build_scorer",
    "build_worker",
    "colocated_reward_model",
    "engine_model",
    "load_engine",
    "load_reward_model",
    "local_pools",
    "make_engine",
    "ray_pools",
    "reserved_gpus",
    "thread_pools",
    "with_reward_model",
]

_log = logging.getLogger(__name__)
ColocatedJudge: TypeAlias = RewardModel | SharedRewardModel
"""A reward model on the device of this process, whole or a shard of it."""

MAX_RESTARTS = 3
"""Restarts of lost engines before the run gives up. Each scoring model has the same number."""
ENGINE_TIMEOUT_S = 600.0
"""How long an engine of `hone eval` or `hone generate` may make no progress while it has work."""
LOADING_S = 3600.0
"""How long a worker may take to load its weights, even from a slow disk."""
_LOOK_S = 0.2
"""Longest wait for one worker before the next one is checked."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of workers, by role. Only the first training process has them."""

    engines: EnginePool
    """Empty if engines are colocated with the trainers."""
    scorers: Mapping[RoleName, ScorerPool] = field(default_factory=dict[RoleName, ScorerPool])
    """Pools of remote frozen models, by role."""
    host: str = "127.0.0.1"
    """The address at which workers reach this process."""

    def report_to(self, event: RecordEvent) -> None:
        """Call `event` for each worker that is lost from now on. See `Pool.report_to`."""
        self.engines.report_to(event)
        for scorer in self.scorers.values():
            scorer.report_to(event)

    def close(self) -> None:
        for scorer in self.scorers.values():
            scorer.close()
        self.engines.close()


def make_engine(
    plan: RunPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    owns_weights: bool,
    tensor_parallel: TensorParallel | None = None,
    device: torch.device | None = None,
    name: str = "engine 0",
) -> Engine:
    """Build the engine of `engine.backend` with the weights of `model`.

    With `tensor_parallel`, `model` is this rank's shard. A backend that has its own weights gets
    the whole model in any case, which may be on the meta device; `device` says where the engine
    runs. `name` names the engine in traces.
    """
    eos = eos_token_ids(model, tokenizer)
    cfg, role = plan.config, plan.roles["engine"]
    assert plan.max_model_len is not None
    max_model_len = min(plan.max_model_len, context_length(model.config))
    engine = BACKENDS[role.engine.backend].build(
        EngineParts(
            model=model,
            cfg=role.engine,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            device=device,
            tensor_parallel=tensor_parallel,
            owns_weights=owns_weights,
            is_exact=role.is_exact,
            records_routes=role.replays_routes,
        )
    )
    if isinstance(cfg, RLConfig) and cfg.profile.rollout.steps:
        engine.tracer = EngineTracer(
            cfg.profile.rollout,
            cfg.profile.folder(cfg.run.dir),
            name=name,
            tp_rank=0 if tensor_parallel is None else tensor_parallel.rank,
        )
    return engine


def colocated_reward_model(plan: RunPlan, mesh: Mesh, *, scores: bool) -> ColocatedJudge | None:
    """The reward model of a training process that has a part of it: whole where the process
    `scores` samples, a shard in every process where they share it. None otherwise. Collective.
    Raises as `load_value_model`.

    Must be called before the engine measures the free memory.
    """
    role = plan.roles.get("reward_model")
    if role is None or role.has_own_devices:
        return None
    if role.axes.world == 1:
        return load_reward_model(plan, mesh.device) if scores else None
    assert isinstance(role.settings, RewardModelConfig)
    seed = plan.config.run.seed
    return SharedRewardModel(
        load_value_model(role.model, device=mesh.device, seed=seed, deferred=True),
        mesh,
        plan.policy.trainer.parallel,
        max_tokens=role.settings.max_tokens_per_forward,
    )


def with_reward_model(
    scorer: SampleScorer,
    transcripts: Transcripts | None,
    plan: RunPlan,
    judge: ColocatedJudge | ScorerPool | None,
) -> SampleScorer:
    """`scorer`, combined with the reward model if `transcripts` are made for one: `judge`, or
    remote ones of its pool."""
    cfg, role = plan.config, plan.roles.get("reward_model")
    if transcripts is None or role is None:
        return scorer
    assert isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig)
    assert judge is not None
    if isinstance(judge, ScorerPool):
        pad_id = load_config(role.model).pad_token_id
        return RewardModelScorer(
            PooledRewardModel(judge, pad_id=pad_id), transcripts, scorer, cfg.reward
        )
    return RewardModelScorer(judge, transcripts, scorer, cfg.reward)


def engine_model(
    role: Role, device: torch.device, tp: TensorParallel, *, seed: int
) -> PreTrainedModel:
    """Model of this engine rank with empty weights, which a sync fills before sampling, and with
    the policy's tower, which random weights draw from `seed`. For a backend that allocates its own
    weights it is on the meta device: only the shapes are read."""
    if BACKENDS[role.engine.backend].has_own_weights:
        return blank_model(role.model, device="meta", seed=seed)
    packs_rows = role.engine.packs_rows
    return blank_model(role.model, device=device, seed=seed, tp=tp, packs_rows=packs_rows)


def load_engine(
    plan: RunPlan,
    device: torch.device,
    tensor_parallel: TensorParallel,
    tokenizer: PreTrainedTokenizerBase,
) -> Engine:
    """Build this process's rank of an engine with the weights of `model.path`."""
    role = plan.roles["engine"]
    has_own_weights = BACKENDS[role.engine.backend].has_own_weights
    model = load_model(
        role.model,
        device=device,
        seed=plan.config.run.seed,
        tp=None if has_own_weights else tensor_parallel,
        packs_rows=role.engine.packs_rows,
    )
    return make_engine(plan, model, tokenizer, owns_weights=True, tensor_parallel=tensor_parallel)


def build_engine_worker(plan: RunPlan, *, name: str = "engine") -> EngineWorker:
    """Build this process's rank of an engine of `plan`. It can sample once a sync has filled its
    weights.

    The ranks of an engine find each other through torchrun's variables. Raises UserError as the
    engine and the model's loader do.
    """
    role, device = plan.roles["engine"], choose_device(plan.config.run)
    tp = TensorParallel.from_environment(role.axes.tensor, device)
    tokenizer = load_tokenizer(role.model)
    model = engine_model(role, device, tp, seed=plan.config.run.seed)
    engine = make_engine(
        plan, model, tokenizer, owns_weights=True, tensor_parallel=tp, device=device, name=name
    )
    receiver = WeightReceiver(engine, device)
    return EngineWorker(
        engine,
        receiver.receive,
        name=name,
        ranks=_channel(tp, plan.cluster.engine_timeout_s),
        decode=decoder(tokenizer, eos_token_ids(model, tokenizer)),
    )


def _channel(tp: TensorParallel, timeout_s: float) -> GroupChannel | None:
    """Channel that keeps the ranks of a remote engine in step. None for one rank."""
    if tp.size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return GroupChannel(group)


def build_loaded_worker(role: RoleName, plan: RunPlan, name: str) -> EngineWorker | RewardModel:
    """Build an engine with the weights of `model.path`, or a reward model, in its own process.
    Raises UserError as their loaders do."""
    transformers_logging.disable_progress_bar()  # the bars of several processes would mix
    torch.manual_seed(plan.config.run.seed)
    device = choose_device(plan.config.run)
    if device.type == "cpu" and not plan.is_on_cpu:
        raise UserError(
            f"{name} sees no GPU (torch {torch.__version__}); the driver has given it one"
        )
    if role == "reward_model":
        return load_reward_model(plan, device)
    engine = plan.roles["engine"]
    tp = TensorParallel.from_environment(engine.axes.tensor, device)
    tokenizer = load_tokenizer(engine.model)
    return EngineWorker(
        load_engine(plan, device, tp, tokenizer),
        _refuse_weights,
        name=name,
        ranks=_channel(tp, ENGINE_TIMEOUT_S),
        decode=decoder(tokenizer, load_end_ids(engine.model, tokenizer)),
    )


def _refuse_weights(spec: Any, rank: int) -> Any:
    raise RuntimeError(f"weights of {spec!r} for rank {rank}: this engine has loaded its own")


def load_reward_model(plan: RunPlan, device: torch.device) -> RewardModel:
    """The reward model of a plan, whole on `device`. Raises as `load_value_model`."""
    model, seed = plan.roles["reward_model"].model, plan.config.run.seed
    return RewardModel(load_value_model(model, device=device, seed=seed))


def build_scorer(role: Role, plan: RunPlan) -> FrozenScorer | RewardModel:
    """Load a frozen model, whole, on this process's device.

    The reference is the policy before training: from `model.path`, or initialised from `run.seed`
    as the policy was, whatever step the run is at. Raises UserError and FileNotFoundError as the
    model's loader does.
    """
    run = plan.config.run
    device = choose_device(run)
    if role.name == "reward_model":
        return load_reward_model(plan, device)
    assert isinstance(run, RunConfig)
    return FrozenScorer(
        load_model(role.model, device=device, seed=run.seed),
        role.trainer,
        temperature=role.temperature,
        exact=role.is_exact,
        top_k=role.top_k,
        role=role.name,
        dump_dir=run.dir,
        on_exhausted=lambda: "",
    )


def build_worker(
    role: RoleName, plan: RunPlan, name: str
) -> EngineWorker | FrozenScorer | RewardModel:
    """Build an engine or a scoring model in its own process."""
    cfg, place = plan.config, f"{name.replace(' ', '')}_tp{processes().rank}"
    assert isinstance(cfg, RLConfig)
    folder = cfg.profile.folder(cfg.run.dir) / "memory_snapshot"
    recorder = MemoryRecorder(cfg.profile.memory, folder, place, choose_device(cfg.run))
    atexit.register(recorder.close)  # the recorder lives as long as the process
    if role == "engine":
        return build_engine_worker(plan, name=name)
    return build_scorer(plan.roles[role], plan)


def gpus_for(run: GenerateRunConfig, number: int) -> list[str]:
    """CUDA names of the first `number` GPUs of this host, one per process. Empty on a CPU. Raises
    UserError if there are fewer."""
    if not runs_on_gpus(run):
        return []
    visible = visible_gpus()
    if not any(name.startswith("MIG") for name in visible):  # of several MIG parts torch counts one
        visible = visible[: torch.cuda.device_count()]
    if number > len(visible):
        raise UserError(
            f"{number} processes are to run on this host, one a GPU, and torch sees {len(visible)} "
            f"GPUs. Start at most {len(visible)}, or set run.device to cpu."
        )
    return visible[:number]


@contextmanager
def local_pools(plan: RunPlan, num_devices: int) -> Generator[Pools]:
    """Start engines on `num_devices` devices of this host, each with its reward model if the plan
    has one. Each runs in its own processes, which end with the context.

    If an engine cannot be built, its error (UserError and others) is raised once, without a
    restart. Engines that are lost later are restarted.
    """
    size = plan.roles["engine"].axes.world
    number, gpus = num_devices // size, gpus_for(plan.config.run, num_devices)
    has_judge = "reward_model" in plan.roles
    # Reward models start first: an engine takes a share of the memory that is free then.
    roles: dict[RoleName, int] = {"reward_model": 1} if has_judge else {}
    roles["engine"] = size
    num_processes = number * sum(roles.values())
    build = "hone.loops.workers:build_loaded_worker"
    with local_workers(plan, build, num_processes=num_processes) as local:

        def start(role: RoleName, index: int) -> LocalWorker:
            first = size * index
            return local.start(role, index, gpus[first : first + roles[role]], roles[role])

        started: dict[RoleName, list[LocalWorker]] = {}
        began_s, words = monotonic(), f"{number} engine{'s' * (number > 1)}"
        _log.info("starting %s", words)
        for role in roles:
            started[role] = [start(role, index) for index in range(number)]
            _await_made(started[role])
        _log.info("%s ready after %.1f s", words, monotonic() - began_s)
        supervision: dict[str, Any] = {
            "timeout_s": ENGINE_TIMEOUT_S,
            "max_restarts": MAX_RESTARTS,
            "start_timeout_s": LOADING_S,
        }
        engines = EnginePool(
            started["engine"],
            load_weights=True,
            max_requests=2 * plan.roles["engine"].engine.max_num_seqs,
            restart=partial(start, "engine"),
            **supervision,
        )
        engines.await_starts()
        scorers: dict[RoleName, ScorerPool] = {}
        if has_judge:
            scorers["reward_model"] = ScorerPool(
                "reward_model",
                started["reward_model"],
                restart=partial(start, "reward_model"),
                **supervision,
            )
        with closing(Pools(engines, scorers)) as pools:
            yield pools


def _await_made(workers: Sequence[LocalWorker]) -> None:
    """Wait until all workers are built. Raises at once what keeps one from being built.

    A lost engine is restarted by its pool. A lost reward model is an error: the engines, which
    start next, take the memory that its replacement would need.
    """
    waiting, deadline = list(workers), monotonic() + LOADING_S
    while waiting:
        worker = waiting.pop(0)
        try:
            worker.wait_until_made(min(_LOOK_S, max(deadline - monotonic(), 0.0)))
        except TimeoutError:
            if monotonic() > deadline:
                raise
            waiting.append(worker)
        except EngineLostError:
            if worker.role != "engine":
                raise


@contextmanager
def reserved_gpus(plan: RunPlan) -> Generator[None]:
    """Reserve the GPUs of this host's trainers in Ray, so that no worker gets them."""
    from hone.distributed.ray import reserve_gpus

    with reserve_gpus(plan):
        yield


@contextmanager
def thread_pools(plan: RunPlan) -> Generator[Pools]:
    """The engines and frozen models of a run in threads of this process, on its device."""
    num_engines = plan.roles["engine"].num_workers if plan.is_apart else 0
    engines = [build_engine_worker(plan, name=f"engine {i}") for i in range(num_engines)]
    supervision: dict[str, Any] = {
        "restart": None,
        "timeout_s": plan.cluster.engine_timeout_s,
        "max_restarts": 0,
    }
    scorers: dict[RoleName, ScorerPool] = {}
    for role in plan.scorers:
        if role.has_own_devices:
            numbers = range(role.num_workers)
            workers = [ThreadWorker(f"{role.name} {i}", build_scorer(role, plan)) for i in numbers]
            scorers[role.name] = ScorerPool(role.name, workers, **supervision)
    with closing(Pools(EnginePool(engines, **supervision), scorers)) as pools:
        yield pools


@contextmanager
def ray_pools(plan: RunPlan) -> Generator[Pools]:
    """The engines and frozen models of `cluster` on Ray. An engine that shares its device with a
    trainer but samples ahead runs in a thread of this process. Raises as `ray_workers`."""
    from hone.distributed.ray import ray_workers

    has_thread = plan.roles["engine"].where == "thread"
    with ray_workers(plan, "hone.loops.workers:build_worker") as cluster:
        started = cluster.start_all()
        engines: list[Any] = started.pop("engine", [])
        if has_thread:
            engines = [build_engine_worker(plan, name="engine 0")]
        supervision: dict[str, Any] = {
            "timeout_s": plan.cluster.engine_timeout_s,
            "max_restarts": MAX_RESTARTS,
            "start_timeout_s": cluster.starting_s,
        }
        restart = None if has_thread else partial(cluster.start, "engine")
        pool = EnginePool(engines, restart=restart, **supervision)
        scorers: dict[RoleName, ScorerPool] = {
            role: ScorerPool(role, workers, restart=partial(cluster.start, role), **supervision)
            for role, workers in started.items()
        }
        with closing(Pools(pool, scorers, cluster.host)) as pools:
            yield pools
