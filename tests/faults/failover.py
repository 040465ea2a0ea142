"""A PostgreSQL that fails over, as its clients see it: connections end, new ones are refused, then there is a standby.

The standby answers and only reads, until it is promoted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import NullPool, create_engine, make_url, text

from tests.faults.proxy import Proxy
from tests.worker.shop import wait_until

_END_SESSIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@dataclass(frozen=True)
class Failover:
    """`wire` is the proxy that clients come through; `url` leads around it, as an operator's own connection does."""

    wire: Proxy
    url: str

    def begin(self) -> None:
        """End all connections, and refuse new ones."""
        self.wire.mode = "refusing"
        self.wire.cut()

    def finish(self) -> None:
        """Once somebody was refused, answer as a standby; once somebody has come to that, promote it."""
        self._wait_for_client()
        self._set_read_only("on")
        self.wire.mode = "open"
        self._wait_for_client()
        self._set_read_only("off")

    def _wait_for_client(self) -> None:
        before = self.wire.accepted
        wait_until(lambda: self.wire.accepted > before)

    def _set_read_only(self, value: str) -> None:
        """Set what new sessions are, and end the others."""
        writes = {"options": "-c default_transaction_read_only=off"}
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool, connect_args=writes)
        with engine.connect() as connection:
            name = make_url(self.url).database
            connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {value}'))
            connection.execute(text(_END_SESSIONS))
