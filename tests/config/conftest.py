"""Fixtures of the configuration tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config import workspace as files


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    files.fill(folder)
    return folder


@pytest.fixture
def read_workspace(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared by tests that write nothing into it: to fill one takes twice as long as a plan."""
    monkeypatch.chdir(filled)
    return filled
