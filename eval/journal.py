"""Finished conversations of an unfinished run, one JSON object on each line, so that it can go on later."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval.results import Conversation, Divergence, Record
from medusa.errors import MedusaError
from medusa.files import atomic_file


class Entry(Record):
    """A decoded group: its conversations, its seconds by mode and repeat, and where answers differ."""

    rows: list[int]
    conversations: list[Conversation]
    seconds: dict[str, list[float]]
    divergences: list[Divergence]


class Journal:
    """The file of a run's finished groups.

    Args:
        path: the file.
        settings: whatever the figures depend on; entries made under others are not mixed in.
        resume: go on with the file if there is one; otherwise start it anew.

    Attributes:
        entries: what is there, oldest first.

    Raises:
        MedusaError: the file was made with other settings; the message names what differs.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool):
        self.path = path
        # As JSON gives it back, so that a tuple equals the list it became.
        settings = json.loads(json.dumps(settings))
        self.entries: list[Entry] = []
        lines = self._read() if resume else []
        if lines:
            found = lines[0]
            differs = [key for key in settings if found.get(key) != settings[key]]
            if differs:
                raise MedusaError(
                    f"--resume: {path} was begun with another {', '.join(differs)}; use the same settings, "
                    "another --out, or start over without --resume"
                )
            try:
                self.entries = [Entry.model_validate(line) for line in lines[1:]]
            except ValidationError as error:
                raise MedusaError(f"{path} cannot be read; start over without --resume") from error
        # Written again whole: a line that a kill cut short would otherwise stay in the middle.
        with atomic_file(path) as temporary:
            kept = [settings, *(entry.model_dump(mode="json") for entry in self.entries)]
            temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8")

    def _read(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    value = json.loads(line)
                except ValueError:
                    break
                if not isinstance(value, dict):
                    break
                lines.append(value)
        return lines

    def add(self, entry: Entry) -> None:
        """Appends a finished group; it is on the disk when this returns."""
        self._file.write(_line(entry.model_dump(mode="json")))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def close(self) -> None:
        """Closes the file, which stays for `--resume`."""
        self._file.close()

    def remove(self) -> None:
        """Deletes the file: its content is in `results.json`."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
