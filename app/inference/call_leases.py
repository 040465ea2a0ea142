"""Extend the leases of the requests that this process answers, copy their token counts, and complete lost requests."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

from sqlalchemy import CursorResult, Engine, case, or_, update
from sqlalchemy.orm import Session

from app import db
from app.db import clock, now, transaction
from app.db.tables import InferenceCall
from app.db.tables.inference import IS_RUNNING, PROCESS_LOST, RUNNING
from app.inference import ledger
from app.inference.ledger import Count, Entry, Ledger
from app.ops.periodic import repeat
from app.settings import Settings

log = logging.getLogger(__name__)


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
# On the machine of a dead process, its ledger has the exact count (`app.inference.ledger`). If the machine is lost
# too, the last count that the process copied into the database is used, once the request's lease has expired.


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
    """Complete the requests of dead processes of this machine, and those with an expired lease; return how many."""
    completed = 0
    for path in sorted(folder.glob("[0-9a-f]*")):
        with ledger.lock_abandoned(path) as counts:
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
    """Complete rows with an expired lease by the counts they have, and old rows without an owner by zero."""
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
