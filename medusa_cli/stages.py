"""Running a list of commands, each once: a finished stage is skipped, an interrupted one goes on.

A stage is one command of the kit in a process of its own: its memory goes back to the system when it ends,
Ctrl-C reaches it as it would from a shell, and a reader of the terminal sees which commands make the whole.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import Console

from medusa.errors import CheckFailed, MedusaError
from medusa.files import read_json, sha256_json, write_json
from medusa_cli.processes import Child, run_together


@dataclass(frozen=True)
class Stage:
    """One command of a pipeline.

    Attributes:
        name: names the stage's record.
        title: what it does, for the terminal.
        command: what follows `python -m`: ("medusa_cli", "data", "prompts", ...).
        outputs: files and folders that exist when it is done; removed before a run with other settings.
        scratch: files and folders that it keeps while it is not done; removed before a run with other settings.
        settings: what the command reads besides its words, such as a recipe's content.
        after: names of the stages whose outputs it reads.
    """

    name: str
    title: str
    command: tuple[str, ...]
    outputs: tuple[Path, ...]
    settings: object = None
    scratch: tuple[Path, ...] = ()
    after: tuple[str, ...] = field(default=())

    def shown(self) -> str:
        """The command as one would type it."""
        module, *arguments = self.command
        program = "medusa" if module == "medusa_cli" else f"python -m {module}"
        return f"{program} {shlex.join(arguments)}"


def fingerprints(stages: Sequence[Stage]) -> dict[str, str]:
    """SHA-256 of each stage's command, settings and predecessors.

    A change thereby reaches everything made from it and nothing else.
    """
    found: dict[str, str] = {}
    for stage in stages:
        before = [found[name] for name in stage.after]
        outputs = [str(path) for path in stage.outputs]
        found[stage.name] = sha256_json([stage.command, stage.settings, outputs, before])
    return found


class Runner:
    """Runs stages in order and remembers in `folder` which are done.

    Args:
        folder: where the records are kept, one small JSON file for each stage.
        console: where titles and times go.
    """

    def __init__(self, folder: Path, console: Console):
        self.folder, self.console = folder, console

    def run(self, stages: Sequence[Stage]) -> float:
        """Runs what is not done yet.

        Returns:
            The seconds that all stages took, earlier calls included.

        Raises:
            CheckFailed: a stage ended with exit code 1.
            MedusaError: a stage could not do its work.
            typer.Exit: a stage was interrupted.
        """
        prints = fingerprints(stages)
        total = 0.0
        for number, stage in enumerate(stages, 1):
            heading = f"[{number}/{len(stages)}] {stage.title}"
            seconds = self._seconds_if_done(stage, prints[stage.name])
            if seconds is not None:
                self.console.print(f"{heading}: done before, in {clock(seconds)}", style="dim", markup=False)
            else:
                self.console.print(heading, style="bold", markup=False)
                self.console.print("  $ " + stage.shown(), style="dim", markup=False, soft_wrap=True)
                seconds = self._run(stage, prints[stage.name])
                self.console.print(f"  done in {clock(seconds)}", style="green", markup=False)
            total += seconds
        return total

    def _record(self, stage: Stage) -> Path:
        return self.folder / f"{stage.name}.json"

    def _seconds_if_done(self, stage: Stage, fingerprint: str) -> float | None:
        if not self._record(stage).exists():
            return None
        record = read_json(self._record(stage))
        same = record["fingerprint"] == fingerprint and record["done"]
        return record["seconds"] if same and all(path.exists() for path in stage.outputs) else None

    def _run(self, stage: Stage, fingerprint: str) -> float:
        record = self._record(stage)
        earlier = 0.0
        if record.exists() and read_json(record)["fingerprint"] == fingerprint:
            earlier = read_json(record)["seconds"]  # interrupted: its half-done work is what it resumes from
        else:
            for path in (*stage.outputs, *stage.scratch):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        start = time.monotonic()

        def note(done: bool) -> float:
            seconds = round(earlier + time.monotonic() - start, 1)
            command = shlex.join(stage.command)
            write_json(
                record, {"fingerprint": fingerprint, "done": done, "seconds": seconds, "command": command}
            )
            return seconds

        note(done=False)
        try:
            (code,) = run_together([Child([sys.executable, "-m", *stage.command])])
        finally:
            note(done=False)
        if code == 130:
            raise typer.Exit(130)
        if code == 1:
            raise CheckFailed(f"stage {stage.name!r}: see above")
        if code:
            again = "mend it and run the same command again: finished stages are kept"
            raise MedusaError(f"stage {stage.name!r} ended with exit code {code}; {again}")
        missing = [str(path) for path in stage.outputs if not path.exists()]
        if missing:
            raise MedusaError(f"stage {stage.name!r} ended well but did not write {', '.join(missing)}")
        return note(done=True)


def clock(seconds: float) -> str:
    """`8s`, `3m 05s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
