"""A member that gossips: its outer parameters on disk, its own peer's engine, swaps, and settling with the others.

    part 0, the whole model, is at the last settling     the council's, as any part; it has no owner's engine
    this member's outer parameters have gone on from it  `Phi`, moved by the engine of this member's peer
    the step from here is a settling                     the engine is paused, until part 0 has taken it
    part 0 has taken another settling                    the engine ends, and another begins with what all settled on

Who owns part 0 settles (`Settling`): it asks each member for its outer parameters, which says that it is not there yet until it
is, and proposes what comes of all. Who is late, or cannot be dialled, is left out, and takes what the others settled on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from torch import Tensor

from aggregator.resources import Clock
from aggregator.run_feed import RoundChanged, RunEvent, StepCommitted
from aggregator.security.members import Members
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.swarm.engine import Engine, first_round_id
from aggregator.swarm.engine_store import Proposal
from aggregator.swarm.gossip.phi import Calendar, Met, Phi, PhiStore
from aggregator.swarm.gossip.swaps import AWAY_S, RETRY_S, Swaps
from aggregator.swarm.links import Links
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.offers import Offer as UpdateOffer
from aggregator.swarm.replication import PartReplica, PartSnapshot
from aggregator.swarm.standing import GossipStanding, Standing
from aggregator.swarm.transfers import fetch_phi, state_parts
from edit.config.algorithm import RoundsConfig
from edit.config.run import RunConfig
from edit.council.record import Phase, Record
from edit.durable_files import make_folder, write_atomic
from edit.errors import BusyError, EditError, GoneError, RemoteProtocolError, StorageError
from edit.fragments.schema import Schema
from edit.merging.gossip import Offer, settle
from edit.merging.norms import norm
from edit.merging.outer_state import MergeRecord
from edit.rounds.events import Phase as RoundPhase
from editpb import council_pb2 as pb
from editpb.transport.send_limit import UNLIMITED, SendLimit

__all__ = ["GossipMember"]

_log = logging.getLogger(__name__)
BEHIND = 2  # outer steps that the others are ahead of a member that starts: at more it begins where they are
TAKEN_S = 3.0  # how long the last update before a settling waits to be taken
ANSWER_S = 5.0
_DRAINED = "the run drains: "  # so begins the reason of a settling that ends a run before its calendar does


class _OwnEngine(Engine):
    """The engine of this member's own peer: a run of one, whose steps are swaps. It waits where all settle.

    A drain ends with the open round: then it waits, too, for a settling. In a run that has finished it tells its peer so, once
    its parameters are those that all settled on.

    Args:
        awaits: why the first swap waits; '': it does not.
        settled: how many settlings there were.
    """

    def __init__(
        self, phi: Phi, committed: Callable[[], None], awaits: str, settled: Callable[[], int], *arguments: Any
    ) -> None:
        self._phi, self._committed, self._awaits, self._wanted = phi, committed, awaits, Phase.RUNNING
        self._settled, self._calendar = settled, Calendar.of(phi.config)
        self._last_round = 0  # the one that was open when the run began to drain
        self._rested = False  # before the run had finished
        super().__init__(*arguments)
        self.follow(Phase.RUNNING)

    @property
    def awaits(self) -> str:
        """Why there is no swap yet, as the peer is told: others are to come, or the next step is a settling."""
        if self._awaits:
            return self._awaits
        if self.rests or self._calendar.settles(self._phi.outer_step):
            return "all settle on one model"
        return ""

    @awaits.setter
    def awaits(self, reason: str) -> None:
        self._awaits = reason
        self.follow(self._wanted)

    @property
    def rests(self) -> bool:
        """Whether the run drains, or was drained, and the round that was open then has ended here: there is no further swap."""
        if self._wanted is not Phase.DRAINING or not self.run.founded:
            return self._wanted is Phase.FINISHED and self._rested
        machine = self.run.rounds.machine
        return machine.round_id != self._last_round or machine.phase not in (RoundPhase.COLLECTING, RoundPhase.COMMITTING)

    def follow(self, phase: Phase, last_step: int = 0) -> None:
        """See `Engine`. A drain ends with the open round of each, whatever last_step is, and with a settling."""
        if phase is Phase.DRAINING is not self._wanted and self.run.founded:
            self._last_round = self.run.rounds.machine.round_id
        self._rested, self._wanted = self.rests, phase
        if phase is Phase.FINISHED:
            if self._phi.settlings >= self._settled() and not self.run.finished:
                self.run.hold("all settled on one model")
                super().follow(Phase.DRAINING)
        elif phase is Phase.DRAINING:
            if self.rests:
                self.run.hold(self.awaits)
        elif not self.awaits:
            super().follow(phase)
            self.run.hold("")
        elif phase is Phase.RUNNING:
            self.run.hold(self.awaits)

    def _on_event(self, event: RunEvent, unix: float) -> None:
        if isinstance(event, StepCommitted):
            self.follow(self._wanted)
            self._committed()
        elif isinstance(event, RoundChanged) and self._wanted is Phase.DRAINING:
            self.follow(self._wanted)


class GossipMember:
    """See above. `run` it. Used on the event loop.

    Args:
        replica: of part 0; used in the thread of `do`.
        links, record: of the host, once it takes part.
        members, files, clock, fail: for the engine, as its own.
        limit: what bounds the bytes that others are sent.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        config: RunConfig,
        schema: Schema,
        folder: MemberFolder,
        replica: PartReplica,
        do: Callable[..., Awaitable[Any]],
        links: Callable[[], Links],
        record: Callable[[], Record | None],
        members: Members,
        files: Executor,
        clock: Clock,
        fail: Callable[[BaseException], None],
        limit: SendLimit = UNLIMITED,
    ) -> None:
        self._run_id, self._peer_id, self._config, self._schema, self._folder = run_id, peer_id, config, schema, folder
        self._replica, self._do, self._links, self._record = replica, do, links, record
        self._members, self._files, self._clock, self._fail = members, files, clock, fail
        self.calendar = Calendar.of(config)
        self.swaps = Swaps(peer_id, config, schema, links, record, self._swaps_taken, do, limit)
        self.engine: _OwnEngine | None = None
        self._phi: Phi | None = None
        self._store: PhiStore | None = None
        self._trained = False
        self._news = asyncio.Event()
        self._last: Met | None = None
        self._counts = [0, 0]  # swaps together, alone
        self._settled_resting = False  # whether there was no further swap before what all settled on last
        if folder.settling.exists():
            self._uploads_of_others()  # removes what is left there of a process that was killed while it settled

    # -- life --------------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Say that part 0, or what is proposed of it, may have changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def run(self) -> None:
        """Serve this member's peer, from one settling to the next."""
        while not self._replica.state.digest:
            await self._news.wait()
        while True:
            phi = await self._begin()
            await self._until_enough(phi)
            while self._replica.state.outer_step <= phi.settlings:
                await self._news.wait()
            await self._until_taken(phi)
            self._settled_resting = self._rests
            await self.stop("all settle")

    async def _begin(self) -> Phi:
        loop = asyncio.get_running_loop()
        store = self._store = PhiStore(self._folder.phi, self._config, self._run_id, partial(self._begin_swap, loop))
        phi = self._phi = store.phi = await self._recovered(store)
        swapped = phi.outer_step > self.calendar.settled(phi.settlings) and phi.state.steps_here  # else another member has
        self._trained = self._trained or swapped
        grant = await self._do(_next_grant, self._folder.engine(0))
        config = replace(self._config, rounds=RoundsConfig(), codec=replace(self._config.codec, down="fp32", fragments={
            pattern: replace(each, down="") for pattern, each in self._config.codec.fragments.items() if each.up
        }))  # fmt: skip
        engine = self.engine = _OwnEngine(
            phi,
            self._committed,
            self._few(0) if phi.outer_step == 0 and self._config.rounds.start_peers > 1 else "",
            self._settled,
            self._run_id,
            0,
            grant,
            config,
            phi,
            store,
            self._folder.engine(0),
            self._members,
            self._others(),
            self._files,
            self._clock,
            lambda: None,
            self._fail,
            lambda _: UNLIMITED,  # its peer is on this machine
            self._peer_id,
        )
        await engine.start()
        if (record := self._record()) is not None:
            engine.follow(record.phase)
        _log.info("trains on from outer step %d, %d of it settlings", phi.outer_step, phi.settlings)
        self.tell()
        return phi

    def _others(self) -> set[str]:
        record = self._record()
        return {*record.members} - {self._peer_id} if record is not None else set()

    async def _recovered(self, store: PhiStore) -> Phi:
        """Return what is on disk; what all settled on where this member was not there; or where others are that are ahead."""
        first = self._phi is None  # in this process: the host was away
        found = await self._do(store.recover)
        settlings, theta = self._replica.state.outer_step, self._replica.outer.theta
        agreed = max(settlings, self._settled())  # part 0 may have to take the last one again: its digest is not synced
        if found is not None and found.settlings > agreed:
            _log.warning("phi/ has settled %d times, and the swarm %d: it is of a lost lineage", found.settlings, agreed)
            await self._do(store.forget)
            found = None
        phi, changed = found, found is None
        if phi is None:
            phi = Phi.begun(self._peer_id, self._schema, self._config, settlings, theta)
        assert isinstance(phi, Phi)
        if phi.settlings < settlings:
            phi.settle(settlings, theta, early=self._settled_resting or await self._do(self._drained))
            changed = True
        if not self.calendar.settles(phi.outer_step):
            ahead = await self._further(phi, new=found is None, first=first)
            if ahead is not None:
                outer_step, donated = ahead
                far = [norm(there - here) for there, here in zip(donated, theta, strict=True)]
                phi.state.begin_at(outer_step - phi.settlings, donated, far)
                changed = True
        if changed:
            await self._do(store.replace, phi)
        return phi

    def _few(self, here: int) -> str:
        return f"{here} of {self._config.rounds.start_peers} peers train (rounds.start_peers)"

    async def _until_enough(self, phi: Phi) -> None:
        """Let the first swap wait for as many peers as are to train then, by their hosts' word, or for a settling of others."""
        engine, enough = self.engine, self._config.rounds.start_peers
        assert engine is not None
        while engine.awaits and phi.outer_step == 0 and self._replica.state.outer_step <= phi.settlings:
            here = int(self._taken() is not None)
            if 0 < here < enough:
                here += sum(standing.trains for standing in (await self._standings()).values())
            if here >= enough:
                engine.awaits = ""
                return
            engine.awaits = self._few(here)
            await asyncio.sleep(RETRY_S)

    async def _standings(self) -> dict[str, GossipStanding]:
        """Return what members say of themselves to which there is a link now, by peer_id."""
        links = self._links()

        async def ask(peer_id: str) -> GossipStanding | None:
            try:
                answer = await links.stub(peer_id).Standing(pb.StandingRequest(), timeout=ANSWER_S)
                return Standing.decode(answer.standing).gossip
            except grpc.aio.AioRpcError:
                return None
            except EditError as error:
                _log.info("%s: %s", peer_id, error)
                return None

        asked = sorted(links.connected & self._others())
        said = await asyncio.gather(*map(ask, asked))
        return {peer_id: standing for peer_id, standing in zip(asked, said, strict=True) if standing is not None}

    async def _further(self, phi: Phi, *, new: bool, first: bool) -> tuple[int, list[Tensor]] | None:
        """Return outer step and parameters of a member that is ahead, if more than half of those that train are, by so much.

        How far they are, each says of itself; the median counts, the lower of two, so no minority of liars moves it. A member
        that is not back from somewhere (first) counts itself.
        """
        if first:
            await self._until_linked()
        said = {peer_id: standing for peer_id, standing in (await self._standings()).items() if standing.trains}
        steps = sorted([standing.outer_step for standing in said.values()] + ([] if first else [phi.outer_step]))
        ahead = steps[(len(steps) - 1) // 2] if steps else 0
        if ahead <= phi.outer_step + (0 if new else BEHIND):
            return None
        sources = {peer_id: each.outer_step for peer_id, each in said.items() if each.settlings == phi.settlings}
        for source in sorted(sources, key=lambda each: (sources[each], each)):
            if not ahead <= sources[source] <= ahead + BEHIND:
                continue
            try:
                async with asyncio.timeout(self._config.gossip.deadline_s):
                    outer_step, settlings, theta = await self._fetch(source, 0)
            except (EditError, TimeoutError) as error:
                _log.info("%s: %s", source, error if isinstance(error, EditError) else "sends its outer parameters too slowly")
                continue
            if settlings != phi.settlings or self.calendar.settles(outer_step):
                continue
            if not phi.outer_step < outer_step <= ahead + BEHIND:
                _log.warning("%s sends outer parameters of outer step %d; most are at %d", source, outer_step, ahead)
                continue
            _log.info("begins where %s is, at outer step %d", source, outer_step)
            return outer_step, theta
        return None

    async def _until_linked(self) -> None:
        """Wait for the links to the other members, for AWAY_S: a host that has just started has none."""
        until = asyncio.get_running_loop().time() + AWAY_S
        while asyncio.get_running_loop().time() < until:
            if self._record() is not None and self._others() <= self._links().connected:
                return
            await asyncio.sleep(RETRY_S)

    def _committed(self) -> None:
        self._trained = True
        self.tell()

    async def _until_taken(self, phi: Phi) -> None:
        """Let this member's peer take its last update, so that it knows what became of its contribution."""
        engine = self.engine
        assert engine is not None
        until = asyncio.get_running_loop().time() + TAKEN_S
        while asyncio.get_running_loop().time() < until:
            members = engine.run.attendances.membership.members
            here = members.get(self._peer_id)
            if here is None or not here.live or here.heartbeat is None or here.heartbeat.outer_step >= phi.outer_step:
                return
            await asyncio.sleep(RETRY_S)

    async def stop(self, reason: str) -> None:
        """End the engine, and what it is about to do."""
        engine, self.engine, store = self.engine, None, self._store
        if store is not None:
            store.end(reason)
        if engine is not None:
            await engine.close()

    # -- swaps -------------------------------------------------------------------------------------------------------------

    def _begin_swap(self, loop: asyncio.AbstractEventLoop, number: int, own: Mapping[int, Offer]) -> Future[Met]:
        return asyncio.run_coroutine_threadsafe(self._meet(number, own), loop)

    async def _meet(self, number: int, own: Mapping[int, Offer]) -> Met:
        assert self._phi is not None
        met = self._last = await self.swaps.meet(number, own, self._phi.state)
        self._counts[0 if met.together else 1] += 1
        return met

    def _taken(self) -> int | None:
        """Return how many swaps this member has taken, if it has a peer that trains."""
        attends = self.engine is not None and bool([*self.engine.run.attendances])
        if self._phi is None or not (self._trained or attends):
            return None
        return self._phi.state.outer_step

    def _swaps_taken(self) -> int | None:
        """Return what others with whom it may swap are told: `_taken`, or None where it takes no more."""
        return None if self._rests else self._taken()

    @property
    def _rests(self) -> bool:
        return self.engine is not None and self.engine.rests

    def _drained(self) -> bool:
        """Whether what all settled on last ends the run before its calendar does. In the replica's thread."""
        return self._replica.reason().startswith(_DRAINED)

    def _settled(self) -> int:
        """Return how many settlings there were, by the record: this member may lack some."""
        record = self._record()
        return record.parts[0].outer_step if record is not None else self._replica.state.outer_step

    @property
    def _drains(self) -> bool:
        record = self._record()
        return record is not None and record.phase is Phase.DRAINING

    # -- what others ask ---------------------------------------------------------------------------------------------------

    async def phi(self, settling: int, chunk_bytes: int) -> AsyncGenerator[Any, None]:
        """Yield the messages that bring this member's outer parameters, see PhiRequest. Raises GoneError, BusyError."""
        snapshot = self.snapshot(settling)
        async for message in state_parts(snapshot, chunk_bytes):
            yield message

    def snapshot(self, settling: int) -> PartSnapshot:
        """Return this member's outer parameters, see PhiRequest. Raises GoneError, BusyError."""
        phi = self._phi
        if phi is None or self._taken() is None:
            raise GoneError(f"{self._peer_id} does not train")
        if settling and phi.settlings >= settling:
            raise GoneError(f"{self._peer_id} has settled already")
        there = self._rests or self.calendar.settles(phi.outer_step)
        if settling and (phi.settlings + 1 != settling or not there):
            raise BusyError(f"{self._peer_id} is not there yet")
        tensors = {f"theta.{i}": part for i, part in enumerate(phi.theta)}
        about = {"outer_step": phi.outer_step, "settlings": phi.settlings}
        return PartSnapshot(phi.digest, 0, self._schema.to_json(), tensors, about)

    def standing(self) -> GossipStanding | None:
        """Return how this member's steps stand."""
        phi, last = self._phi, self._last
        if phi is None:
            return None
        distances = [each.distance for each in last.judged.values()] if last is not None else []
        far = sum(each * each for each in distances) ** 0.5
        return GossipStanding(
            outer_step=phi.outer_step,
            settlings=phi.settlings,
            trains=self._taken() is not None,
            partner=last.partner if last is not None else "",
            said=last.reason if last is not None else "",
            distance=far if distances and math.isfinite(far) else None,
            together=self._counts[0],
            alone=self._counts[1],
        )

    @property
    def first_round_id(self) -> int:
        """Of this member's own engine; 0: there is none."""
        return first_round_id(self.engine.grant) if self.engine is not None else 0

    async def _fetch(self, peer_id: str, settling: int, uploads: UploadBuffer | None = None) -> tuple[int, int, list[Tensor]]:
        """Return outer step, settlings and outer parameters of another member. Raises EditError. uploads: holds them."""
        found = await fetch_phi(self._links().stub(peer_id), settling, self._schema, uploads)
        outer_step, settlings = found.metadata.get("outer_step"), found.metadata.get("settlings")
        theta = [found.tensors.get(f"theta.{i}") for i in range(len(self._schema.fragments))]
        if type(outer_step) is not int or type(settlings) is not int or not 0 <= settlings <= outer_step:
            raise RemoteProtocolError(f"{peer_id}: outer parameters of no outer step")
        if not outer_step < self.calendar.outer_steps:
            raise RemoteProtocolError(f"{peer_id}: outer parameters of outer step {outer_step}")
        good = []
        for part, spec in zip(theta, self._schema.fragments, strict=True):
            if part is None or part.numel() != spec.numel or str(part.dtype) != "torch.float32":
                raise RemoteProtocolError(f"{peer_id}: outer parameters that do not fit the model")
            if not math.isfinite(await self._do(norm, part)):
                raise RemoteProtocolError(f"{peer_id}: outer parameters that are not finite")
            good.append(part)
        return outer_step, settlings, good

    # -- settling, as the owner of part 0 ----------------------------------------------------------------------------------

    async def settle(
        self, grant: int, propose: Callable[[UpdateOffer, tuple[MergeRecord, ...]], None], proposed: Callable[[], bool]
    ) -> None:
        """Bring about one settling after the other, until the last; in a run that drains it is the next one.

        It may have been an owner before who brought about the last one, and went before all knew that the run had ended.

        propose: gives one to the council. proposed: whether it is still there.
        """
        while (number := self._replica.state.outer_step + 1) <= self.calendar.settlings:
            if self._drains and await self._do(self._drained):
                return
            uploads = await self._do(self._uploads_of_others)
            try:
                theta = await self._gather(number, uploads)
                if not theta:
                    return
                offer, records = await self._do(self._merged, grant, number, theta, self._drains)
                del theta
            finally:
                uploads.close(wait=False)
            propose(offer, records)
            while self._replica.state.outer_step < number and proposed():
                await self._news.wait()

    def _merged(
        self, grant: int, number: int, theta: Mapping[str, list[Tensor]], drains: bool
    ) -> tuple[UpdateOffer, tuple[MergeRecord, ...]]:
        records = tuple(settle(self._replica.outer, theta))
        reason = f"{_DRAINED if drains else ''}settled by {', '.join(sorted(theta))}"[:512]
        return self._replica.made(grant, Proposal(first_round_id(grant) + number, reason, 0, records)), records

    def _uploads_of_others(self) -> UploadBuffer:
        """Where what the others have lies while this member settles: beyond `storage.buffer_bytes`, in files."""
        return UploadBuffer(self._config.storage.buffer_bytes, self._folder.settling, self._files)

    async def _gather(self, number: int, uploads: UploadBuffer) -> dict[str, list[Tensor]]:
        """Return the outer parameters of all members that train and are here in time, by peer_id. uploads: holds them.

        All are asked at the same time, until `gossip.deadline_s` after this member's own peer is there; if it does not train,
        after more are there than are waited for, so that one that lies does not end it for the others. What is asked for by
        then may take as long to come. They share this member's link, so of k transfers at a time each is given k times as long.

        Of one at least; of none only in a run that drains before anybody has trained in it. Raises StorageError: what did not
        fit on this disk would be left out.
        """
        loop, deadline_s, until = asyncio.get_running_loop(), self._config.gossip.deadline_s, math.inf
        got, liars, untrained = dict[str, list[Tensor]](), set[str](), set[str]()
        asking: dict[str, asyncio.Task[None]] = {}
        spent: dict[str, float] = {}  # seconds of deadline_s, by who is asked
        looked = loop.time()
        given_up: list[asyncio.Task[None]] = []

        async def ask(peer_id: str) -> None:
            try:
                got[peer_id] = await self._of(peer_id, number, uploads)
            except GoneError:
                untrained.add(peer_id)
                return
            except RemoteProtocolError as error:
                _log.warning("settling %d without %s: %s", number, peer_id, error)
                liars.add(peer_id)
            except StorageError:
                raise
            except EditError:  # it is not there yet, or cannot be dialled
                pass
            untrained.discard(peer_id)

        async def wait() -> None:
            """Wait until somebody has answered, or for RETRY_S; give up who has used up its time."""
            nonlocal looked
            await asyncio.wait(asking.values(), timeout=RETRY_S)
            before, looked = looked, loop.time()
            share = (looked - before) / len(asking)
            for peer_id, task in list(asking.items()):
                spent[peer_id] += share
                if task.done():
                    asking.pop(peer_id).result()
                elif spent[peer_id] >= deadline_s:
                    _log.warning("settling %d: %s sends nothing, or too slowly", number, peer_id)
                    untrained.discard(peer_id)
                    task.cancel()
                    given_up.append(asking.pop(peer_id))

        try:
            while True:
                record = self._record()
                members = {*record.members} if record is not None else {self._peer_id}
                if self._peer_id in members - got.keys():
                    await ask(self._peer_id)  # in this process
                if until == math.inf and self._peer_id in got:
                    until = loop.time() + deadline_s
                if loop.time() < until and (got or self._taken() is None):  # if its own peer is not there, nor are the others
                    # Who said that it does not train is asked again once nobody is being asked: it may train by now.
                    spared = {self._peer_id, *got, *liars, *asking, *(untrained if asking else ())}
                    for peer_id in members - spared:
                        asking[peer_id], spent[peer_id] = loop.create_task(ask(peer_id)), 0.0
                if asking:
                    await wait()
                else:
                    looked = loop.time()
                not_awaited = {*got, *liars, *(untrained - asking.keys())}
                awaited = {peer_id for peer_id in members - not_awaited if not self._away(peer_id)}
                if until == math.inf and len(got) > len(awaited):
                    until = loop.time() + deadline_s
                late = loop.time() >= until and not awaited & asking.keys()
                if got and (late or not awaited):
                    near: dict[str, list[Tensor]] = await self._do(self._without_far, number, dict(got))
                    return near
                if not awaited and self._drains and self._taken() is None:
                    return got
                await asyncio.sleep(RETRY_S)
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), *given_up, return_exceptions=True)

    def _away(self, peer_id: str) -> bool:
        """Whether there is no link to a member, and has not been for a while."""
        links = self._links()
        return peer_id not in {self._peer_id, *links.connected} and links.since_s(peer_id) >= AWAY_S

    async def _of(self, peer_id: str, number: int, uploads: UploadBuffer) -> list[Tensor]:
        if peer_id == self._peer_id:
            self.snapshot(number)
            assert self._phi is not None
            return self._phi.theta
        outer_step, _, theta = await self._fetch(peer_id, number, uploads)
        regular = self.calendar.settled(number)
        if outer_step + 1 != regular and not (self._drains and outer_step + 1 < regular):
            raise RemoteProtocolError(f"{peer_id}: outer parameters of outer step {outer_step} for settling {number}")
        if self._taken() is not None and await self._do(self._is_far, theta):
            raise RemoteProtocolError(f"{peer_id}: outer parameters that are too far from the last that were common to all")
        return theta

    def _is_far(self, theta: Sequence[Tensor]) -> bool:
        """Whether somebody says to have gone `penalty.max_ratio` times as far since the last settling as this peer has."""
        assert self._phi is not None
        most, common = self._config.penalty.max_ratio, self._replica.outer.theta
        return self._config.penalty.enabled and any(
            norm(there - here) > most * path > 0 for there, here, path in zip(theta, common, self._phi.state.path, strict=True)
        )

    def _without_far(self, number: int, got: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Leave out who has gone `penalty.max_ratio` times as far since the last settling as the median, the upper of two.

        Only where this member's own peer does not train: else `_is_far` has looked already.
        """
        if self._peer_id in got or not self._config.penalty.enabled:
            return got
        left_out, common, most = set[str](), self._replica.outer.theta, self._config.penalty.max_ratio
        for i, here in enumerate(common):
            far = {peer_id: norm(theta[i] - here) for peer_id, theta in got.items()}
            usual = sorted(far.values())[len(far) // 2]
            left_out |= {peer_id for peer_id, each in far.items() if each > most * usual > 0}
        for peer_id in sorted(left_out):
            _log.warning("settling %d without %s: outer parameters that are too far from the last common ones", number, peer_id)
        return {peer_id: theta for peer_id, theta in got.items() if peer_id not in left_out}


def _next_grant(folder: Path) -> int:
    """Return a number that no engine here had before: round ids grow with it."""
    make_folder(folder, 0o700)
    file = folder / "starts"
    try:
        grant = int(file.read_bytes()) + 1
    except (OSError, ValueError):
        grant = 1
    write_atomic(file, str(grant).encode())
    return grant
