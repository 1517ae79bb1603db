"""Telemetry is off unless it is asked for, and what is recorded reaches the collector that the environment names."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Lock, Thread
from types import SimpleNamespace

import pytest

from edit.command_line import otlp_protocol
from edit.errors import ConfigError
from edit.telemetry import CLOSE_S, Span, telemetry, trace_id
from tests.support.telemetry import InMemory, seconds

VARIABLES = ("ENDPOINT", "TRACES_ENDPOINT", "METRICS_ENDPOINT", "PROTOCOL")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "mine"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_SDK_DISABLED": "TRUE"}, ""),
    ],
)
def test_the_standard_variables_say_whether_and_how(
    environment: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert otlp_protocol() == protocol


def test_off_it_is_nothing_and_nothing_is_imported() -> None:
    code = (
        "import sys, edit.telemetry as t\nwith t.telemetry('', 's', 'r', 'm') as told:\n    assert told is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_it_is_off_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with telemetry("http/protobuf", "edit-peer", "run-1", "a") as told:
        assert told is None
    assert "pip install 'edit-localsgd[otel]'" in caplog.text and len(caplog.records) == 1


def test_a_span_has_its_children_its_error_and_the_trace_of_the_outer_step() -> None:
    memory = InMemory()
    child = Span(name="child", start=11.0, end=12.0)
    memory.telemetry.record(
        Span(name="whole", start=10.0, end=13.0, attributes={"n": 3}, error="lost", children=[child]), trace_id("run-1", 5)
    )
    memory.telemetry.record(Span(name="whole", start=20.0, end=19.0), trace_id("run-1", 6))
    (whole, later), (inner,) = memory.spans("whole"), memory.spans("child")
    assert (seconds(whole), seconds(inner), seconds(later)) == ((10.0, 13.0), (11.0, 12.0), (20.0, 20.0))
    assert dict(whole.attributes or {}) == {"n": 3} and whole.status.description == "lost" and not whole.status.is_ok
    assert whole.context is not None and later.context is not None and inner.parent is not None and whole.parent is None
    assert whole.context.trace_id == trace_id("run-1", 5) == inner.parent.trace_id
    assert inner.parent.span_id == whole.context.span_id and later.context.trace_id == trace_id("run-1", 6)
    assert trace_id("run-2", 5) != trace_id("run-1", 5)


def test_numbers_add_up() -> None:
    memory = InMemory()
    for value in (1.0, 2.0):
        memory.telemetry.add("sent", "By", value, {"part": 0})
        memory.telemetry.measure("took", "s", value, {"part": 0})
    (sent,), (took,) = memory.points("sent"), memory.points("took")
    assert sent.value == 3.0 and (took.count, took.sum) == (2, 3.0)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector on loopback: its URL, and the paths and bodies that were posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_recorded_reaches_the_collector_by_the_end(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, posted = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with telemetry(otlp_protocol(), "edit-peer", "run-1", "peer-a") as told:
        assert told is not None
        told.record(Span(name="exchange", start=1.0, end=2.0), trace_id("run-1", 1))
        told.add("edit.exchange.payload", "By", 7, {})
        for name in ("sdk", "sdk", "exporter", "sdk"):
            logging.getLogger(f"opentelemetry.{name}").warning("no\nroom")
    bodies = dict(posted)
    assert set(bodies) == {"/v1/traces", "/v1/metrics"} and b"exchange" in bodies["/v1/traces"]
    assert all(b"peer-a" in body and b"edit-peer" in body for body in bodies.values())
    said = [record.getMessage() for record in caplog.records if "OpenTelemetry" in record.getMessage()]
    assert said == ["OpenTelemetry: no room; spans and metrics may be lost, the run goes on"] * 2  # once of each logger


def as_before() -> bool:
    theirs = logging.getLogger("opentelemetry")
    return theirs.propagate and not [handler for handler in theirs.handlers if type(handler).__module__ == "edit.telemetry"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "ValueError: interval value 0.0 is invalid and needs to be larger than zero"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1", "ValueError: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer"),
    ],
)
def test_a_variable_that_the_sdk_refuses_is_said_in_one_line(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=f"refuses the environment's OTEL variables: {says}"),
        telemetry("http/protobuf", "edit-peer", "run-1", "a"),
    ):
        pass
    assert as_before()


def test_what_is_not_asked_for_is_not_sent_and_a_default_in_place_of_a_wrong_value_is_no_loss(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, posted = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")
    monkeypatch.delattr("opentelemetry.exporter.otlp.proto.http.metric_exporter.OTLPMetricExporter")
    with telemetry(otlp_protocol(), "edit-peer", "run-1", "a") as told:
        assert told is not None
        told.record(Span(name="exchange", start=1.0, end=2.0), trace_id("run-1", 1))
        told.add("edit.exchange.payload", "By", 7, {})
    assert [path for path, _ in posted] == ["/v1/traces"] and as_before()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("OpenTelemetry: Invalid timeout value '10s'") and "lost" not in said


def test_at_the_end_spans_and_metrics_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Hanging:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None: ...

        def join(self, timeout: float) -> None:
            waits.append(timeout)

        def is_alive(self) -> bool:
            return len(waits) < 2

    monkeypatch.setattr("edit.telemetry.threading", SimpleNamespace(Thread=Hanging, Lock=Lock))
    monkeypatch.setattr("edit.telemetry.time", SimpleNamespace(monotonic=lambda: 100.0 + sum(waits)))
    with telemetry("http/protobuf", "edit-peer", "run-1", "a"):
        pass
    assert waits == [CLOSE_S, 0.0]
