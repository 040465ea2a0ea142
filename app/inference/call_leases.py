"""Extend the leases of the requests that this process answers, count their tokens, and complete lost requests.

The tokens that were sent for each open request are counted in a small file that outlives the process. It is
memory-mapped: a count costs one store and no system call, and the kernel keeps it when the process is killed. The
process holds a lock on the file while it lives. If the machine is lost, the file is too, and only the counts are left
that were copied into the database.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from threading import Event, Lock, Thread

from sqlalchemy import CursorResult, Engine, case, or_, update
from sqlalchemy.orm import Session

from app import db
from app.db import clock, now, transaction
from app.db.tables import InferenceCall
from app.db.tables.inference import IS_RUNNING, PROCESS_LOST, RUNNING
from app.ops.lifecycle import repeat
from app.settings import Settings

log = logging.getLogger(__name__)
MOST_OPEN = 4096  # open requests in the file; the counts of any beyond it are in the database only
_WORDS = 8  # of 8 bytes, for each request: is open, prompt tokens, tokens sent, and its id
_ID_AT, _ID_BYTES = 24, 40
_SLOT_BYTES = 8 * _WORDS
_IS_OPEN, _PROMPT, _SENT = range(3)


@dataclass(frozen=True, slots=True)
class Count:
    """The tokens of one request: of its prompt, which is billed only if any were sent, and of its replies."""

    call_id: str
    prompt: int
    sent: int


class Entry:
    """One open request; its counts are stored by single 8-byte writes, which a kill cannot interrupt halfway."""

    def __init__(self, ledger: Ledger, slot: int | None, call_id: str) -> None:
        self._ledger, self.slot, self.call_id = ledger, slot, call_id
        self.prompt = self.sent = 0
        self.ended_as: str | None = None  # the final status, if the database did not take it yet

    def note_prompt(self, tokens: int) -> None:
        """Store the prompt's number of tokens."""
        self.prompt = tokens
        self._ledger.store(self.slot, _PROMPT, tokens)

    def note_sent(self, tokens: int) -> None:
        """Store how many tokens of all replies were sent to the client so far."""
        if tokens != self.sent:
            self.sent = tokens
            self._ledger.store(self.slot, _SENT, tokens)

    def close(self) -> None:
        """Free the slot, unless the row still has to be completed; may be called several times."""
        if self.ended_as is None:
            self._ledger.release(self)


class Ledger:
    """The open requests of this process; its file, named `owner`, is created with the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.owner = folder, token_hex(12)
        self._lock = Lock()
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._words: memoryview | None = None
        self._handle: int | None = None
        self._free: list[int] = []
        self._entries: set[Entry] = set()

    def open(self, call_id: str) -> Entry:
        """Return an entry for a request, with a slot in the file if one is free."""
        with self._lock:
            if self._words is None:
                self._map, self._words = self._create()
                self._free = list(reversed(range(MOST_OPEN)))
            slot = self._free.pop() if self._free else None
            entry = Entry(self, slot, call_id)
            self._entries.add(entry)
            if slot is not None:
                at = slot * _SLOT_BYTES + _ID_AT
                self._map[at : at + _ID_BYTES] = call_id.encode().ljust(_ID_BYTES, b"\0")
        # Opened last: a reader after a crash must not see the counts of the slot's earlier request.
        for word, number in ((_PROMPT, 0), (_SENT, 0), (_IS_OPEN, 1)):
            self.store(slot, word, number)
        return entry

    def store(self, slot: int | None, word: int, number: int) -> None:
        """Write one number of a slot; do nothing for an entry without a slot."""
        if self._words is not None and slot is not None:
            self._words[slot * _WORDS + word] = number

    def release(self, entry: Entry) -> None:
        """Free a request's slot, if it has not been freed before."""
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)
                self.store(entry.slot, _IS_OPEN, 0)
                if entry.slot is not None:
                    self._free.append(entry.slot)

    def entries(self) -> list[Entry]:
        """Return the entries of the open requests."""
        with self._lock:
            return list(self._entries)

    def close(self) -> None:
        """Close the file; delete it if no request is open, else leave it to `complete_lost`."""
        with self._lock:
            if self._handle is not None:
                if not self._entries:
                    (self._folder / self.owner).unlink(missing_ok=True)
                if self._words is not None:
                    self._words.release()
                    self._words = None
                    self._map.close()  # the mapping holds the file open, and with it the lock
                os.close(self._handle)
                self._handle = None

    def _create(self) -> tuple[mmap.mmap, memoryview]:
        size = MOST_OPEN * _SLOT_BYTES
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = self._folder / f".{self.owner}"
            self._handle = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            os.ftruncate(self._handle, size)
            aside.rename(self._folder / self.owner)  # under its final name it is always locked
            found = mmap.mmap(self._handle, size)
        except OSError as error:
            log.warning("tokens of requests that a crash ends are counted by the database alone: %s", error)
            found = mmap.mmap(-1, size)
        return found, memoryview(found).cast("Q")


@contextmanager
def lock_abandoned(path: Path) -> Iterator[list[Count] | None]:
    """Lock the ledger of a dead process and yield its open requests; yield None if the process is alive."""
    handle = None
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR)
    if handle is None:
        yield None
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield None
    else:
        yield _read(os.pread(handle, MOST_OPEN * _SLOT_BYTES, 0))
    finally:
        os.close(handle)


def _read(content: bytes) -> list[Count]:
    words = memoryview(content[: len(content) // _SLOT_BYTES * _SLOT_BYTES]).cast("Q")
    found = []
    for slot in range(len(words) // _WORDS):
        numbers = words[slot * _WORDS : (slot + 1) * _WORDS]
        if numbers[_IS_OPEN]:
            at = slot * _SLOT_BYTES + _ID_AT
            call_id = content[at : at + _ID_BYTES].rstrip(b"\0").decode(errors="replace")
            found.append(Count(call_id, numbers[_PROMPT], numbers[_SENT]))
    return found


def ledger_folder(settings: Settings) -> Path:
    """Return the folder that holds a ledger for each API process of this machine."""
    return settings.data_dir.resolve() / "calls"


class CallLeases:
    """The leases of this process's requests; one thread, started with the first request, extends them all."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self.ledger = Ledger(ledger_folder(settings))
        self._stop = Event()
        self._thread: Thread | None = None

    @property
    def owner(self) -> str:
        """The name that marks this process's requests in the database."""
        return self.ledger.owner

    @property
    def lease_s(self) -> float:
        """How long a request belongs to this process without another heartbeat, in seconds."""
        return self._settings.lease_s

    def open(self, call_id: str) -> Entry:
        """Open a ledger entry for a request, and extend its lease from now on."""
        entry = self.ledger.open(call_id)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="call leases", daemon=True)
            self._thread.start()
        return entry

    def beat(self) -> None:
        """Extend the leases of all open requests, write their counts, and complete rows that could not be written."""
        entries = self.ledger.entries()
        if not entries:
            return
        ended = [(entry, entry.ended_as) for entry in entries if entry.ended_as is not None]
        with db.transaction(self._engine) as session:
            self._write(session, entries)
            for entry, status in ended:
                self._complete(session, entry, status)
        for entry, _ in ended:
            self.ledger.release(entry)

    def close(self) -> None:
        """Stop extending leases, and close the ledger."""
        self._stop.set()
        self.ledger.close()

    def _run(self) -> None:
        repeat(self.beat, self._stop, self._settings.heartbeat_s, "no heartbeat of the requests that are answered")

    def _write(self, session: Session, entries: list[Entry]) -> None:
        call = InferenceCall
        own = update(call).where(IS_RUNNING, call.owner == self.owner).execution_options(synchronize_session=False)
        session.execute(own.values(lease_expires_at=db.now() + self.lease_s))
        for entry in entries:
            if entry.sent:
                counts = {"prompt_tokens": entry.prompt, "reply_tokens": entry.sent}
                session.execute(own.where(call.id == entry.call_id).values(**counts))

    def _complete(self, session: Session, entry: Entry, status: str) -> None:
        """Complete the row of a request that ended while the database was away, with the tokens that were sent."""
        call = session.get(InferenceCall, entry.call_id)
        if call is not None and call.status == RUNNING:
            call.status, call.reply_tokens, call.prompt_tokens = status, entry.sent, entry.prompt if entry.sent else 0
            call.reserved_tokens, call.lease_expires_at = 0, None


# Complete the requests of API processes that died while answering; only the tokens that were sent are billed.
#
# On the machine of a dead process, its ledger has the exact count. If the machine is lost too, the last count that
# the process copied into the database is used, once the request's lease has expired.


_UNOWNED = timedelta(hours=1)  # then a request of an older API version, whose row names no owner, is given up


def run(engine: Engine, folder: Path, stop: Event, every_s: float) -> None:
    """Complete lost requests now and every `every_s` seconds until `stop` is set."""

    def once() -> None:
        complete_lost(engine, folder)

    if not stop.is_set():
        try:
            once()
        except Exception:
            log.exception("could not complete lost requests")
    repeat(once, stop, every_s, "could not complete lost requests")


def complete_lost(engine: Engine, folder: Path) -> int:
    """Complete the requests of this machine's dead processes and those with an expired lease; return their number."""
    completed = 0
    for path in sorted(folder.glob("[0-9a-f]*")):
        with lock_abandoned(path) as counts:
            if counts is not None:
                with transaction(engine) as session:
                    completed += _complete(session, path.name, counts)
                path.unlink(missing_ok=True)
    with transaction(engine) as session:
        completed += _complete_expired(session)
    if completed:
        log.warning("completed %d requests of API processes that are gone", completed)
    return completed


def _complete(session: Session, owner: str, counts: list[Count]) -> int:
    """Complete a dead process's requests with its ledger's counts; running requests not in the ledger sent nothing."""
    call = InferenceCall
    for count in counts:
        prompt = count.prompt if count.sent else 0
        lost = call.status.in_((RUNNING, PROCESS_LOST))
        session.execute(
            update(call)
            .where(call.id == count.call_id, call.owner == owner)
            .values(
                # A row that ended normally counts all tokens, but some may not have been sent: take the smaller count.
                prompt_tokens=case((lost, prompt), (call.prompt_tokens < prompt, call.prompt_tokens), else_=prompt),
                reply_tokens=case(
                    (lost, count.sent), (call.reply_tokens < count.sent, call.reply_tokens), else_=count.sent
                ),
                status=case((call.status == RUNNING, PROCESS_LOST), else_=call.status),
                reserved_tokens=0,
                lease_expires_at=None,
            )
            .execution_options(synchronize_session=False)
        )
    left = update(call).where(IS_RUNNING, call.owner == owner)
    return len(counts) + _count(session, left.values(**_lost_values(), reply_tokens=0, prompt_tokens=0))


def _complete_expired(session: Session) -> int:
    """Complete rows with an expired lease, keeping their tokens, and old rows without an owner, setting tokens to 0."""
    call = InferenceCall
    expired = update(call).where(IS_RUNNING, call.lease_expires_at < now())
    prompt = case((call.reply_tokens > 0, call.prompt_tokens), else_=0)
    completed = _count(session, expired.values(**_lost_values(), prompt_tokens=prompt))
    is_old = (call.created_at < clock(session) - _UNOWNED) & or_(call.owner.is_(None), call.lease_expires_at.is_(None))
    unowned = update(call).where(IS_RUNNING, is_old)
    return completed + _count(session, unowned.values(**_lost_values(), reply_tokens=0))


def _lost_values() -> dict[str, object]:
    return {"status": PROCESS_LOST, "reserved_tokens": 0, "lease_expires_at": None}


def _count(session: Session, statement: object) -> int:
    result = session.execute(statement, execution_options={"synchronize_session": False})  # type: ignore[call-overload]
    return result.rowcount if isinstance(result, CursorResult) else 0
