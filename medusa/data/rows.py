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
from medusa.files import clear_os_errors, read_json, write_json

_SYNC_SECONDS = 5.0  # a power cut loses no more than this


def manifest_of(path: Path) -> Path:
    """Where it is said how a file's rows were made."""
    return path.with_name(path.name + ".manifest.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a file of rows.

    Raises:
        MedusaError: there is none, or it is not one of this kit.
    """
    manifest = read_json(manifest_of(path))
    if not isinstance(manifest, dict):
        raise MedusaError(f"{manifest_of(path)} is not a manifest of this kit; give another file than {path}")
    return manifest


def parse_rows(content: bytes, path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of whole lines.

    Args:
        content: the lines.
        path: names them in errors.
        fields: what each row must have.

    Raises:
        MedusaError: a line is not such a row.
    """
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or any(name not in row for name in fields):
                raise ValueError(f"it needs {', '.join(fields)}")
            if not isinstance(row.get("id", ""), str):
                raise ValueError("its id must be text")
            if "messages" in fields and not _are_messages(row["messages"]):
                raise ValueError("its messages must be a list of roles and contents, both of them text")
        except (ValueError, RecursionError) as error:
            raise MedusaError(
                f"{path}:{number} is not a row of this kit: {error}; mend that line, or give another file"
            ) from error
        rows.append(row)
    return rows


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in value
    )


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
        self._lock = FileLock(f"{self.path}.lock")
        try:
            with clear_os_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(timeout=0)  # a killed process holds no lock
        except Timeout as error:
            raise MedusaError(
                f"another process is writing {self.path}; let it end, or give another file"
            ) from error
        try:
            self._check_manifest({"format": 1, **made})
            with clear_os_errors(self.path):
                self.rows = self._recover(fields)
                # Without a buffer: a full disk would make closing the file fail once more.
                self._file = open(self.path, "ab", buffering=0)
        except BaseException:
            self._lock.release()
            raise
        self._synced = time.monotonic()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row. Then a killed process no longer loses it, only a power cut does.

        Raises:
            MedusaError: the disk is full. The rows before this one stay.
        """
        line = memoryview(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        with clear_os_errors(self.path):
            while line:
                line = line[self._file.write(line) :]
        self.rows.append(row)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Makes all rows durable.

        Raises:
            MedusaError: the disk is full.
        """
        with clear_os_errors(self.path):
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.sync()
        finally:
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
        theirs = read_manifest(self.path)
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
        return parse_rows(content[:whole], self.path, fields)
