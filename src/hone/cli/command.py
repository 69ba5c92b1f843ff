"""From arguments to a checked configuration: what the commands with a recipe share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from hone.cli.openmp import set_up_openmp
from hone.cli.recipe_record import record_recipe, require_same_recipe
from hone.config import UserError
from hone.config.base import Section
from hone.config.data import DataConfig
from hone.config.hardware import Peaks, installed_gpu, max_gpus
from hone.config.load import load_config, resolve_recipe
from hone.config.model_facts import ModelFacts
from hone.config.parallel import AxisSizes
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.reward import RewardConfig
from hone.config.rules import Finding, findings
from hone.config.rules.rewards import needs_columns
from hone.config.run import RunConfig
from hone.config.tree import (
    BenchEngineConfig,
    BenchTrainConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    SFTConfig,
)
from hone.data.columns import map_rows
from hone.data.sources import is_json_array, read_source
from hone.distributed.processes import has_hone_launcher, processes
from hone.distributed.spawn import INTERRUPTED, spawn
from hone.families.shape import ModelShape, public_shape
from hone.planner.fitting import check_host_fits, check_run_memory
from hone.planner.host_memory import available_host_bytes, sampler_role, shortage

__all__ = [
    "check_eval_here",
    "check_generate_here",
    "check_rl_here",
    "check_sft_here",
    "chosen_device",
    "conclude",
    "first_rows",
    "known_shape",
    "load_arguments",
    "load_checked",
    "local_gpu",
    "plan_of",
    "quiet_transformers",
    "run_in_processes",
    "take_nproc",
]

T = TypeVar("T", bound=Section)
R = TypeVar("R", bound=RLConfig | SFTConfig | EvaluateConfig | GenerateConfig)
Recipe = (
    RLConfig | SFTConfig | EvaluateConfig | GenerateConfig | BenchEngineConfig | BenchTrainConfig
)
B = TypeVar("B", bound=Recipe)
_log = logging.getLogger(__name__)
_NUM_CHECKED_ROWS = 64
_MAX_ARRAY_BYTES = 64 * 2**20
"""Of JSON arrays that are read for their first rows: more would take seconds and gigabytes."""


def load_arguments(tree: type[T], argv: Sequence[str]) -> T:
    """Load `[RECIPE] [flags]`. The recipe is the first argument, a path or a built-in's name.

    Raises UserError where a recipe to train by would go on with the run of another of its name.
    """
    recipe, flags = _split(argv)
    cfg = load_config(tree, recipe, flags)
    if recipe is not None and _trains(cfg):
        require_same_recipe(cfg.run.dir, recipe)
    return cfg


def _trains(cfg: Section) -> TypeGuard[RLConfig | SFTConfig]:
    """Whether it is of a command that trains; that of `hone simulate` has the same sections."""
    return type(cfg) in (RLConfig, SFTConfig)


def _split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe, if one is given, and the flags."""
    flags = list(argv)
    if flags and not flags[0].startswith("-") and ("=" not in flags[0] or Path(flags[0]).is_file()):
        return resolve_recipe(flags.pop(0)), flags
    return None, flags


def take_nproc(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """`--nproc N` or `--nproc=N`, None without it, and the other arguments.

    Raises UserError for what is no number above 0, and where it is given twice.
    """
    words = list(argv)
    positions = [n for n, word in enumerate(words) if word.partition("=")[0] == "--nproc"]
    if not positions:
        return None, words
    if len(positions) > 1:
        raise UserError(f"--nproc is given {len(positions)} times; give it once")
    (position,) = positions
    _, equals, value = words[position].partition("=")
    given = value if equals else "".join(words[position + 1 : position + 2])
    del words[position : position + (1 if equals else 2)]
    if not given.isdecimal() or int(given) == 0:
        raise UserError(f"--nproc takes the number of processes to start, 1 or more, got {given!r}")
    return int(given), words


def load_checked(tree: type[B], argv: Sequence[str], check: Callable[[B, int], list[Finding]]) -> B:
    """Load `[RECIPE] [flags]` and check it for the processes that run; warnings are logged. Makes
    OpenMP's settings, so that torch may be loaded.

    Raises UserError with every error that the checks have found.
    """
    cfg = load_arguments(tree, argv)
    _set_up_openmp(cfg, processes().local_world_size)
    found = check(cfg, processes().world_size)
    for finding in found:
        if finding.level == "warning":
            _log.warning("warning: %s", finding.message)
    _require_no_error(found)
    recipe, _ = _split(argv)
    if recipe is not None and _trains(cfg) and processes().rank == 0:
        record_recipe(cfg.run.dir, recipe)
    return cfg


def run_in_processes(
    command: str,
    tree: type[R],
    argv: Sequence[str],
    check: Callable[[R, int], list[Finding]],
    nproc: int,
    *,
    asked_by: str = "--nproc",
) -> int:
    """Check `[RECIPE] [flags]`, then run the command in `nproc` processes, as `asked_by` says; the
    exit code.

    Raises UserError as `load_checked` does, before any process is started.
    """
    if processes().world_size > 1:
        raise UserError(
            f"--nproc {nproc} was given to one of {processes().world_size} processes that torchrun "
            "has started. Leave out --nproc, or torchrun."
        )
    cfg = load_arguments(tree, argv)
    _require_no_error(check(cfg, nproc))
    here = {"gpus_here": _num_gpus(), "cores_here": os.cpu_count() or 1}
    plan = plan_of(cfg, nproc)
    _require_no_error(findings(plan, num_started=nproc, started_by=asked_by, **here))
    _set_up_openmp(cfg, nproc)
    _log.info("starting %d processes", nproc)
    on_death = partial(_record_death, cfg) if isinstance(cfg, RLConfig | SFTConfig) else None
    return spawn([sys.executable, "-m", "hone", command, *argv], nproc, on_death)


def _record_death(
    cfg: RLConfig | SFTConfig, message: str, step: int, phase: str, pids: Sequence[int]
) -> None:
    from hone.loops.ending import record_death

    draws_report = cfg.log.report
    record_death(cfg.run.dir, message, pids=pids, step=step, phase=phase, draws_report=draws_report)


def _set_up_openmp(cfg: Recipe, num_processes: int) -> None:
    """For a run of which this host has `num_processes` processes, engines of its own apart."""
    if isinstance(cfg, RLConfig) and cfg.cluster.is_used and cfg.cluster.address is None:
        roles = cfg.cluster.devices(cfg.engine.tensor_parallel_size)
        num_processes = sum(role.number for role in roles)
    path = cfg.model.path
    if isinstance(cfg, BenchEngineConfig | BenchTrainConfig) and cfg.model.shape is not None:
        path = cfg.model.shape
    shape = known_shape(path) if path is not None else None
    set_up_openmp(cfg.run.device, shape, num_processes=num_processes)


def check_rl_here(cfg: RLConfig, world_size: int | None, *, starts: bool = False) -> list[Finding]:
    """Findings for `hone rl`, among them whether it fits into this host's memory and on its GPU,
    where these, the number of processes and the model's shape are known; `starts` as in
    `_fits_host`."""
    found = findings(plan_of(cfg, world_size), **first_rows(cfg.reward, cfg.data))
    gpu, shape = local_gpu(), known_shape(cfg.model.path)
    if shape is None:
        return found
    does_not_fit: list[Finding] = []
    if gpu is not None and world_size is not None:
        # Where the processes make no mesh, that is among the errors.
        with suppress(UserError):
            does_not_fit += check_run_memory(cfg, shape, world_size=world_size, gpu=gpu)
    if not does_not_fit:
        does_not_fit += _fits_host(cfg, world_size, starts=starts)
    return sorted([*found, *does_not_fit], key=lambda finding: finding.level)


def check_sft_here(
    cfg: SFTConfig, world_size: int | None, *, starts: bool = False
) -> list[Finding]:
    """Findings for `hone sft`, as `check_rl_here`."""
    found = [
        *findings(plan_of(cfg, world_size)),
        *_fits_host(cfg, world_size, starts=starts),
    ]
    return sorted(found, key=lambda finding: finding.level)


def check_eval_here(
    cfg: EvaluateConfig, world_size: int | None, *, starts: bool = False
) -> list[Finding]:
    """Findings for `hone eval`, as `check_rl_here`."""
    found = [
        *findings(plan_of(cfg, world_size), **first_rows(cfg.reward, cfg.data)),
        *_fits_host(cfg, world_size, starts=starts),
    ]
    return sorted(found, key=lambda finding: finding.level)


def check_generate_here(
    cfg: GenerateConfig, world_size: int | None, *, starts: bool = False
) -> list[Finding]:
    """Findings for `hone generate`, as `check_rl_here`."""
    found = [
        *findings(plan_of(cfg, world_size)),
        *_fits_host(cfg, world_size, starts=starts),
    ]
    return sorted(found, key=lambda finding: finding.level)


def plan_of(cfg: Recipe, world_size: int | None) -> RunPlan:
    """The plan of `cfg` in so many processes, as far as no device is asked."""
    name = cfg.model.path
    if isinstance(cfg, BenchEngineConfig | BenchTrainConfig) and cfg.model.shape is not None:
        name = cfg.model.shape
    model = None if name is None else ModelFacts.known(name)
    devices = Devices(kind="cpu" if cfg.run.device == "cpu" else "cuda")
    return resolve(cfg, model, devices, world_size=world_size)


def _fits_host(
    cfg: RLConfig | SFTConfig | EvaluateConfig | GenerateConfig,
    world_size: int | None,
    *,
    starts: bool,
) -> list[Finding]:
    """Whether this host's memory holds the run, where it is to be here and the shape is known.

    Without a GPU `run.device` auto is a run on the CPU. That is an error where the run `starts`
    here, and a warning of `hone check`, which plans for hosts with GPUs too.
    """
    shape, num_gpus = known_shape(cfg.model.path), _num_gpus()
    is_elsewhere = cfg.run.device == "auto" and num_gpus == 0 and not starts
    cfg = cfg.model_copy(
        update={"run": cfg.run.model_copy(update={"device": chosen_device(cfg.run.device)})}
    )
    if shape is None or (cfg.run.device != "cpu" and not num_gpus):
        return []
    own, available = processes(), available_host_bytes()
    found: list[Finding] = []
    if isinstance(cfg, RLConfig | SFTConfig):
        with suppress(UserError):  # where the processes make no mesh, that is among the errors
            world = AxisSizes.of(cfg.trainer.parallel, world_size).world
            num_local = min(own.local_world_size, world) if own.world_size > 1 else world
            if cfg.run.device != "cpu":
                num_local = min(num_local, num_gpus or num_local)
            found += check_host_fits(
                cfg, shape, world_size=world_size, num_local=num_local, available=available
            )
    elif cfg.run.device == "cpu":
        num_local = own.local_world_size if own.world_size > 1 else world_size or 1
        lack = shortage(
            [sampler_role(cfg, shape, num_local=num_local)],
            available=available,
            takes="to sample takes at least",
            advice="Use a smaller model (model.path), fewer processes, or a host with more memory.",
            keys=("model.path",),
        )
        found += [lack] if lack else []
    if not is_elsewhere:
        return found
    here = "without a GPU here, run.device auto is a run on this host's CPU, and "
    return [replace(x, level="warning", message=here + x.message) for x in found]


def chosen_device(device: str) -> str:
    """`run.device` with `auto` replaced by cpu where this host has no GPU."""
    return "cpu" if device == "auto" and _num_gpus() == 0 else device


def _num_gpus() -> int | None:
    """The most GPUs that a run on this host can use; None where it is not known."""
    return max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def first_rows(reward: RewardConfig, data: DataConfig) -> dict[str, Any]:
    """Of the first rows of data on this host, what rules on reward functions must know. Of several
    processes the first one looks: the others would read the same."""
    if not needs_columns(reward) or processes().rank > 0:
        return {}
    unread: list[dict[str, Any]] = []
    rows: list[tuple[str, Collection[str], Collection[str]]] = []
    for section in ("train", "eval"):
        for index, source in enumerate(getattr(data, section)):
            path = Path(source.path).expanduser()
            if not path.is_file():
                continue
            head = min(source.max_rows or _NUM_CHECKED_ROWS, _NUM_CHECKED_ROWS)
            # The run reads all rows, and says what is wrong with the data.
            with suppress(UserError, OSError):
                num_bytes = path.stat().st_size
                if path.suffix == ".json" and num_bytes > _MAX_ARRAY_BYTES and is_json_array(path):
                    key, mib = f"data.{section}.{index}.path", f"{num_bytes / 2**20:,.0f}"
                    unread.append({"key": key, "path": source.path, "mib": mib})
                    continue
                read = read_source(source.model_copy(update={"max_rows": head}))
                examples = map_rows(read, source, name=source.path)
                rows += [(x.location, x.columns, x.metadata) for x in examples]
    return {"first_rows": rows, "unread_arrays": unread}


def local_gpu() -> Peaks | None:
    """The GPU that a run on this host would use; None without one, and for one that is unknown."""
    return installed_gpu() if _num_gpus() != 0 else None


def known_shape(model_path: str) -> ModelShape | None:
    """The shape of a model whose `config.json` is here or whose hub name is that of a public shape;
    None for others, and for families that are not planned for."""
    if not Path(model_path).exists():
        return public_shape(model_path.rpartition("/")[2].lower())
    try:
        return ModelShape.from_config(model_path)
    except (OSError, ValueError):
        return None


def _require_no_error(found: Sequence[Finding]) -> None:
    errors = [finding.message for finding in found if finding.level == "error"]
    if errors:
        raise UserError("\nerror: ".join(errors))  # the command line writes the first one


def quiet_transformers() -> None:
    """Switch off the bars that transformers draws for reading and writing weights: they would cut
    through ours. Downloads from the hub keep theirs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def conclude(cfg: RunConfig, *, steps: int, stopped_by: int | None) -> int:
    """Say where things are and return the exit code: 0 for a finished run, 128 + n for one that
    signal n, `stopped_by`, ended after `steps` steps."""
    if stopped_by is None:
        _log.info("done after step %d: the model and all records are in %s", steps, cfg.dir)
        return 0
    if steps:
        _log.warning(
            "stopped and saved after step %d of %d; the same command goes on from there",
            steps,
            cfg.steps,
        )
    else:
        _log.warning("stopped before the first step; the same command starts over")
    # The launcher knows which signal came, and takes any other code for a failure of the process.
    return INTERRUPTED if has_hone_launcher() else 128 + stopped_by
