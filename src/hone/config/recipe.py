"""YAML as recipes use it: the 1.2 core rules, no duplicate keys, and a line for every value.

Under YAML 1.1, PyYAML's own rules, `1e-6` is a text, `no` is false and `1:30` is ninety; here each
means what it looks like. Reading and writing use the same rules, so what is written reads back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from hone.errors import UserError
from hone.paths import data_suffix

__all__ = [
    "Key",
    "Recipe",
    "parse_value",
    "read_recipe",
    "read_recipe_list",
    "recipe_names",
    "resolve_recipe",
    "to_yaml",
]

Key = tuple[str | int, ...]
"""Place of a value: names of keys and positions in lists."""

RECIPES = Path(__file__).parents[1] / "recipes"
_SUFFIXES = (".yaml", ".yml")
_MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a recipe, and where each part of it was written."""

    values: dict[str, Any]
    origins: dict[Key, str] = field(default_factory=dict[Key, str])


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quote what YAML would read as a line break or refuse, such as U+2028."""
        plain = all(character.isprintable() or character == "\n" for character in text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        list("-+.0123456789"),
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first
        )


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


_PATTERNS = ("*.yaml", "*.yml")


def resolve_recipe(name: str) -> Path:
    """The file of a recipe given by path or, for one that comes with the package, by name.

    Raises UserError that lists what there is.
    """
    path = Path(name)
    if path.is_file():
        if data_suffix(path):
            raise UserError(
                f"recipe '{name}' is a file of data. A recipe is a YAML file; data are named with "
                f"--data.train.0.path {name}."
            )
        return path
    built_in = RECIPES / f"{name}.yaml"
    if path.name == name and not path.suffix and built_in.is_file():
        return built_in
    known = ", ".join(recipe_names()) or "none"
    what = "a folder, not a file" if path.is_dir() else "no such file"
    files = {file.stem: file for pattern in _PATTERNS for file in path.parent.glob(pattern)}
    near = get_close_matches(path.stem, files, 1)
    hint = f"Did you mean '{files[near[0]]}'? " if near else ""
    raise UserError(
        f"recipe '{name}': {what}, and no recipe of that name comes with hone. {hint}"
        f"Give the path of a YAML file, or one of: {known}."
    )


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises UserError, with the line, for anything that is not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{path}' cannot be read: {error}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Recipe({})
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"recipe '{path}' must be a mapping of keys to values, as in `run:`")
        recipe = Recipe({})
        recipe.values.update(_construct(loader, node, (), path, recipe.origins))
    except yaml.YAMLError as error:
        raise UserError(f"recipe '{path}' is not valid YAML: {_where(error)}") from error
    except RecursionError as error:
        raise UserError(f"recipe '{path}' is nested too deep: close its brackets") from error
    finally:
        loader.dispose()
    return recipe


def read_recipe_list(path: Path) -> list[Any]:
    """The entries of a file that is a list; of the package's own, so that mistakes are ours."""
    return parse_value(path.read_text(encoding="utf-8"))


def parse_value(text: str) -> Any:
    """A value in YAML's inline form. Raises ValueError where the text is not valid YAML."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, (), None, {})
    except yaml.YAMLError as error:
        raise ValueError(_where(error)) from error
    finally:
        loader.dispose()


def to_yaml(values: Any) -> str:
    """YAML text that `read_recipe` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _construct(
    loader: _Loader, node: yaml.Node, at: Key, path: Path | None, origins: dict[Key, str]
) -> Any:
    line = node.start_mark.line + 1
    origins[at] = f"{path}, line {line}"
    if len(at) > _MAX_DEPTH:
        raise UserError(f"line {line}: nested more than {_MAX_DEPTH} levels deep")
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(loader, item, (*at, index), path, origins)
            for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"line {key_line}: a key must be a plain name")
        key = str(key_node.value)
        if key in values:
            raise UserError(
                f"{path or 'value'}, line {key_line}: the key '{'.'.join(map(str, (*at, key)))}' "
                "is given twice; keep one of them"
            )
        values[key] = _construct(loader, value_node, (*at, key), path, origins)
        origins[*at, key] = f"{path}, line {key_line}"
    return values


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
