"""Prometheus metrics of a worker, on a port of its own: attempts, stages, lost leases and broken resources."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import prometheus_client
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from app.errors import Unfit
from app.ops import tracing

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # when a series began: nobody reads it

LOST = "lost"


class WorkerMetrics:
    """The metrics of one worker since it started; all methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._refusals = Counter(
            "spard_lease_refusals", "Attempts whose lease was somebody else's.", registry=self.registry
        )
        self._rescues = Counter(
            "spard_jobs_rescued",
            "Jobs that this worker took up after their last worker had died or frozen.",
            registry=self.registry,
        )
        self._fit = Gauge(
            "spard_worker_fit",
            "1 while the worker takes jobs, 0 while something that it needs is broken.",
            registry=self.registry,
        )
        self._troubles = Gauge(
            "spard_worker_trouble", "1 while this keeps the worker from jobs.", ["what"], registry=self.registry
        )
        self._attempts = Summary(
            "spard_attempt_seconds", "Attempts by how they ended.", ["outcome"], registry=self.registry
        )
        self._stages = Summary("spard_stage_seconds", "Stages of attempts.", ["stage"], registry=self.registry)
        self._decisions = Counter(
            "spard_gate_decisions", "Audited jobs by what the gate decided.", ["decision"], registry=self.registry
        )
        self._judge_failures = Counter(
            "spard_judge_failures", "Times that the judge of an audit did not answer.", registry=self.registry
        )
        self.is_fit = True
        self._troubled = frozenset[str]()

    @property
    def is_fit(self) -> bool:
        """Return True while no resource that every job needs is known to be broken."""
        return self._is_fit

    @is_fit.setter
    def is_fit(self, is_fit: bool) -> None:
        self._is_fit = is_fit
        self._fit.set(is_fit)

    def note_trouble(self, what: str, *, is_there: bool) -> None:
        """Record that a resource is broken or works again: disk, gpu, judge, models or storage."""
        self._troubles.labels(what).set(is_there)
        self._troubled = self._troubled | {what} if is_there else self._troubled - {what}

    @property
    def current_troubles(self) -> frozenset[str]:
        """The resources that are broken now."""
        return self._troubled

    def note_attempt(self, outcome: str, seconds: float) -> None:
        """Count an attempt by the job's status at its end, or as `lost` when another worker had the lease."""
        self._attempts.labels(outcome).observe(seconds)
        if outcome == LOST:
            self._refusals.inc()

    def note_rescue(self) -> None:
        """Count a job that was taken up after its last worker had died or frozen."""
        self._rescues.inc()

    def note_decision(self, decision: str) -> None:
        """Count the gate's decision on a job: pass, fail, inconclusive or waived."""
        self._decisions.labels(decision).inc()

    def note_judge_failure(self) -> None:
        """Count one time that a judge did not answer."""
        self._judge_failures.inc()

    def note_stage(self, stage: str, seconds: float) -> None:
        """Count one stage of an attempt."""
        self._stages.labels(stage).observe(seconds)


class StageClock:
    """Times the stages of an attempt in the parent process: each becomes a trace span and a service metric.

    A stage's span is a child of the span that is current when the stage begins.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._now: tuple[str, float, Span] | None = None

    def begin(self, stage: str) -> None:
        """End the running stage, if any, and begin `stage`."""
        self.end()
        self._now = stage, time.monotonic(), tracing.tracer().start_span(f"stage {stage}")

    def note_judge_failure(self) -> None:
        """Add one to the count of questions that the audit's judge did not answer."""
        self._metrics.note_judge_failure()

    def end(self) -> None:
        """End the running stage, if any."""
        if self._now:
            stage, began, span = self._now
            span.end()
            self._metrics.note_stage(stage, time.monotonic() - began)
            self._now = None


@contextmanager
def serve_metrics(metrics: WorkerMetrics, port: int | None) -> Iterator[None]:
    """Serve `/metrics` on a port while the block runs; do nothing if `port` is None.

    The route needs no key, so keep the port inside your network. Raises `Unfit` if the port is taken.
    """
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, registry=metrics.registry)
    except OSError as error:
        text = f"SPARD_METRICS_PORT is {port}, where this worker cannot listen: {error.strerror}."
        raise Unfit(f"{text} Each worker of a machine needs a port of its own.") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
