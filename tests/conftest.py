"""What all tests share: no model hub, one thread for torch, and the real base fetched once."""

from __future__ import annotations

import os

# Before torch and transformers are imported: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: the tests that press it would fail.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine is shared by several test processes: a slow example is no fault.
settings.register_profile("kit", deadline=None, max_examples=60)
settings.load_profile("kit")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real base SmolLM2-135M-Instruct, fetched into the cache folder if need be."""
    from medusa.base import fetch_base

    return fetch_base("smollm2-135m")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that takes the real base is marked, so that `-m "not base"` leaves the download out."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.base)
