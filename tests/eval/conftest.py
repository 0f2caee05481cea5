from __future__ import annotations

import pytest

from tests.eval.small import Small, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small base, heads and conversations, made once."""
    return make_small(tmp_path_factory.mktemp("small"))
