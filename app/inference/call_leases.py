"""Extend the leases of the requests that this process answers, and copy their token counts into the database."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event, Thread

from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from app import db
from app.db.tables import InferenceCall
from app.db.tables.inference import IS_RUNNING, RUNNING
from app.inference.ledger import Entry, Ledger
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
