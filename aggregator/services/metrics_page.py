"""/metrics, /healthz and /readyz over plain HTTP, on an address that the operator chooses; off by default.

It answers GET without a body and closes the connection: what is asked is bounded in size, time and number, and a scrape costs
the run one reading of its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from aggregator.control.run import Run
from aggregator.control.status import run_status
from edit.config.run import is_address
from edit.errors import ConfigError
from edit.plain_text import reason_of
from editpb.messages import RunPhase
from editpb.run_status import MemberStatus, RunStatus

__all__ = ["MetricsPage", "RunCollector", "run_metrics"]

_REQUEST_BYTES = 8192
_REQUEST_S = 5.0  # from the connection to the end of the answer
_CONNECTIONS = 32  # at a time
_Value = Callable[[MemberStatus], float]
_LIVE = ("starting", "training", "exchanging")


class RunCollector:
    """The metrics of a run, as Prometheus collects them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its present values; losses only if the run shares them."""
        run, history = self._run, self._run.history
        status = run_status(run, brief=True).shown_to("observer", "", run.config.membership.share_losses)
        yield from run_metrics(status, history.committed, history.aborted, history.traffic)


def run_metrics(status: RunStatus, committed: int, aborted: int, traffic: tuple[int, int]) -> Iterator[Metric]:
    """Yield every metric of a run; one whose value is not known has no sample.

    Args:
        committed, aborted: rounds of this process.
        traffic: bytes of contributions, and of updates as one peer fetches them.
    """
    info = GaugeMetricFamily("edit_run_info", "1, with the run's id", labels=["run_id"])
    info.add_metric([status.run_id], 1)
    yield info
    phases = GaugeMetricFamily("edit_phase", "1 for the phase that the run is in", labels=["phase"])
    for phase in RunPhase:
        phases.add_metric([phase.value], phase.value == status.phase)
    yield phases
    last = next((report for report in reversed(status.rounds) if report.committed), None)
    for name, text, value in (
        ("outer_step", "The last committed outer step", status.outer_step),
        ("outer_steps", "The outer step at which the run ends", status.outer_steps),
        ("eta_seconds", "Seconds until the run's end, from the pace of the last outer steps", status.eta_s),
        ("parameters", "Elements of the model", status.parameters),
        ("expected_peers", "Peers that the open round waits for, or has waited for", len(status.expected)),
        ("arrived_peers", "Peers whose contribution to the open round is complete", len(status.arrived)),
        ("held_up", "1 while the run cannot go on as it stands", bool(status.reason)),
        ("warnings", "Warnings about its certificates and clock", len(status.warnings)),
        ("peak_memory_bytes", "The largest resident size of this process", status.peak_memory_bytes),
        ("round_seconds", "Duration of the last committed round", last.seconds if last else None),
        ("epsilon", "Epsilon spent so far, with differential privacy of organisations", status.epsilon),
        ("merged_norm", "Norm of the last merged pseudo-gradient, before the clip", last.norm if last else None),
        (
            "cosine",
            "Mean cosine of the pseudo-gradients to the merged one",
            last.cosine if last else None,
        ),
    ):
        gauge = GaugeMetricFamily(f"edit_{name}", text, labels=[])
        if value is not None and math.isfinite(value):
            gauge.add_metric([], value)
        yield gauge
    yield CounterMetricFamily("edit_tokens", "Tokens merged so far", value=status.tokens)
    rounds = CounterMetricFamily("edit_rounds", "Rounds closed since this process began to serve the run", labels=["result"])
    rounds.add_metric(["committed"], committed)
    rounds.add_metric(["aborted"], aborted)
    yield rounds
    received, sent = traffic
    yield CounterMetricFamily("edit_received_bytes", "Bytes of contributions to committed rounds", value=received)
    yield CounterMetricFamily("edit_update_bytes", "Bytes of the updates, as one peer downloads them", value=sent)
    yield from _of_members(status.members)


def _of_members(members: tuple[MemberStatus, ...]) -> Iterator[Metric]:
    """Yield the metrics that each member has."""
    gauges: dict[str, tuple[str, _Value]] = {
        "up": ("1 while the member is connected", lambda one: one.state in _LIVE),
        "outer_step": ("Outer step of its outer parameters", lambda one: one.outer_step),
        "loss": ("Its training loss, if the run shares it", lambda one: one.loss),
        "tokens_per_second": ("Tokens per second of its training", lambda one: one.tokens_per_s if one.state in _LIVE else 0.0),
        "step_seconds": ("Seconds per inner step", lambda one: one.step_s),
        "silent_seconds": ("Seconds since its last sign of life", lambda one: one.silent_s),
        "optional": ("1 while rounds do not wait for it", lambda one: one.optional),
        "quarantined_seconds": ("Seconds for which it is still kept out of the rounds", lambda one: one.quarantined_s),
        "certificate_expiry_timestamp_seconds": ("When its newest certificate expires", lambda one: one.expires or math.nan),
    }
    counters: dict[str, tuple[str, _Value]] = {
        "contributions": ("Contributions merged with a weight", lambda one: one.contributions),
        "rejections": ("Contributions merged with weight 0", lambda one: one.rejections),
        "absences": ("Rounds committed without it while it was expected", lambda one: one.absences),
        "sent_bytes": ("Bytes sent on its data connection, since its process started", lambda one: one.bytes_sent),
        "received_bytes": ("Bytes received on its data connection, since its process started", lambda one: one.bytes_received),
    }
    trains = [one for one in members if one.role in ("peer", "region")]
    for name, (text, of) in gauges.items():
        gauge = GaugeMetricFamily(f"edit_member_{name}", text, labels=["member"])
        for one in trains:
            if math.isfinite(value := float(of(one))):
                gauge.add_metric([one.peer_id], value)
        yield gauge
    for name, (text, of) in counters.items():
        counter = CounterMetricFamily(f"edit_member_{name}", text, labels=["member"])
        for one in trains:
            counter.add_metric([one.peer_id], of(one))
        yield counter
    shares = GaugeMetricFamily("edit_member_time_share", "Share of its time, 0 to 1", labels=["member", "doing"])
    for one in trains:
        for doing, share in (("computing", one.computing), ("exchanging", one.exchanging), ("waiting", one.waiting)):
            shares.add_metric([one.peer_id, doing], share)
    yield shares


class MetricsPage:
    """Serves the three pages. `start` it before what it tells of recovers: it answers /healthz from then on.

    Args:
        collector: what /metrics shows.
        address: HOST:PORT; port 0 chooses one.
        is_ready: whether members can connect, for /readyz.
        named: the setting or option that gave the address, for errors.

    Raises ConfigError for an address that is none.
    """

    def __init__(self, collector: Collector, address: str, is_ready: Callable[[], bool], *, named: str) -> None:
        if not is_address(address):
            raise ConfigError(
                f"{named} {address!r:.80}: must be HOST:PORT, with an IPv6 address in brackets; port 0 chooses one"
            )
        self._address, self._is_ready, self._named = address, is_ready, named
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.listen = ""  # HOST:PORT, once bound

    async def start(self) -> None:
        """Bind the port. Raises ConfigError when it cannot be bound."""
        host, _, port = self._address.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._connected, host.strip("[]"), int(port), limit=_REQUEST_BYTES)
        except (OSError, ValueError) as error:  # ValueError, as UnicodeError: of a name that no host can have
            why = reason_of(error)
            raise ConfigError(f"{self._named}: {self._address} cannot be bound ({why}); choose another address") from error
        self.listen = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop to answer."""
        if self._server is not None:
            self._server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) <= _CONNECTIONS:
                with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
                    async with asyncio.timeout(_REQUEST_S):
                        writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                        await writer.drain()
        finally:
            self._open.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    def _answer(self, request: bytes) -> bytes:
        """Return the whole response to the head of a request."""
        method, _, rest = request.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain", b"GET only\n"
        elif path == b"/metrics":
            status, kind, body = "200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry)
        elif path == b"/healthz":
            status, kind, body = "200 OK", "text/plain", b"ok\n"
        elif path == b"/readyz":
            status, kind, body = "503 Service Unavailable", "text/plain", b"starting\n"
            if self._is_ready():
                status, body = "200 OK", b"ok\n"
        else:
            status, kind, body = "404 Not Found", "text/plain", b"/metrics, /healthz, /readyz\n"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + (b"" if method == b"HEAD" else body)
