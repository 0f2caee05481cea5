"""Where figures are logged: accelerate's trackers, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from medusa.errors import MedusaError


def check_trackers(names: Sequence[str]) -> None:
    """Raises MedusaError for a name that accelerate does not know, or whose package is not installed."""
    available = {
        str(tracker.value if hasattr(tracker, "value") else tracker) for tracker in get_available_trackers()
    }
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise MedusaError(
                f"training.trackers: unknown {name!r}; known: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in available:
            raise MedusaError(
                f"training.trackers: {name!r} is not installed; install its package or leave it out"
            )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.key`, with the values that TensorBoard takes."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, int | float | str | bool) else str(value)
    return found
