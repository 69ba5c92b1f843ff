"""The documentation: links lead somewhere, and the reference has every key."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from hone.config.schema import fields, is_section
from hone.config.tree import TREES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """`docs/site/build.py`."""
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs/site/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_is_in_the_reference(site: ModuleType) -> None:
    by_command = site.key_reference().split("\n## hone ")[1:]
    assert len(by_command) == len(TREES)
    for text, (command, tree) in zip(by_command, TREES.items(), strict=True):
        assert text.startswith(f"{command}\n")
        for field in fields(tree):
            name = f"### `{field.key}`" if is_section(field.annotation) else f"`--{field.key}`"
            assert name in text, field.key


def test_links_between_pages_lead_to_files(site: ModuleType) -> None:
    for pattern in site.PAGES:
        for page in ROOT.glob(pattern):
            for link in site._LINK.findall(page.read_text()):
                is_outside = "://" in link or link.startswith("mailto:")
                assert is_outside or (page.parent / link).exists(), f"{page}: {link}"


def test_every_page_has_its_place(site: ModuleType) -> None:
    nav = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in nav, page.name
