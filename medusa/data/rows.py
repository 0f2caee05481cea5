"""Append-only JSONL that a killed run can go on with.

A line is complete once its newline is written; a last line without one is cut off when the file is opened
again. The manifest beside it says how the rows are made, so that one file never mixes two ways.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medusa.errors import MedusaError
from medusa.files import read_json, write_json

_SYNC_SECONDS = 5.0  # a power cut loses no more than this


def manifest_of(path: Path) -> Path:
    """Where it is said how a file's rows were made."""
    return path.with_name(path.name + ".manifest.json")


class RowFile:
    """Rows in a file, with those of earlier runs.

    Args:
        path: the .jsonl file; `<path>.manifest.json` is beside it.
        made: how the rows are made: groups of settings, JSON values.
        fields: what each row must have.

    Attributes:
        rows: what is in the file.

    Raises:
        MedusaError: the file was made in another way, or is not such a file.
    """

    def __init__(
        self, path: Path | str, made: Mapping[str, Mapping[str, Any]], fields: tuple[str, ...] = ("id",)
    ):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{self.path}.lock")
        try:
            self._lock.acquire(timeout=0)  # a killed process holds no lock
        except Timeout as error:
            raise MedusaError(
                f"another process is writing {self.path}; let it end, or give another file"
            ) from error
        try:
            self._check_manifest({"format": 1, **made})
            self.rows = self._recover(fields)
        except BaseException:
            self._lock.release()
            raise
        self._file = open(self.path, "ab")
        self._synced = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()  # from here on a killed process loses nothing, only a power cut does
        self.rows.append(row)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Makes all rows durable."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.sync()
        self._file.close()
        self._lock.release()

    def _check_manifest(self, mine: dict[str, Any]) -> None:
        path = manifest_of(self.path)
        if not path.exists():
            if self.path.exists():
                raise MedusaError(
                    f"{self.path} is there, but no {path.name}; give another file, or move it away"
                )
            write_json(path, mine)
            return
        theirs = read_json(path)
        differing = [
            f"{name}: {theirs.get(group, {}).get(name)} there, {value} now"
            for group, settings in mine.items()
            if isinstance(settings, Mapping)
            for name, value in settings.items()
            if theirs.get(group, {}).get(name) != value
        ]
        if differing:
            raise MedusaError(
                f"{self.path} was made differently ({'; '.join(differing)}); use the same settings, or "
                "another file"
            )

    def _recover(self, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, "rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                file.truncate(whole)
                os.fsync(file.fileno())
        rows = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or any(name not in row for name in fields):
                    raise ValueError(f"it needs {', '.join(fields)}")
            except ValueError as error:
                raise MedusaError(
                    f"{self.path}:{number} is not a row of this kit: {error}; move the file away"
                ) from error
            rows.append(row)
        return rows
