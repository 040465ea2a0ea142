"""Write the replies of all begun requests: assign rows, read prompts in chunks, and add one token per step."""

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
    """Writes the replies to requests.

    rows     the number of rows in the batch
    waiting  the requests that were not begun
    begin    removes a project's next request from `waiting` and returns its seats, or none if it fails
    forget   called with the number of each request that has ended
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
        self._done: dict[int, int] = {}  # request -> tokens of its replies that have ended

    @property
    def is_busy(self) -> bool:
        """Return True if a request was begun and has not ended."""
        return bool(self.turns.seats)

    @property
    def is_ready(self) -> bool:
        """Return True if no row waits for the mask of its schema."""
        return all(seat.is_ready for seat in self.turns.seated)

    @property
    def is_shared(self) -> bool:
        """Return True if several projects have rows."""
        return len({seat.project for seat in self.turns.seated}) > 1

    @property
    def numbers(self) -> set[int]:
        """The requests with replies in the batch or a prompt that is being read."""
        reading = {reply.id for each in self.turns.readings for seat in each.seats for reply in seat.replies}
        return {reply.id for reply in self.turns.replies} | reading

    def step(self) -> bool:
        """Assign rows, read a chunk of one prompt, and write one token into every row.

        Returns False if nothing was read or written. Rows that wait for a mask are paused so that the others go on; in
        a recurrent model, whose rows cannot be paused singly, all rows wait.
        """
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
        """Report requests as failed and remove all their replies."""
        for number in sorted(numbers):
            self._tell({"kind": "failed", "id": number, "code": code, "message": message})
        self.drop(numbers)

    def drop(self, numbers: Collection[int]) -> None:
        """Remove requests with all their replies, without a message."""
        self._keep([reply.id not in numbers for reply in self.turns.replies])
        self.turns.drop(numbers)
        for number in numbers:
            self._done.pop(number, None)
            self._forget(number)

    def pause(self, seats: Collection[Seat]) -> None:
        """Take the replies' rows out of the batch and queue the replies again."""
        for seat in seats:
            seat.paused = self.batch.pause(self.turns.places([seat]))
            self.turns.seated.remove(seat)
            self.turns.wait(seat)

    def _give_rows(self) -> None:
        """Give more rows to one project: the first, in order of turns, that may have some."""
        turns = self.turns
        pending = [each for each in self._projects() if turns.next_seat(each) or self._waiting.peek(each)]
        self.pause(turns.begin_step(pending))
        for project in pending:
            next_request = self._waiting.peek(project)
            if turns.next_seat(project):
                wanted = sum(seat.rows for seat in turns.lines[project])
            elif next_request and project not in turns.lines:
                wanted = next_request.ask["n"]
            else:  # its begun replies wait for masks, and come before its new requests
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
        """Return the projects with waiting seats or requests, the one whose turn was longest ago first."""
        found = dict.fromkeys([*self.turns.lines, *self._waiting.projects])
        return sorted(found, key=self.turns.last_turn)

    def _seat(self, seats: list[Seat]) -> None:
        """Start to read the prompt of new replies, or put paused replies back into the batch."""
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
        """Read a chunk of one prompt, round robin; add a finished prompt to the batch. Return False without prompts."""
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
            except Exception:  # sampling works on one row's logits, on the CPU: only this row's request fails
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
        """Report a request as done once all its replies have ended."""
        if all(reply.id != number for seat in self.turns.seats for reply in seat.replies):
            self._tell({"kind": "done", "id": number, "reply_tokens": self._done.pop(number)})
            self._forget(number)

    def _keep(self, stays: list[bool]) -> None:
        """Drop the rows, and their replies, for which `stays` is False."""
        self.batch.keep([i for i, each in enumerate(stays) if each])
        left = {reply for reply, each in zip(self.turns.replies, stays, strict=True) if not each}
        for seat in self.turns.seated:
            seat.replies = [reply for reply in seat.replies if reply not in left]
        self.turns.seated = [seat for seat in self.turns.seated if seat.replies]
