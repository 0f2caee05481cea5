"""The files of a hidden-state cache, opened and looked through (`states.py` says what is in them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from medusa.errors import MedusaError
from medusa.files import read_json

MANIFEST = "manifest.json"
TENSORS = ("hidden", "tokens", "offsets", "conversations")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A cache's manifest.

    Raises:
        MedusaError: it is damaged, or something else's.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except MedusaError as error:
        raise MedusaError(
            f"{path} is missing or damaged; remove that file if it is there, and finish the cache again with "
            "`medusa data states`: its shards stay"
        ) from error
    if not isinstance(manifest, dict) or not {"fingerprint", "hidden_size", "shards"} <= set(manifest):
        raise MedusaError(f"{path} is not a hidden-state cache's; give another folder")
    return manifest


def open_shard(path: Path) -> Any:
    """A shard, memory-mapped: a `safetensors.safe_open`.

    Raises:
        MedusaError: it is missing or damaged, or is not a shard.
    """
    try:
        shard = safe_open(path, framework="pt")
        if missing := set(TENSORS) - set(shard.keys()):
            raise ValueError(f"it has no {min(missing)}")
    except (OSError, ValueError, SafetensorError) as error:
        raise MedusaError(
            f"{path} is missing or damaged ({error}); remove that file if it is there, and make its states "
            "again with `medusa data states`"
        ) from error
    return shard
