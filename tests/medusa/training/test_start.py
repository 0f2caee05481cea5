"""Heads that learn on from a checkpoint: they begin where it ended, and what they were made of stays on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.training import train
from tests.medusa.training.test_loop import recipe_of
from tests.medusa.training.tiny import Tiny


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "training/metrics.json").read_text())


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_training_goes_on_from_a_checkpoint(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    fast = {"epochs": 6, "learning_rate": 0.01, "batch_tokens": 200}
    first = tmp_path / "first"
    before = train(recipe_of(tiny, tmp_path, heads={"kind": kind}, training=fast), first)
    second = tmp_path / "second"
    recipe = recipe_of(tiny, tmp_path, heads={"kind": kind}, training={**fast, "start": str(first)})
    after = train(recipe, second, argv=["train_heads.py"])
    rows = history(second)
    assert rows[0]["step"] == 0
    assert rows[0]["acceptance_length"] == pytest.approx(before.best["acceptance_length"])
    assert after.best["acceptance_length"] >= before.best["acceptance_length"]
    old, new = load_checkpoint(first, tiny.base), load_checkpoint(second, tiny.base)
    assert torch.equal(old.heads.draft_vocab, new.heads.draft_vocab)
    assert new.provenance["started_from"]["training"] == old.provenance["training"]
    assert str(tmp_path) not in (second / "provenance.json").read_text()


def test_heads_that_only_get_worse_do_not_replace_their_start(tiny: Tiny, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(
        recipe_of(tiny, tmp_path, training={"epochs": 6, "learning_rate": 0.01, "batch_tokens": 200}), first
    )
    wild = {"epochs": 1, "learning_rate": 30.0, "clip": 1e6, "start": str(first)}
    result = train(recipe_of(tiny, tmp_path, training=wild), second)
    assert result.best["step"] == 0
    old, new = load_checkpoint(first, tiny.base).heads, load_checkpoint(second, tiny.base).heads
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))


def test_a_start_of_another_shape_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train(recipe_of(tiny, tmp_path, training={"epochs": 1}), first)
    recipe = recipe_of(tiny, tmp_path, heads={"width": 16}, training={"start": str(first)})
    with pytest.raises(MedusaError, match="width 32, not 16; change `heads`"):
        train(recipe, tmp_path / "second")


def test_a_start_that_is_not_there(tiny: Tiny, tmp_path: Path) -> None:
    recipe = recipe_of(tiny, tmp_path, training={"start": str(tmp_path / "nowhere")})
    with pytest.raises(MedusaError, match="nowhere"):
        train(recipe, tmp_path / "second")
