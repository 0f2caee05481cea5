"""The pipeline runner, with commands of Python's own library: real processes that start in milliseconds."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from medusa.errors import CheckFailed, MedusaError
from medusa.files import read_json
from medusa_cli.stages import Runner, Stage, clock, fingerprints


def tidy(
    name: str, folder: Path, *, source: str = "in.json", after: tuple[str, ...] = (), settings=None
) -> Stage:
    """Pretty-prints one JSON file into another: a stage that reads, writes, and fails on bad input."""
    out = folder / f"{name}.out"
    return Stage(name, name, ("json.tool", str(folder / source), str(out)), (out,), settings, after=after)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.json").write_text('{"a": 1}')
    return tmp_path


def run(folder: Path, *stages: Stage) -> str:
    console = Console(file=io.StringIO(), width=200)
    Runner(folder / "stages", console).run(stages)
    return console.file.getvalue()


def test_a_finished_stage_is_not_run_again(folder):
    first = run(folder, tidy("a", folder))
    assert "medusa" not in first
    assert "python -m json.tool" in first
    os.utime(folder / "a.out", (0, 0))
    assert "done before" in run(folder, tidy("a", folder))
    assert (folder / "a.out").stat().st_mtime == 0


def test_a_missing_output_is_made_again(folder):
    run(folder, tidy("a", folder))
    (folder / "a.out").unlink()
    assert "done before" not in run(folder, tidy("a", folder))
    assert (folder / "a.out").exists()


def test_a_changed_setting_reaches_everything_after_it_and_nothing_else(folder):
    def stages(setting):
        return (
            tidy("a", folder, settings=setting),
            tidy("b", folder, source="a.out", after=("a",)),
            tidy("c", folder),
        )

    run(folder, *stages(1))
    for name in "abc":
        os.utime(folder / f"{name}.out", (0, 0))
    run(folder, *stages(2))
    made_again = {name for name in "abc" if (folder / f"{name}.out").stat().st_mtime}
    assert made_again == {"a", "b"}
    before, after = fingerprints(stages(1)), fingerprints(stages(2))
    assert {name for name in before if before[name] != after[name]} == {"a", "b"}


def test_old_output_of_other_settings_is_removed_before_the_run(folder):
    run(folder, tidy("a", folder, settings=1))
    (folder / "in.json").write_text("not JSON")
    with pytest.raises(CheckFailed, match="'a'"):
        run(folder, tidy("a", folder, settings=2))
    assert "1" not in ((folder / "a.out").read_text() if (folder / "a.out").exists() else "")


def test_half_done_work_of_the_same_settings_is_kept_to_resume_from(folder):
    (folder / "in.json").write_text("not JSON")
    with pytest.raises(CheckFailed):
        run(folder, tidy("a", folder))
    partial = folder / "half"
    partial.mkdir()
    (partial / "shard").write_text("x")
    stage = Stage("p", "p", ("json.tool", str(folder / "in.json")), (partial,))
    for expected in (False, True):  # the first run has no record of it: what lies there is someone else's
        with pytest.raises(CheckFailed):
            run(folder, stage)
        assert (partial / "shard").exists() is expected
        partial.mkdir(exist_ok=True)
        (partial / "shard").write_text("x")


def test_usage_error_and_missing_output_are_bad_input(folder):
    with pytest.raises(MedusaError, match="exit code 2"):
        run(folder, Stage("u", "u", ("json.tool", "--nonsense"), ()))
    with pytest.raises(MedusaError, match=r"did not write .*never"):
        run(folder, Stage("n", "n", ("json.tool", str(folder / "in.json")), (folder / "never",)))
    assert read_json(folder / "stages" / "n.json")["done"] is False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_alone_ends_the_stage_too(folder, number, code):
    program = f"""
import sys
from pathlib import Path
from rich.console import Console
import typer
from medusa_cli.stages import Runner, Stage
folder = Path({str(folder)!r})
note = "import os, time; open({str(folder / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(120)"
command = ("timeit", "-n1", "-r1", note)
try:
    Runner(folder / "stages", Console()).run([Stage("slow", "slow", command, ())])
except typer.Exit as error:
    sys.exit(error.exit_code)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not ((folder / "pid").exists() and (folder / "pid").read_text()):
        assert time.monotonic() < deadline, parent.communicate(timeout=1)
        time.sleep(0.05)
    child = int((folder / "pid").read_text())
    parent.send_signal(number)
    parent.communicate(timeout=60)
    assert parent.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert read_json(folder / "stages" / "slow.json")["done"] is False


def test_clock():
    assert [clock(value) for value in (0.4, 59.6, 185)] == ["0s", "1m 00s", "3m 05s"]
