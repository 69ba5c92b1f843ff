"""The Python API: the commands of the command line, in this process.

A configuration is the name or path of a recipe, a nested dict, or typed sections. Sections given as
keyword arguments are merged into it and win. Everything is checked as on the command line, before
anything is loaded. Mistakes of the user raise `UserError`, whose traceback ends here;
`HONE_TRACEBACK=1` in the environment shows the full one.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from hone.cli import rl as rl_command
from hone.cli import sft as sft_command
from hone.cli.command import (
    check_here,
    check_loaded,
    check_plan,
    load_fitted,
    plan_here,
    quiet_transformers,
)
from hone.config.base import Section
from hone.config.plan import RECIPE_TREES, Command
from hone.config.recipe import resolve_recipe
from hone.config.rules.finding import Finding
from hone.config.tree import (
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
    SFTDataConfig,
)
from hone.data.given import GivenRows, given_rows, is_source
from hone.errors import UserError
from hone.hardware import known_gpu
from hone.notebook import following
from hone.observe.disk import TEMPORARY, temporary_directory
from hone.observe.user_errors import raises_user_errors
from hone.paths import standing_in
from hone.results import Check, Evaluation, RunResult, SampleRecord, read_samples
from hone.rewards.settings import RewardConfig
from hone.tools.plan.lines import plan_lines
from hone.user_code.inherited import inheriting

if TYPE_CHECKING:
    from hone.data_pages import DataPage, data_check, data_show, data_stats

__all__ = [
    "Check",
    "DPOConfig",
    "DataPage",
    "EvaluateConfig",
    "Evaluation",
    "GenerateConfig",
    "RLConfig",
    "RewardModelingConfig",
    "RunResult",
    "SFTConfig",
    "SampleRecord",
    "UserError",
    "check",
    "data_check",
    "data_show",
    "data_stats",
    "dpo",
    "evaluate",
    "generate",
    "reward_model",
    "rl",
    "sft",
]

T = TypeVar("T", bound=Command)

_OF_DATA = frozenset(("DataPage", "data_check", "data_show", "data_stats"))


def __getattr__(name: str) -> Any:
    # What draws pages takes a tenth of the time in which this module loads, and no run needs it.
    if name not in _OF_DATA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hone import data_pages

    return getattr(data_pages, name)


Config: TypeAlias = str | Path | Mapping[str, Any] | Section
"""A recipe by name or path, a nested dict, or typed sections."""
RewardLike: TypeAlias = str | Callable[..., Any] | Mapping[str, Any] | RewardConfig
"""A function, the name of one as in a recipe, or `{"fn": ..., "weight": ..., "args": {...}}`; or
the section `reward`, as in `{"functions": [...], "timeout_s": 60}`."""
Data: TypeAlias = str | Path | Mapping[str, Any] | Iterable[Any]
"""Rows (dicts, or texts for prompts alone), a pandas DataFrame, a `datasets.Dataset`, the path or
hub name of a data set, or the section `data` as a dict."""

_log = logging.getLogger("hone")


@raises_user_errors
def rl(
    config: Config | None = None,
    *,
    reward: RewardLike | Iterable[RewardLike] | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    **sections: Any,
) -> RunResult:
    """Train by reinforcement learning, like `hone rl`.

    `reward` replaces `reward.functions`, `data` replaces `data.train` and `eval_data` replaces
    `data.eval`; `sections` are merged into `config`, and so are settings of the section `data` by
    their own names, such as `chat="never"`. Ctrl-C saves and returns; the same call resumes from
    there. Raises UserError.

        def correct(completion, answer):
            return float(completion.strip() == answer)

        rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
        result = hone.rl(
            reward=correct, data=rows, model={"path": "Qwen/Qwen3-0.6B"}, run={"steps": 20}
        )
        pandas.DataFrame(result.metrics).plot("step", "reward/mean")
    """
    given = _Given(RLConfig, config, sections, reward, _splits(data, eval_data))
    return _train(given, rl_command.check, rl_command.train)


@raises_user_errors
def sft(
    config: Config | None = None,
    *,
    data: Data | None = None,
    eval_data: Data | None = None,
    **sections: Any,
) -> RunResult:
    """Train on demonstrations, like `hone sft`.

    `data` replaces `data.train`, `eval_data` replaces `data.eval`. Raises UserError.

        rows = [{"prompt": "1+1=", "completion": "2"}]
        result = hone.sft(data=rows, model={"path": "Qwen/Qwen3-0.6B"}, run={"steps": 20})
        result.final["train/loss"], result.model_dir
    """
    return _train_on_rows(SFTConfig, config, sections, data, eval_data)


@raises_user_errors
def dpo(
    config: Config | None = None,
    *,
    data: Data | None = None,
    eval_data: Data | None = None,
    **sections: Any,
) -> RunResult:
    """Train on preferences, like `hone dpo`.

    `data` replaces `data.train`, `eval_data` replaces `data.eval`. Raises UserError.

        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
        result = hone.dpo(data=rows, model={"path": "runs/sft/model"}, run={"steps": 20})
        result.final["rewards/margins"], result.model_dir
    """
    return _train_on_rows(DPOConfig, config, sections, data, eval_data)


@raises_user_errors
def reward_model(
    config: Config | None = None,
    *,
    data: Data | None = None,
    eval_data: Data | None = None,
    **sections: Any,
) -> RunResult:
    """Train a model that scores completions, like `hone reward-model`.

    `data` replaces `data.train`, `eval_data` replaces `data.eval`. Raises UserError.

        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
        result = hone.reward_model(data=rows, model={"path": "runs/sft/model"}, run={"steps": 20})
        AutoModelForSequenceClassification.from_pretrained(result.model_dir)
    """
    return _train_on_rows(RewardModelingConfig, config, sections, data, eval_data)


@raises_user_errors
def evaluate(
    config: Config | None = None,
    *,
    reward: RewardLike | Iterable[RewardLike] | None = None,
    data: Data | None = None,
    **sections: Any,
) -> Evaluation:
    """Score a model on a data set, like `hone eval`.

    `reward` replaces `reward.functions`, `data` replaces `data.eval`. Raises UserError.

        scores = hone.evaluate(model={"path": "runs/mine/model"}, data=rows, reward="exact_match")
        scores.metrics["eval/reward/mean"], scores.samples[0].completion
    """
    given = _Given(EvaluateConfig, config, sections, reward, {"data": ("eval", data)})
    with given.loaded(check_here) as cfg:
        from hone.loops.evaluation import run_evaluation
        from hone.tools.report.pages import PAGES

        quiet_transformers()
        return Evaluation(cfg.run.dir, run_evaluation(cfg, pages=PAGES))


@raises_user_errors
def generate(
    config: Config | None = None, *, data: Data | None = None, **sections: Any
) -> list[SampleRecord]:
    """Sample completions, like `hone generate`. `data` replaces `data.train`. Without `output`
    nothing stays on disk. Raises UserError.

        [sample] = hone.generate(model={"path": "runs/mine/model"}, data=["1+1="])
        sample.completion, sample.logprobs
    """
    given = _Given(GenerateConfig, config, sections, None, {"data": ("train", data)})
    with given.loaded(check_here) as cfg:
        from hone.loops.generation import run_generation

        quiet_transformers()
        run_generation(cfg)
        return read_samples(cfg.output)


@raises_user_errors
def check(
    config: Config | None = None,
    *,
    command: str = "rl",
    reward: RewardLike | Iterable[RewardLike] | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    nproc: int | None = 1,
    gpu: str | None = None,
    **sections: Any,
) -> Check:
    """Check a run of `command` (rl, sft, dpo, reward-model, eval or generate) like `hone check`, in
    `nproc` processes, on this host or on GPUs of type `gpu`. Loads no model and leaves nothing on
    disk.

    Raises UserError for arguments that make no configuration; all other problems are returned.

        result = hone.check("gsm8k", gpu="a100-40g", nproc=8)
        result.errors, result.warnings, result.derived["samples_per_step"]
    """
    if type(command) is not str or command not in RECIPE_TREES:
        raise UserError(f"command={command!r}; allowed: {', '.join(RECIPE_TREES)}")
    if nproc is not None and (type(nproc) is not int or nproc < 1):
        raise UserError(f"nproc={nproc!r}; allowed: a whole number >= 1, or None: any")
    if gpu is not None and type(gpu) is not str:
        raise UserError(
            f"gpu={gpu!r}; allowed: the name of a GPU, such as 'h200', or None: this host"
        )
    splits = {"data": ("eval", data)} if command == "eval" else _splits(data, eval_data)
    given = _Given(RECIPE_TREES[command], config, sections, reward, splits, starts=False)
    with given.loaded() as cfg:
        plan = plan_here(cfg, nproc, gpu=None if gpu is None else known_gpu(gpu))
        lines = plan_lines(plan)
        return Check(
            check_plan(plan),
            {line.name: line.value for line in lines},
            cfg.model_dump(mode="json"),
            {line.name: line.how for line in lines},
        )


def _train_on_rows(
    tree: type[SFTConfig],
    config: Config | None,
    sections: Any,
    data: Data | None,
    eval_data: Data | None,
) -> RunResult:
    given = _Given(tree, config, sections, None, _splits(data, eval_data))
    return _train(given, check_here, sft_command.train)


def _train(given: _Given[Any], checks: Callable[..., Any], train: Callable[..., Any]) -> RunResult:
    def own_checks(cfg: Command, world_size: int) -> list[Finding]:
        if (
            isinstance(cfg, RLConfig)
            and cfg.cluster.is_used
            and cfg.cluster.num_processes > world_size == 1
        ):
            raise UserError(
                f"{cfg.cluster.processes_by} {cfg.cluster.num_processes} asks for several "
                "processes, and this is one. Write the configuration into a recipe and call `hone "
                "rl RECIPE`, or start this program with torchrun."
            )
        return checks(cfg, world_size)

    with given.loaded(own_checks) as cfg:
        with following(cfg.run.dir, cfg.run.steps):
            outcome = train(cfg)
        if outcome.stopped_by is not None:
            _log.warning(
                "stopped after step %d of %d; the same call goes on from %s",
                outcome.steps,
                cfg.run.steps,
                "there" if outcome.is_saved else "the last checkpoint, or starts over without one",
            )
        return RunResult(cfg.run.dir, outcome.steps, outcome.stopped_by)


def _splits(data: Any, eval_data: Any) -> dict[str, tuple[str, Any]]:
    return {"data": ("train", data), "eval_data": ("eval", eval_data)}


@dataclass
class _Given(Generic[T]):
    """The arguments of a call."""

    tree: type[T]
    config: Config | None
    sections: Mapping[str, Any]
    reward: Any
    data: Mapping[str, tuple[str, Any]]
    """By the name of the argument: the split, and the value given for it."""
    starts: bool = True
    """Whether the run starts in this process, so that the hub may be asked."""
    recipe: Path | None = field(default=None, init=False)

    @contextmanager
    def loaded(self, checks: Callable[..., list[Finding]] | None = None) -> Generator[T]:
        """Yield the configuration. In the block, reward workers inherit the functions that they
        cannot import, and the given rows can be read.

        Once `checks` have passed, rows are written where the run finds them again; files that are
        already there stay unchanged.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UserError(
                "hone is called from a thread, where no signal can be handled; call it from the "
                "main thread of the program."
            )
        functions: dict[str, Callable[..., Any]] = {}
        values, rows = self._values(functions), self._rows()
        with ExitStack() as stack:
            stack.enter_context(_logging())
            stack.enter_context(inheriting(functions))
            temporary = Path(stack.enter_context(temporary_directory("hone-")))
            files = [given.write(temporary, TEMPORARY) for given in rows]
            draft, _ = self._fitted([*values, *_sources(rows, temporary)])
            folder = _data_folder(draft)
            if isinstance(draft, GenerateConfig) and "output" not in draft.model_fields_set:
                values.append(("output", {"output": temporary / "completions.jsonl"}))
                folder = temporary
            cfg, notes = self._fitted([*values, *_sources(rows, folder)])
            stand_ins = {str(x.file(folder)): file for x, file in zip(rows, files, strict=True)}
            with standing_in(stand_ins):
                if checks is None:
                    yield cfg
                    return
                check_loaded(cfg, notes, checks, self.recipe)
            for given in rows:
                given.write(folder)
            yield cfg

    def _fitted(self, values: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[T, list[str]]:
        return load_fitted(self.tree, self.recipe, (), values, starts=self.starts)

    def _values(
        self, functions: dict[str, Callable[..., Any]]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """The settings to merge, in this order, each with its name for messages. Functions that
        workers inherit are added to `functions`."""
        values: list[tuple[str, Mapping[str, Any]]] = []
        match self.config:
            case None:
                pass
            case str() | Path():
                self.recipe = resolve_recipe(str(self.config))
            case Section() | Mapping():
                values.append(("config", _plain_config(self.config, self.tree, functions)))
            case _:
                raise UserError(
                    f"config is of type {type(self.config).__name__}; give the name or path of a "
                    f"recipe, a dict of sections, or a {self.tree.__name__}"
                )
        of_data = _data_settings(self.tree)
        for name, section in self.sections.items():
            own = {name: _plain(section, name, functions)}
            values.append((f"{name}=", {"data": own} if name in of_data else own))
        if isinstance(self.reward, RewardConfig) or (
            isinstance(self.reward, Mapping) and self.reward.keys() & RewardConfig.model_fields
        ):
            values.append(("reward=", {"reward": _plain(self.reward, "reward", functions)}))
        elif self.reward is not None:
            entries = [_reward(entry, functions) for entry in _entries(self.reward)]
            values.append(("reward=", {"reward": {"functions": entries}}))
        for name, (split, data) in self.data.items():
            if is_source(data):
                if not re.fullmatch(r"[\w./~-]+", str(data)) and not os.path.exists(data):
                    raise UserError(
                        f"{name}={str(data)!r} names no file and no data set; prompts go into a "
                        f"list: {name}=[{str(data)!r}]"
                    )
                values.append((f"{name}=", {"data": {split: [{"path": str(data)}]}}))
            elif _is_section(data):
                values.append((f"{name}=", {"data": _plain(data, "data", functions)}))
        return values

    def _rows(self) -> list[GivenRows]:
        """The arguments that are rows themselves, not the name of a data set or a section."""
        return [
            GivenRows.of(split, given_rows(data, name))
            for name, (split, data) in self.data.items()
            if data is not None and not is_source(data) and not _is_section(data)
        ]


def _data_settings(tree: type[Section]) -> set[str]:
    """Settings of the section `data` that are arguments by themselves: how rows are read. Its
    sources are the arguments `data` and `eval_data`."""
    section = tree.model_fields["data"].annotation
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return {*section.model_fields} - {"train", "eval"} - {*tree.model_fields}


def _is_section(data: Any) -> bool:
    """Whether the argument `data` is the section of that name, rather than rows or splits."""
    if isinstance(data, Section):
        return True
    if type(data) is not dict:  # a `DatasetDict` is a mapping too
        return False
    is_table = all(isinstance(value, list) for value in data.values())
    return not is_table or not data.keys().isdisjoint(SFTDataConfig.model_fields)


def _sources(rows: Sequence[GivenRows], folder: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The settings that name the files of rows in a folder."""
    return [
        ("data=", {"data": {given.split: [{"path": str(given.file(folder))}]}}) for given in rows
    ]


def _data_folder(cfg: Command) -> Path:
    """The folder in which a run keeps the rows that a program passed."""
    if isinstance(cfg, GenerateConfig):
        return cfg.output.with_name(f"{cfg.output.name}.data")
    assert isinstance(cfg, RLConfig | SFTConfig | EvaluateConfig)
    return cfg.run.dir / "data"


def _plain_config(
    config: Section | Mapping[str, Any],
    tree: type[Section],
    functions: dict[str, Callable[..., Any]],
) -> Mapping[str, Any]:
    if isinstance(config, Section) and not isinstance(config, tree):
        raise UserError(
            f"config is a {type(config).__name__}, and this call takes a {tree.__name__}; give one "
            "section by its name, as in run=..."
        )
    plain = _plain(config, "config", functions)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any, where: str, functions: dict[str, Callable[..., Any]]) -> Any:
    """A setting in the form of a recipe: sections and mappings become dicts, tuples lists, array
    scalars numbers, and functions names.

    Raises UserError for keys that are not texts.
    """
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{where}: the key {key!r} must be a text")
        return {key: _plain(item, f"{where}.{key}", functions) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{i}", functions) for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | float | None):
        return value
    if callable(value):
        if re.fullmatch(r"(config\.)?reward\.functions\.\d+", where):
            return {"fn": _name(value, functions)}
        if where.endswith("env.path"):
            return _import_name(value, functions)
        if not where.endswith(".fn"):
            raise UserError(
                f"{where} is a function or a class; functions go into reward=, alone or in a list, "
                "the class of an environment into env={'path': ...}"
            )
        return _name(value, functions)
    to_item = getattr(value, "item", None)
    return to_item() if callable(to_item) else value


def _entries(reward: Any) -> list[Any]:
    if isinstance(reward, str | Mapping) or callable(reward):
        return [reward]
    if not isinstance(reward, list | tuple) or not reward:
        raise UserError(
            f"reward is {reward!r}; give a function, a name such as 'exact_match' or "
            "'rewards.py:score', a dict with `fn`, `weight` and `args`, or a list of these"
        )
    return list(reward)


def _reward(entry: Any, functions: dict[str, Callable[..., Any]]) -> Any:
    """An entry of `reward.functions`."""
    if isinstance(entry, Mapping):
        return _plain(entry, "reward", functions)
    if isinstance(entry, str):
        return {"fn": entry}
    if callable(entry):
        return {"fn": _name(entry, functions)}
    raise UserError(
        f"reward holds {entry!r}, which is no function; give functions, names, or dicts with "
        "`fn`, `weight` and `args`"
    )


def _name(function: Callable[..., Any], functions: dict[str, Callable[..., Any]]) -> str:
    """`_import_name` of a reward function."""
    if isinstance(function, type):
        raise UserError(
            f"reward is the class {function.__name__}; give a function, or an instance that can be "
            "called"
        )
    return _import_name(function, functions)


def _import_name(function: Callable[..., Any], functions: dict[str, Callable[..., Any]]) -> str:
    """The name under which a worker imports the function or class, or else inherits it; then it is
    added to `functions`."""
    module = getattr(function, "__module__", None)
    qualified: str = getattr(function, "__qualname__", type(function).__name__)
    loaded: Any = sys.modules.get(module) if isinstance(module, str) else None
    if (
        module != "__main__"
        and getattr(loaded, qualified, None) is function
        and getattr(loaded, "__file__", None)
    ):
        return f"{module}:{qualified}"
    base = re.sub(r"\W+", "_", qualified.rpartition(".")[2]).strip("_") or "reward"
    name, number = f"__main__:{base}", 1
    while functions.get(name, function) is not function:
        number += 1
        name = f"__main__:{base}_{number}"
    functions[name] = function
    return name


@contextmanager
def _logging() -> Generator[None]:
    """Show hone's log messages on stderr in the block, unless the program has its own handlers."""
    if logging.getLogger().handlers or _log.handlers:
        yield
        return
    handler, level = logging.StreamHandler(), _log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
