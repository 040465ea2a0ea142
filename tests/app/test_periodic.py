"""What is done again and again goes on after a failure, and ends when it is told to."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from app.ops.lifecycle import repeat


def test_a_failure_is_logged_and_the_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stop, calls = Event(), 0

    def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("away")
        stop.set()

    with caplog.at_level(logging.ERROR):
        repeat(fail_once, stop, 0.0, "trying again")
    assert calls == 2
    assert [record.message for record in caplog.records] == ["trying again"]


def test_nothing_is_done_once_it_was_told_to_stop() -> None:
    stop = Event()
    stop.set()
    repeat(lambda: pytest.fail("called"), stop, 0.0, "trying again")
