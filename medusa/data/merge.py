"""One file of answers, and one cache of hidden states, from several that were made side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medusa.base import Base
from medusa.data.conversations import Row
from medusa.data.rows import manifest_of
from medusa.data.states import StatesCache, StatesWriter
from medusa.errors import MedusaError
from medusa.files import atomic_file, read_json, write_json


def merge(
    base: Base,
    answers: Sequence[Path],
    states: Sequence[Path] | None,
    out: Path,
    out_states: Path | None,
    *,
    progress: bool = True,
) -> StatesCache | None:
    """Joins what several runs of `distill` wrote, finished or not.

    States are copied as they are; those that a run had not written yet are computed.

    Args:
        base: the one that all were made with, with its weights.
        answers: files of conversations, with ids that are distinct over all of them.
        states: the folder of states of each; None: answers only.
        out: the joint file of conversations. The manifest of how they were made is written beside it.
        out_states: the joint cache; a folder that is not there or empty.
        progress: show a progress bar.

    Raises:
        MedusaError: the numbers of files and folders differ; the files were made with different bases; ids
            repeat; `out_states` is not empty; states are of another base or of other conversations.
    """
    if not answers or (states is not None and len(answers) != len(states)):
        raise MedusaError(
            f"{len(answers)} files of answers and {len(states or ())} folders of states: give one for each"
        )
    if out_states is not None and out_states.exists() and any(out_states.iterdir()):
        raise MedusaError(f"{out_states} is not empty; give another folder")
    made = [read_json(path) for path in map(manifest_of, answers)]
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
    with atomic_file(out) as temporary:
        temporary.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
    ways = [manifest for at, manifest in enumerate(made) if manifest not in made[:at]]
    # Of several ways none is the file's own, so that distillation does not go on with it in one of them.
    write_json(manifest_of(out), ways[0] if len(ways) == 1 else {**made[0], "sampling": {"merged": ways}})
    if states is None or out_states is None:
        return None
    writer = StatesWriter(base, rows, out_states)
    first = 0
    for part, folder in zip(parts, states, strict=True):
        for shard in sorted(folder.glob("shard-*.safetensors")):
            writer.adopt(shard, first)
        first += len(part)
    return writer.close(progress=progress)


def _whole_rows(path: Path) -> list[Row]:
    """The rows of a file that may still be written to: without a last line that has no end yet."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MedusaError(f"cannot read {path}: {error.strerror}") from error
    try:
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise MedusaError(f"{path} is not a file that distillation wrote: {error}") from error
