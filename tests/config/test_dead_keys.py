"""No setting without effect and none without help: every field is read by the code that runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import Field

import hone
from hone.config import schema
from hone.config.base import Section
from hone.config.tree import (
    BenchEngineConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    SFTConfig,
    SimulateConfig,
)

TREES = [RLConfig, SFTConfig, EvaluateConfig, GenerateConfig, BenchEngineConfig, SimulateConfig]
BY_NAME = {"prompt", "answer", "completion", "task"}
"""Keys of `columns`, which `data/columns.py` reads with `getattr`, one for each role."""
HOLDERS = {"cfg", "config", "source", "entry", "run", "checkpoint"}
"""What variables that hold a section are called, besides the section's own name."""


def attributes_read() -> set[tuple[str, str]]:
    """(`holder`, `name`) of every `holder.name` in the package but in the configuration itself."""
    package = Path(hone.__file__).parent
    found: set[tuple[str, str]] = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                match node.value:
                    case ast.Attribute(attr=holder) | ast.Name(id=holder):
                        found.add((holder.removeprefix("_"), node.attr))
                    case _:
                        pass
    return found


def is_read(field: schema.Field, found: set[tuple[str, str]]) -> bool:
    *sections, name = field.path
    if "columns" in sections and name in BY_NAME:
        return True
    return any(
        attribute == name and (holder in HOLDERS or holder in sections or holder.endswith("_cfg"))
        for holder, attribute in found
    )


def check_every_key_is_read(tree: type[Section]) -> None:
    found = attributes_read()
    dead = [field.key for field in schema.fields(tree) if not is_read(field, found)]
    assert not dead, f"never read: {dead}"


@pytest.mark.parametrize("tree", TREES)
def test_R22_every_key_is_read(tree: type[Section]) -> None:
    check_every_key_is_read(tree)


class NeverLookedAt(GenerateConfig):
    never_looked_at: int = Field(default=1)
    """A number that changes nothing."""


class SharesItsName(GenerateConfig):
    kind: int = Field(default=1)
    """Read of corrections and of parameters, never of this section."""


@pytest.mark.parametrize(
    ("tree", "key"), [(NeverLookedAt, "never_looked_at"), (SharesItsName, "kind")]
)
def test_R22_planted_key_that_nothing_reads(tree: type[Section], key: str) -> None:
    with pytest.raises(AssertionError, match=key):
        check_every_key_is_read(tree)


@pytest.mark.parametrize("tree", TREES)
def test_every_key_has_help_and_allowed_values(tree: type[Section]) -> None:
    for field in schema.fields(tree):
        assert len(field.help) >= 12, f"{field.key} has no docstring"
        assert field.allowed
        assert "any value" not in field.allowed, f"{field.key}: {field.allowed}"


def test_a_key_without_a_docstring_is_noticed() -> None:
    class Planted(Section):
        mute: int = 1

    assert [field.help for field in schema.fields(Planted)] == [""]


def test_keys_are_found_by_path() -> None:
    for tree in TREES:
        for field in schema.fields(tree):
            found = schema.locate(tree, field.path)
            assert found is not None
            assert found.annotation == field.annotation
    for path in (["run", "dir", "x"], ["data", "train", "x"], ["nope"], ["run", "0"]):
        assert schema.locate(RLConfig, path) is None
    assert schema.locate(RLConfig, ["trainer", "optimizer", "betas", "2"]) is None
