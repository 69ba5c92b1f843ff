"""No setting without help, and each is found by its key."""

from __future__ import annotations

from hone.config import schema
from hone.config.base import Section
from hone.config.tree import TREES, RLConfig
from tests.tables import table


@table("tree", TREES.values())
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
    for tree in TREES.values():
        for field in schema.fields(tree):
            found = schema.locate(tree, field.path)
            assert found is not None
            assert found.annotation == field.annotation
    for path in (["run", "dir", "x"], ["data", "train", "x"], ["nope"], ["run", "0"]):
        assert schema.locate(RLConfig, path) is None
    assert schema.locate(RLConfig, ["trainer", "optimizer", "betas", "2"]) is None
