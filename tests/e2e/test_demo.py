"""The whole demo in real processes, on a base so small that it takes minutes; interrupted, and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from eval.results import load
from medusa.files import read_json
from tests.medusa_cli.looper import make_base

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]
KINDS = ("hydra",)  # each kind takes a minute; the two differ in their recipe only


def recipe(base: Path) -> dict:
    small = {
        "heads.num_heads": 2,
        "heads.draft_vocab_size": None,
        "training.epochs": 2,
        "training.batch_tokens": 200,
    }
    heads = {
        kind: {"recipe": f"smollm2-135m-{kind}.yaml", "set": small | {"heads.width": None}} for kind in KINDS
    }
    return {
        "base": str(base),
        "prompts": {"train": 24, "magpie": 0},
        "answers": {"max_new_tokens": 22, "validation": 8, "in_flight": 4, "max_length": 4096},
        "heads": heads,
        "eval": {"limit": 3, "max_new_tokens": 22, "peer_conversations": 1},
    }


class Demo:
    def __init__(self, folder: Path):
        self.folder = folder / "run"
        make_base(folder / "base", context=4096)
        recipes = Path(__file__).resolve().parents[2] / "recipes"
        # The heads' recipes are looked for beside the demo's.
        self.recipe = folder / "own" / "demo.yaml"
        self.recipe.parent.mkdir()
        for kind in KINDS:
            name = f"smollm2-135m-{kind}.yaml"
            (self.recipe.parent / name).write_bytes((recipes / name).read_bytes())
        self.recipe.write_text(yaml.safe_dump(recipe(folder / "base")))

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "medusa_cli", "demo", "--recipe", self.recipe, "--out", self.folder]
        return subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "120"},
            start_new_session=True,
        )

    def run(self) -> tuple[str, str]:
        out, err = (child := self.start()).communicate(timeout=1200)
        assert child.returncode == 0, err[-3000:]
        return out, err

    def done(self, stage: str) -> bool:
        record = self.folder / "stages" / f"{stage}.json"
        return record.exists() and read_json(record)["done"]


def test_demo_from_nothing_interrupted_and_again(tmp_path):
    demo = Demo(tmp_path)
    child = demo.start()
    deadline = time.monotonic() + 600
    while not demo.done("validation"):
        assert child.poll() is None, child.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # somewhere in the training
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: everyone in the foreground gets it
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in err
    answers = (demo.folder / "train.jsonl").stat().st_mtime_ns

    out, err = demo.run()
    assert (demo.folder / "train.jsonl").stat().st_mtime_ns == answers
    assert err.count("done before") >= 4
    for kind in KINDS:
        results = load(demo.folder / kind / "report")
        assert results.lossless.checked > 0
        assert results.lossless.not_allowed == 0
        assert results.tokens_per_second["plain"] > 0
        assert f"{results.acceptance_length:.2f}" in out
        assert (demo.folder / kind / "report" / "report.html").is_file()
        assert str(demo.folder / kind / "report" / "report.html") in out
        assert (demo.folder / kind / "tree.png").is_file()
    assert all(kind in out for kind in KINDS)

    _, err = demo.run()
    assert err.count("done before") == len(list((demo.folder / "stages").glob("*.json")))
