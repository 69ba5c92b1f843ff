"""No setting without effect and none without help: every field is read by the code that runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import Field

import hone
from hone.config import schema
from hone.config.base import Section
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig

TREES = [RLConfig, SFTConfig, EvaluateConfig, GenerateConfig]
KNOWN_EXCEPTIONS: set[str] = set()


def attributes_read() -> set[str]:
    """Names read as attributes anywhere in the package but in the configuration itself."""
    package = Path(hone.__file__).parent
    names: set[str] = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def check_every_key_is_read(tree: type[Section]) -> None:
    read = attributes_read()
    dead = {field.key for field in schema.fields(tree) if field.path[-1] not in read}
    assert dead <= KNOWN_EXCEPTIONS, f"never read: {sorted(dead)}"


@pytest.mark.parametrize("tree", TREES)
def test_R22_every_key_is_read(tree: type[Section]) -> None:
    check_every_key_is_read(tree)


def test_R22_planted_key_that_nothing_reads() -> None:
    class Planted(GenerateConfig):
        never_looked_at: int = Field(default=1)
        """A number that changes nothing."""

    with pytest.raises(AssertionError, match="never_looked_at"):
        check_every_key_is_read(Planted)


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
