"""Sampling for `hone eval`, `generate` and `serve`: the engines of each host and the scorer.

One process of each host, its driver, reads prompts, scores and writes. With one device the engine
is in the same process. With several devices each engine has its own processes; a pool distributes
requests to them and restarts lost engines. Of torchrun's processes the first of each host is the
driver, and the others use no device and wait for the end.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Literal

import torch
from rich import get_console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from hone.config.plan import RunPlan
from hone.config.tree import EvaluateConfig, GenerateConfig, ServeConfig
from hone.data.turns import TurnRenderer
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.settings import ParallelConfig
from hone.distributed.store import connect
from hone.distributed.worker_rank import runs_on_gpus
from hone.errors import UserError
from hone.loops.inputs import transcripts_of, try_out
from hone.loops.launch import choose_device, join, plan_run
from hone.loops.scoring import scoring
from hone.loops.workers import load_engine, load_reward_model, local_pools, with_reward_model
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import decoder
from hone.observe.loggers import append_event
from hone.rollout.episodes import Episodes
from hone.rollout.judge import RewardModel
from hone.rollout.runner import Runner, SampleScorer
from hone.rollout.scorer_pool import ScorerPool
from hone.types import Engine, Prompt, SamplingEngine

__all__ = [
    "Counter",
    "Host",
    "Sampler",
    "counting",
    "is_scored",
    "join_hosts",
    "load_alone",
    "plan_sampling",
    "sampler_of",
]

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 20.0
_LOOK_S = 0.2
"""Interval in which waiting processes check whether the drivers are done."""


class Host:
    """One host of a command. Implements `Comm` between the drivers of all hosts."""

    def __init__(self, mesh: Mesh, num_devices: int) -> None:
        """Collective over `mesh`, all processes of the command."""
        own = processes()
        self._mesh = mesh
        self.num_devices = num_devices
        self.is_driver = own.local_rank == 0
        """Whether this process drives the engines of its host."""
        self.is_first = mesh.is_first
        local_ranks = mesh.gather(own.local_rank)
        self._drivers = [rank for rank, local in enumerate(local_ranks) if local == 0]
        self.rank = sum(driver <= mesh.rank for driver in self._drivers) - 1
        self.size = len(self._drivers)
        self._store = connect(own) if mesh.size > 1 else None
        self._name, self._num_meetings = mesh.broadcast(secrets.token_hex(8)), 0

    @property
    def num_processes(self) -> int:
        """Number of sampling devices of all hosts."""
        return self.num_devices if self._mesh.size == 1 else self._mesh.size

    def broadcast(self, value: Any) -> Any:
        """The picklable `value` of the first process. Collective; waits as long as `gather`."""
        self._await(is_awaited=self.is_first, number=1)
        return self._mesh.broadcast(value)

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every driver. Collective over all processes. Drivers may arrive
        hours apart; a process is not considered lost as long as it is alive."""
        self._await(is_awaited=self.is_driver, number=self.size)
        everywhere = self._mesh.gather(value)
        return [everywhere[rank] for rank in self._drivers]

    def _await(self, *, is_awaited: bool, number: int) -> None:
        """Wait until `number` processes with `is_awaited` have arrived.

        A collective would not do: its timeout takes a long wait for a lost process.
        """
        if self._store is None:
            return
        self._num_meetings += 1
        key = f"{self._name}/{self._num_meetings}"
        num_arrived = self._store.add(key, int(is_awaited))
        while num_arrived < number:
            sleep(_LOOK_S)
            num_arrived = self._store.add(key, 0)

    def total(self, *counts: int) -> tuple[int, ...]:
        """The sum of each count over all drivers. Collective, as `gather`."""
        return tuple(map(sum, zip(*self.gather(counts), strict=True)))


@contextmanager
def join_hosts(
    cfg: EvaluateConfig | GenerateConfig | ServeConfig, num_devices: int, phase: str
) -> Generator[Host]:
    """Join the processes of a command that samples on `num_devices` devices of this host, or on
    those of torchrun's processes, one device each."""
    own = processes()
    if own.world_size > 1:
        num_devices = own.local_world_size
    # The processes join on the CPU: the devices belong to the engines.
    meeting: Any = cfg.run.model_copy(update={"device": "cpu"})
    with join(meeting, ParallelConfig()) as (mesh, watch):
        watch.enter(phase)
        yield Host(mesh, num_devices)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The engines of a host, behind one interface, and the scorer."""

    engine: SamplingEngine
    num_engines: int
    scorer: SampleScorer | None
    episodes: Episodes

    def runner(self) -> Runner:
        """A runner of episodes with this engine and scorer."""
        return Runner(self.engine, self.scorer, self.episodes)


@contextmanager
def sampler_of(
    cfg: EvaluateConfig | GenerateConfig,
    host: Host,
    tokenizer: PreTrainedTokenizerBase,
    turns: TurnRenderer,
    *,
    tool_format: str | None,
    tried: Sequence[Prompt],
    purpose: Literal["eval", "generate"],
    counter: Counter,
) -> Generator[Sampler]:
    """Start the engines of this host with the weights of `model.path`, and the scorer. For the
    driver process.

    Rewards and templates are tested with the prompts `tried` before any model is loaded. Raises
    UserError for settings that do not fit, and the errors of the model's loader.
    """
    plan = plan_sampling(cfg, host)
    with ExitStack() as stack:
        scorer = plays = transcripts = None
        if is_scored(cfg):
            made = scoring(
                cfg,
                cfg.reward,
                plan.roles["engine"].model,
                tokenizer,
                tool_format=tool_format,
                max_model_len=plan.max_model_len,
            )
            scorer, plays = stack.enter_context(made)
            scorer.on_wait = counter.waiting
            transcripts = transcripts_of(plan, tried)
            if host.is_first:
                try_out(scorer, tried, tokenizer, turns, transcripts)
        device, pools, num_engines = torch.device("cpu"), None, 1
        if host.num_devices > 1:
            pools = stack.enter_context(local_pools(plan, host.num_devices))
            num_engines = host.num_devices // plan.roles["engine"].axes.world
            if isinstance(cfg, EvaluateConfig):
                # The folder may be that of a training run, so the events get names of their own.
                folder = cfg.run.dir
                pools.report_to(
                    lambda kind, **fields: append_event(folder, f"eval_{kind}", **fields)
                )
        else:
            device = choose_device(cfg.run)
        scores = None
        if plays is not None:
            judge: RewardModel | ScorerPool | None = None
            if pools is not None:
                judge = pools.scorers.get("reward_model")
            elif transcripts is not None:
                judge = load_reward_model(plan, device)
            scores = with_reward_model(plays, transcripts, plan, judge)
        engine: SamplingEngine
        engine = load_alone(plan, device, tokenizer) if pools is None else pools.engines
        episodes = Episodes(
            decode=decoder(tokenizer, turns.ends),
            max_turns=1 if scorer is None else scorer.max_turns,
            max_turn_tokens=None if scorer is None else scorer.max_turn_tokens,
            render=turns,
            run_seed=cfg.run.seed,
            purpose=purpose,
        )
        yield Sampler(engine, num_engines, scores, episodes)


def plan_sampling(cfg: EvaluateConfig | GenerateConfig | ServeConfig, host: Host) -> RunPlan:
    """The plan of a command that samples. Raises UserError where the engines' devices do not
    divide those of this host."""
    plan = plan_run(cfg, "cuda" if runs_on_gpus(cfg.run) else "cpu", world_size=host.num_processes)
    size = plan.roles["engine"].axes.world
    if host.num_devices % size:
        raise UserError(
            f"engine.tensor_parallel_size is {size}, and this host has {host.num_devices} "
            f"processes: an engine's devices are of one host. Start a multiple of {size} on each."
        )
    return plan


def load_alone(plan: RunPlan, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine of one device, in this process."""
    return load_engine(plan, device, TensorParallel.from_environment(1, device), tokenizer)


def is_scored(cfg: EvaluateConfig | GenerateConfig) -> bool:
    """Whether completions get rewards. An evaluation always scores."""
    return isinstance(cfg, EvaluateConfig) or cfg.reward.has_parts or cfg.env.is_set


class Counter:
    """Progress of the first host's share, with the time left: a progress bar on a terminal, which
    is removed at the end, and log lines elsewhere."""

    def __init__(self, bar: Progress, noun: str, *, logs: bool) -> None:
        self._bar, self._noun, self._logs = bar, noun, logs
        self._task = bar.add_task(noun, total=None)
        self._begun: tuple[float, int] | None = None
        """Time and count at which the counting began."""
        self._logged_at = -math.inf

    def count(self, done: int, total: int) -> None:
        """Show how many are done. Without a terminal, log a line every `_LINE_EVERY_S` seconds."""
        self._bar.update(self._task, completed=done, total=total)
        now = monotonic()
        if self._begun is None:
            self._begun = now, done
            self._logged_at = now
        if not self._logs or now - self._logged_at < _LINE_EVERY_S or done == self._begun[1]:
            return
        self._logged_at, (began_s, before) = now, self._begun
        left_s = (now - began_s) / (done - before) * (total - done)
        _log.info("%s of %s %s, %s left", f"{done:,}", f"{total:,}", self._noun, _time(left_s))

    def waiting(self, text: str) -> None:
        """Show what the samples wait for. Without a terminal, log a line every `_LINE_EVERY_S`
        seconds."""
        if self._bar.console.is_terminal:
            self._bar.update(self._task, description=text)
        elif self._logs and monotonic() - self._logged_at > _LINE_EVERY_S:
            self._logged_at = monotonic()
            _log.info("%s", text)


@contextmanager
def counting(noun: str, *, is_shown: bool) -> Generator[Counter]:
    """Open a counter of things called `noun`."""
    columns = Progress.get_default_columns()
    # Rich needs further packages to show a bar in a notebook, and leaves an empty line elsewhere.
    console = get_console()
    is_shown = is_shown and not console.is_jupyter
    has_bar = is_shown and console.is_terminal
    with Progress(*columns, transient=True, disable=not has_bar) as bar:
        yield Counter(bar, noun, logs=is_shown and not has_bar)


def _time(seconds: float) -> str:
    """Format as `1:02:03`, hours, minutes and seconds."""
    return f"{timedelta(seconds=round(seconds))}"
