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
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import torch

from aggregator.resources import Clock
from aggregator.security.members import Members
from aggregator.services.call_limit import CallLimit
from aggregator.services.readers import send
from aggregator.storage.store import Store
from aggregator.swarm.engine import Engine, first_round_id
from aggregator.swarm.engine_store import Proposal
from aggregator.swarm.links import Addresses, Links
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import Fetching, PartReplica, carry_out
from aggregator.swarm.transfers import body_sizes, fetch_offer, fetch_state, offer_parts, state_parts
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.machine import Council, Timing
from edit.council.record import Member, Part, Record, Saved, Update, name_of, peer_of
from edit.errors import (
    ConfigError,
    EditError,
    EvictedError,
    RefusedError,
    RemoteProtocolError,
    TransportError,
)
from edit.fragments.schema import Schema
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from editpb import council_pb2 as pb
from editpb.council_messages import Offering, PartOwner, owners_to_pb
from editpb.identity import admitted
from editpb.limits import check_digest
from editpb.transport.abort_on_error import abort_on_error
from editpb.transport.channel_options import server_options
from editpb.transport.chunk_frames import add_council_servicer
from editpb.transport.parts import metadata_of_owner, part_of

if TYPE_CHECKING:
    from aggregator.swarm.discovery import Discovery, Found

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["Host", "Place", "found_swarm"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
MOST_UNTAKEN = 256  # messages that wait for the council
MOST_STATES = 2  # states that others read here at a time: each is a copy. Others wait, no longer than they like
MOST_KEPT = 8  # updates that others read from the journals here at a time, likewise
_MAX_CALLS = 4096
_STOP_GRACE_S = 0.5
_OWNERS_S = 1.0  # who watches the owners is told at least so often: else it asks another host


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host serves. listen: HOST:PORT to bind; advertise: the host at which others reach it; '': nobody does."""

    listen: str
    advertise: str = ""


class _HostedPart:
    """One part at this host. `thread`: the one that its replica is used in."""

    def __init__(self, number: int, schema: Schema, replica: PartReplica) -> None:
        self.number, self.schema, self.replica = number, schema, replica
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"part {number}")
        self.jobs: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self.pulling: tuple[Update, asyncio.Task[None]] | None = None  # an owner's update that is fetched
        self.pulled: Offer | None = None  # one that is here, until the council has been told; no other is fetched before
        self.own: tuple[Offer, tuple[MergeRecord, ...]] | None = None  # what an engine here made
        self.engine: Engine | None = None

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
        on_commit: is told of each outer step that is taken here, in the part's thread.

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
        seeds: Addresses | None = None,
        timing: Timing | None = None,
        discovery: Discovery | None = None,
        clock: Clock | None = None,
        on_commit: Callable[[int, Commit], None] = lambda part, commit: None,
    ) -> None:
        self.run_id, self.peer_id = run_id, peer_id
        self._config, self._folder, self._members, self._place = config, folder, members, place
        self._clock, self._timing = clock or Clock(), timing or Timing()
        self._seeds: Addresses = seeds or {}
        self._discovery = discovery
        self._found: Addresses = {}  # by it
        self._credentials, self._server_credentials = client, server
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="council")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._background = Background(self._disk)
        self._saved = folder.saved()
        self.parts: list[_HostedPart] = []
        self._stores: list[Store] = []
        for number, schema in enumerate(schemas):
            self._stores.append(Store(folder.part(number), config, run_id))
            replica = PartReplica(run_id, number, config, self._stores[-1], partial(on_commit, number))
            self.parts.append(_HostedPart(number, schema, replica))
        self._events: asyncio.Queue[tuple[ev.Event, bool]] = asyncio.Queue()  # and whether it takes room
        self._room = asyncio.Semaphore(MOST_UNTAKEN)
        self._states, self._kept = _Places(MOST_STATES), _Places(MOST_KEPT)
        self._council: Council | None = None
        self._links: Links | None = None
        self._closing = False
        self._news = asyncio.Event()  # of a committed record; each one has another
        self._voters = (tuple[str, ...](), 0)  # and how many members, as the log has said
        self.listen = ""  # HOST:PORT, once bound

    # -- life --------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the port, and take part. Raises ConfigError (a port in use), StorageError."""
        limit = CallLimit(_MAX_CALLS, self._ranks)
        options = server_options(max_connections=_MAX_CALLS)
        self._server = grpc.aio.server(interceptors=[limit], options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        add_council_servicer(_CouncilService(self), self._server)
        self._server.add_generic_rpc_handlers((_ToEngines(self),))
        port = self._bind()
        saved = await self._begun()
        addresses = (f"{self._place.advertise}:{port}",) if self._place.advertise else ()
        member = self._member = Member(incarnation=saved.incarnation, addresses=addresses, reachable=bool(addresses))
        states = [part.replica.state for part in self.parts]
        if not any(state.digest for state in states):
            states = []
        self._council = Council(self.run_id, self.peer_id, member, saved, states, self._timing, self._clock.monotonic())
        self._links = Links(self.run_id, self.peer_id, saved.incarnation, self._credentials, self)
        await self._server.start()
        self._reach(saved.record)
        for part in self.parts:
            await part.do(torch.set_num_threads, torch.get_num_threads())  # OpenMP counts for each thread that computes
            self._background.spawn(self._work(part))
        self._background.spawn(self._take_events())
        if self._discovery is not None:
            self._discovery.start(self._found_others, self._found_at)
        _log.info("%s of %s listens on %s", name_of(self.peer_id, saved.incarnation), self.run_id, self.listen)

    def _bind(self) -> int:
        """Return the port. One that the system chooses is chosen once, so that the others find this host again."""
        host, _, wanted = self._place.listen.rpartition(":")
        before = self._folder.port()
        for port in (before, 0) if wanted == "0" and before else (int(wanted),):
            try:
                bound = self._server.add_secure_port(f"{host}:{port}", self._server_credentials)
            except RuntimeError:
                continue
            self._folder.keep_port(bound)
            self.listen = f"{host}:{bound}"
            return bound
        raise ConfigError(f"--listen {self._place.listen}: cannot be bound; is the port in use?")

    async def _begun(self) -> Saved:
        """Return what is on disk; in a new folder that is this life's number."""
        if self._saved is None:
            self._saved = Saved(incarnation=int(self._clock.unix() * 1000))
            await self._background.in_worker(self._folder.save, self._saved)
        return self._saved

    async def watch(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set. Raises LocalProtocolError as soon as something has failed that ends this host."""
        await self._background.watch(stop)

    async def close(self) -> None:
        """Stop at once: what others do not know yet is on disk."""
        self._closing = True
        self._news.set()
        await self._background.stop()
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

    def tell(self, event: ev.Event) -> None:
        """Give an event to the council, after those that wait."""
        self._events.put_nowait((event, False))

    def _ranks(self, peer_id: str) -> int:
        return sum(len(part.engine.run.attendances.of(peer_id)) for part in self.parts if part.engine is not None)

    # -- the council -------------------------------------------------------------------------------------------------------

    async def heard(self, sender: str, word: ev.Message | Offering) -> None:
        """See `Listener`."""
        if isinstance(word, Offering):
            self._announced(sender, word.update)
            return
        await self._room.acquire()
        self._events.put_nowait((ev.Received(sender, word), True))

    def connected(self, peer_id: str) -> None:
        """See `Listener`."""
        self.tell(ev.Connected(peer_id))

    def disconnected(self, peer_id: str) -> None:
        """See `Listener`."""
        self.tell(ev.Disconnected(peer_id))

    def failed(self, error: BaseException) -> None:
        """See `Listener`."""
        self._background.fail(error)

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
                self._reach(saved.record)
            case ev.Send(peer_id, message):
                self.links.send(peer_id, message)
            case ev.Committed(record):
                self._follow(record)
            case ev.Hold(update):
                part = self.parts[update.part]
                own = part.own if part.own is not None and part.own[0].update == update else (part.pulled, ())
                part.jobs.put_nowait(partial(self._hold, part, effect, *own))
            case ev.Adopt():
                self.parts[effect.part].jobs.put_nowait(partial(self._adopt, self.parts[effect.part], effect))
            case ev.Fetch():
                self._background.spawn(self._fetch(self.parts[effect.part], effect))
            case ev.SendOffer(update):
                for peer_id in self.links.connected:
                    self.links.send(peer_id, Offering(update))
            case ev.Serve(number, grant):
                self.parts[number].jobs.put_nowait(partial(self._serve, self.parts[number], grant))
            case ev.Cease(number, grant):
                self.parts[number].jobs.put_nowait(partial(self._cease, self.parts[number], f"grant {grant} is over"))
            case ev.Refused(reason):
                self._refused(event, reason)
            case ev.Noticed(text):
                _log.info("%s", text)

    def _check(self, record: Record | None) -> None:
        """Raise ConfigError when this member's model is not cut into as many parts as the swarm's."""
        if record is not None and len(record.parts) != len(self.parts):
            raise ConfigError(f"the swarm's model has {len(record.parts)} parts, this member's {len(self.parts)}")

    def _reach(self, record: Record | None) -> None:
        members = record.members if record is not None else {}
        known = {peer_id: member.addresses for peer_id, member in members.items() if member.reachable}
        sources = known, self._found, self._seeds
        peers = {*known, *self._found, *self._seeds} - ({*record.evicted} if record is not None else set())
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
        if (record.voters, len(record.members)) != self._voters:
            self._voters = record.voters, len(record.members)
            _log.info("%d vote, of %d members: %s", len(record.voters), len(record.members), ", ".join(record.voters))
        engines = [part.engine for part in self.parts if part.engine is not None and part.engine.run.founded]
        for peer_id, reason in record.evicted.items():
            self.links.drop(peer_id, EvictedError(reason))
            if not self._members.evicted(peer_id):
                self._members.evict(peer_id, reason)
                for engine in engines:
                    engine.run.evict(peer_id, reason)
        for engine in engines:
            engine.follow(record.phase)

    def _refused(self, event: ev.Event, reason: str) -> None:
        match event:
            case ev.Offered(sender, update):
                _log.info("the update of %s to outer step %d of part %d: %s", sender, update.outer_step, update.part, reason)
            case ev.Made(update):
                part = self.parts[update.part]
                part.jobs.put_nowait(partial(self._refuse, part, update, reason))
            case _:
                _log.warning("%s", reason)

    # -- updates of owners -------------------------------------------------------------------------------------------------

    def _announced(self, sender: str, update: Update) -> None:
        """An owner has an update. Fetch it, unless the council would not hold it; then it is announced again."""
        if self.council.why_refused(sender, update) or update.part >= len(self.parts):
            return
        part = self.parts[update.part]
        if part.replica.state.held == update or part.pulled is not None:
            return
        if part.pulling is not None:
            if part.pulling[0].grant >= update.grant:
                return
            part.pulling[1].cancel()
        task = asyncio.get_running_loop().create_task(self._pull(part, sender, update))
        part.pulling = update, task
        task.add_done_callback(partial(self._pull_ended, part))

    async def _pull(self, part: _HostedPart, sender: str, update: Update) -> None:
        stub, sizes = self.links.stub(peer_of(sender)), body_sizes(part.replica.outer)
        offer = await fetch_offer(stub, part.number, update.outer_step, update.id, sizes)
        if offer.update != update:
            raise RemoteProtocolError(f"part {part.number}: the update is described otherwise than it was announced")
        await part.do(offer.check, self.run_id)
        part.pulled = offer
        self.tell(ev.Offered(sender, update))

    def _pull_ended(self, part: _HostedPart, task: asyncio.Task[None]) -> None:
        if part.pulling is not None and part.pulling[1] is task:
            part.pulling = None
        if task.cancelled():
            return
        match task.exception():
            case None:
                pass
            case EditError() as error:
                _log.info("part %d: %s", part.number, error)
            case bug:
                self.failed(bug)

    # -- parts -------------------------------------------------------------------------------------------------------------

    async def _work(self, part: _HostedPart) -> None:
        while True:
            job = await part.jobs.get()
            await job()

    async def _hold(self, part: _HostedPart, effect: ev.Hold, offer: Offer | None, records: Sequence[MergeRecord]) -> None:
        self.tell(await part.do(partial(carry_out, part.replica, effect, offer=offer, own=records)))

    async def _adopt(self, part: _HostedPart, effect: ev.Adopt) -> None:
        answer = await part.do(carry_out, part.replica, effect)
        self._say(part, answer)
        if part.own is not None and part.own[0].update.outer_step <= part.replica.state.outer_step:
            part.own = None  # the journal has it

    async def _fetch(self, part: _HostedPart, effect: ev.Fetch) -> None:
        """Ask the source for one thing after the other. Its answers are taken in the part's thread."""
        fetching = await part.do(Fetching, part.replica, effect)
        while fetching.answer is None:
            try:
                found = await self._ask(part, effect.source, fetching.wanted)
            except EditError as error:
                await part.do(fetching.give, error)
            else:
                await part.do(fetching.give, found)
        self._say(part, fetching.answer)

    def _say(self, part: _HostedPart, answer: ev.Held | ev.Applied | ev.Failed) -> None:
        """Tell the council, and the log, what came of an Adopt or Fetch."""
        self.tell(answer)
        match answer:
            case ev.Applied(number, outer_step):
                _log.info("part %d is at outer step %d", number, outer_step)
            case ev.Failed(number, _, reason):
                _log.info("part %d: %s", number, reason)

    async def _ask(self, part: _HostedPart, source: str, wanted: tuple[int, str] | None) -> Any:
        stub = self.links.stub(source)
        if wanted is None:
            return await fetch_state(stub, part.number, part.schema)
        return await fetch_offer(stub, part.number, *wanted, body_sizes(part.replica.outer))

    # -- engines -----------------------------------------------------------------------------------------------------------

    async def _serve(self, part: _HostedPart, grant: int) -> None:
        number, loop = part.number, asyncio.get_running_loop()

        def propose(proposal: Proposal) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(part.jobs.put_nowait, partial(self._propose, part, grant, proposal))

        store = await part.do(part.replica.serve, self._folder.part(number), propose)
        part.engine = Engine(
            self.run_id,
            number,
            grant,
            self._config,
            part.replica.outer,
            store,
            self._folder.engine(number),
            self._members,
            self._files,
            self._clock,
            lambda: self.tell(ev.Ended(number, grant)),
            self.failed,
        )
        await part.engine.start()
        if (record := self.council.committed) is not None:
            part.engine.follow(record.phase)
        _log.info("owns part %d with grant %d, at outer step %d", number, grant, part.replica.state.outer_step)

    async def _cease(self, part: _HostedPart, reason: str) -> None:
        engine, part.engine, part.own = part.engine, None, None
        await part.do(part.replica.cease, reason)
        if engine is not None:
            await engine.close()

    async def _propose(self, part: _HostedPart, grant: int, proposal: Proposal) -> None:
        if part.engine is None or part.engine.grant != grant:
            return  # it was refused when the grant ended
        offer = await part.do(part.replica.made, grant, proposal)
        part.own = offer, proposal.records
        self.tell(ev.Made(offer.update))

    async def _refuse(self, part: _HostedPart, update: Update, reason: str) -> None:
        part.own = None
        await part.do(part.replica.refuse, update.id, reason)

    # -- what others ask ---------------------------------------------------------------------------------------------------

    def caller(self, context: Context) -> str:
        """Return which peer of the run calls. Raises RefusedError, EvictedError."""
        peer_id = admitted(context.auth_context(), self.run_id, ("peer",)).peer_id
        record = self.council.record
        if record is not None and peer_id in record.evicted:
            raise EvictedError(record.evicted[peer_id])
        return peer_id

    def member(self, context: Context) -> str:
        """Return which member calls. Raises RefusedError, EvictedError."""
        peer_id, record = self.caller(context), self.council.record
        if record is None or not (peer_id in record.members or peer_id in map(peer_of, record.electors)):
            raise RefusedError(f"{peer_id} is no member of the swarm")
        return peer_id

    async def offer(self, reader: str, number: int, outer_step: int, update_id: str) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring an update. Raises GoneError."""
        part = self.parts[number]
        if part.own is not None and part.own[0].update.id == update_id:
            async for message in offer_parts(part.own[0]):
                yield message
            return
        async with self._kept.place(reader):
            async for message in offer_parts(await part.do(part.replica.kept, outer_step, update_id)):
                yield message

    async def state(self, reader: str, number: int) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring a part's state. Raises GoneError."""
        async with self._states.place(reader):
            async for message in state_parts(await self.parts[number].do(self.parts[number].replica.snapshot)):
                yield message

    async def owners(self) -> AsyncGenerator[pb.Owners, None]:
        """Yield who serves each part: now, whenever that changed, and each second."""
        while not self._closing:
            news, record, told = self._news, self.council.committed, pb.Owners()
            if record is not None:
                addresses = {peer_id: member.addresses for peer_id, member in record.members.items()}
                told = owners_to_pb(
                    [PartOwner(part.owner, first_round_id(part.grant), addresses.get(part.owner, ())) for part in record.parts]
                )
            yield told
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OWNERS_S):
                    await news.wait()

    def handler(self, method: str, metadata: Any) -> Any:
        """Return what serves a call of a peer that trains.

        Raises TransportError, which names the owner: the call may be tried again, there; RemoteProtocolError.
        """
        number = part_of(metadata, len(self.parts))
        engine, record = self.parts[number].engine, self.council.committed
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


class _CouncilService:
    """Council of council.proto."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def Meet(self, messages: AsyncIterator[pb.CouncilMessage], context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            await self._host.links.serve(self._host.caller(context), messages, context.write)

    async def FetchOffer(self, request: pb.OfferRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader = self._host.member(context)
            number = part_of(context.invocation_metadata(), len(self._host.parts))
            update_id = check_digest("id", request.id.hex())
            await send(context.write, self._host.offer(reader, number, request.outer_step, update_id))

    async def WatchOwners(self, request: pb.OwnersRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            self._host.caller(context)
            async for owners in self._host.owners():
                self._host.caller(context)  # it may have been evicted
                await context.write(owners)

    async def FetchState(self, request: pb.StateRequest, context: Context) -> None:
        """See the service."""
        async with abort_on_error(context):
            reader = self._host.member(context)
            number = part_of(context.invocation_metadata(), len(self._host.parts))
            await send(context.write, self._host.state(reader, number))


class _ToEngines(grpc.GenericRpcHandler):
    """The calls of peers that train go to the engine of the part that they name."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the engine's handler, or one that says why there is none; None for an unknown method."""
        if not handler_call_details.method.startswith(("/editpb.Control/", "/editpb.Data/")):
            return None
        try:
            return self._host.handler(handler_call_details.method, handler_call_details.invocation_metadata)
        except EditError as error:
            return grpc.stream_stream_rpc_method_handler(_refuser(error))


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
    schema_hash: str = "",
    lease_s: float = 1.0,
) -> None:
    """Write the folder of a swarm's first member: it has all parts, and the only vote. Raises StorageError.

    states: the first of each part.
    """
    digests = []
    for number, outer in enumerate(states):
        store = Store(folder.part(number), config, run_id)
        PartReplica(run_id, number, config, store).found(outer)
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
        schema_hash=schema_hash,
        lease_s=lease_s,
    )
    folder.save(Saved.founded(record))
