"""Councils around one table whose members keep real parts in real folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import PartReplica, carry_out
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.record import Part, Update
from edit.lab.council.parts_on_disk import Killed, MemberDisk, merged_round, outer_state
from edit.lab.council.replicated import There, same
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from tests.support.council.table import LEASE_S, Table

CONFIG: dict[str, Any] = {
    "codec": {"up": "fp32", "down": "int8", "record": "int8"},
    "outer": {"optimizer": "nesterov"},
    "storage": {"checkpoint_every": 2, "keep_updates": 4, "keep_checkpoints": 4},
}
SETTINGS = RunConfig.from_mapping(CONFIG)


class ReplicatedTable(Table):
    """See `Table`. One part. folder: of all members; changes: as there, and to the configuration."""

    disk = MemberDisk

    def __init__(self, folder: Path, voters: str = "abcde", *, config: RunConfig = SETTINGS, **changes: Any) -> None:
        self.config = config
        self.taken: dict[int, set[str]] = {}  # the digests that members came to, by outer step
        self.fetched = {"updates": 0, "snapshot": 0}
        self.members: dict[str, MemberDisk] = {}
        self.replicas: dict[str, PartReplica] = {}  # of those that run
        self._offers: dict[str, Offer] = {}
        self._own: dict[tuple[str, str], list[MergeRecord]] = {}
        self._seed = 0
        for peer_id in voters:
            self.members[peer_id] = self.disk(folder / peer_id, self.config, Random(peer_id))
            self._open(peer_id).found(self.first_state())
            self.members[peer_id].crash()
        part = Part(owner="a", grant=1, outer_step=0, digest=self.first_state().digest)
        super().__init__(voters, **{"parts": (part,)} | changes)

    def first_state(self) -> OuterState:
        """What the run is founded with."""
        return outer_state(self.config, 0)

    def _open(self, peer_id: str) -> PartReplica:
        def took(part: int, commit: Commit) -> None:
            self.taken.setdefault(commit.outer_step, set()).add(commit.digest)

        (self.replicas[peer_id],) = self.members[peer_id].open(1, took)
        return self.replicas[peer_id]

    def start(self, peer_id: str) -> None:
        replica = self._open(peer_id)
        self.states[peer_id] = [replica.state] if replica.state.digest else []
        super().start(peer_id)

    def kill(self, peer_id: str) -> None:
        self.members[peer_id].crash()
        del self.replicas[peer_id]
        super().kill(peer_id)

    def wipe(self, peer_id: str, incarnation: int) -> None:
        self.members[peer_id].wipe()
        super().wipe(peer_id, incarnation)

    def _work(self, peer_id: str, effect: ev.Effect) -> None:
        if peer_id not in self.councils:  # it was killed by what it did before
            return
        replica = self.replicas[peer_id]
        try:
            match effect:
                case ev.Hold(held):
                    own = self._own.get((peer_id, held.id), [])
                    answer = carry_out(replica, effect, offer=self._offers[held.id], own=own)
                case ev.Adopt():
                    answer = carry_out(replica, effect)
                case ev.Fetch() if effect.source in self.replicas and not {peer_id, effect.source} & self.cut:
                    others = [[other] for other in self.replicas.values()]
                    there = There([self.replicas[effect.source]], self.fetched, others)
                    answer = carry_out(replica, effect, source=there)
                case ev.Fetch():
                    answer = ev.Failed(effect.part, effect, "the source does not answer")
                case ev.Cease(_, grant):
                    replica.cease(f"grant {grant} is over")
                    return
                case _:
                    super()._work(peer_id, effect)
                    return
            self.members[peer_id].settle()
        except Killed:
            self.kill(peer_id)
            return
        self.states[peer_id] = [replica.state]
        self.handle(peer_id, answer)

    # -- what the test does ------------------------------------------------------------------------------------------------

    def merge(self, owner: str) -> Update:
        """Let the engine of an owner merge a round: no two are equal. Nobody hears of it."""
        council, replica = self.councils[owner], self.replicas[owner]
        assert council.record is not None
        self._seed += 1
        records = merged_round(replica.outer, 3, self._seed)
        offer = replica.offer(council.record.parts[0].grant, self._seed, "all are in", 30, records)
        return self.offer(owner, offer, records)

    def offer(self, owner: str, offer: Offer, records: Sequence[MergeRecord]) -> Update:
        """Keep the bytes of an offer for those who hold it."""
        self._offers[offer.update.id], self._own[owner, offer.update.id] = offer, list(records)
        return offer.update

    def make(self, owner: str, part: int = 0, content: str = "") -> Update:
        made = self.merge(owner)
        self.handle(owner, ev.Made(made))
        return made

    def go_on(self, steps: int = 1) -> None:
        """Take so many further outer steps, by whoever owns the part; all that run come along."""
        for _ in range(steps):
            self.run(2 * LEASE_S)
            owner = self.record.parts[0].owner
            wanted = self.states[owner][0].outer_step + 1
            self.make(owner)
            self.run(LEASE_S)
            assert self.steps() == dict.fromkeys(self.councils, wanted)

    def check_equal(self) -> None:
        """Compare what members have on disk, to the bit; and whether any outer step was taken in two ways."""
        assert all(len(digests) == 1 for digests in self.taken.values()), self.taken
        for peer_id in list(self.councils):
            self.kill(peer_id)
        found = {}
        for peer_id, disk in self.members.items():
            (replica,) = disk.open(1, lambda *_: None)
            found[peer_id] = replica.snapshot()
            disk.crash()
        assert all(same(snapshot, found["a"]) for snapshot in found.values())
