"""Conversations and prompts from files: the kit's own, and users'.

One normalised row: {"id": str, "messages": [{"role": "system"|"user"|"assistant", "content": str}, ...],
"source", "category", "intent": str or None, ...}; other fields of the file are kept. Read are JSONL, JSON and
parquet with `messages`, ShareGPT's `conversations`, or plain prompts (`prompt`, `instruction` or `turns`).
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any

from medusa.errors import MedusaError
from medusa.files import read_json, sha256_json

Row = dict[str, Any]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_ID_FIELDS = ("id", "question_id", "conversation_id")
_FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))
_PROMPT_FIELDS = ("prompt", "instruction", "turns")
_SHOWN = 10  # bad rows that are reported one by one


class _BadRow(Exception):
    """What is wrong with a row, for people."""


def load_conversations(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    limit: int | None = None,
    max_bad: float = 0.01,
    log: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> list[Row]:
    """Reads and normalises conversations.

    A malformed row is left out, reported with its file and line (its number, in JSON and parquet) and
    counted.

    Args:
        paths: one file or several; .jsonl, .ndjson, .json or .parquet.
        limit: at most this many good rows; None: all.
        max_bad: share of malformed rows from which on this is an error.
        log: takes lines for people.

    Returns:
        Normalised rows, in the files' order. Rows without an id get `<file name>:<number>`.

    Raises:
        MedusaError: a file is missing, empty or unreadable; more than `max_bad` of the rows are malformed.
    """
    several = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not several:
        raise MedusaError("no file of conversations was given")
    rows: list[Row] = []
    bad: list[str] = []
    for path in map(Path, several):
        before = len(rows) + len(bad)
        for where, number, value in _read(path):
            if limit is not None and len(rows) >= limit:
                break
            try:
                rows.append(_normalise(value, f"{path.stem}:{number}"))
            except _BadRow as error:
                bad.append(f"{path}:{where}: {error}")
        if len(rows) + len(bad) == before and (limit is None or len(rows) < limit):
            raise MedusaError(f"{path} holds no rows")
    for text in bad[:_SHOWN]:
        log(text)
    total = len(rows) + len(bad)
    if bad:
        more = f" ({len(bad) - _SHOWN} more not shown)" if len(bad) > _SHOWN else ""
        log(f"{len(bad)} of {total} rows are malformed and left out{more}")
    if len(bad) > max_bad * total:
        raise MedusaError(
            f"{len(bad)} of {total} rows are malformed, more than {max_bad:.0%}; the first: {bad[0]}; "
            "repair the file"
        )
    return rows


def data_fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over what the base sees and said: messages and how turns ended, in order."""
    return sha256_json([row_fingerprint(row) for row in rows])


def row_fingerprint(row: Row) -> str:
    """SHA-256 over one row's messages and how its turns ended."""
    messages = [[message["role"], message["content"]] for message in row["messages"]]
    return sha256_json([messages, row.get("finish")])


def _read(path: Path) -> Iterator[tuple[str, int, Any]]:
    """(where for people, 1-based number, value or _BadRow-to-be) of each row of a file."""
    if not path.is_file():
        raise MedusaError(f"no file at {path}; give a .jsonl, .json or .parquet file of conversations")
    try:
        yield from _values(path)
    except OSError as error:
        raise MedusaError(f"cannot read {path}: {error.strerror or error}") from error


def _values(path: Path) -> Iterator[tuple[str, int, Any]]:
    if path.suffix in (".jsonl", ".ndjson"):
        # Line by line and not through `datasets`, which stops at the first malformed line and unifies all
        # rows' fields; its JSON reader cannot say which line was bad. As bytes, so that a line that is not
        # UTF-8 is one bad row.
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", number, _parse(line)
        return
    if path.suffix == ".json":
        values = read_json(path)
        if not isinstance(values, list):
            raise MedusaError(f"{path} must hold a list of conversations")
        for number, value in enumerate(values, start=1):
            yield f"row {number}", number, value
        return
    if path.suffix == ".parquet":
        import pyarrow.parquet
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        try:
            if not pyarrow.parquet.read_metadata(path).num_rows:
                return  # `datasets` cannot read an empty table
            table = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
            for number, value in enumerate(table, start=1):
                yield f"row {number}", number, _plain(value)
        except (OSError, ValueError, DatasetGenerationError) as error:
            raise MedusaError(f"{path} is not a readable parquet file: {error}") from error
        return
    raise MedusaError(f"{path}: files of conversations are .jsonl, .ndjson, .json or .parquet")


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _BadRow(f"not UTF-8: {error.reason} at byte {error.start + 1} of the line")
    except (ValueError, RecursionError) as error:
        return _BadRow(f"not JSON: {error}")


def _plain(value: Any) -> Any:
    """A parquet value as JSON can hold it: times as text, and without what has none, such as bytes."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items() if _has_text(part)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value if _has_text(part)]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    return str(value) if isinstance(value, datetime.timedelta | Decimal) else value


def _has_text(value: Any) -> bool:
    kinds = (str, bool, int, float, dict, list, tuple)
    times = (datetime.date, datetime.time, datetime.timedelta, Decimal)
    return value is None or isinstance(value, (*kinds, *times))


def _normalise(value: Any, default_id: str) -> Row:
    if isinstance(value, _BadRow):
        raise value
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _BadRow(f"a row must be an object, not {type(value).__name__}")
    messages, used = _messages(value)
    _check(messages)
    row = {key: part for key, part in value.items() if key not in used and part is not None}
    identity = next((value[key] for key in _ID_FIELDS if value.get(key) is not None), None)
    row["id"] = default_id if identity is None else str(identity)
    row["messages"] = messages
    turns = sum(message["role"] == "assistant" for message in messages)
    finish = row.get("finish")
    if finish is not None and (
        not isinstance(finish, list)
        or len(finish) != turns
        or any(end not in ("stop", "length") for end in finish)
    ):
        raise _BadRow(f'"finish" must hold "stop" or "length" for each of the {turns} assistant turns')
    for label in ("source", "category", "intent"):
        row[label] = None if row.get(label) is None else str(row[label])
    try:
        json.dumps(row, ensure_ascii=False).encode()  # what is written later must not fail there
    except UnicodeEncodeError as error:
        raise _BadRow(r"a text holds half of a character (a lone surrogate, \ud800 to \udfff)") from error
    except RecursionError as error:
        raise _BadRow("it is nested too deeply") from error
    return row


def _messages(value: Row) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    """A row's messages, and the fields they came from."""
    for field, role_name, content_name in _FORMS:
        turns = value.get(field)
        if turns is None:
            continue
        if not isinstance(turns, list):
            raise _BadRow(f'"{field}" must be a list')
        messages = []
        for number, turn in enumerate(turns):
            if not isinstance(turn, dict):
                raise _BadRow(f"message {number} is not an object")
            role = turn.get(role_name, turn.get("role"))
            content = turn.get(content_name, turn.get("content"))
            if not isinstance(role, str) or role not in _ROLES:
                raise _BadRow(
                    f"message {number} has the role {role!r}; known are {', '.join(sorted(_ROLES))}"
                )
            messages.append({"role": _ROLES[role], "content": content})
        system = value.get("system")
        if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages, (field, "system")
    for field in _PROMPT_FIELDS:
        prompt = value.get(field)
        if prompt is not None:
            texts = prompt if isinstance(prompt, list) else [prompt]
            return [{"role": "user", "content": text} for text in texts], (field,)
    raise _BadRow("neither `messages` nor `conversations` nor `prompt` in it")


def _check(messages: list[dict[str, str]]) -> None:
    if not messages:
        raise _BadRow("no messages")
    for number, message in enumerate(messages):
        content, role = message["content"], message["role"]
        if not isinstance(content, str):
            raise _BadRow(f"message {number} has no text")
        if role == "user" and not content.strip():
            raise _BadRow(f"message {number}, a user's, is empty")
        if role == "system" and number:
            raise _BadRow(f"message {number} is a system message; only the first one can be")
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if not spoken or spoken[0] != "user":
        raise _BadRow("the first message after the system's must be a user's")
    if any(a == b == "assistant" for a, b in itertools.pairwise(spoken)):
        raise _BadRow("two assistant messages follow each other")
