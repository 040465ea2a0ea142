"""Judge calls of a job: the child sends a question to the worker and waits for the answer.

Neither side loads torch for it, unlike the pipeline that asks, so that a child of a test can ask too.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import TYPE_CHECKING

from spard.config import JudgeSpec
from spard.config.run_spec import RunSpec
from spard.errors import JudgeUnavailable
from worker.protocol import Message, Report

if TYPE_CHECKING:
    from spard.evaluation.judges.llm import Chat  # torch would come with it


@dataclass(frozen=True, slots=True)
class ProxiedJudge:
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

    def open(self, judge: JudgeSpec) -> ProxiedJudge:
        """Return a chat with one of the job's own judges; raise ValueError for any other judge."""
        return ProxiedJudge(self, self._judges.index(judge))

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


# The worker's side of judge calls: only the worker has the judge's address, its key and a network.
#
# The list of judges is read from the job's folder before its child runs, so nothing that the child writes there can
# change it. A child may ask anything, but only these judges.

_WAITING = 256  # questions; a child that asks faster waits in its pipe
_LOOK_S = 0.2
_NO_KEY = "none"  # without one, the client would read the variable of a key that is for other addresses

Tell = Callable[[Message], None]  # writes a line to the child
KeyOf = Callable[[JudgeSpec], str | None]


def llm_judges(judge: JudgeSpec) -> list[JudgeSpec]:
    """Return the judge and its members that are language models behind an endpoint.

    Child and worker number judges by their position in this list.
    """
    return [each for each in judge.with_members() if each.name == "llm"]


def judge_endpoints(run: RunSpec) -> list[JudgeSpec]:
    """Return every endpoint that a job may ask: its judges and then, if it has one, its auditing agent."""
    return [*llm_judges(run.judge), *([run.agent.endpoint] if run.agent else [])]


class JudgeProxy:
    """Answers the questions of one child, several at a time, until it is closed.

    judges  the endpoints that may be asked, by index
    key_of  returns the API key of a judge, or None
    tell    writes a line to the child
    """

    def __init__(self, judges: Sequence[JudgeSpec], key_of: KeyOf, tell: Tell) -> None:
        self._judges, self._key_of, self._tell = list(judges), key_of, tell
        self._chats: dict[int, Chat] = {}
        self._opening = Lock()
        self._is_closed = Event()
        self._slots = BoundedSemaphore(_WAITING)
        self._pool = ThreadPoolExecutor(max((each.concurrency for each in judges), default=1))

    def take(self, question: Message) -> None:
        """Answer a question in the background; block only while too many questions wait."""
        while not self._slots.acquire(timeout=_LOOK_S):
            if self._is_closed.is_set():
                return
        if not self._is_closed.is_set():
            self._pool.submit(self._answer, question)

    def close(self) -> None:
        """Take no more questions; drop the queued ones and do not wait for the running ones."""
        self._is_closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, question: Message) -> None:
        try:
            self._tell({"id": question.get("id"), **self._answer_text(question)})
        finally:
            self._slots.release()

    def _answer_text(self, question: Message) -> Message:
        match question:
            case {"judge": int(number), "system": str(system), "user": str(user)} if 0 <= number < len(self._judges):
                pass
            case _:
                return {"error": "There is no such judge.", "is_passing": False, "retry_after_s": None}
        try:
            return {"text": self._chat(number).complete(system, user)}
        except JudgeUnavailable as error:
            return {"error": error.message, "is_passing": error.is_passing, "retry_after_s": error.retry_after_s}

    def _chat(self, number: int) -> Chat:
        """Return the judge's client, opened once: opening it reads the trusted certificates and opens connections."""
        with self._opening:
            if number not in self._chats:
                judge = self._judges[number]
                # openai takes a second to import, and most workers never need it.
                endpoint = importlib.import_module("spard.evaluation.judges.endpoint")
                self._chats[number] = endpoint.open_chat(judge, self._key_of(judge) or _NO_KEY)
            return self._chats[number]


def as_line(message: Message) -> bytes:
    """Return a message as the bytes of one line."""
    return json.dumps(message).encode() + b"\n"
