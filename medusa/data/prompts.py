"""Training, validation and test prompts: user turns for the base to answer, made from the written grammar.

Rows are those of `medusa.data.conversations`: {"id", "messages", "source", "category", "intent", "style",
"language", "turns"}, with roles system and user only. Splits are by product category: no category of the test
split is in train or validation, so that what is measured was never trained on.
"""

import itertools
import json
import random
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

from medusa.data.shopping.conversation import INTENTS, make_conversation
from medusa.data.shopping.general import make_general, tasks
from medusa.data.shopping.products import load_catalogue
from medusa.errors import MedusaError
from medusa.files import atomic_folder, read_json, sha256_file, write_json

TEST_PER_INTENT = 7
VALIDATION = 256
_TEST_SEED = 20_240_613  # the test split never follows the user's seed: figures stay comparable
_TRIES = 50
_FILES = {"manifest.json", "train.jsonl", "validation.jsonl", "test.jsonl"}


def make_prompts(
    out_dir: Path | str,
    *,
    train: int = 4000,
    validation: int = VALIDATION,
    general: float = 0.25,
    seed: int = 0,
) -> dict:
    """Writes train.jsonl, validation.jsonl, test.jsonl and manifest.json to `out_dir`, over those of an earlier call.

    train: number of training prompts, of which the share `general` is from outside shopping.
    validation: number of validation prompts, shopping only.
    Returns the manifest: {"format", "seed", "splits": {name: {"rows", "sha256", "by": {field: counts}}}}.
    Raises MedusaError if the numbers make no sense, the grammar runs out of distinct prompts, or `out_dir` is a
    file or holds anything that this function did not write.
    """
    if train < 1 or validation < 1 or not 0 <= general < 1:
        raise MedusaError("train and validation must be at least 1 and general in [0, 1); change them")
    _check_replaceable(Path(out_dir))
    count = round(train * general)
    seen: set[str] = set()
    rows = _shopping("train", train - count, seed, seen) + _general(count, seed, seen)
    random.Random(f"{seed}/order").shuffle(rows)
    splits = {
        "train": rows,
        "validation": _shopping("validation", validation, seed, seen),
        "test": test_prompts(),
    }
    manifest = {"format": 1, "seed": seed, "general": general, "splits": {}}
    with atomic_folder(out_dir) as folder:
        for name, split in splits.items():
            path = folder / f"{name}.jsonl"
            path.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split), encoding="utf-8"
            )
            manifest["splits"][name] = {"rows": len(split), "sha256": sha256_file(path), "by": _counts(split)}
        write_json(folder / "manifest.json", manifest)
    return manifest


def _check_replaceable(folder: Path) -> None:
    """The folder is replaced whole, so nothing but earlier prompts may be in it."""
    if folder.exists() and not folder.is_dir():
        raise MedusaError(f"{folder} is a file; give a folder for the prompts")
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not found:
        return
    try:
        manifest = read_json(folder / "manifest.json")
    except MedusaError:
        manifest = None
    if not isinstance(manifest, dict) or "splits" not in manifest:
        raise MedusaError(f"{folder} is not empty and holds no prompts of this kit; give another folder")
    if others := sorted(found - _FILES):
        raise MedusaError(f"{folder} also holds {others[0]}; move it away, or give another folder")


def test_prompts() -> list[dict]:
    """The test split, always the same.

    Grammar conversations of held-out categories, `TEST_PER_INTENT` of each intent in turn (so that any start
    of the list is balanced), then the packaged prompts that a base wrote.
    """
    rows = _shopping("test", TEST_PER_INTENT * len(INTENTS), _TEST_SEED, set())
    return rows + packaged_prompts()


def packaged_prompts() -> list[dict]:
    """The prompts of the test split that a base wrote; none if the package has no such file."""
    path = files("medusa.data.shopping") / "magpie_test.jsonl"
    if not path.is_file():
        return []
    # Not splitlines(), which also cuts at characters that JSON leaves as they are, such as U+2028.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def fingerprint(messages: list[dict]) -> str:
    """What two prompts must share to count as the same: letters and digits of all turns, case ignored."""
    return re.sub(r"\W+", " ", " ".join(m["content"] for m in messages).lower()).strip()


def _shopping(split: str, count: int, seed: int, seen: set[str]) -> list[dict]:
    categories = [c for c in load_catalogue() if c.split == split]
    rows = []
    for i in range(count):
        intent = INTENTS[i % len(INTENTS)]
        # Each pass over the intents starts at another category, so that every pair of the two comes up.
        category = categories[(i + i // len(INTENTS)) % len(categories)]
        rows.append(
            _distinct(
                f"{split}/{seed}/{i}", seen, lambda rng, c=category, k=intent: make_conversation(rng, c, k)
            )
        )
        rows[-1] = {"id": f"{split}-{seed}-{i:05}", "source": "grammar", **rows[-1]}
    return rows


def _general(count: int, seed: int, seen: set[str]) -> list[dict]:
    rows = []
    for i, task in zip(range(count), itertools.cycle(tasks()), strict=False):
        row = _distinct(f"general/{seed}/{i}", seen, lambda rng, task=task: make_general(rng, task))
        rows.append({"id": f"general-{seed}-{i:05}", "source": "general", **row})
    return rows


def _distinct(key: str, seen: set[str], make) -> dict:
    for attempt in range(_TRIES):
        row = make(random.Random(f"{key}/{attempt}"))
        text = fingerprint(row["messages"])
        if text not in seen:
            seen.add(text)
            return row
    raise MedusaError(
        f"the grammar has no more distinct prompts after {len(seen)}; ask for fewer or write more of it"
    )


def _counts(rows: list[dict]) -> dict[str, dict[str, int]]:
    fields = ("source", "category", "intent", "style", "language", "turns")
    return {f: dict(sorted(Counter(str(row.get(f)) for row in rows).items())) for f in fields}
