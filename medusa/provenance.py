"""Where a checkpoint comes from: what ran, with which versions, on which base and data."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("medusa-kit", "torch", "transformers", "accelerate", "safetensors", "datasets", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path | None = None) -> dict[str, Any] | None:
    """{"commit": hex, "dirty": bool} of the checkout this code runs from; None when it is not one."""
    folder = folder or Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def without_machine_paths(value: str) -> str:
    """A word with this machine's folders shortened: the working folder to `.`, the home folder to `~`.

    A checkpoint is published; where it lay on somebody's disk is nobody's business. Other absolute paths keep
    their last part only.
    """
    head, sep, tail = value.partition("=")
    if sep and tail.startswith("/"):
        return f"{head}={without_machine_paths(tail)}"
    if not os.path.isabs(value):
        return value
    for folder, short in ((Path.cwd(), "."), (Path.home(), "~")):
        if Path(value).is_relative_to(folder):
            return str(Path(short) / Path(value).relative_to(folder))
    return Path(value).name


def _short(value: Any) -> Any:
    """`without_machine_paths` on every text inside lists and dicts."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return without_machine_paths(value) if isinstance(value, str) else value


def collect(
    *, base: Any, data: dict[str, Any], recipe: dict[str, Any], argv: Sequence[str] | None = None, **more: Any
) -> dict[str, Any]:
    """What `provenance.json` holds.

    Args:
        base: a `medusa.base.Base`.
        data: fingerprints of the data, by split.
        recipe: the resolved recipe.
        argv: the command; by default this process's.
        more: further facts, JSON values.
    """
    return {
        "format": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _short(list(sys.argv if argv is None else argv)),
        "base": {
            "name": without_machine_paths(base.name),
            "fingerprint": base.fingerprint,
            "tokenizer_fingerprint": base.tokenizer_fingerprint,
            "template_fingerprint": base.template_fingerprint,
        },
        "data": data,
        "recipe": _short(recipe),
        "versions": versions(),
        "git": git_commit(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        **more,
    }
