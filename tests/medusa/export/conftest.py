from __future__ import annotations

import pytest

from medusa.base import Base
from tests.eval.small import make_base


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A small random Llama with tied embeddings, 258 tokens, in float32."""
    return make_base(tmp_path_factory.mktemp("llama") / "llama")
