"""The state that a run resumes from: one file, written atomically, that holds all the next step depends on.

The order of the data and any randomness inside a step are functions of (seed, step), so the step number
stands for the data's position and the random generators; weights, averages, optimiser and the best result so
far are stored.
"""

from __future__ import annotations

import pickle
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from medusa.errors import MedusaError
from medusa.files import atomic_file, sha256_json
from medusa.training.recipe import Recipe

FORMAT = 1
# What may differ between the run that stopped and the one that goes on: none of it reaches the weights.
_FREE_TRAINING_KEYS = ("save_steps", "log_steps", "trackers")


def run_key(recipe: Recipe, fingerprints: dict[str, Any], world: int) -> dict[str, str]:
    """What must be the same for a run to continue, by name: a changed one can be named."""
    resolved = recipe.model_dump(mode="json")
    parts = {
        f"section {name!r}": value
        for name, value in resolved.items()
        if name not in ("data", "card", "training")
    }
    training = {key: value for key, value in resolved["training"].items() if key not in _FREE_TRAINING_KEYS}
    parts |= {"section 'training'": training, "card.weights_dtype": resolved["card"]["weights_dtype"]}
    parts |= {"the base and data": fingerprints, "the number of processes": world}
    return {name: sha256_json(value) for name, value in parts.items()}


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors and plain values; the file that was there stays whole until this one is."""
    with atomic_file(path) as temporary:
        torch.save({"format": FORMAT, **state}, temporary)


def load_state(path: Path, key: dict[str, str]) -> dict[str, Any]:
    """Reads what `save_state` wrote.

    Raises:
        MedusaError: not such a file, or of a run with another recipe, base, data or number of processes.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = state["key"] if state["format"] == FORMAT else None
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        raise MedusaError(f"{path} is not a training state ({error}); train in another folder") from error
    if found is None:
        raise MedusaError(f"{path} is of another format; train in another folder")
    changed = [name for name in key if found.get(name) != key[name]]
    if changed:
        raise MedusaError(
            f"cannot resume {path.parent}: {', '.join(changed)} changed; train in another folder, or undo it"
        )
    return state


def sweep(out: Path) -> None:
    """Removes the temporary files of processes that were killed while they saved."""
    for left in [*out.glob(".*.tmp"), *(out / "training").glob(".*.tmp")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


class StopRequest:
    """SIGTERM or SIGINT asks for a stop: the loop looks at `signal` between steps. A second acts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
