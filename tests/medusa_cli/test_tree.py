"""`medusa cost`, `tree search` and `tree show` over a real checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa.errors import MedusaError
from medusa.tree import Tree
from medusa_cli.commands import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def checkpoint(loop, tmp_path) -> Path:
    return Path(shutil.copytree(loop.checkpoints["hydra"], tmp_path / "checkpoint"))


def curve(path: Path, *seconds: float) -> Path:
    """A step-cost file: widths 1, 2, 4, 8, ... with these times."""
    steps = [{"width": 2**i, "median": s, "low": s, "high": s} for i, s in enumerate(seconds)]
    value = {"format": 2, "about": {"dtype": "float32"}, "curves": [{"batch": 1, "steps": steps}]}
    path.write_text(json.dumps(value))
    return path


def test_cost_is_written_and_read_by_search(loop, checkpoint, tmp_path):
    words = [*loop.options()[2:], "--checkpoint", str(checkpoint)]
    shown = run("cost", *words, "--widths", "1,2,4", "--out", str(tmp_path / "cost.json"))
    steps = json.loads((tmp_path / "cost.json").read_text())["curves"][0]["steps"]
    assert [step["width"] for step in steps] == [1, 2, 4]
    assert all(0 < step["low"] <= step["median"] <= step["high"] for step in steps)
    assert "quartiles" in shown
    found = json.loads(run("tree", "search", *words, "--cost", str(tmp_path / "cost.json"), "--json"))
    assert [candidate["width"] for candidate in found["candidates"]] == [1, 2, 3, 4]


def test_search_saves_the_chosen_tree_and_draws_the_comparison(checkpoint, tmp_path):
    words = ["--checkpoint", str(checkpoint), "--cost", str(curve(tmp_path / "c.json", 1.0, 1.0, 1.0))]
    shown = run("tree", "search", *words, "--plot", str(tmp_path / "plot.png"))
    assert Tree.from_json(checkpoint / "tree.json") == Tree.chain(3)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "4 nodes, 3 deep" in shown


def test_search_chooses_plain_decoding_where_no_tree_pays(checkpoint, tmp_path):
    words = ["--checkpoint", str(checkpoint), "--cost", str(curve(tmp_path / "c.json", 1.0, 9.0, 9.0))]
    assert "plain decoding" in run("tree", "search", *words)
    assert Tree.from_json(checkpoint / "tree.json") == Tree()


def test_a_dry_run_leaves_the_tree_alone(checkpoint, tmp_path):
    before = (checkpoint / "tree.json").read_bytes()
    words = ["--checkpoint", str(checkpoint), "--cost", str(curve(tmp_path / "c.json", 1.0, 1.0, 1.0))]
    run("tree", "search", *words, "--dry-run")
    assert (checkpoint / "tree.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "x.bmp"], "must end with"),
        (["--cost", "pyproject.toml"], "not valid JSON"),
    ],
)
def test_bad_files_are_named(checkpoint, tmp_path, words, message):
    if "--cost" not in words:
        words = [*words, "--cost", str(curve(tmp_path / "c.json", 1.0, 1.0))]
    with pytest.raises(MedusaError, match=message):
        run("tree", "search", "--checkpoint", str(checkpoint), *words)


def test_a_checkpoint_without_calibration_says_how_to_get_one(checkpoint):
    (checkpoint / "calibration.json").unlink()
    with pytest.raises(MedusaError, match="medusa calibrate --checkpoint"):
        run("tree", "search", "--checkpoint", str(checkpoint))


def test_show_draws_every_node(checkpoint):
    shown = run("tree", "show", str(checkpoint))
    assert "6 nodes, 3 deep" in shown
    assert shown.count("head 2") == 2
    assert json.loads(run("tree", "show", str(checkpoint / "tree.json"), "--json"))["width"] == 6


@pytest.mark.parametrize(
    "step", [{"median": "a"}, {"median": None}, {"median": 0}, {"width": 1.5}, {"width": "4"}]
)
def test_a_curve_that_makes_no_sense(checkpoint, tmp_path, step):
    path = curve(tmp_path / "c.json", 1.0, 1.0)
    value = json.loads(path.read_text())
    value["curves"][0]["steps"][1].update(step)
    path.write_text(json.dumps(value))
    with pytest.raises(MedusaError, match="no step costs"):
        run("tree", "search", "--checkpoint", str(checkpoint), "--cost", str(path))
