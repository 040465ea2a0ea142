"""What Prometheus reads: how requests of this process went, and how the queue stands. No ids, no names of customers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from threading import Lock

from fastapi import APIRouter
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from app.db import now
from app.deps import ReadDep
from app.models import Job, JobStatus, Outbox

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["health"])


class Requests:
    """How often each route was asked, how it answered and how long that took; for one process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._buckets = [0] * (len(_BUCKETS_S) + 1)
        self._seconds = 0.0

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._answers[method, route, status] += 1
            self._buckets[bisect_left(_BUCKETS_S, seconds)] += 1
            self._seconds += seconds

    def lines(self) -> Iterator[str]:
        """In Prometheus's text format."""
        with self._lock:
            answers, buckets, seconds = dict(self._answers), list(self._buckets), self._seconds
        yield from head("spard_http_requests_total", "counter", "Requests answered.")
        for (method, route, status), count in sorted(answers.items()):
            labels = f'method="{method}",route="{route}",status="{status}"'
            yield f"spard_http_requests_total{{{labels}}} {count}"
        name, so_far = "spard_http_request_duration_seconds", 0
        yield from head(name, "histogram", "Time from a request's first byte to its answer's last.")
        for limit, count in zip([*map(str, _BUCKETS_S), "+Inf"], buckets, strict=True):
            so_far += count
            yield f'{name}_bucket{{le="{limit}"}} {so_far}'
        yield f"{name}_sum {seconds:.6f}"
        yield f"{name}_count {so_far}"


@router.get("/metrics", response_class=PlainTextResponse)
def read_metrics(request: Request, session: ReadDep) -> PlainTextResponse:
    """Prometheus's text format; the queue is the whole service's, the requests are this process's."""
    requests: Requests = request.app.state.requests
    return PlainTextResponse("\n".join([*requests.lines(), *_queue(session)]) + "\n", media_type=MEDIA_TYPE)


def _queue(session: Session) -> Iterator[str]:
    jobs = dict.fromkeys(JobStatus, 0)
    for status, count in session.execute(select(Job.status, func.count()).group_by(Job.status)):
        jobs[status] = count
    yield from head("spard_jobs", "gauge", "Jobs by status.")
    for status, count in jobs.items():
        yield f'spard_jobs{{status="{status.value}"}} {count}'
    running = Job.status == JobStatus.running
    lost = session.scalar(select(func.count()).where(running, Job.lease_expires_at < now()))
    yield from head("spard_leases_expired", "gauge", "Running jobs whose worker is gone and that wait for the reaper.")
    yield f"spard_leases_expired {lost or 0}"
    pending = session.scalar(select(func.count()).where(Outbox.sent_at.is_(None)))
    yield from head("spard_outbox_pending", "gauge", "Wake-ups that the broker has not taken yet.")
    yield f"spard_outbox_pending {pending or 0}"


def head(name: str, kind: str, help: str) -> tuple[str, str]:
    """The two lines before a metric's values."""
    return f"# HELP {name} {help}", f"# TYPE {name} {kind}"
