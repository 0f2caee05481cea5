"""The format of `results.json`. `eval/schema.json` is this file's JSON Schema (`python -m eval schema`).

Times are seconds, rates are tokens per second, fingerprints are SHA-256 in hex. *Mode* is how an answer was
decoded: `plain` (the engine's autoregressive loop), `tree` (the checkpoint's tree) or `chain` (each head's
best token only).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from medusa.errors import MedusaError
from medusa.files import atomic_file, read_json

FORMAT = 1
MODES = ("plain", "tree", "chain")
Mode = Literal["plain", "tree", "chain"]


class Record(BaseModel):
    """A part of the file. An unknown key is an error, so that a misspelt figure is never just missing."""

    model_config = ConfigDict(extra="forbid")


class Interval(Record):
    """An estimate and its 95% interval."""

    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Timing(Record):
    """One decoding of one answer. `seconds` is the whole of it, prefill included."""

    tokens: int
    seconds: FiniteFloat
    prefill: FiniteFloat
    first_token: FiniteFloat


class Answer(Record):
    """One turn's answer in one mode.

    `accepted` holds the tokens that each step committed, guesses of the heads first and the base's own token
    last. The answer's first token comes from the prefill, so the answer has one more token than their sum.
    """

    token_ids: list[int]
    finish: str
    accepted: list[int]
    repeats: list[Timing]


class PeerAnswer(Record):
    """The same prompt answered by another implementation: figures of each repeat.

    `same`: its first answer has the plain one's token ids (None where it does not tell them).
    """

    tokens: list[int]
    seconds: list[FiniteFloat]
    same: bool | None


class Turn(Record):
    """A user's message and the answers to it. All modes and peers see the same prompt tokens."""

    user: str
    prompt_tokens: int
    answers: dict[Mode, Answer]
    peers: dict[str, PeerAnswer] = {}


class Conversation(Record):
    """All raw figures of one conversation."""

    id: str
    source: str | None = None
    intent: str | None = None
    category: str | None = None
    turns: list[Turn]


class Group(Record):
    """Conversations decoded together (one, at batch 1), by number, and the wall-clock seconds of each repeat.

    A multi-turn group's seconds are summed over its turns.
    """

    members: list[int]
    seconds: dict[Mode, list[FiniteFloat]]


class Divergence(Record):
    """The first position at which an answer leaves the plain one.

    `gap` is the difference of the base's two best logits there, from one forward over the common text.
    `behind` is how far the worse of the two tokens chosen lies below the best logit; see `eval/lossless.py`.
    None stands for an answer that ended there.
    """

    conversation: str
    turn: int
    mode: Mode
    position: int
    plain: int | None
    tree: int | None
    gap: FiniteFloat
    behind: FiniteFloat
    tolerance: FiniteFloat
    allowed: bool


class Lossless(Record):
    """Answers compared with the plain ones, and those that differ."""

    checked: int
    different: int
    not_allowed: int
    divergences: list[Divergence]


class Part(Record):
    """A part of the data by itself."""

    n: int
    speedup: Interval
    acceptance_length: FiniteFloat


class Chain(Record):
    """The chain of top-1 tokens, which is what engines without tree attention run."""

    depth: int
    speedup: Interval
    acceptance_length: FiniteFloat
    acceptance_rate: list[FiniteFloat]


class Prefill(Record):
    """Reading the prompts, in plain mode."""

    tokens: int
    seconds: FiniteFloat
    tokens_per_second: FiniteFloat


class StepCost(Record):
    """Seconds of a step (median and quartiles) by tree width; `chosen` is that of the tree that was run."""

    seconds: dict[int, FiniteFloat]
    low: dict[int, FiniteFloat]
    high: dict[int, FiniteFloat]
    chosen: int


class TreeShape(Record):
    """The tree that was run, and calibration's expected acceptance length of the best tree by width."""

    paths: list[list[int]]
    width: int
    depth: int
    expected: dict[int, FiniteFloat] = {}


class Peer(Record):
    """Another implementation on some of the prompts; this engine's plain figure on just those.

    `same` of its `answers` have the plain ones' token ids.
    """

    name: str
    version: str
    conversations: int
    answers: int
    same: int | None
    tokens_per_second: FiniteFloat
    plain_on_the_same: FiniteFloat
    how: str


class Piece(Record):
    """Consecutive text of a sample; `head` says that its tokens were guessed by a head and accepted."""

    text: str
    head: bool


class Sample(Record):
    """An answer to look at."""

    conversation: str
    why: str
    user: str
    acceptance_length: FiniteFloat
    pieces: list[Piece]


class Machine(Record):
    """Where it ran. Load averages are those of the last minute, before and after."""

    cpu: str
    cores: int
    memory_gib: FiniteFloat
    threads: int
    system: str
    accelerator: str | None = None
    load_before: FiniteFloat
    load_after: FiniteFloat


class Data(Record):
    """What was decoded. `left_out`: ids of conversations whose prompt has no room in the base's context."""

    name: str
    kind: Literal["conversations", "spec-bench"]
    fingerprint: str
    conversations: int
    out_of: int
    turns: int
    left_out: list[str] = []


class Settings(Record):
    """How it was decoded. `weights`: how the base's linear layers were kept, in every mode."""

    dtype: Literal["float32", "bfloat16"]
    weights: Literal["full", "int8"] = "full"
    batch: int
    max_new_tokens: int
    repeats: int
    warmup: int
    turns: Literal["first", "all"]
    limit: int | None
    seed: int


class Checkpoint(Record):
    """The checkpoint and its base; `provenance` is the checkpoint's own file."""

    name: str
    heads: dict[str, Any]
    base: str
    base_fingerprint: str
    parameters: int
    base_parameters: int
    provenance: dict[str, Any]


class Results(Record):
    """Everything that a run found out."""

    format: Literal[1] = FORMAT
    speedup: Interval = Field(description="tokens/s of the tree over plain, wall clock, prefill included")
    speedup_decode_only: Interval = Field(description="the same with the prefill taken out of both")
    speedup_by_repeat: list[FiniteFloat]
    acceptance_length: FiniteFloat
    tokens_per_second: dict[str, FiniteFloat]
    tokens_per_second_decode_only: dict[Mode, FiniteFloat]
    lossless: Lossless
    acceptance_rate: list[FiniteFloat] = Field(description="by depth, from depth 1")
    head_accuracy: dict[int, list[FiniteFloat]] = Field(description="top-k: one figure for each head")
    chain: Chain
    step_cost: StepCost
    time_to_first_token: dict[Mode, FiniteFloat] = Field(description="median over answers")
    prefill: Prefill
    by_intent: dict[str, Part]
    by_category: dict[str, Part]
    by_source: dict[str, Part]
    tree: TreeShape
    peers: list[Peer]
    peers_left_out: dict[str, str] = Field(default={}, description="peer: why it was not measured")
    samples: list[Sample]
    checkpoint: Checkpoint
    data: Data
    settings: Settings
    machine: Machine
    versions: dict[str, str]
    command: str
    started: str
    elapsed: FiniteFloat
    conversations: list[Conversation]
    groups: list[Group]

    @model_validator(mode="after")
    def _every_mode(self) -> Results:
        modes = set(MODES)
        of_modes = {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_decode_only": self.tokens_per_second_decode_only,
            "time_to_first_token": self.time_to_first_token,
        }
        of_modes |= {
            f"the answers of {conversation.id}": turn.answers
            for conversation in self.conversations
            for turn in conversation.turns
        }
        for name, found in of_modes.items():
            if missing := sorted(modes - set(found)):
                raise ValueError(f"{name} lacks {', '.join(missing)}")
        if missing := {"kind", "num_heads"} - set(self.checkpoint.heads):
            raise ValueError(f"checkpoint.heads lacks {', '.join(sorted(missing))}")
        return self


def schema() -> str:
    """The JSON Schema of the file, as text."""
    return json.dumps(Results.model_json_schema(), indent=2) + "\n"


def save(results: Results, path: str | os.PathLike) -> None:
    """Writes `results.json`, atomically: one line for each top-level key and for each conversation."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    entries = []
    for key, value in results.model_dump(mode="json").items():
        if key in ("conversations", "groups") and value:
            entries.append(f"{line(key)}: [\n" + ",\n".join(map(line, value)) + "\n]")
        else:
            entries.append(f"{line(key)}: {line(value)}")
    with atomic_file(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def load(path: str | os.PathLike) -> Results:
    """Reads a `results.json`, or the one in a run's folder.

    Raises:
        MedusaError: it is missing or does not have this format.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    value = read_json(path)
    try:
        return Results.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MedusaError(
            f"{path} is not a results file of format {FORMAT}: {where}: {first['msg']}; "
            "run `python -m eval run` again"
        ) from error
