"""Signals that ask for the end, so that what was made by then is saved first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def soft_sigterm() -> Iterator[None]:
    """Within it SIGTERM raises SystemExit(143), as Ctrl-C raises KeyboardInterrupt; a second one does nothing.

    Only a program's main thread can set this up; in another one SIGTERM stays what it was.
    """

    def stop(number: int, frame: object) -> None:
        # What starts others ends them as well: the same signal often comes twice.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with _handlers({signal.SIGTERM: stop}):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM wait until it has ended: for the short time in which work is saved."""
    came: list[int] = []
    with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: came.append(number))):
        yield
    for number in dict.fromkeys(came):
        signal.raise_signal(number)


@contextlib.contextmanager
def _handlers(wanted: dict[signal.Signals, Callable[[int, object], None]]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by something else than Python, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
