"""Hosts of a swarm over real connections: they find a leader, share the parts, and take the same outer steps as a hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch

from aggregator.swarm import host
from aggregator.swarm.offers import Offer
from aggregator.swarm.replication import PartReplica
from edit.council import events as ev
from edit.council.record import Phase, Saved
from edit.errors import LocalProtocolError, StorageError, TransportError
from edit.fragments.digest import digest
from editpb.messages import Expel
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.loops import run_held
from tests.support.served import TOML, theta

ONES = [torch.ones(size) for size in SIZES]


async def step(swarm: Hosts, expected: int, part: int = 0) -> None:
    """Take one outer step at all that run."""
    await swarm.contribute(part, ONES)
    await swarm.until(lambda: swarm.steps(part) == dict.fromkeys(swarm.running, expected))
    assert len(swarm.taken[part, expected]) == 1 and swarm.same(part)


def test_members_join_vote_and_share_the_parts(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, parts=3) as swarm:
            await swarm.grow("a", "b", "c")
            assert swarm.leader == "a"
            await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 3, passes=3.0)
            await swarm.until(lambda: all(swarm.owner(part) is not None for part in range(3)))
            served = [(peer_id, part.number) for peer_id, host in swarm.running.items() for part in host.parts if part.engine]
            assert sorted(served) == sorted((part.owner, i) for i, part in enumerate(swarm.record.parts))
            for part in range(3):
                await step(swarm, 1, part)

    run_held(body())


def test_an_update_is_agreed_on_and_is_a_hubs_to_the_bit_without_any_time_passing(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            expected = theta(0, schema_of(0))
            for outer_step in (1, 2, 3):
                await step(swarm, outer_step)
                expected = [part - 1 for part in expected]
                assert swarm.taken[0, outer_step] == {digest(expected)}

    run_held(body())


def test_an_update_that_is_committed_while_it_comes_is_not_fetched_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two members the older is a quorum alone: its update is committed before the other one has it."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b")
            fetch_offer, asked = host.fetch_offer, list[int]()

            async def slowly(stub: object, part: int, outer_step: int, *more: object) -> object:
                asked.append(outer_step)
                behind = swarm.running["b"]
                await swarm.until(lambda: any(isinstance(each, ev.Fetch) for each in behind.council.work))
                return await fetch_offer(stub, part, outer_step, *more)  # type: ignore[arg-type]

            monkeypatch.setattr(host, "fetch_offer", slowly)
            for outer_step in (1, 2, 3):
                await step(swarm, outer_step)
            assert asked == [1, 2, 3]

    run_held(body())


@pytest.mark.parametrize("contributed", [False, True], ids=["between two steps", "in the middle of one"])
def test_who_owns_and_leads_dies_and_the_others_go_on_and_it_comes_back(tmp_path: Path, contributed: bool) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            await step(swarm, 1)
            if contributed:
                await swarm.contribute(0, ONES)
            await swarm.stop("a")
            await swarm.until(lambda: swarm.leader in ("b", "c") and swarm.owner() is not None, passes=1.0)
            last = max(swarm.steps().values())
            await step(swarm, last + 1)
            await swarm.start("a")
            await swarm.until(lambda: swarm.steps()["a"] == last + 1, passes=1.0)
            await step(swarm, last + 2)

    run_held(body())


def test_an_owner_that_does_not_lead_dies_and_nobody_waits_for_its_lease(tmp_path: Path) -> None:
    """Its connection breaks, and that is enough: no time passes."""

    async def body() -> None:
        async with hosts(tmp_path, parts=3) as swarm:
            await swarm.grow("a", "b", "c")
            await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 3, passes=3.0)
            (part,) = [i for i, part in enumerate(swarm.record.parts) if part.owner == "c"]
            await step(swarm, 1, part)
            await swarm.stop("c")
            await swarm.until(lambda: swarm.record.parts[part].owner != "c" and swarm.owner(part) is not None)
            await step(swarm, 2, part)

    run_held(body())


def test_all_end_and_start_again_where_they_were(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            await step(swarm, 1)
            for peer_id in "abc":
                await swarm.stop(peer_id)
            for peer_id in "abc":
                await swarm.start(peer_id)
            await swarm.until(lambda: swarm.leader and swarm.owner() is not None, passes=1.0)
            await step(swarm, 2)

    run_held(body())


def test_a_member_that_was_away_fetches_what_it_missed(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            await swarm.stop("c")
            await step(swarm, 1)
            await step(swarm, 2)
            await swarm.start("c")
            await swarm.until(lambda: swarm.steps()["c"] == 2, passes=1.0)
            assert swarm.same()
            await step(swarm, 3)

    run_held(body())


def test_all_keep_one_average_those_who_joined_later_and_the_next_owner_too(tmp_path: Path) -> None:
    """Of section [average]: it is a part of the state that replay and a fetched state bring."""

    async def body() -> None:
        async with hosts(tmp_path, toml=TOML + '\n[average]\nkind = "ema"\ndecay = 0.5\n') as swarm:
            await swarm.grow("a", "b")
            for outer_step in (1, 2):
                await step(swarm, outer_step)
            await swarm.start("c")
            await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
            await step(swarm, 3)
            await swarm.stop("a")
            await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
            await step(swarm, 4)
            begin = theta(0, schema_of(0))
            kept = [0.5 ** (5 - t) for t in (1, 2, 3, 4)]
            behind = sum(t * share for t, share in zip((1, 2, 3, 4), kept, strict=True)) / sum(kept)
            for each in swarm.running.values():
                for average, part in zip(each.parts[0].replica.outer.averaged, begin, strict=True):
                    torch.testing.assert_close(average, part - behind)

    run_held(body())


def test_a_member_that_accepts_no_connections_joins_holds_and_votes_and_never_owns_or_leads(tmp_path: Path) -> None:
    """As one behind a NAT: it dials all others, which find it by no address."""

    async def body() -> None:
        async with hosts(tmp_path, parts=3) as swarm:
            swarm.found()
            await swarm.start("a")
            await swarm.until(lambda: swarm.leader == "a", passes=1.0)
            await swarm.start("c", advertise="")
            await swarm.until(lambda: swarm.settled("ac"), passes=1.0)
            await swarm.start("b")
            await swarm.until(lambda: swarm.settled("abc"), passes=1.0)
            await swarm.until(lambda: {part.owner for part in swarm.record.parts} == {"a", "b"}, passes=3.0)
            assert not swarm.record.members["c"].reachable and swarm.record.members["c"].addresses == ()
            for part in range(3):
                await step(swarm, 1, part)
            await swarm.stop("a")
            await swarm.until(lambda: swarm.leader == "b" and swarm.owner() is not None, passes=1.0)
            await swarm.until(lambda: {part.owner for part in swarm.record.parts} == {"b"}, passes=1.0)
            await step(swarm, 2)
            await swarm.stop("b")
            loop, c = asyncio.get_running_loop(), swarm.running["c"]
            later = loop.time() + 10.0  # that is ten leases
            led = []
            await swarm.until(lambda: led.append(swarm.leader) or loop.time() > later, passes=10.0)
            assert {*led} == {""} and c.parts[0].engine is None
            await swarm.start("b")
            await swarm.until(lambda: swarm.leader == "b" and swarm.owner() is not None, passes=1.0)
            await step(swarm, 3)

    run_held(body())


def test_peers_attend_and_contribute_at_the_owner_and_take_its_update(tmp_path: Path) -> None:
    """Over the network, by the coordinator's own services; another host says who the owner is."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            async with swarm.peer("b", "peer") as lost:
                with contextlib.suppress(grpc.aio.AioRpcError):  # the refusal may come before the first message is written
                    await lost.open_stream()
                assert "part 0 is a's" in str(await lost._call.details())
            async with swarm.peer("a", "peer") as peer:
                await peer.attend()
                await peer.report(0)
                view = await peer.view(lambda view: view.round_id > 0)
                assert view.round_id == swarm.record.parts[0].grant * 1_000_000 + 1
                await peer.contribute(view.round_id, 0, ONES)
                after = await peer.view(lambda view: view.outer_step == 1)
                commit = await peer.fetch(1)
                assert after.digest == commit.digest
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
            assert swarm.taken[0, 1] == {commit.digest}

    run_held(body())


@pytest.mark.parametrize("returns", [True, False])
def test_the_next_owner_waits_for_those_who_contributed_before_it_opens_a_round(tmp_path: Path, returns: bool) -> None:
    """Else the first that is there again would be alone in the outer step. c is a member that is gone, and not waited for."""

    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            async with AsyncExitStack() as stack:
                peers = [await stack.enter_async_context(swarm.peer("a", name)) for name in ("p", "q", "c")]
                for peer in peers:
                    await peer.attend()
                    await peer.report(0)
                machine = swarm.running["a"].parts[0].engine.run.rounds.machine
                await swarm.until(lambda: machine.expected == {"p", "q", "c"})
                for peer in peers:
                    await peer.contribute(machine.round_id, 0, ONES)
                await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
            await swarm.stop("c")
            await swarm.until(lambda: not swarm.running["b"].links.connected & {"c"})
            swarm.running["a"].tell(ev.Disputed(0, swarm.record.parts[0].grant, "it is slow"))
            await swarm.until(lambda: swarm.record.parts[0].owner == "b" and swarm.owner() is not None, passes=0.1)
            machine = swarm.owner().parts[0].engine.run.rounds.machine
            async with swarm.peer("b", "p") as p, swarm.peer("b", "q") as q:
                await p.attend()
                await p.report(1)
                await swarm.until(lambda: machine.ready == {"p"})
                assert machine.round_id == 0
                if returns:
                    await q.attend()
                    await q.report(1)
                await swarm.until(lambda: machine.round_id, passes=0.0 if returns else 1.0)
                assert machine.expected == ({"p", "q"} if returns else {"p"})

    run_held(body())


def test_a_member_that_is_evicted_is_cut_off_as_a_peer_that_trains_too(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            async with swarm.peer("a", "c") as peer:
                await peer.attend()
                swarm.running["a"].tell(ev.Evict("c", "it lies"))
                assert (await peer.receive(Expel)).evicted
            await swarm.until(lambda: not swarm.running["a"].links.connected & {"c"})

    run_held(body())


def test_the_engines_are_in_the_records_phase_also_those_that_start_later(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b", "c")
            engine = swarm.owner().parts[0].engine
            swarm.running["a"].tell(ev.SetPhase(Phase.PAUSED))
            await swarm.until(lambda: engine.run.rounds.machine.phase.value == "paused")
            await swarm.stop("a")
            await swarm.until(lambda: swarm.leader and swarm.owner() is not None, passes=1.0)
            later = swarm.owner().parts[0].engine
            await swarm.until(lambda: later.run.rounds.machine.phase.value == "paused")
            swarm.running[swarm.leader].tell(ev.SetPhase(Phase.RUNNING))
            await swarm.until(lambda: later.run.rounds.machine.phase.value != "paused")
            await step(swarm, 1)
            swarm.running[swarm.leader].tell(ev.SetPhase(Phase.DRAINING))
            await swarm.until(lambda: later.phase is Phase.DRAINING)
            await step(swarm, 2)
            await swarm.until(lambda: swarm.record.phase is Phase.FINISHED)

    run_held(body())


def test_a_bug_ends_the_host_and_a_disk_that_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow("a", "b")
            a, b = swarm.running["a"], swarm.running["b"]

            def full(saved: Saved) -> None:
                raise StorageError("council.json: cannot be written (No space left on device)")

            monkeypatch.setattr(b._folder, "save", full)
            version = swarm.record.version
            a.tell(ev.SetPhase(Phase.PAUSED))
            with pytest.raises(StorageError, match="No space left"):
                await b.watch(asyncio.Event())
            assert b.council.committed is not None and b.council.committed.version == version, "it has not said that it has it"

            async def dial(peer_id: str, address: str, within_ms: int) -> None:
                raise ValueError("a bug")

            monkeypatch.setattr(a.links, "_dial", dial)
            a.links.reach({"c": ("127.0.0.1:1",)})
            with pytest.raises(LocalProtocolError, match="ValueError: a bug"):
                await a.watch(asyncio.Event())

    run_held(body())


def test_why_nothing_of_a_part_comes_is_said_once_of_each_owner_until_something_came(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        stopped: Any = SimpleNamespace(tell=lambda answer: None, gossip=None)
        part = host._HostedPart(0, schema_of(0), cast("PartReplica", None))

        async def pull(why: str) -> Offer:
            if why:
                raise TransportError(why)
            return cast("Offer", None)

        async def end(owner: str, why: str) -> None:
            task = asyncio.create_task(pull(why))
            await asyncio.wait([task])
            host.Host._pull_ended(stopped, part, owner, task)

        for owner, why in (*[("b", "expired")] * 3, ("c", "expired"), ("b", ""), ("b", "expired")):
            await end(owner, why)
        for _ in range(3):
            host.Host._say(stopped, part, ev.Failed(0, cast("ev.Fetch", None), "expired"), "d")

    with caplog.at_level(logging.INFO):
        run_held(body())
    assert caplog.messages == ["part 0: expired"] * 4


def test_of_two_processes_with_copies_of_one_folder_the_one_that_was_started_later_is_heard(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path) as swarm:
            await swarm.grow(*"abc")
            await swarm.stop("c")
            copies = tmp_path / "copies"
            shutil.copytree(swarm.path / "c", copies / "c")
            (copies / "run").symlink_to(swarm.path / "run")
            earlier = await swarm.start("c")
            try:
                await swarm.until(lambda: earlier.links.connected == {"a", "b"}, passes=1.0)
                swarm.path, swarm.running = copies, {name: swarm.running[name] for name in "ab"}
                later = await swarm.start("c")
                await swarm.until(lambda: later.links.connected == {"a", "b"} and len(earlier.links.refusals) == 2, passes=1.0)
                for _ in range(100):
                    await swarm.until(lambda: not earlier.links.connected, passes=1.0)
                    assert later.links.connected == {"a", "b"}
                    await swarm.pass_time(0.05)
                said = {str(error) for error in earlier.links.refusals.values()}
                assert said == {"another process was started later with the folder of c, or a copy of it"}
            finally:
                await earlier.close()
            await swarm.stop("c")
            await swarm.start("c")
            await swarm.until(lambda: swarm.running["c"].links.connected == {"a", "b"}, passes=1.0)

    run_held(body())
