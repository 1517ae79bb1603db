from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.storage import journal as journal_module
from aggregator.storage import journal_records
from aggregator.storage.journal import CommittedRound, Disk, Journal, read_round, replay, replay_segments, rounds_in
from aggregator.storage.journal_records import Record
from edit.codecs.residuals import Residual
from edit.config.run import CodecConfig, RunConfig
from edit.errors import LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.injection import Injected, Injection
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import MergeRecord, OuterState
from edit.merging.penalty import NormStatistics
from edit.records import PeerVerdict, Verdict
from tests.support.encoded import encode
from tests.support.exhaustive import examples

BASE = 20


def record(fragment_id: int, step: int, *, codec_name: str = "fp32", rollback: bool = False) -> MergeRecord:
    """One fragment of the round that advances TO `step`; with a codec that has scales, something is left out."""
    vector = torch.randn(7, generator=torch.Generator().manual_seed(step * 100 + fragment_id)) * 1e-3
    residual = Residual(7, "int8") if codec_name == "int8" and not rollback else None
    if residual is not None:
        residual.write(slice(0, 7), vector * 0.01)
    return MergeRecord(
        outer_step=step - 1,
        fragment_id=fragment_id,
        payload=None if rollback else encode(codec_name, vector),
        residual=residual,
        verdicts=(
            PeerVerdict(peer_id="a", verdict=Verdict.OK, norm=0.1 + step, weight=1 / 3),
            PeerVerdict(peer_id="b", verdict=Verdict.NONFINITE, norm=math.inf, weight=0.0),
        ),
        statistics={"a": NormStatistics(mean=math.pi, variance=1e-300, count=3)},
        merged_norm=math.sqrt(2),
        clip=0.3,
    )


def same(one: MergeRecord, other: MergeRecord) -> bool:
    """Equal to the bit, NaN included."""

    def bits(value: MergeRecord) -> tuple[object, ...]:
        payload, residual = value.payload, value.residual
        return (
            None if payload is None else (payload.codec, payload.numel, bytes(payload.data)),
            None if residual is None else (residual.form, residual.numel, residual.tensor.numpy().tobytes()),
            (value.outer_step, value.fragment_id),
            repr(value.verdicts),
            repr(dict(value.statistics)),
            value.merged_norm.hex(),
            value.clip,
        )

    return bits(one) == bits(other)


def write_round(journal: Journal, step: int, *, commit: bool = True, digest: bool = True) -> tuple[MergeRecord, MergeRecord]:
    fragments = (record(0, step, codec_name=("fp32", "int8", "bf16")[step % 3]), record(1, step, rollback=step % 3 == 0))
    for fragment in fragments:
        journal.append_fragment(1_000_000 + step, fragment)
    if commit:
        journal.append_commit(1_000_000 + step, step, f"reason {step}", base=f"base {step}")
        if digest:
            journal.append_digest(step, f"digest {step}")
    return fragments


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-00000020.journal"


@pytest.fixture
def three(path: Path) -> Path:
    """A segment with three committed rounds, to steps 21, 22 and 23."""
    journal = Journal.create(path, BASE)
    for step in (21, 22, 23):
        write_round(journal, step)
    journal.close()
    return path


def steps(path: Path) -> list[int]:
    return [committed.outer_step for committed in replay(path, BASE)]


class FullDisk:
    """Takes `room` bytes, then says ENOSPC; `syncs` fsyncs, then says EIO."""

    def __init__(self, room: int, syncs: int = 1 << 30) -> None:
        self.room, self.syncs = room, syncs

    def disk(self) -> Disk:
        return Disk(self.write, self.fsync, self.reserve)

    def reserve(self, descriptor: int, begin: int, count: int) -> None:
        if count > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, begin, count)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), self.room)
        self.room -= taken
        return os.write(descriptor, data[:taken])

    def fsync(self, descriptor: int) -> None:
        if not self.syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.syncs -= 1
        os.fsync(descriptor)


def test_committed_rounds_come_back_to_the_bit(path: Path) -> None:
    journal = Journal.create(path, BASE)
    written = [write_round(journal, step) for step in (21, 22, 23)]
    journal.close()
    read = list(replay(path, BASE))
    assert [(r.round_id, r.outer_step, r.reason) for r in read] == [(1_000_000 + s, s, f"reason {s}") for s in (21, 22, 23)]
    assert [(r.base, r.digest) for r in read] == [(f"base {s}", f"digest {s}") for s in (21, 22, 23)]
    assert all(
        same(a, b) for fragments, r in zip(written, read, strict=True) for a, b in zip(fragments, r.fragments, strict=True)
    )


def test_numbers_that_json_does_not_know(path: Path) -> None:
    special = dataclasses.replace(
        record(0, 1),
        payload=encode("fp32", torch.tensor([math.nan, math.inf, -0.0, 1e-45])),
        verdicts=(PeerVerdict(peer_id="a", verdict=Verdict.NONFINITE, norm=math.nan, weight=0.0),),
        merged_norm=-math.inf,
        clip=5e-324,
    )
    journal = Journal.create(path, 0)
    journal.append_fragment(1, special)
    journal.append_commit(1, 1, "")
    assert same(next(replay(path, 0)).fragments[0], special)


@pytest.mark.parametrize("codec_name", ["fp32", "int8"])
@pytest.mark.parametrize("rollback", [False, True])
def test_what_is_injected_comes_back_with_its_fragment(path: Path, codec_name: str, rollback: bool) -> None:
    injection = Injection(brings=Injected("above", 3, 0), base=None, replaces=False, fragments={0: torch.arange(7.0)})
    first, second = record(0, 1, codec_name=codec_name, rollback=rollback), record(1, 1)
    journal = Journal.create(path, 0)
    for fragment in (first, second):
        journal.append_fragment(1, fragment, injection)
    journal.append_commit(1, 1, "", injected=injection.brings)
    (read,) = replay(path, 0)
    assert read.injection is not None and read.injection.brings == injection.brings
    assert list(read.injection.fragments) == [0] and torch.equal(read.injection.fragments[0], torch.arange(7.0))
    assert same(read.fragments[0], first) and same(read.fragments[1], second)


def test_an_open_segment_goes_on(three: Path) -> None:
    journal = Journal.open(three, BASE)
    assert (journal.outer_step, journal.cut) == (23, None)
    write_round(journal, 24)
    assert steps(three) == [21, 22, 23, 24]


def test_a_round_without_commit_is_cut_off_with_a_reason(three: Path) -> None:
    journal = Journal.open(three, BASE)
    before = journal.size
    write_round(journal, 24, commit=False)
    tail = journal.size - before
    journal.close()
    assert steps(three) == [21, 22, 23], "replay passes it over and leaves the file alone"
    reopened = Journal.open(three, BASE)
    assert reopened.cut is not None
    assert (reopened.cut.cut_bytes, reopened.cut.reason) == (tail, "the last round was not committed")
    assert three.stat().st_size == before


def test_a_kill_at_any_byte_loses_no_committed_round(three: Path, tmp_path: Path) -> None:
    whole = three.read_bytes()
    ends = [0]
    for step in (21, 22, 23):  # where each commit ends: the file that holds exactly so many rounds
        journal = Journal.create(tmp_path / f"until-{step}", BASE)
        for earlier in range(21, step):
            write_round(journal, earlier)
        write_round(journal, step, digest=False)
        ends.append(journal.size)
        journal.close()
    assert whole.startswith((tmp_path / "until-23").read_bytes())
    torn = tmp_path / "torn"
    for length in range(0, len(whole), 7):
        torn.write_bytes(whole[:length])
        committed = sum(end <= length for end in ends[1:])
        assert steps(torn) == [21, 22, 23][:committed]
        journal = Journal.open(torn, BASE)
        assert journal.outer_step == BASE + committed
        write_round(journal, BASE + committed + 1)
        journal.close()
        assert steps(torn) == [*[21, 22, 23][:committed], BASE + committed + 1]
        known = [r.digest for r in replay(torn, BASE)]
        assert known[:-2] == [f"digest {step}" for step in range(21, 19 + len(known))], "only the last commit's may be torn"


def test_a_flipped_byte_with_good_records_after_it_is_damage(three: Path) -> None:
    """Whatever byte it is, the length fields included: nothing behind it may be thrown away as torn."""
    whole = three.read_bytes()
    last_commit = whole.rindex(b"EdJ1")
    for position in range(0, last_commit, 3):
        three.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(StorageError, match=r"step-00000020\.journal: damaged at byte \d+"):
            list(replay(three, BASE))
        with pytest.raises(StorageError):
            Journal.open(three, BASE)


def test_damage_names_its_offset_and_the_file_stays_as_it_is(three: Path) -> None:
    whole = bytearray(three.read_bytes())
    second = whole.index(b"EdJ1", 4)
    whole[second + 60] ^= 1
    three.write_bytes(whole)
    with pytest.raises(StorageError, match=rf"damaged at byte {second} \(wrong checksum\); restore it from a copy"):
        Journal.open(three, BASE)
    assert three.read_bytes() == whole


def test_garbage_after_the_last_record_is_cut_off(three: Path) -> None:
    size = three.stat().st_size
    with three.open("ab") as file:
        file.write(b"\0" * 4096)
    journal = Journal.open(three, BASE)
    assert journal.cut is not None
    assert (journal.cut.cut_bytes, journal.cut.reason) == (4096, f"torn at byte {size}: no record begins here")
    assert steps(three) == [21, 22, 23]


def test_a_segment_of_another_base_is_refused(three: Path) -> None:
    for use in (lambda: Journal.open(three, 40), lambda: list(replay(three, 40))):
        with pytest.raises(StorageError, match="follows outer step 20, not 40"):
            use()


def test_files_that_are_no_journal(path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        list(replay(path, BASE))
    path.write_bytes(b"")
    assert list(replay(path, BASE)) == []
    path.write_bytes(b"not a journal")
    assert list(replay(path, BASE)) == []
    assert Journal.open(path, BASE).outer_step == BASE


def test_an_existing_segment_is_never_replaced(three: Path) -> None:
    with pytest.raises(StorageError, match="cannot be created"):
        Journal.create(three, BASE)
    assert steps(three) == [21, 22, 23]


def test_a_given_up_round_leaves_no_trace(path: Path) -> None:
    journal = Journal.create(path, BASE)
    write_round(journal, 21)
    committed = journal.size
    journal.append_fragment(77, record(1, 22))
    journal.append_fragment(78, record(0, 22))
    journal.append_commit(78, 22, "second try")
    journal.close()
    read = list(replay(path, BASE))
    assert [(r.round_id, len(r.fragments)) for r in read] == [(1_000_021, 2), (78, 1)]
    assert path.read_bytes()[committed:].count(b"EdJ1") == 2


def test_calls_out_of_order_are_our_own_bug(path: Path) -> None:
    journal = Journal.create(path, BASE)
    with pytest.raises(LocalProtocolError, match="without its fragments"):
        journal.append_commit(1, 21, "")
    with pytest.raises(LocalProtocolError, match="outer step 23 after 20"):
        journal.append_fragment(1, record(0, 23))
    with pytest.raises(LocalProtocolError, match="the digest of outer step 21 after 20"):
        journal.append_digest(21, "d")
    journal.append_fragment(1, record(0, 21))
    with pytest.raises(LocalProtocolError, match="without its fragments"):
        journal.append_commit(2, 21, "")
    with pytest.raises(LocalProtocolError, match="the digest of outer step 20 after 20"):
        journal.append_digest(20, "d")  # a round is being written
    with pytest.raises(LocalProtocolError, match=r"of fragments \[0, 1\], of which \[0\] are written"):
        journal.append_commit(1, 21, "", fragments=(1, 0))


def test_a_full_disk_aborts_the_round_and_a_later_one_works(three: Path) -> None:
    size = three.stat().st_size
    full = FullDisk(room=150)
    journal = Journal.open(three, BASE, full.disk())
    with pytest.raises(StorageError, match=r"step-00000020\.journal: cannot be written \(No space left on device\)"):
        write_round(journal, 24)
    assert three.stat().st_size == journal.size == size
    full.room = 1 << 20
    write_round(journal, 24)
    assert steps(three) == [21, 22, 23, 24]


def test_a_full_disk_at_any_byte_never_damages_the_file(path: Path, tmp_path: Path) -> None:
    size = 0
    for room in range(0, 2600, 19):
        torn, full = tmp_path / f"{room}.journal", FullDisk(room)
        try:
            journal = Journal.create(torn, BASE, full.disk())
        except StorageError:
            assert not torn.exists()
            continue
        with pytest.raises(StorageError):
            for step in range(21, 40):
                write_round(journal, step)
        committed, full.room = journal.outer_step, 1 << 20
        write_round(journal, committed + 1)
        assert steps(torn) == list(range(21, committed + 2))
        journal.close()
        size = max(size, committed)
    assert size > 21, "some rounds were committed before the disk was full"


def test_what_a_killed_process_had_not_synced_is_on_disk_once_the_segment_is_open(three: Path) -> None:
    full = FullDisk(1 << 20, syncs=0)
    with pytest.raises(StorageError, match=r"step-00000020\.journal: cannot be synced"):
        Journal.open(three, BASE, full.disk())
    assert steps(three) == [21, 22, 23], "nothing is cut off"
    full.syncs = 1
    assert Journal.open(three, BASE, full.disk()).outer_step == 23
    assert full.syncs == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_committed_where_nobody_would_find_it(three: Path, tmp_path: Path, replaced: bool) -> None:
    """The folder is moved away, or goes with its disk: the round waits for it."""
    folder, away = tmp_path / "outer", tmp_path / "away"
    folder.mkdir()
    moved = three.rename(folder / three.name)
    journal = Journal.open(moved, BASE)
    write_round(journal, 24, commit=False)
    folder.rename(away)
    if replaced:
        shutil.copytree(away, folder)
    why = "is another file than before" if replaced else "is gone"
    with pytest.raises(StorageError, match=rf"{three.name}: {why}.*put its folder back"):
        journal.append_commit(1_000_024, 24, "all")
    with pytest.raises(StorageError, match=why):
        journal.prove_room(1)
    assert steps(away / three.name) == [21, 22, 23]
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)
    write_round(journal, 24)
    journal.close()
    assert steps(moved) == [21, 22, 23, 24]


def test_a_commit_that_cannot_be_synced_is_none(three: Path) -> None:
    full = FullDisk(1 << 20, syncs=1)
    journal = Journal.open(three, BASE, full.disk())
    with pytest.raises(StorageError, match="cannot be synced"):
        write_round(journal, 24)
    assert journal.outer_step == 23
    assert steps(three) == [21, 22, 23]
    full.syncs = 1
    write_round(journal, 24)
    assert steps(three) == [21, 22, 23, 24]


def test_a_failed_sync_takes_the_digest_before_it_along(path: Path) -> None:
    """It was not durable yet: a page that the disk did not take would be damage in front of the commits after it."""
    full = FullDisk(1 << 20)
    journal = Journal.create(path, BASE, full.disk())
    write_round(journal, 21, digest=False)
    durable = path.stat().st_size
    journal.append_digest(21, "digest 21")
    full.syncs = 0
    with pytest.raises(StorageError, match="cannot be synced"):
        write_round(journal, 22)
    assert path.stat().st_size == journal.size == durable
    full.syncs = 1
    write_round(journal, 22)
    assert [(one.outer_step, one.digest) for one in replay(path, BASE)] == [(21, ""), (22, "digest 22")]


def test_room_is_proved_without_a_trace_and_after_a_failure_on_disk(three: Path) -> None:
    before, full = three.read_bytes(), FullDisk(room=2 << 20)
    journal = Journal.open(three, BASE, full.disk())
    journal.append_fragment(7, record(0, 24))  # of a round that was given up
    full.syncs, full.room = 0, 2 << 20
    journal.prove_room(2 << 20)  # it costs no write and no sync
    assert three.read_bytes() == before and (journal.round_id, full.room) == (0, 2 << 20)
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\)"):
        journal.prove_room((2 << 20) + 1)
    journal.prove_room(2 << 20)
    with pytest.raises(StorageError, match="cannot be synced"):
        write_round(journal, 24)
    with pytest.raises(StorageError, match=r"cannot be written \(Input/output error\)"):
        journal.prove_room(1 << 20)
    assert full.room < 1 << 20, "it was written"
    full.syncs, full.room = 1, 2 << 20
    journal.prove_room(100)
    assert full.syncs == 0
    journal.prove_room(100)
    assert three.read_bytes() == before and list(three.parent.iterdir()) == [three]
    full.syncs = 1
    write_round(journal, 24)
    assert steps(three) == [21, 22, 23, 24]


def test_while_room_is_proved_the_segment_has_its_records_only_and_its_folder_no_other_file(three: Path) -> None:
    """So whoever reads the folder meanwhile finds nothing that is no record, and a kill leaves nothing."""
    before, proved = three.read_bytes(), list[int]()

    def reserve(descriptor: int, begin: int, count: int) -> None:
        os.posix_fallocate(descriptor, begin, count)
        assert three.read_bytes() == before and list(three.parent.iterdir()) == [three]
        assert begin == len(before), "a limit of a file's size counts as it will for the segment"
        proved.append(os.fstat(descriptor).st_blocks * 512)

    Journal.open(three, BASE, Disk(reserve=reserve)).prove_room(1 << 20)
    assert proved[0] >= 1 << 20, "real blocks"


def refused(descriptor: int, begin: int, count: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("reserve", [None, refused])
def test_where_nothing_can_be_reserved_room_is_proved_by_writing(
    three: Path, reserve: Callable[[int, int, int], None] | None
) -> None:
    before, full = three.read_bytes(), FullDisk(room=3000)
    journal = Journal.open(three, BASE, Disk(full.write, full.fsync, reserve))
    journal.prove_room(3000)
    full.room = 2999
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\)"):
        journal.prove_room(3000)
    assert three.read_bytes() == before


def hold(journal: Journal, step: int) -> None:
    journal.append_fragment(step, record(0, step))
    journal.append_commit(step, step, "all in", base="base", update={"id": f"update {step}"})


def test_a_commit_that_is_held_is_taken_back_without_a_trace(path: Path) -> None:
    journal = Journal.create(path, BASE)
    write_round(journal, 21)
    before = path.read_bytes()
    hold(journal, 22)
    journal.take_back()
    assert (path.read_bytes(), journal.outer_step, journal.size) == (before, 21, len(before))
    hold(journal, 22)
    journal.append_digest(22, "digest")
    journal.close()
    assert [(each.outer_step, each.update, each.digest) for each in replay(path, BASE)] == [
        (21, None, "digest 21"),
        (22, {"id": "update 22"}, "digest"),
    ]


@pytest.mark.parametrize("fragments", [0, 1])
def test_what_is_held_is_taken_back_after_a_restart(path: Path, fragments: int) -> None:
    """fragments: of a round that was begun after it, and never committed."""
    journal = Journal.create(path, BASE)
    write_round(journal, 21)
    before = path.read_bytes()
    hold(journal, 22)
    for i in range(fragments):
        journal.append_fragment(99, record(i, 23))
    journal.close()
    again = Journal.open(path, BASE)
    assert again.outer_step == 22
    again.take_back()
    hold(again, 22)
    again.take_back()
    again.close()
    assert path.read_bytes() == before


def test_only_what_is_held_can_be_taken_back(path: Path) -> None:
    journal = Journal.create(path, BASE)
    with pytest.raises(LocalProtocolError, match="nothing is held"):
        journal.take_back()
    hold(journal, 21)
    journal.append_digest(21, "digest")
    with pytest.raises(LocalProtocolError, match="nothing is held"):
        journal.take_back()
    journal.close()
    with pytest.raises(LocalProtocolError, match="nothing is held"):
        Journal.open(path, BASE).take_back()


def test_the_journal_knows_where_each_round_is(path: Path) -> None:
    """Whatever was given up, held, taken back or noted late between them."""
    full = FullDisk(1 << 30)
    journal = Journal.create(path, BASE, full.disk())
    write_round(journal, 21)
    write_round(journal, 22, commit=False)  # given up
    journal.append_fragment(22, record(0, 22))
    journal.append_commit(22, 22, "all in")
    hold(journal, 23)
    journal.take_back()
    hold(journal, 23)
    journal.append_digest(23, "digest 23")
    full.syncs = 0
    with pytest.raises(StorageError, match="cannot be synced"):
        write_round(journal, 24)  # takes the digest before it along
    full.syncs = 1 << 30
    write_round(journal, 24)
    hold(journal, 25)
    assert journal.rounds == rounds_in(path, BASE)
    for whole in replay(path, BASE):
        found = read_round(path, journal.rounds[whole.outer_step], whole.outer_step)
        assert dataclasses.replace(found, fragments=()) == dataclasses.replace(whole, fragments=())
        assert all(map(same, found.fragments, whole.fragments)) and len(found.fragments) == len(whole.fragments)
    journal.close()
    again = Journal.open(path, BASE)
    again.close()
    assert again.rounds == journal.rounds and {*again.rounds} == {21, 22, 23, 24, 25}
    with pytest.raises(StorageError, match="the round to outer step 24 does not begin at byte"):
        read_round(path, again.rounds[23], 24)
    with pytest.raises(StorageError, match=r"damaged at byte \d+ \(no record begins here"):
        read_round(path, (again.rounds[23][0] + 1, again.rounds[23][1]), 23)


def test_segments_follow_one_another(three: Path, tmp_path: Path) -> None:
    second = tmp_path / "step-00000023.journal"
    journal = Journal.create(second, 23)
    write_round(journal, 24)
    segments = [(20, three), (23, second)]
    assert [r.outer_step for r in replay_segments(segments, 20)] == [21, 22, 23, 24]
    with pytest.raises(StorageError, match="begins after outer step 23, but what comes before ends at 20"):
        list(replay_segments(segments[1:], 20))
    with pytest.raises(StorageError, match="ends at outer step 23, but step 30 was committed"):
        list(replay_segments(segments[:1], 20, at_least=30))


def outer_state(record: str) -> OuterState:
    shapes = (("head", (3, 4)), ("tail", (5,)))
    fragments = tuple(
        FragmentSpec(fragment_id=i, name=n, tensors=(TensorSpec(name=n, shape=s),)) for i, (n, s) in enumerate(shapes)
    )
    theta = [torch.linspace(-1, 1, fragment.numel) for fragment in fragments]
    return OuterState(Schema(fragments), RunConfig(codec=CodecConfig(record=record)), theta)


@pytest.mark.parametrize("record", ["", "fp32", "int8", "int4"])
def test_replay_restores_the_outer_state_to_the_bit(tmp_path: Path, record: str) -> None:
    """kill -9 after any commit: parameters, momentum, residuals and statistics come back."""
    lived, journal = outer_state(record), Journal.create(tmp_path / "journal", 0)
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 13):
        records = []
        for i, spec in enumerate(lived.schema.fragments):
            vectors = {peer: torch.randn(spec.numel, generator=generator) for peer in "ab"}
            vectors["b"][0] = math.nan if step == 5 else vectors["b"][0]
            encoded = {peer: encode("fp32", vector) for peer, vector in vectors.items()}
            merged = lived.reduce(i, [Measured(peer, 4, 64, measure(data), data) for peer, data in encoded.items()])
            records.append(lived.record(merged))
            journal.append_fragment(step, records[-1])
        journal.append_commit(step, step, "all in")
        lived.commit(step, "all in", records)
    restored = outer_state(record)
    for r in replay(tmp_path / "journal", 0):
        restored.commit(r.round_id, r.reason, list(r.fragments))
    assert restored.metadata() == lived.metadata()
    ours, theirs = restored.to_tensors(), lived.to_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


FLIP: list[Callable[[bytes, int], bytes]] = [
    lambda data, at: data[:at],
    lambda data, at: data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :],
    lambda data, at: data[:at] + b"EdJ1" + data[at:],
    lambda data, at: data[:at] + struct.pack("<4sIQI", b"EdJ1", 1 << 31, 1 << 62, 0) + data[at + 1 :],
]


@settings(deadline=None, max_examples=examples(200))
@given(position=st.floats(0, 0.999), change=st.sampled_from(FLIP))
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, position: float, change: Callable[[bytes, int], bytes]
) -> None:
    """Whatever happened to the file: whole rounds from the start, or a StorageError, never wrong ones."""
    path = tmp_path_factory.mktemp("journal") / "segment"
    journal = Journal.create(path, BASE)
    written = [write_round(journal, step) for step in (21, 22)]
    journal.close()
    data = path.read_bytes()
    path.write_bytes(change(data, int(position * len(data))))
    read: list[CommittedRound] = []
    try:
        read += replay(path, BASE)
    except StorageError as error:
        assert str(path) in str(error)
    for fragments, committed in zip(written, read, strict=False):
        assert all(same(a, b) for a, b in zip(fragments, committed.fragments, strict=True))


@pytest.mark.parametrize("ahead", range(1, 12))
def test_a_good_record_is_found_wherever_it_begins(ahead: int, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it begins at the end of one block that is read, and goes on in the next one."""
    monkeypatch.setattr(journal_records, "_BLOCK_BYTES", 8)
    whole = three.read_bytes()
    three.write_bytes(b"E" * ahead + whole)
    assert journal_records.good_record_after(three, 0, ahead + len(whole))
    assert not journal_records.good_record_after(three, 0, ahead + 20), "what is behind `size` does not count"


def test_a_segment_that_is_cut_off_while_it_is_searched_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a coordinator does that gives up a round, beside `export`: a mapped file was a SIGBUS then."""
    path, pieces = tmp_path / "journal", 4 << 20
    path.write_bytes(b"torn" + journal_records.MAGIC + bytes(pieces))

    def cut(*_: object) -> None:
        os.truncate(path, 100)
        raise journal_records.BadRecord(0, "none")

    monkeypatch.setattr(journal_records, "_read_record", cut)
    assert not journal_records.good_record_after(path, 0, pieces)
    assert path.stat().st_size == 100


def test_a_round_that_is_written_while_the_segment_is_read_is_no_damage(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader finds half of a record, and then, behind it, what was appended since."""
    whole = three.read_bytes()
    begin, end = rounds_in(three, BASE)[22]
    three.write_bytes(whole[: begin + 50])

    def appended(path: Path, offset: int = 0) -> Iterator[Record]:
        try:
            yield from journal_records.records(path, offset)
        finally:
            three.write_bytes(whole)

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "records", appended)
        assert steps(three) == [21]
    assert steps(three) == [21, 22, 23]
    really = journal_module._survey

    def cut(path: Path, base: int) -> object:
        found = really(path, base)
        os.truncate(path, end - 50)  # the owner of a swarm's part takes back what it held
        return found

    monkeypatch.setattr(journal_module, "_survey", cut)
    with pytest.raises(StorageError, match=r"was changed at byte \d+ while it was read"):
        steps(three)
