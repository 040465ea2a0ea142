"""The child's side of judge calls: send a question to the worker (`worker.judge_proxy`), wait for the answer.

It loads no torch, unlike the pipeline that uses it, so that a child of a test can use it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from threading import Lock, Thread

from spard.config import JudgeSpec
from spard.errors import JudgeUnavailable
from worker.protocol import Report


@dataclass(frozen=True, slots=True)
class Asked:
    """One judge as a `spard.evaluation.judges.llm.Chat` whose requests go through the worker."""

    asking: Asking
    number: int

    def complete(self, system: str, user: str) -> str:
        """Return the judge's answer; raise `JudgeUnavailable` when there is none."""
        return self.asking.ask(self.number, system, user)


class Asking:
    """The pending questions of one child, and a thread that reads the answers.

    `answers` is the file descriptor on which the worker writes them. Without judges no thread is started.
    """

    def __init__(self, report: Report, answers: int, judges: Sequence[JudgeSpec]) -> None:
        self._report, self._judges = report, list(judges)
        self._numbers, self._lock = count(1), Lock()
        self._waiting: dict[int, Future[str]] = {}
        self._is_over = False
        if judges:
            # Unbuffered: the interpreter waits at its end for a lock that a thread in a buffered read holds.
            lines = open(os.dup(answers), "rb", buffering=0)  # noqa: SIM115 - read until it ends
            Thread(target=self._read, args=(lines,), daemon=True).start()

    def open(self, judge: JudgeSpec) -> Asked:
        """Return a chat with one of the job's own judges; raise ValueError for any other judge."""
        return Asked(self, self._judges.index(judge))

    def ask(self, judge: int, system: str, user: str) -> str:
        """Send a question to the judge of this index and block until it is answered.

        Raises `JudgeUnavailable` when the judge does not answer or the worker has gone.
        """
        answer: Future[str] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._is_over:
                raise _unavailable("The worker is gone.")
            self._waiting[number] = answer
        self._report.ask(number, judge, system, user)
        return answer.result()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            told = json.loads(line)
            with self._lock:
                answer = self._waiting.pop(told["id"])
            if "text" in told:
                answer.set_result(told["text"])
            else:
                waits = {"is_passing": told["is_passing"], "retry_after_s": told["retry_after_s"]}
                answer.set_exception(JudgeUnavailable(told["error"], "judge", **waits))
        # The input has ended. Fail all pending questions, else their threads would wait forever.
        with self._lock:
            self._is_over = True
            left = list(self._waiting.values())
        for answer in left:
            answer.set_exception(_unavailable("The worker is gone."))


def _unavailable(why: str) -> JudgeUnavailable:
    return JudgeUnavailable(why, "judge")
