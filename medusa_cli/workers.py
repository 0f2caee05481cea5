"""One distillation as several processes side by side, joined at the end.

A decoding step on a CPU is many small operations: two processes of one thread each answer more than one process of
two threads, which wait for each other after every operation. Each process is `medusa data distill --part i/n` over
its share of the prompts, with its own share of the processor's cores.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from medusa.base import Base
from medusa.errors import MedusaError
from medusa.files import atomic_folder, read_json, write_json
from medusa_cli.processes import Child, run_together


def parts_of(out: Path) -> Path:
    """The folder in which the processes' answers and states lie until they are joined."""
    return out.with_name(out.name + ".parts")


def run_parts(arguments: Sequence[str], count: int, out: Path, states: bool) -> None:
    """Runs `python -m medusa_cli data distill` `count` times over disjoint shares of the prompts.

    Ctrl-C and SIGTERM reach the processes, which save what they have; a later call goes on from there.

    Args:
        arguments: of the command, without --out, --states, --workers and --part.
        count: processes.
        out: the joint file; the parts go into `parts_of(out)`.
        states: whether each keeps hidden states.

    Raises:
        MedusaError: a process failed; its own message is on the terminal.
        typer.Abort: interrupted.
    """
    folder = parts_of(out)
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "parts.json"
    before = read_json(record)["workers"] if record.exists() else count
    if before != count:
        raise MedusaError(
            f"{folder} holds the work of {before} processes and --workers asks for {count}; "
            f"go on with --workers {before}, or remove the folder"
        )
    write_json(record, {"workers": count})
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    children = []
    for number in range(count):
        words = ["--part", f"{number + 1}/{count}", "--out", str(folder / f"{number}.jsonl")]
        words += ["--states", str(folder / f"{number}")] if states else []
        threads = str(max(1, len(cores) // count))
        children.append(
            Child(
                [sys.executable, "-m", "medusa_cli", "data", "distill", *arguments, *words],
                {"OMP_NUM_THREADS": threads, "TQDM_POSITION": str(number)},
                # Else the system may move a process to the core that another one is busy on.
                set(cores[number % len(cores) :: count]),
            )
        )
    codes = run_together(children)
    failed = [number for number, code in enumerate(codes, 1) if code not in (0, 130)]
    if failed:
        raise MedusaError(f"process {failed[0]} of {count} stopped, see above; run the same command to go on")
    if 130 in codes:
        raise typer.Abort


def join_parts(base: Base, out: Path, states: Path | None) -> None:
    """Makes `out` and `states` from what `run_parts` left, and removes that."""
    from medusa.data.merge import merge

    folder = parts_of(out)
    answers = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    if states is None:
        merge(base, answers, None, out, None)
    else:
        with atomic_folder(states) as temporary:
            merge(base, answers, [path.with_suffix("") for path in answers], out, temporary)
    shutil.rmtree(folder)
