from __future__ import annotations

import signal
import threading

import pytest

from medusa.data.interrupts import soft_sigterm, undisturbed


def test_sigterm_is_an_exception_once_and_then_what_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    saved = False
    with pytest.raises(SystemExit) as ended, soft_sigterm():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            saved = True
    assert ended.value.code == 143
    assert saved
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_what_is_being_saved_is_saved_first(number: signal.Signals, raised: type[BaseException]) -> None:
    saved = False
    with pytest.raises(raised), soft_sigterm():
        with undisturbed():
            signal.raise_signal(number)
            signal.raise_signal(number)
            saved = True
        raise AssertionError("the signal was lost")
    assert saved


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with soft_sigterm(), undisturbed():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
