"""What is decoded: the kit's test split, a user's file, or Spec-Bench's questions.

Only what the system and the users say is taken. Answers that a file holds are dropped: every turn is answered
again, with the model's own earlier answers before it.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.results import Data
from medusa.errors import MedusaError
from medusa.files import sha256_json

# Spec-Bench (https://github.com/hemingkd/Spec-Bench, evaluation/speed.py) reports these eight as one
# sub-task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Conversations to decode.

    Attributes:
        rows: system and user messages only, with `id`, `source`, `intent`, `category`.
        turns: `first` or `all` of each conversation's user messages.
        data: what the results say about them.
    """

    rows: list[Row]
    turns: str
    data: Data


def load_prompts(data: str, *, turns: str | None = None, limit: int | None = None, seed: int = 0) -> Prompts:
    """Reads the conversations to decode.

    Args:
        data: `test` for the kit's own test split; otherwise a file: Spec-Bench questions
            (`{"question_id", "category", "turns"}` on each line), or anything `load_conversations` reads.
        turns: `first` or `all`; None: the first of Spec-Bench's questions, all of any other conversation.
        limit: decode a balanced subset of this many; None: everything.
        seed: of the choice of a subset.

    Raises:
        MedusaError: the file cannot be read or holds nothing to decode, or `limit` is not positive.
    """
    if limit is not None and limit < 1:
        raise MedusaError(f"--limit must be at least 1, not {limit}")
    kind = "conversations"
    if data == "test":
        from medusa.data.prompts import test_prompts

        rows = test_prompts()
    elif (questions := _spec_bench(Path(data))) is not None:
        kind, rows = "spec-bench", questions
    else:
        from medusa.data.conversations import load_conversations

        if not Path(data).exists():
            raise MedusaError(f"--data {data}: no such file; give a file of conversations, or `test`")
        rows = load_conversations(data)
    turns = turns or ("first" if kind == "spec-bench" else "all")
    rows = [row for row in (_asked(row, turns) for row in rows) if row is not None]
    if not rows:
        raise MedusaError(f"--data {data}: no user message in it, nothing to decode")
    rows = _distinct(rows)
    chosen = rows if limit is None else balanced(rows, limit, seed)
    return Prompts(
        rows=chosen,
        turns=turns,
        data=Data(
            name=Path(data).name,
            kind=kind,
            fingerprint=sha256_json([[row["id"], row["messages"]] for row in rows]),
            conversations=len(chosen),
            out_of=len(rows),
            turns=sum(message["role"] == "user" for row in chosen for message in row["messages"]),
        ),
    )


def _distinct(rows: list[Row]) -> list[Row]:
    """Rows by distinct ids: a repeated one gets a number."""
    seen: Counter[str] = Counter()
    named = []
    for row in rows:
        seen[row["id"]] += 1
        count = seen[row["id"]]
        named.append(row if count == 1 else {**row, "id": f"{row['id']} ({count})"})
    return named


def _asked(row: Row, turns: str) -> Row | None:
    """The row without answers, up to its first or its last user message; None if no user says anything."""
    messages = [message for message in row["messages"] if message["role"] in ("system", "user")]
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return None
    end = users[0] if turns == "first" else users[-1]
    kept = [{"role": message["role"], "content": message["content"]} for message in messages[: end + 1]]
    labels = {key: row.get(key) for key in ("source", "intent", "category")}
    return {"id": str(row["id"]), "messages": kept, **labels}


def _spec_bench(path: Path) -> list[Row] | None:
    """Spec-Bench's questions as rows; None when the file's first line is not one of its questions.

    Raises:
        MedusaError: a later line is not a question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        first = json.loads(next(line for line in lines if line.strip()))
    except (OSError, StopIteration, ValueError):
        return None
    if not _is_question(first):
        return None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
        except ValueError:
            question = None
        if not _is_question(question):
            raise MedusaError(
                f"{path}, line {number}: not a Spec-Bench question (question_id, category, turns)"
            )
        category = question["category"]
        rows.append(
            {
                "id": str(question["question_id"]),
                "messages": [{"role": "user", "content": turn} for turn in question["turns"]],
                "source": "spec-bench",
                "intent": "mt_bench" if category in MT_BENCH else category,
                "category": category,
            }
        )
    return rows


def _is_question(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "question_id" in value
        and isinstance(value.get("category"), str)
        and isinstance(value.get("turns"), list)
        and len(value["turns"]) > 0
        and all(isinstance(turn, str) for turn in value["turns"])
    )


def balanced(rows: list[Row], limit: int, seed: int) -> list[Row]:
    """A subset that stands for the whole: each source gets its share, and within a source the intents come in
    turn (and within an intent the categories), so that none is there twice before each is there once.

    Args:
        rows: all conversations.
        limit: how many to choose, if there are as many.
        seed: decides among equals.

    Returns:
        The chosen rows, in their original order.
    """
    if limit >= len(rows):
        return rows
    draw = random.Random(seed)
    sources = _split(range(len(rows)), lambda number: rows[number]["source"])
    # Largest remainders (Hamilton), and at least one for each source as far as the limit goes.
    shares = {source: limit * len(members) / len(rows) for source, members in sources.items()}
    places = {source: int(share) for source, share in shares.items()}
    by_need = sorted(sources, key=lambda source: (places[source] > 0, -(shares[source] % 1)))
    for source in by_need[: limit - sum(places.values())]:
        places[source] += 1
    chosen: list[int] = []
    for source, members in sources.items():
        intents = _split(members, lambda number: rows[number]["intent"])
        queues = []
        for same_intent in intents.values():
            categories = list(_split(same_intent, lambda number: rows[number]["category"]).values())
            for category in categories:
                draw.shuffle(category)
            draw.shuffle(categories)
            queues.append(_in_turn(categories))
        draw.shuffle(queues)
        chosen += _in_turn(queues)[: places[source]]
    return [rows[number] for number in sorted(chosen)]


def _split(numbers: Iterable[int], label) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for number in numbers:
        groups[label(number)].append(number)
    return dict(groups)


def _in_turn(queues: list[list[int]]) -> list[int]:
    """The first of every queue, then the second of every queue that has one, and so on."""
    longest = max(map(len, queues))
    return [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
