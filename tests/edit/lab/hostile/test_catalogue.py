"""The behaviours of hostile members: drawn from a seed, and each of them does to a real coordinator what it says."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from aggregator.resources import Clock
from edit.lab.hostile import strangers
from edit.lab.hostile.catalogue import BEHAVIOURS
from edit.lab.hostile.home import HostileHome
from edit.lab.hostile.member import Attacker
from edit.lab.hostile.process import drawn
from edit.lab.observer import open_observer
from editpb.transport import guarded_calls
from tests.support.loops import on_a_loop, until
from tests.support.served import TOML, BarePeer, Served, found_run, new_folder, served, theta

WAIT_S = 60.0
# What the coordinator answers; where it answers nothing, what is seen at the coordinator (below).
ANSWERS = {
    "step-times": "INVALID_ARGUMENT",
    "huge-messages": "INVALID_ARGUMENT",
    "evicted-calls": "PERMISSION_DENIED",
    "unread-snapshots": "done",
    "unread-observer": "done",
    "tokens": "done",
    "bad-bytes": "INVALID_ARGUMENT",
    "random-bytes": "done",
    "noise": "done",
    "x100": "done",
    "x-3": "done",
    "not-finite": "done",
    "silent-connections": "done",
    "handshakes": "done",
    "silent-calls": "call UNAVAILABLE",
    "enrolments": "PERMISSION_DENIED",
}


def test_the_same_seed_gives_the_same_behaviours_and_each_occurs_before_any_occurs_again() -> None:
    names = list(BEHAVIOURS)
    of_seed = [[each.name for each in itertools.islice(drawn(seed, names), 3 * len(names))] for seed in (7, 7, 8)]
    assert of_seed[0] == of_seed[1] != of_seed[2]
    for start in range(0, 3 * len(names), len(names)):
        assert sorted(of_seed[0][start : start + len(names)]) == sorted(names)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_each_behaviour_says_in_one_line_what_it_does(name: str) -> None:
    assert BEHAVIOURS[name].text.endswith(".") and len(BEHAVIOURS[name].text) < 110


async def enrolled(run: Served, folder: Path) -> Attacker:
    home = HostileHome(folder)
    operator = open_observer(run.folder.path)
    try:
        await asyncio.to_thread(home.enrol, "eve", run.folder.path, operator)
    finally:
        operator.close()
    return Attacker(home, random.Random(1), Counter())


def seen(run: Served, name: str) -> bool:
    """Whether the coordinator has noticed the behaviour."""
    members, machine = run.coordinator.run.attendances.membership.members, run.coordinator.run.rounds.machine
    match name:
        case "heartbeats-only":
            return "eve" in members and (beat := members["eve"].heartbeat) is not None and beat.step_s == 0.01
        case "many-ranks":
            return any(member.peer_id == "eve" for member in run.coordinator.run.attendances)
        case "many-boxes" | "half-contributions":
            return run.coordinator.run.rounds.upload("eve")[1] > 0 and "eve" not in machine.arrived
    raise AssertionError(name)


async def commit(peer: BarePeer) -> int:
    """One round more with the honest peer in it; its outer step."""
    while True:
        view = await peer.view()
        await peer.report(view.outer_step, view.digest)
        view = await peer.view(lambda view: view.round_id > 0)
        try:
            await peer.contribute(view.round_id, view.outer_step, theta(view.outer_step + 1))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION  # the round was closed without it: a new one is open
            await peer.view(lambda later, before=view: later.round_id > before.round_id)
            continue
        view = await peer.view(lambda later, before=view: later.outer_step > before.outer_step)
        verdicts = {v.peer_id: v.weight for f in (await peer.fetch(view.outer_step)).fragments for v in f.verdicts}
        if verdicts.get("honest", 0.0) > 0:
            return view.outer_step


@pytest.mark.parametrize("name", [name for name, behaviour in BEHAVIOURS.items() if not behaviour.unfounded])
@on_a_loop
async def test_a_real_coordinator_meets_it_and_commits_what_an_honest_peer_contributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(strangers, "CONNECTIONS", 400)  # still more than a coordinator takes
    monkeypatch.setattr(guarded_calls, "REQUEST_S", 3.0)
    toml = TOML.replace("floor_s = 1000.0\nceiling_s = 1000.0", "floor_s = 0.2\nceiling_s = 0.5")
    toml = toml.replace("outer_steps = 100", "outer_steps = 1_000_000") + "[membership]\nlease_s = 600.0\n"
    async with served(new_folder(tmp_path / "run", toml=toml), Clock()) as run, run.peer("honest") as honest:
        await found_run(honest)
        attacker = await enrolled(run, tmp_path / "eve")
        behaving = asyncio.ensure_future(attacker.again_and_again(lambda: BEHAVIOURS[name].act(attacker)))
        async with asyncio.timeout(WAIT_S):
            noticed = asyncio.ensure_future(
                until(lambda: attacker.tally[ANSWERS[name]] > 0 if name in ANSWERS else seen(run, name))
            )
            while not noticed.done():
                assert not behaving.done()
                await commit(honest)
            await noticed
            await commit(honest)
        behaving.cancel()
        await asyncio.wait([behaving])
        assert behaving.cancelled()


@on_a_loop
async def test_an_attacker_that_is_stopped_stops_although_its_attendance_ends_in_the_same_moment(tmp_path: Path) -> None:
    """A TaskGroup with errors of its own forgets that it was cancelled."""
    attacker = Attacker(HostileHome(tmp_path), random.Random(1), Counter())
    began = asyncio.Event()

    async def refused() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("evicted")

    async def attempt() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(refused())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    behaving = asyncio.ensure_future(attacker.again_and_again(attempt))
    await began.wait()
    behaving.cancel()
    done, _ = await asyncio.wait([behaving], timeout=WAIT_S)
    assert done and behaving.cancelled()
