"""Write the replies of all begun requests: assign rows, read prompts in chunks, and add one token per step.

Projects share the rows of the batch, and long replies take turns. While other projects write or wait, and for some
steps after, a project has at most half of the rows; its rows beyond that are paused as soon as another project comes. A
reply that has written many tokens in its turn gives its row to a project with fewer rows. Replies of the same project
never displace each other. Within a project paused replies continue before new ones begin, which bounds the number of
paused rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.inference.protocol import EngineMessage
from spard.errors import SpardError
from worker.engine.batch import Batch, PausedRows, Prefill, PromptUnread
from worker.engine.replies import Reply
from worker.engine.requests import FairQueue

TURN_TOKENS = 64  # tokens that a reply may write before it can be paused for other projects
_PROJECTS = 1000  # how many projects' turns are remembered
_PAUSED = 3  # paused rows at most, in multiples of the batch's rows; beyond it no new reply pauses others


@dataclass(eq=False, slots=True)
class Prompt:
    """A request's prompt in tokens, and the name of the adapter that reads it."""

    ids: Sequence[int]
    adapter: str


@dataclass(eq=False, slots=True)
class Seat:
    """Replies that get and lose their rows together: one reply, or for recurrent models all replies of a request."""

    replies: list[Reply]
    project: str
    prompt: Prompt
    paused: PausedRows | None = None  # None before the first turn, and while it has rows
    turn: int = 0  # tokens written since it got its rows

    @property
    def rows(self) -> int:
        """The number of rows in the batch that these replies need."""
        return len(self.replies)

    @property
    def is_ready(self) -> bool:
        """Return True if no reply waits for the mask of its schema."""
        return all(reply.form is None or reply.form.is_ready for reply in self.replies)


@dataclass(eq=False, slots=True)
class SeatedPrefill:
    """A prompt that is being read for one request's seats, which have their rows reserved."""

    reading: Prefill
    seats: list[Seat]


@dataclass(eq=False)
class Turns:
    """The seats of all replies and the rules by which they get rows.

    most      the number of rows in the batch
    is_whole  seats join and leave only all together, as a recurrent model needs it
    seated    seats with rows, in the order of the batch's rows
    readings  seats whose prompt is being read; their rows are reserved
    lines     waiting seats by project, in order
    """

    most: int
    is_whole: bool
    seated: list[Seat] = field(default_factory=list)
    readings: list[SeatedPrefill] = field(default_factory=list)
    lines: dict[str, deque[Seat]] = field(default_factory=dict)
    _steps: int = 0
    _shared_at: int = -TURN_TOKENS  # the last step at which several projects wrote or waited
    _turn_ends: dict[str, int] = field(default_factory=dict)  # project -> sequence number of its last turn

    @property
    def replies(self) -> list[Reply]:
        """The replies with rows, in the order of the rows."""
        return [reply for seat in self.seated for reply in seat.replies]

    @property
    def seats(self) -> list[Seat]:
        """All seats, with or without rows."""
        reading = [seat for each in self.readings for seat in each.seats]
        return [*self.seated, *reading, *(seat for line in self.lines.values() for seat in line)]

    @property
    def adapters(self) -> set[str]:
        """The adapters that current and waiting replies use."""
        return {seat.prompt.adapter for seat in self.seats}

    def places(self, seats: Collection[Seat]) -> list[int]:
        """Return the indices of the seats' rows in the batch."""
        found, at = list[int](), 0
        for seat in self.seated:
            if seat in seats:
                found += range(at, at + seat.rows)
            at += seat.rows
        return found

    def wait(self, seat: Seat) -> None:
        """Add a seat to the end of its project's line, or to the front if it was begun before."""
        line = self.lines.setdefault(seat.project, deque())
        if seat.paused:
            line.appendleft(seat)
        else:
            line.append(seat)

    def next_seat(self, project: str) -> Seat | None:
        """Return the first seat in a project's line that can continue now, or None."""
        return next((seat for seat in self.lines.get(project, ()) if seat.is_ready), None)

    def take(self, project: str, room: int) -> list[Seat]:
        """Remove and return the project's next seats that start together, with at most `room` rows.

        These are either paused seats, or new seats that share one prompt.
        """
        line, found = self.lines[project], list[Seat]()
        for seat in [each for each in line if each.is_ready]:
            is_alike = not found or (seat.paused is None and found[0].paused is None and seat.prompt is found[0].prompt)
            if not is_alike or seat.rows > room:
                break
            found.append(seat)
            room -= seat.rows
            line.remove(seat)
        if not line:
            del self.lines[project]
        return found

    def drop(self, numbers: Collection[int]) -> None:
        """Remove the waiting and reading seats of requests; seats with rows are removed with their rows elsewhere."""
        self.readings = [each for each in self.readings if each.seats[0].replies[0].id not in numbers]
        for project, line in list(self.lines.items()):
            self.lines[project] = stays = deque(seat for seat in line if seat.replies[0].id not in numbers)
            if not stays:
                del self.lines[project]

    def end_turn(self, project: str) -> None:
        """End a project's turn, so that all other projects come before it."""
        ends = self._turn_ends
        ends[project] = max(ends.values(), default=0) + 1
        if len(ends) > _PROJECTS:
            del ends[min(ends, key=self.last_turn)]

    def last_turn(self, project: str) -> int:
        """Return the sequence number of a project's last turn; 0 if it had none."""
        return self._turn_ends.get(project, 0)

    def count_rows(self, project: str) -> int:
        """Return how many rows a project has, including the rows reserved for prompts that are being read."""
        return sum(seat.rows for seat in self._with_rows() if seat.project == project)

    @property
    def free(self) -> int:
        """The number of free rows."""
        return self.most - sum(seat.rows for seat in self._with_rows())

    def begin_step(self, waiting: Collection[str]) -> list[Seat]:
        """Count a step, and return the seats to pause because their projects have more than half of the rows.

        `waiting` are the projects that wait for rows.
        """
        self._steps += 1
        if len({*waiting, *(seat.project for seat in self._with_rows())}) > 1:
            self._shared_at = self._steps
        if self.is_whole or not self._is_shared:
            return []
        found, held = list[Seat](), dict[str, int]()
        for seat in sorted(self._with_rows(), key=lambda seat: seat.turn):
            held[seat.project] = held.get(seat.project, 0) + 1
            if held[seat.project] > self._half and seat in self.seated:
                found.append(seat)
        return found

    @property
    def _is_shared(self) -> bool:
        return self._steps - self._shared_at < TURN_TOKENS

    @property
    def _half(self) -> int:
        return max(1, self.most // 2)

    def plan_rows(self, project: str, wanted: int) -> tuple[int, list[Seat]]:
        """Return how many of the `wanted` rows a project gets now, and the seats to pause for it."""
        if self.is_whole:
            return self._whole_room(project, wanted)
        half, mine = self._half, self.count_rows(project)
        most = min(wanted, (half if self._is_shared else self.most) - mine)
        if most <= self.free:
            return max(most, 0), []
        paused = self._choose_paused(project, min(wanted, half - mine) - self.free, half)
        return min(most, self.free + len(paused)), paused

    def _whole_room(self, project: str, wanted: int) -> tuple[int, list[Seat]]:
        """Return the same for a recurrent model, whose batch holds one request at a time: all rows or none."""
        if not self._with_rows():
            return wanted, []
        over = not self.readings and all(each.turn >= TURN_TOKENS and each.project != project for each in self.seated)
        over = over and not self._is_full(project)
        return (wanted, list(self.seated)) if over else (0, [])

    def _choose_paused(self, project: str, needed: int, half: int) -> list[Seat]:
        """Return up to `needed` seats of other projects to pause: projects with the most rows and longest turns first.

        A seat qualifies if its project has more than half of the rows, or if its turn is over and its project has more
        rows than this one. A project without any row gets one in any case from a project that has several.
        """
        if self._is_full(project):
            return []
        held = {each: self.count_rows(each) for each in {seat.project for seat in self.seated} - {project}}
        mine, found = self.count_rows(project), list[Seat]()
        for seat in sorted(self.seated, key=lambda seat: (-held.get(seat.project, 0), -seat.turn)):
            if len(found) >= needed:
                break
            theirs = held.get(seat.project, 0)
            is_beyond = theirs > half or (mine == 0 and theirs > 1 and not found)
            if theirs and (is_beyond or (seat.turn >= TURN_TOKENS and theirs > mine + len(found))):
                found.append(seat)
                held[seat.project] -= 1
        return found

    def _is_full(self, project: str) -> bool:
        """Return True if so many rows are paused that a new reply of this project must not pause more."""
        first = self.next_seat(project)
        paused = sum(seat.rows for line in self.lines.values() for seat in line if seat.paused)
        return (first is None or first.paused is None) and paused >= _PAUSED * self.most

    def _with_rows(self) -> list[Seat]:
        return [*self.seated, *(seat for each in self.readings for seat in each.seats)]


log = logging.getLogger(__name__)

UNREAD = "The model cannot read this prompt; others are not touched."
_BROKEN = "The model gives no numbers that a next token could be chosen from; its reply has ended."

Tell = Callable[[EngineMessage], None]


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
            self.turns.readings.append(SeatedPrefill(reading, seats))
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
