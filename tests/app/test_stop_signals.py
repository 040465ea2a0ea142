"""SIGINT and SIGTERM end a process's work, whichever thread the system gives the signal to."""

from __future__ import annotations

import signal
from threading import Event, get_ident, main_thread
from time import sleep

import pytest

from app.ops.lifecycle import until_told

WAITS_IN_S = 0.5  # by then the main thread waits; on a busy machine it may not, and the test proves less
END_S = 60.0  # a signal that is lost is never heard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "another thread"])
def test_a_signal_ends_the_work_whichever_thread_gets_it(number: signal.Signals, is_main: bool) -> None:
    stop = Event()

    def work() -> bool:
        sleep(WAITS_IN_S)
        signal.pthread_kill(main_thread().ident or 0 if is_main else get_ident(), number)
        return stop.wait(END_S)

    before = signal.getsignal(number)
    assert until_told(work, stop.set)
    assert signal.getsignal(number) is before


def test_work_that_ends_by_itself_gives_its_result() -> None:
    assert until_told(lambda: 3, lambda: None) == 3


def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        until_told(lambda: 1 / 0, lambda: None)
