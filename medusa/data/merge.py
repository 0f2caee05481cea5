"""One file of answers, and one cache of hidden states, from several that were made side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa.base import Base
from medusa.data.conversations import Row
from medusa.data.rows import manifest_of, parse_rows, read_manifest
from medusa.data.states import NoAnswers, StatesCache, StatesWriter
from medusa.errors import MedusaError
from medusa.files import atomic_file, atomic_folder, clear_os_errors, write_json


@dataclass(frozen=True)
class Merged:
    """What was joined: the number of conversations, and the joint cache if there is one."""

    rows: int
    cache: StatesCache | None = None


def merge(
    base: Base,
    answers: Sequence[Path],
    states: Sequence[Path] | None,
    out: Path,
    out_states: Path | None,
    *,
    progress: bool = True,
) -> Merged:
    """Joins what several runs of `distill` wrote, finished or not.

    States are copied as they are; those that a run had not written yet are computed. Nothing is written before
    everything is checked, and `out_states` is there only when all else is.

    Args:
        base: the one that all were made with, with its weights.
        answers: files of conversations, with ids that are distinct over all of them.
        states: the folder of states of each; None: answers only. A file without conversations needs none.
        out: the joint file of conversations, which must not be there yet. The manifest of how they were made is
            written beside it.
        out_states: the joint cache; a folder that is not there or empty. None is made if there are no answers.
        progress: show a progress bar.

    Raises:
        MedusaError: the numbers of files and folders differ; a file holds other rows than those of `distill`;
            the files were made with different bases; ids repeat; a folder is missing; `out` is there or
            `out_states` is not empty; states are of another base or of other conversations; the disk is full.
    """
    if not answers or (states is not None and len(answers) != len(states)):
        raise MedusaError(
            f"{len(answers)} files of answers and {len(states or ())} folders of states: give one for each"
        )
    _check_free(out, out_states)
    made = [read_manifest(path) for path in answers]
    for path, manifest in zip(answers, made, strict=True):
        if manifest.get("fingerprint") != made[0].get("fingerprint"):
            raise MedusaError(f"{path} and {answers[0]} are answers of different bases")
    parts = [_whole_rows(path) for path in answers]
    rows = [row for part in parts for row in part]
    repeated = [name for name, count in Counter(row["id"] for row in rows).items() if count > 1]
    if repeated:
        raise MedusaError(
            f"several conversations have the id {repeated[0]!r}; the files answer the same prompts"
        )
    ways = [manifest for at, manifest in enumerate(made) if manifest not in made[:at]]
    # Of several ways none is the file's own, so that distillation does not go on with it in one of them.
    way = ways[0] if len(ways) == 1 else {**made[0], "sampling": {"merged": ways}}
    if states is None or out_states is None:
        _write(rows, way, out)
        return Merged(len(rows))
    shards = _shards(parts, states)
    with clear_os_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)  # rather than find out after the states
    try:
        with atomic_folder(out_states) as temporary:
            writer = StatesWriter(base, rows, temporary)
            for shard, first in shards:
                writer.check(shard, first)
            for shard, first in shards:
                writer.adopt(shard, first)
            writer.close(progress=progress)
            _write(rows, way, out)
    except NoAnswers:
        _write(rows, way, out)
        return Merged(len(rows))
    return Merged(len(rows), StatesCache(out_states))


def _check_free(out: Path, out_states: Path | None) -> None:
    if out.exists() or out.is_symlink():
        raise MedusaError(f"{out} is there already; give another file")
    if out_states is None or not out_states.exists():
        return
    if not out_states.is_dir():
        raise MedusaError(f"{out_states} is a file; give a folder for the states")
    if any(out_states.iterdir()):
        raise MedusaError(f"{out_states} is not empty; give another folder")


def _shards(parts: Sequence[Sequence[Row]], folders: Sequence[Path]) -> list[tuple[Path, int]]:
    """Each folder's shards, with the joint file's row that their row 0 is."""
    found: list[tuple[Path, int]] = []
    first = 0
    for part, folder in zip(parts, folders, strict=True):
        if part and not folder.is_dir():
            raise MedusaError(
                f"no such folder of states: {folder}; give the one of each file, in their order"
            )
        found += [(shard, first) for shard in sorted(folder.glob("shard-*.safetensors"))]
        first += len(part)
    return found


def _write(rows: Sequence[Row], way: dict, out: Path) -> None:
    """The manifest first: a file that is there has one."""
    write_json(manifest_of(out), way)
    with atomic_file(out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _whole_rows(path: Path) -> list[Row]:
    """The rows of a file that may still be written to: without a last line that has no end yet."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MedusaError(f"cannot read {path}: {error.strerror}") from error
    return parse_rows(content[: content.rfind(b"\n") + 1], path, ("id", "messages"))
