"""What is sent stays within the bound in every second, by all processes that share it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edit.errors import ConfigError
from editpb.limits import CHUNK_BYTES
from editpb.transport.send_limit import LOCK_S, UNLIMITED, DailyLimit, SharedSendLimit, send_limit
from tests.support.loops import on_a_loop, pass_time, run_held, until

MBIT = 8.0  # a million bytes per second
BURST = 110_000  # bytes that may go beyond it: 0.05 s made up for, and a message of 0.05 s


class Sent:
    """When how many bytes went."""

    def __init__(self, path: Path, mbit: float = MBIT, *, clock: Callable[[], float] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.limit, self.path, self.bytes, self.now = SharedSendLimit(mbit, path, clock=clock or loop.time), path, 0, loop.time

    async def forever(self, went: list[tuple[float, int]]) -> None:
        while True:
            await self.limit.room(self.limit.chunk_bytes)
            self.bytes += self.limit.chunk_bytes
            went.append((self.now(), self.limit.chunk_bytes))


def most_in_a_second(went: list[tuple[float, int]]) -> int:
    return max(sum(size for at, size in went if begin <= at < begin + 1.0) for begin, _ in went)


async def passing(seconds: float, *tasks: Coroutine[Any, Any, None]) -> None:
    """Let so much time pass for these, a hundredth of a second at a time; a process is woken that late."""
    running = [asyncio.ensure_future(task) for task in tasks]
    for _ in range(round(seconds * 100)):
        pass_time(0.01)
        for _ in range(20):
            await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_in_no_second_goes_more_and_the_bound_is_used(processes: int, tmp_path: Path) -> None:
    async def body() -> None:
        went: list[tuple[float, int]] = []
        each = [Sent(tmp_path / "limit") for _ in range(processes)]
        await passing(10.0, *(one.forever(went) for one in each))
        assert most_in_a_second(went) <= 1_000_000 + BURST
        assert 9_500_000 < sum(one.bytes for one in each) <= 10_000_000 + BURST
        assert all(one.bytes for one in each), "nobody starves"

    run_held(body())


def test_who_did_not_send_for_a_while_has_not_saved_it_up(tmp_path: Path) -> None:
    async def body() -> None:
        went: list[tuple[float, int]] = []
        pass_time(1000.0)
        await passing(1.0, Sent(tmp_path / "limit").forever(went))
        pass_time(1000.0)
        await passing(1.0, Sent(tmp_path / "limit").forever(went))
        assert most_in_a_second(went) <= 1_000_000 + BURST

    run_held(body())


def test_messages_are_as_small_as_the_bound_needs() -> None:
    assert UNLIMITED.chunk_bytes == CHUNK_BYTES


@pytest.mark.parametrize(("mbit", "size"), [(0.1, 4096), (8.0, 50_000), (10_000.0, CHUNK_BYTES)])
def test_a_message_takes_a_twentieth_of_a_second(mbit: float, size: int, tmp_path: Path) -> None:
    assert SharedSendLimit(mbit, tmp_path / "limit").chunk_bytes == size


def test_who_was_cancelled_has_had_its_turn_and_the_next_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        limit = Sent(tmp_path / "limit").limit
        pass_time(100.0)
        await limit.room(1_000_000)
        waiting = [asyncio.ensure_future(limit.room(1_000_000)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting[:2]:
            task.cancel()
        await passing(2.1)
        assert waiting[2].done() and not waiting[2].cancelled()

    run_held(body())


def test_another_process_that_was_stopped_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    async def body() -> None:
        one = Sent(tmp_path / "limit")
        pass_time(100.0)
        stopped = os.open(tmp_path / "limit", os.O_RDWR)
        fcntl.flock(stopped, fcntl.LOCK_EX)
        going = asyncio.ensure_future(one.limit.room(1000))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not going.done()
        await passing(LOCK_S + 0.1)
        assert going.done()
        os.close(stopped)

    run_held(body())


def test_a_message_that_takes_minutes_is_waited_for_by_all(tmp_path: Path) -> None:
    """A receipt of 4 MiB takes 336 s at the least bound."""

    async def body() -> None:
        one, other = (Sent(tmp_path / "limit", 0.1) for _ in range(2))
        pass_time(1000.0)
        await one.limit.room(4 << 20)
        going = asyncio.ensure_future(other.limit.room(1000))
        for seconds, done in ((0.0, False), (330.0, False), (10.0, True)):
            pass_time(seconds)
            for _ in range(20):
                await asyncio.sleep(0)
            assert going.done() == done

    run_held(body())


@pytest.mark.parametrize(
    "held",
    [
        struct.pack("<d", 1e9),
        struct.pack("<d16s", 300.0, bytes(16)),
        struct.pack("<d16s", 300.0, b"another"),
        struct.pack("<d", float("nan")),
        b"xyz",
        struct.pack("<d", -1e300),
    ],
)
def test_what_the_file_says_after_a_reboot_or_nonsense_delays_nobody(held: bytes, tmp_path: Path) -> None:
    """The clock begins anew: what was to be through at 10^9 s would be through in 30 years."""

    async def body() -> None:
        (tmp_path / "limit").write_bytes(held)
        one = Sent(tmp_path / "limit")
        pass_time(5.0)
        going = asyncio.ensure_future(one.limit.room(1000))
        for _ in range(20):
            await asyncio.sleep(0)
        assert going.done()

    run_held(body())


@on_a_loop
async def test_what_has_no_bound_waits_for_nothing() -> None:
    assert [part async for part in UNLIMITED.paced([b"a", b"bc"])] == [b"a", b"bc"]


@pytest.mark.parametrize("mbit", [0.0, -1.0, 0.05, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(mbit: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-mbit"):
        send_limit(mbit, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-mbit needs it"):
        send_limit(1.0, tmp_path / "nowhere")


DAY_S, DAY = 86_400, 20_780  # DAY: 2026-11-23


class Daily:
    """A bound per day on a clock of its own; who waits sleeps until `until`."""

    def __init__(self, path: Path, most: int = 6400, at: float = 0.5 * DAY_S) -> None:
        self.unix, self.naps = DAY * DAY_S + at, list[float]()
        self.limit = DailyLimit(most, path, unix=lambda: self.unix, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.unix += seconds
        await asyncio.sleep(0)


def test_what_is_beyond_a_days_bytes_goes_on_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        one = Daily(tmp_path / "sent")
        for _ in range(6):
            await one.limit.room(1000)
        assert not one.naps
        await one.limit.room(1000)
        assert one.unix == (DAY + 1) * DAY_S and max(one.naps) <= 30.0
        for _ in range(5):
            await one.limit.room(1000)
        assert one.unix == (DAY + 1) * DAY_S
        (line,) = caplog.messages
        assert line.startswith("limits.max_gb_per_day = 6.4e-06: that is sent (")
        assert line.endswith("nothing more goes out before 2026-11-24, 0:00 UTC")

    asyncio.run(body())


@pytest.mark.parametrize("processes", [1, 3])
def test_a_days_bytes_are_of_all_processes_and_of_all_starts(processes: int, tmp_path: Path) -> None:
    """Whoever is killed has taken at most a block more than it sent; never less."""

    async def body() -> None:
        sent = 0
        for _ in range(4):  # starts
            for one in [Daily(tmp_path / "sent") for _ in range(processes)]:
                for _ in range(10):
                    await one.limit.room(50)
                    sent += 50 if not one.naps else 0
                    if one.naps:
                        break
        assert 0.5 * 6400 <= sent <= 6400 or sent == 4 * processes * 500

    asyncio.run(body())


def test_a_clock_that_is_set_back_begins_no_new_day_and_a_damaged_file_none_either(tmp_path: Path) -> None:
    async def body() -> None:
        one = Daily(tmp_path / "sent")
        await one.limit.room(6400)
        earlier = Daily(tmp_path / "sent", at=-DAY_S)
        await earlier.limit.room(1)
        assert earlier.unix >= (DAY + 1) * DAY_S
        (tmp_path / "sent").write_bytes(b"torn")
        again = Daily(tmp_path / "sent", at=DAY_S)
        await again.limit.room(1)
        assert again.unix == (DAY + 2) * DAY_S

    asyncio.run(body())


def test_a_clock_that_was_ahead_stops_nothing_for_longer_than_the_day_that_it_shows_then(tmp_path: Path) -> None:
    async def body() -> None:
        await Daily(tmp_path / "sent", at=365 * DAY_S).limit.room(6400)
        right = Daily(tmp_path / "sent")
        await right.limit.room(1)
        assert right.unix == (DAY + 1) * DAY_S, "what was sent counts"
        later = Daily(tmp_path / "sent", at=2 * DAY_S)
        await later.limit.room(6400)
        assert not later.naps

    asyncio.run(body())


@pytest.mark.parametrize("away", [-3, 9])
def test_a_clock_that_jumps_and_comes_back_gives_no_day_its_bytes_again(tmp_path: Path, away: int) -> None:
    async def body() -> None:
        await Daily(tmp_path / "sent").limit.room(6400)
        there = Daily(tmp_path / "sent", at=away * DAY_S)
        await there.limit.room(1)
        for at in 0, away, 0:
            again = Daily(tmp_path / "sent", at=at * DAY_S, most=6300 if at else 6400)
            waiting = asyncio.ensure_future(again.limit.room(6400))
            await until(partial(bool, again.naps))
            waiting.cancel()
        assert (tmp_path / "sent").stat().st_size == 32

    asyncio.run(body())


def test_what_cannot_be_counted_does_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        one, full = Daily(tmp_path / "sent"), True

        def write(file: int, data: bytes, at: int) -> int:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(file, data, at)

        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", write)
        waiting = asyncio.ensure_future(one.limit.room(1))
        await until(lambda: one.naps)
        assert not waiting.done() and "cannot be written (No space left on device)" in caplog.text
        full = False
        await waiting

    asyncio.run(body())


def test_the_bound_of_a_day_keeps_to_the_one_of_a_second(tmp_path: Path) -> None:
    limit = send_limit(MBIT, tmp_path, 1.0)
    assert isinstance(limit, DailyLimit) and limit.chunk_bytes == SharedSendLimit(MBIT, tmp_path / "x").chunk_bytes
    assert send_limit(None, tmp_path) is UNLIMITED
    with pytest.raises(ConfigError, match=r"sent-today: cannot be written, and limits\.max_gb_per_day needs it"):
        send_limit(None, tmp_path / "none", 1.0)
