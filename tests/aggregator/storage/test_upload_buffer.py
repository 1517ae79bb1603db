"""Bytes on their way in: in order, without gaps, bounded in memory, and no write on the event loop."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aggregator.storage.upload_buffer
from aggregator.storage.upload_buffer import Upload, UploadBuffer
from edit.errors import LocalProtocolError, RemoteProtocolError, StaleError, StorageError
from tests.support.exhaustive import examples

DATA = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def files() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(params=["memory", "disk"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path, files: Executor) -> UploadBuffer:
    return UploadBuffer(1 << 20 if request.param == "memory" else 0, tmp_path / "spill", files)


def room_for(size: int) -> int:
    """Return the least `buffer_bytes` that hold this many bytes, beside a quarter for what is on its way."""
    return size * 4 // 3


def put(upload: Upload, offset: int, data: bytes) -> int:
    return asyncio.run(upload.write(offset, data))


def written(files: Executor) -> None:
    """Wait until the file thread has done what it was given."""
    files.submit(lambda: None).result()


def fill(upload: Upload, data: bytes = DATA, chunk: int = 100) -> None:
    for offset in range(0, len(data), chunk):
        put(upload, offset, data[offset : offset + chunk])


def test_chunks_in_order_make_the_payload(buffer: UploadBuffer) -> None:
    upload = buffer.open("contribution of a", len(DATA))
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
    buffer: UploadBuffer, offset: int, data: bytes, message: str
) -> None:
    upload = buffer.open("contribution of a", len(DATA))
    fill(upload, DATA[:200])
    with pytest.raises(RemoteProtocolError, match=message):
        put(upload, offset, data)
    assert upload.received_bytes == 200
    for start in range(200, len(DATA), 103):
        put(upload, start, DATA[start : start + 103])
    assert bytes(upload.payload()) == DATA


class Mappings:
    """Counts what is mapped in place of `edit.heaps.mapping`, and what of it is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._live: list[weakref.ref[mmap.mmap]] = []
        monkeypatch.setattr(aggregator.storage.upload_buffer, "mapping", self._new)

    def _new(self, size: int) -> mmap.mmap:
        made = _Mapping(-1, size)
        self.sizes.append(size)
        self._live.append(weakref.ref(made))
        return made

    @property
    def live_bytes(self) -> int:
        return sum(len(each) for each in (ref() for ref in self._live) if each is not None)


class _Mapping(mmap.mmap):
    """A mapping that can be referred to weakly."""


def test_a_large_uploads_memory_is_the_next_ones_once_nobody_reads_it(
    tmp_path: Path, files: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings, size = Mappings(monkeypatch), 2 << 20
    buffer = UploadBuffer(room_for(4 * size), tmp_path / "spill", files)
    for _ in range(3):
        fill(upload := buffer.open("contribution of a", size), bytes(size), size)
        upload.drop("it is merged")
    assert mappings.sizes == [size]
    fill(upload := buffer.open("contribution of a", size), b"a" * size, size)
    read = np.frombuffer(upload.payload(), np.uint8)[5:]
    upload.drop("it is merged")
    fill(other := buffer.open("contribution of b", size), b"b" * size, size)
    assert mappings.sizes == [size] * 2 and bytes(read) == b"a" * (size - 5)
    del read
    third = buffer.open("contribution of c", size)
    assert mappings.sizes == [size] * 2 and bytes(other.payload()) == b"b" * size and not third.complete


def test_memory_that_waits_for_the_next_upload_counts_in_the_bound(
    tmp_path: Path, files: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings, bound = Mappings(monkeypatch), 9 << 20
    buffer = UploadBuffer(room_for(bound), tmp_path / "spill", files)
    for kib in range(1024, 6000, 97):  # a peer that says another size each time
        held = [buffer.open("contribution of a", (kib + i) << 10) for i in range(4)]
        assert mappings.live_bytes <= bound
        for upload in held:
            upload.drop("it is merged")
        assert mappings.live_bytes <= bound
    assert buffer.reserve(bound) and mappings.live_bytes == 0


@pytest.mark.parametrize(("streams", "share"), [(1, 16 << 20), (2, 8 << 20), (8, 2 << 20), (16, 1 << 20), (10_000, 1 << 20)])
def test_streams_share_what_may_be_on_its_way(tmp_path: Path, files: Executor, streams: int, share: int) -> None:
    assert UploadBuffer(64 << 20, tmp_path / "spill", files).share(streams) == share


@pytest.mark.parametrize("streams", [1, 3, 16])
def test_what_is_held_and_what_is_on_its_way_are_within_the_bound(tmp_path: Path, files: Executor, streams: int) -> None:
    bound = 64 << 20
    buffer = UploadBuffer(bound, tmp_path / "spill", files)
    on_its_way = streams * buffer.share(streams)
    assert not buffer.reserve(bound - on_its_way + streams) and buffer.reserve(bound - (bound // 4))
    assert buffer.held_bytes + on_its_way <= bound


def test_what_came_already_may_come_again(buffer: UploadBuffer) -> None:
    upload = buffer.open("contribution of a", len(DATA))
    assert put(upload, 0, b"") == 0
    fill(upload, DATA[:300])
    assert put(upload, 0, DATA[:100]) == 300
    assert put(upload, 50, DATA[50:300]) == 300
    assert put(upload, 300, b"") == 300


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_an_upload_that_the_system_has_no_memory_for_lies_in_a_file(
    tmp_path: Path, files: Executor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    buffer = UploadBuffer(room_for(len(DATA)), tmp_path / "spill", files)

    def refuse(size: int) -> memoryview:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(buffer, "memory", refuse)
        upload = buffer.open("p1", len(DATA))
    fill(upload)
    assert bytes(upload.payload()) == DATA and buffer.held_bytes == 0
    assert len([*(tmp_path / "spill").iterdir()]) == 1


def test_an_upload_has_a_size(buffer: UploadBuffer) -> None:
    with pytest.raises(RemoteProtocolError, match="contribution of a: 0 bytes declared"):
        buffer.open("contribution of a", 0)


def test_what_is_dropped_goes_with_its_files(buffer: UploadBuffer, files: Executor, tmp_path: Path) -> None:
    first, second = (buffer.open(name, len(DATA)) for name in "ab")
    fill(first)
    fill(second)
    held, names = buffer.held_bytes, len(list((tmp_path / "spill").iterdir()))
    first.drop("its round is over")
    first.drop("said twice")
    written(files)
    assert (buffer.held_bytes, len(list((tmp_path / "spill").iterdir()))) == (held // 2, names // 2)
    buffer.close()
    assert list((tmp_path / "spill").iterdir()) == []


def test_an_incomplete_or_dropped_payload_is_not_read(buffer: UploadBuffer) -> None:
    upload = buffer.open("contribution of a", len(DATA))
    with pytest.raises(LocalProtocolError, match="not complete"):
        upload.payload()
    fill(upload)
    upload.drop("its round is over")
    with pytest.raises(StorageError, match="dropped, its round is over"):
        upload.payload()
    with pytest.raises(StaleError, match="its round is over"):
        put(upload, 0, DATA[:1])


def test_a_payload_that_is_being_read_outlives_its_upload(buffer: UploadBuffer) -> None:
    upload = buffer.open("contribution of a", len(DATA))
    fill(upload)
    payload = upload.payload()
    upload.drop("its round is over")
    assert bytes(payload) == DATA


def test_memory_stays_below_the_bound_with_many_peers(tmp_path: Path, files: Executor) -> None:
    buffer = UploadBuffer(room_for(4 * len(DATA)), tmp_path, files)
    uploads = [buffer.open(f"p{i}", len(DATA)) for i in range(50)]
    for upload in uploads:
        fill(upload)
        assert buffer.held_bytes <= 4 * len(DATA)
    assert len(list(tmp_path.iterdir())) == 46
    assert all(bytes(upload.payload()) == DATA for upload in uploads)
    uploads[0].drop("its round is over")
    fill(buffer.open("next", len(DATA)))
    assert len(list(tmp_path.iterdir())) == 46, "freed memory is used again"


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, files: Executor) -> None:
    fill(UploadBuffer(0, tmp_path, files).open("contribution of a", len(DATA)))
    (tmp_path / "not-ours.txt").write_text("stays")
    UploadBuffer(0, tmp_path, files)
    assert [path.name for path in tmp_path.iterdir()] == ["not-ours.txt"]


def test_a_full_disk_drops_the_upload_and_says_so(tmp_path: Path, files: Executor) -> None:
    room = [150]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), room[0])
        room[0] -= taken
        return os.pwrite(descriptor, data[:taken], offset)

    buffer = UploadBuffer(0, tmp_path, files, write=write)
    upload = buffer.open("contribution of a", len(DATA))
    put(upload, 0, DATA[:100])
    with pytest.raises(StorageError, match=r"upload-\d+-00000001\.part: cannot be written \(No space left on device\)"):
        put(upload, 100, DATA[100:200])
    with pytest.raises(StaleError, match="the disk refused it"):
        put(upload, 100, DATA[100:200])
    written(files)
    assert list(tmp_path.iterdir()) == []
    room[0] = 1 << 20
    fill(buffer.open("contribution of a", len(DATA)))


def test_a_spill_folder_that_cannot_be_made(tmp_path: Path, files: Executor) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be created"):
        UploadBuffer(0, tmp_path / "file", files)


def test_a_spilled_payload_that_somebody_cut_is_not_trusted(tmp_path: Path, files: Executor) -> None:
    upload = UploadBuffer(0, tmp_path, files).open("contribution of a", len(DATA))
    fill(upload)
    next(tmp_path.iterdir()).write_bytes(DATA[:-1])
    with pytest.raises(StorageError, match="was changed"):
        upload.payload()


@settings(deadline=None, max_examples=examples(100))
@given(
    st.binary(min_size=1, max_size=60), st.booleans(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20)
)
def test_any_chunking_with_repeats_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, files: Executor, data: bytes, spilled: bool, steps: list[tuple[int, int]]
) -> None:
    upload = UploadBuffer(0 if spilled else 1000, tmp_path_factory.mktemp("spill"), files).open("a", len(data))
    for back, length in steps:
        received = upload.received_bytes
        start = max(0, received - back)
        end = min(start + length, received if start < received else len(data))
        assert put(upload, start, data[start:end]) == max(received, end)
    put(upload, upload.received_bytes, data[upload.received_bytes :])
    assert bytes(upload.payload()) == data


class SlowDisk:
    """Writes when it is let, and remembers what was written where, and by which thread."""

    def __init__(self) -> None:
        self.let, self.began = threading.Event(), threading.Event()
        self.written: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.began.set()
        assert self.let.wait(30)
        self.threads.add(threading.get_ident())
        self.written.append((offset, len(data)))
        return os.pwrite(descriptor, data, offset)


def test_a_slow_disk_stops_the_stream_and_not_the_event_loop(tmp_path: Path, files: Executor) -> None:
    disk = SlowDisk()

    async def stream(upload: Upload) -> None:
        for offset in range(0, len(DATA), 256):
            chunk = DATA[offset : offset + 256]
            await upload.write(offset, chunk)

    async def scenario() -> None:
        buffer = UploadBuffer(room_for(len(DATA)), tmp_path, files, write=disk.write)
        quick, slow = buffer.open("quick", len(DATA)), buffer.open("slow", len(DATA))
        sending = asyncio.create_task(stream(slow))
        await asyncio.to_thread(disk.began.wait, 30)
        await stream(quick)  # while the disk hangs
        assert quick.complete and slow.received_bytes == 0 and disk.written == []
        disk.let.set()
        await sending
        assert bytes(slow.payload()) == DATA
        assert disk.written == [(offset, 256) for offset in range(0, len(DATA), 256)]
        assert disk.threads.isdisjoint({threading.get_ident()})

    asyncio.run(scenario())


def test_an_upload_that_is_dropped_while_it_is_written_leaves_no_file(tmp_path: Path, files: Executor) -> None:
    disk = SlowDisk()

    async def scenario() -> None:
        upload = UploadBuffer(0, tmp_path, files, write=disk.write).open("a", len(DATA))
        sending = asyncio.create_task(upload.write(0, DATA))
        await asyncio.to_thread(disk.began.wait, 30)
        upload.drop("its round is over")
        disk.let.set()
        with pytest.raises(StaleError, match="its round is over"):
            await sending
        assert upload.received_bytes == 0

    asyncio.run(scenario())
    written(files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [DATA[:512], b"x" * 512])
def test_two_streams_of_one_upload_write_one_after_the_other(tmp_path: Path, files: Executor, again: bytes) -> None:
    """The older one is not known to be broken yet; the newer one is compared with what it wrote."""
    disk = SlowDisk()

    async def scenario() -> None:
        upload = UploadBuffer(0, tmp_path, files, write=disk.write).open("a", len(DATA))
        older = asyncio.create_task(upload.write(0, DATA[:512]))
        await asyncio.to_thread(disk.began.wait, 30)
        newer = asyncio.create_task(upload.write(0, again))
        disk.let.set()
        assert await older == 512
        if again == DATA[:512]:
            assert await newer == 512
        else:
            with pytest.raises(RemoteProtocolError, match="other bytes at 0 than before"):
                await newer
        assert disk.written == [(0, 512)]

    asyncio.run(scenario())


def test_a_stream_that_is_cancelled_while_it_writes_can_be_resumed(tmp_path: Path, files: Executor) -> None:
    disk = SlowDisk()

    async def scenario() -> None:
        upload = UploadBuffer(0, tmp_path, files, write=disk.write).open("a", len(DATA))
        older = asyncio.create_task(upload.write(0, DATA))
        await asyncio.to_thread(disk.began.wait, 30)
        older.cancel()
        await asyncio.wait([older])
        assert upload.received_bytes == 0
        disk.let.set()
        for offset in (0, 512):
            await upload.write(offset, DATA[offset : offset + 512])
        assert bytes(upload.payload()) == DATA

    asyncio.run(scenario())
