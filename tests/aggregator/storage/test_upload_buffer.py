from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError

DATA = bytes(range(256)) * 4


@pytest.fixture(params=["memory", "disk"])
def intake(request: pytest.FixtureRequest, tmp_path: Path) -> UploadBuffer:
    return UploadBuffer(1 << 20 if request.param == "memory" else 0, tmp_path / "spill")


def put(upload: Upload, offset: int, data: bytes) -> int:
    return upload.write(offset, data, zlib.crc32(data))


def fill(upload: Upload, data: bytes = DATA, chunk: int = 100) -> None:
    for offset in range(0, len(data), chunk):
        put(upload, offset, data[offset : offset + chunk])


def test_chunks_in_order_make_the_payload(intake: UploadBuffer) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    fill(upload)
    assert upload.complete
    assert bytes(upload.payload()) == DATA


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
def test_wrong_chunks_are_the_peers_fault_and_touch_nothing(
    intake: UploadBuffer, offset: int, data: bytes, message: str
) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    fill(upload, DATA[:200])
    with pytest.raises(RemoteProtocolError, match=message):
        put(upload, offset, data)
    assert upload.received_bytes == 200
    for start in range(200, len(DATA), 103):
        put(upload, start, DATA[start : start + 103])
    assert bytes(upload.payload()) == DATA


def test_a_wrong_checksum_is_refused(intake: UploadBuffer) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    with pytest.raises(RemoteProtocolError, match="contribution of a to round 1, fragment 0: wrong checksum of the chunk at 0"):
        upload.write(0, DATA[:100], zlib.crc32(DATA[:100]) ^ 1)
    assert upload.received_bytes == 0


def test_what_came_already_may_come_again(intake: UploadBuffer) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    assert put(upload, 0, b"") == 0
    fill(upload, DATA[:300])
    assert put(upload, 0, DATA[:100]) == 300
    assert put(upload, 50, DATA[50:300]) == 300
    assert put(upload, 300, b"") == 300


def test_a_retry_goes_on_where_the_last_one_broke(intake: UploadBuffer) -> None:
    fill(intake.open("a", 1, 0, len(DATA)), DATA[:300])
    again = intake.open("a", 1, 0, len(DATA))
    assert again.received_bytes == 300
    put(again, 300, DATA[300:])
    assert bytes(again.payload()) == DATA


def test_ranks_have_slots_of_their_own(intake: UploadBuffer) -> None:
    for rank in (0, 1):
        fill(intake.open("a", 1, 0, len(DATA), rank), DATA[::-1] if rank else DATA)
    first, second = intake.find("a", 1, 0), intake.find("a", 1, 0, 1)
    assert first is not None and second is not None
    assert (bytes(first.payload()), bytes(second.payload())) == (DATA, DATA[::-1])
    intake.drop(second, "a newer attempt has come")
    assert intake.find("a", 1, 0, 1) is None and intake.find("a", 1, 0) is first
    with pytest.raises(StaleError, match="contribution of a to round 1, fragment 0, rank 1: a newer attempt has come"):
        put(second, 0, DATA[:1])


def test_sizes_are_checked(intake: UploadBuffer) -> None:
    intake.open("a", 1, 0, 10)
    with pytest.raises(RemoteProtocolError, match="11 bytes declared, 10 before"):
        intake.open("a", 1, 0, 11)
    with pytest.raises(RemoteProtocolError, match="0 bytes declared"):
        intake.open("a", 1, 1, 0)


def test_an_incomplete_or_dropped_payload_is_not_read(intake: UploadBuffer) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    with pytest.raises(LocalProtocolError, match="not complete"):
        upload.payload()
    fill(upload)
    intake.drop(upload)
    with pytest.raises(StorageError, match="dropped, its round is over"):
        upload.payload()
    with pytest.raises(StaleError, match="its round is over"):
        put(upload, 0, DATA[:1])


def test_a_payload_that_is_being_read_outlives_its_slot(intake: UploadBuffer) -> None:
    upload = intake.open("a", 1, 0, len(DATA))
    fill(upload)
    payload = upload.payload()
    intake.drop(upload)
    assert bytes(payload) == DATA


def test_what_is_dropped_goes_with_its_files(intake: UploadBuffer, tmp_path: Path) -> None:
    for peer_id in "ab":
        for round_id in (1, 2):
            fill(intake.open(peer_id, round_id, 0, len(DATA)))
    upload = intake.find("a", 1, 0)
    assert upload is not None
    intake.drop(upload)
    assert intake.find("a", 1, 0) is None and intake.find("b", 1, 0) is not None
    intake.close()
    assert intake.held_bytes == intake.spilled_bytes == 0
    assert list((tmp_path / "spill").iterdir()) == []


def test_memory_stays_below_the_bound_with_many_peers(tmp_path: Path) -> None:
    intake = UploadBuffer(4 * len(DATA), tmp_path)
    uploads = [intake.open(f"p{i}", 1, 0, len(DATA)) for i in range(50)]
    for upload in uploads:
        fill(upload)
        assert intake.held_bytes <= 4 * len(DATA)
    assert sum(not upload.spilled for upload in uploads) == 4
    assert intake.spilled_bytes == 46 * len(DATA)
    assert all(bytes(upload.payload()) == DATA for upload in uploads)
    intake.drop(uploads[0])
    assert not intake.open("next", 2, 0, len(DATA)).spilled, "freed memory is used again"


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    fill(UploadBuffer(0, tmp_path).open("a", 1, 0, len(DATA)))
    (tmp_path / "not-ours.txt").write_text("stays")
    UploadBuffer(0, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["not-ours.txt"]


def test_a_full_disk_drops_the_slot_and_says_so(tmp_path: Path) -> None:
    room = [150]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), room[0])
        room[0] -= taken
        return os.pwrite(descriptor, data[:taken], offset)

    intake = UploadBuffer(0, tmp_path, write=write)
    upload = intake.open("a", 1, 0, len(DATA))
    put(upload, 0, DATA[:100])
    with pytest.raises(StorageError, match=r"upload-00000001\.part: cannot be written \(No space left on device\)"):
        put(upload, 100, DATA[100:200])
    assert intake.find("a", 1, 0) is None
    assert list(tmp_path.iterdir()) == []
    room[0] = 1 << 20
    fill(intake.open("a", 1, 0, len(DATA)))


def test_a_spill_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        UploadBuffer(0, tmp_path / "file")


def test_a_spilled_payload_that_somebody_cut_is_not_trusted(tmp_path: Path) -> None:
    upload = UploadBuffer(0, tmp_path).open("a", 1, 0, len(DATA))
    fill(upload)
    next(tmp_path.iterdir()).write_bytes(DATA[:-1])
    with pytest.raises(StorageError, match="was changed"):
        upload.payload()


@settings(deadline=None, max_examples=100)
@given(
    st.binary(min_size=1, max_size=60), st.booleans(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20)
)
def test_any_chunking_with_repeats_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, spilled: bool, steps: list[tuple[int, int]]
) -> None:
    upload = UploadBuffer(0 if spilled else 1000, tmp_path_factory.mktemp("spill")).open("a", 1, 0, len(data))
    for back, length in steps:
        received = upload.received_bytes
        start = max(0, received - back)
        end = min(start + length, received if start < received else len(data))
        assert put(upload, start, data[start:end]) == max(received, end)
    put(upload, upload.received_bytes, data[upload.received_bytes :])
    assert bytes(upload.payload()) == data
