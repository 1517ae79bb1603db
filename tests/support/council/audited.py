"""Members of a swarm with an audit log, without hosts: one part, its owner's offers, and what others make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from aggregator.storage.journal import Disk
from aggregator.storage.part_log import PartLog
from aggregator.storage.state_folder import part_logs
from aggregator.storage.store import Store
from aggregator.swarm.enrolments import Enrolments
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.offers import Offer
from aggregator.swarm.owner_entries import OwnerEntries
from aggregator.swarm.replication import Claimed, PartReplica, PartSnapshot
from edit.config.run import RunConfig
from edit.council.record import Enrolled, Member, Part, Record, Update
from edit.errors import RemoteProtocolError
from edit.lab.council.parts_on_disk import RUN, MemberDisk, outer_state
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.records import Commit
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.signatures import Signer, key_hash
from editpb.audit_log import LogVerifier, RoundFacts
from editpb.messages import ContributionHeader
from editpb.owner_signatures import signed_by_owner
from editpb.signed_contributions import ContributionSigner
from tests.support.council.replicated_table import CONFIG, ReplicatedTable
from tests.support.encoded import encode
from tests.support.keys import member_key
from tests.support.served import TOML

AUDITED = RunConfig.from_mapping({**CONFIG, "audit": {"enabled": True}, "swarm": {"parts": 1}})
KEYS = {peer_id: member_key() for peer_id in "abcdepq"}
ENROLLED = {peer_id: Enrolled("1" * 32, key_hash(Signer(key).public_key)) for peer_id, key in KEYS.items()}
GRANT = 1


def audited_toml(keep: int = 0) -> str:
    """The run.toml of hosts with an audit log. keep: contributions of so many outer steps."""
    text = TOML.format(start=2, quorum=2).replace("checkpoint_every = 3", "checkpoint_every = 2\nkeep_checkpoints = 4")
    lines, skipping = list[str](), False
    for line in text.splitlines():
        skipping = line in ("[server]", "[outer]") if line.startswith("[") else skipping
        lines += [] if skipping else [line]
    lines += ["[outer]", 'optimizer = "nesterov"', "lr = 0.7", "momentum = 0.9", "[audit]", "enabled = true"]
    return "\n".join([*lines, f"keep_contributions = {keep}", "[swarm]", "parts = 1", ""])


def enrolled_key(peer_id: str) -> str:
    return ENROLLED[peer_id].key


def record_of(**enrolled: Enrolled) -> Record:
    """What all have agreed on: a owns the part."""
    return Record(
        run_id=RUN,
        lineage=1,
        term=1,
        version=1,
        members={peer_id: Member(incarnation=1) for peer_id in "abc"},
        voters=("a#1", "b#1", "c#1"),
        parts=(Part(owner="a", grant=GRANT, outer_step=0, digest="0" * 64),),
        enrolled=ENROLLED | enrolled,
    )


class AuditedMember:
    """A replica in a folder. disk: of its journal and its log."""

    def __init__(
        self, folder: Path, peer_id: str = "a", disk: Disk | None = None, config: RunConfig = AUDITED, part: int = 0
    ) -> None:
        self.folder, self.peer_id, self.config = folder, peer_id, config
        folder.parent.mkdir(exist_ok=True)
        before = replace(record_of(), parts=(Part(owner="a", grant=GRANT - 1, outer_step=0, digest="0" * 64),))
        self.enrolments: Enrolments | None = Enrolments.of(before).taking(record_of())
        self.log = PartLog(folder, RUN, part, config, disk)
        self.store = Store(folder, config, RUN, disk, part_log=self.log)
        self.replica = PartReplica(RUN, part, config, self.store, enrolments=lambda: self.enrolments)

    def found(self) -> AuditedMember:
        self.replica.found(outer_state(self.config, 0))
        return self

    def again(self, disk: Disk | None = None) -> AuditedMember:
        """After a stop, or a kill."""
        self.store.close()
        return AuditedMember(self.folder, self.peer_id, disk, self.config)

    @property
    def logs(self) -> dict[int, bytes]:
        """The bytes of each log, by its first entry."""
        return {first: path.read_bytes() for first, path in part_logs(self.folder)}

    def offer(
        self,
        round_id: int = 1,
        change: Callable[[dict[str, Any]], Any] = lambda entry: None,
        key: bytes = KEYS["a"],
        headers: Mapping[str, Any] = MappingProxyType({}),
        late: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> Offer:
        """What the owner of the part offers next.

        Args:
            change: changes the entry of the log, or returns another one, before the owner signs it.
            key: that it signs with.
            headers: changes of the contributions' headers, before their peers sign them.
            late: by peer the fragments that came after they were merged.
        """
        records, signed = merged(self.replica.outer, round_id, self.config, headers, late)
        line = entry_of(self.replica.outer, records, signed, self.log, round_id, GRANT, self.config, "a", key, late)
        entry = parse_canonical(line.encode())
        changed = change(entry) or entry
        if canonical(changed) != line.encode():
            rest = {name: each for name, each in changed.items() if name not in ("key", "signature")}
            line = signed_by_owner(RUN, rest, Signer(key)).decode()
        return self.replica.offer(GRANT, round_id, "all in", 30, records, line)

    def take(self, offer: Offer) -> None:
        """Hold and adopt it, as far as that is not done: the members have agreed on it."""
        if self.replica.state.outer_step < offer.update.outer_step:
            if self.replica.state.held != offer.update:
                self.replica.hold(offer, agreed=True)
            self.replica.adopt(offer.update.id)

    # -- as a source of others -----------------------------------------------------------------------------------------------

    def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
        return self.replica.kept(outer_step, update_id)

    def snapshot(self, part: int) -> PartSnapshot:
        return self.replica.snapshot()

    def confirm(self, part: int, claimed: Claimed) -> None:
        if claimed != self.replica.claimed():
            raise RemoteProtocolError("it is another state")


def merged(
    outer: OuterState,
    round_id: int,
    config: RunConfig,
    changed: Mapping[str, Any],
    late: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tuple[list[MergeRecord], dict[int, list[ContributionHeader]]]:
    """What p and q have contributed to a round, as it is merged, and their signed headers."""
    generator, records, signed = torch.Generator().manual_seed(round_id), [], dict[int, list[ContributionHeader]]()
    for fragment in outer.schema.fragments:
        measured, i = [], fragment.fragment_id
        for peer_id in ("p", "q"):
            payload = encode("fp32", 0.1 * torch.randn(fragment.numel, generator=generator))
            if i in late.get(peer_id, ()):
                continue
            measured.append(Measured(peer_id, 2, 10, measure(payload), payload))
            header = ContributionHeader(
                run_id=RUN,
                round_id=round_id,
                outer_step=outer.outer_step,
                peer_id=peer_id,
                fragment_id=i,
                schema_hash=outer.schema.schema_hash,
                inner_steps=2,
                tokens=10,
                codec="fp32",
                numel=fragment.numel,
                total_bytes=4 * fragment.numel,
            )
            header = replace(header, **changed)
            sign = ContributionSigner(KEYS[peer_id], config, lambda header=header: header.seen)
            signed.setdefault(i, []).append(sign(header, memoryview(payload.data)))
        records.append(outer.record(outer.reduce(i, measured)))
    return records, signed


def entry_of(
    outer: OuterState,
    records: list[MergeRecord],
    signed: Mapping[int, list[ContributionHeader]],
    log: PartLog,
    round_id: int,
    grant: int,
    config: RunConfig,
    owner: str,
    key: bytes,
    late: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> str:
    """What an owner writes of a merged round."""
    entries = OwnerEntries(log, RUN, 0, grant, config, owner, Signer(key), lambda: 1.7e9, enrolled_key)
    staged = outer.stage_all(records, None, {})
    step = outer.outer_step + 1
    return entries.commit(
        outer,
        records,
        staged,
        signed,
        RoundFacts(round_id=round_id, outer_step=step, reason="all in", missing=("c",), partly=late),
    )


class _AuditedDisk(MemberDisk):
    """The folder of one member, with a log."""

    record: Callable[[], Record | None] = staticmethod(lambda: None)
    enrolments: Enrolments | None = None
    log: PartLog

    def open(self, parts: int, on_commit: Callable[[int, Commit], None]) -> list[PartReplica]:
        self.killed_after, path = None, MemberFolder(self._folder).part(0)
        disk = Disk(write=self._write, fsync=self._sync)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.log = PartLog(path, RUN, 0, self._config, disk)
        self._stores.append(Store(path, self._config, RUN, disk, part_log=self.log))
        return [PartReplica(RUN, 0, self._config, self._stores[-1], partial(on_commit, 0), self.known)]

    def known(self) -> Enrolments | None:
        if (record := self.record()) is not None:
            self.enrolments = self.enrolments.taking(record) if self.enrolments is not None else Enrolments.of(record)
        return self.enrolments


class AuditedTable(ReplicatedTable):
    """Councils around one table whose members keep an audit log."""

    disk = _AuditedDisk

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(folder, config=AUDITED, enrolled=ENROLLED)

    def _open(self, peer_id: str) -> PartReplica:
        disk = self.members[peer_id]
        assert isinstance(disk, _AuditedDisk)
        disk.record = lambda: self.councils[peer_id].record
        return super()._open(peer_id)

    def merge(self, owner: str) -> Update:
        record, replica, disk = self.councils[owner].record, self.replicas[owner], self.members[owner]
        assert record is not None and isinstance(disk, _AuditedDisk)
        self._seed += 1
        grant = record.parts[0].grant
        records, signed = merged(replica.outer, self._seed, self.config, {})
        line = entry_of(replica.outer, records, signed, disk.log, self._seed, grant, self.config, owner, KEYS[owner])
        return self.offer(owner, replica.offer(grant, self._seed, "all in", 30, records, line), records)

    def check_equal(self) -> None:
        """Compare the logs, too: what each member has of it is the same bytes, up to the same entry."""
        super().check_equal()
        found = {peer_id: part_logs(MemberFolder(self.folder / peer_id).part(0)) for peer_id in self.members}
        lines = {peer_id: {i: path.read_bytes().splitlines() for i, path in logs} for peer_id, logs in found.items()}
        whole = max((logs.get(0, []) for logs in lines.values()), key=len)
        for logs in lines.values():
            for first, there in logs.items():
                entries = there[1:] if first else there
                assert entries == whole[first : first + len(entries)]
            last = max(logs)
            assert last + len(logs[last]) - (last > 0) == len(whole)
        log = LogVerifier()
        for line in whole:
            log.take(line)
        assert log.commits == max(self.taken)
