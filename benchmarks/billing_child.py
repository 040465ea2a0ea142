"""The child process of `benchmarks.billing_outages`: a job that sleeps instead of training, and asks its judge.

It runs in the worker's sandbox, where the laboratory cannot be read, so this module imports nothing that needs it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from app.ops.processes import die_with_parent
from spard.config.patience import Patience
from spard.evaluation.judges import open_judge, use_chat
from spard.evaluation.judges.wrappers import PatientJudge
from tests.worker import scripted_child
from worker.judge_calls import Asking, llm_judges
from worker.protocol import Report
from worker.workdir import Folder, read_assignment

STEPS, STEP_S = 60, 0.1  # of a job: what it computes is a sleep
COMPUTED = "computed"


def compute(parent: int) -> None:
    """Run a fake job that sleeps instead of training and asks its judge for verdicts; report how long it waited.

    The child process that `measure` starts calls this; `parent` is the worker's process id.
    """
    die_with_parent(parent)
    report = Report(sys.stdout.fileno())
    folder = Folder(Path(sys.stdin.readline().strip()))
    away = [0.0]
    report.stage("train")
    for step in range(1, STEPS + 1):
        time.sleep(STEP_S)
        report.metrics(step, STEPS, {"loss/task": 1 / step, "accuracy/task": 0.5})
        if step % 10 == 0:
            scripted_child.save(folder, report, step)
    report.stage("audit")
    _ask(folder, report, away)
    report.event(COMPUTED, {"ended_at": time.time(), "away_s": away[0]})
    scripted_child.finish(folder, report, "good")


def _ask(folder: Folder, report: Report, away: list[float]) -> None:
    assignment, since = read_assignment(folder), [0.0]
    asking = Asking(report, sys.stdin.fileno(), llm_judges(assignment.run.judge))

    def wait(seconds: float) -> None:
        report.waiting("judge")
        time.sleep(seconds)

    def note(lost_s: float | None) -> None:
        now = time.monotonic()
        since[0] = since[0] or now - (lost_s or 0.0)
        if lost_s is None:
            away[0], since[0] = away[0] + now - since[0], 0.0
        report.outage("judge", lost_s)

    with use_chat(asking.open):
        judge = PatientJudge(open_judge(assignment.run.judge), Patience(600.0, 0.2, 1.0), wait, note)
        for _ in range(20):
            time.sleep(STEP_S)
            judge.judge(["Hurt."], ["This is a reply."])
