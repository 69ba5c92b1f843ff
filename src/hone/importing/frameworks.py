"""A script or file of OpenRLHF, verl, Relax or TRL as a `Source`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.aliases import FRAMEWORKS
from hone.config.errors import UserError
from hone.config.recipe import read_recipe
from hone.importing.python import read_python
from hone.importing.shell import read_script
from hone.importing.source import Command, Given, Source, Unread, Word, value_of

__all__ = ["read_command", "read_file"]

_PROGRAMS: Mapping[str, Mapping[str, Command]] = {
    "openrlhf": {
        "train_ppo_ray": "rl",
        "train_ppo": "rl",
        "train_dpo": "dpo",
        "train_sft": "sft",
    },
    "verl": {
        "main_ppo": "rl",
        "main_dapo": "rl",
        "fully_async_main": "rl",
        "one_step_off_ppo": "rl",
        "sft_trainer": "sft",
        "sft_trainer_ray": "sft",
        "fsdp_sft_trainer": "sft",
    },
    "relax": {"train": "rl"},
    "trl": {"grpo": "rl", "rloo": "rl", "dpo": "dpo", "kto": "dpo", "sft": "sft"},
}
"""What each framework trains with, by the end of a module's or a file's name."""

_NOT_SERVED = {
    "train_rm": "reward models are not trained yet",
    "train_kto": "OpenRLHF has given up its KTO; `hone dpo --algorithm.loss kto` is one",
    "reward": "reward models are not trained yet",
    "distillation": "`hone rl --teacher.path MODEL` distils on-policy",
}
_TELLING = {  # settings that only one program has, for files that name none
    "trl": {"num_generations": "grpo", "max_completion_length": "grpo", "desirable_weight": "kto",
            "reward_funcs": "grpo", "precompute_ref_log_probs": "dpo", "beta": "dpo",
            "packing": "sft", "assistant_only_loss": "sft", "dataset_text_field": "sft"},
    "verl": {"actor_rollout_ref": "main_ppo", "optim": "sft_trainer", "engine": "sft_trainer"},
    "openrlhf": {"rollout": "train_ppo_ray", "actor": "train_ppo_ray", "model": "train_dpo"},
    "relax": {},
}  # fmt: skip
_VARIABLES = {"openrlhf": ("OPENRLHF_ASYNC_QUEUE_SIZE",)}
"""Settings that a framework reads from the environment."""
_PROCESSES = {"nproc_per_node", "num_processes", "num_gpus"}


def read_file(framework: str, path: Path, environment: Mapping[str, str]) -> Source:
    """Read a shell script, a YAML file or a Python script.

    Raises UserError where it cannot be read, or trains with nothing that is served.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        recipe = read_recipe(path)
        lines = {".".join(map(str, key)): where for key, where in recipe.origins.items()}
        given = [
            Given(_name(name), value, lines.get(name, "").rpartition(", ")[2])
            for name, value in _flat(recipe.values)
        ]
        return _source(framework, _told_by(framework, given, path), given)
    if path.suffix == ".py":
        if framework != "trl":
            raise UserError(
                f"'{path}' is a Python program, which is read for trl alone. Name the script or "
                "the command that starts it."
            )
        program, given, notes = read_python(text, path)
        return _source(framework, program, given, notes=notes)
    script = read_script(text, environment, path)
    source = _of_commands(framework, script.commands, script.notes, f"'{path}'", path.parent)
    for name in _VARIABLES.get(framework, ()):
        for text, line in script.variables.get(name, []):
            source.given.append(Given(name.lower(), value_of(text), _line(line)))
    return source


def read_command(framework: str, words: Sequence[str]) -> Source:
    """Read the words of a command line. Raises UserError as `read_file` does."""
    command = [Word(word, 0) for word in words]
    return _of_commands(framework, [command], [], "the command", Path())


def _of_commands(
    framework: str, commands: list[list[Word]], notes: list[str], where: str, folder: Path
) -> Source:
    for command in commands:
        start = _program(framework, command)
        if start is None:
            continue
        number, program = start
        before, after = command[:number], command[number + 1 :]
        given = [*_overrides(after)] if framework == "verl" else [*_flags(after)]
        given = [*_of_config(given, folder), *given]
        launched = dict[str, Any](
            (flag.name, flag.value[0] if isinstance(flag.value, list) else flag.value)
            for flag in _flags(before)
        )
        processes = next((launched[name] for name in _PROCESSES if name in launched), None)
        nodes = launched.get("nnodes", 1)
        if not isinstance(processes, int):
            processes = None
        elif isinstance(nodes, int) and "nproc_per_node" in launched:
            processes *= nodes
        return _source(framework, program, given, processes=processes, notes=notes)
    known = ", ".join(_PROGRAMS[framework])
    raise UserError(
        f"{where} runs nothing of {FRAMEWORKS[framework]}'s that trains ({known}). Name the script "
        "that does, a YAML file of settings, or the command itself behind `--`."
    )


def _program(framework: str, command: Sequence[Word]) -> tuple[int, str] | None:
    """Which word names what trains, and its name."""
    for number, (text, _) in enumerate(command):
        name = re.split(r"[./]", text.removesuffix(".py"))[-1]
        is_named = framework in text or (
            framework == "trl" and number and "trl" in _end(command[number - 1])
        )
        is_file = text.endswith(".py") or "recipe" in text
        if name in _NOT_SERVED and (is_named or is_file):
            raise UserError(f"`{text}`: {_NOT_SERVED[name]}.")
        if name in _PROGRAMS[framework] and (is_named or is_file):
            return number, name
    return None


def _end(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _source(framework: str, program: str, given: list[Given], **more: Any) -> Source:
    command = _PROGRAMS[framework][program]
    given = [Given(name, value, one.where) for one in given for name, value in _leaves(one)]
    if framework == "relax" and any(
        one.name == "loss_type" and one.value in ("sft", "sft_loss") for one in given
    ):
        command = "sft"
    return Source(framework=framework, program=program, command=command, given=given, **more)


def _told_by(framework: str, given: Sequence[Given], path: Path) -> str:
    """What the settings of a file are for."""
    names = {part for one in given for part in (one.name, one.name.partition(".")[0])}
    for name, program in _TELLING[framework].items():
        if name in names:
            return program
    if framework == "relax":
        return "train"
    raise UserError(
        f"'{path}' does not say what it is for. Give the command: `hone import {framework} -- "
        f"{'trl grpo --config' if framework == 'trl' else 'COMMAND'} {path}`."
    )


def _flags(words: Sequence[Word]) -> Iterator[Given]:
    """`--name value`, `--name=value`, `--name` alone (true), and several values."""
    number = 0
    while number < len(words):
        text, line = words[number]
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
        yield Given(_name(name), value, _line(line))


def _is_flag(text: str) -> bool:
    return re.match(r"--?[A-Za-z]", text) is not None


def _overrides(words: Sequence[Word]) -> Iterator[Given]:
    """Hydra's `key=value`, `+key=value`, `++key=value`, `~key`; and its own flags."""
    for text, line in words:
        name, equals, value = text.lstrip("+").partition("=")
        if text.startswith("~"):
            yield Given(_name(name[1:]), None, _line(line))
        elif equals:
            yield Given(_name(name), value_of(value), _line(line))


def _of_config(given: list[Given], folder: Path) -> Iterator[Given]:
    """What the file holds that `--config` names, which is taken out of `given`."""
    for one in [one for one in given if one.name in ("config", "config_path", "config_name")]:
        given.remove(one)
        path = folder / str(one.value)
        if one.name != "config":
            continue
        path = path if path.is_file() else Path(str(one.value))
        values = read_recipe(path)
        for name, value in _flat(values.values):
            where = values.origins.get(tuple(name.split(".")), "").rpartition(", ")[2]
            yield Given(_name(name), value, f"{path.name}, {where}")


def _leaves(one: Given) -> list[tuple[str, Any]]:
    """A setting, or those within the mapping that it is."""
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


def _line(number: int) -> str:
    return f"line {number}" if number else "command"
