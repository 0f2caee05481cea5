"""Whole runs on a tiny base: heads learn, the best stays, what goes wrong is named."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from medusa.checkpoint import load_checkpoint
from medusa.errors import MedusaError
from medusa.training import load_recipe, loop, train
from tests.medusa.training.tiny import Tiny


def recipe_of(tiny: Tiny, folder: Path, **sections: dict):
    return load_recipe(tiny.recipe_file(folder / "recipe.yaml", **sections))


@pytest.mark.parametrize(
    ("kind", "loss", "learnt"),
    [
        ("medusa", "cross_entropy", 1.25),
        ("hydra", "cross_entropy", 2.0),
        ("hydra", "sampled_cross_entropy", 2.0),
    ],
)
def test_heads_learn_and_the_output_is_a_checkpoint(
    tiny: Tiny, tmp_path: Path, kind: str, loss: str, learnt: float
) -> None:
    recipe = recipe_of(
        tiny,
        tmp_path,
        heads={"kind": kind},
        training={"epochs": 12, "learning_rate": 0.01, "batch_tokens": 200, "loss": loss, "sampled": 8},
    )
    result = train(recipe, tmp_path / "out", argv=["train_heads.py", "--out", str(tmp_path / "out")])
    assert result.stopped is None
    assert result.steps == result.total_steps > 50
    history = json.loads((tmp_path / "out/training/metrics.json").read_text())
    assert len(history) == 12
    taus = [row["acceptance_length"] for row in history]
    assert result.best["acceptance_length"] == max(taus) > learnt
    checkpoint = load_checkpoint(tmp_path / "out", tiny.base)
    assert checkpoint.tree.width == 16
    assert checkpoint.calibration.expected(checkpoint.tree) > learnt - 0.2
    assert checkpoint.provenance["training"]["step"] == result.best["step"]
    assert checkpoint.provenance["data"]["train"]["data"] == "tiny-60"
    assert str(tmp_path) not in (tmp_path / "out/provenance.json").read_text()
    assert load_recipe(tmp_path / "out/recipe.yaml") == recipe
    logs = list((tmp_path / "out/training").rglob("events.out.tfevents*"))
    assert logs[0].stat().st_size > 100


def test_the_best_checkpoint_stays_when_later_ones_are_worse(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.5, 2.0, 1.9])
    real = loop.evaluate

    def graded(*args, **settings):
        metrics, calibration, tree = real(*args, **settings)
        return {**metrics, "acceptance_length": next(lengths)}, calibration, tree

    monkeypatch.setattr(loop, "evaluate", graded)
    result = train(recipe_of(tiny, tmp_path, training={"epochs": 3}), tmp_path / "out")
    assert result.best["acceptance_length"] == 2.0
    assert load_checkpoint(tmp_path / "out").provenance["training"]["epoch"] == 2


def test_own_lm_heads_start_as_the_base_and_train(tiny: Tiny, tmp_path: Path) -> None:
    recipe = recipe_of(tiny, tmp_path, heads={"lm_head": "own"}, training={"epochs": 1})
    train(recipe, tmp_path / "out")
    heads = load_checkpoint(tmp_path / "out", tiny.base).heads
    base = tiny.base.model.get_output_embeddings().weight[heads.draft_vocab]
    assert not torch.equal(heads.lm_head[0], base)
    assert (heads.lm_head[0] - base).abs().max() < 0.5


def test_averaged_weights_are_what_is_saved(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"epochs": 1, "ema": 0.9, "learning_rate": 0.01}
    train(recipe_of(tiny, tmp_path, training=settings), tmp_path / "out")
    state = torch.load(tmp_path / "out/training/state.pt", weights_only=True)
    saved = load_checkpoint(tmp_path / "out").heads
    names = [name for name, _ in saved.named_parameters()]
    for name, average in zip(names, state["average"], strict=True):
        assert torch.equal(saved.state_dict()[name], average)
        assert not torch.equal(state["weights"][name], average)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_takes_the_same_steps(tiny: Tiny, tmp_path: Path, accumulation: int) -> None:
    weights = []
    for number, split in enumerate((1, accumulation)):
        settings = {"epochs": 1, "batch_tokens": 240 // split, "accumulation": split}
        train(recipe_of(tiny, tmp_path, training=settings), tmp_path / str(number))
        weights.append(torch.load(tmp_path / f"{number}/training/state.pt", weights_only=True)["weights"])
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=2e-5)


def test_a_non_finite_loss_names_the_conversation_and_keeps_the_checkpoint(
    tiny: Tiny, tmp_path: Path
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny.folder / "train", spoilt)
    shard = spoilt / "shard-00001.safetensors"
    tensors = safetensors.torch.load_file(shard)
    tensors["hidden"][int(tensors["offsets"][3])] = torch.nan
    row = int(tensors["conversations"][3])
    safetensors.torch.save_file(tensors, shard)
    recipe = recipe_of(tiny, tmp_path, data={"train": str(spoilt)}, evaluation={"steps": 1})
    with pytest.raises(
        MedusaError, match=rf"loss is nan at step \d+; conversations {row} hold hidden states"
    ):
        train(recipe, tmp_path / "out")
    state = tmp_path / "out/training/state.pt"
    if state.exists():
        assert torch.load(state, weights_only=True)["best"] is not None
        load_checkpoint(tmp_path / "out", tiny.base)


def test_a_run_is_not_overwritten_and_a_finished_one_not_repeated(tiny: Tiny, tmp_path: Path) -> None:
    recipe = recipe_of(tiny, tmp_path, training={"epochs": 1})
    first = train(recipe, tmp_path / "out", resume=True)  # nothing to resume: starts
    with pytest.raises(MedusaError, match="add --resume"):
        train(recipe, tmp_path / "out")
    again = train(recipe, tmp_path / "out", resume=True)
    assert again.steps == first.steps
    assert again.best == first.best
    with pytest.raises(MedusaError, match="section 'heads' changed"):
        train(
            recipe_of(tiny, tmp_path, heads={"width": 16}, training={"epochs": 1}),
            tmp_path / "out",
            resume=True,
        )
    (tmp_path / "out/training/state.pt").write_bytes(b"cut short")
    with pytest.raises(MedusaError, match="not a training state"):
        train(recipe, tmp_path / "out", resume=True)


def test_a_checkpoint_without_its_training_state_is_not_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    recipe = recipe_of(tiny, tmp_path, training={"epochs": 1})
    train(recipe, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/training")
    before = (tmp_path / "out/medusa_heads.safetensors").read_bytes()
    for resume in (False, True):
        with pytest.raises(MedusaError, match="holds a finished checkpoint"):
            train(recipe, tmp_path / "out", resume=resume)
    assert (tmp_path / "out/medusa_heads.safetensors").read_bytes() == before


def test_a_signal_stops_between_steps_and_the_rest_gives_the_same_weights(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tiny, tmp_path, training={"ema": 0.5, "save_steps": 1000})
    whole = train(recipe, tmp_path / "whole")
    calls = []
    optimise = loop._Run._optimise

    def interrupted(run, group):
        calls.append(run.step)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return optimise(run, group)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_optimise", interrupted)
        part = train(recipe, tmp_path / "part")
    assert part.stopped == signal.SIGTERM
    assert part.steps == 5 < whole.steps
    train(recipe, tmp_path / "part", resume=True)
    one, other = (
        torch.load(tmp_path / f"{name}/training/state.pt", weights_only=True) for name in ("whole", "part")
    )
    for name, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name
    assert all(torch.equal(a, b) for a, b in zip(one["average"], other["average"], strict=True))
    assert one["best"] == other["best"]


def test_states_of_another_base_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.folder / "train", other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["fingerprint"]["tokenizer"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MedusaError, match="tokenizer"):
        train(recipe_of(tiny, tmp_path, data={"train": str(other)}), tmp_path / "out")


def test_unknown_trackers_are_named(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="unknown 'tensorbord'"):
        train(recipe_of(tiny, tmp_path, training={"trackers": ["tensorbord"]}), tmp_path / "out")


def test_the_script_prints_one_line_for_bad_input(tiny: Tiny, tmp_path: Path, capsys) -> None:
    import typer
    from typer.testing import CliRunner

    import train_heads

    app = typer.Typer()
    app.command()(train_heads.main)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny.recipe()))
    outcome = CliRunner().invoke(
        app, ["--recipe", str(file), "--out", str(tmp_path / "out"), "training.epoch=1"]
    )
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("error: ")
    assert "did you mean 'training.epochs'" in outcome.stderr
