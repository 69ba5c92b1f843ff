"""A recipe and flags become one frozen tree.

`load_config(RLConfig, Path("recipe.yaml"), ["--rollout.n_samples_per_prompt", "8"])`

Flags win over the recipe, later flags over earlier ones. Everything that is wrong is reported at
once: each line names the key, what was got and from where, and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hone.config.base import Section
from hone.config.flags import Flag, parse_flags
from hone.config.recipe import Key, read_recipe, resolve_recipe, to_yaml
from hone.config.schema import Field, fields, is_section, locate, members
from hone.config.secret import secret_problem
from hone.config.sharing import SAME, UNREAD, is_for_rl, split_recipe, training_tree
from hone.config.tree import TREES, EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.config.unknown import unknown_key
from hone.errors import UserError

__all__ = ["dump_config", "load_config", "load_noted", "resolve_recipe"]

_MAX_NAME_BYTES = 255
"""Longest name of a file or folder on the disks of Linux and macOS."""

T = TypeVar("T", bound=Section)


def load_config(tree: type[T], recipe: Path | None, flags: Sequence[str]) -> T:
    """Build a tree from a recipe file and dotted flags.

    Relative paths stay relative to the working directory. A run of a recipe that names no folder
    gets one of the recipe's name. Of a recipe of another command what is not this one's is left
    out. Raises UserError naming every unknown, missing and ill-typed key.
    """
    return load_noted(tree, recipe, flags)[0]


def load_noted(
    tree: type[T],
    recipe: Path | None,
    flags: Sequence[str],
    values: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> tuple[T, list[str]]:
    """As `load_config`, with what is to be told of the recipe. `values` win over it, later ones
    over earlier ones, and flags over them; each is a nested mapping, and what messages call it."""
    draft = _Draft(tree, is_called=bool(values))
    if recipe is not None:
        read = read_recipe(recipe)
        draft.origins.update(read.origins)
        draft.take(read.values, recipe)
    for origin, sections in values:
        for name, section in sections.items():
            draft.assign(Flag((name,), section, origin))
    parsed, problems = parse_flags(tree, flags)
    draft.problems.update(problems)
    for flag in parsed:
        draft.assign(flag)
    draft.drop_empty_sections()
    draft.choose_weights()
    if recipe is not None:
        draft.name_run_folder(recipe.stem)
    draft.refuse_booleans_as_numbers()
    draft.refuse_impossible_paths()
    draft.refuse_secrets(draft.values)
    try:
        config = tree.model_validate(draft.values)
    except ValidationError as error:
        draft.explain(error)
        config = None
    if config is not None:  # of sections that a program has made, too
        draft.refuse_secrets(config.model_dump(mode="json"))
    if config is None or draft.problems:
        raise UserError(_report(draft.problems))
    if ("output",) not in draft.origins:
        config.model_fields_set.discard("output")  # `choose_weights` has named it, nobody else
    return config, draft.notes


def dump_config(config: Section) -> str:
    """The whole tree as YAML, defaults included; loading it gives an equal tree."""
    return to_yaml(config.model_dump(mode="json"))


def _report(problems: dict[str, str]) -> str:
    lines = [f"{key}: {text}" if key else text for key, text in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} problems in the configuration:\n" + "\n".join(f"  {x}" for x in lines)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(slots=True)
class _Draft:
    """Values on their way into a tree, where each came from, and what is wrong with them."""

    tree: type[Section]
    is_called: bool
    """Whether Python calls with sections as arguments, so that messages speak of these."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[Key, str] = field(default_factory=dict[Key, str])
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Text by dotted key; the first problem of a key is the one that is told."""
    notes: list[str] = field(default_factory=list[str])
    hints: type[Section] | None = None
    """The tree of the command whose recipe it is, where that is another one; it knows the keys that
    are near to a wrong one."""
    run_folder: Path | None = None
    """That of a recipe which trains, where the command is `hone eval` or `generate`."""
    start: str | None = None
    """`model.path` of such a recipe."""
    recipe_origins: Mapping[Key, str] = field(default_factory=dict[Key, str])
    """Origins of the values before any flag, like `origins`."""

    def take(self, recipe: dict[str, Any], path: Path) -> None:
        """Take from a recipe what is this command's. Demonstrations by a recipe of `hone rl` get a
        folder in that of its run."""
        found = split_recipe(self.tree, recipe)
        self.values, others = found.own, found.others
        if self.tree is not RLConfig:
            self.hints = training_tree([*others, *found.unknown])
        for at in found.unknown:
            self._unknown(at)
        name = next((name for name, tree in TREES.items() if tree is self.tree), "")
        if name in SAME:
            self._find_run(others.get(("run", "dir")), path)
        if not others:
            return
        for theirs, ours in SAME.get(name, {}).items():
            above, key = ours.split(".")
            section = self.values.setdefault(above, {}) or {}
            at = tuple(theirs.split("."))
            if at in others and isinstance(section, dict) and key not in section:
                self.values[above] = section | {key: others[at]}
                self.origins[above, key] = self.origins[at]
        run = self.values.get("run") or {}
        if self.tree is SFTConfig and is_for_rl(recipe) and isinstance(run, dict):
            folder = run.get("dir") or f"runs/{path.stem}"
            self.values["run"] = run | {"dir": f"{folder}/sft"}
        left_out = dict.fromkeys(_foreign_part(self.tree, at) for at in others)
        for above, key in (unread.split(".") for unread in UNREAD.get(name, ())):
            section = self.values.get(above)
            if isinstance(section, dict) and section.pop(key, None) is not None:
                left_out[f"{above}.{key}"] = None
        self.notes.append(f"`hone {name}` leaves out of {path.name}: {', '.join(left_out)}")

    def assign(self, flag: Flag) -> None:
        """Put a flag's value in place, making the sections and entries above it."""
        self._assign(flag.path, flag.value, flag.origin)

    def _assign(self, path: Sequence[str], value: Any, origin: str) -> None:
        target = locate(self.tree, path)
        if isinstance(value, dict) and target is not None and is_section(target.annotation):
            for name, part in value.items():
                self._assign((*path, name), part, origin)
            return
        container: Any = self.values
        keys: list[str | int] = []
        for position, part in enumerate(path):
            if keys:
                container = container[keys[-1]]
            try:
                keys.append(self._enter(container, path[:position], part))
            except ValueError as error:
                self._problem(path, f"{error} ({origin})")
                return
        container[keys[-1]] = value
        at = tuple(keys)
        for known in [known for known in self.origins if known[: len(at)] == at]:
            del self.origins[known]
        self.origins[at] = origin

    def _enter(self, container: Any, above: Sequence[str], part: str) -> str | int:
        """The key of `part` in its container, which is filled up so that the key exists."""
        child = locate(self.tree, (*above, part))
        fresh = _fresh(child)
        if isinstance(container, dict):
            if container.get(part) is None:
                container[part] = fresh
            return part
        if not isinstance(container, list) or not part.isdecimal():
            raise ValueError(f"'{'.'.join(above)}' is {_show(container)}, which has no '{part}'")
        index = int(part)
        if index > len(container):
            raise ValueError(
                f"entry {index} of '{'.'.join(above)}', which has {len(container)} entries: "
                f"the next is {len(container)}"
            )
        if index == len(container):
            container.append(fresh)
        return index

    def drop_empty_sections(self) -> None:
        """A section whose keys are all commented out reads as null; it means the defaults."""
        for entry in fields(self.tree):
            if is_section(entry.annotation):
                above = _dig(self.values, entry.path[:-1])
                if isinstance(above, dict) and above.get(entry.path[-1], 0) is None:
                    above[entry.path[-1]] = {}

    def name_run_folder(self, recipe: str) -> None:
        """Give a run without a folder one of the recipe's name: recipes must not share one."""
        run = self.values.setdefault("run", {})
        if locate(self.tree, ("run", "dir")) is not None and isinstance(run, dict):
            run.setdefault("dir", f"runs/{recipe}")

    def _find_run(self, folder: Any, recipe: Path) -> None:
        """Take note of the run that the recipe trains, if it does."""
        run, model = (self.values.get(section) for section in ("run", "model"))
        own = run.get("dir") if isinstance(run, dict) else None
        given = folder or own or f"runs/{recipe.stem}"
        if not isinstance(given, str) or (self.hints is None and not _has_trained(Path(given))):
            return
        self.run_folder = Path(given)
        if own is not None:
            del self.values["run"]["dir"]
        self.start = model.get("path") if isinstance(model, dict) else None
        self.recipe_origins = dict(self.origins)

    def choose_weights(self) -> None:
        """Make `hone eval`, `generate` and `serve` of a recipe that trains load the weights of its
        run, unless a flag names a model; the first two write into that run's folder."""
        model, run = self.values.get("model"), self.values.setdefault("run", {})
        if self.run_folder is None or not isinstance(model, dict) or not isinstance(run, dict):
            return
        if "dir" in run and _has_trained(Path(f"{run['dir']}")):
            self.run_folder = Path(f"{run['dir']}")
        folder, start = self.run_folder, self.start
        if start is not None and not self._is_flagged("path"):
            note = f"the start model, as {folder} holds no trained one"
            if _has_trained(folder):
                model["path"] = str(folder / "model")
                note = f"trained by the run in {folder}; for the start model --model.path {start}"
            self.notes.append(f"model.path is {model['path']}: {note}")
        suffix = "-start" if model.get("path") == start else ""
        if not suffix and not self._is_flagged("init"):
            model.pop("init", None)  # how the weights of the start model began
        if self.tree is EvaluateConfig:
            run.setdefault("dir", f"{folder}/eval{suffix}")
        elif self.tree is GenerateConfig:
            self.values.setdefault("output", f"{folder}/completions{suffix}.jsonl")

    def _is_flagged(self, key: str) -> bool:
        """Whether a key of the model is no longer the recipe's."""
        at = "model", key
        return self.origins.get(at) != self.recipe_origins.get(at)

    def refuse_booleans_as_numbers(self) -> None:
        """True is not 1: a switch that lost its value must not set a number."""
        for at in _leaves(self.values):
            target = locate(self.tree, [str(part) for part in at])
            if target is None or not isinstance(_dig(self.values, at), bool):
                continue
            if {int, float} & set(members(target.annotation)):
                self._problem(at, self._wrong(at, target))

    def refuse_impossible_paths(self) -> None:
        """Paths that no file has. An empty one would read as the working directory; so would that
        of a data set, which is a text since it may be a name of the hub."""
        for at in _leaves(self.values):
            target = locate(self.tree, [str(part) for part in at])
            is_path = target is not None and (
                Path in members(target.annotation) or (at[0] == "data" and at[-1] == "path")
            )
            given = _dig(self.values, at)
            problem = _path_problem(given) if is_path and isinstance(given, str) else None
            names_place = at[0] != "data" and (is_path or at[-1] == "path")
            if names_place and isinstance(given, str) and given.startswith("~"):
                whole = os.path.expanduser(given)  # a shell does it to a word of its own alone
                problem = "begins with `~`, which is not expanded here", f"give {whole}"
            if problem is not None:
                self._problem(at, f"{problem[0]} ({self._origin(at)}); {problem[1]}")

    def refuse_secrets(self, values: Mapping[str, Any]) -> None:
        """Keys and passwords, before any of them is written."""
        for at in _leaves(values):
            given = _dig(values, at)
            problem = secret_problem(at, given) if isinstance(given, str) else None
            if problem is not None:
                self._problem(at, f"{problem} ({self._origin(at)})")

    def explain(self, error: ValidationError) -> None:
        """Turn pydantic's findings into text for people."""
        for detail in error.errors(include_url=False):
            path = _schema_path(self.tree, detail["loc"])
            match detail["type"]:
                case "extra_forbidden":
                    self._unknown(detail["loc"])
                case "missing":
                    self._missing(path)
                case _:
                    self._invalid(path, detail)

    def _unknown(self, at: Key) -> None:
        path = [str(part) for part in at]
        is_flag = self._origin(at).startswith("flag ")
        tree = self.tree if is_flag or self.hints is None else self.hints
        hint = unknown_key(tree, path)
        self._problem(at, f"unknown key ({self._origin(at)}); {hint}")

    def _missing(self, at: Key) -> None:
        """Name the required keys at or under a path that is not there."""
        target = locate(self.tree, [str(part) for part in at])
        assert target is not None, f"{at=}"
        needed = [target]
        if is_section(target.annotation):
            content = fields(target.annotation, target.path)
            needed = [x for x in content if x.required and "0" not in x.path[len(at) :]]
        for entry in needed:
            key = ".".join([*map(str, at), *entry.path[len(at) :]])
            written = [*key.split("."), *(_text_key(entry) or [])]
            how = (
                f"as {_argument(written)}"
                if self.is_called
                else f"with --{'.'.join(written)} VALUE"
            )
            self.problems.setdefault(key, f"required. {entry.help} Set it in the recipe or {how}")

    def _invalid(self, at: Key, detail: ErrorDetails) -> None:
        target = locate(self.tree, [str(part) for part in at])
        if target is None:
            self._problem(at, detail["msg"])
        else:
            self._problem(at, self._wrong(at, target))

    def _wrong(self, at: Key, target: Field) -> str:
        value, origin = _dig(self.values, at), self._origin(at)
        got = f"got {_show(value)} ({origin})"
        if isinstance(value, str) and (key := _text_key(target)) is not None:
            return f"{got}; did you mean {_written(key, value, at, origin)}?"
        told = f"{got}; allowed: {target.allowed}"
        if isinstance(value, str) and get_origin(target.annotation) is tuple:
            items = ", ".join(part.strip() for part in value.split(","))
            told += f"; for example --{target.key} '[{items}]'"
        return told

    def _origin(self, at: Key) -> str:
        for length in range(len(at), -1, -1):
            if at[:length] in self.origins:
                return self.origins[at[:length]]
        return "default"

    def _problem(self, at: Sequence[str | int], text: str) -> None:
        self.problems.setdefault(".".join(map(str, at)), text)


def _has_trained(folder: Path) -> bool:
    """Whether a run has left its model in the folder. It appears there whole."""
    return (folder / "model" / "config.json").is_file()


def _text_key(target: Field) -> list[str] | None:
    """Where a text goes that was given for a section, or a list of them: the path of its first
    key, the required ones before others; None where that takes no text."""
    kind, path = target.annotation, list[str]()
    while (is_list := get_origin(kind) is tuple) or is_section(kind):
        if is_list:
            kind = get_args(kind)[0]
            path.append("0")
            continue
        content = kind.model_fields
        name = next((x for x, each in content.items() if each.is_required()), next(iter(content)))
        path.append(name)
        kind = content[name].annotation
    has_section = any(part != "0" for part in path)
    return path if has_section and str in members(kind) else None


def _written(path: Sequence[str], value: str, at: Key, origin: str) -> str:
    """How a text is set at a `path` under `at`: as a flag, or in a recipe."""
    if origin.startswith("flag "):
        return f"--{'.'.join([*map(str, at), *path])} {value}"
    for part in reversed(path):
        value = f"[{value}]" if part == "0" else f"{{{part}: {value}}}"
    return f"{at[-1]}: {value}"


def _argument(path: Sequence[str]) -> str:
    """Text on setting a key in a call from Python: `model={"path": ...}`."""
    value = "..."
    for part in reversed(path[1:]):
        value = f"[{value}]" if part == "0" else f'{{"{part}": {value}}}'
    return f"{path[0]}={value}"


def _fresh(target: Field | None) -> Any:
    """The initial value of a container that a flag reaches into: its default, or an empty one."""
    if target is None:
        return None
    if get_origin(target.annotation) is tuple:
        default = target.default or ()
        return [x.model_dump(mode="json") if isinstance(x, Section) else x for x in default]
    if is_section(target.annotation) or get_origin(target.annotation) is dict:
        return {}
    return None


def _foreign_part(tree: type[Section], path: Sequence[str]) -> str:
    """The part of a path that the tree does not have, with what is above it."""
    length = next(n for n in range(1, len(path) + 1) if locate(tree, path[:n]) is None)
    return ".".join(path[:length])


def _schema_path(tree: type[Section], loc: Key) -> Key:
    """The part of pydantic's location that is a path; it appends the tried union members."""
    length = len(loc)
    while length and locate(tree, [str(part) for part in loc[:length]]) is None:
        length -= 1
    return loc[:length]


def _dig(values: Any, at: Sequence[str | int]) -> Any:
    for part in at:
        try:
            values = values[int(part)] if isinstance(values, list) else values[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return values


def _leaves(values: Any, at: Key = ()) -> list[Key]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    found: list[Key] = []
    for key, value in items:
        nested = isinstance(value, dict | list)
        found.extend(_leaves(value, (*at, key)) if nested else [(*at, key)])
    return found


def _path_problem(path: str) -> tuple[str, str] | None:
    """Why no file has that path, and what to do."""
    if not path:
        return "is empty", "give a path, '.' for this folder"
    if "\0" in path:
        return "holds a null character", "give a path without it"
    if any(len(name.encode(errors="replace")) > _MAX_NAME_BYTES for name in path.split("/")):
        return f"has a name of more than {_MAX_NAME_BYTES} bytes", "give a shorter one"
    return None
