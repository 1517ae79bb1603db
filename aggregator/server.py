"""One process that serves a run: its ports, credentials and threads, signals, and the order of start and stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
import torch

from aggregator.control.farewell import Farewell
from aggregator.control.run import Run
from aggregator.control.schemas import check_founded
from aggregator.metrics import MetricsLog
from aggregator.past import PAST_BYTES, Past
from aggregator.resources import Clock, Resources
from aggregator.run_feed import Advised, EventLog, RunFeed, Subscriber
from aggregator.security.authority import Authority, check_equipped
from aggregator.security.expiry import ExpiryWatch, Watched, text_of, watched_files, watched_members
from aggregator.security.members import Members
from aggregator.services.audit import AuditService
from aggregator.services.authorization import Authorizer
from aggregator.services.call_limit import CallLimit
from aggregator.services.control import ControlService
from aggregator.services.data import DataService
from aggregator.services.enrolment import EnrolmentService, RenewalService, add_enrolment_servicer
from aggregator.services.governance import GovernanceService
from aggregator.services.masking import MaskingService
from aggregator.silent_connections import SilentConnections
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.configurations import configurations_of
from aggregator.storage.high_water import HighWaterMark
from aggregator.storage.journal import Disk
from aggregator.storage.kept_contributions import KEPT_FOR_SCORERS, KeptContributions
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.privacy_budget import PrivacyBudget, attempts_in
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.swarm.host_folder import check_dht
from aggregator.telemetry import RoundSpans
from aggregator.tracking import Tracking
from aggregator.worker_thread import Background
from edit import kernels, plugins
from edit.command_line import otlp_protocol
from edit.config.plugins import AGREED
from edit.durable_files import write_atomic
from edit.errors import ConfigError, EditError
from edit.heaps import limit_heaps, map_large_blocks
from edit.telemetry import telemetry
from edit.trackers.background import Trackers
from edit.trackers.choose import NO_TRACKERS, TrackerChoice
from editpb import audit_pb2_grpc, control_pb2_grpc, enrolment_pb2_grpc, governance_pb2_grpc, masking_pb2_grpc
from editpb.identity import ROLES
from editpb.invitation import check_dht_peers, endpoint_of
from editpb.process_limits import check_limits, files_for_connections, raise_file_limit
from editpb.server_certificate import ServerCertificate
from editpb.transport.channel_options import server_options
from editpb.transport.chunk_frames import add_data_servicer
from editpb.transport.listening import listen_at
from editpb.validity import Notice

if TYPE_CHECKING:
    from aggregator.services.metrics_page import MetricsPage
    from aggregator.swarm.discovery import Discovery
    from edit.config.run import RunConfig

__all__ = ["Coordinator", "serve_changes", "serve_run"]

_log = logging.getLogger(__name__)
_STOP_GRACE_S = 1.0
_CERTIFICATES_S = 3600.0  # how often certificates are looked at and renewed
_CLOCK_S = 60.0  # how often their ends are compared with the clock, which may jump
_FAREWELL_S = 0.25  # how often a finished run is looked at
_MAX_CALLS = 4096  # control and data at a time; the stream of each rank is one of them
_MAX_ENDING = 4096  # more, which are too many, until they have ended
_MAX_STRANGERS = 256  # connections at a time to the port of the invitations
_ENROLMENTS = 4  # at a time on one of them
_ENROLMENT_BYTES = 64 << 10  # the largest request there: a token, and a certificate request of a few KB
_STRANGER_S = 30.0  # after which a connection there takes no more calls
_STRANGER_GRACE_S = 15.0  # and after that it is closed
_SILENT_OF_SOURCE = 1024  # members' connections before their first call: what all ranks of a replica make when they start


@dataclass(slots=True)
class Coordinator:
    """A served run, or the part of it that a further aggregator has.

    `start` recovers and binds, `close` ends it; in between everything happens by itself.
    """

    folder: StateFolder
    config: RunConfig
    run: Run
    authority: Authority | None  # None at a further aggregator, where nobody is enrolled
    _main: grpc.aio.Server  # control and data
    _enrol: grpc.aio.Server | None  # enrolment; None at a further aggregator
    background: Background
    _threads: tuple[ThreadPoolExecutor, ...]
    _silent: SilentConnections
    _connections: tuple[int, int]  # that members and strangers may have
    metrics_page: MetricsPage | None = None
    _serving: bool = False  # whether members can connect
    _expiry: ExpiryWatch = field(default_factory=ExpiryWatch)
    _own_certificates: list[Watched] = field(default_factory=list)
    listen: str = ""  # HOST:PORT of control and data, once bound
    enrol_listen: str = ""  # HOST:PORT of enrolment, once bound

    @classmethod
    def open(
        cls,
        folder: StateFolder,
        clock: Clock | None = None,
        disk: Disk | None = None,
        *,
        accept_rollback: bool = False,
        subscribers: Sequence[Subscriber] = (),
    ) -> Coordinator:
        """Read the folder and build everything; nothing listens yet. Call it on the event loop.

        Args:
            clock, disk: injected by tests.
            accept_rollback: go on also below an outer step that was committed.
            subscribers: of the run's feed, beside its own.

        Raises ConfigError, StorageError.
        """
        configurations = configurations_of(folder)
        config = configurations.config
        _check_still_private(folder, config)
        plugins.admit(config, plugins.pinned(config), AGREED)
        clock = clock or Clock()
        authority = _authority(folder, config, clock.unix())
        worker, files = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("torch", "files"))
        background = Background(worker)
        feed = RunFeed(clock.unix)
        feed.subscribe(EventLog().on_event)
        feed.subscribe(MetricsLog(folder.metrics, files).on_event)
        for subscriber in subscribers:
            feed.subscribe(subscriber)
        mark = HighWaterMark(folder.high_water, files, accept_rollback=accept_rollback)
        feed.subscribe(mark.on_event)
        audit: AuditLog | None = None
        if config.audit.enabled:
            audit = AuditLog.open(folder.path, folder.run_id, config, clock.unix, disk, aggregator=folder.aggregator)
        steps = max(config.audit.keep_contributions, KEPT_FOR_SCORERS if config.robust.scored else 0)
        kept = KeptContributions(folder.contributions, steps) if steps else None
        resources = Resources(
            store=Store(
                folder.outer,
                config,
                folder.run_id,
                disk,
                audit=audit,
                kept=kept,
            ),
            uploads=UploadBuffer(config.storage.buffer_bytes, folder.spill, files),
            members=authority.members if authority else _members_seen(folder),
            orders=OperatorFlags(folder.orders),
            background=background,
            feed=feed,
            mark=mark,
            deadlines=folder.deadlines,
            privacy=PrivacyBudget(folder.privacy_ledger, config) if config.privacy.of_organisations else None,
            fits=partial(check_founded, folder.config(), folder.aggregator),
            keep_settings=folder.keep_settings,
            invited=lambda peer_id: authority.invited(peer_id, clock.unix()) if authority else "",
            clock=clock,
        )
        first_round_id = folder.first_round_id(clock.unix())
        run = Run(
            folder.run_id,
            config,
            resources,
            first_round_id=first_round_id,
            aggregator=folder.aggregator,
            configurations=configurations if authority else None,
        )
        past = Past.read(folder.metrics, PAST_BYTES)
        run.begin_with(past.history, past.rounds)
        authorizer = Authorizer(folder.run_id, run.members, clock.unix)
        feed.subscribe(authorizer.on_event)
        connections, strangers = _connections()
        silent = SilentConnections()
        limit = CallLimit(
            _MAX_CALLS,
            lambda peer_id: len(run.attendances.of(peer_id)),
            lambda context: authorizer.admit(context, *ROLES),
            silent.spoke,
        )
        main = grpc.aio.server(
            interceptors=[limit],
            options=server_options(max_connections=connections),
            maximum_concurrent_rpcs=_MAX_CALLS + _MAX_ENDING,
        )
        options = server_options(
            _ENROLMENT_BYTES,
            max_connections=strangers,
            max_streams=_ENROLMENTS,
            connection_age_s=_STRANGER_S,
            connection_grace_s=_STRANGER_GRACE_S,
        )
        enrol = grpc.aio.server(options=options) if authority else None
        coordinator = cls(
            folder, config, run, authority, main, enrol, background, (worker, files), silent, (connections, strangers)
        )
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(run, authorizer), coordinator._main)
        add_data_servicer(DataService(run, authorizer), coordinator._main)
        if config.secagg.enabled:
            masking_pb2_grpc.add_MaskingServicer_to_server(MaskingService(run, authorizer), coordinator._main)
        audit_pb2_grpc.add_AuditServicer_to_server(AuditService(run, authorizer, folder), coordinator._main)
        if authority:
            service_of_changes = GovernanceService(run, authorizer)
            governance_pb2_grpc.add_GovernanceServicer_to_server(service_of_changes, coordinator._main)
        if authority and enrol:
            service = EnrolmentService(authority, clock.unix, coordinator.endpoints, feed)
            add_enrolment_servicer(service, enrol)
            renewal = RenewalService(authority, authorizer, clock.unix, feed)
            enrolment_pb2_grpc.add_RenewalServicer_to_server(renewal, coordinator._main)
        return coordinator

    def endpoints(self) -> tuple[str, ...]:
        """Return HOST:PORT of control and data, as peers reach them."""
        port = self.listen.rpartition(":")[2]
        return tuple(endpoint_of(host, port) for host in self.config.server.advertise)

    def enrolment_endpoints(self) -> tuple[str, ...]:
        """Return HOST:PORT where invitations are redeemed; () at a further aggregator."""
        port = self.enrol_listen.rpartition(":")[2]
        return tuple(endpoint_of(host, port) for host in self.config.server.advertise) if port else ()

    async def start(self) -> None:
        """Recover, keep the settings, bind the ports, write them to addresses.json.

        Raises ConfigError (settings that do not fit what is recovered; a port in use), StorageError.
        """
        if self.config.server.metrics_listen and self.authority is not None:
            from aggregator.services.metrics_page import MetricsPage, RunCollector  # need what only this needs

            address, collector = self.config.server.metrics_listen, RunCollector(self.run)
            self.metrics_page = MetricsPage(collector, address, lambda: self._serving, named="server.metrics_listen")
            await self.metrics_page.start()
            _log.info("metrics on http://%s/metrics", self.metrics_page.listen)
        await self.run.start()
        if self.run.governance:
            _log.warning("serving on under configuration %d: %s", self.run.told(0)[0], self.run.governance)
        key, certificate, authority = (self.folder.path / name for name in ("server.key", "server.pem", "ca.pem"))
        mutual = ServerCertificate(key, certificate, authority, unix=self.run.clock.unix).credentials()
        server_only = ServerCertificate(key, certificate, None, unix=self.run.clock.unix).credentials()
        server = self.config.server
        before = self.folder.bound()
        self.listen = _bind(self._main, "server.listen", _same_port(server.listen, before.get("listen")), mutual)
        if self._enrol is not None:
            address = _same_port(server.enrol_listen, before.get("enrol_listen"))
            self.enrol_listen = _bind(self._enrol, "server.enrol_listen", address, server_only)
            await self._enrol.start()
        await self._main.start()
        addresses = {"listen": self.listen, "enrol_listen": self.enrol_listen}
        write_atomic(self.folder.addresses, json.dumps(addresses).encode())
        self._serving = True
        self.look_after_certificates()
        self.background.spawn(self._keep_certificates())
        most = {int(self.listen.rpartition(":")[2]): min(_SILENT_OF_SOURCE, self._connections[0] // 8 or 1)}
        if self.enrol_listen:
            most[int(self.enrol_listen.rpartition(":")[2])] = self._connections[1] // 4 or 1
        self.background.spawn(self._silent.keep_few(self._threads[-1], most))
        if self._enrol is not None:
            _log.info("serving %s on %s, invitations on %s", self.folder.run_id, self.listen, self.enrol_listen)
        else:
            _log.info("serving aggregator %d of %s on %s", self.folder.aggregator, self.folder.run_id, self.listen)

    def look_after_certificates(self) -> None:
        """Renew the folder's own certificates that are due, and tell of all that end soon."""
        now = self.run.clock.unix()
        try:
            if self.authority is not None and (renewed := self.authority.renew_own(self.config.server.advertise, now=now)):
                _log.info("renewed %s", " and ".join(renewed))
            own = list(watched_files(self.folder.path, self.authority))
        except (EditError, OSError, ValueError) as error:
            _log.warning("certificates: %s; tried again in an hour", error)
            own = []
        self._own_certificates = own
        self.tell_of_certificates()

    def tell_of_certificates(self) -> None:
        """Say in the log which certificates end soon, have expired or are not valid yet by the clock here, once for each."""
        now, own = self.run.clock.unix(), self._own_certificates
        for peer_id, text in self._expiry.news((*own, *watched_members(self.run.members)), now):
            self.run.feed.publish(Advised(peer_id, text))
        self.run.warnings = [text_of(one, now) for one in own if one.validity.notice(now) is not Notice.NONE]

    def compute_with(self, threads: int) -> None:
        """Compute in so many threads, a fragment in each; before `start`. Plug-ins are called from one thread only."""
        if self.config.plugins:
            return
        pool = ThreadPoolExecutor(threads, "compute", torch.set_num_threads, (1,))
        self._threads = (pool, *self._threads)
        self.background.compute_with(pool)

    async def end_with_the_run(self, stop: asyncio.Event) -> None:
        """Set `stop` once the run has finished and nobody needs its last outer step from here any more."""
        farewell, run = Farewell(), self.run
        while True:
            finished = run.finished and not run.governance  # a change that waits for approvals may let it go on
            attending, missing = any(True for _ in run.attendances), run.not_left() if finished else ()
            now = run.clock.monotonic()
            knows_all = run.members.knows_all
            why = farewell.over(
                now,
                finished=finished,
                attending=attending,
                missing=missing,
                knows_all=knows_all,
                looked_at=run.looked_at,
            )
            if why:
                break
            await asyncio.sleep(_FAREWELL_S)
        _log.info("the run has finished; %s; `edit-coordinator export` writes the model", why)
        stop.set()

    async def end_with_the_approvals(self, stop: asyncio.Event) -> None:
        """Set `stop` once the configuration that waited has its approvals: the next `open` serves it."""
        await self.run.approved.wait()
        _log.info("%s: the run goes on under it; peers that train are to be started again", self.run.governance)
        stop.set()

    async def _keep_certificates(self) -> None:
        while True:
            for _ in range(int(_CERTIFICATES_S / _CLOCK_S)):
                await asyncio.sleep(_CLOCK_S)
                self.tell_of_certificates()
            self.look_after_certificates()

    async def close(self, *, checkpoint: bool = True) -> None:
        """Stop listening, checkpoint, end the worker. checkpoint: False ends the run as a kill would (for tests)."""
        self.run.attendances.end()
        if self.metrics_page is not None:
            await self.metrics_page.close()
        await asyncio.gather(*(server.stop(_STOP_GRACE_S) for server in (self._main, self._enrol) if server is not None))
        await self.run.close(checkpoint=checkpoint)
        for thread in self._threads:
            thread.shutdown()  # after what it was given


def _check_still_private(folder: StateFolder, config: RunConfig) -> None:
    """Raise ConfigError where outer steps without noise would follow those with noise."""
    if not config.privacy.of_organisations and attempts_in(folder.privacy_ledger):
        raise ConfigError(
            f'privacy.level = "{config.privacy.level}": the run had "organisation" until now, and {folder.privacy_ledger} says '
            "what that has spent; set it back, or remove the file: then it cannot be claimed any more"
        )


def _authority(folder: StateFolder, config: RunConfig, now: float) -> Authority | None:
    """Return the run's authority, with the server's certificate renewed where that is due.

    None at a further aggregator, which has only the certificate that the coordinator's operator gave it.
    """
    if folder.aggregator:
        check_equipped(folder.path, folder.run_id, folder.aggregator, config.server.advertise[0], now=now)
        return None
    authority = Authority.load(folder.path, folder.run_id)
    if not (folder.path / "server.key").exists():
        _log.warning("%s: is missing; another key is made, and a certificate for it", folder.path / "server.key")
    authority.renew_own(config.server.advertise, now=now)
    return authority


def _members_seen(folder: StateFolder) -> Members:
    """Return whom a further aggregator has seen, and who was evicted."""
    return Members(folder.path / "members.json", new=not folder.incarnation.exists(), enrols=False)


def _connections() -> tuple[int, int]:
    """Return how many connections members and strangers may have, so that descriptors are left for the disk."""
    free = files_for_connections()
    strangers = min(_MAX_STRANGERS, free // 4 or 1)
    return min(free - strangers, 1 << 20), strangers


def _same_port(configured: str, before: str | None) -> str:
    """Return the address to bind: port 0 is chosen once and kept over restarts, so that peers find the coordinator again."""
    host, _, port = configured.rpartition(":")
    return f"{host}:{before.rpartition(':')[2]}" if port == "0" and before else configured


def _bind(server: grpc.aio.Server, field: str, address: str, credentials: grpc.ServerCredentials) -> str:
    try:
        port = listen_at(server, address, credentials)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error} choose another in run.toml") from error
    return f"{address.rpartition(':')[0]}:{port}"


async def serve_run(
    folder: StateFolder,
    *,
    threads: int = 1,
    accept_rollback: bool = False,
    keep_serving: bool = False,
    dht_peers: tuple[str, ...] = (),
    choice: TrackerChoice = NO_TRACKERS,
) -> None:
    """Serve the run until it has finished, SIGINT or SIGTERM. Raises EditError, also when a background task failed.

    Args:
        threads: that merge, a fragment in each. More than one take time from peers on the same machine.
        accept_rollback: go on also below an outer step that was committed.
        keep_serving: serve on when the run has finished.
        dht_peers: libp2p nodes of a DHT in which it says where it is; none: nowhere.
        choice: trackers that are told of each committed round.
    """
    if dht_peers:
        _check_dht(folder, dht_peers)
    folder.lock()
    torch.set_num_threads(threads)
    limit_heaps()
    map_large_blocks()
    raise_file_limit()
    check_limits()
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    _log.info(kernels.load())
    with ExitStack() as at_last:
        trackers = at_last.enter_context(_trackers(folder, choice))
        service = telemetry(otlp_protocol(), "edit-coordinator", folder.run_id, _member(folder))
        subscribers = [Tracking(trackers).on_event] if trackers else []
        if (told := at_last.enter_context(service)) is not None:
            subscribers.append(RoundSpans(told, folder.run_id, folder.aggregator).on_event)
        open_it = partial(Coordinator.open, folder, accept_rollback=accept_rollback, subscribers=subscribers)
        await serve_changes(open_it, asked, threads=threads, keep_serving=keep_serving, dht_peers=dht_peers)


async def serve_changes(
    open_it: Callable[[], Coordinator],
    asked: asyncio.Event,
    *,
    threads: int = 1,
    keep_serving: bool = False,
    dht_peers: tuple[str, ...] = (),
) -> None:
    """Serve a run, and once a changed configuration has its approvals serve it under that. asked: set when it is to stop.

    open_it: as `Coordinator.open`, each time.
    """
    approved = True
    while approved and not asked.is_set():
        coordinator = open_it()
        await _serve(coordinator, asked, threads=threads, keep_serving=keep_serving, dht_peers=dht_peers)
        approved = coordinator.run.approved.is_set()


async def _serve(
    coordinator: Coordinator, asked: asyncio.Event, *, threads: int, keep_serving: bool, dht_peers: tuple[str, ...]
) -> None:
    """Serve until the process is asked to stop, the run has finished, or a changed configuration has its approvals."""
    said: Discovery | None = None
    stop = asyncio.Event()

    async def pass_on() -> None:
        await asked.wait()
        stop.set()

    try:
        coordinator.background.spawn(pass_on())
        coordinator.background.spawn(coordinator.end_with_the_approvals(stop))
        await coordinator.background.in_worker(torch.set_num_threads, threads)  # OpenMP counts for each thread that computes
        if threads > 1:
            coordinator.compute_with(threads)
        await coordinator.start()
        if dht_peers:
            said = _say_where(coordinator, dht_peers)
        if not keep_serving:
            coordinator.background.spawn(coordinator.end_with_the_run(stop))
        await coordinator.background.watch(stop)
        if not coordinator.run.finished and not coordinator.run.approved.is_set():
            _log.info("stopping; the same command continues the run")
    finally:
        if said is not None:
            await said.close()
        await coordinator.close()


def _trackers(folder: StateFolder, choice: TrackerChoice) -> Trackers:
    config = configurations_of(folder).config
    return choice.open(folder.run_id, config.name, _member(folder), folder.path / "trackers", json.loads(config.to_json()))


def _member(folder: StateFolder) -> str:
    return f"aggregator {folder.aggregator}" if folder.aggregator else "coordinator"


def _check_dht(folder: StateFolder, dht_peers: tuple[str, ...]) -> None:
    """Raise ConfigError unless a coordinator can say in this DHT where it is."""
    if folder.aggregator:
        raise ConfigError("--dht-peers: only the coordinator is found by the run's id; leave it out at further aggregators")
    check_dht_peers(dht_peers)
    check_dht("--dht-peers")


def _say_where(coordinator: Coordinator, dht_peers: tuple[str, ...]) -> Discovery:
    """Say in a DHT where the coordinator is, beside all else. Raises ConfigError."""
    from aggregator.swarm.discovery import Discovery  # needs what is not installed everywhere

    folder, advertise = coordinator.folder, coordinator.config.server.advertise[0]
    said = Discovery.of_coordinator(folder.run_id, folder.path, coordinator.listen, advertise, dht_peers)
    said.tell(None, coordinator.endpoints(), "", coordinator.enrolment_endpoints())
    said.start(lambda found: None, lambda maddr: None)
    return said
