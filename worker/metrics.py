"""Service metrics of a worker, on a port of its own: attempts, stages, lost leases, and whether its GPU works."""

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
    """Counted since the worker started; for all its threads."""

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
        """Whether all that every job needs works, as far as is known."""
        return self._is_fit

    @is_fit.setter
    def is_fit(self, is_fit: bool) -> None:
        self._is_fit = is_fit
        self._fit.set(is_fit)

    def note_trouble(self, what: str, *, is_there: bool) -> None:
        """Show what keeps the worker from jobs: disk, gpu, judge, models or storage."""
        self._troubles.labels(what).set(is_there)
        self._troubled = self._troubled | {what} if is_there else self._troubled - {what}

    @property
    def current_troubles(self) -> frozenset[str]:
        """What keeps the worker from jobs at the moment."""
        return self._troubled

    def note_attempt(self, outcome: str, seconds: float) -> None:
        """Count an attempt by the job's status when we left it, or `lost` when another worker had it."""
        self._attempts.labels(outcome).observe(seconds)
        if outcome == LOST:
            self._refusals.inc()

    def note_rescue(self) -> None:
        """Count a job that was taken up after its last worker had died or frozen."""
        self._rescues.inc()

    def note_decision(self, decision: str) -> None:
        """Count what the gate decided of a job: pass, fail, inconclusive or waived."""
        self._decisions.labels(decision).inc()

    def note_judge_failure(self) -> None:
        """Count that a judge did not answer: the audit waits, or the attempt ends."""
        self._judge_failures.inc()

    def note_stage(self, stage: str, seconds: float) -> None:
        """Count one stage of an attempt."""
        self._stages.labels(stage).observe(seconds)


class StageClock:
    """The stages of an attempt as the parent sees them: each is a span of the trace and a service metric.

    `begin` ends the stage before; spans belong to the one that is current when their stage begins.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._now: tuple[str, float, Span] | None = None

    def begin(self, stage: str) -> None:
        """End the stage before, if any, and begin this one."""
        self.end()
        self._now = stage, time.monotonic(), tracing.tracer().start_span(f"stage {stage}")

    def note_judge_failure(self) -> None:
        """Count that the judge of the audit did not answer."""
        self._metrics.note_judge_failure()

    def end(self) -> None:
        """End the stage, if one runs."""
        if self._now:
            stage, began, span = self._now
            span.end()
            self._metrics.note_stage(stage, time.monotonic() - began)
            self._now = None


@contextmanager
def serve_metrics(metrics: WorkerMetrics, port: int | None) -> Iterator[None]:
    """Serve `/metrics` on a port while the block runs; it needs no key: keep it within your network.

    `Unfit` where another program has the port.
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
