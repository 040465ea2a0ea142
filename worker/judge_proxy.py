"""The worker's side of judge calls: only the worker has the judge's address, its key and a network.

The list of judges is read from the job's folder before its child runs, so nothing that the child writes there can
change it. A child may ask anything, but only these judges.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore, Event, Lock
from typing import TYPE_CHECKING

from spard.config import JudgeSpec
from spard.config.run_spec import RunSpec
from spard.errors import JudgeUnavailable
from worker.protocol import Message

if TYPE_CHECKING:
    from spard.evaluation.judges.llm import Chat  # torch would come with it

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


class Desk:
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
