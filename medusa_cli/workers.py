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
from medusa.files import clear_os_errors, read_json, write_json
from medusa_cli.processes import Child, run_together

_RECORD = "parts.json"


def parts_of(out: Path) -> Path:
    """The folder in which the processes' answers and states lie until they are joined."""
    return out.with_name(out.name + ".parts")


def already_made(base: str, out: Path, states: Path | None) -> bool:
    """Whether an earlier call has finished `out` and `states`; for before any work is done.

    Args:
        base: its name, for the command that an error proposes.
        out, states: what is asked for.

    Raises:
        MedusaError: something else is where `out` or `states` shall be; `out` is finished but has no `states`.
    """
    if out.exists() and not out.is_file():
        raise MedusaError(f"{out} is not a regular file; name another one")
    if parts_of(out).exists():
        if not joining(out, states):
            _check_free(out, states)
        return False
    if not out.exists():
        _check_free(out, states)
        return False
    if states is not None and not _belong_together(out, states):
        raise MedusaError(
            f"{out} is there already, but {states} does not hold its hidden states; make them with `medusa data "
            f"states {out} --base {base} --out <a new folder>`, or name another file than {out} to begin anew"
        )
    return True


def _check_free(out: Path, states: Path | None) -> None:
    if out.exists():
        raise MedusaError(f"{out} is there, and so is {parts_of(out)}; move one of them away")
    if states is None or not states.exists():
        return
    if not states.is_dir():
        raise MedusaError(f"{states} is a file; give a folder for the hidden states")
    if any(states.iterdir()):
        raise MedusaError(f"{states} is not empty; give another folder for the hidden states, or remove it")


def joining(out: Path, states: Path | None) -> bool:
    """Whether a run was stopped while it joined its parts into these.

    Then all parts are done, and whatever is at `out` and `states` is that run's own.
    """
    record = parts_of(out) / _RECORD
    return record.exists() and read_json(record).get("joining") == _target(states)


def _target(states: Path | None) -> dict[str, str | None]:
    return {"states": None if states is None else str(states.absolute())}


def _belong_together(out: Path, states: Path) -> bool:
    """Whether a finished cache is that of a finished file; one without answers has none."""
    from medusa.data.conversations import data_fingerprint, load_conversations
    from medusa.data.shards import MANIFEST, read_manifest

    if out.is_file() and not out.stat().st_size:
        return True
    if not (states / MANIFEST).is_file():
        return False
    rows = load_conversations(out, max_bad=1)
    return read_manifest(states)["fingerprint"].get("data") == data_fingerprint(rows)


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
    with clear_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    record = folder / _RECORD
    known = read_json(record) if record.exists() else {"workers": count}
    before = known["workers"]
    if before != count:
        raise MedusaError(
            f"{folder} holds the work of {before} processes and --workers asks for {count}; "
            f"go on with --workers {before}, or remove the folder"
        )
    write_json(record, known)
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
    """Makes `out` and `states` from what `run_parts` left, and removes that.

    Raises:
        MedusaError: something else is where they shall be; the disk is full. What `run_parts` left stays.
    """
    from medusa.data.interrupts import soft_sigterm
    from medusa.data.merge import merge
    from medusa.data.shards import MANIFEST

    folder = parts_of(out)
    # States come last: once they are there, only the parts were left to remove.
    done = states is not None and joining(out, states) and (states / MANIFEST).exists()
    if not done:
        if joining(out, states):
            out.unlink(missing_ok=True)
        write_json(folder / _RECORD, {**read_json(folder / _RECORD), "joining": _target(states)})
        answers = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
        folders = None if states is None else [path.with_suffix("") for path in answers]
        with soft_sigterm():  # so that it leaves no temporary folder behind
            merge(base, answers, folders, out, states)
    # Renamed first: half of the parts must never look like all of them.
    removed = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    os.rename(folder, removed)
    shutil.rmtree(removed)
