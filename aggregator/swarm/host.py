"""A member of a swarm as a process has it: its council with a clock, a disk and links, its parts, and an engine for each that
it owns. One port serves other hosts and the peers that train.

    an event    a message, a stream that came or broke, an answer, or time  ->  `Council.handle`, one after the other
    effects     carried out in order. A Save is on disk before what follows it is said
    a part      its own thread, and jobs in order: Hold, Adopt, Serve, Cease. Bytes are fetched beside them, on the loop

An owner's update is announced, and fetched by each member: nobody gets bytes that it did not ask for, a member behind a NAT
gets them as all others, and what there is no use for is not sent. At most one of each part is fetched at a time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import torch

from aggregator.control.run import Run
from aggregator.control.status import run_status
from aggregator.data.round_runner import Source
from aggregator.resources import Clock
from aggregator.run_feed import Subscriber
from aggregator.security.authority import COORDINATOR_ID, Authority
from aggregator.security.certificates import public_hash
from aggregator.security.members import OPERATOR_ID, Members
from aggregator.services.call_limit import CallLimit
from aggregator.services.readers import send
from aggregator.silent_connections import SilentConnections
from aggregator.storage.kept_contributions import KeptContributions
from aggregator.storage.part_log import PartLog
from aggregator.storage.state_folder import contributions_of
from aggregator.storage.store import Store
from aggregator.swarm.admission import (
    REPLACE_AUTHORITY,
    OwnCertificate,
    SwarmEnrolment,
    SwarmRenewal,
    Trust,
    Waiting,
    addresses_of,
    authority_context,
    keep_authority,
    root_of,
)
from aggregator.swarm.callers import Callers, certificate_of, moved, shut_out
from aggregator.swarm.engine import Engine, first_round_id
from aggregator.swarm.engine_store import Proposal
from aggregator.swarm.enrolments import Enrolments, UnclearKeyError, present_key
from aggregator.swarm.gossip.member import GossipMember
from aggregator.swarm.host_folder import Settings
from aggregator.swarm.links import Addresses, Links, Stream
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.offers import Offer
from aggregator.swarm.owner_entries import OwnerEntries
from aggregator.swarm.relayed import RelayedPort
from aggregator.swarm.replication import Claimed, Fetching, PartReplica, Wanted, carry_out
from aggregator.swarm.standing import (
    MOST_NOTICES,
    MOST_WORDS,
    EngineStanding,
    PartStanding,
    PeerStanding,
    Standing,
    lasting,
    state_of,
)
from aggregator.swarm.taken_updates import TakenUpdates
from aggregator.swarm.transfers import (
    MIN_BYTES_PER_S,
    body_sizes,
    contribution_parts,
    fetch_contributions,
    fetch_offer,
    fetch_state,
    offer_parts,
    state_parts,
)
from aggregator.swarm.verification import Verification
from aggregator.swarm.witnesses import AWAY_S, Witnesses
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.machine import Council, Role, Timing
from edit.council.record import (
    MOST_ENROLLED,
    MOST_TEXT,
    Enrolled,
    Member,
    Part,
    Phase,
    Record,
    Root,
    Saved,
    Stamp,
    Update,
    name_of,
    peer_of,
)
from edit.durable_files import make_folder
from edit.errors import (
    BusyError,
    ConfigError,
    EditError,
    EvictedError,
    GoneError,
    RefusedError,
    RemoteProtocolError,
    StaleError,
    StorageError,
    TransportError,
)
from edit.fragments.schema import Schema
from edit.merging.gossip import settling
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from edit.trust.signatures import Signer
from editpb import control_pb2 as cpb
from editpb import control_pb2_grpc, enrolment_pb2, enrolment_pb2_grpc
from editpb import council_pb2 as pb
from editpb.control_messages import evict_request_from_pb
from editpb.council_messages import (
    MOST_TOLD,
    LogDoubt,
    Offering,
    PartOwner,
    StateAsked,
    StateDigest,
    SwarmDescription,
    Told,
    description_to_pb,
    doubt_from_pb,
    goes_on_request_from_pb,
    logged_request_from_pb,
    logged_to_pb,
    owners_to_pb,
    waiting_from_pb,
)
from editpb.identity import Identity
from editpb.invitation import MAX_ENDPOINTS, endpoint_of
from editpb.limits import CHUNK_BYTES, check_digest, check_id, one_line, within
from editpb.messages import LoggedEntry
from editpb.process_limits import files_for_connections
from editpb.signed_contributions import config_digest
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import server_options
from editpb.transport.chunk_frames import add_council_servicer, fetch_update_handler, handlers_of
from editpb.transport.listening import listen_at
from editpb.transport.parts import asks_taken, metadata_of_owner, part_of
from editpb.transport.send_limit import UNLIMITED, SendLimit
from editpb.transport.status import from_rpc

if TYPE_CHECKING:
    from aggregator.swarm.discovery import Discovery, Found

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["Host", "Place", "found_swarm", "merging"]

_log = logging.getLogger(__name__)
_steps_log = logging.getLogger(f"{__name__}.steps")  # one line for each outer step of each part
_T = TypeVar("_T")
MOST_UNTAKEN = 256  # messages that wait for the council
MOST_STATES = 2  # states that others read here at a time: each is a copy. Others wait, no longer than they like
MOST_KEPT = 8  # updates that others read from the journals here at a time, likewise
Order = ev.Evict | ev.SetPhase | ev.Entrust | ev.Supersede
ORDERS = ("Evict", "Pause", "Resume", "Drain")  # calls of control.proto
MOST_ORDERS = 16  # of operators that wait to be agreed on
ORDER_S = 10.0  # an order that is not agreed on for so long is answered; it may be later
CLAIM_AGAIN_S = 0.5  # after which it is said again that somebody redeems an invitation
WAITING_S = 5.0  # between two looks of a member that was never let in
MISSED_S = 60.0  # between two lines of one that hears no leader
CERTIFICATE_LOOK_S = 3600.0
CERTIFICATE_AGAIN_S = 60.0  # while it is due, and cannot be renewed
CERTIFICATE_ANSWER_S = 15.0
STREAMS_LOOK_S = 10.0  # between two looks for streams whose certificates are over
REPLACED_S = 15.0  # after another authority is trusted here; by then the peers beside all hosts trust it, too
LEAVE_S = 3.0  # how long a member that leaves waits to be voted out
_MAX_CALLS = 4096
_MAX_ENDING = 4096  # more, which are too many, until they have ended
_MAX_CONNECTIONS = 4096
_STOP_GRACE_S = 0.5
_OWNERS_S = 1.0  # who watches the owners is told at least so often: else it asks another host
_LOOK_S = 0.05
MOST_NAMED = 256  # outer steps that committed records named, of each part
WITNESSES_S = 10.0  # a source is asked for its state when all voters have said what theirs comes to, or so long after
CONFIRM_S = 15.0  # and what it sent is confirmed within so long
VERIFY_TRIES = 5  # to fetch what an update was merged from, before its owner is disputed
_FETCH_UPDATE = "/editpb.Data/FetchUpdate"
_MISSED = "; if the run has ended there, start one of them again: this member takes its end from it"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host serves.

    Args:
        listen: HOST:PORT to bind.
        advertise: the host at which others reach it; '': nobody does.
        relay: HOST:PORT of a relay by which others reach it, in place of that; '': none.
    """

    listen: str
    advertise: str = ""
    relay: str = ""


class _HostedPart:
    """One part at this host. `thread`: the one that its replica is used in."""

    def __init__(self, number: int, schema: Schema, replica: PartReplica) -> None:
        self.number, self.schema, self.replica = number, schema, replica
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"part {number}")
        self.jobs: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self.pulling: tuple[Update, asyncio.Task[Offer]] | None = None  # an owner's update that is fetched
        self.pulled: Offer | None = None  # one that is here, until the council has been told; no other is fetched before
        self.fetching = 0  # fetches that run: of updates that this member lacks, or of a state
        self.verified: tuple[MergeRecord, ...] = ()  # what this member merged of it itself, where it verifies the part
        self.unverified = ("", 0)  # the id of an update that could not be verified, and how often
        self.looked = (0, -1)  # the outer step and grant of an update for whose sake witnesses were asked of the own state
        self.complaint = ""  # why an update was not held last
        self.disputed = ""  # the id of the update that was disputed last
        self.own: tuple[Offer, tuple[MergeRecord, ...]] | None = None  # what an engine here made
        self.sources: tuple[Source, ...] = ()  # of that
        self.engine: Engine | None = None
        self.asking: dict[str, int] = {}  # who is told what the state comes to, and how often yet
        self.owing: set[str] = set()  # who of these is told in the part's next turn
        self.named: dict[int, str] = {}  # the states of the last outer steps, as committed records named them
        self.witnesses: Witnesses | None = None  # while a state is fetched
        self.not_believed: set[str] = set()  # whose state was another than that of most voters
        self.said = asyncio.Event()  # by a witness
        self._troubles: dict[str, str] = {}  # why nothing came from a peer the last time

    def came_from(self, peer_id: str, trouble: str = "") -> None:
        """Log why nothing came from a peer, unless that was said last; '': it came."""
        if trouble and self._troubles.get(peer_id) != trouble:
            _log.info("part %d: %s", self.number, trouble)
        self._troubles[peer_id] = trouble

    def heard_of_state(self, peer_id: str, said: StateDigest) -> None:
        """Take what another member's state comes to, if that was asked."""
        if self.witnesses is not None:
            self.witnesses.take(peer_id, said)
            self.said.set()

    def comes(self, outer_step: int) -> bool:
        """Return whether the update to an outer step is on its way here: it is fetched, or here until its commit is known."""
        pulling = self.pulling[0] if self.pulling is not None else None
        pulled = self.pulled.update if self.pulled is not None else None
        here = [update for update in (pulling, pulled, self.replica.state.held) if update is not None]
        return self.fetching > 0 or any(update.outer_step == outer_step for update in here)

    async def do(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Run a call in the part's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *arguments)


class Host:
    """See above. `start` it, `watch` it, `close` it. Used on the event loop.

    Args:
        folder: exists, and is locked.
        schemas: of each part.
        client, server: this member's credentials.
        members: who may train; shared by the engines.
        seeds: members to begin with, before there is a record.
        discovery: finds more of them; not started.
        settings: what new members are told, and the record must say.
        authority: the run's, where this member can let others in.
        relayed: by which it is reached, where its place has a relay.
        signer: has the key of this member's certificate.
        certificate: of this member, for it to be renewed.
        limit: of what is sent to others; not of what stays on this machine.
        on_commit: is told of each outer step that is taken here, in the part's thread.
        subscribers: returns who is told what happens in the rounds of a part, each time that this member begins to serve it.

    Raises StorageError, ConfigError for what the folder has.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        config: RunConfig,
        folder: MemberFolder,
        schemas: Sequence[Schema],
        place: Place,
        client: grpc.ChannelCredentials,
        server: grpc.ServerCredentials,
        members: Members,
        *,
        signer: Signer,
        seeds: Addresses | None = None,
        timing: Timing | None = None,
        discovery: Discovery | None = None,
        clock: Clock | None = None,
        settings: Settings | None = None,
        authority: Authority | None = None,
        relayed: RelayedPort | None = None,
        certificate: OwnCertificate | None = None,
        limit: SendLimit = UNLIMITED,
        on_commit: Callable[[int, Commit], None] = lambda part, commit: None,
        subscribers: Callable[[int], Sequence[Subscriber]] = lambda part: (),
    ) -> None:
        self.run_id, self.peer_id = run_id, peer_id
        self._config, self._folder, self._members, self._place = config, folder, members, place
        self._clock, self._timing = clock or Clock(), timing or Timing()
        self._seeds: Addresses = seeds or {}
        self._discovery, self._limit, self._relayed = discovery, limit, relayed
        self._found: Addresses = {}  # by it
        self._enrolled: dict[str, str] = {}  # for which key each name was enrolled when it was heard of first
        self._moved = set[str]()  # who was enrolled for another since: only the record says where the new machine is
        self._settings, self._authority, self._certificate, self._signer = settings, authority, certificate, signer
        self._subscribers = subscribers
        self._trust = Trust(folder.path) if certificate is not None else None
        if self._trust is not None:
            members.trust(self._trust.present)
        trust = self._trust
        present = (lambda: trust.present) if trust is not None else None
        self.callers = Callers(run_id, peer_id, members, present, self._newest_record, self.unix)
        self._roots: tuple[Root, ...] = ()  # of the record, when they were looked at
        self._replaced_at = -math.inf  # when another authority was trusted
        self._renewers: tuple[str, ...] = ()  # who was known to renew certificates when it was looked at
        self._look = asyncio.Event()  # at the certificate, at once
        self._claims = 0  # that wait to be agreed on
        self._credentials, self._server_credentials = client, server
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="council")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._background = Background(self._disk)
        self._saved = folder.saved()
        self._enrolments: Enrolments | None = None  # as of the newest record that is on disk; replaced, never changed
        self.parts: list[_HostedPart] = []
        self._stores: list[Store] = []
        self._taken: list[TakenUpdates] = []  # of each part, for the ranks of the peer beside this host
        self._config_digest = config_digest(config)  # in what peers sign
        merged_by = merging(config)
        for number, schema in enumerate(schemas):
            self._stores.append(part_store(folder, number, merged_by, run_id))
            known = partial(getattr, self, "_enrolments")
            replica = PartReplica(run_id, number, merged_by, self._stores[-1], partial(on_commit, number), known)
            self.parts.append(part := _HostedPart(number, schema, replica))
            self._taken.append(TakenUpdates(self, schema, self._stores[-1].update, part.comes, part.do))
        self.gossip: GossipMember | None = None  # in place of the parts' engines
        if config.outer.algorithm == "gossip":
            self.gossip = self._gossip()
        self._settling: asyncio.Task[None] | None = None  # while part 0 is owned
        self._events: asyncio.Queue[tuple[ev.Event, bool]] = asyncio.Queue()  # and whether it takes room
        self._room = asyncio.Semaphore(MOST_UNTAKEN)
        self._states, self._settlings, self._kept = _Places(MOST_STATES), _Places(1), _Places(MOST_KEPT)
        self._council: Council | None = None
        self._links: Links | None = None
        self._closing = False
        self._news = asyncio.Event()  # of a committed record; each one has another
        self._voters = (tuple[str, ...](), frozenset[str]())  # and the members, as the log has said
        self._orders: list[tuple[ev.Event, asyncio.Future[None]]] = []  # of operators, until they are agreed on
        self._notices: deque[tuple[float, str]] = deque(maxlen=MOST_NOTICES)  # and when
        self._shut_out: dict[str, str] = {}  # who says that this member was evicted, and why
        self._ended: EditError | None = None  # why this host ends, though nothing failed
        self._leaving = False
        self._stop = asyncio.Event()
        self.listen = ""  # HOST:PORT, once bound

    # -- life --------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the port, and take part. Raises ConfigError (a port in use), StorageError."""
        silent, connections = SilentConnections(), min(_MAX_CONNECTIONS, files_for_connections())
        self._server = grpc.aio.server(
            interceptors=[CallLimit(_MAX_CALLS, self._ranks, self.callers.anybody, silent.spoke)],
            options=server_options(max_connections=connections),
            maximum_concurrent_rpcs=_MAX_CALLS + _MAX_ENDING,
        )
        add_council_servicer(_CouncilService(self), self._server)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(SwarmEnrolment(self), self._server)
        enrolment_pb2_grpc.add_RenewalServicer_to_server(SwarmRenewal(self), self._server)
        orders = handlers_of(control_pb2_grpc.add_ControlServicer_to_server, _OrderService(self))
        self._server.add_generic_rpc_handlers((_ToEngines(self, orders),))
        self._check(self._saved.record if self._saved is not None else None)
        port = self._bind()
        saved = await self._begun()
        own = endpoint_of(self._place.advertise, port) if self._place.advertise else self._place.relay
        addresses: tuple[str, ...] = tuple(filter(None, (own,)))
        reachable, authority = bool(addresses), self._certified_by()
        member = self._member = Member(
            incarnation=saved.incarnation,
            addresses=addresses,
            reachable=reachable,
            authority=authority,
            relayed=bool(self._place.relay and not self._place.advertise),
        )
        states = [part.replica.state for part in self.parts]
        if not any(state.digest for state in states):
            states = []
        self._council = Council(self.run_id, self.peer_id, member, saved, states, self._timing, self._clock.monotonic())
        started = await self._background.in_worker(self._folder.start, self._clock.unix())
        who = self.run_id, self.peer_id, saved.incarnation, started
        self._links = Links(*who, self._credentials, self._signer, self)
        await self._server.start()
        self._learn(saved.record)
        self._reach(saved.record)
        for part in self.parts:
            await part.do(torch.set_num_threads, torch.get_num_threads())  # OpenMP counts for each thread that computes
            self._background.spawn(self._work(part))
        self._background.spawn(self._take_events())
        if saved.record is None:
            self._background.spawn(self._until_let_in(Waiting(WAITING_S)))
        self._background.spawn(self._say_who_is_missed())
        self._background.spawn(silent.keep_few(self._files, {port: connections // 8 or 1}))
        self._background.spawn(self._end_streams())
        if self._certificate is not None:
            self._background.spawn(self._keep_certificate(self._certificate))
        if self._relayed is not None:
            self._background.spawn(self._relayed.run(self.listen, self._say_news))
        if self.gossip is not None:
            self._background.spawn(self.gossip.run())
        if self._discovery is not None:
            self._discovery.start(self._found_others, self._found_at)
        _log.info("%s of %s listens on %s", name_of(self.peer_id, saved.incarnation), self.run_id, self.listen)

    def _gossip(self) -> GossipMember:
        self._config.check_swaps()
        (part,) = self.parts
        return GossipMember(
            self.run_id,
            self.peer_id,
            self._config,
            part.schema,
            self._folder,
            part.replica,
            part.do,
            lambda: self.links,
            lambda: self.council.committed or self.council.record,
            self._members,
            self._files,
            self._clock,
            self.failed,
            self._limit,
        )

    def _bind(self) -> int:
        """Return the port. One that the system chooses is chosen once, so that the others find this host again."""
        host, _, wanted = self._place.listen.rpartition(":")
        before = self._folder.port()
        why = ""
        for port in (before, 0) if wanted == "0" and before else (int(wanted),):
            try:
                bound = listen_at(self._server, f"{host}:{port}", self._server_credentials)
            except ConfigError as error:
                why = str(error)
                continue
            self._folder.keep_port(bound)
            self.listen = f"{host}:{bound}"
            return bound
        raise ConfigError(f"--listen {why}")

    async def _begun(self) -> Saved:
        """Return what is on disk; in a new folder that is this life's number."""
        if self._saved is None:
            self._saved = Saved(incarnation=int(self._clock.unix() * 1000))
            await self._background.in_worker(self._folder.save, self._saved)
        return self._saved

    async def _until_let_in(self, waiting: Waiting) -> None:
        """Say what a new member waits for; end this host when nobody lets it in."""
        while self.council.record is None:
            met = ", ".join(sorted(self.links.connected))
            tried = [f"{peer_id} at {', '.join(at)}: {self.links.refusals.get(peer_id, '')}" for peer_id, at in self._dialled()]
            why = f"{met} connected, but no leader lets it in" if met else f"no member is reached ({'; '.join(tried)})"
            try:
                waiting.go_on(f"{self.peer_id} is not in the swarm yet: {why}")
            except TransportError as error:
                self._end(error)
                return
            await asyncio.sleep(WAITING_S)

    async def _say_who_is_missed(self) -> None:
        """Say now and then, while there is no leader, which voters are not here: the run may have ended without this member."""
        while True:
            await asyncio.sleep(MISSED_S)
            record = self.council.record
            if record is None or self.council.leader:
                continue
            away = sorted({*map(peer_of, record.electors)} - self.links.connected - {self.peer_id})
            rest = "" if self._has_all(record) and record.phase is Phase.FINISHED else _MISSED
            _log.info("nobody leads; not here: %s%s", ", ".join(away) or "nobody", rest)

    def _dialled(self) -> list[tuple[str, Sequence[str]]]:
        return [(peer_id, addresses) for peer_id, addresses in sorted(self.links.addresses.items()) if peer_id != self.peer_id]

    async def watch(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises LocalProtocolError as soon as something has failed that ends this host,
        EvictedError as soon as it was evicted, and TransportError when nobody has let it in for long.
        """
        self._stop = stop
        await self._background.watch(stop)
        if self._ended is not None:
            raise self._ended

    async def leave(self) -> str:
        """Hand the parts over and be voted out, if there are others; end `watch`. Return in words what came of it.

        It takes LEAVE_S at most. A run that is finished has nothing to hand over: then it waits as long for peers that still
        take the last outer step here.
        """
        self._leaving = True
        begun = self._clock.monotonic()
        record = self.council.committed or self.council.record
        if record is None or not record.knows(name_of(self.peer_id, self.incarnation)):
            outcome = "was not a member"
        elif len(record.members) == 1:
            outcome = "is the only member; the same command goes on"
        else:
            finished = record.phase is Phase.FINISHED
            if not finished:
                self.tell(ev.LeaveAsked())
            try:
                async with asyncio.timeout(LEAVE_S):
                    await (self._until_nobody_attends() if finished else self._until_left())
                outcome = "stops; the run is finished" if finished else "has left; the same command joins again"
            except TimeoutError:
                outcome = f"is not voted out after {LEAVE_S:g} s: the others go on without it, or all stop"
        _log.info("%s %s (%.1f s)", self.peer_id, outcome, self._clock.monotonic() - begun)
        self._stop.set()
        return outcome

    async def _until_left(self) -> None:
        me = name_of(self.peer_id, self.incarnation)
        while not self._closing and ((record := self.council.committed) is None or record.knows(me) or self._owns(record)):
            await self._news.wait()

    def _owns(self, record: Record) -> bool:
        return any(part.owner == self.peer_id for part in record.parts)

    async def _until_nobody_attends(self) -> None:
        others = [engine.run.attendances for engine in self._engines]
        while any(one.of(peer_id) for one in others for peer_id in one.members() if peer_id != self.peer_id):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Stop at once: what others do not know yet is on disk."""
        self._closing = True
        self._news.set()
        for _, told in self._orders:
            told.cancel()
        await self._background.stop()
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
        if self.gossip is not None:
            await self.gossip.stop("the host ends")
        if self._discovery is not None:
            await self._discovery.close()
        for part in self.parts:
            if part.pulling is not None:
                part.pulling[1].cancel()
            await self._cease(part, "the host ends")
        if self._links is not None:
            await self._links.close()
            await self._server.stop(_STOP_GRACE_S)
        for part in self.parts:
            part.thread.shutdown()
        for store in self._stores:
            store.close()
        self._disk.shutdown()
        self._files.shutdown()

    # -- questions ---------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """What ends this host, once something does."""
        return self._background.failure

    @property
    def is_leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leaving

    @property
    def incarnation(self) -> int:
        """Which of its lives this member is in, once it has started."""
        assert self._saved is not None
        return self._saved.incarnation

    @property
    def council(self) -> Council:
        """What decides. Ask it, and change nothing."""
        assert self._council is not None, "it has not started"
        return self._council

    @property
    def links(self) -> Links:
        """The streams to other hosts."""
        assert self._links is not None, "it has not started"
        return self._links

    def standing(self) -> Standing:
        """Return how things stand, as far as it is known here."""
        council, record = self.council, self.council.committed or self.council.record
        peers = {*(record.members if record is not None else ()), *map(peer_of, record.electors if record is not None else ())}
        now = self._clock.monotonic()
        return Standing(
            run_id=self.run_id,
            peer_id=self.peer_id,
            role=council.role.value,
            leader=council.leader,
            term=council.term,
            committed=council.committed is not None,
            record=record,
            parts=tuple(self._part_standing(part, record) for part in self.parts),
            peers=tuple(self._peer_standing(each, record, now) for each in sorted(peers - {self.peer_id})),
            notices=tuple(f"{lasting(now - at)} ago: {text}" for at, text in self._notices),
            leaving=self._leaving,
            authority=self.authority is not None,
            gossip=self.gossip.standing() if self.gossip is not None else None,
        )

    def _part_standing(self, part: _HostedPart, record: Record | None) -> PartStanding:
        states, work = self.council.states, self.council.work
        outer_step, digest = 0, ""
        if part.number < len(states):
            state = states[part.number]
            outer_step, digest = state.outer_step, state.digest
            if record is not None:
                outer_step, digest = state_of(state, record.parts[part.number])
        doing = ""
        if part.number < len(work) and isinstance(fetch := work[part.number], ev.Fetch):
            what = f"outer step {fetch.outer_step}" if digest and not fetch.snapshot else "a snapshot"
            doing = f"part {part.number} is fetched from {fetch.source}: {what}"
        elif part.number < len(work):
            doing = self.council.kept[part.number]
        engine = None
        if part.engine is not None and part.engine.run.founded:
            found = run_status(part.engine.run)
            waiting, reason = one_line(found.waiting_for, MOST_WORDS), one_line(found.reason, MOST_WORDS)
            engine = EngineStanding(
                grant=part.engine.grant, phase=found.phase, round_id=found.round_id, waiting_for=waiting, reason=reason
            )
        return PartStanding(outer_step=outer_step, digest=digest, work=doing, engine=engine)

    def _peer_standing(self, peer_id: str, record: Record | None, now: float) -> PeerStanding:
        known, parts = self.council.known(peer_id, now), record.parts if record is not None else ()
        refusal = self.links.refusals.get(peer_id)
        return PeerStanding(
            peer_id=peer_id,
            connected=peer_id in self.links.connected,
            since_s=self.links.since_s(peer_id),
            why=one_line(str(refusal), MOST_WORDS) if refusal is not None else "",
            live=known.live if known is not None else None,
            silent_s=known.silent_s if known is not None and known.silent_s < math.inf else None,
            states=tuple(map(state_of, known.states, parts)) if known is not None else (),
        )

    @property
    def authority(self) -> Authority | None:
        """The run's, if this member has a copy of its key; one that was replaced does not count."""
        own = self._authority
        return own if own is not None and (self._trust is None or own.issuer.certificate == self._trust.present) else None

    @authority.setter
    def authority(self, authority: Authority) -> None:
        self._authority = authority

    @property
    def started(self) -> bool:
        """Whether it takes part."""
        return self._council is not None

    @property
    def let_in(self) -> bool:
        """Whether it takes part and is in the swarm: it has a record."""
        return self._council is not None and self._council.record is not None

    @property
    def settled(self) -> bool:
        """Whether the run has finished, and nobody that is here needs this host any more."""
        record = self.council.committed
        if record is None or record.phase is not Phase.FINISHED or not self.council.settled:
            return False
        served = any([*engine.run.attendances] for engine in self._engines)
        return self._has_all(record) and not served

    @property
    def came_late(self) -> bool:
        """Whether the run has finished, this member has all of it, and nobody leads: the others have ended, or are starting."""
        record = self.council.record
        return record is not None and record.phase is Phase.FINISHED and not self.council.leader and self._has_all(record)

    def _has_all(self, record: Record) -> bool:
        here = [(state.outer_step, state.digest) for state in self.council.states]
        return here == [(part.outer_step, part.digest) for part in record.parts]

    def tell(self, event: ev.Event) -> None:
        """Give an event to the council, after those that wait."""
        self._events.put_nowait((event, False))

    def _ranks(self, peer_id: str) -> int:
        return sum(len(engine.run.attendances.of(peer_id)) for engine in self._engines)

    @property
    def served(self) -> list[tuple[int, Run]]:
        """The rounds that this host serves, by the part's number. With gossip part 0 has those of its own peer."""
        engines = [part.engine for part in self.parts] if self.gossip is None else [self.gossip.engine]
        return [(number, each.run) for number, each in enumerate(engines) if each is not None and each.run.founded]

    @property
    def _engines(self) -> list[Engine]:
        engines = [part.engine for part in self.parts] if self.gossip is None else [self.gossip.engine]
        return [engine for engine in engines if engine is not None]

    # -- the council -------------------------------------------------------------------------------------------------------

    async def heard(self, sender: str, word: ev.Message | Told, key: str = "") -> None:
        """See `Listener`."""
        if not isinstance(word, ev.News) and self._has_other_key(sender, key):
            return
        match word:
            case Offering(update):
                self._announced(sender, update)
                return
            case StateAsked():
                self._asked_for_state(peer_of(sender), word)
                return
            case StateDigest(number) if number < len(self.parts):
                self.parts[number].heard_of_state(peer_of(sender), word)
                return
            case StateDigest():
                return
        await self._room.acquire()
        self._events.put_nowait((ev.Received(sender, word, key), True))

    def _key_of(self, peer_id: str) -> str:
        """Return for which key a name is enrolled, as far as known here; '': it is not."""
        record = self._newest_record()
        enrolled = record.enrolled.get(peer_id) if record is not None else None
        return enrolled.key if enrolled is not None else ""

    def why_over(self, stream: Stream) -> EditError | None:
        """See `Listener`: its certificate is over, or its peer has another key than was enrolled.

        While no leader is heard, the record here may be an old one, and the key that of a later invitation: then a life that is
        not in it may bring News, and nothing else (`heard`).
        """
        if stream.certificate is not None and (text := self.callers.why_over(stream.peer_id, stream.certificate)):
            return TransportError(text)  # it may be the clock here that is wrong
        record = self.council.record
        if not self._has_other_key(stream.name, stream.key) or (
            not self.council.leader and record is not None and stream.name not in record.names
        ):
            return None
        return RefusedError(moved(stream.peer_id))

    def _has_other_key(self, name: str, key: str) -> bool:
        """Whether a life has shown another key than its peer was enrolled for, as far as is known here.

        That of a voter of an earlier life does not matter until it is voted out, which may need it. While the newest record is
        not agreed on, its key counts, and that of the record before.
        """
        record = self.council.committed or self.council.record
        if key == "" or record is None or name in record.electors - record.names:
            return False
        enrolled = record.enrolled.get(peer_of(name))
        return enrolled is not None and key not in (enrolled.key, self._key_of(peer_of(name)))

    def connected(self, peer_id: str) -> None:
        """See `Listener`."""
        self._shut_out.pop(peer_id, None)
        self.tell(ev.Connected(peer_id))

    def disconnected(self, peer_id: str) -> None:
        """See `Listener`."""
        self.tell(ev.Disconnected(peer_id))
        for part in self.parts:
            part.asking.pop(peer_id, None)

    def refused(self, peer_id: str, error: EditError) -> None:
        """See `Listener`. More than half of the other voters must say that this member was evicted: one may lie. Where there is
        no record, all whom it knows.

        Where the record has another key for its name, one word is enough: another machine is this member now.
        """
        if isinstance(error, RefusedError) and self._is_replaced:
            self._end(RefusedError(moved(self.peer_id)))
        if not isinstance(error, EvictedError):
            return
        self._shut_out[peer_id] = str(error)
        record = self.council.record
        if record is None:
            known = {each for each, _ in self._dialled()}
            out = bool(known) and known <= self._shut_out.keys()
        else:
            others = {*map(peer_of, record.voters)} - {self.peer_id}
            out = 2 * len(self._shut_out.keys() & others) > len(others)
        if out:
            self._end(error)

    @property
    def _is_replaced(self) -> bool:
        own = public_hash(self._certificate.present) if self._certificate is not None else ""
        return own != "" and self._key_of(self.peer_id) not in ("", own)

    def failed(self, error: BaseException) -> None:
        """See `Listener`."""
        self._background.fail(error)

    def _end(self, reason: EditError) -> None:
        """End this host, though nothing failed."""
        if self._ended is None:
            self._ended = reason
            self._stop.set()

    async def _take_events(self) -> None:
        while True:
            event = await self._next_event()
            for effect in self.council.handle(event, self._clock.monotonic()):
                await self._carry_out(event, effect)
            if isinstance(event, ev.Offered):
                self.parts[event.update.part].pulled = None  # its Hold has it, if there is one

    async def _next_event(self) -> ev.Event:
        wait_s = self.council.next_wakeup() - self._clock.monotonic()
        if wait_s <= 0:
            return ev.Tick()
        try:
            async with asyncio.timeout(min(wait_s, 3600.0)):
                event, took_room = await self._events.get()
        except TimeoutError:
            return ev.Tick()
        if took_room:
            self._room.release()
        return event

    async def _carry_out(self, event: ev.Event, effect: ev.Effect) -> None:
        match effect:
            case ev.Save(saved):
                self._check(saved.record)
                await self._background.in_worker(self._folder.save, saved)  # if that fails, this host ends, and says no more
                self._learn(saved.record)
                self._reach(saved.record)
            case ev.Send(peer_id, message):
                self.links.send(peer_id, message)
            case ev.Committed(record):
                self._follow(record)
            case ev.Hold(update):
                part = self.parts[update.part]
                own = part.own if part.own is not None and part.own[0].update == update else (part.pulled, part.verified)
                part.jobs.put_nowait(partial(self._hold, part, effect, *own))
            case ev.Adopt():
                self.parts[effect.part].jobs.put_nowait(partial(self._adopt, self.parts[effect.part], effect))
            case ev.Fetch():
                part = self.parts[effect.part]
                self._background.spawn(self._fetch(part, effect, part.pulled))
            case ev.SendOffer(update):
                for peer_id in self.links.connected:
                    self.links.send(peer_id, Offering(update))
            case ev.Serve(_, grant) if self.gossip is not None:
                self._settle(self.gossip, grant)
            case ev.Cease() if self.gossip is not None:
                self._settle(self.gossip, None)
            case ev.Serve(number, grant):
                self.parts[number].jobs.put_nowait(partial(self._serve, self.parts[number], grant))
            case ev.Cease(number, grant):
                self.parts[number].jobs.put_nowait(partial(self._cease, self.parts[number], f"grant {grant} is over"))
            case ev.Refused(reason):
                self._refused(event, reason)
            case ev.Noticed(text):
                self._say_news(text)

    def _note(self, text: str) -> None:
        """Show it in the status for a while."""
        self._notices.append((self._clock.monotonic(), one_line(text, MOST_WORDS // 2)))

    def _say_news(self, text: str) -> None:
        self._note(text)
        _log.info("%s", text)

    def _check(self, record: Record | None) -> None:
        """Raise ConfigError when this member's model is not cut into as many parts as the swarm's."""
        if record is not None and len(record.parts) != len(self.parts):
            raise ConfigError(f"the swarm's model has {len(record.parts)} parts, this member's {len(self.parts)}")
        if record is not None and self._settings is not None and record.config_hash not in ("", self._settings.config_hash):
            raise ConfigError(
                "run.toml is not the one that the swarm was founded with; restore it from another member's, or, if "
                "it is equal to theirs, join anew (edit-peer swarm rejoin): one that lied may have let this member in"
            )

    def _learn(self, record: Record | None) -> None:
        """Remember whose keys have changed with a record."""
        known = self._enrolments
        if record is not None and (known is None or known.record is not record):
            self._enrolments = known.taking(record) if known is not None else Enrolments.of(record)
            if known is not None and not record.enrols_as(known.record):
                for part in self.parts:
                    part.disputed = ""  # the council has taken it back, too

    def _reach(self, record: Record | None) -> None:
        members = record.members if record is not None else {}
        known = {peer_id: member.addresses for peer_id, member in members.items() if member.reachable}
        for peer_id, enrolled in record.enrolled.items() if record is not None else ():
            if self._enrolled.setdefault(peer_id, enrolled.key) != enrolled.key:
                self._moved.add(peer_id)
        moved = {*self._moved, *(peer_id for peer_id, member in members.items() if member.incarnation == 0)}  # its life is over
        found, seeds = ({p: at for p, at in each.items() if p not in moved} for each in (self._found, self._seeds))
        relay = (self._place.relay,) if self._place.relay else ()  # they may be at this one, wherever they were last
        behind = [p for p, member in members.items() if member.relayed] if record is not None else [*seeds]
        sources = known, found, seeds, dict.fromkeys(behind, relay)
        peers = {*known, *found, *seeds} - (shut_out(record) if record is not None else set())
        self.links.reach({p: tuple(dict.fromkeys(each for source in sources for each in source.get(p, ()))) for p in peers})
        if self._discovery is not None:
            self._discovery.tell(record, self._member.addresses, self.council.leader)

    def _found_others(self, found: Found) -> None:
        """Dial whom the DHT says to be somewhere, too."""
        self._found = {peer_id: said.addresses for peer_id, said in found.items()}
        self._reach(self.council.record)

    def _found_at(self, maddr: str) -> None:
        """Say in the record where this member's node of the DHT is."""
        self._member = replace(self._member, maddr=maddr)
        self.tell(ev.Here(self._member))

    def _follow(self, record: Record) -> None:
        """Do by a committed record what is not the council's: who is shut out is gone, and the engines are in its phase."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        for part, named in zip(self.parts, record.parts, strict=True):
            part.named[named.outer_step] = named.digest
            while len(part.named) > MOST_NAMED:
                del part.named[next(iter(part.named))]
            part.said.set()
        if record.holders != self._renewers:
            self._renewers = record.holders
            self._look.set()
        before, self._voters = self._voters, (record.voters, frozenset(record.members))
        if self._voters != before:
            _log.info("%d vote, of %d members: %s", len(record.voters), len(record.members), ", ".join(record.voters))
            for peer_id in sorted(before[1] - self._voters[1] - record.evicted.keys()):
                _log.info("%s has left", peer_id)
        engines = [engine for engine in self._engines if engine.run.founded]
        for peer_id, reason in record.evicted.items():
            if not self._members.evicted(peer_id):
                _log.info("%s is evicted: %s", peer_id, reason)
                self._members.evict(peer_id, reason)
                for engine in engines:
                    engine.run.evict(peer_id, reason)
        self._members.pin({peer_id: enrolled.key for peer_id, enrolled in record.enrolled.items()}, closed=bool(record.roots))
        for engine in engines:
            engine.run.end_replaced()
        self.links.end_over()
        self._follow_roots(record)
        for peer_id in shut_out(record):
            self.links.drop(peer_id, EvictedError(record.evicted[peer_id]))
        if self.peer_id in record.evicted and name_of(self.peer_id, self.incarnation) not in record.voters:
            self._end(EvictedError(record.evicted[self.peer_id]))
        for engine in engines:
            engine.follow(record.phase, record.last_step)
        for order, told in self._orders:
            if _is_done(order, record) and not told.done():
                told.set_result(None)

    def _follow_roots(self, record: Record) -> None:
        """Trust the authorities of the record. The peer beside this host, and all others, do so before certificates change."""
        if self._trust is None or self._certificate is None or not record.roots or record.roots == self._roots:
            return
        before, self._roots = self._trust.present, record.roots
        try:
            if not self._trust.follow(record.roots):
                return
        except RefusedError as error:
            self._note(str(error))
            return
        self._members.trust(self._trust.present)
        self.links.renew(self._certificate.credentials())
        if self._discovery is not None:
            self._discovery.renew(self._certificate.pem, self._trust.pem)
        if self._trust.present != before:
            text = "another authority takes the place of the one before: who has only the key of that lets nobody in"
            _log.warning("%s", text)
            self._note(text)
            self._replaced_at = self._clock.monotonic()
            asyncio.get_running_loop().call_later(REPLACED_S, self._look.set)

    def _refused(self, event: ev.Event, reason: str) -> None:
        match event:
            case ev.Offered(sender, update):
                _log.info("the update of %s to outer step %d of part %d: %s", sender, update.outer_step, update.part, reason)
            case ev.Made(update):
                part = self.parts[update.part]
                part.jobs.put_nowait(partial(self._refuse, part, update, reason))
            case _:
                for order, told in self._orders:
                    if order is event and not told.done():
                        told.set_exception(RefusedError(reason))

    # -- updates of owners -------------------------------------------------------------------------------------------------

    def _announced(self, sender: str, update: Update) -> None:
        """An owner has an update. Fetch it, unless the council would not hold it; then it is announced again."""
        if self.council.why_refused(sender, update) or update.part >= len(self.parts):
            return
        part = self.parts[update.part]
        if part.replica.state.held == update or part.pulled is not None or part.disputed == update.id:
            return
        if part.pulling is not None:
            if part.pulling[0].grant >= update.grant:
                return
            part.pulling[1].cancel()
        task = asyncio.get_running_loop().create_task(self._pull(part, sender, update))
        part.pulling = update, task
        task.add_done_callback(partial(self._pull_ended, part, peer_of(sender)))

    async def _pull(self, part: _HostedPart, sender: str, update: Update) -> Offer:
        stub, sizes = self.links.stub(peer_of(sender)), body_sizes(part.replica.outer)
        try:
            offer = await fetch_offer(stub, part.number, update.outer_step, update.id, sizes)
            if offer.update != update:
                raise RemoteProtocolError(f"part {part.number}: the update is described otherwise than it was announced")
            await part.do(offer.check, self.run_id)
        except RemoteProtocolError as error:
            if not self.council.why_refused(sender, update):  # else the record went on meanwhile
                self._dispute(part, sender, update, error)
            raise
        records = await self._verified(part, sender, offer) if self._is_to_verify(update) else ()
        part.pulled, part.verified = offer, records
        self.tell(ev.Offered(sender, update))
        return offer

    def _is_to_verify(self, update: Update) -> bool:
        record = self.council.record
        return record is not None and self.peer_id in record.parts[update.part].verifiers

    async def _verified(self, part: _HostedPart, sender: str, offer: Offer) -> tuple[MergeRecord, ...]:
        """Merge an update's contributions here, too; return the records. Raises EditError: the update is not held.

        An owner whose update is another, or who does not show what it merged, is disputed: the part goes to others. Where that
        cannot be told here, it merges again; where the disk here fails, it tries again until others take its place.
        """
        update, owner, known = offer.update, peer_of(sender), self._enrolments
        assert known is not None  # the record made this member a verifier
        try:
            records = await self._merged_again(part, owner, offer, known)
        except StorageError:
            raise
        except EditError as error:
            if not known.record.enrols_as(self.council.record):
                raise
            update_id, failed = part.unverified
            part.unverified = update.id, failed + 1 if update_id == update.id else 1
            decided = isinstance(error, RemoteProtocolError | UnclearKeyError) or part.unverified[1] >= VERIFY_TRIES
            if self.council.why_refused(sender, update) or not decided:
                raise
            self._dispute(part, sender, update, error, known.record.stamp)
            raise
        _log.info("part %d: outer step %d is verified", part.number, update.outer_step)
        return records

    def _dispute(
        self, part: _HostedPart, sender: str, update: Update, error: EditError, judged_by: Stamp | None = None
    ) -> None:
        """Tell the leader that an owner's update is wrong, or cannot be judged here.

        It is fetched again only if a newer record has other keys. judged_by: see `edit.council.events.Disputed`.
        """
        part.disputed, is_unclear = update.id, isinstance(error, UnclearKeyError)
        reason = one_line(str(error) if is_unclear else f"{peer_of(sender)} is not believed: {error}", MOST_TEXT)
        self._note(f"part {part.number}: {reason}")
        self.tell(ev.Disputed(part.number, update.grant, reason, is_unclear, judged_by))

    async def _merged_again(self, part: _HostedPart, owner: str, offer: Offer, known: Enrolments) -> tuple[MergeRecord, ...]:
        engine = self._folder.engine(part.number)
        make_folder(engine, 0o700)
        verification = Verification(
            self.run_id,
            self._config,
            part.schema,
            part.replica.outer.due,
            offer.update,
            self._config_digest,
            partial(known.counts, update=offer.update),
            engine / "verified",
            self._files,
        )
        try:
            stub = self.links.stub(owner)
            await fetch_contributions(
                stub, part.number, offer.update, part.schema, lambda one: verification.declare(one).upload
            )

            def merge() -> tuple[MergeRecord, ...]:
                return part.replica.verify(offer, verification.contributed())

            return await part.do(merge)
        finally:
            verification.close()

    def _pull_ended(self, part: _HostedPart, owner: str, task: asyncio.Task[Offer]) -> None:
        if part.pulling is not None and part.pulling[1] is task:
            part.pulling = None
        if task.cancelled():
            return
        match task.exception():
            case None:
                part.came_from(owner)
            case EditError() as error:
                part.came_from(owner, str(error))
            case bug:
                self.failed(bug)

    # -- parts -------------------------------------------------------------------------------------------------------------

    async def _work(self, part: _HostedPart) -> None:
        while True:
            job = await part.jobs.get()
            await job()

    async def _hold(self, part: _HostedPart, effect: ev.Hold, offer: Offer | None, records: Sequence[MergeRecord]) -> None:
        known = self._enrolments
        answer = await part.do(partial(carry_out, part.replica, effect, offer=offer, own=records))
        if isinstance(answer, ev.Failed) and known is not None:
            answer = replace(answer, judged_by=known.record.stamp)
            if not known.record.enrols_as(self.council.record):  # it is asked again
                answer = replace(answer, is_wrong=False, is_unclear=False)
        before, part.complaint = part.complaint, ""
        if isinstance(answer, ev.Failed) and not answer.is_late:  # late: the others had taken it, and it came from them
            part.complaint = answer.reason
        if part.complaint not in ("", before):
            self._say_news(part.complaint)
        self.tell(answer)
        update = effect.update
        if isinstance(answer, ev.Failed) and (answer.is_wrong or answer.is_unclear):
            part.disputed = update.id
        if part.replica.contested and part.looked != (update.outer_step, update.grant) and part.witnesses is None:
            part.looked = update.outer_step, update.grant
            self._background.spawn(self._look_at_own(part))

    async def _adopt(self, part: _HostedPart, effect: ev.Adopt) -> None:
        answer = await part.do(carry_out, part.replica, effect)
        self._say(part, answer)
        if part.own is not None and part.own[0].update.outer_step <= part.replica.state.outer_step:
            part.own, part.sources = None, ()  # the journal has it
        if self.gossip is not None:
            self.gossip.tell()
        part.owing.update(part.asking)
        await self._say_state(part)

    async def _fetch(self, part: _HostedPart, effect: ev.Fetch, pulled: Offer | None) -> None:
        """Ask the source for one thing after the other. Its answers are taken in the part's thread.

        pulled: what the council has not been told yet that is here.
        """
        part.fetching += 1
        try:
            fetching = await part.do(Fetching, part.replica, effect)
            while fetching.answer is None:
                try:
                    found = await self._coming(part, fetching.wanted, pulled)
                    if found is None:
                        found = await self._ask(part, effect.source, fetching.wanted)
                except EditError as error:
                    await part.do(fetching.give, error)
                else:
                    await part.do(fetching.give, found)
        finally:
            part.fetching -= 1
            if part.witnesses is not None and part.witnesses.source == effect.source:
                self._dismiss(part, part.witnesses)
        self._say(part, fetching.answer, effect.source)
        self._say_state_to(part, *part.asking)

    def _say(self, part: _HostedPart, answer: ev.Held | ev.Applied | ev.Failed, source: str = "") -> None:
        """Tell the council, and the log, what came of an Adopt, or of a Fetch from a source."""
        self.tell(answer)
        if self.gossip is not None:
            self.gossip.tell()
        match answer:
            case ev.Applied(number, outer_step):
                self._taken[number].taken()
                _steps_log.info("part %d is at outer step %d", number, outer_step)
                part.came_from(source)
            case ev.Failed(_, _, reason):
                part.came_from(source, reason)

    async def _coming(self, part: _HostedPart, wanted: Wanted, pulled: Offer | None) -> Any:
        """Return the wanted update from its owner, if it was announced and is here or on its way; None also if that fails.

        It was committed before the council knew it here: by a quorum that this member is not needed for.
        """
        if pulled is not None and (pulled.update.outer_step, pulled.update.id) == wanted:
            return pulled
        if part.pulling is None or (part.pulling[0].outer_step, part.pulling[0].id) != wanted:
            return None
        task = part.pulling[1]
        await asyncio.wait([task])
        return None if task.cancelled() or task.exception() is not None else task.result()

    async def _ask(self, part: _HostedPart, source: str, wanted: Wanted) -> Any:
        if isinstance(wanted, Claimed):
            return await self._confirm(part, wanted)
        stub = self.links.stub(source)
        if wanted is None:
            await self._call_witnesses(part, source)
            return await fetch_state(stub, part.number, part.schema, self._config.average)
        return await fetch_offer(stub, part.number, *wanted, body_sizes(part.replica.outer))

    # -- states of others, and what witnesses say of them ------------------------------------------------------------------

    async def _call_witnesses(self, part: _HostedPart, source: str) -> None:
        """Ask the voters what their state of a part comes to, before a source copies its own.

        Raises RefusedError for a source that was not believed, while there are others.
        """
        if source in part.not_believed and (self._voters_beside & self.links.connected) - part.not_believed:
            raise RefusedError(f"no state of part {part.number} is taken from {source}: it was not believed")
        witnesses = part.witnesses = Witnesses(part.number, source)
        asked = self._ask_witnesses(part, witnesses)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITNESSES_S):
                while witnesses.missing(asked & self.links.connected):
                    await self._something_said(part)

    def _ask_witnesses(self, part: _HostedPart, witnesses: Witnesses) -> frozenset[str]:
        """Ask those who have said nothing yet; return who was asked."""
        asked = frozenset(witnesses.missing(self._voters_beside & self.links.connected))
        for peer_id in asked:
            self.links.send(peer_id, StateAsked(part.number, MOST_TOLD))
        return asked

    @property
    def _voters_beside(self) -> frozenset[str]:
        """The voters that count as witnesses: not this member, and nobody who has been away for long."""
        record = self.council.committed or self.council.record
        voters = {*map(peer_of, record.electors)} - {self.peer_id} if record is not None else set()
        connected = self.links.connected
        return frozenset(each for each in voters if each in connected or self.links.since_s(each) < AWAY_S)

    async def _confirm(self, part: _HostedPart, claimed: Claimed) -> None:
        """Return once a record has named this outer step, and enough voters came to this state. See `witnesses`.

        Raises RemoteProtocolError for another state, GoneError when it is not confirmed in time.
        """
        witnesses = part.witnesses
        assert witnesses is not None  # its state was asked for
        self._ask_witnesses(part, witnesses)
        try:
            await self._until_confirmed(part, witnesses, claimed)
        except RemoteProtocolError as error:
            part.not_believed.add(witnesses.source)
            self._say_news(str(error))
            raise
        if not self._voters_beside - {witnesses.source}:
            _log.info("part %d: nobody but %s could say what its state is", part.number, witnesses.source)

    async def _until_confirmed(self, part: _HostedPart, witnesses: Witnesses, claimed: Claimed) -> None:
        step, why, named = claimed.outer_step, "", None
        lie = f"{witnesses.source} is not believed: outer step {step} of part {part.number}"
        try:
            async with asyncio.timeout(CONFIRM_S):
                while True:
                    if (named := part.named.get(step)) not in (None, claimed.name):
                        raise RemoteProtocolError(f"{lie} is another in the record")
                    why = witnesses.why_not(claimed, self._voters_beside)
                    if named is not None and not why:
                        return
                    await self._something_said(part)
        except TimeoutError:
            if named is None and step > max(part.named, default=0) and self.council.leader:
                raise RemoteProtocolError(f"{lie} is in no record") from None
            raise GoneError(why or f"outer step {step} of part {part.number} is in no record here") from None

    async def _something_said(self, part: _HostedPart) -> None:
        """Wait until a witness or the record says something; not for long: who is away for long does not count."""
        part.said.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OWNERS_S):
                await part.said.wait()

    async def _look_at_own(self, part: _HostedPart) -> None:
        """An owner's update is for other parameters than are here: have a snapshot fetched if most voters have others, too."""
        witnesses = part.witnesses = Witnesses(part.number, self.peer_id)
        self._ask_witnesses(part, witnesses)
        try:
            claimed = await part.do(part.replica.claimed)
            async with asyncio.timeout(CONFIRM_S):
                while witnesses.why_not(claimed, self._voters_beside):
                    await self._something_said(part)
        except RemoteProtocolError:
            if await part.do(part.replica.give_up, claimed):
                self.tell(ev.Damaged(part.number, claimed.outer_step, claimed.digest))
        except (GoneError, TimeoutError):
            pass  # nobody can tell
        finally:
            self._dismiss(part, witnesses)

    def _dismiss(self, part: _HostedPart, witnesses: Witnesses) -> None:
        """Tell the witnesses that it is enough."""
        if part.witnesses is witnesses:
            part.witnesses = None
            for peer_id in self._voters_beside & self.links.connected:
                self.links.send(peer_id, StateAsked(part.number, 0))

    def _asked_for_state(self, peer_id: str, asked: StateAsked) -> None:
        """Say what the state of a part comes to: when it is computed, in the part's turn, and after further outer steps."""
        if asked.part >= len(self.parts):
            return
        part = self.parts[asked.part]
        part.asking.pop(peer_id, None)
        if asked.outer_steps:
            part.asking[peer_id] = asked.outer_steps + 1
            self._say_state_to(part, peer_id)

    def _say_state_to(self, part: _HostedPart, *peer_ids: str) -> None:
        """Say what the state comes to in the part's next turn."""
        if not part.owing and peer_ids:
            part.jobs.put_nowait(partial(self._say_state, part))
        part.owing.update(peer_ids)

    async def _say_state(self, part: _HostedPart) -> None:
        """Say what the state comes to now, to those who still want to know."""
        to = part.owing & part.asking.keys()
        part.owing.clear()
        if not to:
            return
        try:
            found = await part.do(part.replica.claimed)
        except GoneError:
            found = Claimed(0, "", "")
        for peer_id in sorted(to):
            self.links.send(peer_id, StateDigest(part.number, found.outer_step, found.name, found.digest))
            left = part.asking.pop(peer_id, 0) - 1
            if left > 0:
                part.asking[peer_id] = left

    # -- engines -----------------------------------------------------------------------------------------------------------

    async def _serve(self, part: _HostedPart, grant: int) -> None:
        number, loop = part.number, asyncio.get_running_loop()

        def propose(proposal: Proposal) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(part.jobs.put_nowait, partial(self._propose, part, grant, proposal))

        entries = self._entries(number, grant)
        store = await part.do(part.replica.serve, self._folder.part(number), propose, entries)
        part.engine = Engine(
            self.run_id,
            number,
            grant,
            self._config,
            part.replica.outer,
            store,
            self._folder.engine(number),
            self._members,
            self._gone(),
            self._files,
            self._clock,
            lambda: self.tell(ev.Ended(number, grant)),
            self.failed,
            self.limit_of,
            subscribers=self._subscribers(number),
            draining=(record := self.council.committed) is not None and record.phase is Phase.DRAINING,
        )
        await part.engine.start()
        if (record := self.council.committed) is not None:
            part.engine.follow(record.phase, record.last_step)
        _log.info("owns part %d with grant %d, at outer step %d", number, grant, part.replica.state.outer_step)

    def _entries(self, number: int, grant: int) -> OwnerEntries | None:
        """Return what makes a part's entries of the audit log under this grant; None: the run has none."""
        log = self._stores[number].part_log
        if log is None:
            return None
        unix = self._clock.unix

        def key_of(peer_id: str) -> str:  # in the engine's thread
            return present_key(self._newest_record(), peer_id)

        return OwnerEntries(log, self.run_id, number, grant, self._config, self.peer_id, self._signer, unix, key_of)

    def _newest_record(self) -> Record | None:
        """Return the newest record that is known here, also before this host has started."""
        return self._council.record if self._council is not None else None

    def _gone(self) -> set[str]:
        record = self.council.committed
        return {*record.members} - self.links.connected - {self.peer_id} if record is not None else set()

    async def _cease(self, part: _HostedPart, reason: str) -> None:
        engine, part.engine, part.own, part.sources = part.engine, None, None, ()
        await part.do(part.replica.cease, reason)
        if engine is not None:
            await engine.close()

    async def _propose(self, part: _HostedPart, grant: int, proposal: Proposal) -> None:
        if part.engine is None or part.engine.grant != grant:
            return  # it was refused when the grant ended
        offer = await part.do(part.replica.made, grant, proposal)
        part.own, part.sources = (offer, proposal.records), part.engine.run.rounds.sources
        self.tell(ev.Made(offer.update))

    async def _refuse(self, part: _HostedPart, update: Update, reason: str) -> None:
        part.own = None
        await part.do(part.replica.refuse, update.id, reason)
        if self.gossip is not None:
            self.gossip.tell()

    # -- gossip ------------------------------------------------------------------------------------------------------------

    def _settle(self, gossip: GossipMember, grant: int | None) -> None:
        """Begin to settle as the owner of part 0 under this grant; None: it is no longer owned."""
        if self._settling is not None:
            self._settling.cancel()
        self.parts[0].own = self._settling = None
        if grant is not None:
            self._settling = asyncio.get_running_loop().create_task(self._settle_under(gossip, grant))
            self._settling.add_done_callback(self._settling_ended)

    async def _settle_under(self, gossip: GossipMember, grant: int) -> None:
        part = self.parts[0]

        def propose(offer: Offer, records: tuple[MergeRecord, ...]) -> None:
            part.own = offer, records
            self.tell(ev.Made(offer.update))

        await gossip.settle(grant, propose, lambda: part.own is not None)
        self.tell(ev.Ended(0, grant))

    def _settling_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    # -- this member's certificate -----------------------------------------------------------------------------------------

    async def _keep_certificate(self, own: OwnCertificate) -> None:
        """Look at it now and then, and take a renewed one: connections that are open stay."""
        assert self._trust is not None
        while True:
            self._look.clear()
            replaced = not own.is_of(self._trust.present) and self._clock.monotonic() >= self._replaced_at + REPLACED_S
            if await own.look(self._certifiers, self._note, replaced=replaced):
                self.links.renew(own.credentials())
                self._members.add_caller(Identity(self.run_id, "peer", self.peer_id), own.present)
                if self._discovery is not None:
                    self._discovery.renew(own.pem, self._trust.pem)
                self._member = replace(self._member, authority=self._certified_by())
                self.tell(ev.Here(self._member))
                self._background.spawn(self._show_certificate())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CERTIFICATE_AGAIN_S if own.failing else CERTIFICATE_LOOK_S):
                    await self._look.wait()

    async def _show_certificate(self) -> None:
        """Call the hosts that it is connected to once, over new connections: they learn until when its streams count now."""
        for peer_id in sorted(self.links.connected & self.links.addresses.keys()):
            with contextlib.suppress(EditError, grpc.aio.AioRpcError):
                await self.links.stub(peer_id).Describe(pb.DescribeRequest(), timeout=CERTIFICATE_ANSWER_S)

    async def _end_streams(self) -> None:
        """End the streams whose certificates are over."""
        while True:
            await asyncio.sleep(STREAMS_LOOK_S)
            self.links.end_over()

    def _certified_by(self) -> str:
        """Return whose certificate this member has, as the record names it; '': it is not said."""
        if self._trust is None or self._certificate is None:
            return ""
        return root_of(self._trust.present).name if self._certificate.is_of(self._trust.present) else ""

    def _certifiers(self) -> Iterator[tuple[str, Callable[[], Awaitable[bytes]]]]:
        """Yield whom to ask for a renewed certificate, and the call: this member itself if it can, then the others that can."""
        if self.authority is not None:
            yield self.peer_id, self._certify
        for peer_id in self.holders:
            if peer_id != self.peer_id:
                yield peer_id, partial(self._ask_certificate, peer_id)

    async def _certify(self) -> bytes:
        assert self.authority is not None and self._certificate is not None
        identity = Identity(self.run_id, "peer", self.peer_id)
        present, now = self._certificate.present, self._clock.unix()
        return self.authority.renew(identity, present, now=now, mend=REPLACE_AUTHORITY)

    async def _ask_certificate(self, peer_id: str) -> bytes:
        stub: Any = enrolment_pb2_grpc.RenewalStub(self.links.channel(peer_id))
        try:
            reply: enrolment_pb2.RenewReply = await stub.Renew(enrolment_pb2.RenewRequest(), timeout=CERTIFICATE_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        return reply.certificate_der

    # -- what others ask ---------------------------------------------------------------------------------------------------

    def limit_of(self, context: Context) -> SendLimit:
        """Return what bounds the bytes that a caller is sent; nothing does where that is this member, on this machine."""
        return UNLIMITED if self.callers.is_here(context) else self._limit

    def is_member(self, peer_id: str) -> bool:
        """See `Gate`."""
        record = self.council.committed
        return record is not None and peer_id in record.members

    async def give(self, context: Context, order: Order) -> None:
        """Take an operator's order, as `order`, from a call. Raises RefusedError for anybody else."""
        self.callers.operator(context)
        _log.info("the operator's order, from %s: %s", context.peer(), _order_words(order))
        await self.order(order)

    async def order(self, order: Order) -> None:
        """Have all agree on an operator's order, and return once they have. The caller has checked who gives it.

        Raises StaleError when this host does not lead, RefusedError, TransportError when no quorum agrees in time.
        """
        if self.council.role is not Role.LEADER:
            raise StaleError(f"ask the leader, {self.council.leader}" if self.council.leader else "there is no leader now")
        record = self.council.committed
        ends = record is not None and record.phase in (Phase.DRAINING, Phase.FINISHED)
        if self.gossip is not None and ends and order in (ev.SetPhase(Phase.RUNNING), ev.SetPhase(Phase.PAUSED)):
            raise RefusedError("a run with gossip that drains or has finished does not go on: all settle on its model")
        if len(self._orders) >= MOST_ORDERS:
            raise BusyError("too many orders wait to be agreed on")
        if record is not None and _is_done(order, record):
            return
        entry = order, asyncio.get_running_loop().create_future()
        self._orders.append(entry)
        try:
            self.tell(order)
            async with asyncio.timeout(ORDER_S):
                await entry[1]
        except TimeoutError:
            raise TransportError(
                f"no quorum agreed on it within {ORDER_S:g} s; it may yet come about, look at status"
            ) from None
        finally:
            self._orders.remove(entry)

    async def claim(self, claim: ev.Claim) -> None:
        """See `Gate`: return once a committed record says that this invitation is used for this key.

        Raises RefusedError (it is used for another one; evicted), StaleError (this member is not a holder), TransportError
        (no quorum agrees in time), BusyError.
        """
        if self._claims >= MOST_ORDERS:
            raise BusyError("too many invitations wait to be agreed on")
        self._claims += 1
        try:
            async with asyncio.timeout(ORDER_S):
                while not self._is_claimed(claim):
                    if self.council.record is not None:
                        self.tell(claim)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(CLAIM_AGAIN_S):
                            await self._news.wait()
        except TimeoutError:
            raise TransportError(f"no quorum agreed on it within {ORDER_S:g} s; say it again") from None
        finally:
            self._claims -= 1

    def _is_claimed(self, claim: ev.Claim) -> bool:
        """Return whether the invitation is used for this key, and members can be reached; raise why it cannot be.

        A founder's invitation may be redeemed before the founder's own record is committed, or has its address.
        """
        record = self.council.committed
        if record is None or not self.reachable:
            return False
        if self.peer_id not in record.holders:
            raise StaleError(f"{self.peer_id} is not one of those who let others in: {', '.join(record.holders)}")
        if claim.peer_id in record.evicted:
            raise RefusedError(f"{claim.peer_id} was evicted ({record.evicted[claim.peer_id]}); choose another name")
        if (used := record.enrolled.get(claim.peer_id)) is None:
            if len(record.enrolled) >= MOST_ENROLLED:
                raise RefusedError(f"{MOST_ENROLLED} names were enrolled already; begin a new run")
            return False
        if used.invitation > claim.enrolled.invitation:
            raise RefusedError(f"a later invitation for {claim.peer_id} was used; ask for a new one")
        if used.invitation == claim.enrolled.invitation and used.key != claim.enrolled.key:
            raise RefusedError("this invitation was used already, by another key; ask for a new one")
        return used == claim.enrolled

    @property
    def public_key(self) -> bytes:
        """Of this member's certificate (SubjectPublicKeyInfo, DER)."""
        return self._signer.public_key

    async def take_authority(self, sealed: bytes) -> None:
        """Keep a copy of the authority's key. Raises StaleError unless the record says that this member may, RefusedError."""
        record = self.council.committed
        if record is None or self.peer_id not in record.holders:
            raise StaleError(f"{self.peer_id} has not heard yet that it is to have the authority's key")
        try:
            key = self._signer.open_sealed(sealed, authority_context(self.run_id, self.peer_id))
        except ValueError:
            raise RefusedError(f"the authority's key was not sealed for {self.peer_id}") from None
        self.authority = await self._background.in_worker(keep_authority, self._folder.path, self.run_id, key)
        _log.info("%s has a copy of the authority's key, and lets others in", self.peer_id)

    async def replace_authority(self, context: Context, request: pb.ReplaceAuthorityRequest) -> None:
        """Have all agree on another authority. Raises RefusedError unless the present one has endorsed it."""
        self.callers.operator(context)
        try:
            root = Root(*(base64.b64encode(each).decode() for each in (request.certificate, request.endorsement)))
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if self._trust is not None:
            self._trust.check(root)
        await self.give(context, ev.Supersede(root, check_id("peer_id", request.peer_id)))

    def describe(self, *, settings: bool) -> SwarmDescription:
        """Return what a peer of the run may know. Raises StaleError before this member was let in."""
        if self.council.record is None:
            raise StaleError(f"{self.peer_id} is not in the swarm yet")
        alone = self.gossip is not None and not settings  # a peer trains at its own host then
        hosts = addresses_of(self.council.record) if not alone else {}
        told = self._settings if settings and self._settings is not None else Settings(b"")
        return SwarmDescription(len(self.parts), hosts, told.run_toml, told.schema)

    @property
    def holders(self) -> tuple[str, ...]:
        """See `Gate`."""
        record = self.council.committed
        return record.holders if record is not None else ()

    def unix(self) -> float:
        """See `Gate`."""
        return self._clock.unix()

    @property
    def reachable(self) -> list[str]:
        """See `Gate`."""
        found = addresses_of(self.council.record)
        return [address for addresses in found.values() for address in addresses][:MAX_ENDPOINTS]

    async def offer(
        self, reader: str, number: int, outer_step: int, update_id: str, chunk_bytes: int = CHUNK_BYTES
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring an update. Raises GoneError."""
        part = self.parts[number]
        if part.own is not None and part.own[0].update.id == update_id:
            async for message in offer_parts(part.own[0], chunk_bytes):
                yield message
            return
        async with self._kept.place(reader):
            async for message in offer_parts(await part.do(part.replica.kept, outer_step, update_id), chunk_bytes):
                yield message

    async def contributions(
        self, reader: str, number: int, update_id: str, chunk_bytes: int = CHUNK_BYTES
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring what an update of an engine here was merged from. Raises GoneError, RefusedError."""
        part, record = self.parts[number], self.council.record
        if record is None or reader not in record.parts[number].verifiers:
            raise RefusedError(f"{reader} does not verify part {number}")
        if part.own is None or part.own[0].update.id != update_id:
            raise GoneError(f"part {number}: this update is not offered here")
        async with self._kept.place(reader):
            async for message in contribution_parts(part.sources, chunk_bytes):
                yield message

    async def state(self, reader: str, number: int, chunk_bytes: int = CHUNK_BYTES) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring a part's state. Raises GoneError."""
        async with self._states.place(reader):
            async for message in state_parts(await self.parts[number].do(self.parts[number].replica.snapshot), chunk_bytes):
                yield message

    def settles(self, reader: str, settling: int) -> bool:
        """Whether a member that fetches this one's outer parameters is the owner that computes what all settle on."""
        record = self.council.committed
        return settling > 0 and record is not None and record.parts[0].owner == reader

    async def phi(
        self, reader: str, gossip: GossipMember, settling: int, chunk_bytes: int = CHUNK_BYTES
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring this member's outer parameters. Raises GoneError, BusyError.

        The owner that settles has a place of its own: it waits for nobody who only reads.
        """
        async with (self._settlings if self.settles(reader, settling) else self._states).place(reader):
            async for message in gossip.phi(settling, chunk_bytes):
                yield message

    async def owners(self) -> AsyncGenerator[pb.Owners, None]:
        """Yield who serves each part: now, whenever that changed, and each second. With gossip this host serves its peer."""
        while not self._closing:
            news, record, told = self._news, self.council.committed, pb.Owners()
            if self.gossip is not None:
                if first := self.gossip.first_round_id:
                    told = owners_to_pb([PartOwner(self.peer_id, first)])
            elif record is not None:
                addresses = {peer_id: member.addresses for peer_id, member in record.members.items()}
                told = owners_to_pb(
                    [PartOwner(part.owner, first_round_id(part.grant), addresses.get(part.owner, ())) for part in record.parts]
                )
            yield told
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OWNERS_S):
                    await news.wait()

    def wanted(self, waiting: Mapping[int, int]) -> None:
        """The peer beside this host waits for owners. waiting: by part, the outer step that it is at."""
        if self.gossip is None:
            for number, outer_step in waiting.items():
                self.tell(ev.Wanted(number, outer_step))

    def logged(self, number: int, outer_step: int, seen: int = 0) -> LoggedEntry:
        """Return an entry of the audit log kept here, as `PartLog.entry`.

        Raises StaleError, GoneError, RefusedError, RemoteProtocolError.
        """
        return self._part_log(number).entry(outer_step, seen)

    def goes_on(self, number: int, old: int, new: int) -> tuple[bytes, ...]:
        """Return what `PartLog.goes_on` does. Raises GoneError, RefusedError, RemoteProtocolError."""
        return self._part_log(number).goes_on(old, new)

    def _part_log(self, number: int) -> PartLog:
        within("part", number, 0, len(self.parts) - 1)
        if (log := self._stores[number].part_log) is None:
            raise RefusedError("the run has no audit log")
        return log

    def doubted(self, doubt: LogDoubt) -> None:
        """Show what the peer beside this host finds wrong with the audit log of a part. Nothing else follows from it."""
        within("part", doubt.part, 0, len(self.parts) - 1)
        self._note(f"part {doubt.part}, outer step {doubt.outer_step}: {doubt.reason}")

    def handler(self, method: str, metadata: Any) -> Any:
        """Return what serves a call of a peer that trains.

        Raises TransportError, which names the owner: the call may be tried again, there; RemoteProtocolError.
        """
        number = part_of(metadata, len(self.parts))
        if self.gossip is None and method == _FETCH_UPDATE and asks_taken(metadata):
            return fetch_update_handler(self._taken[number].FetchUpdate)
        engine, record = self.parts[number].engine, self.council.committed
        if self.gossip is not None:
            engine = self.gossip.engine
        if engine is None and self.gossip is not None:
            raise _AnothersError(self.peer_id, "this member's outer parameters are not here yet, or all settle")
        if engine is None or not engine.run.founded:  # it is about to start
            owner = record.parts[number].owner if record is not None else ""
            another = owner not in ("", self.peer_id)
            raise _AnothersError(owner, f"part {number} is {owner}'s" if another else f"part {number} is not served yet")
        return engine.handlers.get(method)


class _Places:
    """For so many readers at a time, each another member; the others wait, no longer than they like."""

    def __init__(self, most: int) -> None:
        self._free, self._turns = asyncio.Semaphore(most), dict[str, asyncio.Lock]()

    @asynccontextmanager
    async def place(self, reader: str) -> AsyncIterator[None]:
        """Take a place, until the block ends."""
        async with self._turns.setdefault(reader, asyncio.Lock()), self._free:
            yield


async def _while_member(callers: Callers, context: Context, messages: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield messages as long as their reader is a member: it may be evicted meanwhile, or have another key."""
    async with contextlib.aclosing(messages):
        async for message in messages:
            callers.member(context)
            yield message


class _CouncilService:
    """Council of council.proto."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def _send(
        self,
        context: Context,
        messages: AsyncGenerator[Any, None],
        limit: SendLimit,
        least_bytes_per_s: float = MIN_BYTES_PER_S,
    ) -> None:
        """Send what a member fetches: one that reads slower than it gives up a source itself leaves its place to others."""
        allowed = _while_member(self._host.callers, context, messages)
        await send(context.write, allowed, limit=limit, least_bytes_per_s=least_bytes_per_s)

    async def Meet(self, messages: AsyncIterator[pb.CouncilMessage], context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            caller = self._host.callers.peer(context)
            await self._host.links.serve(caller, messages, context.write, certificate_of(context))

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.SwarmDescription:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.peer_or_observer(context)
            return description_to_pb(self._host.describe(settings=request.settings))
        raise AssertionError("unreachable: abort raises")

    async def FetchOffer(self, request: pb.OfferRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader = self._host.callers.member(context)
            number = part_of(context.invocation_metadata(), len(self._host.parts))
            update_id = check_digest("id", request.id.hex())
            limit = self._host.limit_of(context)
            await context.send_initial_metadata(())  # see `transfers`
            parts = self._host.offer(reader, number, request.outer_step, update_id, limit.chunk_bytes)
            await self._send(context, parts, limit)

    async def FetchContributions(self, request: pb.OfferRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader = self._host.callers.member(context)
            number = part_of(context.invocation_metadata(), len(self._host.parts))
            update_id = check_digest("id", request.id.hex())
            limit = self._host.limit_of(context)
            await self._send(context, self._host.contributions(reader, number, update_id, limit.chunk_bytes), limit)

    async def WatchOwners(self, request: pb.OwnersRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.peer(context)
            async for owners in self._host.owners():
                self._host.callers.peer(context)  # it may have been evicted
                await context.write(owners)

    async def FetchState(self, request: pb.StateRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader = self._host.callers.member(context)
            number = part_of(context.invocation_metadata(), len(self._host.parts))
            limit = self._host.limit_of(context)
            await context.send_initial_metadata(())
            await self._send(context, self._host.state(reader, number, limit.chunk_bytes), limit)

    async def Swap(self, messages: AsyncIterator[Any], context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            member, gossip = self._host.callers.member(context), self._host.gossip
            if gossip is None:
                raise RefusedError("this run has no swaps")
            await gossip.swaps.serve(member, messages, context.write)

    async def FetchPhi(self, request: pb.PhiRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader, gossip = self._host.callers.member(context), self._host.gossip
            if gossip is None:
                raise RefusedError("this run has one model for all: FetchState")
            limit = self._host.limit_of(context)
            await context.send_initial_metadata(())
            messages = self._host.phi(reader, gossip, request.settling, limit.chunk_bytes)
            # The owner that settles reads from all members at a time, and bounds that itself.
            least = 0.0 if self._host.settles(reader, request.settling) else MIN_BYTES_PER_S
            await self._send(context, messages, limit, least)

    async def Waiting(self, request: pb.WaitingRequest, context: Context) -> pb.WaitingReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.itself(context, "says here that it waits")
            self._host.wanted(waiting_from_pb(request))
        return pb.WaitingReply()

    async def Logged(self, request: pb.LoggedRequest, context: Context) -> pb.LoggedReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.itself(context, "may ask or say this here")
            return logged_to_pb(self._host.logged(*logged_request_from_pb(request)))
        raise AssertionError("unreachable: abort raises")

    async def Doubt(self, request: pb.LogDoubt, context: Context) -> pb.LogDoubtReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.itself(context, "may ask or say this here")
            self._host.doubted(doubt_from_pb(request))
        return pb.LogDoubtReply()

    async def GoesOn(self, request: pb.GoesOnRequest, context: Context) -> pb.GoesOnReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.peer(context)
            return pb.GoesOnReply(consistency=self._host.goes_on(*goes_on_request_from_pb(request)))
        raise AssertionError("unreachable: abort raises")

    async def Standing(self, request: pb.StandingRequest, context: Context) -> pb.StandingReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.inquirer(context)
            return pb.StandingReply(standing=self._host.standing().encode())
        raise AssertionError("unreachable: abort raises")

    async def Entrust(self, request: pb.EntrustRequest, context: Context) -> pb.EntrustReply:
        """See the service."""
        async with abort_on_error(context):
            await self._host.give(context, ev.Entrust(check_id("peer_id", request.peer_id)))
        return pb.EntrustReply()

    async def PublicKey(self, request: pb.PublicKeyRequest, context: Context) -> pb.PublicKeyReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.operator(context)
            return pb.PublicKeyReply(key=self._host.public_key)
        raise AssertionError("unreachable: abort raises")

    async def TakeAuthority(self, request: pb.TakeAuthorityRequest, context: Context) -> pb.TakeAuthorityReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.operator(context)
            await self._host.take_authority(request.sealed)
        return pb.TakeAuthorityReply()

    async def ReplaceAuthority(self, request: pb.ReplaceAuthorityRequest, context: Context) -> pb.ReplaceAuthorityReply:
        """See the service."""
        async with abort_on_error(context):
            await self._host.replace_authority(context, request)
        return pb.ReplaceAuthorityReply()

    async def LeaveSwarm(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """See the service."""
        async with abort_on_error(context):
            self._host.callers.itself(context, "leaves here; an operator evicts")
            return pb.LeaveReply(outcome=await self._host.leave())
        raise AssertionError("unreachable: abort raises")


class _OrderService:
    """The operator's calls of control.proto, for the whole swarm. Only the leader takes them."""

    Attend = Status = Watch = None  # the engines'

    def __init__(self, host: Host) -> None:
        self._host = host

    async def Evict(self, request: cpb.EvictRequest, context: Context) -> cpb.EvictReply:
        """Shut a member out for good."""
        async with abort_on_error(context):
            peer_id, reason = evict_request_from_pb(request)
            if peer_id in (OPERATOR_ID, COORDINATOR_ID):
                raise RefusedError(f"{peer_id} is the name of no member")
            await self._host.give(context, ev.Evict(peer_id, one_line(reason, MOST_TEXT) or "evicted by the operator"))
        return cpb.EvictReply()

    async def Pause(self, request: cpb.PauseRequest, context: Context) -> cpb.PauseReply:
        """Open no rounds until Resume."""
        async with abort_on_error(context):
            await self._host.give(context, ev.SetPhase(Phase.PAUSED))
        return cpb.PauseReply()

    async def Resume(self, request: cpb.ResumeRequest, context: Context) -> cpb.ResumeReply:
        """Open rounds again, after Pause or Drain."""
        async with abort_on_error(context):
            await self._host.give(context, ev.SetPhase(Phase.RUNNING))
        return cpb.ResumeReply()

    async def Drain(self, request: cpb.DrainRequest, context: Context) -> cpb.DrainReply:
        """Finish the run with the open rounds."""
        async with abort_on_error(context):
            await self._host.give(context, ev.SetPhase(Phase.DRAINING))
        return cpb.DrainReply()


class _ToEngines(grpc.GenericRpcHandler):
    """The calls of peers that train go to the engine of the part that they name; an operator's orders are the swarm's."""

    def __init__(self, host: Host, orders: Mapping[str, Any]) -> None:
        self._host = host
        self._orders = {f"/editpb.Control/{method}": orders[method] for method in ORDERS}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the engine's handler, or one that says why there is none; None for an unknown method."""
        if not handler_call_details.method.startswith(("/editpb.Control/", "/editpb.Data/")):
            return None
        if (order := self._orders.get(handler_call_details.method)) is not None:
            return order
        try:
            return self._host.handler(handler_call_details.method, handler_call_details.invocation_metadata)
        except EditError as error:
            return grpc.stream_stream_rpc_method_handler(_refuser(error))


def part_store(folder: MemberFolder, part: int, config: RunConfig, run_id: str) -> Store:
    """Return the store of a part in a member's folder, with its audit log if the run has one. config: see `merging`."""
    path, steps = folder.part(part), config.audit.keep_contributions
    kept = KeptContributions(contributions_of(path), steps) if steps else None
    part_log = PartLog(path, run_id, part, config) if config.audit.enabled else None
    return Store(path, config, run_id, kept=kept, part_log=part_log)


def merging(config: RunConfig) -> RunConfig:
    """Return how the parts are merged: with gossip by settlings only."""
    return settling(config) if config.outer.algorithm == "gossip" else config


def _is_done(order: ev.Event, record: Record) -> bool:
    match order:
        case ev.Evict(peer_id):
            return peer_id in record.evicted
        case ev.Entrust(peer_id):
            return peer_id in record.holders
        case ev.Supersede(root):
            return root in record.roots
        case ev.SetPhase(phase):
            return record.phase is phase or (phase is Phase.DRAINING and record.phase is Phase.FINISHED)
    return False


def _order_words(order: Order) -> str:
    match order:
        case ev.Evict(peer_id, reason):
            return f"evict {peer_id}: {reason}"
        case ev.Entrust(peer_id):
            return f"give {peer_id} the authority's key"
        case ev.Supersede(_, peer_id):
            return f"put another authority in the place of the present one; {peer_id} has its key"
        case ev.SetPhase(phase):
            return f"be {phase.value}"


class _AnothersError(TransportError):
    """Another host owns the part, or this one will soon. owner: its peer_id; '': nobody knows."""

    def __init__(self, owner: str, text: str) -> None:
        super().__init__(text)
        self.owner = owner


def _refuser(error: EditError) -> Any:
    async def refuse(messages: Any, context: Context) -> None:
        async with abort_on_error(context):
            if isinstance(error, _AnothersError):
                context.set_trailing_metadata(metadata_of_owner(error.owner) if error.owner else ())
            raise error

    return refuse


def found_swarm(
    run_id: str,
    peer_id: str,
    config: RunConfig,
    folder: MemberFolder,
    states: Sequence[OuterState],
    *,
    incarnation: int,
    config_hash: str = "",
    lease_s: float = 1.0,
    root: Root | None = None,
    key: str = "",
) -> None:
    """Write the folder of a swarm's first member: it has all parts, and the only vote. Raises StorageError.

    Args:
        states: the first of each part.
        root: the run's authority; None: nobody asks for it.
        key: of the member's certificate (`public_hash`), which counts as enrolled then.
    """
    digests = []
    for number, outer in enumerate(states):
        store = part_store(folder, number, merging(config), run_id)
        PartReplica(run_id, number, merging(config), store).found(outer)
        store.close()
        digests.append(outer.digest)
    record = Record(
        run_id=run_id,
        lineage=1,
        term=0,
        version=0,
        members={peer_id: Member(incarnation=incarnation)},
        voters=(name_of(peer_id, incarnation),),
        parts=tuple(Part(owner=peer_id, grant=0, outer_step=0, digest=digest) for digest in digests),
        config_hash=config_hash,
        lease_s=lease_s,
        verify=config.swarm.verify if config.swarm is not None else 0,
        holders=(peer_id,),
        roots=(root,) if root is not None else (),
        enrolled={peer_id: Enrolled("0" * 32, key)} if root is not None else {},
    )
    folder.save(Saved.founded(record))
