"""Parts of a distillation, joined: nothing of anyone's is replaced, and a join that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.base import Base, load_base
from medusa.data.conversations import load_conversations
from medusa.data.rows import manifest_of
from medusa.data.states import StatesCache, build_states
from medusa.errors import MedusaError
from medusa.files import read_json, write_json
from medusa_cli.workers import already_made, join_parts, joining, parts_of


@pytest.fixture(scope="module")
def base(loop) -> Base:
    return load_base(str(loop.base), dtype=torch.float32)


def make_parts(base: Base, out: Path) -> None:
    """Two parts: one with answers and states, one without any."""
    folder = parts_of(out)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    for number, rows in enumerate(([{"id": "a", "messages": turns, "finish": ["stop"]}], [])):
        path = folder / f"{number}.jsonl"
        write_json(manifest_of(path), {"format": 1})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_states(base, load_conversations(folder / "0.jsonl"), folder / "0", progress=False)
    write_json(folder / "parts.json", {"workers": 2})


def test_what_is_there_is_refused_before_any_work(base: Base, tmp_path: Path) -> None:
    out, states = tmp_path / "o.jsonl", tmp_path / "states"
    assert not already_made("b", out, states)
    states.mkdir()
    assert not already_made("b", out, states)
    (states / "mine").touch()
    with pytest.raises(MedusaError, match=f"{states} is not empty; give another folder"):
        already_made("b", out, states)
    with pytest.raises(MedusaError, match="mine is a file; give a folder"):
        already_made("b", out, states / "mine")
    with pytest.raises(MedusaError, match="states is not a regular file"):
        already_made("b", states, None)
    make_parts(base, out)
    with pytest.raises(MedusaError, match=f"{states} is not empty; give another folder"):
        already_made("b", out, states)
    out.touch()
    with pytest.raises(MedusaError, match="move one of them away"):
        already_made("b", out, None)
    assert (states / "mine").exists()


def test_finished_answers_without_their_states_are_an_error(base: Base, tmp_path: Path) -> None:
    out, states = tmp_path / "o.jsonl", tmp_path / "states"
    make_parts(base, out)
    join_parts(base, out, states)
    assert not parts_of(out).exists()
    assert StatesCache(states).num_segments == 1
    assert already_made("b", out, states)
    assert already_made("b", out, None)
    with pytest.raises(MedusaError, match=f"medusa data states {out} --base b --out"):
        already_made("b", out, tmp_path / "absent")
    out.write_text(out.read_text().replace("hello", "good day"))
    with pytest.raises(MedusaError, match="does not hold its hidden states"):
        already_made("b", out, states)


@pytest.mark.parametrize("stopped", ["before the states", "before the parts were removed"])
def test_a_join_that_was_stopped_goes_on(base: Base, tmp_path: Path, stopped: str) -> None:
    out, states = tmp_path / "o.jsonl", tmp_path / "states"
    make_parts(base, out)
    record = parts_of(out) / "parts.json"
    if stopped == "before the states":
        out.write_text("half")
    else:
        join_parts(base, out, states)
        make_parts(base, out)
    write_json(record, {**read_json(record), "joining": {"states": str(states)}})
    assert joining(out, states)
    assert not joining(out, tmp_path / "other")
    assert not already_made("b", out, states)
    join_parts(base, out, states)
    assert [row["id"] for row in load_conversations(out)] == ["a"]
    assert StatesCache(states).num_segments == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.jsonl", "o.jsonl.manifest.json", "states"]
