"""The hidden-state cache: what heads are trained on, computed once.

A *segment* is one assistant turn of n tokens: `tokens[n]`, what the assistant said, and `hidden[n, H]`, where
`hidden[i]` is the base's last hidden state (after the final norm: the LM head's input) at the position just
before `tokens[i]`. So the LM head on `hidden[i]` predicts `tokens[i]`, the root, and head k (1-based)
predicts `tokens[i + k]`.

Folder: `shard-00000.safetensors` ... with hidden [R, H] bf16, tokens [R] int32, offsets [S + 1] int64 and
conversations [S] int32 (each segment's row of the data), and `manifest.json`, written last. Shards are
renamed into place whole and carry the fingerprints of what they were made from, so an interrupted build goes
on with what is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from medusa.base import Base
from medusa.data.conversations import Row, data_fingerprint, row_fingerprint
from medusa.data.segments import Encoded, Segment, States, encode, join, run
from medusa.data.shards import MANIFEST, TENSORS, open_shard, read_manifest
from medusa.errors import MedusaError
from medusa.files import atomic_file, clear_os_errors, sha256_json, write_json

FORMAT = 1
SHARD_TOKENS = 32_768  # answer tokens of a shard, about: what a killed build loses at most


class NoAnswers(MedusaError):
    """There are no hidden states to keep."""

    def __init__(self) -> None:
        super().__init__("no conversation holds an answer within the context; there is nothing to learn from")


class StatesCache:
    """Reads a cache; shards are memory-mapped.

    Args:
        path: the folder.
        expect: fingerprints that must be the cache's ("base", "tokenizer", "template", "data", any of them).

    Attributes:
        fingerprint: of the base, tokenizer, template and data that the states come from.
        hidden_size: H.
        lengths: [S] int64, tokens of each segment.
        num_segments, num_tokens: S, and their tokens together.

    Raises:
        MedusaError: there is no finished cache, it is damaged, or a fingerprint differs.
    """

    def __init__(self, path: Path | str, expect: dict[str, str] | None = None):
        self.path = Path(path)
        if not (self.path / MANIFEST).is_file():
            raise MedusaError(
                f"{path} holds no finished hidden-state cache; make it with `medusa data states`"
            )
        manifest = read_manifest(self.path)
        if manifest.get("format") != FORMAT:
            raise MedusaError(f"{path} has format {manifest.get('format')}, not {FORMAT}; make it again")
        try:
            self._open(manifest)
        except (KeyError, TypeError, IndexError, SafetensorError) as error:
            raise MedusaError(
                f"{path}: {MANIFEST} and the shards are not a whole cache ({error!r}); remove the folder and make it "
                "again"
            ) from error
        self._check(expect)

    def _open(self, manifest: dict[str, Any]) -> None:
        self.fingerprint: dict[str, str] = dict(manifest["fingerprint"])
        self.hidden_size: int = manifest["hidden_size"]
        if not manifest["shards"]:
            raise KeyError("shards")
        self._shards = [open_shard(self.path / shard["file"]) for shard in manifest["shards"]]
        self._offsets = [shard.get_tensor("offsets") for shard in self._shards]
        self._rows = [shard.get_tensor("conversations").tolist() for shard in self._shards]
        for shard, offsets in zip(manifest["shards"], self._offsets, strict=True):
            if len(offsets) != shard["segments"] + 1 or int(offsets[-1]) != shard["tokens"]:
                raise MedusaError(
                    f"{self.path / shard['file']} does not fit {MANIFEST}; remove that shard and make its "
                    f"states again with `medusa data states`"
                )
        self.lengths = torch.cat([offsets.diff() for offsets in self._offsets])
        self._places = [(n, s) for n, rows in enumerate(self._rows) for s in range(len(rows))]
        self.num_segments, self.num_tokens = len(self._places), int(self.lengths.sum())

    def _check(self, expect: dict[str, str] | None) -> None:
        for part, value in (expect or {}).items():
            if self.fingerprint.get(part) != value:
                raise MedusaError(
                    f"{self.path} was made with another {part} (fingerprint {self.fingerprint.get(part)}, "
                    f"expected {value}); make the cache again with the one that is used now"
                )

    def get(self, segment_ids: Sequence[int]) -> States:
        """Reads segments, in the order asked for."""
        parts = []
        for number in map(int, segment_ids):
            shard, s = self._places[number]
            start, stop = self._offsets[shard][s : s + 2].tolist()
            file = self._shards[shard]
            tokens, hidden = file.get_slice("tokens")[start:stop], file.get_slice("hidden")[start:stop]
            parts.append(Segment(self._rows[shard][s], tokens, hidden))
        return join(parts, self.hidden_size)


class OnlineStates:
    """The same segments, computed when they are asked for: no cache, and no room taken by one.

    Args:
        base: with its weights.
        conversations: normalised rows.
        batch_tokens: most tokens of a forward, padding included.
        max_length: conversations are cut there; None: at the base's context.

    The attributes are those of `StatesCache`.

    Raises:
        NoAnswers: the base said nothing in any of the conversations.
    """

    def __init__(
        self,
        base: Base,
        conversations: Sequence[Row],
        *,
        batch_tokens: int = 8192,
        max_length: int | None = None,
    ):
        self._base, self._batch_tokens = base, batch_tokens
        self._encoded = [encode(base, row, max_length) for row in conversations]
        self._places = [(row, s) for row, (_, spans) in enumerate(self._encoded) for s in range(len(spans))]
        if not self._places:
            raise NoAnswers
        self.fingerprint = {**base.fingerprints, "data": data_fingerprint(conversations)}
        self.hidden_size = base.hidden_size
        spans = [self._encoded[row][1][s] for row, s in self._places]
        self.lengths = torch.tensor([stop - start for start, stop in spans])
        self.num_segments, self.num_tokens = len(self._places), int(self.lengths.sum())

    def get(self, segment_ids: Sequence[int]) -> States:
        """Runs the base over the conversations that the segments are in."""
        wanted = [self._places[int(number)] for number in segment_ids]
        encoded = {row: self._encoded[row] for row, _ in wanted}
        found = dict(run(self._base, encoded, self._batch_tokens))
        return join([found[row][s] for row, s in wanted], self.hidden_size)


def build_states(
    base: Base,
    conversations: Sequence[Row],
    out: Path | str,
    *,
    batch_tokens: int = 8192,
    max_length: int | None = None,
    resume: bool = True,
    progress: bool = True,
) -> StatesCache:
    """Computes the cache of conversations.

    Args:
        base: with its weights.
        conversations: normalised rows.
        out: the folder. What is already there of the same base and conversations is kept.
        batch_tokens: most tokens of a forward, padding included. Conversations of similar length share one.
        max_length: conversations are cut there; None: at the base's context.
        resume: False: whatever is there is removed first.
        progress: show a progress bar.

    Raises:
        MedusaError: `out` holds states of another base or of other conversations, or something else; the disk
            is full.
        NoAnswers: the base said nothing in any.
    """
    writer = StatesWriter(
        base, conversations, Path(out), batch_tokens=batch_tokens, max_length=max_length, resume=resume
    )
    return writer.close(progress=progress)


class StatesWriter:
    """Writes a cache, from states that decoding gave and, where it gave none, by running the base.

    Args:
        base: with its weights.
        rows: the conversations that are there already; more come with `add`.
        out: the folder.
        batch_tokens, max_length, resume: see `build_states`.

    Raises:
        MedusaError: the base has no weights; `out` is no folder, or holds states of another base or of other
            conversations, or something else.
    """

    def __init__(
        self,
        base: Base,
        rows: Sequence[Row],
        out: Path,
        *,
        batch_tokens: int = 8192,
        max_length: int | None = None,
        resume: bool = True,
    ):
        if base.model is None:
            raise MedusaError("hidden states need the base's weights; open it with load_base")
        self._base, self._out, self._rows = base, out, list(rows)
        self._batch_tokens, self._max_length = batch_tokens, max_length
        self._waiting: list[Segment] = []
        self._tokens = 0
        with clear_os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        if (out / MANIFEST).exists():
            read_manifest(out)  # one that is not a cache's must not be written over
        if not resume:
            for file in [out / MANIFEST, *out.glob("shard-*.safetensors")]:
                file.unlink(missing_ok=True)
        for file in out.glob(".shard-*.tmp"):  # from a build that was killed while it wrote one
            file.unlink(missing_ok=True)
        self._covered: set[int] = set()
        self._shards: list[dict[str, Any]] = []
        for file in sorted(out.glob("shard-*.safetensors")):
            self._take_shard(file)

    def add(self, row: Row, answers: Sequence[tuple[Sequence[int], torch.Tensor | None]]) -> bool:
        """Takes the next conversation and the states of its answers, if decoding gave them.

        Args:
            row: the conversation.
            answers: for each assistant turn its token ids [n] and the states before them [n, H] or None.

        Returns:
            Whether a shard is full: make the data durable, then `flush`.
        """
        self._rows.append(row)
        if all(hidden is not None for _, hidden in answers):
            for tokens, hidden in answers:
                segment = Segment(len(self._rows) - 1, torch.tensor(tokens), hidden.to("cpu", torch.bfloat16))
                self._waiting.append(segment)
                self._tokens += len(tokens)
        return self._tokens >= SHARD_TOKENS

    def adopt(self, path: Path, first: int) -> None:
        """Copies a shard of another folder, whose row 0 is row `first` here.

        Raises:
            MedusaError: it was made with another base or from other conversations.
        """
        shard = self.check(path, first)
        tensors = {name: shard.get_tensor(name) for name in TENSORS}
        tensors["conversations"] += first
        self._save(tensors)

    def check(self, path: Path, first: int = 0) -> Any:
        """Opens a shard whose row 0 is row `first` here.

        Raises:
            MedusaError: it is damaged, or was made with another base or from other conversations.
        """
        shard = open_shard(path)
        rows = [row + first for row in shard.get_tensor("conversations").tolist()]
        if not rows or max(rows) >= len(self._rows) or (shard.metadata() or {}) != self._identity(rows):
            raise MedusaError(
                f"{path} was made with another base or from other conversations; give another folder, or "
                f"remove {path.parent}"
            )
        if not self._covered.isdisjoint(rows):
            raise MedusaError(f"{path} holds states that another shard holds too; remove it")
        return shard

    def flush(self) -> None:
        """Writes the segments that wait as one shard."""
        if not self._waiting:
            return
        states = join(self._waiting, self._base.hidden_size)
        tensors = {
            "hidden": states.hidden,
            "tokens": states.tokens.to(torch.int32),
            "offsets": states.offsets,
            "conversations": torch.tensor(states.rows, dtype=torch.int32),
        }
        self._save(tensors)
        self._waiting, self._tokens = [], 0

    def _save(self, tensors: dict[str, torch.Tensor]) -> None:
        number = len(self._shards)
        # An earlier shard may be missing, and those after it must stay.
        while (path := self._out / f"shard-{number:05d}.safetensors").exists():
            number += 1
        rows = tensors["conversations"].tolist()
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata=self._identity(rows))
        self._note(path, rows, len(tensors["tokens"]))

    def close(self, *, progress: bool = True) -> StatesCache:
        """Writes what waits, computes what is missing, and finishes the cache.

        Raises:
            MedusaError: the disk is full.
            NoAnswers: the base said nothing in any conversation.
        """
        self.flush()
        missing = {}
        for number in sorted(set(range(len(self._rows))) - self._covered):
            ids, spans = encode(self._base, self._rows[number], self._max_length)
            if spans:
                missing[number] = (ids, spans)
        total = sum(len(ids) for ids, _ in missing.values())
        with tqdm(total=total, unit=" tokens", unit_scale=True, disable=not progress or not missing) as bar:
            for part in _parts(missing):
                found = dict(run(self._base, part, self._batch_tokens, bar))
                self._waiting = [segment for row in sorted(found) for segment in found[row]]
                self.flush()
        if not self._shards:
            raise NoAnswers
        manifest = {
            "format": FORMAT,
            "fingerprint": {**self._base.fingerprints, "data": data_fingerprint(self._rows)},
            "hidden_size": self._base.hidden_size,
            "dtype": "bfloat16",
            "shards": self._shards,
        }
        write_json(self._out / MANIFEST, manifest)
        return StatesCache(self._out)

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing was written into it."""
        with contextlib.suppress(OSError):
            self._out.rmdir()

    def _identity(self, rows: Iterable[int]) -> dict[str, str]:
        """What a shard was made from; safetensors' metadata are strings."""
        data = sha256_json([row_fingerprint(self._rows[row]) for row in sorted(set(rows))])
        return {"medusa": json.dumps({**self._base.fingerprints, "rows": data}, sort_keys=True)}

    def _take_shard(self, path: Path) -> None:
        """Counts a shard of an earlier run in, if it was made from the same."""
        shard = self.check(path)
        rows = shard.get_tensor("conversations").tolist()
        self._note(path, rows, shard.get_slice("tokens").get_shape()[0])

    def _note(self, path: Path, rows: Sequence[int], tokens: int) -> None:
        self._covered |= set(rows)
        self._shards.append({"file": path.name, "segments": len(rows), "tokens": tokens})


def _parts(encoded: dict[int, Encoded]) -> Iterator[dict[int, Encoded]]:
    """Conversations in order, cut into shards' worth."""
    part: dict[int, Encoded] = {}
    tokens = 0
    for row, (ids, spans) in encoded.items():
        part[row] = (ids, spans)
        tokens += sum(stop - start for start, stop in spans)
        if tokens >= SHARD_TOKENS:
            yield part
            part, tokens = {}, 0
    if part:
        yield part
