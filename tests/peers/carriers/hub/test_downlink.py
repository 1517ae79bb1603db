"""Updates that are applied while they arrive: fragment by fragment, over broken streams, and given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edit.codecs import decode
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.run import SyncConfig
from edit.errors import GoneError, RemoteProtocolError, TransportError
from edit.fragments.digest import digest
from edit.fragments.shards import Shard
from edit.records import Committed
from peers.carriers.hub import data_calls, pace
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.downlink import Arrival, Downlink, _Download
from peers.carriers.run_connection import Interrupted
from tests.support.fake_coordinator import FakeCoordinator
from tests.support.fake_run import Peer, run_of, schema_of, vectors
from tests.support.loops import on_a_loop

SIZES = (24, 40, 600_000)


def committed(fake: FakeCoordinator, peer: Peer) -> Committed:
    fake.script = FakeCoordinator.commit
    peer.contribute(vectors(SIZES, 1))
    outcome = peer.ask()
    assert isinstance(outcome, Committed)
    return outcome


def arriving(outcome: Committed) -> list[Arrival]:
    assert all(isinstance(each, Arrival) for each in outcome.updates)
    return [each for each in outcome.updates if isinstance(each, Arrival)]


def applied(outcome: Committed) -> str:
    """The digest of theta once every fragment has arrived."""
    steps = [decode(each.wait()) for each in arriving(outcome)]
    return digest([theta - step for theta, step in zip(vectors(SIZES, 0), steps, strict=True)])


def test_a_commit_is_known_before_its_updates_are_here() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(1)
        outcome = committed(fake, peer)
        assert outcome.commit.fragments[0].verdict_of("a") is not None
        arriving(outcome)[0].wait()
        fake.release_update(1)
        assert applied(outcome) == outcome.commit.digest
        assert len(set(fake.update_offsets)) == len(fake.update_offsets), "nothing is asked for twice"


def test_fragments_may_be_taken_in_any_order_and_again() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        outcome = committed(fake, peer)
        last = arriving(outcome)[2].wait()
        assert applied(outcome) == outcome.commit.digest
        assert arriving(outcome)[2].wait() == last


def test_a_broken_stream_does_not_bring_again_what_is_here() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(2)
        outcome = committed(fake, peer)
        for each in arriving(outcome)[:2]:
            each.wait()
        fake.release_update(2, broken=True)
        assert applied(outcome) == outcome.commit.digest
        assert len(fake.asked_for) == 1
        assert fake.update_offsets[-1] >= 4 * sum(SIZES[:2])


def test_a_stream_that_breaks_in_a_fragment_goes_on_at_its_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALL_S", "LONGEST_S"):  # so that no call is cut short on a machine that stands still for a while
        monkeypatch.setattr(pace, name, 1e6)
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.break_update_after = [3 << 16]
        outcome = committed(fake, peer)
        assert applied(outcome) == outcome.commit.digest
        assert len(fake.asked_for) == 1, "the manifest comes once"
        arrived = {offset for offset in fake.update_offsets if 0 < offset < 1 << 18}
        assert len(arrived) == 1 and min(arrived) > 2 << 16


def test_cut_off_on_the_way_an_update_goes_on_when_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_calls, "TRIES", 1)
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(1)
        outcome = committed(fake, peer)
        fake.await_held()
        fake.refuse_update = lambda shards: (grpc.StatusCode.UNAVAILABLE, "no route")
        fake.release_update(1, broken=True)
        with pytest.raises(TransportError, match=r"the stream broke|no route"):
            arriving(outcome)[1].wait()
        fake.refuse_update = lambda shards: None
        assert applied(outcome) == outcome.commit.digest


def test_what_is_damaged_again_and_again_is_not_handed_out() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(1)
        outcome = committed(fake, peer)
        arriving(outcome)[0].wait()
        fake.damage_updates = 1 << 30
        fake.release_update(1)
        with pytest.raises(RemoteProtocolError, match="a chunk at byte 1 where 0 was due"):
            arriving(outcome)[1].wait()


def test_an_update_in_whose_place_a_snapshot_is_taken_is_no_longer_fetched() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(1)
        outcome = committed(fake, peer)
        fake.await_held()
        snapshot = peer.collective.snapshot()
        assert snapshot.digest == outcome.commit.digest
        fake.await_(lambda f: f.calls["abandoned"] == 1)


def test_a_signal_ends_the_wait_for_an_update() -> None:
    with run_of(SIZES, mode="forward") as (fake, peer):
        fake.hold_update(0)
        outcome = committed(fake, peer)
        peer.io.post(peer.collective.interrupt)
        with pytest.raises(Interrupted):
            arriving(outcome)[0].wait()


class Answers:
    """A transfer of an update that is refused so often; the first request waits until `go`."""

    def __init__(self, refusals: int) -> None:
        self.assembly: Any = SimpleNamespace(complete=False, manifest=None, outer_step=1, round_id=7)
        self.refusals, self.requests, self.go = refusals, 0, asyncio.Event()
        self.download = _Download(self.assembly, self._transfer, asyncio.ensure_future)

    async def _transfer(self, told: Callable[[], None]) -> None:
        self.requests += 1
        await self.go.wait()
        if self.requests <= self.refusals:
            raise GoneError("no longer kept")
        self.assembly.complete = True


@on_a_loop
async def test_what_was_refused_because_it_was_asked_for_too_early_is_asked_for_again() -> None:
    """The request ahead of the commit crosses the commit: its refusal says nothing of the update that is there now."""
    answers = Answers(1)
    answers.download.begin(ahead=True)
    taken = asyncio.ensure_future(answers.download.until(lambda assembly: assembly.complete or None))
    await asyncio.sleep(0)
    answers.go.set()
    assert await taken and answers.requests == 2


@on_a_loop
async def test_an_update_that_is_gone_is_asked_for_only_once_more() -> None:
    answers = Answers(9)
    answers.go.set()
    with pytest.raises(GoneError):
        await answers.download.until(lambda assembly: assembly.complete or None)
    assert answers.requests == 1
    answers = Answers(9)
    answers.download.begin(ahead=True)
    taken = asyncio.ensure_future(answers.download.until(lambda assembly: assembly.complete or None))
    await asyncio.sleep(0)
    answers.go.set()
    with pytest.raises(GoneError):
        await taken
    assert answers.requests == 2


class Requests:
    """Fetches updates, none of which ever comes."""

    def __init__(self) -> None:
        self.rounds: list[int] = []  # that the requests named; 0: none
        self.ended: list[int] = []  # likewise, of those that were given up

    async def update(self, assembly: UpdateAssembly, *_: object) -> None:
        self.rounds.append(assembly.round_id)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(assembly.round_id)


@on_a_loop
async def test_an_update_that_is_known_to_be_there_is_fetched_on_whatever_round_is_open() -> None:
    """In a swarm the next owner of a part may not be heard yet: then nothing is known of the commit, and only of the round."""
    data, io, schema = Requests(), SimpleNamespace(start=asyncio.ensure_future), schema_of(SIZES)
    shards = [Shard(fragment) for fragment in schema.fragments]
    known: Any = (io, data, None, schema, shards, SyncConfig(), CodecChoice(CodecSpec("fp32")))
    downlink = Downlink(*known, wanted=lambda: True, attending=lambda: True)
    downlink.fetch_ahead(1, 7)
    await asyncio.sleep(0)
    downlink.fetch_ahead(1, 8)
    await asyncio.sleep(0)
    assert (data.rounds, data.ended) == ([7, 8], [7]), "the first round came to nothing"
    downlink.foresee(2)
    await asyncio.sleep(0)
    downlink.fetch_ahead(2, 9)
    await asyncio.sleep(0)
    assert (data.rounds, data.ended) == ([7, 8, 0], [7])
    downlink.forget(taken=False)
