"""Checks on files: data, model folders, trackers' packages. Nothing is imported or run."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.data import TEMPLATE_FIELD, DataConfig, SourceConfig
from hone.config.extras import missing_extra
from hone.config.model import ModelConfig
from hone.config.paths import DATA_SUFFIXES, is_saved_dataset, must_be_local
from hone.config.run import LogConfig
from hone.config.tree import EvaluateDataConfig

__all__ = [
    "check_data",
    "check_log",
    "check_model",
    "check_run_dir",
    "check_unused_data",
    "unwritable",
]

_NO_DEMONSTRATION = ("columns.completion",)
_NO_REWARD = ("columns.answer", "columns.task", "answer_pattern", "task")
_UNUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rl": {"train": _NO_DEMONSTRATION, "eval": (*_NO_DEMONSTRATION, "weight")},
    "sft": {"train": _NO_REWARD, "eval": (*_NO_REWARD, "weight")},
    "eval": {
        "train": (*_NO_DEMONSTRATION, "weight"),
        "eval": (*_NO_DEMONSTRATION, "weight"),
        "": ("shuffle",),
    },
    "generate": {"train": (*_NO_DEMONSTRATION, "weight"), "": ("shuffle",)},
}
"""Keys of each source of `data.train` and `data.eval`, and of `data` itself, that a command reads
past: rewards have no demonstrations, demonstrations no rewards, and what is not trained on is taken
whole, in the order of its files."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_run_dir(folder: Path) -> Iterator[Finding]:
    """Whether a run folder is there, or can be made."""
    if folder.is_file():
        yield error(f"run.dir '{folder}' is a file; name a folder.", "run.dir")
    elif (problem := unwritable(folder)) is not None:
        yield error(f"run.dir '{folder}' {problem}; name another folder.", "run.dir")


def unwritable(path: Path) -> str | None:
    """Why nothing can be written at a path that is a folder or not there yet; None where it can."""
    places = (path.absolute(), *path.absolute().parents)
    place = next(place for place in places if os.path.exists(place))
    verb = "is" if place == path.absolute() else f"lies in '{place}', which is"
    if not place.is_dir():
        return f"{verb} no folder"
    try:
        # A file without a name: what may be written says neither the user's rights, as of root,
        # nor those of the folder, as in /proc.
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{verb} a folder where nothing can be written ({error.strerror})"


def check_model(
    model: ModelConfig, *, device: str, needs_tokenizer: bool = True
) -> Iterator[Finding]:
    """The model and tokenizer folders, as far as they are on this machine."""
    folder = Path(model.path)
    if folder.is_file():
        yield error(
            f"model.path is a file, '{model.path}'; give the folder it is in.", "model.path"
        )
    elif folder.is_dir():
        yield from _model_folder(model, folder, needs_tokenizer)
    else:
        yield from _not_here("model.path", model.path)
    if model.tokenizer is not None and not Path(model.tokenizer).exists():
        yield from _not_here("model.tokenizer", model.tokenizer)
    if model.chat_template is not None and not model.chat_template.is_file():
        yield error(
            f"model.chat_template '{model.chat_template}' is no file.", "model.chat_template"
        )
    if model.dtype == "bfloat16" and device == "cpu":
        yield warning(
            "model.dtype is bfloat16 with run.device cpu, where it is slow and imprecise; "
            "leave model.dtype at auto.",
            "model.dtype",
            "run.device",
        )


def _not_here(key: str, path: str) -> Iterator[Finding]:
    """What `key` names is no folder of this machine, and must then be `owner/name` on the hub."""
    parent = Path(path).parent
    folders = [x.name for x in parent.iterdir() if x.is_dir()] if parent.is_dir() else []
    near = get_close_matches(Path(path).name, folders, 1)
    hint = f" Did you mean '{parent / near[0]}'?" if near else ""
    if must_be_local(path) or "/" not in path:
        yield error(
            f"{key} '{path}' does not exist.{hint} Give a folder with config.json, or a hub name "
            "with its owner, such as Qwen/Qwen3-0.6B.",
            key,
        )
    elif parent.is_dir():
        yield warning(
            f"{key} '{path}' is taken for a name on the hub: the folder '{parent}' is here and has "
            f"no '{Path(path).name}'.{hint} Write './{path}' for what must be a folder.",
            key,
        )


def _model_folder(model: ModelConfig, folder: Path, needs_tokenizer: bool) -> Iterator[Finding]:
    if not (folder / "config.json").is_file():
        inner = folder / "model"  # where a run leaves it
        fix = (
            f"Did you mean '{inner}'?"
            if (inner / "config.json").is_file()
            else "Give the folder of a model in the Hugging Face layout: config.json, weights, "
            "tokenizer."
        )
        yield error(f"model.path '{folder}' holds no config.json. {fix}", "model.path")
        return
    if model.init == "pretrained" and not any(
        any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")
    ):
        yield error(
            f"model.init is pretrained, but model.path '{folder}' holds no weights "
            "(*.safetensors). Set model.init to random to draw them from the seed.",
            "model.init",
            "model.path",
        )
    if not needs_tokenizer or model.tokenizer is not None:
        return
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield error(
            f"model.path '{folder}' holds no tokenizer and model.tokenizer is not set; "
            "set model.tokenizer to a folder or hub name.",
            "model.path",
            "model.tokenizer",
        )


def check_data(data: DataConfig, model: ModelConfig) -> Iterator[Finding]:
    """Sources, templates and the split; no data file is opened."""
    if isinstance(data, EvaluateDataConfig):
        if not data.eval and not (data.train and data.eval_fraction):
            yield error(
                "there is nothing to evaluate on: name a source in data.eval, or one in "
                "data.train and the share of it to hold out in data.eval_fraction.",
                "data.eval",
                "data.train",
                "data.eval_fraction",
            )
    elif not data.train:
        yield error("data.train is empty; name at least one source.", "data.train")
    for section in ("train", "eval"):
        for index, source in enumerate(getattr(data, section)):
            yield from _source(source, f"data.{section}.{index}")
    identities = [_identity(source) for source in data.train]
    for index, source in enumerate(data.train):
        if _identity(source) in identities[:index]:
            first = identities.index(_identity(source))
            yield warning(
                f"data.train.{index}.path repeats data.train.{first}.path ('{source.path}'); to "
                "draw a source more often raise its weight.",
                f"data.train.{first}.path",
                f"data.train.{index}.path",
            )
    for index, source in enumerate(data.eval):
        if _identity(source) in identities:
            first = identities.index(_identity(source))
            yield warning(
                f"data.eval.{index}.path and data.train.{first}.path read the same rows "
                f"('{source.path}'): evaluation would measure what was trained on. Use another "
                "split, or leave data.eval empty and set data.eval_fraction.",
                f"data.eval.{index}.path",
                f"data.train.{first}.path",
            )
    if data.eval and data.eval_fraction:
        yield warning(
            f"data.eval_fraction is {data.eval_fraction:g} and data.eval names sources: nothing "
            "is held out of the training rows. Remove one of the two.",
            "data.eval_fraction",
            "data.eval",
        )
    yield from _rendering(data, model)


def check_unused_data(data: DataConfig, command: str) -> Iterator[Finding]:
    """Keys of `data` that are set and that `hone <command>` has no use for."""
    for section, names in _UNUSED[command].items():
        holders = {"data": data}
        if section:
            sources = enumerate(getattr(data, section))
            holders = {f"data.{section}.{index}": source for index, source in sources}
        for key, holder in holders.items():
            for name in names:
                *above, last = name.split(".")
                owner = getattr(holder, above[0]) if above else holder
                if differs(owner, last):
                    yield warning(
                        f"{key}.{name} is set, and `hone {command}` does not use it. Remove it.",
                        f"{key}.{name}",
                    )


def _identity(source: SourceConfig) -> tuple[str, str, str | None]:
    return source.path, source.split, source.subset


def _source(source: SourceConfig, key: str) -> Iterator[Finding]:
    path = Path(source.path).expanduser()
    if must_be_local(source.path) and not path.exists():
        present = sorted(x.name for x in path.parent.glob("*") if x.suffix in DATA_SUFFIXES)
        there = f" '{path.parent}' holds {', '.join(present[:5])}." if present else ""
        yield error(
            f"{key}.path: there is no '{source.path}'.{there} Put it there, or name another file "
            f"with --{key}.path.",
            f"{key}.path",
        )
    elif path.is_file() and path.suffix not in DATA_SUFFIXES:
        yield error(
            f"{key}.path '{source.path}' ends in '{path.suffix}'; allowed are "
            f"{', '.join(DATA_SUFFIXES)}.",
            f"{key}.path",
        )
    elif (missing := _missing_reader(path, source.path, f"{key}.path")) is not None:
        yield error(f"{missing}.", f"{key}.path")
    if source.answer_pattern is not None:
        try:
            re.compile(source.answer_pattern)
        except re.error as problem:
            yield error(
                f"{key}.answer_pattern '{source.answer_pattern}' is no regular expression: "
                f"{problem}.",
                f"{key}.answer_pattern",
            )


def _missing_reader(path: Path, given: str, key: str) -> str | None:
    """What to tell where a source cannot be read for want of a library, else None."""
    if not path.exists():
        reading = f"{key}: there is no file or folder '{given}', and reading it from the hub"
        return missing_extra("datasets", needed_by=reading)
    if is_saved_dataset(path):
        saved = f"{key} '{given}' is a data set that `datasets` has saved, and reading it"
        return missing_extra("datasets", needed_by=saved)
    files = [path] if path.is_file() else path.iterdir()
    kinds = {file.suffix for file in files if file.suffix in DATA_SUFFIXES}
    # Of a folder that also has others, the files of one split are read.
    return missing_extra("pyarrow", needed_by=f"{key} '{given}'") if kinds == {".parquet"} else None


def _rendering(data: DataConfig, model: ModelConfig) -> Iterator[Finding]:
    if not any(match[2] for match in TEMPLATE_FIELD.finditer(data.prompt_template)):
        yield error(
            f"data.prompt_template is '{data.prompt_template}', the same text for every row; "
            "it must name a column, as in '{prompt}'.",
            "data.prompt_template",
        )
    if data.chat == "never":
        for key, value in (
            ("data.system_prompt", data.system_prompt),
            ("model.chat_template", model.chat_template),
        ):
            if value is not None:
                yield warning(
                    f"{key} is set but data.chat is never, so it is not used; set data.chat to "
                    f"auto or always, or remove {key}.",
                    key,
                    "data.chat",
                )


def check_log(log: LogConfig) -> Iterator[Finding]:
    """Whether the trackers that are switched on are installed."""
    for name in ("tensorboard", "wandb", "mlflow", "trackio"):
        if not getattr(log, name):
            continue
        if (missing := missing_extra(name, needed_by=f"log.{name}")) is not None:
            yield error(f"{missing}. Or switch log.{name} off.", f"log.{name}")
