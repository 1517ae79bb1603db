"""Whose turn it is to found a run, on a clock of the test's."""

from __future__ import annotations

import asyncio

import pytest

from aggregator.control.attendance import Attendance, Attendances
from aggregator.control.founding import STALL_S, Founding, Transfer
from aggregator.run_feed import Advised, RunFeed
from edit.config.run import MembershipConfig, RunConfig
from edit.errors import RefusedError, RemoteProtocolError, StaleError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from editpb.messages import FoundHeader
from editpb.tensors_pb2 import Chunk
from tests.support.loops import on_a_loop

NUMEL = 1 << 20


def schema(numel: int = NUMEL) -> Schema:
    return Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(numel,)),)),))


def header(of: Schema | None = None) -> FoundHeader:
    return FoundHeader(run_id="run", schema_hash=(of or schema()).schema_hash, digest="0" * 64)


class Site:
    def __init__(self) -> None:
        self.now, self.advice = 100.0, list[Advised]()
        feed = RunFeed(lambda: 0.0)
        feed.subscribe(lambda event, _: self.advice.append(event) if isinstance(event, Advised) else None)
        self.attendances = Attendances(MembershipConfig(lease_s=1e6), feed, lambda: self.now)
        self.shown = 0
        self.founding = Founding(RunConfig(), None, None, self.attendances, feed, lambda: self.now, self.show)  # type: ignore[arg-type]
        self.streams: dict[str, Attendance] = {}

    def show(self) -> None:
        self.shown += 1

    def attend(self, *peers: str) -> None:
        for peer_id in peers:
            self.streams[peer_id] = self.attendances.open(peer_id, schema(), 0, 1)
            self.founding.attended(peer_id)

    def leave(self, peer_id: str) -> None:
        self.attendances.close(self.streams[peer_id], "goodbye", polite=True)
        self.founding.left(peer_id)

    def tick(self, seconds: float) -> str | None:
        self.now += seconds
        self.founding.tick()
        return self.founding.founder

    async def begin(self, peer_id: str, received: int = 0) -> tuple[Transfer, asyncio.Task[None]]:
        """A transfer that stays open until its turn ends or the task is cancelled."""
        begun = asyncio.get_running_loop().create_future()

        async def receive() -> None:
            with self.founding.transfer(peer_id, header()) as transfer:
                begun.set_result(transfer)
                await asyncio.Event().wait()

        task = asyncio.create_task(receive())
        transfer = await begun
        if received:
            transfer.take(0, Chunk(offset=0, data=bytes(received)))
        return transfer, task


def bring(transfer: Transfer, count: int) -> None:
    """So many bytes more."""
    transfer.take(0, Chunk(offset=transfer.received_bytes, data=bytes(count)))


@pytest.fixture
def site() -> Site:
    return Site()


async def stale(task: asyncio.Task[None], reason: str) -> None:
    with pytest.raises(StaleError, match=reason):
        await task


def test_members_take_turns_in_the_order_in_which_they_attended(site: Site) -> None:
    site.attend("m", "z", "b")
    site.attendances.open("a", schema(), 1, 2)  # a rank without its rank 0 is no member
    assert site.founding.founder == "m"
    site.leave("z")
    assert site.founding.founder == "m"
    site.leave("m")
    assert site.founding.founder == "b"
    site.attend("z")
    site.leave("b")
    assert site.founding.founder == "z"
    site.leave("z")
    assert site.founding.founder is None


def test_a_silent_founder_hands_over_and_comes_back_last(site: Site) -> None:
    site.attend("silent", "b", "c")
    assert site.tick(STALL_S - 0.1) == "silent"
    assert site.tick(0.1) == "b" and site.shown == 1
    assert site.founding.waiting == ["c", "silent"]
    assert [site.tick(STALL_S) for _ in range(4)] == ["c", "silent", "b", "c"]
    told = "brought nothing new of the initial parameters for 60 s; {} is asked to found the run now"
    assert site.advice == [
        Advised(one, told.format(following)) for one, following in (("silent", "b"), ("b", "c"), ("c", "silent"))
    ]


def test_without_another_member_the_founder_is_waited_for(site: Site) -> None:
    site.attend("a")
    assert site.tick(100 * STALL_S) == "a"
    site.attend("b")
    assert site.tick(0.0) == "b"


def test_a_lost_member_is_asked_after_the_live_ones(site: Site) -> None:
    site.attend("silent", "lost", "live")
    site.attendances.membership.members["lost"].last_seen = -2e6
    site.attendances.tick()
    assert site.tick(STALL_S) == "live"


@on_a_loop
async def test_a_slow_link_that_moves_keeps_its_turn_and_a_trickle_does_not(site: Site) -> None:
    site.attend("slow", "b")
    transfer, task = await site.begin("slow")
    least = 4 * NUMEL / site.founding.longest_s  # bytes per second
    for _ in range(20):
        bring(transfer, int(1.05 * least * (STALL_S - 1)))
        assert site.tick(STALL_S - 1) == "slow"
    seconds = 0.0
    while site.founding.founder == "slow":
        assert seconds < site.founding.longest_s / 2
        bring(transfer, 1)
        seconds += STALL_S - 1
        site.tick(STALL_S - 1)
    await stale(task, r"slow would bring the initial parameters in more than 2400 s; another member")


@on_a_loop
async def test_beginning_again_is_no_progress(site: Site) -> None:
    site.attend("again", "b")
    first, task = await site.begin("again", 1000)
    for _ in range(3):
        site.now += STALL_S / 4
        first, before = await site.begin("again", 1000), task
        await stale(before, "a newer transfer of the initial parameters has begun")
        first, task = first
        assert site.founding.founder == "again"
    assert site.tick(STALL_S / 4) == "b"
    await stale(task, "again brought nothing new")


@on_a_loop
async def test_bad_bytes_end_a_turn_at_once_and_are_logged_once(site: Site) -> None:
    site.attend("bad", "worse")
    for _ in range(5):
        for peer_id in ("bad", "worse"):
            assert site.founding.founder == peer_id
            with pytest.raises(RemoteProtocolError), site.founding.transfer(peer_id, header(schema(5))):
                pass
    assert [one.peer_id for one in site.advice] == ["bad", "worse"]
    site.leave("worse")
    with (
        pytest.raises(RemoteProtocolError, match="another schema than the one announced"),
        site.founding.transfer("bad", header(schema(5))),
    ):
        pass
    assert site.founding.founder == "bad"  # there is nobody else


@on_a_loop
async def test_only_the_founder_founds(site: Site) -> None:
    site.attend("a", "b")
    with pytest.raises(RefusedError, match="the founder is a, not b"), site.founding.transfer("b", header()):
        pass
    _, task = await site.begin("a")
    site.leave("a")
    await stale(task, "a is no longer here; another member may found the run now")
    assert site.founding.founder == "b"


@on_a_loop
async def test_a_lone_founder_whose_control_connection_breaks_goes_on_sending(site: Site) -> None:
    site.attend("a")
    _, task = await site.begin("a", 1000)
    site.leave("a")
    assert site.founding.founder == "a" and not task.done()
    site.attend("a")
    assert site.founding.turn is not None and site.founding.turn.received_bytes == 1000
    site.leave("a")
    site.attend("b")
    assert site.founding.founder == "b"
    await stale(task, "a is no longer here")
    site.leave("b")
    site.attend("c")
    _, task = await site.begin("c")
    site.leave("c")
    task.cancel()
    await asyncio.wait([task])
    assert site.founding.founder is None


@on_a_loop
async def test_what_is_here_stays_until_another_turn_begins(site: Site) -> None:
    site.attend("a")
    _, task = await site.begin("a", 1000)
    task.cancel()
    await asyncio.wait([task])
    again, task = await site.begin("a")
    assert again.received_bytes == 1000, "the stream broke"
    task.cancel()
    await asyncio.wait([task])
    site.leave("a")
    assert site.founding.founder is None
    site.attend("a")
    again, task = await site.begin("a")
    assert again.received_bytes == 1000, "both connections broke, and nobody else was asked"
    bring(again, 500)
    site.attend("b")
    site.leave("a")
    await stale(task, "a is no longer here")
    site.attend("a")
    site.leave("b")
    anew, task = await site.begin("a")
    assert anew.received_bytes == 0, "b was asked meanwhile"
    task.cancel()
    await asyncio.wait([task])


@on_a_loop
async def test_bad_bytes_are_not_kept(site: Site) -> None:
    site.attend("a")
    await site.begin("a", 1000)
    with pytest.raises(RemoteProtocolError, match="out of turn"), site.founding.transfer("a", header()) as transfer:
        transfer.take(7, Chunk(offset=0, data=b"x"))
    with site.founding.transfer("a", header()) as transfer:
        assert transfer.received_bytes == 0
        transfer.take(0, Chunk(offset=0, data=b"four"))
        with pytest.raises(RemoteProtocolError, match="a chunk at byte 9 where 4 was due"):
            transfer.take(0, Chunk(offset=9, data=b"x"))


@on_a_loop
async def test_other_parameters_are_not_mixed_with_what_is_here(site: Site) -> None:
    site.attend("a")
    _, task = await site.begin("a", 1000)
    other = FoundHeader(run_id="run", schema_hash=schema().schema_hash, digest="1" * 64)
    with site.founding.transfer("a", other) as transfer:
        assert transfer.received_bytes == 0
    await stale(task, "a newer transfer")


@on_a_loop
async def test_the_status_names_who_is_waited_for(site: Site) -> None:
    assert site.founding.waiting_for() == "a first peer, which brings the initial parameters"
    site.attend("a")
    site.now += 12
    assert site.founding.waiting_for() == "a, asked for the initial parameters 12 s ago"
    _, task = await site.begin("a", 1 << 20)
    assert site.founding.waiting_for() == "a, asked for the initial parameters 12 s ago, 1.0 of 4.2 MB are here"
    task.cancel()
    await asyncio.wait([task])
