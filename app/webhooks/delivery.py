"""Queue, sign and deliver webhooks: with retries over days, and never twice at the same time.

A delivery is queued in the transaction that ends a job, so that both are committed or neither is. It is signed by
Standard Webhooks: an id, a time, and an HMAC of both and the body for each valid secret. It is sent as one POST to a
checked address, without redirects or proxies, within a fixed time and without an open transaction.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import socket
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from random import uniform
from secrets import token_bytes
from threading import Event, Timer

from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from app.db import clock, now, timestamp, transaction
from app.db.base import new_id
from app.db.tables import TERMINAL, Job, JobStatus, WebhookDelivery, WebhookEndpoint
from app.ops.lifecycle import repeat
from app.webhooks.address import Refused, Target, resolve
from spard.config.patience import parse_retry_header

TYPES = {status: f"fine_tuning.job.{status.value}" for status in TERMINAL}
AUDITED = "safety.audit.completed"
_PREFIX = "whsec_"  # of secrets
_CONNECT_S = 3.0
_TOTAL_S = 10.0  # also stops a receiver that answers one byte at a time


def announce(session: Session, job_id: str, status: JobStatus) -> None:
    """Queue the event that a job has ended."""
    _tell(session, job_id, TYPES[status])


def announce_audit(session: Session, job_id: str) -> None:
    """Queue the event that a job's audit has ended and its report is available."""
    _tell(session, job_id, AUDITED)


def _tell(session: Session, job_id: str, type: str) -> None:
    """Queue the event for every endpoint of the job's project that subscribes to it."""
    project_id = select(Job.project_id).where(Job.id == job_id).scalar_subquery()
    is_open = (WebhookEndpoint.project_id == project_id) & (WebhookEndpoint.status == "enabled")
    wanted = select(WebhookEndpoint).where(is_open).with_for_update(read=True, key_share=True)  # no deletion meanwhile
    # One id for all endpoints, by which a receiver of several of them recognizes the event.
    event_id = new_id("evt_")
    for endpoint in session.scalars(wanted):
        if type in endpoint.events:
            session.add(WebhookDelivery(endpoint_id=endpoint.id, event_id=event_id, type=type, job_id=job_id))


def new_secret() -> str:
    """Return a new secret: 256 random bits in the form that Standard Webhooks libraries accept."""
    return _PREFIX + b64encode(token_bytes(32)).decode()


def event_body(delivery: WebhookDelivery) -> bytes:
    """Return the event as OpenAI's JSON; every attempt sends the same bytes."""
    event = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.type,
        "created_at": int(delivery.created_at.timestamp()),
        "data": {"id": delivery.job_id},
    }
    return json.dumps(event, separators=(",", ":")).encode()


def signed_headers(endpoint: WebhookEndpoint, delivery: WebhookDelivery, at: datetime) -> dict[str, str]:
    """Return the headers with which a receiver verifies the body; `at` is the database's time."""
    stamp = str(int(time.time()))
    content = f"{delivery.event_id}.{stamp}.".encode() + event_body(delivery)
    return {
        "webhook-id": delivery.event_id,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(f"v1,{_mac(secret, content)}" for secret in _secrets(endpoint, at)),
    }


def _secrets(endpoint: WebhookEndpoint, at: datetime) -> list[str]:
    """Return the valid secrets, newest first; after a rotation the old one stays valid for a day."""
    is_old_valid = endpoint.old_secret_until is not None and endpoint.old_secret_until > at
    return [endpoint.secret, *([endpoint.old_secret] if endpoint.old_secret and is_old_valid else [])]


def _mac(secret: str, content: bytes) -> str:
    key = b64decode(secret.removeprefix(_PREFIX))
    return b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


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
    """A due delivery, its endpoint, and the database's time at which it was taken."""

    delivery: WebhookDelivery
    endpoint: WebhookEndpoint
    at: datetime


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
            answer = post(target, event_body(task.delivery), signed_headers(task.endpoint, task.delivery, task.at))
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
    at = clock(session)
    return [_Task(first[endpoint.id], endpoint, at) for endpoint in endpoints]


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
