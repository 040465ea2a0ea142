"""A judge that is throttled after the training: nothing that was trained is trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spard.config import JudgeSpec
from spard.errors import JudgeUnavailable, Stopped
from spard.evaluation import ask
from spard.models.base import load_base
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from tests.judge_server import judge_server
from tests.worker.heard import Heard, Work, read_report
from tests.worker.parts import PLAIN, job_folder
from worker.workdir import read_assignment


@pytest.fixture
def fluent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random model writes counts as text, so that the judge is asked about it."""
    monkeypatch.setattr(ask, "is_degenerate", lambda reply: False)


def test_a_finished_training_outlives_a_judge_that_is_throttled(
    model: Path, tmp_path: Path, message_pipe: Heard, work: Work, fluent: None
) -> None:
    with judge_server() as server:
        judge = JudgeSpec("llm", server.url, "grader", retries=0, canaries=0)
        folder = job_folder(tmp_path / "job", model, recipe=PLAIN, pool=None, judge=judge)
        is_over = False

        def answer(body: dict[str, Any]) -> tuple[int, str]:
            return (429, "") if message_pipe.of_kind("metrics") and not is_over else (200, "#thescore: 1")

        server.answer = answer
        with pytest.raises(JudgeUnavailable):
            work(folder)
        steps = [message["step"] for message in message_pipe.of_kind("metrics")]
        is_over = True
        work(folder)
    assert steps == list(range(1, steps[-1] + 1))
    assert [message["step"] for message in message_pipe.of_kind("metrics")] == steps
    assert message_pipe.of_kind("resume_state")[-1]["step"] == steps[-1]
    assert read_report(folder)["gate"]["decision"] == "waived"


def test_a_run_that_waits_says_so_and_hears_a_stop(model: Path, tmp_path: Path) -> None:
    messages: list[Message] = []
    run = read_assignment(job_folder(tmp_path / "job", model)).run
    is_stopped = False
    context = Context(run, load_base(run.model), Reporter(messages.append), should_stop=lambda: is_stopped)
    context.wait("judge", 0.0)
    is_stopped = True
    with pytest.raises(Stopped):
        context.wait("judge", 3600.0)
    assert messages == [{"kind": "waiting", "thing": "judge"}] * 2
