from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from spard.__main__ import _follow
from spard.commands.signs import Signs
from spard.pipeline.messages import Activity

AT_ONCE_S, NEVER_S, PATIENCE_S = 0.01, 3600.0, 60.0


class Lines:
    """Keeps what is printed, and tells when a line with some words was."""

    def __init__(self, wanted: str = "") -> None:
        self.lines: list[str] = []
        self._wanted, self.seen = wanted, Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self._wanted and self._wanted in line:
            self.seen.set()


def test_a_long_silence_is_broken_with_what_goes_on_and_how_far_it_is() -> None:
    lines = Lines("audit: 20 of 500 done (")
    with Signs(AT_ONCE_S, lines) as signs:
        signs.begin("audit")
        signs.detail("20 of 500 done")
        assert lines.seen.wait(PATIENCE_S)

    assert lines.lines[0] == "audit"
    assert lines.lines[-1].endswith(" s so far)")


def test_what_was_printed_lately_needs_no_sign_and_none_comes_after_the_end() -> None:
    lines = Lines()
    with Signs(NEVER_S, lines) as signs:
        signs.begin("train")
        signs.note("half of it is done")

    assert lines.lines == ["train", "half of it is done"]


def test_signs_are_written_to_standard_error_where_that_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Signs(NEVER_S) as signs:
        signs.begin("train")

    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "train\n")


@pytest.mark.parametrize("is_quiet", [False, True])
def test_stages_and_news_of_a_run_are_printed_and_with_json_they_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], is_quiet: bool
) -> None:
    messages: list[dict[str, Any]] = [
        {"kind": "phase", "phase": "train"},
        {"kind": "metrics", "step": 20, "total_steps": 60, "data": {"loss/task": 0.5}},
        {"kind": "event", "level": "info", "type": "message", "message": "The base model is asked.", "data": {}},
        {"kind": "progress", "done": 1, "total": 2},
    ]
    with Signs(NEVER_S) as signs:
        for message in messages:
            _follow(signs, Activity(), message, is_quiet=is_quiet)

    said = capsys.readouterr()
    expected = "" if is_quiet else "train\n  step 20/60: training loss 0.500\n"
    assert said.out == expected
    assert said.err == ("train\n" if is_quiet else "") + "  The base model is asked.\n"


def test_a_sign_tells_what_is_asked_and_not_how_many_steps_are_done() -> None:
    lines, activity = Lines("train: asking 100 attacks at the end of epoch 6 of 10, 40 left"), Activity()
    doing = {"doing": "asking 100 attacks at the end of epoch 6 of 10", "done": 60, "total": 100, "at_most": False}
    with Signs(AT_ONCE_S, lines) as signs:
        for message in ({"kind": "phase", "phase": "train"}, {"kind": "activity"} | doing):
            _follow(signs, activity, message, is_quiet=True)
        _follow(signs, activity, {"kind": "progress", "done": 36, "total": 60}, is_quiet=True)
        assert lines.seen.wait(PATIENCE_S)


def test_the_time_left_is_by_the_rate_since_the_same_was_begun() -> None:
    now = [100.0]
    activity = Activity(lambda: now[0])
    doing = "asking 100 attacks at the end of epoch 6 of 10"
    assert activity.describe(doing, 0, 100) == f"{doing}, 100 left"
    now[0] += 30
    assert activity.describe(doing, 60, 100) == f"{doing}, 40 left, about 20 s"
    assert activity.describe(doing, 10, 100, at_most=True) == f"{doing}, at most 90 left"  # it was begun anew
    now[0] += 30
    assert activity.describe(doing, 20, 100, at_most=True) == f"{doing}, at most 80 left, at most 2 min"
    assert activity.describe(doing, 100, 100) == doing
    assert activity.describe("proving", 0, 0) == "proving"
