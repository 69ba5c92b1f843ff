from __future__ import annotations

import pytest

from tests.vision.examples import FAMILIES, Twin


@pytest.fixture(scope="session", params=FAMILIES)
def twin(request, tmp_path_factory):
    """Each family's tiny model, loaded by hone and by transformers."""
    return Twin(tmp_path_factory.mktemp(request.param), request.param)
