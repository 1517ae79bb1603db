from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.intake import Intake, Slot
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError

DATA = bytes(range(256)) * 4


@pytest.fixture(params=["memory", "disk"])
def intake(request: pytest.FixtureRequest, tmp_path: Path) -> Intake:
    return Intake(1 << 20 if request.param == "memory" else 0, tmp_path / "spill")


def put(slot: Slot, offset: int, data: bytes) -> int:
    return slot.write(offset, data, zlib.crc32(data))


def fill(slot: Slot, data: bytes = DATA, chunk: int = 100) -> None:
    for offset in range(0, len(data), chunk):
        put(slot, offset, data[offset : offset + chunk])


def test_chunks_in_order_make_the_payload(intake: Intake) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    fill(slot)
    assert slot.complete
    assert bytes(slot.payload()) == DATA


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (300, DATA[300:400], "gap: a chunk starts at 300, 200 bytes are in"),
        (100, DATA[100:300], "overlap: a chunk starts at 100, 200 bytes are in"),
        (100, b"x" * 100, "other bytes at 100 than before"),
        (200, DATA, "exceed the declared 1024"),
        (-1, DATA[:10], "exceed the declared 1024"),
    ],
)
def test_wrong_chunks_are_the_peers_fault_and_touch_nothing(intake: Intake, offset: int, data: bytes, message: str) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    fill(slot, DATA[:200])
    with pytest.raises(RemoteProtocolError, match=message):
        put(slot, offset, data)
    assert slot.received_bytes == 200
    for start in range(200, len(DATA), 103):
        put(slot, start, DATA[start : start + 103])
    assert bytes(slot.payload()) == DATA


def test_a_wrong_checksum_is_refused(intake: Intake) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    with pytest.raises(RemoteProtocolError, match="contribution of a to round 1, fragment 0: wrong checksum of the chunk at 0"):
        slot.write(0, DATA[:100], zlib.crc32(DATA[:100]) ^ 1)
    assert slot.received_bytes == 0


def test_what_came_already_may_come_again(intake: Intake) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    assert put(slot, 0, b"") == 0
    fill(slot, DATA[:300])
    assert put(slot, 0, DATA[:100]) == 300
    assert put(slot, 50, DATA[50:300]) == 300
    assert put(slot, 300, b"") == 300


def test_a_retry_goes_on_where_the_last_one_broke(intake: Intake) -> None:
    fill(intake.open("a", 1, 0, len(DATA)), DATA[:300])
    again = intake.open("a", 1, 0, len(DATA))
    assert again.received_bytes == 300
    put(again, 300, DATA[300:])
    assert bytes(again.payload()) == DATA


def test_ranks_have_slots_of_their_own(intake: Intake) -> None:
    for rank in (0, 1):
        fill(intake.open("a", 1, 0, len(DATA), rank), DATA[::-1] if rank else DATA)
    first, second = intake.find("a", 1, 0), intake.find("a", 1, 0, 1)
    assert first is not None and second is not None
    assert (bytes(first.payload()), bytes(second.payload())) == (DATA, DATA[::-1])
    intake.drop(second, "a newer attempt has come")
    assert intake.find("a", 1, 0, 1) is None and intake.find("a", 1, 0) is first
    with pytest.raises(StaleError, match="contribution of a to round 1, fragment 0, rank 1: a newer attempt has come"):
        put(second, 0, DATA[:1])


def test_sizes_are_checked(intake: Intake) -> None:
    intake.open("a", 1, 0, 10)
    with pytest.raises(RemoteProtocolError, match="11 bytes declared, 10 before"):
        intake.open("a", 1, 0, 11)
    with pytest.raises(RemoteProtocolError, match="0 bytes declared"):
        intake.open("a", 1, 1, 0)


def test_an_incomplete_or_dropped_payload_is_not_read(intake: Intake) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    with pytest.raises(LocalProtocolError, match="not complete"):
        slot.payload()
    fill(slot)
    intake.drop(slot)
    with pytest.raises(StorageError, match="dropped, its round is over"):
        slot.payload()
    with pytest.raises(StaleError, match="its round is over"):
        put(slot, 0, DATA[:1])


def test_a_payload_that_is_being_read_outlives_its_slot(intake: Intake) -> None:
    slot = intake.open("a", 1, 0, len(DATA))
    fill(slot)
    payload = slot.payload()
    intake.drop(slot)
    assert bytes(payload) == DATA


def test_what_is_dropped_goes_with_its_files(intake: Intake, tmp_path: Path) -> None:
    for peer_id in "ab":
        for round_id in (1, 2):
            fill(intake.open(peer_id, round_id, 0, len(DATA)))
    slot = intake.find("a", 1, 0)
    assert slot is not None
    intake.drop(slot)
    assert intake.find("a", 1, 0) is None and intake.find("b", 1, 0) is not None
    intake.close()
    assert intake.held_bytes == intake.spilled_bytes == 0
    assert list((tmp_path / "spill").iterdir()) == []


def test_memory_stays_below_the_bound_with_many_peers(tmp_path: Path) -> None:
    intake = Intake(4 * len(DATA), tmp_path)
    slots = [intake.open(f"p{i}", 1, 0, len(DATA)) for i in range(50)]
    for slot in slots:
        fill(slot)
        assert intake.held_bytes <= 4 * len(DATA)
    assert sum(not slot.spilled for slot in slots) == 4
    assert intake.spilled_bytes == 46 * len(DATA)
    assert all(bytes(slot.payload()) == DATA for slot in slots)
    intake.drop(slots[0])
    assert not intake.open("next", 2, 0, len(DATA)).spilled, "freed memory is used again"


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    fill(Intake(0, tmp_path).open("a", 1, 0, len(DATA)))
    (tmp_path / "not-ours.txt").write_text("stays")
    Intake(0, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["not-ours.txt"]


def test_a_full_disk_drops_the_slot_and_says_so(tmp_path: Path) -> None:
    room = [150]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), room[0])
        room[0] -= taken
        return os.pwrite(descriptor, data[:taken], offset)

    intake = Intake(0, tmp_path, write=write)
    slot = intake.open("a", 1, 0, len(DATA))
    put(slot, 0, DATA[:100])
    with pytest.raises(StorageError, match=r"slot-00000001\.part: cannot be written \(No space left on device\)"):
        put(slot, 100, DATA[100:200])
    assert intake.find("a", 1, 0) is None
    assert list(tmp_path.iterdir()) == []
    room[0] = 1 << 20
    fill(intake.open("a", 1, 0, len(DATA)))


def test_a_spill_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        Intake(0, tmp_path / "file")


def test_a_spilled_payload_that_somebody_cut_is_not_trusted(tmp_path: Path) -> None:
    slot = Intake(0, tmp_path).open("a", 1, 0, len(DATA))
    fill(slot)
    next(tmp_path.iterdir()).write_bytes(DATA[:-1])
    with pytest.raises(StorageError, match="was changed"):
        slot.payload()


@settings(deadline=None, max_examples=100)
@given(
    st.binary(min_size=1, max_size=60), st.booleans(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20)
)
def test_any_chunking_with_repeats_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, spilled: bool, steps: list[tuple[int, int]]
) -> None:
    slot = Intake(0 if spilled else 1000, tmp_path_factory.mktemp("spill")).open("a", 1, 0, len(data))
    for back, length in steps:
        received = slot.received_bytes
        start = max(0, received - back)
        end = min(start + length, received if start < received else len(data))
        assert put(slot, start, data[start:end]) == max(received, end)
    put(slot, slot.received_bytes, data[slot.received_bytes :])
    assert bytes(slot.payload()) == data
