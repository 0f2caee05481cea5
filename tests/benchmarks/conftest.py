from __future__ import annotations

from tests.eval.conftest import small

__all__ = ["small"]
