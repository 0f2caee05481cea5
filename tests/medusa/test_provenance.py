from __future__ import annotations

import subprocess
from pathlib import Path

from medusa import provenance


def test_machine_paths_are_shortened(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    short = provenance.without_machine_paths
    assert short(f"{tmp_path}/runs/a") == "runs/a"
    assert short("/home/someone/data/x.jsonl") == "~/data/x.jsonl"
    assert short("/mnt/disk/x.jsonl") == "x.jsonl"
    assert short("data.train=/mnt/disk/x") == "data.train=x"
    assert short("--resume") == "--resume"
    assert short("training.epochs=3") == "training.epochs=3"


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    assert provenance.git_commit(tmp_path) is None

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    assert provenance.git_commit(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("b")
    assert provenance.git_commit(tmp_path)["dirty"] is True


def test_versions_name_what_results_depend_on() -> None:
    found = provenance.versions()
    assert found["torch"]
    assert found["python"].count(".") == 2
