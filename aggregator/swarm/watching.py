"""The whole swarm as one status, again and again, for `watch`, `report` and `web`: what the hosts say of the council, and what
the owner of each part says of its rounds.

It asks as the member of a folder: its own host first, another where that does not answer; as an observer any that it knows. It
only looks on. Its memory is one status per part, and each of these is bounded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from cryptography import x509

from aggregator.control.shown_settings import settings_of
from aggregator.past import Past, Saved
from aggregator.swarm.admission import OwnCertificate, take_settings
from aggregator.swarm.callers import why_outside
from aggregator.swarm.host_folder import HostFolder, Settings, credentials, identity_of
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.operate import Survey, part_control, renewed, survey
from aggregator.swarm.standing import Report
from edit.config.run import RunConfig
from edit.council.record import Phase
from edit.errors import EditError, TransportError
from editpb.identity import Identity
from editpb.run_status import CouncilMember, CouncilPart, CouncilStatus, MemberStatus, RunStatus
from editpb.transport.watch import watch
from editpb.validity import duration
from editpb.whole_run import continued, whole_run

__all__ = ["SwarmWatch", "begin_to_observe", "council_status", "status_with_settings", "whole_status"]

FIRST_S = 5.0  # for how long the owners' first answers are waited for
SILENT_S = 60.0  # from then on it is told for how long an owner has not answered
AGAIN_S = 1.0  # after an owner did not answer
RENEWED_S = 15.0  # for how long a member is waited for that may renew an observer's certificate
_KEPT = "No host answers: rounds, members and curves are those of the time when this member owned parts."
LOOK_S = 3600.0  # between two looks at when that ends
MOST_KNOWN = 64  # members whose addresses an observer keeps


def begin_to_observe(path: Path, seeds: Mapping[str, tuple[str, ...]]) -> None:
    """Complete the folder of an observer, which has its certificate: ask members for the run's settings. Can be repeated.

    Raises as `take_settings`.
    """
    HostFolder(seeds=seeds).save(path)
    asyncio.run(take_settings(path, credentials(path)[0], identity_of(path), seeds))


class SwarmWatch:
    """Watches the swarm of a member's folder. It remembers what it has seen, so one that is asked again goes on.

    Args:
        path: the folder.
        every_s: between two statuses.
        unix: seconds since 1970.

    Raises ConfigError, StorageError for what the folder has.
    """

    def __init__(self, path: Path, every_s: float = 1.0, unix: Callable[[], float] = time.time) -> None:
        self._path, self._every_s, self._unix = path, every_s, unix
        self.identity = identity_of(path)
        saved = MemberFolder(path).saved()
        self._record = saved.record if saved is not None else None  # the newest that was seen
        self._config, self._fragments = _settings(path)
        self._shown = settings_of(self._config)
        self._gossips = self._config.outer.algorithm == "gossip"
        self._parts: list[RunStatus | None] = [None] * len(self._fragments)
        self._troubles: dict[int, tuple[str, float]] = {}  # why nothing newer comes of a part, and since when
        self._owners: dict[int, tuple[str, int, str]] = {}  # name, grant, address: who is watched
        self._answered = set[int]()  # parts whose owner has said anything since this watch began
        self._told = asyncio.Event()
        self._look_at = -math.inf  # when the certificate is looked at, where this is an observer's folder

    def remember(self, parts: Sequence[RunStatus | None]) -> None:
        """Take what is known of each part's past."""
        self._parts = [*parts]

    async def statuses(self) -> AsyncGenerator[RunStatus, None]:
        """Yield how the swarm stands, until the run has finished. Raises as `survey`."""
        tasks: dict[int, asyncio.Task[None]] = {}
        waited = False
        try:
            while True:
                found = await survey(self._path)
                if self._record is None or self._record.stamp < found.record.stamp:
                    self._record = found.record
                if self.identity.role == "observer":
                    await self._keep_folder(found)
                for number, part in enumerate(found.record.parts[: len(self._parts)]):
                    if (who := self._serves(part.owner)) is None:
                        continue
                    owner = who, part.grant, found.addresses.get(who, "")
                    if self._owners.get(number) != owner or number not in tasks or tasks[number].done():
                        if number in tasks:
                            await _ended(tasks[number])
                        self._owners[number] = owner
                        tasks[number] = asyncio.create_task(self._follow(number, *owner))
                if not waited:
                    waited = True
                    await self._first_answers()
                if (status := self._status(found)) is not None:
                    yield status
                    if status.phase == "finished":
                        return
                await asyncio.sleep(self._every_s)
        finally:
            self._owners.clear()
            for task in tasks.values():
                await _ended(task)

    def why_refused(self, identity: Identity, certificate: x509.Certificate) -> str | None:
        """Return why the swarm shuts the holder of a certificate out, by the newest record that was seen; None: it does not.

        Until a host has answered, that is the record in the folder; without it everybody is refused.
        """
        if self._record is None:
            return "the swarm has not answered yet, and who is its member is not known"
        return why_outside(self._record, identity, certificate)

    def _serves(self, owner: str) -> str | None:
        """Return whom to ask for the rounds of a part: its owner. With gossip each host tells its own peer, and nobody else."""
        if not self._gossips:
            return owner
        return self.identity.peer_id if self.identity.role == "peer" else None

    async def _keep_folder(self, found: Survey) -> None:
        """Do for an observer's folder what a host does for a member's: know where members are, renew the certificate."""
        folder = HostFolder.load(self._path)
        known = {peer_id: (address,) for peer_id, address in sorted(found.addresses.items())[:MOST_KNOWN]}
        if known and known != folder.seeds:
            replace(folder, seeds=known).save(self._path)
        if self._unix() < self._look_at:
            return
        self._look_at = self._unix() + LOOK_S

        def certifiers() -> Iterator[tuple[str, Callable[[], Awaitable[bytes]]]]:
            for peer_id in found.record.holders:
                if peer_id in found.addresses:
                    yield peer_id, partial(renewed, self._path, peer_id, found.addresses[peer_id], RENEWED_S)

        await OwnCertificate(self._path, self.identity, self._unix).look(certifiers)

    async def _first_answers(self) -> None:
        """Wait until every part's owner has answered, or did not."""
        try:
            async with asyncio.timeout(FIRST_S):
                while any(i not in self._answered and i not in self._troubles for i in self._owners):
                    await self._told.wait()
                    self._told.clear()
        except TimeoutError:
            return

    async def _follow(self, number: int, owner: str, grant: int, address: str) -> None:
        """Take what the owner of a part says, for ever; its trouble is told, not raised."""
        while True:
            try:
                if not address:
                    raise TransportError(f"{owner} has no address at which this member could ask it")
                await self._take(number, owner, address)
                raise TransportError(f"{owner} has ended the connection")
            except EditError as error:
                self._troubles[number] = str(error), self._troubles.get(number, ("", self._unix()))[1]
                self._told.set()
            await asyncio.sleep(AGAIN_S)

    async def _take(self, number: int, owner: str, address: str) -> None:
        before = self._parts[number]
        async with (
            part_control(self._path, owner, address, number) as stub,
            aclosing(watch(stub, owner, self._every_s)) as told,
        ):
            async for status in told:
                self._parts[number] = continued(before, status)
                self._answered.add(number)
                self._troubles.pop(number, None)
                self._told.set()

    def _status(self, found: Survey) -> RunStatus | None:
        """Return the whole swarm's status; what is agreed on goes before what one owner says."""
        record, told = found.record, found.report
        merged = whole_run(self._parts, self._fragments, record.members.keys() | record.evicted.keys())
        status = merged or _unknown(self.identity.run_id, self._config)
        council = council_status(told)
        troubles = {
            number: why
            for number, why in self._troubles.items()
            if record.phase is not Phase.FINISHED and number in self._owners
        }
        reasons = (
            ["too few voters are here: nothing is agreed on until others return; all train on alone"] if council.lost else []
        )
        states = {row.peer_id: row for row in council.members}
        for number, (why, since) in sorted(troubles.items()):
            owner, silent_s = self._owners[number][0], self._unix() - since
            long = f" (for {duration(silent_s)})" if silent_s >= SILENT_S else ""
            elsewhere = owner in states and states[owner].state in ("here", "late", "leads")
            goes_on = f"; other members reach {owner}, and the run goes on" if long and elsewhere else ""
            reasons.append(f"part {number}: {why}{long}{goes_on}")
        members = tuple(
            replace(row, state="evicted", reason=record.evicted[row.peer_id])
            if row.peer_id in record.evicted
            else replace(row, state="lost", reason=states[row.peer_id].why)
            if row.peer_id in states
            and states[row.peer_id].state == "away"
            and row.state in ("starting", "training", "exchanging")
            else row
            for row in status.members
        )
        return replace(
            status,
            run_id=record.run_id,
            phase=_phase(record.phase, status.phase),
            # with gossip the record counts settlings, and this member's own peer its outer steps
            outer_step=status.outer_step if self._gossips else min(part.outer_step for part in record.parts),
            outer_steps=self._config.sync.outer_steps,
            tokens=status.tokens if self._gossips else min(part.tokens for part in record.parts),
            stop_tokens=self._config.sync.tokens,
            draining=record.phase is Phase.DRAINING,
            last_step=0 if self._gossips else min(record.last_step, self._config.sync.outer_steps),
            reason="; ".join(filter(None, (*reasons, status.reason))),
            waiting_for="" if record.phase is Phase.FINISHED or not (merged or self._owners) else status.waiting_for,
            eta_s=None if record.phase is Phase.FINISHED else status.eta_s,
            members=members,
            settings=self._shown,
            council=council,
            t=self._unix(),
        )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _settings(path: Path) -> tuple[RunConfig, Sequence[Sequence[int]]]:
    """Return the run's settings, and the ids of each part's fragments."""
    settings = Settings.load(path)
    config = settings.config()
    return config, [ids for ids, _ in settings.schemas(config)]


def _phase(agreed: Phase, seen: str) -> str:
    """Return the phase of the whole run: what is agreed on, and while it runs, what the owners do."""
    if agreed in (Phase.RUNNING, Phase.DRAINING):
        return seen if seen not in ("finished", "paused", "stopped") else "gathering"
    return "paused" if agreed is Phase.PAUSED else "finished"


def council_status(told: Report) -> CouncilStatus:
    """Return what a report says, as a part of a status."""
    return CouncilStatus(
        leader=told.leader,
        quorum=told.quorum,
        lost=told.has_quorum is False,
        term=told.term,
        version=told.version,
        parts=tuple(
            CouncilPart(
                part=row["part"],
                owner=row["owner"],
                outer_step=row["outer_step"],
                held_by=-1 if row["holders"] is None else len(row["holders"]),
                waiting_for=row["waits"],
            )
            for row in told.parts
        ),
        members=tuple(
            CouncilMember(
                peer_id=row["peer_id"], votes=row["voter"], state=row["state"], owns=tuple(row["owns"]), why=row["why"]
            )
            for row in told.members
        ),
        notes=told.notes,
    )


def whole_status(path: Path) -> RunStatus:
    """Return how the swarm of a member's folder stands, with what is kept of its past in this folder.

    Where no host answers, rounds and members are those of when this member last owned parts; its files say how far the run is.
    Raises ConfigError, StorageError; TransportError where the folder has kept nothing, as an observer's.
    """
    past = _past(path)

    async def ask() -> RunStatus:
        watching = SwarmWatch(path)
        watching.remember(past)
        async with aclosing(watching.statuses()) as statuses:
            return await anext(statuses)

    try:
        return asyncio.run(ask())
    except TransportError as error:
        saved = MemberFolder(path).saved()
        if (record := saved.record if saved is not None else None) is None:
            raise
        config, fragments = _settings(path)
        ended = record.phase is Phase.FINISHED
        known = [
            replace(told, outer_step=part.outer_step) if told is not None else None
            for told, part in zip(past, record.parts, strict=True)
        ]
        status = whole_run(known, fragments) or _unknown(identity_of(path).run_id, config)
        return replace(
            status,
            members=tuple(_at_last(row, past, ended) for row in status.members),
            phase="finished" if ended else "stopped",
            outer_step=min(part.outer_step for part in record.parts),
            tokens=min(part.tokens for part in record.parts),
            parameters=sum(Saved.of(MemberFolder(path).part(number)).parameters for number in range(len(record.parts))),
            waiting_for="" if ended else "the swarm, of which no host answers",
            settings=settings_of(config),
            reason=_KEPT if ended else f"{error}; {_KEPT[0].lower()}{_KEPT[1:]}",
        )


def status_with_settings(path: Path) -> RunStatus:
    """Return what `whole_status` does; of a folder that knows no more than the run's settings, a status with these alone.

    So does a member that was never let in, or an observer that reaches nobody. Raises ConfigError, StorageError.
    """
    try:
        return whole_status(path)
    except TransportError:
        config, _ = _settings(path)
        return replace(_unknown(identity_of(path).run_id, config), settings=settings_of(config))


def _at_last(row: MemberStatus, past: Sequence[RunStatus | None], ended: bool) -> MemberStatus:
    """Return a member's row without what an engine that ended earlier than another says of it."""
    steps = [each.outer_step for part in past if part is not None for each in part.members if each.peer_id == row.peer_id]
    row = replace(row, outer_step=max(steps, default=0))
    live = row.state in ("starting", "training", "exchanging")
    return replace(row, state="left", reason="the run has finished") if ended and live else row


def _past(path: Path) -> list[RunStatus | None]:
    """Return what the engines of this folder have written of each part; None: this member never owned it."""
    config, fragments = _settings(path)
    run_id, folder = identity_of(path).run_id, MemberFolder(path)
    found: list[RunStatus | None] = []
    for number in range(len(fragments)):
        metrics = folder.engine(number) / "metrics.jsonl"
        found.append(Past.read(metrics).alone(run_id, config, "the swarm") if metrics.exists() else None)
    return found


def _unknown(run_id: str, config: RunConfig) -> RunStatus:
    """Return the status of a run of which no owner has said anything."""
    return replace(Past().alone(run_id, config, "the owner of a part"), phase="stopped")
