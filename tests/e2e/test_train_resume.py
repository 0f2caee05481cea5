"""Real training processes, really killed: --resume always ends with the weights of an unbroken run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from medusa.checkpoint import load_checkpoint
from tests.medusa.training.tiny import Tiny, make_tiny, run_script

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Saves every step and evaluates often: random moments fall in both. Heads are wide, so that saves take
    # as long as steps do.
    return tiny.recipe_file(
        tmp_path_factory.mktemp("recipe") / "recipe.yaml",
        heads={"width": 512, "num_layers": 2},
        training={"epochs": 4, "save_steps": 1, "ema": 0.8, "learning_rate": 0.003, "trackers": []},
        evaluation={"steps": 5},
    )


# Importing torch and accelerate takes ten seconds on a busy machine: a server does it once and forks.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["medusa.training", "medusa.data.states", "torch.utils.tensorboard"])


def start(recipe: Path, out: Path, *words: str) -> multiprocessing.Process:
    """A process that runs `train_heads.py` with these words; its output goes to `<out>.log`."""
    process = FORKS.Process(
        target=run_script, args=(["--recipe", str(recipe), "--out", str(out), *words], f"{out}.log")
    )
    process.start()
    return process


def finish(process: multiprocessing.Process) -> None:
    process.join(timeout=240)
    assert process.exitcode == 0


def launch(recipe: Path, out: Path, *launcher: str) -> str:
    """Runs the script under a launcher and returns what it printed."""
    command = [sys.executable, *launcher, "train_heads.py", "--recipe", str(recipe), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state_of(out: Path) -> dict:
    return torch.load(out / "training/state.pt", weights_only=True)


def assert_same(one: Path, other: Path) -> None:
    """The last weights, their averages, the optimiser and the best checkpoint, bit for bit."""
    mine, theirs = state_of(one), state_of(other)
    assert mine["step"] == theirs["step"]
    assert mine["best"] == theirs["best"]
    assert mine["history"] == theirs["history"]
    for name, weight in mine["weights"].items():
        assert torch.equal(weight, theirs["weights"][name]), name
    assert all(torch.equal(a, b) for a, b in zip(mine["average"], theirs["average"], strict=True))
    for number, slots in mine["optimizer"]["state"].items():
        for name, value in slots.items():
            assert torch.equal(value, theirs["optimizer"]["state"][number][name]), (number, name)
    left, right = load_checkpoint(one), load_checkpoint(other)
    assert left.tree == right.tree
    for name, weight in left.heads.state_dict().items():
        assert torch.equal(weight, right.heads.state_dict()[name]), name


@pytest.fixture(scope="module")
def unbroken(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    finish(start(recipe, out))
    return out


def wait_for(condition, process: multiprocessing.Process) -> None:
    while process.is_alive() and not condition():
        time.sleep(0.0005)


def test_killed_at_random_moments(recipe: Path, unbroken: Path, tmp_path: Path) -> None:
    """Kills within saves (the temporary file is there) and at random moments between; the last finishes."""
    out, chance = tmp_path / "out", random.Random(0)
    folder = out / "training"
    killed_in_save = killed_between = 0
    total = state_of(unbroken)["step"]
    for attempt in range(8):
        process = start(recipe, out, "--resume")
        before = state_of(out)["step"] if (folder / "state.pt").exists() else 0
        assert before < total
        file = folder / "state.pt"
        stamp = file.stat().st_mtime_ns if file.exists() else None
        # Wait for the first save of this attempt, so that every attempt gets on by a step or more.
        wait_for(lambda: file.exists() and file.stat().st_mtime_ns != stamp, process)  # noqa: B023
        if attempt % 2:
            wait_for(lambda: any(folder.glob(".state.pt.*.tmp")), process)
        else:
            time.sleep(chance.random() * 0.15)
        in_save = any(folder.glob(".state.pt.*.tmp"))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break  # it was done before the signal came
        assert process.exitcode == -signal.SIGKILL
        left_over = any(folder.glob(".state.pt.*.tmp"))
        killed_in_save += in_save and left_over
        killed_between += not left_over
        if state_of(out)["step"] == total:
            break
    assert killed_in_save >= 1
    assert killed_in_save + killed_between >= 3
    finish(start(recipe, out, "--resume"))
    assert_same(unbroken, out)
    assert not list(folder.glob(".state.pt.*.tmp"))  # what dead processes left is cleared away


def test_sigterm_saves_and_resume_finishes(recipe: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(recipe, out, "training.save_steps=1000")
    wait_for(lambda: (out / "training/metrics.json").exists(), process)
    process.terminate()
    process.join(timeout=120)
    output = Path(f"{out}.log").read_text()
    assert process.exitcode == 128 + signal.SIGTERM, output
    assert "--resume goes on from there" in output
    assert "Traceback" not in output
    assert 5 <= state_of(out)["step"] < state_of(unbroken)["step"]
    finish(start(recipe, out, "--resume"))
    assert_same(unbroken, out)


def test_two_processes_train_and_agree_with_one(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny.recipe_file(
        tmp_path / "recipe.yaml", training={"epochs": 1, "batch_tokens": 100, "trackers": []}
    )
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    printed = launch(recipe, tmp_path / "two", *torchrun, "--rdzv-endpoint", "localhost:0")
    assert printed.count("simulated acceptance length") == 1  # one process speaks
    finish(start(recipe, tmp_path / "one", "training.batch_tokens=200"))
    two, one = state_of(tmp_path / "two"), state_of(tmp_path / "one")
    assert two["step"] == one["step"] > 3
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=2e-5)
    assert two["best"]["positions"] == one["best"]["positions"]
    assert two["best"]["acceptance_length"] == pytest.approx(one["best"]["acceptance_length"], abs=0.02)


def test_accelerate_launches_it(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny.recipe_file(tmp_path / "recipe.yaml", training={"epochs": 1})
    words = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    launch(recipe, tmp_path / "out", *words, "--mixed_precision", "no", "--dynamo_backend", "no")
    load_checkpoint(tmp_path / "out", tiny.base)
