"""Deliver due webhooks: with retries over days, never twice at the same time, and without an open transaction."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from random import uniform
from threading import Event, Timer

from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from app.db import now, timestamp, transaction
from app.db.tables import WebhookDelivery, WebhookEndpoint
from app.ops.periodic import repeat
from app.webhooks import signing
from app.webhooks.address import Refused, Target, resolve
from spard.config.patience import parse_retry_header

# Send one POST to a checked address, without redirects or proxies and within a fixed time.

_CONNECT_S = 3.0
_TOTAL_S = 10.0  # also stops a receiver that answers one byte at a time


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the `retry-after` header of a receiver's answer."""

    status: int
    retry_after: str | None = None


class Unanswered(Exception):
    """Raised if the receiver could not be reached or did not answer in time."""


class _Connection(http.client.HTTPConnection):
    """A connection to the checked address, regardless of what its name resolves to now."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self._target = target

    def connect(self) -> None:
        self.sock = socket.create_connection((self._target.address, self._target.port), _CONNECT_S)
        if self._target.is_tls:
            wrap = ssl.create_default_context().wrap_socket
            # The handshake comes later, in `post`, when the deadline runs already.
            self.sock = wrap(self.sock, server_hostname=self._target.host, do_handshake_on_connect=False)

    def cut(self) -> None:
        with suppress(OSError):
            # The plain socket's method: SSLSocket's own also drops its SSL object, which the other thread may be using.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def post(target: Target, body: bytes, headers: Mapping[str, str]) -> Answer:
    """Send a body and return the status and one header of the answer; raise `Unanswered` if there is none."""
    connection = _Connection(target)
    deadline = Timer(_TOTAL_S, connection.cut)
    try:
        connection.connect()
        deadline.start()
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        # The connection goes to an address, so the Host header has to name the host.
        host = target.host if target.port in (80, 443) else f"{target.host}:{target.port}"
        named = {"host": host, "content-type": "application/json", "user-agent": "spard-webhooks", **headers}
        connection.request("POST", target.path, body, named)
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("retry-after"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unanswered(type(error).__name__) from error
    finally:
        deadline.cancel()
        connection.close()


ATTEMPTS = 11  # over about three days
_FIRST_WAIT_S, _GROWTH, _MAX_WAIT_S = 5.0, 4.0, 86_400.0
_HELD_S = 60.0  # a courier's claim on a delivery; an attempt takes at most a quarter of it
_AT_ONCE = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    """A due delivery and its endpoint."""

    delivery: WebhookDelivery
    endpoint: WebhookEndpoint


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of an attempt; `wait_s` is the wait in seconds that the receiver asked for."""

    text: str
    is_delivered: bool = False
    is_gone: bool = False
    wait_s: float = 0.0


class Courier:
    """Delivers webhooks; any number of couriers may run, in any number of processes."""

    def __init__(self, engine: Engine, *, allow_local: bool) -> None:
        self._engine, self._allow_local = engine, allow_local

    def run(self, stop: Event, every_s: float = 1.0) -> None:
        """Deliver until `stop` is set."""

        def deliver_all() -> None:
            while not stop.is_set() and self.deliver_due():
                pass

        repeat(deliver_all, stop, every_s, "the webhooks cannot be delivered; trying again")

    def deliver_due(self) -> int:
        """Attempt the next deliveries, at most one per endpoint; return their number."""
        with transaction(self._engine) as session:
            tasks = _take(session)
        if tasks:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._attempt, tasks))
        return len(tasks)

    def _attempt(self, task: _Task) -> None:
        outcome = self._send(task)
        log.info("webhook %s to %s: %s", task.delivery.id, task.endpoint.id, outcome.text)
        with transaction(self._engine) as session:
            _note(session, task.delivery, outcome)

    def _send(self, task: _Task) -> _Outcome:
        try:
            target = resolve(task.endpoint.url, allow_local=self._allow_local)
            answer = post(target, signing.body(task.delivery), signing.headers(task.endpoint, task.delivery))
        except Refused as error:
            return _Outcome(f"not sent: {error.message}")
        except Unanswered as error:
            return _Outcome(f"no answer: {error}")
        text = f"answered {answer.status}"
        return _Outcome(text, 200 <= answer.status < 300, answer.status == 410, _asked_wait(answer))


def wait_s(attempts: int) -> float:
    """Return the seconds to wait after that many attempts: exponential, with a jitter of a fifth."""
    return min(_FIRST_WAIT_S * _GROWTH ** (attempts - 1), _MAX_WAIT_S) * uniform(0.8, 1.2)


def _take(session: Session) -> list[_Task]:
    """Claim the oldest due delivery of each endpoint for a minute, taking turns between projects.

    However many deliveries one project has pending, those of others are sent in the same batch.
    """
    is_due = (WebhookDelivery.status == "pending") & (WebhookDelivery.due_at <= now())
    order = WebhookDelivery.due_at, WebhookDelivery.id
    of_endpoint = func.row_number().over(partition_by=WebhookDelivery.endpoint_id, order_by=order).label("place")
    columns = WebhookDelivery.id, WebhookDelivery.due_at, WebhookEndpoint.project_id, of_endpoint
    due = select(*columns).join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
    oldest = due.where(is_due, WebhookEndpoint.status == "enabled").subquery()
    turn = func.row_number().over(partition_by=oldest.c.project_id, order_by=(oldest.c.due_at, oldest.c.id))
    chosen = select(oldest.c.id).where(oldest.c.place == 1).order_by(turn, oldest.c.due_at, oldest.c.id)
    query = select(WebhookDelivery).where(is_due, WebhookDelivery.id.in_(chosen.limit(_AT_ONCE)))
    first = {row.endpoint_id: row for row in session.scalars(query.with_for_update(skip_locked=True))}
    # Due again in a minute if this process dies; the time also keeps other couriers away meanwhile.
    held = update(WebhookDelivery).where(WebhookDelivery.id.in_([row.id for row in first.values()]))
    session.execute(held.values(due_at=now() + _HELD_S), execution_options={"synchronize_session": False})
    endpoints = session.scalars(select(WebhookEndpoint).where(WebhookEndpoint.id.in_(first)))
    return [_Task(first[endpoint.id], endpoint) for endpoint in endpoints]


def _note(session: Session, delivery: WebhookDelivery, outcome: _Outcome) -> None:
    """Store the outcome, unless the endpoint was deleted meanwhile."""
    row = session.get(WebhookDelivery, delivery.id, with_for_update=True)
    if row is None:
        return
    # 410 Gone: the receiver asks for no further events.
    if outcome.is_gone:
        session.get_one(WebhookEndpoint, row.endpoint_id).status = "disabled"
    if row.status == "delivered":  # another courier took over because we were slow
        return
    row.attempts += 1
    row.outcome = outcome.text
    if outcome.is_delivered:
        row.status, row.delivered_at = "delivered", timestamp()
    elif outcome.is_gone or row.attempts >= ATTEMPTS:
        row.status = "failed"
    else:
        row.due_at = now() + max(wait_s(row.attempts), outcome.wait_s)


def _asked_wait(answer: Answer) -> float:
    """Return the seconds that an answer's `Retry-After` asks for, rounded up; at most a day, and 0 without one."""
    return ceil(min(parse_retry_header(answer.retry_after) or 0.0, _MAX_WAIT_S))
