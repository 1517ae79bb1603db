"""The simulated swarm with real parts: what members hold, adopt and fetch is journalled, replayed and merged for real.

Beside what `Truth` sees: all members that take an outer step come to the same digest of its parameters, and a member that
starts again finds what it said that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import torch

from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import Claimed, PartReplica, PartSnapshot, carry_out
from edit.council import events as ev
from edit.council.machine import Council
from edit.council.record import Part, PartState, Record, Saved
from edit.errors import GoneError, RemoteProtocolError
from edit.lab.council.parts_on_disk import Killed, MemberDisk, merged_round, outer_state, small_run
from edit.lab.council.plan import Plan
from edit.lab.council.swarm import Host, Swarm
from edit.lab.council.truth import Broken
from edit.merging.outer_state import MergeRecord
from edit.records import Commit

__all__ = ["ReplicatedSwarm", "There", "same"]

CONTRIBUTORS = 3


class ReplicatedSwarm(Swarm):
    """See `Swarm`. folder: of all members; empty. disk: what each of them has."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        council: type[Council] = Council,
        lines: list[str] | None = None,
        *,
        disk: type[MemberDisk] = MemberDisk,
    ) -> None:
        self._disk = disk
        self._folder, self._config = folder, small_run(Random(f"config {plan.seed}"))
        self._disks: dict[str, MemberDisk] = {}
        self._replicas: dict[str, list[PartReplica]] = {}  # of the members that run
        self._offers: dict[str, Offer] = {}  # on their way, by id
        self._own: dict[tuple[str, int, str], list[MergeRecord]] = {}  # by peer_id, process, id
        self._thetas: dict[tuple[int, int], str] = {}  # digests, by part and outer step
        # By member and part: what was fetched and written when the member was killed. It may be on its disk, and was not said.
        self._unsaid: dict[tuple[str, int], PartState] = {}
        self.fetched = {"updates": 0, "snapshot": 0}
        super().__init__(plan, council, lines)

    def run_all(self) -> float:
        """See `Swarm.run_all`. At the end all members that are at one outer step have the same of all else, too."""
        seconds = super().run_all()
        for part in range(self.plan.parts):
            states: dict[int, PartSnapshot] = {}
            for replicas in self._replicas.values():
                found = replicas[part].snapshot()
                other = states.setdefault(found.metadata["outer_step"], found)
                if not same(found, other):
                    raise Broken(f"two states of part {part} at outer step {found.metadata['outer_step']}")
        return seconds

    # -- members -----------------------------------------------------------------------------------------------------------

    def _found(self) -> Record:
        record, states = super()._found(), [outer_state(self._config, part) for part in range(self.plan.parts)]
        for peer_id in self.hosts:
            self._disks[peer_id] = self._disk(self._folder / peer_id, self._config, self._random)
        for peer_id in record.members:
            for part, replica in enumerate(self._open(peer_id)):
                replica.found(outer_state(self._config, part))
            self._close(peer_id)
        for part, outer in enumerate(states):
            record = record.with_part(part, Part(owner="m0", grant=0, outer_step=0, digest=outer.digest))
        for host in self.hosts.values():
            if host.disk is not None:
                host.disk = Saved(incarnation=host.incarnation, record=record)
                host.states = [PartState(0, outer.digest) for outer in states]
        return record

    def _open(self, peer_id: str) -> list[PartReplica]:
        self._replicas[peer_id] = self._disks[peer_id].open(self.plan.parts, self._took)
        return self._replicas[peer_id]

    def _close(self, peer_id: str) -> None:
        del self._replicas[peer_id]
        self._disks[peer_id].crash()

    def _took(self, part: int, commit: Commit) -> None:
        other = self._thetas.setdefault((part, commit.outer_step), commit.digest)
        if other != commit.digest:
            raise Broken(f"outer step {commit.outer_step} of part {part} has digests {other[:8]} and {commit.digest[:8]}")

    def start(self, host: Host) -> None:
        if host.council is None and not host.left:
            self._read(host, self._open(host.peer_id))
        super().start(host)

    def _read(self, host: Host, replicas: list[PartReplica]) -> None:
        """Note what a member finds on its disk: what it said, or what it was fetching when it was killed."""
        found = [replica.state for replica in replicas]
        for part, (said, now) in enumerate(zip(host.states, found, strict=False)):
            again = now.held is not None and PartState(now.held.outer_step, now.held.id) == PartState(
                said.outer_step, said.digest
            )
            unsaid = self._unsaid.pop((host.peer_id, part), None)
            if now != said and not again and now != unsaid:
                raise Broken(f"{host.name} had {said} of part {part}, and finds {now}")
        host.states = found if any(state.digest for state in found) else []

    def kill(self, host: Host, seconds: float = float("inf")) -> None:
        if host.council is not None:
            self._close(host.peer_id)
        super().kill(host, seconds)

    def wipe(self, host: Host, seconds: float) -> None:
        super().wipe(host, seconds)
        if host.disk is None:
            self._disks[host.peer_id].wipe()

    # -- a shell's work ----------------------------------------------------------------------------------------------------

    def _do(
        self,
        host: Host,
        part: int,
        work: Callable[[PartReplica], ev.Held | ev.Applied | ev.Failed],
        fetched: PartState | None = None,
    ) -> None:
        """Carry out an effect, and tell the council; or be killed in the middle of it. fetched: what a fetch leads to."""
        disk, replica = self._disks[host.peer_id], self._replicas[host.peer_id][part]
        if not self._healed and self._random.random() < 0.03:
            disk.killed_after = self._random.randint(1, 4000)
        try:
            answer = work(replica)
            disk.settle()
        except Killed:
            if part < len(host.states):
                host.states[part] = replica.state  # what was held of an older grant may be given up already
            if fetched is not None:
                self._unsaid[host.peer_id, part] = fetched
            self.note(f"{host.name} is killed in the middle of a write")
            self.kill(host, self._random.uniform(0.05, 2.0))
            return
        disk.killed_after = None
        self._say(host, part, replica, answer)

    def _say(self, host: Host, part: int, replica: PartReplica, answer: ev.Held | ev.Applied | ev.Failed) -> None:
        council = host.council
        assert council is not None and council.record is not None
        host.states += [PartState() for _ in council.record.parts[len(host.states) :]]
        host.states[part] = replica.state
        if isinstance(answer, ev.Applied):
            self.truth.state(council.record.lineage, part, PartState(answer.outer_step, answer.digest))
        self.handle(host, answer)
        if isinstance(answer, ev.Applied) and part in host.engines:
            self._think(host, part, host.engines[part])

    def _hold(self, host: Host, effect: ev.Hold) -> None:
        update_id = effect.update.id
        own = self._own.get((host.peer_id, host.process, update_id), [])
        self._do(host, effect.update.part, partial(carry_out, effect=effect, offer=self._offers[update_id], own=own))

    def _adopt(self, host: Host, effect: ev.Adopt) -> None:
        self._do(host, effect.part, partial(carry_out, effect=effect))

    def _found_at(self, source: Host, effect: ev.Fetch) -> str:
        return ""  # the source is asked when the answer comes

    def _fetched(self, host: Host, effect: ev.Fetch, source: Host, process: int, found: str) -> None:
        if self._reaches(host, source, process):
            there = There(self._replicas[source.peer_id], self.fetched, self._replicas.values())
            work = partial(carry_out, effect=effect, source=there)
            self._do(host, effect.part, work, fetched=PartState(effect.outer_step, effect.digest))
        else:
            self.handle(host, ev.Failed(effect.part, effect, "the source does not answer"))

    def _make(self, host: Host, part: int, grant: int) -> None:
        if host.council is None or host.engines.get(part) != grant:
            return
        replica, seed = self._replicas[host.peer_id][part], 0 if self.plan.same_bytes else self._random.getrandbits(32)
        records = merged_round(replica.outer, CONTRIBUTORS, seed)
        round_id = grant * 1_000_000 + replica.state.outer_step + 1
        offer = replica.offer(grant, round_id, "all are in", 10 * CONTRIBUTORS, records)
        self._offers[offer.update.id] = offer
        self._own[host.peer_id, host.process, offer.update.id] = records
        self.handle(host, ev.Made(offer.update))


def same(one: PartSnapshot, other: PartSnapshot) -> bool:
    """Return whether two states are equal to the bit."""
    named = one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[i], other.tensors[i]) for i in one.tensors
    )
    return named and (one.name, one.tokens, one.metadata) == (other.name, other.tokens, other.metadata)


class There:
    """A member that answers at once. others: all members that confirm what it says."""

    def __init__(self, replicas: list[PartReplica], fetched: dict[str, int], others: Iterable[list[PartReplica]] = ()) -> None:
        self._replicas, self._fetched, self._others = replicas, fetched, others

    def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
        offer = self._replicas[part].kept(outer_step, update_id)
        self._fetched["updates"] += 1
        return offer

    def snapshot(self, part: int) -> PartSnapshot:
        snapshot = self._replicas[part].snapshot()
        self._fetched["snapshot"] += 1
        return snapshot

    def confirm(self, part: int, claimed: Claimed) -> None:
        for other in self._others:
            with suppress(GoneError):
                found = other[part].claimed()
                if found.outer_step == claimed.outer_step and found != claimed:
                    raise RemoteProtocolError(f"outer step {found.outer_step} of part {part} is another at another member")
