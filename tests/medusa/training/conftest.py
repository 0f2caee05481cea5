from __future__ import annotations

import pytest

from tests.medusa.training.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny base and states of it, made once."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))
