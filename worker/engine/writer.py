"""The replies of all requests that were begun: who has rows, prompts read part by part, a token at each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from app.inference.protocol import Said
from spard.errors import SpardError
from worker.engine.batch import Batch, PromptUnread
from worker.engine.fair_queue import FairQueue
from worker.engine.replies import Reply
from worker.engine.turns import Seat, SeatedReading, Turns

log = logging.getLogger(__name__)

UNREAD = "The model cannot read this prompt; others are not touched."
_BROKEN = "The model gives no numbers that a next token could be chosen from; its reply has ended."

Tell = Callable[[Said], None]


class Writer:
    """Writes the replies to requests; `begin` makes the seats of a project's next request, or none where it fails.

    `forget` is called with the number of each request that has ended.
    """

    def __init__(
        self,
        model: Any,
        tell: Tell,
        rows: int,
        waiting: FairQueue,
        begin: Callable[[str], list[Seat]],
        forget: Callable[[int], None],
    ) -> None:
        self.batch = Batch(model)
        self.turns = Turns(rows, is_whole=not self.batch.is_cut)
        self._tell, self._waiting, self._begin, self._forget = tell, waiting, begin, forget
        self._done: dict[int, int] = {}  # tokens of ended replies, by request

    @property
    def is_busy(self) -> bool:
        """Whether a request was begun and has not ended."""
        return bool(self.turns.seats)

    @property
    def is_ready(self) -> bool:
        """Whether the next token of every row can be chosen."""
        return all(seat.is_ready for seat in self.turns.seated)

    @property
    def is_shared(self) -> bool:
        """Whether several projects have rows."""
        return len({seat.project for seat in self.turns.seated}) > 1

    @property
    def numbers(self) -> set[int]:
        """The requests whose replies are in the batch, or are being read into it."""
        reading = {reply.id for each in self.turns.readings for seat in each.seats for reply in seat.replies}
        return {reply.id for reply in self.turns.replies} | reading

    def step(self) -> bool:
        """Give rows to whose turn it is, read a part of a prompt, write a token into every row; False if none can."""
        self._give_rows()
        has_read = self._read()
        ready = [seat for seat in self.turns.seated if seat.is_ready]
        if ready and self.batch.is_cut:
            self.pause([seat for seat in self.turns.seated if seat not in ready])
        can_write = bool(ready) and len(ready) == len(self.turns.seated)
        if can_write:
            self._write()
        return has_read or can_write

    def fail(self, numbers: Collection[int], code: str, message: str) -> None:
        """End requests as failed, with all of their replies."""
        for number in sorted(numbers):
            self._tell({"kind": "failed", "id": number, "code": code, "message": message})
        self.drop(numbers)

    def drop(self, numbers: Collection[int]) -> None:
        """End requests without a word."""
        self._keep([reply.id not in numbers for reply in self.turns.replies])
        self.turns.drop(numbers)
        for number in numbers:
            self._done.pop(number, None)
            self._forget(number)

    def pause(self, seats: Collection[Seat]) -> None:
        """Take the rows of seats out of the batch; they wait for their turn."""
        for seat in seats:
            seat.paused = self.batch.pause(self.turns.places([seat]))
            self.turns.seated.remove(seat)
            self.turns.wait(seat)

    def _give_rows(self) -> None:
        """Let one project have more rows: the first one, in the order of turns, that may."""
        turns = self.turns
        pending = [each for each in self._projects() if turns.next_seat(each) or self._waiting.peek(each)]
        self.pause(turns.begin_step(pending))
        for project in pending:
            next_request = self._waiting.peek(project)
            if turns.next_seat(project):
                wanted = sum(seat.rows for seat in turns.lines[project])
            elif next_request and project not in turns.lines:
                wanted = next_request.ask["n"]
            else:  # what was begun waits for its next token's mask
                continue
            room, paused = turns.plan_rows(project, wanted)
            if room <= 0:
                continue
            turns.end_turn(project)
            if turns.next_seat(project) is None:
                for seat in self._begin(project):
                    turns.wait(seat)
                if turns.next_seat(project) is None:
                    return
            self.pause(paused)
            if seats := turns.take(project, room):
                self._seat(seats)
            return

    def _projects(self) -> list[str]:
        """Return all projects with seats or requests that wait; those whose turn was longest ago come first."""
        found = dict.fromkeys([*self.turns.lines, *self._waiting.projects])
        return sorted(found, key=self.turns.last_turn)

    def _seat(self, seats: list[Seat]) -> None:
        """Give rows to seats that go on together."""
        if seats[0].paused is None:
            count = sum(seat.rows for seat in seats)
            prompt = seats[0].prompt
            reading = self.batch.start_reading(prompt.ids, prompt.adapter, count)
            self.turns.readings.append(SeatedReading(reading, seats))
            return
        for seat in seats:
            if seat.paused is not None:
                self.batch.resume(seat.paused)
            seat.paused, seat.turn = None, 0
            self.turns.seated.append(seat)

    def _read(self) -> bool:
        """Read a part of one prompt, each prompt in turn; what was read to its end joins the batch."""
        readings = self.turns.readings
        if not readings:
            return False
        each = readings.pop(0)
        try:
            self.batch.read(each.reading)
        except PromptUnread:
            log.exception("a prompt cannot be read")
            self.fail({each.seats[0].replies[0].id}, "reply_failed", UNREAD)
            return True
        except BaseException:
            readings.insert(0, each)
            raise
        if not each.reading.is_done:
            readings.append(each)
            return True
        self.batch.add(each.reading, sum(seat.rows for seat in each.seats))
        for seat in each.seats:
            seat.turn = 0
        self.turns.seated += each.seats
        return True

    def _write(self) -> None:
        tokens, broken = dict[Reply, int](), dict[int, SpardError | None]()
        for seat in self.turns.seated:
            seat.turn += 1
        for reply, logits_V in zip(self.turns.replies, self.batch.logits_BV, strict=True):
            try:
                tokens[reply], said = reply.advance(logits_V)
            except SpardError as error:
                broken[reply.id] = error
                continue
            except Exception:  # numbers of one row, in main memory: whatever is wrong with them ends its request alone
                log.exception("a reply cannot go on")
                broken[reply.id] = None
                continue
            if said:
                self._tell(said)
        for number, why in broken.items():
            self.fail([number], getattr(why, "code", "reply_failed"), why.message if why else _BROKEN)
        ended = [reply for reply in self.turns.replies if reply.finish is not None]
        for reply in ended:
            reply.close()
            self._done[reply.id] = self._done.get(reply.id, 0) + reply.written
        self._keep([reply.finish is None for reply in self.turns.replies])
        for number in dict.fromkeys(reply.id for reply in ended):
            self._tell_done(number)
        if self.turns.seated:
            self.batch.step([tokens[reply] for reply in self.turns.replies])

    def _tell_done(self, number: int) -> None:
        """Tell the end of a request once all of its replies have ended."""
        if all(reply.id != number for seat in self.turns.seats for reply in seat.replies):
            self._tell({"kind": "done", "id": number, "reply_tokens": self._done.pop(number)})
            self._forget(number)

    def _keep(self, stays: list[bool]) -> None:
        """Let the rows leave that do not stay, and their replies with them."""
        self.batch.keep([i for i, each in enumerate(stays) if each])
        left = {reply for reply, each in zip(self.turns.replies, stays, strict=True) if not each}
        for seat in self.turns.seated:
            seat.replies = [reply for reply in seat.replies if reply not in left]
        self.turns.seated = [seat for seat in self.turns.seated if seat.replies]
