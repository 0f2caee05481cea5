"""Child processes on this terminal: all end before the caller goes on, whatever stops it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

GRACE_SECONDS = 30  # what an interrupted process gets to save its work


@dataclass(frozen=True)
class Child:
    """A process to start.

    Attributes:
        command: program and arguments.
        environment: on top of this process's own.
        cores: the processor's cores it may run on; None: all. Where the system cannot say so it is ignored.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] | None = None


def run_together(wanted: Sequence[Child]) -> list[int]:
    """Runs processes at the same time until all have ended, or one has failed: then the others are interrupted.

    An interruption of this process (Ctrl-C, SIGINT) is passed on, and they get `GRACE_SECONDS` to save their work.
    SIGTERM is passed on as well, and then ends this process. Where the system can (Linux), a SIGKILL of this process
    is a SIGTERM for them.

    Returns:
        Each one's exit code; 130 for all after an interruption.
    """
    children: list[subprocess.Popen] = []

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut short what they get to save
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        for child in wanted:
            children.append(_start(child))
            if child.cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(children[-1].pid, child.cores)
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                _interrupt(children)
                break
            time.sleep(0.05)
        return [child.returncode for child in children]
    except KeyboardInterrupt:
        # A terminal's Ctrl-C has reached them as well; one sent to this process alone has not.
        _wait(children, 2)
        _interrupt(children)
        return [130] * len(wanted)
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        _reap(children)
        signal.signal(signal.SIGTERM, previous)


def _start(child: Child) -> subprocess.Popen:
    environment = {**os.environ, **child.environment}
    return subprocess.Popen(child.command, env=environment, preexec_fn=_end_with_parent())


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process runs before its program, so that the system ends it with this one."""
    if not sys.platform.startswith("linux"):
        return None
    # Loaded here: between fork and exec as little as possible may happen.
    libc, parent, pr_set_pdeathsig = ctypes.CDLL(None), os.getpid(), 1

    def bind() -> None:
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it is gone already
            os._exit(128 + signal.SIGTERM)

    return bind


def _interrupt(children: Sequence[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    _reap(children)


def _wait(children: Sequence[subprocess.Popen], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        time.sleep(0.05)


def _reap(children: Sequence[subprocess.Popen]) -> None:
    try:
        _wait(children, GRACE_SECONDS)
    except KeyboardInterrupt:
        pass  # twice: at once, then
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()
