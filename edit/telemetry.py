"""OpenTelemetry: spans and metrics of rounds and exchanges, for whoever's collector the standard variables name.

Off unless an OTLP endpoint is set in the environment (`edit.command_line.otlp_protocol`) and the extra `otel` is installed;
opentelemetry is imported nowhere else, and here only then. A collector that is slow or away costs spans: the SDK has threads
and a bounded queue, its complaints are logged once, and at the end it is waited for at most CLOSE_S. Spans and metrics are sent
only where their own or the general endpoint is set.

Nothing of it is on the wire between members. Spans of the same outer step of a run meet all the same, whoever's they are: the
id of their trace follows from the run and the step.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import edit
from edit.errors import ConfigError

__all__ = ["CLOSE_S", "Attributes", "Span", "Telemetry", "telemetry", "trace_id"]

CLOSE_S = 5.0
_NAME = "edit"  # of the instrumentation
_log = logging.getLogger(__name__)
Attributes = dict[str, str | bool | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time. start, end: in seconds since 1970."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # why it came to nothing; empty: it did not
    children: Sequence[Span] = ()


def trace_id(run_id: str, outer_step: int) -> int:
    """Return the 128 bits under which all members' spans of the attempts to take this outer step are found."""
    return int.from_bytes(sha256(f"{run_id}/{outer_step}".encode()).digest()[:16], "big") or 1


class Telemetry:
    """Hands spans and numbers to OpenTelemetry's SDK. Safe in any thread; returns at once.

    Args:
        spans, metrics: the SDK's TracerProvider, made with `ids`, and MeterProvider.
        ids: gives a span without a parent the id of its trace.
    """

    def __init__(self, spans: Any, metrics: Any, ids: _Ids) -> None:
        self._tracer = spans.get_tracer(_NAME, edit.__version__)
        self._meter = metrics.get_meter(_NAME, edit.__version__)
        self._ids, self._lock = ids, threading.Lock()
        self._instruments: dict[str, Any] = {}

    def record(self, span: Span, trace: int) -> None:
        """Record a span and its children under this id of a trace."""
        from opentelemetry.context import Context

        with self._lock:
            self._ids.trace = trace
            self._record(span, Context())

    def _record(self, span: Span, context: Any) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        start = _nanoseconds(span.start)
        recorded = self._tracer.start_span(span.name, context, attributes=dict(span.attributes), start_time=start)
        for child in span.children:
            self._record(child, set_span_in_context(recorded))
        if span.error:
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        recorded.end(max(start, _nanoseconds(span.end)))  # the clock may have been set back

    def add(self, name: str, unit: str, value: float, attributes: Attributes) -> None:
        """Add to a counter."""
        self._instrument("create_counter", name, unit).add(value, dict(attributes))

    def measure(self, name: str, unit: str, value: float, attributes: Attributes) -> None:
        """Add a value to a distribution."""
        self._instrument("create_histogram", name, unit).record(value, dict(attributes))

    def _instrument(self, create: str, name: str, unit: str) -> Any:
        with self._lock:
            if name not in self._instruments:
                self._instruments[name] = getattr(self._meter, create)(name, unit=unit)
            return self._instruments[name]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _Ids:
    """The SDK's random ids, and of a trace the one that `Telemetry` has set. Made by `_ids`, where the SDK is imported."""

    trace: int


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        trace = 1

        def generate_trace_id(self) -> int:
            return self.trace

    return Ids()


class _Complaints(logging.Handler):
    """Passes on the SDK's complaints, each as one line: all about the variables, later the first of each of its loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.consequence = ""  # of what it complains about
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())[:300]
        once = record.name if self.consequence else text
        if once not in self._said:
            self._said.add(once)
            _log.warning("OpenTelemetry: %s%s", text, self.consequence)


def _is_set(kind: str) -> bool:
    """Return whether the variables name a collector of these."""
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", f"{kind}_"))


@contextmanager
def telemetry(protocol: str, service: str, run_id: str, member: str) -> Iterator[Telemetry | None]:
    """Yield the telemetry of this process, and end it; None: there is none.

    Args:
        protocol: of `edit.command_line.otlp_protocol`; empty: off.
        service: of the process, where OTEL_SERVICE_NAME names no other.
        run_id, member: attributes of all that it sends.

    Raises ConfigError for a variable that the SDK refuses.
    """
    if not protocol:
        yield None
        return
    try:
        package = f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"
        of_metrics, of_traces = (importlib.import_module(f"{package}.{kind}_exporter") for kind in ("metric", "trace"))
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("an OTLP endpoint is set, and nothing is sent to it (%s): pip install 'edit-localsgd[otel]'", error)
        yield None
        return
    theirs, complaints = logging.getLogger("opentelemetry"), _Complaints()
    theirs.addHandler(complaints)
    theirs.propagate = False
    ending: list[threading.Thread] = []
    try:
        try:
            resource = Resource.create({"edit.run_id": run_id, "edit.member": member})
            if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
                resource = resource.merge(Resource({"service.name": service, "service.version": edit.__version__}))
            ids = _ids()
            spans = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
            if _is_set("TRACES"):
                spans.add_span_processor(BatchSpanProcessor(of_traces.OTLPSpanExporter()))
            readers = [PeriodicExportingMetricReader(of_metrics.OTLPMetricExporter())] if _is_set("METRICS") else []
            metrics = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        except Exception as error:  # of many kinds, all about variables: nothing else is given
            text = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"OpenTelemetry refuses the environment's OTEL variables: {type(error).__name__}: {text}"
            ) from error
        complaints.consequence = "; spans and metrics may be lost, the run goes on"
        ending += [threading.Thread(target=each.shutdown, daemon=True) for each in (spans, metrics)]
        yield Telemetry(spans, metrics, ids)
    finally:
        until = time.monotonic() + CLOSE_S
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in ending):  # else they may complain still
            theirs.propagate = True
            theirs.removeHandler(complaints)
