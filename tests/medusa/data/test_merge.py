from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.base import Base
from medusa.data import states
from medusa.data.conversations import load_conversations
from medusa.data.merge import merge
from medusa.data.rows import RowFile, manifest_of
from medusa.data.states import StatesWriter, build_states
from medusa.errors import MedusaError
from medusa.files import read_json, write_json
from tests.medusa.data.bases import make_base
from tests.medusa.data.test_states import check, conversations, expected


def split(folder: Path, rows: list[dict], base: Base) -> tuple[list[Path], list[Path]]:
    """Two runs: one finished, one cut off with a torn line and the states of only some rows."""
    answers, caches = [folder / "a.jsonl", folder / "b.jsonl"], [folder / "a", folder / "b"]
    for path, part in zip(answers, (rows[:9], rows[9:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        write_json(manifest_of(path), {"format": 1, "sampling": {"seed": 0}})
    build_states(base, rows[:9], caches[0], progress=False)
    some = StatesWriter(base, rows[9:14], caches[1])
    some.close(progress=False)
    (caches[1] / states.MANIFEST).unlink()
    with open(answers[1], "a") as file:
        file.write('{"id": "torn')
    return answers, caches


def test_states_are_copied_and_missing_ones_computed(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SHARD_TOKENS", 60)
    rows = conversations(20)
    answers, caches = split(tmp_path, rows, base)
    ran: list[int] = []
    run = states.run
    monkeypatch.setattr(states, "run", lambda b, part, *words: ran.extend(part) or run(b, part, *words))
    cache = merge(base, answers, caches, tmp_path / "all.jsonl", tmp_path / "all", progress=False)
    assert ran == [14, 15, 16, 17, 18, 19]
    check(cache, expected(base, rows))
    assert [row["id"] for row in load_conversations(tmp_path / "all.jsonl")] == [row["id"] for row in rows]
    # It is a cache like any other: building it again finds everything there.
    ran.clear()
    again = build_states(base, load_conversations(tmp_path / "all.jsonl"), tmp_path / "all", progress=False)
    assert not ran
    assert torch.equal(again.lengths, cache.lengths)


def test_what_does_not_belong_together_is_an_error(base: Base, tmp_path: Path) -> None:
    answers, caches = split(tmp_path, conversations(20), base)
    out = {"out": tmp_path / "all.jsonl", "out_states": tmp_path / "all", "progress": False}
    with pytest.raises(MedusaError, match="one for each"):
        merge(base, answers, caches[:1], **out)
    with pytest.raises(MedusaError, match="have the id '0'"):
        merge(base, answers[:1] * 2, caches[:1] * 2, **out)
    with pytest.raises(MedusaError, match="other conversations"):
        merge(base, answers, caches[::-1], **out)
    with pytest.raises(MedusaError, match="not empty"):
        merge(base, answers, caches, **{**out, "out_states": caches[0]})
    with pytest.raises(MedusaError, match="another base"):
        merge(make_base(tmp_path / "other", seed=1), answers, caches, **{**out, "out_states": tmp_path / "x"})
    with pytest.raises(MedusaError, match="cannot read"):
        merge(base, [tmp_path / "no.jsonl"], caches[:1], **{**out, "out_states": tmp_path / "y"})


def test_answers_of_another_base_are_not_joined(base: Base, tmp_path: Path) -> None:
    answers, _ = split(tmp_path, conversations(20), base)
    write_json(manifest_of(answers[1]), {"format": 1, "fingerprint": {"base": "another"}})
    with pytest.raises(MedusaError, match="different bases"):
        merge(base, answers, None, tmp_path / "all.jsonl", None)


def test_the_manifest_names_every_way_the_answers_were_made(base: Base, tmp_path: Path) -> None:
    answers, _ = split(tmp_path, conversations(20), base)
    write_json(manifest_of(answers[1]), {"format": 1, "sampling": {"seed": 1}})
    merge(base, answers, None, tmp_path / "all.jsonl", None)
    ways = read_json(manifest_of(tmp_path / "all.jsonl"))["sampling"]["merged"]
    assert [way["sampling"]["seed"] for way in ways] == [0, 1]
    with pytest.raises(MedusaError, match="made differently"):
        RowFile(tmp_path / "all.jsonl", {"sampling": {"seed": 1}})


def test_answers_alone(base: Base, tmp_path: Path) -> None:
    answers, _ = split(tmp_path, conversations(20), base)
    assert merge(base, answers, None, tmp_path / "all.jsonl", None) is None
    assert len(load_conversations(tmp_path / "all.jsonl")) == 20
    assert manifest_of(tmp_path / "all.jsonl").read_text() == manifest_of(answers[0]).read_text()
