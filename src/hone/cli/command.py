"""From arguments to a checked configuration, for all commands with a recipe."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, Unpack

from hone.address import is_address
from hone.cli.recipe_record import record_recipe, require_same_recipe
from hone.config.base import Section
from hone.config.fit import fit_to_context
from hone.config.load import load_noted, resolve_recipe
from hone.config.plan import Command, Devices, RunPlan, known_models, resolve
from hone.config.roles import MODEL_KEYS
from hone.config.rules.finding import Finding
from hone.config.rules.view import Known
from hone.config.run import RunConfig
from hone.config.tree import (
    BenchEngineConfig,
    BenchTrainConfig,
    EvaluateConfig,
    GenerateConfig,
    PairsConfig,
    PlanConfig,
    RLConfig,
    ServeConfig,
    SFTConfig,
)
from hone.data.columns import Example, ExampleReader, choose_columns
from hone.data.pairs import map_pairs
from hone.data.row_filters import Keep, load_filter, wanted
from hone.data.settings import SourceBase
from hone.data.sources import is_json_array, iter_source, read_source, shorten
from hone.distributed.openmp import set_up_openmp
from hone.distributed.processes import has_hone_launcher, processes
from hone.distributed.spawn import INTERRUPTED, RESTART, spawn
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.registry import public_configs
from hone.families.tokens import is_of_tokenizers, raises_for_unknown
from hone.hardware import Peaks, available_host_bytes, installed_gpu, max_gpus
from hone.hub import refusal
from hone.models.settings import ModelConfig
from hone.observe.disk import free_bytes
from hone.observe.kept_result import require_same_settings
from hone.observe.resumed_run import (
    exported_step,
    is_finished,
    kept_choices,
    newest_step,
    require_resumable,
)
from hone.paths import data_suffix, local_path, must_be_local
from hone.planner.disk import check_disk
from hone.planner.fitting import (
    check_gpu_memory,
    check_host_memory,
    check_margin,
    has_room_for_two_rows,
)
from hone.planner.recompute import settled
from hone.rewards.builtin import BUILTINS, build
from hone.rewards.rules import needs_columns
from hone.rules import findings

__all__ = [
    "check_here",
    "check_host",
    "check_loaded",
    "check_plan",
    "chosen_device",
    "conclude",
    "has_nothing_left",
    "in_processes",
    "load_arguments",
    "load_checked",
    "load_fitted",
    "local_gpu",
    "near_name",
    "plan_here",
    "quiet_transformers",
    "require_no_error",
    "run_in_processes",
    "say_loading",
    "split",
    "started_here",
    "take_nproc",
    "take_word",
]

R = TypeVar("R", bound=RLConfig | SFTConfig)
B = TypeVar("B", bound=Command)
_log = logging.getLogger(__name__)
_NUM_CHECKED_ROWS = 64
_MAX_ARRAY_BYTES = 64 * 2**20
"""Largest JSON array file that is read for its first rows: more would take seconds and
gigabytes."""


def load_arguments(
    tree: type[B], argv: Sequence[str], *, starts: bool = False
) -> tuple[B, list[str]]:
    """Load `[RECIPE] [flags]`. Returns the configuration and notes for the user.

    The recipe is the first argument, a path or the name of a built-in. Unset lengths are fitted to
    the model; with `starts` the hub may be asked for it. Raises UserError if a training recipe
    would resume the run of another recipe of the same name.
    """
    recipe, flags = split(argv)
    return load_fitted(tree, recipe, flags, starts=starts)


def load_fitted(
    tree: type[B],
    recipe: Path | None,
    flags: Sequence[str] = (),
    values: Sequence[tuple[str, Mapping[str, Any]]] = (),
    *,
    starts: bool = False,
) -> tuple[B, list[str]]:
    """Load a recipe and flags as `load_arguments`, with the `values` that `load_noted` takes."""
    cfg, notes = load_noted(tree, recipe, flags, values)
    if recipe is not None and _trains(cfg):
        require_same_recipe(cfg.run.dir, recipe)
    model = _known_model(cfg, may_fetch=starts)
    cfg, chosen = fit_to_context(cfg, None if model is None else model.context_length)
    return cfg, [*notes, *chosen]


def _trains(cfg: Section) -> TypeGuard[RLConfig | SFTConfig]:
    """Whether the configuration belongs to a command that trains. That of `hone plan` has the same
    sections."""
    return isinstance(cfg, RLConfig | SFTConfig) and not isinstance(cfg, PlanConfig)


def split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split arguments into the recipe, if one is given, and the flags."""
    flags = list(argv)
    if flags and not flags[0].startswith("-") and ("=" not in flags[0] or Path(flags[0]).is_file()):
        return resolve_recipe(flags.pop(0)), flags
    return None, flags


def take_nproc(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """Take `--nproc N` or `--nproc=N` out of the arguments. Returns N, or None, and the rest.
    Raises UserError if N is no number above 0 or the flag is given twice."""
    given, words = take_word("--nproc", argv)
    if given is None:
        return None, words
    if not given.isdecimal() or int(given) == 0:
        raise UserError(f"--nproc takes the number of processes to start, 1 or more, got {given!r}")
    return int(given), words


def take_word(flag: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `flag` and its value out of the arguments. Returns the value, or None, and the rest.
    Raises UserError if it is given twice."""
    words = list(argv)
    positions = [n for n, word in enumerate(words) if word.partition("=")[0] == flag]
    if not positions:
        return None, words
    if len(positions) > 1:
        raise UserError(f"{flag} is given {len(positions)} times; give it once")
    (position,) = positions
    _, equals, value = words[position].partition("=")
    given = value if equals else "".join(words[position + 1 : position + 2])
    del words[position : position + (1 if equals else 2)]
    return given, words


def load_checked(
    tree: type[B],
    argv: Sequence[str],
    check: Callable[..., list[Finding]],
    nproc: int | None = None,
) -> B:
    """Load `[RECIPE] [flags]` and check it for the current processes, or for `nproc` that this one
    starts for its engines. Logs warnings and sets OpenMP's variables, after which torch may be
    loaded.

    Raises UserError with every error that the checks find.
    """
    cfg, notes = load_arguments(tree, argv, starts=True)
    check_loaded(cfg, notes, check, split(argv)[0], nproc)
    return cfg


def check_loaded(
    cfg: Command,
    notes: Sequence[str],
    check: Callable[..., list[Finding]],
    recipe: Path | None,
    nproc: int | None = None,
) -> None:
    """Check a configuration as `load_checked` does. `recipe` is its file, `notes` are lines for the
    user."""
    _set_up_openmp(cfg, nproc or processes().local_world_size)
    if nproc is not None and nproc > 1:
        _require_no_launcher(nproc)
        results = check(cfg, nproc, **started_here(nproc))
    else:
        results = check(cfg, processes().world_size)
    for note in notes:
        _log.info("note: %s", note)
    for finding in results:
        if finding.level == "warning":
            _log.warning("warning: %s", finding.message)
    require_no_error(results)
    if recipe is not None and _trains(cfg) and processes().rank == 0:
        record_recipe(cfg.run.dir, recipe)


def run_in_processes(
    command: str,
    tree: type[R],
    argv: Sequence[str],
    check: Callable[..., list[Finding]],
    nproc: int,
    *,
    requested_by: str = "--nproc",
) -> int:
    """Check `[RECIPE] [flags]`, then run the command in `nproc` processes. Returns the exit code.
    `requested_by` names the setting that asks for them. Raises UserError as `load_checked` does,
    before any process is started."""
    _require_no_launcher(nproc)
    cfg, _ = load_arguments(tree, argv, starts=True)
    require_no_error(check(cfg, nproc, **started_here(nproc, requested_by)))
    if has_nothing_left(cfg):
        return 0
    _set_up_openmp(cfg, nproc)
    _log.info("starting %d processes", nproc)
    on_death = partial(_record_death, cfg)
    words = [sys.executable, "-m", "hone", command, *argv]
    goes_on = cfg.run.resume == "auto"
    while (code := spawn(words, nproc, on_death)) == RESTART and goes_on:
        _log.warning("starting %d processes again", nproc)
    return code


def _require_no_launcher(nproc: int) -> None:
    if processes().world_size > 1:
        raise UserError(
            f"--nproc {nproc} was given to one of {processes().world_size} processes that torchrun "
            "has started. Leave out --nproc, or torchrun."
        )


def _record_death(
    cfg: RLConfig | SFTConfig, message: str, step: int, phase: str, pids: Sequence[int]
) -> None:
    from hone.loops.ending import record_death
    from hone.tools.report.pages import PAGES

    record_death(cfg.run.dir, message, pids=pids, step=step, phase=phase, pages=PAGES)


def _set_up_openmp(cfg: Command, num_processes: int) -> None:
    """Set OpenMP's variables for a run with `num_processes` processes on this host, remote engines
    not counted."""
    if isinstance(cfg, RLConfig) and cfg.cluster.is_used and cfg.cluster.address is None:
        roles = cfg.cluster.devices(cfg.engine.tensor_parallel_size)
        num_processes = sum(role.number for role in roles)
    model = _known_model(cfg)
    shape = None if model is None else model.shape
    set_up_openmp(cfg.run.device, shape, num_processes=num_processes)


def plan_here(
    cfg: Command, world_size: int | None, *, starts: bool = False, gpu: Peaks | None = None
) -> RunPlan:
    """The plan of `cfg` in `world_size` processes, including those of a remote critic, on this
    host's devices or on GPUs `gpu`. Without a GPU here `run.device` auto is the CPU, as for a run
    that starts here. What is `auto` is settled, but for `hone plan`, which searches it. Raises
    UserError if the record of what a resumed run has chosen is damaged."""
    num_gpus = _num_gpus()
    on_cpu = chosen_device(cfg.run.device) == "cpu"
    if gpu is not None:
        devices = Devices(kind="cuda", gpu=gpu)
    elif on_cpu:
        devices = Devices(kind="cpu", per_node=os.cpu_count(), host_bytes=available_host_bytes())
    else:
        devices = Devices(
            kind="cuda",
            gpu=local_gpu(),
            per_node=num_gpus or None,
            host_bytes=available_host_bytes() if num_gpus else None,
        )
    if world_size is not None and isinstance(cfg, RLConfig) and not isinstance(cfg, PlanConfig):
        world_size = max(world_size - cfg.cluster.num_critics, 0)
    plan = resolve(
        cfg,
        _known_model(cfg, may_fetch=starts),
        devices,
        world_size=world_size,
        others=known_models(cfg, may_fetch=starts),
    )
    return _settled(cfg, plan)


def in_processes(cfg: Command, plan: RunPlan, world_size: int) -> RunPlan:
    """The plan of `cfg` in `world_size` processes, with the devices and the models of `plan`, which
    was made for no particular number."""
    laid_out = resolve(cfg, plan.model, plan.devices, world_size=world_size, others=plan.others)
    return _settled(cfg, laid_out)


def _settled(cfg: Command, plan: RunPlan) -> RunPlan:
    """A plan of `cfg` with values in place of `auto`, as a run that goes on has chosen them."""
    return settled(plan, kept=kept_choices(cfg)) if _trains(cfg) else plan


def _known_model(cfg: Command, *, may_fetch: bool = False) -> ModelFacts | None:
    """Facts about the model that are known before it is loaded."""
    path = cfg.model.path or ""
    if isinstance(cfg, BenchEngineConfig | BenchTrainConfig) and cfg.model.shape is not None:
        path = cfg.model.shape
    return ModelFacts.known(path, may_fetch=may_fetch)


def check_plan(plan: RunPlan, **known: Unpack[Known]) -> list[Finding]:
    """All findings on a plan, errors first: settings, columns of local data, and memory of the GPUs
    or, if that is enough, of this host. `known` are further facts for the rules."""
    cfg = plan.config
    known["lacks_room_for_two_rows"] = not (plan.world_size is None or has_room_for_two_rows(plan))
    known |= first_rows(cfg) | _reward_problems(cfg) | _hub_problems(cfg)
    results = findings(plan, **known)
    if _trains(cfg):
        try:
            require_resumable(cfg, newest=newest_step(cfg.run.dir))
        except UserError as error:
            results.append(Finding("error", ("run.dir",), f"{error}"))
        results += check_run_disk(plan)
    if isinstance(cfg, EvaluateConfig | GenerateConfig):
        try:
            require_same_settings(cfg)
        except UserError as error:
            key = "run.dir" if isinstance(cfg, EvaluateConfig) else "output"
            results.append(Finding("error", (key,), f"{error}"))
    memory: list[Finding] = []
    if not plan.is_refused:
        # Otherwise more processes could be enough.
        if plan.world_size is not None or plan.trainer is None:
            memory = [*check_gpu_memory(plan)] or [*check_margin(plan)]
        if all(finding.level == "warning" for finding in memory):
            memory += check_host(plan)
    return sorted([*results, *memory], key=lambda finding: finding.level)


def check_run_disk(plan: RunPlan) -> Iterator[Finding]:
    """Findings if the disk of `run.dir` is too small for the files of the run. Only a warning if
    the run is for other machines, whose disk may differ."""
    if not _trains(plan.config):
        return
    folder = plan.config.run.dir
    saved = folder.glob("checkpoints/step_*/*")
    held = sum(path.stat().st_size for path in saved if path.is_file())
    is_here = plan.devices.host_bytes is not None
    for finding in check_disk(plan, free=free_bytes(folder), held=held):
        yield finding if is_here else replace(finding, level="warning")


def check_host(plan: RunPlan) -> list[Finding]:
    """Findings if this host's memory is too small for a plan."""
    own, world = processes(), plan.world_size or 1
    if plan.trainer is not None:
        world = plan.policy.axes.world
    num_local = min(own.local_world_size, world) if own.world_size > 1 else world
    if not plan.is_on_cpu:
        num_local = min(num_local, plan.devices.per_node or num_local)
    return [*check_host_memory(plan, num_local=num_local)]


def started_here(num_processes: int, requested_by: str = "--nproc") -> Known:
    """Facts for the rules about `num_processes` processes that are started on this host."""
    return {
        "num_started": num_processes,
        "started_by": requested_by,
        "gpus_here": _num_gpus(),
        "cores_here": os.cpu_count() or 1,
    }


def check_here(cfg: Command, world_size: int | None, **known: Unpack[Known]) -> list[Finding]:
    """Findings of `check_plan` for a command that is about to start here."""
    return check_plan(plan_here(cfg, world_size, starts=True), **known)


def chosen_device(device: str) -> str:
    """`run.device`, with `auto` replaced by cpu if this host has no GPU."""
    return "cpu" if device == "auto" and _num_gpus() == 0 else device


def _num_gpus() -> int | None:
    """Most GPUs that a run on this host can use. None if unknown."""
    return max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _reward_problems(cfg: Command) -> Known:
    """Errors in the arguments of built-in reward functions, as a fact for the rules."""
    if not isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig):
        return {}
    sampling = cfg.rollout if isinstance(cfg, RLConfig) else cfg
    problems: list[dict[str, str]] = []
    for index, function in enumerate(cfg.reward.functions):
        if function.fn in BUILTINS or is_address(function.fn):
            try:
                build(function.fn, function.args).check_limit(sampling.max_completion_tokens)
            except ValueError as error:
                key = f"reward.functions.{index}"
                problems.append({"key": key, "fn": function.fn, "problem": f"{error}"})
    return {"reward_problems": problems}


def _hub_problems(cfg: Command) -> Known:
    """Models that the hub does not provide, each with a public one of a similar name. Of several
    processes only the first one asks."""
    if processes().rank > 0:
        return {}
    paths = {"model.path": cfg.model.path}
    if isinstance(cfg, RLConfig):
        paths |= {key: attrgetter(key)(cfg) for key in MODEL_KEYS.values()}
    elif isinstance(cfg, EvaluateConfig | GenerateConfig):
        paths["reward.model.path"] = cfg.reward.model.path
    problems: list[dict[str, str]] = []
    for key, path in paths.items():
        if path is None or "/" not in path or Path(path).exists() or must_be_local(path):
            continue
        if (problem := refusal(path)) is not None:
            problems.append({"key": key, "path": path, "problem": problem, "near": near_name(path)})
    return {"hub_problems": problems}


def near_name(path: str) -> str:
    """Question for a public model of a similar name. Empty if there is none."""
    name = path.rpartition("/")[2].lower()
    near = get_close_matches(name, public_configs(), 1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near and near[0] != name else ""


def first_rows(cfg: Command) -> Known:
    """Facts for the rules about the first rows of local data that `data.filter` uses. Of several
    processes only the first one reads them."""
    if isinstance(cfg, ServeConfig | BenchEngineConfig | BenchTrainConfig):
        return {}
    if processes().rank > 0:
        return {}
    try:
        keep = load_filter(cfg.data.filter)
    except UserError as error:
        return {
            "data_problems": [
                {"key": "data.filter", "problem": f"{error}".removeprefix("data.filter: ")}
            ],
            "weak_pairs": [],
        }
    named = not isinstance(cfg, SFTConfig) and needs_columns(cfg.reward)
    unread: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    weak: list[dict[str, Any]] = []
    rows: dict[str, list[tuple[str, Collection[str]]]] = {}
    unwritable = unwritable_by(cfg.model)
    for section in ("train", "eval"):
        for index, source in enumerate(getattr(cfg.data, section)):
            path = local_path(source.path)
            if not path.is_file() or (suffix := data_suffix(path)) is None:
                continue
            key = f"data.{section}.{index}.path"
            # The run itself reads all rows. Unreadable files are reported by another rule.
            with suppress(OSError):
                num_bytes = path.stat().st_size
                is_large = suffix.startswith(".json") and num_bytes > _MAX_ARRAY_BYTES
                if is_large and is_json_array(path):
                    mib = f"{num_bytes / 2**20:,.0f}"
                    unread.append({"key": key, "path": source.path, "mib": mib})
                    continue
                try:
                    examples, weak_problems = _read_head(cfg, source, keep)
                    weak += [{"key": key, "problem": problem} for problem in weak_problems]
                    rows[f"data.{section}.{index}"] = [_held(x) for x in examples]
                    for example in examples:
                        if (problem := unwritable(example)) is not None:
                            problems.append({"key": key, "problem": problem})
                            break
                except UserError as error:
                    problems.append({"key": key, "problem": f"{error}"})
    facts: Known = {"data_problems": problems, "weak_pairs": weak}
    if named:
        facts |= {"first_rows": rows, "unread_arrays": unread}
    return facts | _too_few_rows(cfg, keep)


def _too_few_rows(
    cfg: RLConfig | SFTConfig | EvaluateConfig | GenerateConfig, keep: Keep | None
) -> Known:
    """How many rows there are to train on, where all sources are local files of moderate size and
    their rows do not fill a step."""
    if isinstance(cfg, EvaluateConfig | GenerateConfig):
        return {}
    is_supervised = isinstance(cfg, SFTConfig)
    size = cfg.data.examples_per_step if is_supervised else cfg.rollout.prompts_per_step
    number = 0
    for source in cfg.data.train:
        path = local_path(source.path)
        if not path.is_file() or data_suffix(path) is None:
            return {}
        try:
            if path.stat().st_size > _MAX_ARRAY_BYTES:
                return {}
            rows = (row for row in iter_source(source) if keep is None or keep(row))
            number += sum(1 for _ in islice(rows, size - number))
        except (OSError, UserError):
            return {}  # reported by the rules on files
        if number == size:
            return {}
    return {"num_train_rows": number} if number else {}


def _read_head(
    cfg: RLConfig | SFTConfig | EvaluateConfig | GenerateConfig,
    source: SourceBase,
    keep: Keep | None,
) -> tuple[list[Example], list[str]]:
    """The first rows of a source, without those that filters leave out, and warnings of pairs from
    which little can be learned. Raises UserError."""
    head = min(source.max_rows or _NUM_CHECKED_ROWS, _NUM_CHECKED_ROWS)
    found = read_source(source.model_copy(update={"max_rows": head}))
    rows = wanted(keep, found)
    if not rows:
        return [], []
    drops_missing = cfg.data.missing_answers == "drop"
    if isinstance(cfg, PairsConfig):
        items, weak = map_pairs(
            rows,
            source,
            is_unpaired=cfg.is_unpaired,
            reads_margin=cfg.for_reward_model,
            drops_missing=drops_missing,
        )
        return [example for item in items for example in item.completions], weak
    columns = choose_columns(rows, source, demonstrations=isinstance(cfg, SFTConfig))
    read = ExampleReader(source, columns, source.path)
    if drops_missing:
        rows = [row for row in rows if read.missing(row) is None]
    return read(rows, range(len(rows))), []


def unwritable_by(model: ModelConfig) -> Callable[[Example], str | None]:
    """Checker that returns the reason why the tokenizer of `model` cannot encode an example's
    texts, or None. It is always None if the model is not a local folder, and for byte-level
    tokenizers, which encode every text."""
    file = Path(model.tokenizer or model.path) / "tokenizer.json"
    if not raises_for_unknown(file):
        return lambda example: None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        if not is_of_tokenizers(error):
            raise
        return lambda example: None  # the run reports that the file is damaged

    def problem(example: Example) -> str | None:
        for text in _texts(example):
            try:
                tokenizer.encode(text)
            except Exception as error:
                if not is_of_tokenizers(error):
                    raise
                return (
                    f"{example.location}: the tokenizer cannot encode {shorten(text)!r} ({error}). "
                    "Leave such rows out, or name another tokenizer in model.tokenizer"
                )
        return None

    return problem


def _texts(example: Example) -> Iterator[str]:
    """The texts of an example that are tokenized unchanged."""
    asked = example.prompt
    messages = [*([] if isinstance(asked, str) else asked), *filter(None, [example.completion])]
    yield from [asked] if isinstance(asked, str) else []
    yield from (text for x in messages if isinstance(text := x.get("content"), str))


def _held(example: Example) -> tuple[str, Collection[str]]:
    """Location and column names of a row, without nulls. `answer` is added if some column is its
    answer."""
    names = {name for name, value in example.columns.items() if value is not None} - {"answer"}
    return example.location, names | ({"answer"} if example.answer is not None else set())


def local_gpu() -> Peaks | None:
    """The GPU type that a run on this host would use. None without a GPU or for an unknown one."""
    return installed_gpu() if _num_gpus() != 0 else None


def require_no_error(results: Sequence[Finding]) -> None:
    """Raise UserError with all errors of the findings."""
    errors = [finding.message for finding in results if finding.level == "error"]
    if errors:
        raise UserError("\nerror: ".join(errors))  # the command line adds the first "error: "


def say_loading() -> None:
    """Log that torch is being loaded, if it is not loaded yet: it takes seconds."""
    if "torch" not in sys.modules:
        _log.info("loading torch and transformers")


def quiet_transformers() -> None:
    """Switch off transformers' progress bars for reading and writing weights, which would break
    hone's. Downloads from the hub keep theirs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def has_nothing_left(cfg: RLConfig | SFTConfig) -> bool:
    """Whether the run is complete and its model written, so that nothing need be loaded. Logs
    this."""
    if not is_finished(cfg):
        return False
    _log.info(
        "run.steps is %d, and %s holds a run of %d: nothing is left to train. Raise it to go on, "
        "or choose another run.dir",
        cfg.run.steps,
        cfg.run.dir,
        exported_step(cfg),
    )
    return True


def conclude(cfg: RunConfig, *, steps: int, stopped_by: int | None, is_saved: bool = True) -> int:
    """Log where the results are and return the exit code: 0 for a finished run, 128 + n if signal n
    (`stopped_by`) ended it after `steps` steps. `is_saved` says whether the state of the last step
    is on disk."""
    model = cfg.dir / "model"
    if stopped_by is None:
        report = cfg.dir / "report.html"
        _log.info("done after step %d; the model: %s, the report: %s", steps, model, report)
        if not is_saved:
            _log.info("the state of step %d is not saved: the run cannot be extended", steps)
        return 0
    if not is_saved:
        _log.warning(
            "stopped after step %d of %d; the model: %s. Its state is not saved: the same command "
            "%s",
            steps,
            cfg.steps,
            model,
            _from_where(cfg),
        )
    elif steps:
        _log.warning(
            "stopped and saved after step %d of %d; the same command goes on from there",
            steps,
            cfg.steps,
        )
    else:
        _log.warning("stopped before the first step; the same command starts over")
    # The launcher knows the signal, and treats any other code as a failure of the process.
    return INTERRUPTED if has_hone_launcher() else 128 + stopped_by


def _from_where(cfg: RunConfig) -> str:
    """Describe what the same command does next time."""
    newest = newest_step(cfg.dir)
    return "starts over" if newest is None else f"goes on from step {newest}"
