"""How fast contributions, updates and snapshots go over a long fat link, beside raw TCP over the same link; and how late
heartbeats are while data fills a slow one.

The coordinator is a process, the link (`edit.lab.link`) another, the peer is in the process that measures; mutual TLS
throughout. The proxy delays what HTTP/2 sees, and not TCP: see `edit.lab.link`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing as mp
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Group
from rich.table import Table

from edit.codecs import codec
from edit.errors import TransportError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.fragments.shards import Shard
from edit.lab.bench.measured_run import MeasuredRun
from edit.lab.bench.results import Row, circumstances, figure_note, results_table
from edit.lab.joining import enrol, lead_through
from edit.lab.link import Link, LinkShape
from edit.lab.observer import open_observer
from edit.lab.run_toml import Settings
from edit.records import Committed, Contribution, EncodedTensor, Progress
from edit.view import charts
from editpb import control_pb2, control_pb2_grpc
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Traffic
from peers.identity.peer_folder import PeerFolder

__all__ = [
    "PARTS",
    "Delays",
    "LinkOptions",
    "LinkRates",
    "heartbeat_delays",
    "link_rates",
    "measure_links",
    "picture",
    "table",
]

PARTS = ("throughput", "heartbeats")

_CODEC = "fp32"
_CHUNK = 1 << 18
_BEAT_S = 0.25  # between two heartbeats that are timed
_LOOK_S = 0.01  # how often the coordinator is asked what it has heard
_WITHIN_S = 600.0  # that a contribution may take, over links that are not slow
_QUEUE_BYTES = 256 << 10  # in front of a fat link


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates in Mbit/s of payload, one for each repetition in order: the first is that of connections that were just made."""

    mbit: float
    rtt_s: float
    payload_bytes: int
    fragments: int
    raw_up: tuple[float, ...]
    raw_down: tuple[float, ...]
    contribution: tuple[float, ...]
    update: tuple[float, ...]
    snapshot: tuple[float, ...]

    def share(self, what: str) -> float:
        """Return the median rate of "contribution", "update" or "snapshot", without the first, as a share of raw TCP's."""
        raw = self.raw_up if what == "contribution" else self.raw_down
        return _steady(getattr(self, what)) / _steady(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds from the moment a peer says a heartbeat to the moment the coordinator has it."""

    mbit: float
    rtt_s: float
    queue_bytes: int
    idle_s: tuple[float, ...]
    busy_s: tuple[float, ...]  # while a contribution goes up and snapshots come down
    up_mbit: float  # of the contribution meanwhile
    down_mbit: float  # of the snapshots meanwhile


def _steady(rates: Sequence[float]) -> float:
    return statistics.median(rates[1:] or rates)


def link_rates(
    shape: LinkShape, *, payload_bytes: int = 100_000_000, fragments: int = 12, repeats: int = 4, folder: Path | None = None
) -> LinkRates:
    """Measure one link; `shape` is equally fast in both directions.

    Args:
        payload_bytes: of one contribution, one update, one snapshot.
        fragments: of equal size, that they consist of.
        repeats: how often each is measured.
        folder: for the run, empty or not there yet; None: a temporary one.

    Raises TransportError where a contribution is not sent in time, or its round comes to nothing.
    """
    schema = _schema(payload_bytes, fragments)
    raw_up, raw_down = _raw(shape, 4 * schema.numel, repeats)
    with _scratch(folder) as at, _peer(at, shape, schema) as (_, io, collective, data):
        contribution, update, snapshot, payloads = [], [], [], _payloads(schema)
        for _repeat in range(repeats):
            began = time.perf_counter()
            step = _contribute(collective, payloads)
            _wait_sent(io, collective, _within_s(shape, schema))
            contribution.append(time.perf_counter() - began)
            _check_committed(collective, step)
            shards = tuple(Shard(fragment) for fragment in schema.fragments)
            assembly = UpdateAssembly(schema, step + 1, range(fragments), shards)
            update.append(_timed(lambda: io.call(data.update(assembly, lambda: True, lambda: None))))  # noqa: B023
            snapshot.append(_timed(collective.snapshot))
    bits = 32e-6 * schema.numel

    def rates(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(round(bits / each, 1) for each in seconds)

    return LinkRates(
        mbit=shape.up_bits_per_s / 1e6,
        rtt_s=2 * shape.latency_s,
        payload_bytes=4 * schema.numel,
        fragments=fragments,
        raw_up=rates(raw_up),
        raw_down=rates(raw_down),
        contribution=rates(contribution),
        update=rates(update),
        snapshot=rates(snapshot),
    )


def heartbeat_delays(
    shape: LinkShape, *, payload_bytes: int = 25_000_000, fragments: int = 12, idle_s: float = 5.0, folder: Path | None = None
) -> Delays:
    """Measure the heartbeats of a peer while its contribution goes up and snapshots come down, all over one link.

    idle_s: how long they are measured before, while nothing else is on the link. Raises TransportError as `link_rates`.
    """
    schema = _schema(payload_bytes, fragments)
    with (
        _scratch(folder) as at,
        _peer(at, shape, schema) as (state, io, collective, data),
        _Beats(collective, state) as beats,
    ):
        time.sleep(idle_s)
        idle, payloads = beats.take(), _payloads(schema)
        ended, downs = threading.Event(), [0]

        def read_snapshots() -> None:
            while not ended.is_set():
                manifest = io.call(data.describe(schema, lambda: True))
                for fragment in schema.fragments:
                    if not ended.is_set():
                        io.call(data.snapshot(manifest, [Shard(fragment)], lambda: not ended.is_set()))
                        downs[0] += 4 * fragment.numel

        reading = threading.Thread(target=read_snapshots, name="snapshots")
        reading.start()
        try:
            began = time.perf_counter()
            step = _contribute(collective, payloads)
            _wait_sent(io, collective, _within_s(shape, schema))
            seconds, down = time.perf_counter() - began, downs[0]
            busy = beats.take()
        finally:
            ended.set()
            reading.join()
        _check_committed(collective, step)
    return Delays(
        mbit=shape.up_bits_per_s / 1e6,
        rtt_s=2 * shape.latency_s,
        queue_bytes=shape.queue_bytes,
        idle_s=idle,
        busy_s=busy,
        up_mbit=round(32e-6 * schema.numel / seconds, 2),
        down_mbit=round(8e-6 * down / seconds, 2),
    )


# ---- a run with one peer ---------------------------------------------------------------------------------------------------


def _schema(payload_bytes: int, fragments: int) -> Schema:
    numel = payload_bytes // 4 // fragments
    tensors = (TensorSpec(name=f"blocks.{i}.weight", shape=(numel,)) for i in range(fragments))
    return Schema(tuple(FragmentSpec(fragment_id=i, name=f"blocks.{i}", tensors=(t,)) for i, t in enumerate(tensors)))


@contextlib.contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


@contextlib.contextmanager
def _peer(folder: Path, shape: LinkShape, schema: Schema) -> Iterator[tuple[Path, IoThread, HubCollective, DataCalls]]:
    """Yield the coordinator's folder, and a peer in this process that has joined through a link of this shape."""
    within_s = _within_s(shape, schema)
    settings: Settings = {
        "name": "links",
        "model": {"name": "entry:mine"},
        "sync": {"every": 1, "outer_steps": 1000},
        "penalty": {"enabled": False},
        "codec": {"up": _CODEC, "down": _CODEC},
        "rounds": {"start_peers": 1, "quorum": 1, "floor_s": within_s, "ceiling_s": within_s},
        "storage": {"checkpoint_every": 1000, "keep_updates": 1, "buffer_bytes": 8 << 30},
        "membership": {"heartbeat_s": 2.0, "lease_s": 60.0},
    }
    home = folder / "peer"
    with MeasuredRun(folder, settings, folder) as run:
        enrol(run.state, "peer", home)
        with _link(("127.0.0.1", run.port), shape) as port, IoThread() as io:
            lead_through(home, port)
            enrolled = PeerFolder(home).load(time.time())
            channels = Channels(enrolled.endpoints, enrolled.credentials)
            collective = HubCollective(io, channels, enrolled.identity)
            collective.join(schema, lambda: [torch.zeros(fragment.numel) for fragment in schema.fragments])
            try:
                yield run.state, io, collective, DataCalls(channels, enrolled.identity.run_id, Traffic())
            finally:
                collective.close("measured")


def _payloads(schema: Schema) -> list[EncodedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        codec(_CODEC).encode(torch.empty(each.numel).normal_(0, 1e-3, generator=generator), each) for each in schema.fragments
    ]


def _contribute(collective: HubCollective, payloads: Sequence[EncodedTensor]) -> int:
    """Contribute to the next outer step, and return the one before it."""
    view = collective.last_view
    assert view is not None
    for i, payload in enumerate(payloads):
        collective.contribute(Contribution(outer_step=view.outer_step, fragment_id=i, inner_steps=1, tokens=1, payload=payload))
    return view.outer_step


def _within_s(shape: LinkShape, schema: Schema) -> float:
    """Return how long a contribution may take: at least three times as long as its bytes do."""
    return max(_WITHIN_S, 3 * 32 * schema.numel / shape.up_bits_per_s)


def _wait_sent(io: IoThread, collective: HubCollective, within_s: float) -> None:
    """Wait until a contribution is sent. Raises TransportError where it takes longer."""
    if io.wait(lambda: None if collective.sending else True, timeout=within_s) is None:
        raise TransportError(f"a contribution was not sent within {within_s:.0f} s")


def _check_committed(collective: HubCollective, step: int) -> None:
    """Raise TransportError unless the outer step after this one has what was contributed."""
    outcome = collective.outcome(step, block=True)
    if not isinstance(outcome, Committed):
        raise TransportError(f"a measured round came to nothing: {outcome}")


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class _Beats:
    """Context manager: a peer says heartbeats with the time of day in them, and the coordinator is asked what it has heard."""

    def __init__(self, collective: HubCollective, state: Path) -> None:
        self._collective, self._state = collective, state
        self._said: list[int] = []  # milliseconds of the monotonic clock
        self._delays: list[float] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work, name=work.__name__) for work in (self._say, self._listen)]

    def __enter__(self) -> _Beats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> tuple[float, ...]:
        """Return the delays since the last call. One that is still under way counts as long as it is by now."""
        delays, self._delays = self._delays, []
        late = [time.monotonic() - said / 1e3 for said in self._said[-100:]]
        return tuple(round(each, 3) for each in (*delays, *(each for each in late if each > 2 * _BEAT_S)))

    def _say(self) -> None:
        view = self._collective.last_view
        assert view is not None
        while not self._ended.wait(_BEAT_S):
            now = int(1e3 * time.monotonic())
            digest = "" if len(self._said) % 2 else view.digest  # another than before, so that it is said at once
            self._said.append(now)
            self._collective.report(
                Progress(
                    outer_step=view.outer_step,
                    digest=digest,
                    exchanging=self._collective.sending,
                    inner_steps=now,
                    round_inner_steps=0,
                )
            )

    def _listen(self) -> None:
        observer = open_observer(self._state)
        stub: Any = control_pb2_grpc.ControlStub(observer.control)
        try:
            while not self._ended.wait(_LOOK_S):
                with contextlib.suppress(grpc.RpcError):
                    reply = stub.Status(control_pb2.StatusRequest(rounds_after=1 << 62), timeout=5.0)
                    heard, now = max(member.heartbeat.inner_steps for member in reply.members), time.monotonic()
                    while self._said and self._said[0] <= heard:
                        self._delays.append(now - self._said.pop(0) / 1e3)
        finally:
            observer.close()


# ---- processes -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[int]:
    """Run `target(*arguments, pipe)` in a process of its own; yield the port that it says."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _link(target: tuple[str, int], shape: LinkShape) -> contextlib.AbstractContextManager[int]:
    """Yield the port of a link to `target`, in a process of its own."""
    return _process(_carry, target, shape)


def _carry(target: tuple[str, int], shape: LinkShape, pipe: Connection) -> None:
    with Link(target, shape) as link:
        pipe.send(link.port)
        with contextlib.suppress(EOFError):
            pipe.recv()  # never comes: the process is killed, or its parent has died


# ---- raw TCP ---------------------------------------------------------------------------------------------------------------


def _raw(shape: LinkShape, payload_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return seconds for so many bytes up, and down, over one plain TCP connection through the link."""
    with (
        _process(_answer, payload_bytes) as target,
        _link(("127.0.0.1", target), shape) as port,
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        up, down = [], []
        for _repeat in range(repeats):
            began = time.perf_counter()
            _send(connection, payload_bytes)
            _receive(connection, 1)
            up.append(time.perf_counter() - began)
            began = time.perf_counter()
            connection.sendall(b"?")
            _receive(connection, payload_bytes)
            down.append(time.perf_counter() - began)
    return up, down


def _answer(payload_bytes: int, pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection, contextlib.suppress(EOFError):
            while True:
                _receive(connection, payload_bytes)
                connection.sendall(b"!")
                _receive(connection, 1)
                _send(connection, payload_bytes)


def _send(connection: socket.socket, count: int) -> None:
    piece = bytes(_CHUNK)
    for start in range(0, count, _CHUNK):
        connection.sendall(piece[: min(_CHUNK, count - start)])


def _receive(connection: socket.socket, count: int) -> None:
    while count:
        if not (data := connection.recv(min(count, _CHUNK))):
            raise EOFError
        count -= len(data)


# ---- the command -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What is measured: throughput for each round-trip time, heartbeats over a slow link for each of its own and each queue."""

    parts: Sequence[str] = PARTS
    mbit: float = 1000.0
    rtts_s: Sequence[float] = (0.0, 0.02, 0.1, 0.2)
    payload_bytes: int = 100_000_000
    fragments: int = 12
    repeats: int = 4
    slow_mbit: float = 10.0
    slow_rtts_s: Sequence[float] = (0.02, 0.1)
    queues_kib: Sequence[int] = (64, 256, 1024)
    label: str = ""


def measure_links(options: LinkOptions, each: Callable[[Row], None]) -> list[Row]:
    """Return one row for each link. each: is called with every row as soon as it is measured. Raises as `link_rates`."""
    rows: list[Row] = []
    for begins, figures in _figures(options):
        rows.append({**begins, **dataclasses.asdict(figures)})
        each(rows[-1])
    return rows


def _figures(options: LinkOptions) -> Iterator[tuple[dict[str, Any], LinkRates | Delays]]:
    if "throughput" in options.parts:
        for rtt_s in options.rtts_s:
            begins = circumstances(options.label)
            shape = _shape(options.mbit, rtt_s, _QUEUE_BYTES)
            size, fragments, repeats = options.payload_bytes, options.fragments, options.repeats
            yield begins, link_rates(shape, payload_bytes=size, fragments=fragments, repeats=repeats)
    if "heartbeats" in options.parts:
        for rtt_s in options.slow_rtts_s:
            for queue_kib in options.queues_kib:
                begins = circumstances(options.label)
                yield begins, heartbeat_delays(_shape(options.slow_mbit, rtt_s, queue_kib << 10))


def _shape(mbit: float, rtt_s: float, queue_bytes: int) -> LinkShape:
    """Return a link that is equally fast in both directions."""
    return LinkShape(up_bits_per_s=1e6 * mbit, down_bits_per_s=1e6 * mbit, latency_s=rtt_s / 2, queue_bytes=queue_bytes)


# ---- for people --------------------------------------------------------------------------------------------------------------

_WHAT = ("contribution", "update", "snapshot")
_BUSY = "Busy: while a contribution goes up and snapshots come down."
_NOTE = "Mutual TLS. HTTP/2 sees the link's delay, TCP does not."


def table(rows: Sequence[Row]) -> Group:
    """Return the rows as a table of throughput and one of heartbeats."""
    fat, slow = _split(rows)
    tables = [_rates_table(fat)] if fat else []
    return Group(*tables, *([_delays_table(slow)] if slow else []))


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if "raw_up" in row], [row for row in rows if "busy_s" in row]


def _rates_table(rows: Sequence[Row]) -> Table:
    head = ("\nRTT ms", "raw\nup", "\ndown", *(text for what in _WHAT for text in (f"{what}\nfirst", "\nthen", "\nof raw")))
    body = [
        (
            f"{1e3 * row['rtt_s']:g}",
            *(f"{_steady(row[raw]):.0f}" for raw in ("raw_up", "raw_down")),
            *(
                text
                for what in _WHAT
                for text in (f"{row[what][0]:.0f}", f"{_steady(row[what]):.0f}", f"{_of_raw(row, what):.0%}")
            ),
        )
        for row in rows
    ]
    size = f"{rows[0]['payload_bytes'] / 1e6:.4g} MB at {rows[0]['mbit']:g} Mbit/s"
    note = f"Mbit/s; first: on new connections; then: median of the others. {_NOTE} {figure_note(rows)}"
    return results_table(f"Long links: {size}", head, body, note)


def _of_raw(row: Row, what: str) -> float:
    return _steady(row[what]) / _steady(row["raw_up" if what == "contribution" else "raw_down"])


def _delays_table(rows: Sequence[Row]) -> Table:
    head = ("RTT ms", "queue KiB", "idle: median s", "busy: median s", "largest s", "Mbit/s up", "down")
    body = [
        (
            f"{1e3 * row['rtt_s']:g}",
            str(row["queue_bytes"] >> 10),
            *(f"{statistics.median(row[state]):.3f}" for state in ("idle_s", "busy_s")),
            f"{max(row['busy_s']):.3f}",
            *(f"{row[way]:.1f}" for way in ("up_mbit", "down_mbit")),
        )
        for row in rows
    ]
    note = f"{_BUSY} {_NOTE} {figure_note(rows)}"
    return results_table(f"How late heartbeats are over {rows[0]['mbit']:g} Mbit/s", head, body, note)


def picture(rows: Sequence[Row]) -> str:
    """Return the throughput as an SVG file; the heartbeats where there is no throughput."""
    fat, slow = _split(rows)
    if not fat:
        return _delays_picture(slow)
    groups = [charts.Group(f"{1e3 * row['rtt_s']:g} ms", _rates_bars(row)) for row in fat]
    key = {"s0": "contribution up", "s5": "update down", "s3": "snapshot down", "lone": "raw TCP over the same link"}
    title = f"{fat[0]['payload_bytes'] / 1e6:.4g} MB over {fat[0]['mbit']:g} Mbit/s, by round-trip time"
    notes = (f"Medians without the first, on connections that have measured the link. {_NOTE}", figure_note(fat))
    return charts.bars_picture(title, notes, groups, "Mbit/s", key)


def _rates_bars(row: Row) -> list[charts.PartedBar]:
    named = {"raw TCP up": ("raw_up", "lone"), "contribution": ("contribution", "s0"), "raw TCP down": ("raw_down", "lone")}
    named |= {"update": ("update", "s5"), "snapshot": ("snapshot", "s3")}
    return [
        charts.PartedBar(name, [charts.Part(rate, style, f"{rate:.0f} Mbit/s")], f"{rate:.0f}")
        for name, (key, style) in named.items()
        for rate in (_steady(row[key]),)
    ]


def _delays_picture(rows: Sequence[Row]) -> str:
    groups = []
    for row in rows:
        bars = []
        for name, style, delays in (("idle", "lone", row["idle_s"]), ("busy", "s0", row["busy_s"])):
            middle, largest = statistics.median(delays), max(delays)
            parts = [charts.Part(middle, style, f"median {middle:.3f} s")]
            bars.append(charts.PartedBar(name, parts, f"{middle:.3f}, largest {largest:.3f}", largest))
        groups.append(charts.Group(f"{1e3 * row['rtt_s']:g} ms, queue of {row['queue_bytes'] >> 10} KiB", bars))
    key = {"s0": "busy, median", "lone": "idle, median"}
    title = f"How late heartbeats are over {rows[0]['mbit']:g} Mbit/s"
    notes = (f"{_BUSY} {_NOTE}", figure_note(rows))
    return charts.bars_picture(title, notes, groups, "seconds", key, at="the largest")
