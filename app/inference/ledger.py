"""How many tokens of each open request this process has sent: a small file that outlives the process.

The file is mapped into memory, so a count costs one store and no system call, and the kernel keeps it when the process
is killed. A lock on the file says whether its process lives. A lost machine loses the file; then the counts that
`app.inference.call_leases` copies into the database now and then are what is known.
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

MOST_OPEN = 4096  # requests of one process at once; of more the counts are in the database alone
_WORDS = 8  # of 8 bytes, for each request: is open, prompt tokens, tokens sent, and its id
_ID_AT, _ID_BYTES = 24, 40
_SLOT_BYTES = 8 * _WORDS
_IS_OPEN, _PROMPT, _SENT = range(3)


@dataclass(frozen=True, slots=True)
class Count:
    """What was sent of one request, in tokens; `prompt` is billed only where something was sent."""

    call_id: str
    prompt: int
    sent: int


class Entry:
    """One open request. Its counts are stored by single writes of 8 bytes, which a kill cannot tear."""

    def __init__(self, ledger: Ledger, slot: int | None, call_id: str) -> None:
        self._ledger, self.slot, self.call_id = ledger, slot, call_id
        self.prompt = self.sent = 0
        self.ended_as: str | None = None  # the status that the row could not be given yet

    def note_prompt(self, tokens: int) -> None:
        """Store how many tokens the prompt has."""
        self.prompt = tokens
        self._ledger.store(self.slot, _PROMPT, tokens)

    def note_sent(self, tokens: int) -> None:
        """Store how many tokens of the replies were given to the client's connection so far."""
        if tokens != self.sent:
            self.sent = tokens
            self._ledger.store(self.slot, _SENT, tokens)

    def close(self) -> None:
        """Give the slot back, unless the row is to be completed still. Once is enough."""
        if self.ended_as is None:
            self._ledger.release(self)


class Ledger:
    """The open requests of this process, under the name `owner`. The file is made with the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.owner = folder, token_hex(12)
        self._lock = Lock()
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._words: memoryview | None = None
        self._handle: int | None = None
        self._free: list[int] = []
        self._entries: set[Entry] = set()

    def open(self, call_id: str) -> Entry:
        """Take a slot for a request."""
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
        for word, number in ((_PROMPT, 0), (_SENT, 0), (_IS_OPEN, 1)):
            self.store(slot, word, number)
        return entry

    def store(self, slot: int | None, word: int, number: int) -> None:
        """Write one number of a slot, if there is one."""
        if self._words is not None and slot is not None:
            self._words[slot * _WORDS + word] = number

    def release(self, entry: Entry) -> None:
        """Free the slot of a request, if it is this request's still."""
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)
                self.store(entry.slot, _IS_OPEN, 0)
                if entry.slot is not None:
                    self._free.append(entry.slot)

    def entries(self) -> list[Entry]:
        """Return the open requests."""
        with self._lock:
            return list(self._entries)

    def close(self) -> None:
        """Delete the file if nothing is open; else it is left to `app.inference.lost_calls`."""
        with self._lock:
            if self._handle is not None:
                if not self._entries:
                    (self._folder / self.owner).unlink(missing_ok=True)
                if self._words is not None:
                    self._words.release()
                    self._words = None
                    self._map.close()  # it holds the file open, and with it the lock
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
            aside.rename(self._folder / self.owner)  # it is never seen unlocked
            found = mmap.mmap(self._handle, size)
        except OSError as error:
            log.warning("tokens of requests that a crash ends are counted by the database alone: %s", error)
            found = mmap.mmap(-1, size)
        return found, memoryview(found).cast("Q")


@contextmanager
def lock_abandoned(path: Path) -> Iterator[list[Count] | None]:
    """Yield the open requests of a ledger whose process has died, and lock it; None where the process lives."""
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
