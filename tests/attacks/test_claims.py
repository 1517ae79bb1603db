"""What a member says of itself is a claim: it does not stall the run, slow the others or spoil what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.resources import Clock
from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import peer_message_to_pb
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb
from tests.support.served import TOML, BarePeer, Served, found_run, new_folder, served, theta

WAIT_S = 30.0


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now)


async def claim(peer: BarePeer, step_s: float, outer_step: int = 0) -> None:
    beat = Heartbeat(state=PeerState.TRAINING, outer_step=outer_step, step_s=step_s)
    await peer._call.write(peer_message_to_pb(beat))


async def status(at: Served) -> RunStatus:
    """What an observer is shown."""
    async with at.channel("watcher", "observer") as channel:
        return status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest()))


async def until(at: Served, condition: Callable[[], bool]) -> None:
    """Until a message that was sent is handled; asks the coordinator meanwhile, so it never spins."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await status(at)


def heard(at: Served, peer_id: str) -> float:
    beat = at.coordinator.run.attendances.membership.members[peer_id].heartbeat
    return beat.step_s if beat is not None else 0.0


@pytest.mark.parametrize("step_s", [1e300, 1e-300, 1e7, 1e-7])
def test_a_step_time_that_no_machine_has_ends_the_stream_of_the_peer_that_claims_it(tmp_path: Path, step_s: float) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as honest, at.peer("liar") as liar:
            await found_run(honest)
            await liar.attend()
            await claim(liar, step_s)
            members = at.coordinator.run.attendances.membership.members
            await until(at, lambda: not members["liar"].live or heard(at, "liar") > 0)
            assert not members["liar"].live
            assert "step_s is" in members["liar"].reason and "1e-06 to 1e+06" in members["liar"].reason

    asyncio.run(scenario())


def test_a_claimed_step_time_holds_no_round_up_beyond_the_ceiling(tmp_path: Path) -> None:
    async def scenario() -> None:
        hands, toml = Hands(), TOML.replace("floor_s = 1000.0\nceiling_s = 1000.0", "floor_s = 1.0\nceiling_s = 60.0")
        folder = new_folder(tmp_path / "run", toml=toml, start=2)
        async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("liar") as liar:
            await honest.attend()
            await honest.view(lambda view: view.found)
            await honest.found(theta())
            await honest.report(0)
            await liar.attend()
            await claim(liar, 1e6)
            view = await honest.view(lambda view: view.round_id > 0)
            machine = at.coordinator.run.rounds.machine
            assert machine.expected == {"a", "liar"}
            assert machine.deadline == hands.now + 60.0
            await honest.contribute(view.round_id, 0, theta(1))
            hands.now += 61.0
            assert (await honest.view(lambda view: view.outer_step == 1)).outer_step == 1

    asyncio.run(scenario())


def test_a_claimed_speed_does_not_make_every_other_peer_take_one_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        hands, toml = Hands(), TOML.replace("every = 2", "every = 100\ndylu = true")
        folder = new_folder(tmp_path / "run", toml=toml, start=3, quorum=2)
        async with served(folder, hands.clock()) as at, at.peer("a") as a, at.peer("b") as b, at.peer("liar") as liar:
            await a.attend()
            await a.view(lambda view: view.found)
            await a.found(theta())
            await b.attend()
            await liar.attend()
            for peer, step_s in ((a, 0.1), (b, 0.1), (liar, 1e-6)):
                await claim(peer, step_s)
                await until(at, lambda peer=peer, step_s=step_s: heard(at, peer.peer_id) == step_s)
            view = await a.view(lambda view: view.round_id > 0)
            hands.now += 1.0
            for peer in (a, b, liar):
                await peer.contribute(view.round_id, 0, theta(1))
            assert (await a.view(lambda view: view.outer_step == 1)).inner_steps == 100
            assert (await b.view(lambda view: view.outer_step == 1)).inner_steps == 100

    asyncio.run(scenario())


def test_a_peer_that_only_reports_costs_two_deadlines_and_is_shown_as_optional(tmp_path: Path) -> None:
    async def scenario() -> None:
        hands, toml = Hands(), TOML.replace("floor_s = 1000.0\nceiling_s = 1000.0", "floor_s = 1.0\nceiling_s = 60.0")
        toml += "[membership]\nlease_s = 1000.0\n"  # the clock jumps, and nobody is lost by that
        folder = new_folder(tmp_path / "run", toml=toml, start=2)
        async with served(folder, hands.clock()) as at, at.peer("a") as honest, at.peer("idle") as idle:
            await honest.attend()
            await honest.view(lambda view: view.found)
            await honest.found(theta())
            await idle.attend()
            for step in range(4):
                await honest.report(step)
                await idle.report(step)
                view = await honest.view(lambda view, step=step: view.outer_step == step and view.round_id > 0)
                if step < 2:
                    machine = at.coordinator.run.rounds.machine
                    await until(at, lambda machine=machine: machine.expected == {"a", "idle"})
                await honest.contribute(view.round_id, step, theta(1))
                hands.now += 61.0 if step < 2 else 0.0
                await honest.view(lambda view, step=step: view.outer_step == step + 1)
            members = {member.peer_id: member for member in (await status(at)).members}
            assert members["idle"].optional and not members["a"].optional
            assert members["idle"].absences == 2

    asyncio.run(scenario())
