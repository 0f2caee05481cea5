from __future__ import annotations

import pytest

from medusa.base import Base
from tests.medusa.data.bases import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A small random base; see `bases.py`."""
    return make_base(tmp_path_factory.mktemp("bases") / "tiny")
