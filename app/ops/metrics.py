"""Prometheus metrics of an API process: its requests and the state of the queue, without ids or project names.

With PROMETHEUS_MULTIPROC_DIR set to an empty folder, each API process of a machine reports the sum over all of them
(see prometheus_client's multiprocess mode).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from app.db import now
from app.db.base import utc_now
from app.db.tables import Job, JobStatus, ObjectFinding, ObjectIntent, Outbox
from app.db.tables.files import WRITE

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # when a series began: nobody reads it

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})  # a client may send any word
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class RequestMetrics:
    """Counts of requests by route and status, and their durations."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "spard_http_requests", "Requests answered.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "spard_http_request_duration_seconds",
            "Time from a request's first byte to its answer's last.",
            buckets=_BUCKETS_S,
            registry=self._registry,
        )

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._answers.labels(method if method in _METHODS else "other", route, status).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format, summed over processes that share a folder."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)


def queue_text(session: Session) -> bytes:
    """Return the state of queue, outbox and objects in the database, in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Queue(session))
    return generate_latest(registry)


class _Queue(Collector):
    """Reads the state of the queue from the database each time that metrics are collected."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def collect(self) -> Iterator[Metric]:
        counts = dict.fromkeys(JobStatus, 0)
        for status, count in self._session.execute(select(Job.status, func.count()).group_by(Job.status)):
            counts[status] = count
        jobs = GaugeMetricFamily("spard_jobs", "Jobs by status.", labels=["status"])
        for status, count in counts.items():
            jobs.add_metric([status.value], count)
        yield jobs
        oldest = self._session.scalar(select(func.min(Job.created_at)).where(Job.status == JobStatus.queued))
        age_s = max(0.0, (utc_now() - oldest).total_seconds()) if oldest else 0.0
        text = "How long ago the oldest job that waits for a worker was created; 0 where none waits."
        yield GaugeMetricFamily("spard_queue_age_seconds", text, age_s)
        lost = self._count(Job.status == JobStatus.running, Job.lease_expires_at < now())
        text = "Running jobs whose worker is gone and that wait for the reaper."
        yield GaugeMetricFamily("spard_leases_expired", text, lost)
        pending = self._count(Outbox.sent_at.is_(None))
        yield GaugeMetricFamily("spard_outbox_pending", "Wake-ups that the broker has not taken yet.", pending)

        kinds = dict(self._session.execute(select(ObjectFinding.kind, func.count()).group_by(ObjectFinding.kind)).all())
        text = "Objects that no row named at the last comparison of rows and storage."
        yield GaugeMetricFamily("spard_objects_unexplained", text, kinds.get("unexplained", 0))
        text = "Rows whose object was missing at the last comparison."
        yield GaugeMetricFamily("spard_objects_missing", text, kinds.get("missing", 0))
        waiting = self._count(ObjectIntent.kind != WRITE)
        yield GaugeMetricFamily(
            "spard_object_deletions_pending", "Deletions that the storage has not done yet.", waiting
        )

    def _count(self, *conditions: ColumnElement[bool]) -> int:
        return self._session.scalar(select(func.count()).where(*conditions)) or 0
