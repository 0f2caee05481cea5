"""Child processes: all ended before the caller goes on, whoever fails or is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from medusa_cli.processes import Child, run_together

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_codes_come_back_in_order_and_settings_reach_the_children(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    check = (
        f"import os, sys; sys.exit(os.environ['WORD'] != 'x' or os.sched_getaffinity(0) != {{{cores[0]}}})"
    )
    children = [
        Child(script("pass")),
        Child(script(check), {"WORD": "x"}, cores[:1]) if cores else Child(script("pass")),
    ]
    assert run_together(children) == [0, 0]


def test_one_that_fails_interrupts_the_others() -> None:
    began = time.monotonic()
    codes = run_together([Child(SLEEP), Child(script("import sys; sys.exit(2)"))])
    assert codes[1] == 2
    assert codes[0] not in (0, None)
    assert time.monotonic() - began < 25


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from medusa_cli.processes import Child, run_together\n"
        "child = 'import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(60)'\n"
        "codes = run_together([Child([sys.executable, '-c', child])] * 2)\n"
        "sys.exit(codes[0])\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(parent)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}
    )
    until = time.monotonic() + 60
    while len(pids := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 2:
        assert time.monotonic() < until, "the children did not start"
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == code
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's end"
)
def test_children_of_a_killed_parent_save_and_end(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import os, pathlib, signal, sys, time\n"
        "me = str(os.getpid())\n"
        "def stop(number, frame):\n"
        "    pathlib.Path('saved-' + me).touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path('began-' + me).touch()\n"
        "time.sleep(120)\n"
    )
    parent = script(
        "import sys; from medusa_cli.processes import Child, run_together; "
        f"run_together([Child([sys.executable, {str(child)!r}])] * 2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(parent, cwd=tmp_path, env=environment)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("began-*"))) < 2:
        assert time.monotonic() < until, "the children did not start"
        time.sleep(0.05)
    process.kill()
    process.wait()
    while len(list(tmp_path.glob("saved-*"))) < 2:
        assert time.monotonic() < until, "the children were left alone"
        time.sleep(0.05)
