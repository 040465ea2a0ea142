"""Count the tokens that this process has sent for each open request, in a small file that outlives the process.

The file is memory-mapped: a count costs one store and no system call, and the kernel keeps it when the process is
killed. The process holds a lock on the file while it lives. If the machine is lost, the file is too, and only the
counts are left that `app.inference.call_leases` has copied into the database.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from threading import Lock

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
        """Close the file; delete it if no request is open, else leave it to `app.inference.call_leases`."""
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
