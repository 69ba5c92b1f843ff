"""A script or file of OpenRLHF, verl, Relax or TRL as a `Source`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.aliases import FRAMEWORKS
from hone.config.recipe import read_recipe
from hone.errors import UserError
from hone.tools.imports.python import read_python
from hone.tools.imports.shell import read_script
from hone.tools.imports.source import Command, Given, Source, Unread, Word, value_of

__all__ = ["PROGRAMS", "read_command", "read_file"]

PROGRAMS: Mapping[str, Mapping[str, Command]] = {
    "openrlhf": {"train_ppo_ray": "rl", "train_ppo": "rl", "train_dpo": "dpo", "train_sft": "sft",
                 "train_rm": "reward-model"},
    "verl": {"main_ppo": "rl", "main_dapo": "rl", "fully_async_main": "rl",
             "one_step_off_ppo": "rl", "sft_trainer": "sft", "sft_trainer_ray": "sft",
             "fsdp_sft_trainer": "sft"},
    "relax": {"train": "rl"},
    "trl": {"grpo": "rl", "rloo": "rl", "dpo": "dpo", "kto": "dpo", "sft": "sft",
            "reward": "reward-model"},
}  # fmt: skip
"""Training programs of each framework, by the end of a module's or a file's name."""

_NOT_SERVED = {
    "train_kto": "OpenRLHF has given up its KTO; `hone dpo --algorithm.loss kto` is one",
    "distillation": "`hone rl --teacher.path MODEL` distils on-policy",
    "train_opd": "`hone rl --teacher.path MODEL` distils on-policy",
}
_DISTINCTIVE_SETTINGS = {  # settings that only one program has, for files that name none
    "trl": {"num_generations": "grpo", "max_completion_length": "grpo", "desirable_weight": "kto",
            "reward_funcs": "grpo", "precompute_ref_log_probs": "dpo", "beta": "dpo",
            "packing": "sft", "assistant_only_loss": "sft", "dataset_text_field": "sft"},
    "verl": {"actor_rollout_ref": "main_ppo", "optim": "sft_trainer", "engine": "sft_trainer"},
    "openrlhf": {"rollout": "train_ppo_ray", "actor": "train_ppo_ray", "model": "train_dpo"},
    "relax": {},
}  # fmt: skip
_VARIABLES = {"openrlhf": ("OPENRLHF_ASYNC_QUEUE_SIZE",)}
"""Settings that a framework reads from the environment."""
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_CONFIGS = ("config", "config_path", "config_name")
_USUAL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""Configurations that come with verl, whose values are the defaults that an import knows."""


def read_file(framework: str, path: Path, environment: Mapping[str, str]) -> Source:
    """Read a shell script, a YAML file or a Python script. Raises UserError if it cannot be read or
    starts no supported training."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(_unread(path, error)) from error
    if path.suffix in (".yaml", ".yml"):
        given = _of_yaml(path, "")
        return _source(framework, _program_of_settings(framework, given, path), given)
    if path.suffix == ".py":
        if framework != "trl":
            raise UserError(
                f"'{path}' is a Python program, which is read for trl alone. Name the script or "
                "the command that starts it."
            )
        program, given, notes = read_python(text, path, environment)
        return _source(framework, program, given, script=(path, text), notes=notes)
    script = read_script(text, environment, path)
    source = _of_commands(
        framework, script.commands, script.notes, f"'{path}'", path.parent, unsure=script.unsure
    )
    for name in _VARIABLES.get(framework, ()):
        for word in script.variables.get(name, []):
            source.given.append(Given(name.lower(), value_of(word.text), word.where))
    return source


def _unread(path: Path, error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no file '{path}'. Name a shell script, a YAML file or, for trl, a program."
        )
    if isinstance(error, UnicodeDecodeError):
        return f"'{path}' cannot be read: it is no text in UTF-8. Name the script itself."
    return f"'{path}' cannot be read: {error.strerror}."


def read_command(framework: str, words: Sequence[str]) -> Source:
    """Read the words of a command line. Raises UserError as `read_file` does."""
    command = [Word(word, 0) for word in words]
    return _of_commands(framework, [command], [], "the command", Path(), unsure={})


def _of_commands(
    framework: str,
    commands: list[list[Word]],
    notes: list[str],
    where: str,
    folder: Path,
    *,
    unsure: Mapping[int, str],
) -> Source:
    starts = [(command, _program(framework, command)) for command in commands]
    runs = [(command, *start) for command, start in starts if start is not None]
    if runs:
        command, number, program = runs[0]
        if why := unsure.get(next(place for place, one in enumerate(commands) if one is command)):
            notes.append(f"{why}; it runs {command[number].text}")
        words = command[number + 1 :]
        given = [*(_overrides(words) if framework == "verl" else _flags(words))]
        notes += [f"{other[at].where}: a further run, of {other[at].text}, is left out"
                  for other, at, _ in runs[1:]]  # fmt: skip
        given = [*_of_config(given, folder, notes), *given]
        processes = _launched(command[:number]) or _launched(words)
        return _source(framework, program, given, processes=processes, notes=notes)
    known = ", ".join(PROGRAMS[framework])
    raise UserError(
        f"{where} runs nothing of {FRAMEWORKS[framework]}'s that trains ({known}). Name the script "
        "that does, a YAML file of settings, or the command itself behind `--`."
    )


def _launched(words: Sequence[Word]) -> int | None:
    """Number of processes that the flags of a launcher give."""
    flags = {flag.name: flag.value for flag in _flags(words)}
    numbers = [
        value[0] if isinstance(value, list) else value
        for value in (flags.get(name) for name in _PROCESSES)
        if value is not None
    ]
    if not numbers or not isinstance(numbers[0], int):
        return None
    nodes = flags.get("nnodes", 1)
    each = "nproc_per_node" in flags and isinstance(nodes, int)
    return numbers[0] * nodes if each else numbers[0]


def _program(framework: str, command: Sequence[Word]) -> tuple[int, str] | None:
    """Position of the word that names the training program, and the program."""
    for number, word in enumerate(command):
        text = word.text
        name = re.split(r"[./]", text.removesuffix(".py"))[-1]
        is_named = framework in text or (
            framework == "trl" and number and "trl" in _end(command[number - 1])
        )
        is_file = text.endswith(".py") or "recipe" in text
        if name in _NOT_SERVED and (is_named or is_file):
            raise UserError(f"`{text}`: {_NOT_SERVED[name]}.")
        if name in PROGRAMS[framework] and (is_named or is_file):
            return number, name
    return None


def _end(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _source(framework: str, program: str, given: list[Given], **more: Any) -> Source:
    command = PROGRAMS[framework][program]
    given = [Given(name, value, one.where) for one in given for name, value in _leaves(one)]
    if framework == "relax" and any(
        one.name == "loss_type" and one.value in ("sft", "sft_loss") for one in given
    ):
        command = "sft"
    return Source(framework=framework, program=program, command=command, given=given, **more)


def _program_of_settings(framework: str, given: Sequence[Given], path: Path) -> str:
    """The training program to which the settings of a file belong."""
    names = {part for one in given for part in (one.name, one.name.partition(".")[0])}
    for name, program in _DISTINCTIVE_SETTINGS[framework].items():
        if name in names:
            return program
    if framework == "relax":
        return "train"
    raise UserError(
        f"'{path}' does not say what it is for. Give the command: `hone import {framework} -- "
        f"{'trl grpo --config' if framework == 'trl' else 'COMMAND'} {path}`."
    )


def _flags(words: Sequence[Word]) -> Iterator[Given]:
    """Parse flags: `--name value`, `--name=value`, `--name` alone (true), and several values."""
    number = 0
    while number < len(words):
        word = words[number]
        text = word.text
        number += 1
        if not text.startswith("--") or len(text) == 2:
            continue
        name, equals, value = text.removeprefix("--").partition("=")
        values = [value] if equals else []
        while not equals and number < len(words) and not _is_flag(words[number].text):
            values.append(words[number].text)
            number += 1
        read = [value_of(one) for one in values]
        if len(read) > 1 and any(isinstance(one, Unread) for one in read):
            read = [Unread(" ".join(values))]
        value = True if not read else read[0] if len(read) == 1 else read
        yield Given(_name(name), value, word.where)


def _is_flag(text: str) -> bool:
    return re.match(r"--?[A-Za-z]", text) is not None


def _overrides(words: Sequence[Word]) -> Iterator[Given]:
    """Parse Hydra's `key=value`, `+key=value`, `++key=value`, `~key`, and its own flags."""
    yield from _flags(
        [word for word in words if word.text.startswith("--") or "=" not in word.text]
    )
    for word in words:
        text = word.text
        name, equals, value = text.lstrip("+").partition("=")
        if text.startswith("~"):
            yield Given(_name(name[1:]), None, word.where)
        elif equals and not text.startswith("--"):
            yield Given(_name(name), value_of(value), word.where)


def _of_config(given: list[Given], folder: Path, notes: list[str]) -> list[Given]:
    """Settings of the file that `--config`, or Hydra's `--config-path` and `--config-name`, name.
    These are removed from `given`."""
    named = {one.name: one for one in given if one.name in _CONFIGS}
    given[:] = [one for one in given if one.name not in _CONFIGS]
    if "config" in named:
        path = Path(str(named["config"].value))
    elif "config_name" in named:
        above = named["config_path"].value if "config_path" in named else ""
        path = Path(str(above), f"{named['config_name'].value}.yaml")
    else:
        return []
    path = next((place for place in (folder / path, path) if place.is_file()), path)
    if not path.is_file() and "config" not in named:
        if path.stem not in _USUAL_CONFIGS:
            notes.append(f"what '{path}' sets is not read, since it is not here")
        return []
    return _of_yaml(path, f"{path.name}, ")


def _of_yaml(path: Path, where: str) -> list[Given]:
    recipe = read_recipe(path)
    lines = {".".join(map(str, key)): line for key, line in recipe.origins.items()}
    return [
        Given(_name(name), value, where + lines.get(name, "").rpartition(", ")[2])
        for name, value in _flat(recipe.values)
        if name.partition(".")[0] not in ("defaults", "hydra")
    ]


def _leaves(one: Given) -> list[tuple[str, Any]]:
    """The setting itself, or, if it is a mapping, its entries."""
    if not isinstance(one.value, dict) or not one.value:
        return [(one.name, one.value)]
    return [*_flat(one.value, f"{one.name}.")]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", None if value == "None" else value


def _name(text: str) -> str:
    return text.replace("-", "_")
