"""OpenTelemetry traces: a request, the attempts of the job that it created, and the stages of each attempt.

FastAPI creates the spans of requests. Spans cost almost nothing until a process calls `set_up` and
OTEL_EXPORTER_OTLP_ENDPOINT names a collector. A job's row stores the request's `traceparent`, so a worker that runs the
job hours later continues the same trace. Children send no spans: their parent sees their stages begin and end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AnyValue

from app.errors import Unfit

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FIELD = "traceparent"


def set_up(service: str) -> None:
    """Export this process's spans to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, if it is set.

    Raises `Unfit` if the exporter's packages are not installed.
    """
    if not os.environ.get(_ENDPOINT):
        return
    try:  # an extra: most deployments have no collector
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise Unfit(f"{_ENDPOINT} is set, but not all packages are there: pip install 'spard[otel]'.") from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def continue_trace(name: str, traceparent: str | None, job_id: str, attempt: int) -> Iterator[Span]:
    """Open a span for an attempt, in the trace of the job's request, or in a new trace without a `traceparent`."""
    attributes: dict[str, AnyValue] = {"spard.job_id": job_id, "spard.attempt": attempt}
    parent = TraceContextTextMapPropagator().extract({_FIELD: traceparent} if traceparent else {})
    with tracer().start_as_current_span(name, parent, SpanKind.CONSUMER, attributes) as span:
        yield span


def traceparent() -> str | None:
    """Return the `traceparent` header of the current span; None if nothing is recorded."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_FIELD)


def tracer() -> Tracer:
    """Return the process's tracer, which records nothing before `set_up`."""
    return trace.get_tracer("spard")
