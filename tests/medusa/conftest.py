"""Tests of compiled code start with no graph: torch compiles one function for a few shapes only, in a whole process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests(request: pytest.FixtureRequest) -> None:
    """Forgets what earlier tests of this process compiled, where compiling is what is tested."""
    if request.module.__name__.endswith(("test_step", "test_quantize")):
        import torch

        torch._dynamo.reset()
