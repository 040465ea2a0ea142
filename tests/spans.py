"""Spans that are kept in memory: recording is switched on for the whole process by the first test that asks."""

from __future__ import annotations

from functools import cache

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@cache
def exporter() -> InMemorySpanExporter:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


def of_trace(trace_id: str) -> list[ReadableSpan]:
    """The ended spans of one trace, in the order in which they began."""
    spans = [span for span in exporter().get_finished_spans() if f"{span.context.trace_id:032x}" == trace_id]
    return sorted(spans, key=lambda span: span.start_time or 0)
