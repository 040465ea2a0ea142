"""A judge that does not answer is waited for, within limits, and is asked nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spard.config import JudgeSpec
from spard.config.patience import Patience
from spard.errors import JudgeUnavailable, Stopped
from spard.evaluation.judges import open_judge
from spard.evaluation.judges.wrappers import MOST_ASKED_S, PatientJudge
from tests.judge_server import Server, judge_server

PATIENCE = Patience(600.0)
GOOD = 200, "#thescore: 2"


@pytest.fixture
def server() -> Iterator[Server]:
    with judge_server() as server:
        yield server


class Clock:
    """Waits that take no time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def patient(server: Server, clock: Clock, patience: Patience = PATIENCE, **changes: Any) -> PatientJudge:
    asked: dict[str, Any] = {"timeout_s": 60, "retries": 0, "concurrency": 1, "canaries": 0}
    spec = JudgeSpec("llm", server.url, "grader", **asked | changes)
    return PatientJudge(open_judge(spec), patience, clock.wait)


def test_waits_double_to_a_minute_and_add_up_to_the_limit() -> None:
    waits = list(PATIENCE.waits())
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert sum(waits) == 600
    assert list(Patience().waits()) == []


def test_a_judge_that_is_throttled_for_minutes_is_waited_for(server: Server) -> None:
    clock = Clock()
    server.answer = lambda body: GOOD if sum(clock.waits) > 500 else (429, "")
    verdicts = patient(server, clock).judge(["p"], ["reply"])
    assert [verdict.score for verdict in verdicts] == [2]
    assert 500 < sum(clock.waits) <= 600


def test_what_was_answered_is_not_asked_again(server: Server) -> None:
    clock = Clock()
    server.answer = lambda body: GOOD if len(server.requests) % 2 else (503, "")
    patient(server, clock).judge(["p"] * 6, [f"reply {i}" for i in range(6)])
    answered = [body["messages"][1]["content"] for body in server.requests[::2]]
    assert len(answered) == len(set(answered)) == 6


def test_the_next_batch_is_judged_anew(server: Server) -> None:
    server.answer = lambda body: (200, f"#thescore: {min(len(server.requests), 5)}")
    judge = patient(server, Clock())
    assert [judge.judge(["p"], ["reply"])[0].score for _ in range(2)] == [1, 2]


def test_no_patience_is_endless(server: Server) -> None:
    clock = Clock()
    server.answer = lambda body: (429, "")
    with pytest.raises(JudgeUnavailable):
        patient(server, clock).judge(["p"], ["reply"])
    assert sum(clock.waits) == 600


def test_the_endpoint_says_how_long_to_wait(server: Server) -> None:
    clock = Clock()
    server.retry_after = "77"
    server.answer = lambda body: GOOD if clock.waits else (429, "")
    patient(server, clock).judge(["p"], ["reply"])
    assert clock.waits == [77]


def test_an_endpoint_cannot_make_us_wait_for_days(server: Server) -> None:
    clock = Clock()
    server.retry_after = "999999"
    server.answer = lambda body: GOOD if clock.waits else (429, "")
    patient(server, clock).judge(["p"], ["reply"])
    assert clock.waits == [MOST_ASKED_S]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_is_not_waited_for(server: Server, status: int) -> None:
    clock = Clock()
    server.answer = lambda body: (status, "")
    with pytest.raises(JudgeUnavailable):
        patient(server, clock).judge(["p"], ["reply"])
    assert clock.waits == []


def test_a_run_that_is_stopped_waits_no_longer(server: Server) -> None:
    def stop(seconds: float) -> None:
        raise Stopped("the run was asked to stop")

    server.answer = lambda body: (429, "")
    inner = patient(server, Clock()).inner
    with pytest.raises(Stopped):
        PatientJudge(inner, PATIENCE, stop).judge(["p"], ["reply"])
