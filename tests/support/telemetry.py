"""Telemetry into memory, as OpenTelemetry's SDK has it."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from edit.telemetry import Telemetry, _ids


class InMemory:
    """What a collector would get."""

    def __init__(self) -> None:
        self._exporter, self._reader, ids = InMemorySpanExporter(), InMemoryMetricReader(), _ids()
        spans = TracerProvider(id_generator=ids, shutdown_on_exit=False)
        spans.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(spans, MeterProvider([self._reader], shutdown_on_exit=False), ids)

    def spans(self, name: str) -> list[ReadableSpan]:
        """Those of this name, in the order in which they were ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        """The points of this metric."""
        data: Any = self._reader.get_metrics_data()
        metrics = [metric for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics]
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """When it began and ended, in seconds since 1970."""
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9
