from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.base import Base
from medusa.data import states
from medusa.data.conversations import load_conversations
from medusa.data.merge import Merged, merge
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
    merged = merge(base, answers, caches, tmp_path / "all.jsonl", tmp_path / "all", progress=False)
    assert merged.rows == 20
    cache = merged.cache
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
    with pytest.raises(MedusaError, match=f"no such folder of states: {tmp_path / 'absent'}"):
        merge(base, answers, [caches[0], tmp_path / "absent"], **out)
    with pytest.raises(MedusaError, match=r"b\.jsonl is there already; give another file"):
        merge(base, answers, caches, **{**out, "out": answers[1]})
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(("all", "x", "y", "."))} == set()


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
    assert merge(base, answers, None, tmp_path / "all.jsonl", None) == Merged(20)
    assert len(load_conversations(tmp_path / "all.jsonl")) == 20
    assert manifest_of(tmp_path / "all.jsonl").read_text() == manifest_of(answers[0]).read_text()


@pytest.mark.parametrize("line", ["5", '{"messages": []}', '{"id": 1, "messages": []}', '{"id": "1"}', "{"])
def test_a_line_that_is_no_row_is_named(base: Base, tmp_path: Path, line: str) -> None:
    answers, _ = split(tmp_path, conversations(20), base)
    answers[0].write_text(answers[0].read_text() + line + "\n")
    with pytest.raises(MedusaError, match=r"a\.jsonl:10 is not a row"):
        merge(base, answers, None, tmp_path / "all.jsonl", None)
    assert not (tmp_path / "all.jsonl").exists()


def test_damaged_states_are_found_before_anything_is_written(base: Base, tmp_path: Path) -> None:
    answers, caches = split(tmp_path, conversations(20), base)
    shard = next(caches[1].glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(MedusaError, match=f"{shard} is missing or damaged"):
        merge(base, answers, caches, tmp_path / "all.jsonl", tmp_path / "all", progress=False)
    assert not list(tmp_path.glob("*all*"))


def test_a_part_without_answers_needs_no_states(base: Base, tmp_path: Path) -> None:
    answers, caches = split(tmp_path, conversations(20), base)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    write_json(manifest_of(empty), read_json(manifest_of(answers[0])))
    parts, folders = [empty, *answers], [tmp_path / "absent", *caches]
    merged = merge(base, parts, folders, tmp_path / "all.jsonl", tmp_path / "all", progress=False)
    assert merged.cache is not None
    check(merged.cache, expected(base, conversations(20)))
    nothing = merge(base, [empty], [tmp_path / "absent"], tmp_path / "none.jsonl", tmp_path / "none")
    assert nothing == Merged(0)
    assert (tmp_path / "none.jsonl").read_bytes() == b""
    assert not (tmp_path / "none").exists()
