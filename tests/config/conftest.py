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
